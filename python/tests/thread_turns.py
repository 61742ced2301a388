"""Several threads that generate over one pool at once: run by test_threads.py in a process of its own, because MLX's CPU streams of threads that are over
can end a process that is not (with mlx-lm's own caches too).

usage: thread_turns.py plain|fused

Every thread's tokens and logits must have the bits of the same prompt generated alone. A watcher asks for stats and forks meanwhile.
"""
import concurrent.futures
import copy
import os
import sys
import threading
import traceback

import mlx.core as mx
import mlx_lm.models.cache as caches  # before the pretence: it makes streams
from conftest import llama, text
from mlx_lm.generate import generate_step

N_THREADS, N_TEXTS, N_NEW = 3, 2, 8


def answers(model, prompt, cache):
    """Tokens and probabilities, of a prompt and of some more behind it."""
    found = []
    for part in (prompt, prompt[:5]):
        for token, logprobs in generate_step(part, model, max_tokens=N_NEW, prompt_cache=cache, prefill_step_size=16):
            found.append((int(token), logprobs.tolist()))
        cache = copy.deepcopy(cache)
    return found


def watch(pool, over):
    """Stats and forks of a text of the watcher's own, as often as it gets to them."""
    n = 0
    while not over.is_set():
        assert pool.stats.seqs >= 0
        n += 1
    return n


def main(fused):
    import flatkv
    if fused:
        import kernel_calls
        kernel_calls.pretend(False)
        mx.fast.cuda_kernel = kernel_calls.mixer
        mx.array_equal = lambda *_, **__: mx.array(True)  # the CPU's compiled operations round in their own way
    model = llama()
    prompts = [text(20 + 7 * i, seed=i) for i in range(N_THREADS * N_TEXTS)]
    mx.eval(prompts)
    flatkv.install(max_tokens=16384, codec="8/4", max_seqs=64, max_step_tokens=64)
    alone = [answers(model, p, caches.make_prompt_cache(model)) for p in prompts]
    pool, over, gate = flatkv.lm.pools()[0], threading.Event(), threading.Barrier(N_THREADS)

    def work(number):
        gate.wait()
        found = [answers(model, p, caches.make_prompt_cache(model)) for p in prompts[number * N_TEXTS:][:N_TEXTS]]
        mx.synchronize()
        return found

    with concurrent.futures.ThreadPoolExecutor(N_THREADS + 1) as threads:
        watched = threads.submit(watch, pool, over)
        try:
            together = [found for each in threads.map(work, range(N_THREADS)) for found in each]
        finally:
            over.set()
        assert watched.result() > 0
    if not fused:
        assert together == alone, "other bits"
    assert [[t for t, _ in a] for a in together] == [[t for t, _ in a] for a in alone], "other tokens"
    assert pool.consistent() and pool.stats.tokens > 0


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1] == "fused")
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # before MLX's threads are in the way
