"""Generates in several threads over one pool and compares with serial generation.

usage: thread_turns.py plain|fused

test_threads.py runs this script in a separate process, because MLX's CPU streams of finished threads can abort the process (also with
mlx-lm's own caches). Tokens and log-probabilities must be bit-identical. Another thread reads statistics at the same time.
"""
import concurrent.futures
import copy
import os
import sys
import threading
import traceback

import mlx.core as mx
import mlx_lm.models.cache as caches  # imported before the device is replaced, because it creates streams
from conftest import llama, random_tokens
from mlx_lm.generate import generate_step

N_THREADS, N_PROMPTS, N_NEW = 3, 2, 8


def generated(model, prompt, cache):
    """Returns tokens and log-probabilities of a prompt and of a continuation."""
    results = []
    for part in (prompt, prompt[:5]):
        for token, logprobs in generate_step(part, model, max_tokens=N_NEW, prompt_cache=cache, prefill_step_size=16):
            results.append((int(token), logprobs.tolist()))
        cache = copy.deepcopy(cache)
    return results


def watch(pool, done):
    """Reads statistics until done is set. Returns the number of reads."""
    n = 0
    while not done.is_set():
        assert pool.stats.seqs >= 0
        n += 1
    return n


def main(fused):
    import flatkv
    if fused:
        import kernel_calls
        kernel_calls.emulate_gpu(False)
        mx.fast.cuda_kernel = kernel_calls.mixer
        mx.array_equal = lambda *_, **__: mx.array(True)  # compiled CPU operations round differently
    model = llama()
    prompts = [random_tokens(20 + 7 * i, seed=i) for i in range(N_THREADS * N_PROMPTS)]
    mx.eval(prompts)
    flatkv.install(max_tokens=16384, codec="8/4", max_seqs=64, max_step_tokens=64)
    serial = [generated(model, p, caches.make_prompt_cache(model)) for p in prompts]
    pool, done, barrier = flatkv.lm.pools()[0], threading.Event(), threading.Barrier(N_THREADS)

    def work(number):
        barrier.wait()
        results = [generated(model, p, caches.make_prompt_cache(model)) for p in prompts[number * N_PROMPTS:][:N_PROMPTS]]
        mx.synchronize()
        return results

    with concurrent.futures.ThreadPoolExecutor(N_THREADS + 1) as threads:
        watched = threads.submit(watch, pool, done)
        try:
            parallel = [result for results in threads.map(work, range(N_THREADS)) for result in results]
        finally:
            done.set()
        assert watched.result() > 0
    if not fused:
        assert parallel == serial, "log-probabilities differ"
    assert [[t for t, _ in a] for a in parallel] == [[t for t, _ in a] for a in serial], "tokens differ"
    assert pool.consistent() and pool.stats.tokens > 0


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1] == "fused")
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # skips the destructors of MLX's threads, which can abort
