"""Compares mlx-lm's caches (unquantized, 8-bit and 4-bit) with flatkv: peak memory, time to first token, tokens per second, KL divergence.

Every cache runs the same loop: the prompt in chunks, then one token at a time. All caches are fed the tokens that the first cache
generated. The KL divergence compares next-token distributions with those of the first cache, over the end of the prompt and the
generated tokens. Memory is measured by MLX, without the weights.
"""
from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import Any, Callable

import mlx.core as mx
import mlx_lm
import mlx_lm.models.cache as caches

import flatkv

from .lm.hook import layers_for, own_prompt_cache
from .lm.probe import UnsupportedModel
from .svg import COLOURS


@dataclasses.dataclass
class Run:
    """Measurements of one cache. Byte counts exclude memory that was in use before the cache was created."""

    name: str
    first_token_s: float = 0.0
    tokens_per_s: float = 0.0
    peak_bytes: int = 0
    end_bytes: int = 0
    kl: float = 0.0
    line: list[tuple[int, int]] = dataclasses.field(default_factory=list)  #: (tokens, active bytes) after each chunk


def random_llama(dim: int, layers: int) -> Any:
    from mlx_lm.models import llama
    heads = dim // 64
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(model_type="llama", hidden_size=dim, num_hidden_layers=layers, intermediate_size=4 * dim,
                                        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), rms_norm_eps=1e-5,
                                        vocab_size=4096, head_dim=64, max_position_embeddings=1 << 20))
    mx.eval(model.parameters())
    return model


def load(path: str | None, prompt_file: str | None, n_tokens: int) -> tuple[Any, Any]:
    """Returns a model and a prompt of n_tokens tokens: the text of a file, or random tokens if no file is given."""
    if path is None:
        model = random_llama(512, 4)
    elif prompt_file is None and Path(path).is_dir():
        from mlx_lm.utils import load_model
        model = load_model(Path(path))[0]
    elif prompt_file is None:
        model = mlx_lm.load(path)[0]
    else:
        model, tokenizer = mlx_lm.load(path)
        with open(prompt_file, encoding="utf-8") as file:
            ids = tokenizer.encode(file.read())
        return model, mx.array((ids * (n_tokens // len(ids) + 1))[:n_tokens])
    vocab = model.args.vocab_size
    mx.random.seed(1)
    return model, mx.random.randint(0, vocab, (n_tokens,))


def measure(run: Run, model: Any, make: Callable[[], list[Any]], prompt: Any, n_new: int, chunk: int,
            reference: dict[str, Any] | None) -> dict[str, Any]:
    """Fills in the run and returns its tokens and log-probabilities. reference: the result of the first cache."""
    gc.collect()
    mx.clear_cache()
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    cache = make()
    kept: list[Any] = []

    def forward(tokens: Any) -> Any:
        logits = model(tokens[None], cache=cache)[0].astype(mx.float32)
        found = logits - mx.logsumexp(logits, -1, keepdims=True)
        mx.eval(found, [c.state for c in cache])
        return found

    for at in range(0, len(prompt), chunk):
        last = forward(prompt[at:at + chunk])
        run.line.append((min(at + chunk, len(prompt)), mx.get_active_memory() - start - last.nbytes))
        mx.clear_cache()
    kept.append(last[-min(64, chunk):])
    del last
    run.first_token_s = time.perf_counter() - began
    tokens = [] if reference is None else reference["tokens"]
    began = time.perf_counter()
    for i in range(n_new):
        if reference is None:
            tokens.append(mx.argmax(kept[-1][-1]).item())
        kept.append(forward(mx.array([tokens[i]])))
    run.tokens_per_s = n_new / (time.perf_counter() - began)
    found = mx.concatenate(kept)
    mx.eval(found)
    del kept
    run.end_bytes = mx.get_active_memory() - start - found.nbytes
    run.peak_bytes = mx.get_peak_memory() - start
    if reference is not None:
        want = reference["logs"]
        run.kl = mx.mean(mx.sum(mx.exp(want) * (want - found), -1)).item()
    return {"tokens": tokens, "logs": found}


def supports_max_kv_size(model: Any, window: int) -> bool:
    """Returns whether mlx-lm applies max_kv_size to this model. Models with their own make_cache() ignore it."""
    return all(isinstance(c, caches.RotatingKVCache) and c.max_size == window for c in own_prompt_cache(model, window))


def cache_makers(model: Any, codec: str, max_tokens: int, chunk: int, window: int | None) -> list[tuple[str, Callable[[], list[Any]]]]:
    """Returns pairs of a cache name and its constructor. Raises UnsupportedModel if flatkv cannot serve the model."""
    own, dtype = own_prompt_cache, layers_for(model, window)[0].dtype

    def quantized(bits: int) -> Callable[[], list[Any]]:
        return lambda: [c.to_quantized(group_size=64, bits=bits) for c in own(model)]

    def flat() -> list[Any]:
        flatkv.install(max_tokens=max_tokens, codec=codec, max_seqs=1, max_step_tokens=chunk)
        made: list[Any] = caches.make_prompt_cache(model, window)
        return made

    quantized_caches = [("mlx-lm 8-bit", quantized(8)), ("mlx-lm 4-bit", quantized(4))] if window is None else []
    return [(f"mlx-lm {dtype}", lambda: own(model, window)), *quantized_caches, (f"flatkv {codec}", flat)]


def plot(runs: list[Run]) -> str:
    """Draws active memory over tokens as SVG, with one line per cache."""
    width, height, left = 640, 320, 60
    top = max(b for r in runs for _, b in r.line) * 1.05 or 1
    longest = max(t for r in runs for t, _ in r.line)
    colours = [COLOURS[name] for name in ("stacks", "scratch", "tables", "slab")]
    body = f'<rect width="{width}" height="{height + 60}" fill="white"/>'
    for i in range(5):
        y = height - height * i / 4 * 0.95
        body += (f'<line x1="{left}" x2="{width}" y1="{y:.0f}" y2="{y:.0f}" stroke="#dddddd"/>'
                 f'<text x="0" y="{y + 4:.0f}">{top * i / 4 / 1e6:,.1f} MB</text>')
    for i, run in enumerate(runs):
        points = " ".join(f"{left + (width - left) * t / longest:.1f},{height - height * 0.95 * b / top:.1f}" for t, b in run.line)
        body += (f'<polyline points="{points}" fill="none" stroke="{colours[i % 4]}" stroke-width="2"/>'
                 f'<text x="{left + 145 * i}" y="{height + 44}" fill="{colours[i % 4]}">{run.name}</text>')
    body += f'<text x="{width - 130}" y="{height + 20}">{longest:,} tokens</text>'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 60}" font-family="sans-serif" '
            f'font-size="12">{body}</svg>\n')


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m flatkv bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("-m", "--model", help="model folder or name for mlx_lm.load() (default: a small Llama with random weights)")
    parser.add_argument("-f", "--file", help="text file with the prompt, repeated if it is too short (default: random tokens)")
    parser.add_argument("-c", "--tokens", type=int, default=8192, help="prompt length in tokens")
    parser.add_argument("-n", "--new", type=int, default=32, help="number of tokens to generate")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens per forward pass")
    parser.add_argument("--max-kv-size", type=int, help="max_kv_size of mlx-lm: tokens that a rotating cache keeps")
    parser.add_argument("--codec", default="8/4", help="codec of flatkv")
    parser.add_argument("--json", help="write the measurements to this file")
    parser.add_argument("--plot", help="write a plot of memory over tokens to this SVG file")
    options = parser.parse_args(arguments)
    model, prompt = load(options.model, options.file, options.tokens)
    if options.max_kv_size is not None and not supports_max_kv_size(model, options.max_kv_size):
        parser.error(f"--max-kv-size {options.max_kv_size}: this model creates its own caches, so mlx-lm ignores the option; omit it")
    try:
        measured = cache_makers(model, options.codec, options.tokens + options.new, options.chunk, options.max_kv_size)
    except UnsupportedModel as error:
        parser.error(f"flatkv does not support this model: {error}")
    runs, reference = [], None
    print(f"{options.tokens} prompt tokens in chunks of {options.chunk}, then {options.new} generated tokens; MLX on {mx.default_device()}")
    if options.max_kv_size is not None:
        print("8-bit and 4-bit caches of mlx-lm are skipped, because mlx-lm cannot quantize rotating caches")
    print(f"{'cache':16}{'first token':>13}{'tokens/s':>10}{'peak MB':>10}{'at end MB':>11}{'KL':>11}")
    for name, make in measured:
        run = Run(name)
        try:
            found = measure(run, model, make, prompt, options.new, options.chunk, reference)
        finally:
            flatkv.uninstall()
        reference = reference or found
        runs.append(run)
        print(f"{name:16}{run.first_token_s:11.2f} s{run.tokens_per_s:10.1f}{run.peak_bytes / 1e6:10.1f}{run.end_bytes / 1e6:11.1f}"
              f"{run.kl:11.2e}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"tokens": options.tokens, "new": options.new, "chunk": options.chunk, "max_kv_size": options.max_kv_size, "device": str(mx.default_device()),
                       "model": options.model or "random Llama, 4 layers of 512", "mlx": mx.__version__,
                       "runs": [dataclasses.asdict(r) for r in runs]}, file, indent=1)
            file.write("\n")
    if options.plot:
        with open(options.plot, "w", encoding="utf-8") as file:
            file.write(plot(runs))
    return 0
