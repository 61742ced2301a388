"""Checks the calls of mx.fast.metal_kernel and mx.fast.cuda_kernel without a GPU. test_kernels.py runs it in a separate process.

usage: kernel_calls.py metal|cuda CODEC...  a prefill and a decode step of two layers
       kernel_calls.py generate             generate_step of mlx-lm and a fork, on an emulated CUDA device
       kernel_calls.py replay               compiled decode steps compared with uncompiled ones, on an emulated CUDA device

MLX's default device is replaced by a GPU object. Metal kernels are created by MLX inside the graph of an exported function, which never
runs. CUDA kernels, which MLX cannot create without CUDA, are replaced by functions that record their arguments and return zeros.
"""
import copy
import math
import os
import re
import sys
import tempfile

import mlx.core as mx
import mlx_lm.models.cache as caches  # imported before the device is replaced, because it creates streams
from conftest import random_tokens
from mlx_lm.generate import generate_step

MAKER = {"name", "input_names", "output_names", "source", "header", "ensure_row_contiguous"}
CALL = {"inputs", "grid", "threadgroup", "output_shapes", "output_dtypes"}
UPDATE_TABLE = "flatkv_update_table"  # the only kernel that does not access a pool
calls = []  # (kernel name, inputs by name, last output, on which later kernels depend)
sources = {}  # kernel source by kernel name


class Gpu:
    type = mx.gpu


class GraphBuilt(Exception):
    """Raised after the graph was built, so that it is not exported."""


def update_table(inputs, **_):
    """Computes the output of the kernel in src/mlx/mlx_table.c."""
    words = inputs[0].tolist()
    for run in inputs[1:]:
        first, stride, count, add = (int(n) for word in run.tolist() for n in (word & 0xffff, word >> 16))
        for i in range(first, first + stride * count, stride):
            words[i] += add - 0x10000 * (add >> 15)
    return [mx.array(words, mx.uint32)]


def checked(extra, maker):
    """Wraps a kernel constructor to check its arguments and those of its kernels."""
    def make(**named):
        assert set(named) == MAKER | {extra}, named.keys()
        if named["name"] == UPDATE_TABLE:
            return update_table
        assert named["ensure_row_contiguous"] is True and len(named["output_names"]) in (1, 2)
        header = named["header"]
        if extra == "shared_memory" and sys.platform == "linux":  # MLX hashes the CUDA source at every call, so the source must be short: it only includes a file
            assert re.fullmatch(r'#include "/proc/self/fd/\d+"\n', header) and len(named["source"]) < 1000, header
            with open(header.split('"')[1], encoding="utf-8") as file:
                header = file.read()
        assert "fkv" in header and sources.setdefault(named["name"], header + named["source"]) == header + named["source"]
        kernel = maker(**named)

        def call(**given):
            assert set(given) == CALL, given.keys()
            assert len(given["inputs"]) == len(named["input_names"]) and all(type(a) is mx.array for a in given["inputs"])
            assert len(given["output_shapes"]) == len(given["output_dtypes"]) == len(named["output_names"])
            grid, group = given["grid"], given["threadgroup"]
            assert len(grid) == len(group) == 3 and all(g > 0 and g % t == 0 for g, t in zip(grid, group)), (grid, group)
            out = kernel(**given)
            calls.append((named["name"], dict(zip(named["input_names"], given["inputs"])), out[-1]))
            return out

        return call

    return make


def emulate_gpu(metal):
    """Makes MLX report a GPU as its default device."""
    default_stream = mx.default_stream
    mx.default_device = lambda: Gpu
    mx.default_stream = lambda _: default_stream(mx.cpu)
    mx.metal.is_available = lambda: metal
    mx.fast.metal_kernel = checked("atomic_outputs", mx.fast.metal_kernel)
    mx.fast.cuda_kernel = checked("shared_memory", lambda **_: lambda **given: list(map(mx.zeros, given["output_shapes"], given["output_dtypes"])))


def dependencies(call):
    """Returns the dependency inputs of a kernel call."""
    return [a for name, a in call[1].items() if name.startswith("after")]


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
            raise GraphBuilt
        return out

    for n in (200, 1):
        rows = [mx.zeros((n, heads, 64), mx.bfloat16) for heads in (2, 2, 4)]
        calls.clear()
        with tempfile.TemporaryDirectory() as folder:
            try:
                mx.export_function(os.path.join(folder, "graph.mlxfn"), a_step, *rows) if metal else mx.eval(a_step(*rows))
            except GraphBuilt:
                pass
        # Prefill: write, seal (only sealed pages), prefill. Decode: write and decode; Metal merges the splits in a third kernel.
        per_layer = (3 if sealed else 2) if n > 1 else (3 if metal else 2)
        assert len(calls) == 2 * per_layer and [c[0] for c in calls[:per_layer]] == [c[0] for c in calls[per_layer:]], [c[0] for c in calls]
        write, attend = calls[0], calls[1 if n == 1 else per_layer - 1]
        last_write = calls[1] if sealed and n > 1 else write
        assert any(t is last_write[2] for t in dependencies(attend)), "attention does not depend on the write"
        assert any(a is write[1]["pool"] for a in attend[1].values()), "attention reads a different pool"
    assert len(seq) == 201 and cache.consistent()


def generate():
    from conftest import llama

    import flatkv
    model = llama()
    flatkv.install(max_tokens=1024, codec="8/4", max_step_tokens=64)
    cache = caches.make_prompt_cache(model)
    pool = flatkv.lm.pools()[0]
    assert pool.fused
    assert len(list(generate_step(random_tokens(100), model, max_tokens=5, prompt_cache=cache, prefill_step_size=64))) == 5
    fork = copy.deepcopy(cache)
    list(generate_step(random_tokens(3), model, max_tokens=2, prompt_cache=fork))
    assert pool.stats.page_copies > 0 and pool.consistent()
    assert not pool._unevaluated, "dependency arrays order the kernels, so nothing has to be evaluated between passes"
    for call in calls:
        assert "pool" not in call[1] or dependencies(call), call[0]


def mixer(name, input_names, **_):
    """Replaces a kernel by a deterministic function of all inputs and their order. Dependency arrays contain floats."""
    if name == UPDATE_TABLE:
        return update_table

    def call(inputs, output_shapes, output_dtypes, **_):
        means = [(a.view(mx.float32) if name.startswith("after") else a.astype(mx.float32)).mean() for name, a in zip(input_names, inputs)]
        # matrix products, because mx.compile fuses elementwise operations into C++ functions that take seconds to build
        total = mx.stack(means)[None] @ (1.0 / mx.arange(64, 64 + len(means)))[:, None]
        results = []
        for shape, dtype in zip(output_shapes, output_dtypes):
            out = (mx.ones((math.prod(shape), 1)) @ mx.sin(total)).reshape(shape)
            results.append(out.view(mx.uint32) if dtype == mx.uint32 else out.astype(dtype))
        return results

    return call


def generated(model, prompt, n, cache):
    results = []
    for token, logprobs in generate_step(prompt, model, max_tokens=n, prompt_cache=cache, prefill_step_size=64):
        results.append((int(token), logprobs))
    return results


def scenario(model, compile):
    """Runs the cache operations of mlx-lm on one model and returns all results."""
    import flatkv
    flatkv.install(max_tokens=4096, max_step_tokens=64, max_seqs=8, compile=compile)
    call = type(model).__call__
    cache = caches.make_prompt_cache(model)
    pool = flatkv.lm.pools()[0]
    results = generated(model, random_tokens(50), 40, cache)  # crosses a page boundary
    fork = copy.deepcopy(cache)
    caches.trim_prompt_cache(cache, 7)
    results += generated(model, random_tokens(1, seed=5), 6, cache) + generated(model, random_tokens(3, seed=6), 6, fork)
    both = [type(a).merge([a, b]) for a, b in zip(cache, fork)]
    for i in range(5):
        logits = model(mx.array([[i], [7]]), cache=both)
        results.append((0, logits))
    model.model.norm.weight = model.model.norm.weight * 2  # the next step must use the new weight
    results.append((0, model(mx.array([[1], [2]]), cache=both)))
    length = 96 if cache[0].window == 0 and cache[1].window == 0 else 103  # windowed layers cannot be trimmed
    assert [c.offset.tolist() for c in both] == [[length, 105]] * len(both), [c.offset.tolist() for c in both]
    assert pool.consistent() and pool.stats.aborts == (2 if compile else 0), pool.stats  # aborted steps: the first pass of batch size 1 and that of batch size 2
    decode_graphs = flatkv.lm.hook._installation.decode_graphs
    graphs = list(decode_graphs._by_pool[pool].values()) if compile else []
    assert all(not g.disabled and g.graphs for g in graphs), "compilation was disabled"
    flatkv.uninstall()
    assert type(model).__call__ is call
    model.model.norm.weight = model.model.norm.weight / 2
    return results


def replay():
    import gc
    import warnings
    import weakref
    from conftest import gemma3, llama

    import flatkv
    mx.fast.cuda_kernel = mixer
    mx.array_equal = lambda a, b, **_: mx.allclose(a, b, atol=1e-3)  # compiled CPU operations round differently
    for model in (llama(), gemma3()):
        warnings.simplefilter("error")
        for (a, one), (b, other) in zip(scenario(model, False), scenario(model, True)):
            assert a == b and mx.allclose(one, other, atol=1e-2), (a, b, mx.abs(one - other).max())

    size_reader = llama()
    plain = type(size_reader).__call__
    size_reader.__class__ = type("SizeReader", (type(size_reader),), {"__call__": lambda self, inputs, cache=None: plain(self, inputs, cache=cache) + cache[0].size()})
    flatkv.install(max_tokens=1024)
    cache = caches.make_prompt_cache(size_reader)
    mx.eval(size_reader(random_tokens(5)[None], cache=cache))
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        sizes = [int(mx.round((size_reader(mx.array([[1]]), cache=cache)).max()).item()) for _ in range(4)]
    assert len(issued) == 1 and "size" in str(issued[0].message), [str(w.message) for w in issued]
    assert sizes == list(range(sizes[0], sizes[0] + 4)) and cache[0].offset == 9
    model_ref = weakref.ref(size_reader)
    del size_reader, cache
    gc.collect()
    assert model_ref() is None and not flatkv.lm.pools(), "a compiled graph keeps its model alive"


if __name__ == "__main__":
    emulate_gpu(sys.argv[1] == "metal")
    if sys.argv[1] in ("generate", "replay"):
        generate() if sys.argv[1] == "generate" else replay()
    else:
        for codec in sys.argv[2:]:
            steps(sys.argv[1] == "metal", codec)
    assert calls or sys.argv[1] == "replay"
