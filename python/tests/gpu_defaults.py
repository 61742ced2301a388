"""Compares mlx-lm with flatkv's default options and mlx-lm with its own bf16 cache on a GPU: prefill and decode at several prompt lengths.

usage: gpu_defaults.py [--quick] [--seconds N] [--lengths N,N...] [--codec NAME] > FILE

The model has the shape of Llama-3-8B and random 4-bit weights, which are created in memory. For every length, prompts run through mlx-lm's
generate_step with the two caches in turn. Two short prompts before each run compile the kernels and graphs. Speeds are medians, and ratios
are those of flatkv to mlx-lm. The result is printed as JSON to stdout, and progress to stderr. No run begins after --seconds. --quick runs
a tiny shape on any device; its ratios are not checked. The exit status is 1 if a ratio is below its limit or a length is missing.
"""
import argparse
import contextlib
import json
import statistics
import sys
import time

import gpu_check
import mlx.core as mx
import mlx_lm.models.cache as caches

import flatkv

#: prompt length: number of runs with each cache, minimum ratio of prefill speeds, minimum ratio of decode speeds
LENGTHS = {512: (5, 1.0, 1.0), 2048: (5, 1.0, 1.0), 8192: (3, 1.0, 1.0), 131072: (3, 1.05, 1.7)}
QUICK = {64: (2, 0.0, 0.0), 300: (1, 0.0, 0.0)}
QUICK_TOKENS = 4096
N_WARM = 2  # warm-up runs, in which MLX instantiates CUDA graphs; the set of graphs depends on the buffers that are reused


def run_once(model, prompt, step):
    """Returns the prefill and decode speeds of one prompt, in tokens per second."""
    for _ in range(N_WARM):
        gpu_check.timed(model, prompt[:step + 1], caches.make_prompt_cache(model), gpu_check.WARM + 2, step)
        gpu_check.settle()
    found = gpu_check.timed(model, prompt, caches.make_prompt_cache(model), gpu_check.NEW, step)
    gpu_check.settle()
    return {name: found[f"{name}_tokens_per_s"] for name in ("prefill", "decode")}


class Comparison:
    """The model and the measurements."""

    def __init__(self, options):
        self.options, self.began = options, time.perf_counter()
        self.shape = gpu_check.TINY if options.quick else gpu_check.LLAMA_8B
        self.model = gpu_check.model_of(self.shape)
        self.plan = ""

    @contextlib.contextmanager
    def flat(self):
        """Installs flatkv. The tiny shape has a small pool, because it may run on any machine."""
        given = {"codec": self.options.codec} if self.options.codec else {}
        flatkv.install(QUICK_TOKENS if self.options.quick else None, **given)
        try:
            yield
            from flatkv.programs import describe
            self.plan = describe(flatkv.lm.pools()[0])
        finally:
            flatkv.uninstall()
            gpu_check.settle()

    def at(self, length, n_runs, prefill, decode):
        """Measures one prompt length."""
        mx.random.seed(length)
        prompt = mx.random.randint(0, self.shape.vocab, (length,))
        step = 256 if self.options.quick else gpu_check.CHUNK
        speeds = {"flatkv": [], "mlx-lm bf16": []}
        for i in range(n_runs):
            for who, found in speeds.items():
                if time.perf_counter() - self.began > self.options.seconds:
                    continue
                with self.flat() if who == "flatkv" else contextlib.nullcontext():
                    found.append(run_once(self.model, prompt, step))
                print(f"{time.perf_counter() - self.began:.0f} s: {length} tokens, run {i + 1}, {who}: {found[-1]}", file=sys.stderr, flush=True)
        result = {"tokens": length, "limits": {"prefill": prefill, "decode": decode}, "runs": speeds}
        if not all(speeds.values()):
            return result | {"good": False}
        for name in ("prefill", "decode"):
            middle = {who: statistics.median(r[name] for r in found) for who, found in speeds.items()}
            result[name] = middle | {"ratio": middle["flatkv"] / middle["mlx-lm bf16"]}
        return result | {"good": result["prefill"]["ratio"] >= prefill and result["decode"]["ratio"] >= decode}


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=440)
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--codec", help="codec of flatkv (default: that of flatkv.install())")
    options = parser.parse_args()
    table = QUICK if options.quick else LENGTHS
    unknown = set(options.lengths or ()) - set(table)
    if unknown:
        parser.error(f"--lengths must be among {', '.join(map(str, table))} (got {min(unknown)})")
    comparison = Comparison(options)
    lengths = [comparison.at(length, *table[length]) for length in options.lengths or table]
    good = all(length["good"] for length in lengths)
    about = {"mlx": mx.__version__, "device": str(mx.default_device()), "flatkv": flatkv.__version__, "plan": comparison.plan}
    if mx.default_device().type == mx.DeviceType.gpu:
        about["gpu"] = mx.device_info().get("device_name", "")
    print(json.dumps(about | {"good": good, "seconds": round(time.perf_counter() - comparison.began, 1), "lengths": lengths}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
