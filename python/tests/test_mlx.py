"""Tests MlxCache against MLX's attention and against host caches."""
import gc
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
import flatkv  # noqa: E402
from flatkv.mlx_cache import MlxCache  # noqa: E402

H, G, D = 8, 2, 64
LAYER = flatkv.Layer(H, G, D)


def rows(n, heads, seed):
    return np.random.default_rng(seed).standard_normal((n, heads, D)).astype(np.float32)


def mlx_attention(q, k, v, start):
    mask = mx.arange(start, start + len(q))[:, None] >= mx.arange(len(k))[None]
    heads_first = [x.swapaxes(0, 1)[None] for x in (q, k, v)]
    return mx.fast.scaled_dot_product_attention(*heads_first, scale=D**-0.5, mask=mask)[0].swapaxes(0, 1)


def run(cache, seq, k, v, q, cuts):
    out = []
    for first, end in zip(cuts, cuts[1:]):
        with cache.step([(seq, end - first)]) as step:
            step.write(0, k[first:end], v[first:end])
            out.append(step.attend(0, q[first:end]))
            mx.eval(out[-1], step.pending())
    return mx.concatenate(out)


@pytest.mark.parametrize("codec,rotate,limit", [("16/16", None, 2e-3), ("8/8", None, 2e-2), ("8/4", "kv", 0.15), ("4/4g32", "kv", 0.2)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_attention_matches_mlx(codec, rotate, limit, dtype):
    k, v, q = (mx.array(rows(101, heads, s)).astype(getattr(mx, dtype)) for heads, s in ((G, 1), (G, 2), (H, 3)))
    cache = MlxCache(LAYER, max_tokens=256, codec=codec, rotate=rotate)
    out = run(cache, cache.open(), k, v, q, [0, 60, 100, 101])
    assert out.dtype == q.dtype
    want = mlx_attention(*(x.astype(mx.float32) for x in (q, k, v)), 0)
    relative = (mx.linalg.norm(out.astype(mx.float32) - want) / mx.linalg.norm(want)).item()
    assert relative < limit + (4e-3 if dtype == "bfloat16" else 0)


def test_files_move_from_mlx_to_the_host_and_back(tmp_path):
    k, v, q = rows(150, G, 1), rows(150, G, 2), rows(150, H, 3)
    on_mlx = MlxCache(LAYER, max_tokens=512, max_seqs=4)
    seq = on_mlx.open(200)
    run(on_mlx, seq, mx.array(k), mx.array(v), mx.array(q), [0, 100, 150])
    seq.save(tmp_path / "a.fkv", range(150))
    with flatkv.Cache(LAYER, max_tokens=512, max_seqs=4) as host:
        moved = host.load(tmp_path / "a.fkv", 200)
        moved.save(tmp_path / "b.fkv", range(150))
    assert (tmp_path / "a.fkv").read_bytes() == (tmp_path / "b.fkv").read_bytes()
    again = on_mlx.load(tmp_path / "b.fkv", 200)
    assert len(again) == 150 and on_mlx.consistent()


def test_active_memory_is_constant():
    small = flatkv.Layer(2, 1, D)
    before = mx.get_active_memory()
    cache = MlxCache([small] * 2, max_tokens=2048, max_step_tokens=256)
    assert mx.get_active_memory() - before <= cache.plan.total_bytes
    seq = cache.open()
    k, v, q = (mx.array(rows(256, heads, s)) for heads, s in ((1, 1), (1, 2), (2, 3)))
    mx.eval(k, v, q)
    mx.clear_cache()
    gc.collect()
    start, after = mx.get_active_memory(), []
    for _ in range(8):
        with cache.step([(seq, 256)]) as step:
            for layer in range(2):
                step.write(layer, k, v)
                out = step.attend(layer, q)
            mx.eval(out, step.pending())
        del out, step
        after.append(mx.get_active_memory() - start)
    assert len(seq) == 2048 and max(after) == min(after) <= 4096


def test_declarations_match_mlx_c():
    here = pathlib.Path(__file__).parent
    headers, compiler = here.parents[1] / "build" / "mlx" / "cpu" / "mlx" / "include", shutil.which("cc")
    if compiler is None or not headers.exists():
        pytest.skip("no compiler, or no mlx-c in the build tree (scripts/get-mlx)")
    subprocess.run([compiler, "-std=c17", "-Werror", "-fsyntax-only", f"-I{headers}", here / "mlx_interface.c"], check=True)


def test_invalid_rows_raise():
    cache = MlxCache(LAYER, max_tokens=256)
    seq = cache.open()
    with pytest.raises(flatkv.BadCall, match=r"MlxStep.write: k has shape \[3, 2, 32\]"), cache.step([(seq, 3)]) as step:
        step.write(0, mx.zeros((3, G, 32)), mx.zeros((3, G, D)))
    with pytest.raises(flatkv.BadCall, match="MLX type"), cache.step([(seq, 3)]) as step:
        step.write(0, mx.zeros((3, G, D), mx.int32), mx.zeros((3, G, D)))
    assert len(seq) == 0 and cache.consistent()


def test_dropped_sequences_are_closed():
    cache = MlxCache(LAYER, max_tokens=256, max_seqs=2)
    for _ in range(10):
        a, b = cache.open(64), cache.open(64)
        a.loop = a  # a reference cycle, which only the garbage collector frees
        del a, b
        gc.collect()
    assert cache.stats.seqs == 0 and cache.consistent()


def test_a_dropped_step_is_aborted_before_the_next_one():
    cache = flatkv.mlx_cache.MlxCache(LAYER, max_tokens=64)
    seq = cache.open(64)
    step = cache.step([(seq, 3)])
    del step
    run(cache, seq, *(mx.array(rows(3, heads, 1)) for heads in (G, G, H)), [0, 3])
    assert len(seq) == 3 and cache.stats.aborts == 1


def test_mlx_modules_are_imported_on_first_use():
    code = "import flatkv; assert flatkv.mlx_cache.MlxCache and flatkv.lm.install and not hasattr(flatkv, 'nothing')"
    subprocess.run([sys.executable, "-c", code], check=True)
