"""What flatkv hands to mx.fast.metal_kernel and cuda_kernel, without a GPU: run by test_kernels.py, a process for each call.

usage: kernel_calls.py metal|cuda CODEC     a prefill and a decode step of two layers
       kernel_calls.py generate             mlx-lm's generate_step and a fork, on "CUDA"
       kernel_calls.py replay               decode steps whose graph is kept beside those that are built anew, on "CUDA"

MLX says here that its device is a GPU. Metal kernels are MLX's own, built into the graph of a function that is being exported and never
runs; those of CUDA, which a build without it refuses to make, are recorders that answer with zeros.
"""
import copy
import math
import os
import re
import sys
import tempfile

import mlx.core as mx
import mlx_lm.models.cache as caches  # before the pretence: it makes streams
from conftest import text
from mlx_lm.generate import generate_step

MAKER = {"name", "input_names", "output_names", "source", "header", "ensure_row_contiguous"}
CALL = {"inputs", "grid", "threadgroup", "output_shapes", "output_dtypes"}
calls = []  # (the kernel's name, its inputs by name, its output)
texts = {}


class Gpu:
    type = mx.gpu


class Enough(Exception):
    """Everything is built: the graph need not be written."""


def checked(extra, maker):
    """A maker of kernels that looks at what it and its kernels are given."""
    def make(**named):
        assert set(named) == MAKER | {extra}, named.keys()
        assert named["ensure_row_contiguous"] is True and len(named["output_names"]) == 1
        header = named["header"]
        if extra == "shared_memory" and sys.platform == "linux":  # CUDA: MLX hashes the text at every call, so it is a line
            assert re.fullmatch(r'#include "/proc/self/fd/\d+"\n', header) and len(named["source"]) < 1000, header
            with open(header.split('"')[1], encoding="utf-8") as file:
                header = file.read()
        assert "fkv" in header and texts.setdefault(named["name"], header + named["source"]) == header + named["source"]
        kernel = maker(**named)

        def call(**given):
            assert set(given) == CALL, given.keys()
            assert len(given["inputs"]) == len(named["input_names"]) and all(type(a) is mx.array for a in given["inputs"])
            assert len(given["output_shapes"]) == len(given["output_dtypes"]) == 1
            grid, group = given["grid"], given["threadgroup"]
            assert len(grid) == len(group) == 3 and all(g > 0 and g % t == 0 for g, t in zip(grid, group)), (grid, group)
            out = kernel(**given)
            calls.append((named["name"], dict(zip(named["input_names"], given["inputs"])), out[0]))
            return out

        return call

    return make


def pretend(metal):
    default_stream = mx.default_stream
    mx.default_device = lambda: Gpu
    mx.default_stream = lambda _: default_stream(mx.cpu)
    mx.metal.is_available = lambda: metal
    mx.fast.metal_kernel = checked("atomic_outputs", mx.fast.metal_kernel)
    mx.fast.cuda_kernel = checked("shared_memory", lambda **_: lambda **given: [mx.zeros(given["output_shapes"][0], given["output_dtypes"][0])])


def tickets(call):
    return [a for name, a in call[1].items() if name in ("after", "before")]


def steps(metal, codec):
    import flatkv
    from flatkv.mlx_cache import MlxCache
    cache = MlxCache([flatkv.Layer(4, 2, 64)] * 2, max_tokens=1024, max_step_tokens=256, codec=codec, rotate="kv")
    seq, sealed = cache.open(), codec != "8/4"
    assert cache.fused and cache.stats.isa == f"mlx {'metal' if metal else 'cuda'}"

    def a_step(k, v, q):
        with cache.step([(seq, len(k))]) as step:
            out = []
            for layer in range(2):
                step.write(layer, k, v)
                out.append(step.attend(layer, q))
                assert out[-1].shape == q.shape and out[-1].dtype == q.dtype
            out += step.pending()
        if metal:
            raise Enough
        return out

    for n in (200, 1):
        rows = [mx.zeros((n, heads, 64), mx.bfloat16) for heads in (2, 2, 4)]
        calls.clear()
        with tempfile.TemporaryDirectory() as folder:
            try:
                mx.export_function(os.path.join(folder, "graph.mlxfn"), a_step, *rows) if metal else mx.eval(a_step(*rows))
            except Enough:
                pass
        per_layer = 3 if n == 1 or sealed else 2  # write, decode, merge; write, (seal,) prefill
        assert len(calls) == 2 * per_layer and [c[0] for c in calls[:per_layer]] == [c[0] for c in calls[per_layer:]], [c[0] for c in calls]
        write, attend = calls[0], calls[1 if n == 1 else per_layer - 1]
        last_write = calls[1] if sealed and n > 1 else write
        assert any(t is last_write[2] for t in tickets(attend)), "attention does not wait for the write"
        assert any(a is write[1]["pool"] for a in attend[1].values()), "attention reads another pool"
    assert len(seq) == 201 and cache.consistent()


def generate():
    from conftest import llama

    import flatkv
    model = llama()
    flatkv.install(max_tokens=1024, codec="8/4", max_step_tokens=64)
    cache = caches.make_prompt_cache(model)
    pool = flatkv.lm.pools()[0]
    assert pool.fused
    assert len(list(generate_step(text(100), model, max_tokens=5, prompt_cache=cache, prefill_step_size=64))) == 5
    fork = copy.deepcopy(cache)
    list(generate_step(text(3), model, max_tokens=2, prompt_cache=fork))
    assert pool.stats.page_copies > 0 and pool.consistent()
    assert not pool._waits, "kernels are ordered by their tickets: nothing has to be evaluated between passes"
    for call in calls:
        assert "pool" not in call[1] or tickets(call), call[0]


def mixer(input_names, **_):
    """In the place of a kernel: numbers that depend on every input and on its place, and on nothing else. Tickets are floats here."""
    def call(inputs, output_shapes, output_dtypes, **_):
        total = mx.array(0.5)
        for i, (name, a) in enumerate(zip(input_names, inputs)):
            numbers = a.view(mx.float32) if name in ("after", "before") else a.astype(mx.float32) / 64
            total = mx.sin(total + (i + 1) * mx.sin(numbers.mean()))
        out = mx.cos(mx.arange(math.prod(output_shapes[0])) % 7 + total).reshape(output_shapes[0])
        return [out.view(mx.uint32) if output_dtypes[0] == mx.uint32 else out.astype(output_dtypes[0])]

    return call


def tokens_of(model, prompt, n, cache):
    found = []
    for token, logprobs in generate_step(prompt, model, max_tokens=n, prompt_cache=cache, prefill_step_size=64):
        found.append((int(token), logprobs))
    return found


def story(model, compile):
    """What mlx-lm does with caches, on one model; every answer, and how many graphs were traced."""
    import flatkv
    flatkv.install(max_tokens=4096, max_step_tokens=64, max_seqs=8, compile=compile)
    call = type(model).__call__
    cache = caches.make_prompt_cache(model)
    pool = flatkv.lm.pools()[0]
    answers = tokens_of(model, text(50), 40, cache)  # over the end of a page
    fork = copy.deepcopy(cache)
    caches.trim_prompt_cache(cache, 7)
    answers += tokens_of(model, text(1, seed=5), 6, cache) + tokens_of(model, text(3, seed=6), 6, fork)
    both = [type(a).merge([a, b]) for a, b in zip(cache, fork)]
    for i in range(5):
        logits = model(mx.array([[i], [7]]), cache=both)
        answers.append((0, logits))
    model.model.norm.weight = model.model.norm.weight * 2  # seen by the next step
    answers.append((0, model(mx.array([[1], [2]]), cache=both)))
    kept = 96 if cache[0].window == 0 and cache[1].window == 0 else 103  # windows are not trimmed
    assert [c.offset.tolist() for c in both] == [[kept, 105]] * len(both), [c.offset.tolist() for c in both]
    assert pool.consistent() and pool.stats.aborts == (2 if compile else 0), pool.stats  # the first pass of one text, and of two
    replays = flatkv.lm.hook._now.replays
    kept = list(replays._kept[pool].values()) if compile else []
    assert all(not k.refused and k.graphs for k in kept), "refused"
    flatkv.uninstall()
    assert type(model).__call__ is call
    model.model.norm.weight = model.model.norm.weight / 2
    return answers


def replay():
    import gc
    import warnings
    import weakref
    from conftest import gemma3, llama

    import flatkv
    mx.fast.cuda_kernel = mixer
    mx.array_equal = lambda a, b, **_: mx.allclose(a, b, atol=1e-3)  # the CPU's compiled operations round in their own way
    for model in (llama(), gemma3()):
        warnings.simplefilter("error")
        for (a, one), (b, other) in zip(story(model, False), story(model, True)):
            assert a == b and mx.allclose(one, other, atol=1e-2), (a, b, mx.abs(one - other).max())

    curious = llama()
    plain = type(curious).__call__
    curious.__class__ = type("Curious", (type(curious),), {"__call__": lambda self, inputs, cache=None: plain(self, inputs, cache=cache) + cache[0].size()})
    flatkv.install(max_tokens=1024)
    cache = caches.make_prompt_cache(curious)
    mx.eval(curious(text(5)[None], cache=cache))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sizes = [int(mx.round((curious(mx.array([[1]]), cache=cache)).max()).item()) for _ in range(4)]
    assert len(told) == 1 and "size" in str(told[0].message), [str(t.message) for t in told]
    assert sizes == list(range(sizes[0], sizes[0] + 4)) and cache[0].offset == 9
    gone = weakref.ref(curious)
    del curious, cache
    gc.collect()
    assert gone() is None and not flatkv.lm.pools(), "a kept graph holds its model"


if __name__ == "__main__":
    pretend(sys.argv[1] == "metal")
    if sys.argv[1] in ("generate", "replay"):
        generate() if sys.argv[1] == "generate" else replay()
    else:
        steps(sys.argv[1] == "metal", sys.argv[2])
    assert calls or sys.argv[1] == "replay"
