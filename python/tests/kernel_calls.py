"""What flatkv hands to mx.fast.metal_kernel and cuda_kernel, without a GPU: run by test_kernels.py, a process for each call.

usage: kernel_calls.py metal|cuda CODEC     a prefill and a decode step of two layers
       kernel_calls.py generate             mlx-lm's generate_step and a fork, on "CUDA"

MLX says here that its device is a GPU. Metal kernels are MLX's own, built into the graph of a function that is being exported and never
runs; those of CUDA, which a build without it refuses to make, are recorders that answer with zeros.
"""
import copy
import os
import re
import sys
import tempfile

import mlx.core as mx
import mlx_lm.models.cache as caches  # before the pretence: it makes streams
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
    mx.default_device = lambda: Gpu
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
    from conftest import llama, text

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


if __name__ == "__main__":
    pretend(sys.argv[1] == "metal")
    generate() if sys.argv[1] == "generate" else steps(sys.argv[1] == "metal", sys.argv[2])
    assert calls
