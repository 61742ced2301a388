"""The same prompt over mlx-lm's cache of the model's own type, its 8 and 4 bits, and flatkv: peak memory, time to first token, tokens a second, KL.

Every cache is driven by the same loop: the prompt in chunks, then tokens one at a time, which are the first cache's. KL is that of the next
token's distribution to the first cache's, over the last chunk and the single tokens. Memory is MLX's own count beyond the weights.
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

from .lm.hook import layers_for
from .lm.look import Refusal
from .pictures import COLOURS


@dataclasses.dataclass
class Run:
    """One cache's figures; bytes are beyond what was there before it was made."""

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


def load(path: str | None, text: str | None, n_tokens: int) -> tuple[Any, Any]:
    """A model and a prompt of n_tokens tokens: text where there is a tokenizer and a file, else random ones."""
    if path is None:
        model = random_llama(512, 4)
    elif text is None and Path(path).is_dir():
        from mlx_lm.utils import load_model
        model = load_model(Path(path))[0]
    elif text is None:
        model = mlx_lm.load(path)[0]
    else:
        model, tokenizer = mlx_lm.load(path)
        with open(text, encoding="utf-8") as file:
            ids = tokenizer.encode(file.read())
        return model, mx.array((ids * (n_tokens // len(ids) + 1))[:n_tokens])
    vocab = model.args.vocab_size
    mx.random.seed(1)
    return model, mx.random.randint(0, vocab, (n_tokens,))


def measure(run: Run, model: Any, make: Callable[[], list[Any]], prompt: Any, n_new: int, chunk: int,
            truth: dict[str, Any] | None) -> dict[str, Any]:
    """Fills the run. truth: what the first cache gave, tokens and log-probabilities; returned by its own run."""
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
    tokens = [] if truth is None else truth["tokens"]
    began = time.perf_counter()
    for i in range(n_new):
        if truth is None:
            tokens.append(mx.argmax(kept[-1][-1]).item())
        kept.append(forward(mx.array([tokens[i]])))
    run.tokens_per_s = n_new / (time.perf_counter() - began)
    found = mx.concatenate(kept)
    mx.eval(found)
    del kept
    run.end_bytes = mx.get_active_memory() - start - found.nbytes
    run.peak_bytes = mx.get_peak_memory() - start
    if truth is not None:
        want = truth["logs"]
        run.kl = mx.mean(mx.sum(mx.exp(want) * (want - found), -1)).item()
    return {"tokens": tokens, "logs": found}


def takes_window(model: Any, window: int) -> bool:
    """Whether mlx-lm's caches of this model rotate in the window; a model that makes its own never hears of it."""
    return all(isinstance(c, caches.RotatingKVCache) and c.max_size == window for c in caches.make_prompt_cache(model, window))


def kinds(model: Any, codec: str, max_tokens: int, chunk: int, window: int | None) -> list[tuple[str, Callable[[], list[Any]]]]:
    """Names of caches and how they are made; Refusal where flatkv would leave the model to mlx-lm."""
    own, dtype = caches.make_prompt_cache, layers_for(model, window)[0].dtype

    def quantized(bits: int) -> Callable[[], list[Any]]:
        return lambda: [c.to_quantized(group_size=64, bits=bits) for c in own(model)]

    def flat() -> list[Any]:
        flatkv.install(max_tokens=max_tokens, codec=codec, max_seqs=1, max_step_tokens=chunk)
        return caches.make_prompt_cache(model, window)

    fewer_bits = [("mlx-lm 8 bits", quantized(8)), ("mlx-lm 4 bits", quantized(4))] if window is None else []
    return [(f"mlx-lm {dtype}", lambda: own(model, window)), *fewer_bits, (f"flatkv {codec}", flat)]


def plot(runs: list[Run]) -> str:
    """Active memory against tokens, one line for each cache."""
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
    parser.add_argument("-m", "--model", help="a folder or name as mlx-lm takes it (default: a small Llama with random weights)")
    parser.add_argument("-f", "--file", help="text of the prompt, repeated where it is too short (default: random tokens)")
    parser.add_argument("-c", "--tokens", type=int, default=8192, help="of the prompt")
    parser.add_argument("-n", "--new", type=int, default=32, help="tokens after it")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of one forward pass of the prompt")
    parser.add_argument("--max-kv-size", type=int, help="tokens that a layer keeps, as mlx-lm's option: rotating caches")
    parser.add_argument("--codec", default="8/4", help="of flatkv's pages")
    parser.add_argument("--json", help="figures to this file")
    parser.add_argument("--plot", help="memory against tokens to this SVG file")
    options = parser.parse_args(arguments)
    model, prompt = load(options.model, options.file, options.tokens)
    if options.max_kv_size is not None and not takes_window(model, options.max_kv_size):
        parser.error(f"--max-kv-size {options.max_kv_size}: mlx-lm makes this model's caches without it; leave it out")
    try:
        measured = kinds(model, options.codec, options.tokens + options.new, options.chunk, options.max_kv_size)
    except Refusal as refusal:
        parser.error(f"flatkv does not keep the KV of this model: {refusal}")
    runs, truth = [], None
    print(f"{options.tokens} tokens in chunks of {options.chunk}, then {options.new}; MLX on {mx.default_device()}")
    if options.max_kv_size is not None:
        print("without 8 and 4 bits: mlx-lm has them for growing caches only, not for rotating ones")
    print(f"{'cache':16}{'first token':>13}{'tokens/s':>10}{'peak MB':>10}{'at end MB':>11}{'KL':>11}")
    for name, make in measured:
        run = Run(name)
        try:
            found = measure(run, model, make, prompt, options.new, options.chunk, truth)
        finally:
            flatkv.uninstall()
        truth = truth or found
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
