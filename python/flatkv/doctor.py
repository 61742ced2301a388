"""Checks flatkv on this machine and prints a report for bug reports: versions, kernel accuracy, memory and speed."""
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

TOKENS = 700
LAYER = flatkv.Layer(8, 2, 128)
#: layer shapes by name; separate kernels are compiled for each on a GPU
SHAPES = {"head dimension 64": flatkv.Layer(9, 3, 64), "window with sinks": flatkv.Layer(4, 1, 256, window=200, n_sinks=4),
          "learned sinks, soft cap": flatkv.Layer(8, 4, 96, softcap=1.0, sink_logits=tuple(range(-2, 6)))}
#: maximum relative L2 error against attention in double precision over normally distributed rows
LIMITS = {"16/16": 2e-3, "8/8": 2e-2, "8/4": 0.15, "4/4": 0.25}


def reference_attention(layer: flatkv.Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Computes the layer's attention in double precision. Returns [T, H, D]."""
    per = q.shape[1] // k.shape[1]
    scores = np.einsum("thd,shd->hts", q.astype(float), np.repeat(k, per, 1).astype(float)) / np.sqrt(q.shape[2])
    if layer.softcap:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    distance = np.arange(len(q))[:, None] - np.arange(len(k))  # query position minus key position
    visible = (distance >= 0) & ((distance < (layer.window or len(k))) | (np.arange(len(k)) < layer.n_sinks))
    scores = np.where(visible, scores, -np.inf)
    sinks = np.array(layer.sink_logits or [-np.inf] * q.shape[1])[:, None, None]
    most = np.maximum(scores.max(-1, keepdims=True), sinks)
    weights = np.exp(scores - most)
    found: np.ndarray = np.einsum("hts,shd->thd", weights / (weights.sum(-1, keepdims=True) + np.exp(sinks - most)), np.repeat(v, per, 1).astype(float))
    return found


def rows(layer: flatkv.Layer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns random queries, keys and values of TOKENS tokens."""
    random = np.random.default_rng(0)
    made = [random.standard_normal((TOKENS, heads, layer.head_dim)).astype(np.float32) for heads in (layer.n_q_heads, layer.n_kv_heads, layer.n_kv_heads)]
    return made[0], made[1], made[2]


def attention_of(cache: Any, layer: flatkv.Layer, as_array: Callable[[Any], Any], finish: Callable[..., None]) -> np.ndarray:
    """Returns the cache's attention for rows(), processed in two chunks followed by single tokens."""
    q, k, v = map(as_array, rows(layer))
    out, seq, cuts = [], cache.open(), [0, 512, TOKENS - 4, *range(TOKENS - 3, TOKENS + 1)]
    for a, b in zip(cuts, cuts[1:]):
        with cache.step([(seq, b - a)]) as step:
            step.write(0, k[a:b], v[a:b])
            result = step.attend(0, q[a:b])
            finish(result, step)
            out.append(np.array(result))
    return np.concatenate(out)


class Page:
    """Prints the lines of the report and records whether every check passed."""

    good = True

    def line(self, name: str, text: str, good: bool | None = None) -> None:
        mark = "" if good is None else "ok    " if good else "WRONG "
        self.good = self.good and good is not False
        print(f"{name:32}{mark}{text}", flush=True)

    def attempt(self, name: str, check: Callable[[], None]) -> None:
        """Calls check() and reports an exception as a failed line."""
        try:
            check()
        except Exception as error:
            self.line(name, f"{type(error).__name__}: {error}", False)

    def kernel(self, name: str, layer: flatkv.Layer, codec: str, make: Callable[..., Any], as_array: Any, finish: Any) -> None:
        want = reference_attention(layer, *rows(layer))
        got = attention_of(make(layer, max_tokens=1024, codec=codec, rotate="kv"), layer, as_array, finish)
        limit = LIMITS[codec.removesuffix("g32")]
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        self.line(name, f"relative error {error:.1e} (limit {limit:.1e})", error < limit)

    def kernels(self, on: str, make: Callable[..., Any], as_array: Any, finish: Any) -> None:
        for codec in LIMITS:
            self.attempt(f"{on} {codec}", lambda: self.kernel(f"{on} {codec}", LAYER, codec, make, as_array, finish))
        for name, layer in SHAPES.items():
            codec = "8/8g32" if layer.head_dim % 64 else "8/8"
            self.attempt(f"{on} {name}", lambda: self.kernel(f"{on} {name}", layer, codec, make, as_array, finish))


def on_mlx(page: Page) -> None:
    """Adds the checks of the MLX backend to the page."""
    import mlx.core as mx

    from .mlx_cache import MlxCache
    about = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    sizes = [f"{about[key] / 1e9:.1f} GB {name}" for key, name in (("memory_size", "memory"), ("total_memory", "memory"),
                                                                   ("max_recommended_working_set_size", "for the GPU")) if key in about]
    page.line("MLX device", ", ".join([str(about.get("device_name", "unnamed")), str(about.get("architecture", "")), *sizes]))
    with MlxCache(LAYER, max_tokens=64) as probe:
        kernels = "flatkv kernels" if probe.fused else "MLX operations"
        page.line("MLX backend", f"{kernels} on {mx.default_device()} ({probe.stats.isa})")
    page.kernels("MLX", MlxCache, mx.array, lambda result, step: mx.eval(result, step.pending()))
    page.attempt("MLX speed", lambda: memory_and_speed(page, MlxCache([LAYER] * 4, max_tokens=8192, max_step_tokens=512)))


def active_memory() -> int:
    """Returns MLX's active memory after temporary buffers were released, which a GPU does shortly after an evaluation."""
    import mlx.core as mx
    mx.synchronize()
    readings = [mx.get_active_memory()]
    while len(readings) < 20 and (len(readings) < 3 or readings[-1] != readings[-3]):
        time.sleep(0.002)
        readings.append(mx.get_active_memory())
    return int(readings[-1])


def median(seconds: Callable[[], float], times: int) -> float:
    return sorted(seconds() for _ in range(times))[times // 2]


def mlx_attention_seconds(n: int) -> float:
    """Measures four calls of MLX's 16-bit attention, each with one query over n tokens."""
    import mlx.core as mx
    heads, dim = LAYER.n_q_heads, LAYER.head_dim
    q, k, v = (mx.random.normal((1, h, t, dim)).astype(mx.float16) for h, t in ((heads, 1), (LAYER.n_kv_heads, n), (LAYER.n_kv_heads, n)))
    mx.eval(q, k, v)

    def seconds() -> float:
        began = time.perf_counter()
        mx.eval([mx.fast.scaled_dot_product_attention(q * (1 + i), k, v, scale=dim**-0.5) for i in range(4)])
        return time.perf_counter() - began

    seconds()
    return median(seconds, 11)


def memory_and_speed(page: Page, cache: Any) -> None:
    """Reports prefill and decode speed and the growth of memory on MLX."""
    import mlx.core as mx
    seq, (q, k, v) = cache.open(), (mx.array(x[:512]) for x in rows(LAYER))
    mx.eval(q, k, v)

    def seconds(n: int) -> float:
        began = time.perf_counter()
        with cache.step([(seq, n)]) as step:
            for layer in range(4):
                step.write(layer, k[:n], v[:n])
                out = step.attend(layer, q[:n])
            mx.eval(out, step.pending())
        return time.perf_counter() - began

    seconds(512)  # the first calls compile kernels
    seconds(1)
    mx.clear_cache()
    start, growth, times = active_memory(), 0, []
    for _ in range(7):
        times.append(seconds(512))
        growth = max(growth, active_memory() - start)
    shape = f"{LAYER.n_q_heads}/{LAYER.n_kv_heads}/{LAYER.head_dim}"
    page.line("MLX prefill", f"{512 / sorted(times)[3]:,.0f} tokens per second, 4 layers of {shape}, 8/4, chunks of 512")
    page.line("MLX memory", f"grew by {growth} bytes over {7 * 512} tokens", growth <= 1 << 16)
    decode = median(lambda: seconds(1), 11)
    page.line("MLX decode", f"{decode / 4 * 1e6:,.0f} us per layer after {len(seq)} tokens, one step at a time")
    page.line("MLX attention, 16 bits", f"{mlx_attention_seconds(len(seq)) / 4 * 1e6:,.0f} us per layer after {len(seq)} tokens, without writes")


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m flatkv doctor", description=__doc__).parse_args(arguments)
    page = Page()
    page.line("flatkv", f"{flatkv.__version__}, models: {'yes' if _library.has_models else 'no'}")
    page.line("machine", f"{platform.platform()}, {platform.machine()}, Python {platform.python_version()}")
    source = C.c_char_p()
    free = host.fkv_memory_available(C.addressof(source))
    page.line("memory", f"{free / 1e9:.1f} GB available ({(source.value or b'').decode()})")
    for package in ("mlx", "mlx-lm", "numpy"):
        try:
            page.line(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            page.line(package, "not installed")
    with flatkv.Cache(LAYER, max_tokens=64) as cache:
        page.line("CPU kernels", cache.stats.isa)
    page.kernels("CPU", flatkv.Cache, lambda x: x, lambda *_: None)
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        page.line("MLX", f"not used: {error}")
    else:
        page.attempt("MLX", lambda: on_mlx(page))
    page.line("result", "all checks passed" if page.good else "some checks failed; please report a bug with this output", page.good)
    return 0 if page.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
