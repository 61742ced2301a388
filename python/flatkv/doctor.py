"""Checks flatkv on this machine and prints one page that can be pasted into a report: versions, kernels against the truth, memory, speed."""
from __future__ import annotations

import argparse
import ctypes as C
import importlib.metadata
import platform
import sys
import time
from typing import Any, Callable

import numpy as np

import flatkv

from . import _library
from ._library import host

HEADS, KV_HEADS, DIM, TOKENS = 8, 2, 128, 700
LIMITS = {"16/16": 2e-3, "8/8": 2e-2, "8/4": 0.15, "4/4": 0.25}  # of the answer's relative L2 to plain attention over normal rows
LAYER = flatkv.Layer(HEADS, KV_HEADS, DIM)


def truth(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention in double. [T, H, D]"""
    per = q.shape[1] // k.shape[1]
    scores = np.einsum("thd,shd->hts", q.astype(float), np.repeat(k, per, 1).astype(float)) / np.sqrt(q.shape[2])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), np.repeat(v, per, 1).astype(float))


def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    made = [random.standard_normal((TOKENS, heads, DIM)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return made[0], made[1], made[2]


def through(cache: Any, as_array: Callable[[Any], Any], finish: Callable[..., None]) -> np.ndarray:
    """The answers of a cache to rows() in a chunk, a smaller one and single tokens."""
    q, k, v = map(as_array, rows())
    out, seq, cuts = [], cache.open(), [0, 512, TOKENS - 4, *range(TOKENS - 3, TOKENS + 1)]
    for a, b in zip(cuts, cuts[1:]):
        with cache.step([(seq, b - a)]) as step:
            step.write(0, k[a:b], v[a:b])
            answer = step.attend(0, q[a:b])
            finish(answer, step)
            out.append(np.array(answer))
    return np.concatenate(out)


class Page:
    """Lines of the report, and whether all of them are good."""

    good = True

    def line(self, name: str, text: str, good: bool | None = None) -> None:
        mark = "" if good is None else "ok    " if good else "WRONG "
        self.good = self.good and good is not False
        print(f"{name:24}{mark}{text}", flush=True)

    def kernels(self, name: str, make: Callable[[str], Any], as_array: Any, finish: Any) -> None:
        want = truth(*rows())
        for codec, limit in LIMITS.items():
            try:
                got = through(make(codec), as_array, finish)
                wrong = float(np.linalg.norm(got - want) / np.linalg.norm(want))
                self.line(f"{name} {codec}", f"relative error {wrong:.1e}, allowed {limit:.0e}", wrong < limit)
            except Exception as error:  # a report says what happened, whatever it is
                self.line(f"{name} {codec}", f"{type(error).__name__}: {error}", False)


def on_mlx(page: Page) -> None:
    import mlx.core as mx

    from .mlx_cache import MlxCache
    probe = MlxCache(LAYER, max_tokens=64)
    way = "flatkv's kernels" if probe.fused else "MLX's operations"
    page.line("MLX runs", f"{way} on {mx.default_device()} ({probe.stats.isa})")
    probe.close()
    page.kernels("MLX", lambda codec: MlxCache(LAYER, max_tokens=1024, codec=codec, rotate="kv"), mx.array,
                 lambda answer, step: mx.eval(answer, step.pending()))
    memory_and_speed(page, MlxCache([LAYER] * 4, max_tokens=8192, max_step_tokens=512))


def active_memory() -> int:
    """What MLX holds once it has let go of what it computed: a GPU's queue does that a moment after an evaluation."""
    import mlx.core as mx
    mx.synchronize()
    seen = [mx.get_active_memory()]
    while len(seen) < 20 and (len(seen) < 3 or seen[-1] != seen[-3]):
        time.sleep(0.002)
        seen.append(mx.get_active_memory())
    return seen[-1]


def memory_and_speed(page: Page, cache: Any) -> None:
    import mlx.core as mx
    seq, (q, k, v) = cache.open(), (mx.array(x[:512]) for x in rows())
    mx.eval(q, k, v)

    def seconds(n: int) -> float:
        began = time.perf_counter()
        with cache.step([(seq, n)]) as step:
            for layer in range(4):
                step.write(layer, k[:n], v[:n])
                out = step.attend(layer, q[:n])
            mx.eval(out, step.pending())
        return time.perf_counter() - began

    seconds(512)  # the first ones compile
    seconds(1)
    mx.clear_cache()
    start, moved, times = active_memory(), 0, []
    for _ in range(7):
        times.append(seconds(512))
        moved = max(moved, active_memory() - start)
    page.line("MLX prefill", f"{512 / sorted(times)[3]:,.0f} tokens a second, 4 layers of {HEADS}/{KV_HEADS}/{DIM}")
    page.line("MLX memory", f"moved {moved} bytes over {7 * 512} tokens", moved <= 1 << 16)
    decode = sorted(seconds(1) for _ in range(11))[5]
    page.line("MLX decode", f"{decode / 4 * 1e6:,.0f} us a layer at {len(seq)} tokens, one step at a time")


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m flatkv doctor", description=__doc__).parse_args(arguments)
    page = Page()
    page.line("flatkv", f"{flatkv.__version__}, models: {'yes' if _library.has_models else 'no'}")
    page.line("machine", f"{platform.platform()}, {platform.machine()}, Python {platform.python_version()}")
    source = C.c_char_p()
    free = host.fkv_memory_available(C.addressof(source))
    page.line("memory", f"{free / 1e9:.1f} GB can be taken ({(source.value or b'').decode()})")
    for package in ("mlx", "mlx-lm", "numpy"):
        try:
            page.line(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            page.line(package, "not installed")
    with flatkv.Cache(LAYER, max_tokens=64) as cache:
        page.line("CPU runs", cache.stats.isa)
    page.kernels("CPU", lambda codec: flatkv.Cache(LAYER, max_tokens=1024, codec=codec, rotate="kv"), lambda x: x, lambda *_: None)
    try:
        on_mlx(page)
    except ImportError as error:
        page.line("MLX", f"not used: {error}")
    page.line("verdict", "good" if page.good else "not good: please report this page", page.good)
    return 0 if page.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
