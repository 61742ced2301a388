"""Checks and measures flatkv through Python on a GPU: kernel accuracy, attention time, and a whole mlx-lm model with both kinds of caches.

usage: gpu_check.py [--json FILE] [--quick] [--seconds N] [--tokens N] [--mlx-products] [--only PART...]

Default parts, in order of importance:
  decode     Llama-3-8B's shape with random 4-bit weights: decode speed after a history of random rows, for flatkv's codecs, mlx-lm's
             unquantized cache and flatkv without compiled graphs; also the host time per token
  short      the same after a short history, interleaved twice
  fixed      one token computed repeatedly after N - 1 tokens, a shape that MLX's quantized matmul supports: mlx-lm's quantized and
             unquantized caches and flatkv
  model      a whole prompt and NEW tokens in mlx-lm's generate_step
  few_bits   decode with TurboQuant codecs and 2-bit codes
  batch      two long prompts in mlx-lm's BatchGenerator, with up to 5000 generated tokens each as time allows
  kernels    python -m flatkv doctor
  replay     compiled decode graphs against uncompiled steps, which must be bit-identical
  attention  one layer of 32/8/128
  bits       bit-identical results of a query alone, in a batch and in a fork
Parts that run only if named by --only:
  steps      the prompt in larger steps
  sealed     the prompt with sealed pages and with mlx-lm's unquantized cache
  last       the last 8192 tokens of the prompt after a history of random rows, interleaved
  lengths    decode after histories of several lengths
  threads    decode after a short history, with and without an idle second thread

The JSON file is written after each run. No run begins after --seconds, and every part has a time limit. --quick runs a tiny shape on any
device. --mlx-products installs flatkv with products=False. The exit status is 1 if a check fails.
"""
import argparse
import contextlib
import dataclasses
import gc
import io
import json
import os
import signal
import statistics
import sys
import threading
import time

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as caches
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import llama

import flatkv
from flatkv import doctor
from flatkv.lm.prompt import FlatKVCache
from flatkv.mlx_cache import MlxCache

CHUNK = 2048
PRODUCTS = True  # flatkv.install(products=...)
NEW = 64  # number of generated tokens
WARM = 8  # generated tokens that are not timed


@dataclasses.dataclass
class Shape:
    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)
TINY = Shape(2, 128, 256, 2, 1, 64, 512)


def settle():
    gc.collect()
    mx.synchronize()
    mx.clear_cache()


# ---- kernels and bits

def kernels(_):
    page, text = doctor.Page(), io.StringIO()
    with contextlib.redirect_stdout(text):
        doctor.on_mlx(page)
    return {"good": page.good, "lines": text.getvalue().splitlines()}


def bits(_):
    """Compares the next query of three sequences of different lengths, computed alone and in one step over forks."""
    layer = flatkv.Layer(8, 2, 128)
    found = {}
    for codec in ("8/4", "4/4", "16/16"):
        cache = MlxCache(layer, max_tokens=16384, max_seqs=8, codec=codec, rotate="kv" if codec != "16/16" else None)
        mx.random.seed(0)
        seqs, forks, last = [], [], []
        for n in (70, 700, 1500):
            seq, rows = cache.open(2048), [mx.random.normal((n, heads, 128)).astype(mx.float16) for heads in (2, 2, 8)]
            for at in range(0, n, 512):
                k, v, q = (x[at:at + 512] for x in rows)
                with cache.step([(seq, len(k))]) as step:
                    step.write(0, k, v)
                    mx.eval(step.attend(0, q), step.pending())
            seqs.append(seq)
            forks.append(seq.fork(2048))
            last.append([mx.random.normal((1, heads, 128)).astype(mx.float16) for heads in (2, 2, 8)])

        def attend_all(rows):
            out = []
            for group in rows:
                k, v, q = (mx.concatenate(side) for side in zip(*(last[i] for _, i in group)))
                with cache.step([(seq, 1) for seq, _ in group]) as step:
                    step.write(0, k, v)
                    out.append(step.attend(0, q))
                    mx.eval(out[-1], step.pending())
            return mx.concatenate(out)

        alone = attend_all([[(seq, i)] for i, seq in enumerate(seqs)])
        together = attend_all([[(seq, i) for i, seq in enumerate(forks)]])
        found[codec] = bool(mx.array_equal(alone, together))
        assert cache.consistent()
    return {"good": all(found.values()), "same_bits": found}


# ---- one layer

CODECS = ("8/4", "4/4", "16/16", "s4/s4")  # not rotated, as in bench_attn
N_CHAINS = 6  # chains per mode, as in bench_attn; the first is not counted

# Evaluation modes of a chain. hold: all results stay alive until the end, as in bench_attn. collect: the garbage collector is enabled.
# clear: MLX's buffer cache is emptied before the first chain, as in bench_attn. send: submit after this number of calls, as for tokens of a model.
WAYS = {"plain": {}, "uncollected": {"collect": False}, "held": {"hold": True}, "cleared": {"clear": True}, "as_c": {"clear": True, "hold": True}, "sent": {"send": 10}}


def chain_us(step, q, n_chain, hold=False, send=0):
    """Returns the microseconds per call of a chain of n_chain dependent calls: graph construction, then evaluation."""
    began, x, held = time.perf_counter(), q, []
    for i in range(1, n_chain + 1):
        x = step.attend(0, x)
        if hold:
            held.append(x)
        if send and i % send == 0:
            mx.async_eval(x)
    built = time.perf_counter()
    mx.eval(x)
    now = time.perf_counter()
    return (built - began) / n_chain * 1e6, (now - built) / n_chain * 1e6


def chains_us(step, q, n_chain, collect=True, clear=False, **way):
    """Returns the times of all chains of one evaluation mode."""
    if clear:
        mx.clear_cache()
    if not collect:
        gc.disable()
    try:
        times = [chain_us(step, q, n_chain, **way) for _ in range(N_CHAINS)][1:]
    finally:
        gc.enable()
    return {"build_us": [round(b, 2) for b, _ in times], "run_us": [round(r, 2) for _, r in times]}


def single_us(step, q, n):
    times = []
    for _ in range(n + 1):
        began = time.perf_counter()
        mx.eval(step.attend(0, q))
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * 1e6


def decode_us(options, codec, n_chain):
    """Measures one layer's decode in all evaluation modes, with a new cache."""
    s = options.shape
    cache = MlxCache(flatkv.Layer(s.heads, s.kv_heads, s.head_dim), max_tokens=options.tokens, max_step_tokens=CHUNK, codec=codec)
    seq = cache.open()
    k, v = (mx.random.normal((CHUNK, s.kv_heads, s.head_dim)).astype(mx.float16) for _ in range(2))
    q = mx.random.normal((1, s.heads, s.head_dim)).astype(mx.float16)
    mx.eval(k, v, q)
    for at in range(0, options.tokens - 1, CHUNK):
        n = min(CHUNK, options.tokens - 1 - at)
        with cache.step([(seq, n)]) as step:
            step.write(0, k[:n], v[:n])
            mx.eval(step.pending())
    with cache.step([(seq, 1)]) as step:
        step.write(0, k[:1], v[:1])
        mx.eval(step.pending())
        found = {"fused": cache.fused, "us_single": single_us(step, q, 10), "ways": {name: chains_us(step, q, n_chain, **way) for name, way in WAYS.items()}}
    cache.close()
    settle()
    return found


def attention(options):
    """Measures one layer with the codecs interleaved. Reports medians with (us_all) and without (us_run) graph construction, and every chain."""
    found = {codec: [] for codec in CODECS}
    for order in (CODECS, CODECS[::-1], CODECS, CODECS[::-1]):
        for codec in order:
            found[codec].append(decode_us(options, codec, 4 if options.quick else 100))
    results = []
    for codec, turns in found.items():
        ways = {}
        for name in WAYS:
            of = [t["ways"][name] for t in turns]
            run, whole = [r for t in of for r in t["run_us"]], [b + r for t in of for b, r in zip(t["build_us"], t["run_us"])]
            ways[name] = {"us_run": statistics.median(run), "us_all": statistics.median(whole), "us_run_least": min(run), "us_run_most": max(run)}
        results.append({"codec": codec, "fused": all(t["fused"] for t in turns), "us_single": statistics.median(t["us_single"] for t in turns), "ways": ways, "turns": turns})
    return {"cached": options.tokens, "good": options.quick or all(r["fused"] for r in results), "results": results}


# ---- a whole model

def model_of(s):
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(
        model_type="llama", hidden_size=s.dim, num_hidden_layers=s.layers, intermediate_size=s.ffn, num_attention_heads=s.heads, num_key_value_heads=s.kv_heads,
        rms_norm_eps=1e-5, vocab_size=s.vocab, head_dim=s.head_dim, max_position_embeddings=131072, rope_theta=500000.0, tie_word_embeddings=False))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    settle()
    return model


def fill_history(cache, s, n_tokens, bits_, extra):
    """Fills the caches of a model (mlx-lm unquantized with bits_ 16, mlx-lm quantized, or flatkv) with n_tokens random rows.

    The arrays of mlx-lm have `extra` unused rows, so that they do not grow while decode is measured. A reallocation copies all rows; the GPU
    then lags behind the host, so that MLX cannot write in place and copies the rows again in every step.
    """
    if isinstance(cache[0], FlatKVCache):
        rows = [mx.random.normal((1, s.kv_heads, CHUNK, s.head_dim)).astype(mx.bfloat16) for _ in range(2)]
        for at in range(0, n_tokens, CHUNK):
            n = min(CHUNK, n_tokens - at)
            for layer in cache:
                layer.update_and_fetch(*(x[:, :, :n] for x in rows))
            mx.eval(cache[-1].state)
        return cache
    rows = [mx.random.normal((1, s.kv_heads, n_tokens + extra, s.head_dim)).astype(mx.bfloat16) for _ in range(2)]
    for layer in cache:  # each layer has its own arrays; shared arrays would be copied when the first token is written
        layer.keys, layer.values = (mx.quantize(x, group_size=64, bits=bits_) if bits_ < 16 else x + 0 for x in rows)
        mx.eval(layer.keys, layer.values)
        layer.offset = n_tokens
    return cache


def token_by_token(model, cache, n_new, fixed):
    """Decodes like generate_step and measures the host's time separately. The graph of the next token is built and submitted while the current
    token is computed. fixed: trim each token again, so that all tokens have the same history.
    """
    def begin(y):
        start = time.perf_counter()
        logits = model(y[None], cache=cache)[:, -1]
        y = mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)
        if fixed:
            caches.trim_prompt_cache(cache, 1)
        built = time.perf_counter()
        mx.async_eval(y)
        return y, built - start, time.perf_counter() - built

    times, builds, sends = [], [], []
    with mx.stream(mx.new_stream(mx.default_device())):
        y = begin(mx.array([1]))[0]
        for _ in range(WARM):  # synchronized, so that timing starts with an idle GPU
            mx.eval(y)
            mx.synchronize()
            y = begin(y)[0]
        mx.eval(y)
        mx.synchronize()
        y, last = begin(y)[0], time.perf_counter()
        for _ in range(n_new):
            following, build, send = begin(y)
            mx.eval(y)
            y, now = following, time.perf_counter()
            times, builds, sends, last = times + [now - last], builds + [build], sends + [send], now
        mx.eval(y)
    times, builds, sends = times[2:], builds[2:], sends[2:]
    return {"decode_tokens_per_s": len(times) / sum(times), "token_ms": statistics.fmean(times) * 1e3, "decode_ms": [round(t * 1e3, 3) for t in times],
            "build_ms": statistics.median(builds) * 1e3, "send_ms": statistics.median(sends) * 1e3}


def timed(model, prompt, cache, n_new, step):
    """Times one generate_step: seconds to the first token and per later token, active bytes after each chunk and the peak within it.

    Reading the active bytes waits until MLX has released temporary buffers; this time is subtracted.
    """
    memory, peaks, chunks, times = [], [], [], []
    mx.reset_peak_memory()
    start = last = time.perf_counter()

    def after_chunk(*_):
        nonlocal start, last
        began = time.perf_counter()
        chunks.append(round(began - start, 4))
        memory.append(doctor.active_memory())
        peaks.append(mx.get_peak_memory())
        mx.reset_peak_memory()
        counted = time.perf_counter() - began
        start, last = start + counted, last + counted

    for _ in generate_step(prompt, model, max_tokens=n_new, prompt_cache=cache, prefill_step_size=step, prompt_progress_callback=after_chunk):
        now = time.perf_counter()
        times.append(now - last)
        last = now
        in_decode = mx.get_active_memory()
    del _
    mx.synchronize()
    return {"first_token_s": times[0], "prefill_tokens_per_s": len(prompt) / times[0], "decode_tokens_per_s": 1 / statistics.median(times[WARM:]),
            "decode_ms": [round(t * 1e3, 3) for t in times[WARM:]], "peak_bytes": max(*peaks[1:], mx.get_peak_memory()), "chunk_bytes": memory[:-1],
            "chunk_peak_bytes": peaks[1:-1], "chunk_s": chunks, "in_decode_bytes": in_decode,
            "whole_s": time.perf_counter() - start}


@contextlib.contextmanager
def flat(codec, max_tokens, step=None, **more):
    flatkv.install(max_tokens=max_tokens, codec=codec, max_step_tokens=step or CHUNK, products=PRODUCTS, **more)
    try:
        yield
    finally:
        flatkv.uninstall()
        settle()


class Model:
    """The model, shared by all parts, and the measurements that use it."""

    def __init__(self, options):
        self.options, s = options, options.shape
        self.model = model_of(s)
        self.weights = mx.get_active_memory()
        self.prompt = mx.random.randint(0, s.vocab, (options.tokens - NEW,))
        mx.eval(self.prompt)

    def about(self):
        s = self.options.shape
        return {"layers": s.layers, "dim": s.dim, "tokens": self.options.tokens, "chunk": CHUNK, "weights_bytes": self.weights, "good": True, "runs": []}

    def measured(self, who, step, **more):
        """Measures the whole prompt, after a short prompt that compiles all kernels."""
        step = step or CHUNK
        print(f"{who}, whole prompt", flush=True)
        timed(self.model, self.prompt[:step + CHUNK + 1], caches.make_prompt_cache(self.model), WARM + 2, step)
        settle()
        cache = caches.make_prompt_cache(self.model)
        opened = doctor.active_memory()
        found = timed(self.model, self.prompt, cache, NEW, step)
        settle()
        return printed({"who": who, "step": step, "open_bytes": opened - self.weights, "end_bytes": doctor.active_memory() - self.weights, **found, **more})

    def flat(self, codec, step=None):
        tokens = self.options.tokens
        plan = flatkv.plan(self.model, tokens, codec=codec, max_seqs=2, max_step_tokens=step or CHUNK)
        with flat(codec, tokens, step, max_seqs=2):
            return self.measured(f"flatkv {codec}", step, plan_bytes=plan.total_bytes)

    def own(self, step=None):
        return self.measured("mlx-lm bf16", step)

    def decode_after(self, who, n_new, cached, bits_, fixed):
        """Measures decode after a history of `cached` tokens."""
        print(f"{who} after {cached} tokens", flush=True)
        settle()
        cache = caches.make_prompt_cache(self.model)
        if bits_ < 16:
            cache = [c.to_quantized(group_size=64, bits=bits_) for c in cache]
        cache = fill_history(cache, self.options.shape, cached, bits_, 1 if fixed else 2 * NEW)
        found = token_by_token(self.model, cache, n_new, fixed)
        del cache
        settle()
        return printed({"who": who, "cached": cached, "keys_at_the_end": cached + (1 if fixed else n_new + WARM + 2), **found})

    def flat_decode(self, codec, cached=None, fixed=False, n_new=NEW, **more):
        with flat(codec, self.options.tokens, max_seqs=2, **more):
            return self.decode_after(f"flatkv {codec}" + ("" if more.get("compile", True) else " built anew"), n_new, self.cached(cached, fixed), 16, fixed)

    def own_decode(self, bits_=16, cached=None, fixed=False):
        name, n_new = ("bf16", NEW) if bits_ == 16 else (f"{bits_} bits", 16)
        return self.decode_after(f"mlx-lm {name}", n_new, self.cached(cached, fixed), bits_, fixed)

    def last(self, codec=None):
        """Measures the last chunks of the prompt after a history of random rows."""
        n = 4 * CHUNK if not self.options.quick else CHUNK
        who, cached = f"flatkv {codec}" if codec else "mlx-lm bf16", self.options.tokens - n - 2 * NEW
        print(f"{who}, the last {n} tokens", flush=True)
        settle()
        with flat(codec, self.options.tokens, max_seqs=2) if codec else contextlib.nullcontext():
            cache = fill_history(caches.make_prompt_cache(self.model), self.options.shape, cached, 16, n + 2 * NEW)
            found = timed(self.model, self.prompt[-n:], cache, WARM + 2, CHUNK)
            del cache
        settle()
        return printed({"who": who, "cached": cached, **{k: found[k] for k in ("first_token_s", "prefill_tokens_per_s", "chunk_s", "peak_bytes")}})

    def flat_with_idle_thread(self, *args):
        """Measures decode while an idle second thread exists."""
        done = threading.Event()
        idle = threading.Thread(target=done.wait)
        idle.start()
        try:
            return {**self.flat_decode(*args), "threads": threading.active_count()}
        finally:
            done.set()
            idle.join()

    def cached(self, cached, fixed):
        return cached or self.options.tokens - (1 if fixed else 2 * NEW)


def printed(found):
    """Prints the scalar measurements and returns them."""
    print(found["who"], {k: round(v, 3) for k, v in found.items() if isinstance(v, (int, float))}, flush=True)
    return found


def runs(name, *makers):
    """Returns a part that runs these measurements one after the other until the time is used up."""
    def part(options):
        model = options.model = options.model or Model(options)
        result = options.parts[name] = model.about()
        for make in makers:
            if options.late():
                break
            try:
                result["runs"].append(make(model))
            except RuntimeError as error:  # for example an error of mlx-lm; the remaining measurements still run
                result["runs"].append({"who": "failed", "error": f"{type(error).__name__}: {error}"[:500]})
                result["good"] = False
                flatkv.uninstall()
                settle()
            options.write()
        return result
    return part


# ---- two long prompts at once

def run_batch(model, weights, prompts, n_new, seconds):
    """Runs mlx-lm's BatchGenerator on prompts that start together, for up to `seconds` after the first token.

    Returns prefill and decode speed and the bytes in addition to the weights.
    """
    settle()
    mx.reset_peak_memory()
    generator = BatchGenerator(model, max_tokens=n_new, prefill_step_size=CHUNK // len(prompts))
    began = time.perf_counter()
    generator.insert(prompts)
    n_out, first, ends = 0, 0.0, []
    while n_out < n_new * len(prompts) and (not first or time.perf_counter() - first < seconds):
        _, responses = generator.next()
        n_out += len(responses)
        if responses and not first:
            first = time.perf_counter()
        ends += [time.perf_counter()] if responses else []
    end_bytes = mx.get_active_memory() - weights
    generator.close()
    del generator
    steps = [b - a for a, b in zip(ends[WARM:], ends[WARM + 1:])]
    rate = [len(prompts) / statistics.median(part) for part in (steps, steps[:100], steps[-100:])]
    return {"first_token_s": first - began, "prefill_tokens_per_s": sum(map(len, prompts)) / (first - began), "new": n_out // len(prompts),
            "decode_tokens_per_s": rate[0], "decode_first_tokens_per_s": rate[1], "decode_last_tokens_per_s": rate[2],
            "whole_s": ends[-1] - began, "peak_bytes": mx.get_peak_memory() - weights, "in_decode_bytes": end_bytes}


def batch(options):
    s, options.model = options.shape, options.model or Model(options)
    of_model = options.model.model, options.model.weights
    n_prompt, n_new, seconds = (600, 20, 20) if options.quick else (50000, 5000, 6)
    mx.random.seed(2)
    prompts = [mx.random.randint(0, s.vocab, (n,)).tolist() for n in (n_prompt, n_prompt - 17)]
    result = {"prompts": [len(p) for p in prompts], "wanted": n_new, "seconds_of_decode": seconds, "good": True, "runs": []}
    options.parts["batch"] = result
    with flat("8/4", 2 * (n_prompt + n_new + 64), max_seqs=8):
        run_batch(*of_model, [p[:300] for p in prompts], WARM + 4, 5)
        pages = sum(pool.plan.total_bytes for pool in flatkv.lm.pools())
        result["runs"].append(printed({"who": "flatkv 8/4", "pages_bytes": pages, **run_batch(*of_model, prompts, n_new, seconds)}))
    options.write()
    if not options.late():
        run_batch(*of_model, [p[:300] for p in prompts], WARM + 4, 5)
        result["runs"].append(printed({"who": "mlx-lm", **run_batch(*of_model, prompts, n_new, seconds)}))
    return result


# ---- compiled graphs

def replay(options):
    """Compares compiled graphs with uncompiled steps: one sequence across page boundaries, and a batch of two."""
    options.model = options.model or Model(options)
    model, prompt, n = options.model.model, options.model.prompt, 24 if options.quick else 100
    disabled = []
    results = []
    for compile_ in (False, True):
        with flat("8/4", 4 * CHUNK + 2048, max_seqs=16, compile=compile_):
            cache = caches.make_prompt_cache(model)
            found = [(int(y), mx.sum(mx.abs(p)).item()) for y, p in generate_step(prompt[:CHUNK - 20], model, max_tokens=n, prompt_cache=cache)]
            results.append((found, batch_tokens(model, [prompt[:100].tolist(), prompt[50:400].tolist()], n)))
            disabled += [g.disabled for by_model in flatkv.lm.hook._installation.decode_graphs._by_pool.values() for g in by_model.values()]
            del cache
    same = results[0] == results[1]
    return {"good": same and not any(disabled), "same_bits": same, "kept": len(disabled), "refused": sum(disabled)}


def batch_tokens(model, prompts, n):
    """Returns the generated tokens of each prompt in a batch."""
    generator, tokens = BatchGenerator(model, max_tokens=n, prefill_step_size=CHUNK // len(prompts)), {}
    generator.insert(prompts)
    while sum(map(len, tokens.values())) < n * len(prompts):
        for response in generator.next()[1]:
            tokens.setdefault(response.uid, []).append(response.token)
    generator.close()
    return sorted(tokens.items())


# part name: (time limit in seconds, function)
PARTS = {"decode": (120, runs("decode", lambda m: m.flat_decode("8/4"), lambda m: m.own_decode(), lambda m: m.flat_decode("s4/s4"), lambda m: m.flat_decode("4/4"),
                              lambda m: m.flat_decode("16/16"), lambda m: m.flat_decode("8/4", compile=False))),
         "short": (60, runs("short", *2 * (lambda m: m.flat_decode("8/4", CHUNK), lambda m: m.own_decode(16, CHUNK), lambda m: m.flat_decode("8/4", CHUNK, compile=False)))),
         "fixed": (120, runs("fixed", lambda m: m.flat_decode("8/4", fixed=True), lambda m: m.own_decode(8, fixed=True), lambda m: m.own_decode(4, fixed=True),
                             lambda m: m.own_decode(fixed=True))),
         "model": (150, runs("model", lambda m: m.flat("8/4"), lambda m: m.own())),
         "few_bits": (60, runs("few_bits", *(lambda m, codec=codec: m.flat_decode(codec, n_new=10) for codec in ("2/2", "tq2/tq2", "tq4/tq4")))),
         "batch": (130, batch), "kernels": (90, kernels), "replay": (40, replay), "attention": (60, attention), "bits": (60, bits),
         "steps": (120, runs("steps", lambda m: m.flat("8/4", 4 * CHUNK), lambda m: m.own(4 * CHUNK))),
         "sealed": (120, runs("sealed", lambda m: m.flat("s4/s4"), lambda m: m.own())),
         "last": (120, runs("last", *3 * (lambda m: m.last("s4/s4"), lambda m: m.last()))),
         "lengths": (40, runs("lengths", *(lambda m, n=n: m.flat_decode("8/4", min(n * CHUNK, m.options.tokens - 2 * NEW), n_new=40) for n in (16, 20, 24, 32, 40, 50, 56)))),
         "threads": (30, runs("threads", *2 * (lambda m: m.flat_decode("8/4", CHUNK), lambda m: m.flat_with_idle_thread("8/4", CHUNK))))}
ONLY_IF_NAMED = ("steps", "sealed", "last", "lengths", "threads")
MODEL_SECONDS = 60  # additional time limit for creating the model


class Options(argparse.Namespace):
    model = None

    def late(self):
        return time.perf_counter() - self.began > self.seconds

    def write(self):
        if self.json:
            with open(self.json, "w", encoding="utf-8") as file:
                json.dump({"mlx": mx.__version__, "device": str(mx.default_device()), "flatkv": flatkv.__version__, "products": PRODUCTS,
                           "environment": {k: v for k, v in os.environ.items() if k.startswith("MLX_")}, "parts": self.parts}, file, indent=1)
                file.write("\n")


def too_long(*_):
    raise TimeoutError("the part exceeded its time limit")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--mlx-products", action="store_true")
    parser.add_argument("--only", nargs="*", default=[name for name in PARTS if name not in ONLY_IF_NAMED])
    options = parser.parse_args(namespace=Options())
    options.began, options.parts, options.shape = time.perf_counter(), {}, TINY if options.quick else LLAMA_8B
    global CHUNK, PRODUCTS
    PRODUCTS = not options.mlx_products
    if options.quick:
        CHUNK, options.tokens = 256, 1024
    signal.signal(signal.SIGALRM, too_long)
    for name in options.only:
        if options.late():
            options.parts[name] = {"good": False, "error": "not started, because --seconds was used up"}
            continue
        began = time.perf_counter()
        print(f"{name} starts after {began - options.began:.0f} s", flush=True)
        try:
            signal.alarm(PARTS[name][0] + (0 if options.model else MODEL_SECONDS))
            options.parts[name] = PARTS[name][1](options)
        except Exception as error:  # the remaining parts still run
            options.parts.setdefault(name, {}).update(good=False, error=f"{type(error).__name__}: {error}"[:2000])
        finally:
            signal.alarm(0)
            flatkv.uninstall()
        options.parts[name]["seconds"] = time.perf_counter() - began
        print(name, json.dumps({k: v for k, v in options.parts[name].items() if k != "runs"})[:3000], flush=True)
        options.write()
    return 0 if all(part["good"] for part in options.parts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
