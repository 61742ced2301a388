#!/usr/bin/env python3
"""Computes the perplexity of a llama or qwen2 model in mlx-lm with KVCache and QuantizedKVCache, and the KL divergence between them. No test
needs this script.

    python3 -m venv peers && peers/bin/pip install 'mlx[cpu]==0.32.2' mlx-lm gguf
    peers/bin/python bench/peers/mlx_lm_peer.py -m smollm2.gguf --tokens tokens.json -c 2048 --windows 1 --caches 16,8:64,4:64

The weights of the GGUF file are expanded to float32, so that all runs compute the same model with float32 activations and differ only in
the cache. Q and K rows of llama models are stored for RoPE over adjacent pairs, which is selected with rope_traditional. tokens.json is
the output of `llama_cpp_peer.py tokens`. Windows are the same as in llama.cpp's perplexity tool, and the second half of each window is
scored. Windows are prefilled in chunks, so that later chunks attend to quantized history.

MLX's CPU backend takes minutes per window. --dequantize computes attention over the dequantized cache in numpy, which differs only in the
order of sums. With OpenBLAS preloaded (LD_PRELOAD=libopenblas.so.0), a window of a small model then takes less than a minute. On a GPU,
quantized_matmul has no float32 kernel, so attention also uses the dequantized cache, and the CPU quantizes. Set MLX_ENABLE_TF32=0 on a GPU; otherwise,
products are rounded to 10 bits. Prints one JSON object; an interrupted run reports the completed windows.
"""

import argparse
import importlib.metadata
import json
import math
import pathlib
import sys
import time

import gguf
import mlx.core as mx
import numpy as np
from mlx_lm.models import base, llama, qwen2
from mlx_lm.models.cache import KVCache, QuantizedKVCache

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(path):
    reader = gguf.GGUFReader(path)
    kind = reader.fields["general.architecture"].contents()
    module = {"llama": llama, "qwen2": qwen2}[kind]

    def value(key):
        return reader.fields[f"{kind}.{key}"].contents()

    tensors = {t.name: mx.array(gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)) for t in reader.tensors}
    model = module.Model(
        module.ModelArgs(
            model_type=kind,
            hidden_size=value("embedding_length"),
            num_hidden_layers=value("block_count"),
            intermediate_size=value("feed_forward_length"),
            num_attention_heads=value("attention.head_count"),
            num_key_value_heads=value("attention.head_count_kv"),
            rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
            vocab_size=tensors["token_embd.weight"].shape[0],
            rope_theta=value("rope.freq_base"),
            rope_traditional=kind == "llama",
            tie_word_embeddings="output.weight" not in tensors,
        )
    )
    weights = {"model.embed_tokens.weight": tensors.pop("token_embd.weight")}
    weights["model.norm.weight"] = tensors.pop("output_norm.weight")
    if "output.weight" in tensors:
        weights["lm_head.weight"] = tensors.pop("output.weight")
    for name, tensor in tensors.items():
        _, layer, part, side = name.split(".")
        weights[f"model.layers.{layer}.{LAYER_NAMES[part]}.{side}"] = tensor
    model.load_weights(list(weights.items()))
    return model


def attend_without_quantized_matmul():
    """Replaces the two quantized products in mlx-lm's attention over a QuantizedKVCache by dequantization and ordinary products."""
    quantize = mx.quantize
    mx.quantize = lambda x, **how: quantize(x, stream=mx.cpu, **how)

    def attend(queries, keys, values, scale, mask, group_size, bits):
        k, v = (mx.dequantize(*side, group_size=group_size, bits=bits, stream=mx.cpu) for side in (keys, values))
        return mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask=mask)

    base.quantized_scaled_dot_product_attention = attend


def attend_by_numpy():
    """Replaces the attention of MLX and of mlx-lm's QuantizedKVCache by float32 numpy code. Supports a causal mask or no mask."""

    def attend(queries, keys, values, scale, mask, **_):
        q, k, v = (np.asarray(x)[0] for x in (queries, keys, values))
        n_kv, n_keys, dim = k.shape
        n = q.shape[1]
        scores = (q.reshape(n_kv, -1, dim) * np.float32(scale)) @ k.swapaxes(1, 2)
        if mask is not None:
            scores.reshape(n_kv, -1, n, n_keys)[..., n_keys - n :] += np.triu(np.full((n, n), -np.inf, np.float32), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return mx.array((scores @ v).reshape(q.shape)[None])

    def attend_quantized(queries, keys, values, scale, mask, group_size, bits):
        k, v = (mx.dequantize(*side, group_size=group_size, bits=bits) for side in (keys, values))
        return attend(queries, k, v, scale, mask)

    mx.fast.scaled_dot_product_attention = attend
    base.quantized_scaled_dot_product_attention = attend_quantized


def make_cache(model, text):
    """Creates the cache of each layer: KVCache for "16", QuantizedKVCache for "BITS:GROUP"."""
    if text == "16":
        return [KVCache() for _ in model.layers]
    bits, _, group = text.partition(":")
    return [QuantizedKVCache(group_size=int(group or 64), bits=int(bits)) for _ in model.layers]


def chunk_logs(model, cache, ids, at, chunk):
    """Runs one chunk of a window through the model. Returns the log-probabilities [rows, vocabulary] of its scored rows, or None if there are none."""
    hidden = model.model(mx.array(ids[at : at + chunk])[None], cache)
    mx.eval(hidden, *[c.state[0] for c in cache])
    scored = range(max(at, len(ids) // 2), min(at + chunk, len(ids) - 1))
    if not scored:
        return None
    rows = hidden[0, scored[0] - at : scored[-1] - at + 1]
    logits = model.model.embed_tokens.as_linear(rows) if model.args.tie_word_embeddings else model.lm_head(rows)
    logs = np.array(logits)
    logs -= logs.max(axis=-1, keepdims=True)
    return logs - np.log(np.exp(logs).sum(axis=-1, keepdims=True))


def score_window(model, caches, ids, chunk):
    """Runs all caches chunk by chunk, so that each is compared with the first. Returns the sums [nll, KL, equal top-1] of every cache."""
    lanes = [make_cache(model, name) for name in caches]
    sums = np.zeros((len(caches), 3))
    for at in range(0, len(ids), chunk):
        first = None
        for i, lane in enumerate(lanes):
            logs = chunk_logs(model, lane, ids, at, chunk)
            if logs is None:
                continue
            first = logs if first is None else first
            begin = max(at, len(ids) // 2) + 1
            nll = -logs[range(len(logs)), ids[begin : begin + len(logs)]].sum(dtype=np.float64)
            kl = (np.exp(first) * (first - logs)).sum(dtype=np.float64)
            sums[i] += [nll, kl, (first.argmax(axis=-1) == logs.argmax(axis=-1)).sum()]
    return sums


def main():
    parser = argparse.ArgumentParser(description="Runs mlx-lm for comparison with flatkv.")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=pathlib.Path, required=True)
    parser.add_argument("-c", "--context", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--caches", type=lambda text: text.split(","), default=["16", "8:64", "4:64"])
    options = parser.parse_args()
    tokens = json.loads(options.tokens.read_text())["tokens"]
    n_windows = min(options.windows, len(tokens) // options.context)
    mx.set_default_device(mx.cpu if options.device == "cpu" else mx.gpu)
    if options.device == "gpu":
        attend_without_quantized_matmul()
    elif options.dequantize:
        attend_by_numpy()
    model = load(options.model)
    n_scored = options.context - 1 - options.context // 2
    start, windows = time.perf_counter(), []
    for window in range(n_windows):
        ids = tokens[window * options.context : (window + 1) * options.context]
        try:
            windows.append(score_window(model, options.caches, ids, options.chunk))
        except KeyboardInterrupt:
            break
        so_far = ", ".join(f"{name} {x:.5f}" for name, x in zip(options.caches, sum(windows)[:, 1] / n_scored / len(windows)))
        print(f"window {window + 1}: KL {so_far}", file=sys.stderr, flush=True)
    n = n_scored * len(windows)
    found = []
    for name, (nll, kl, same), each in zip(options.caches, sum(windows), np.stack(windows, axis=1)):
        row = {"cache": name, "ppl": math.exp(nll / n), "tokens": n, "window_ppl": [math.exp(x / n_scored) for x in each[:, 0]]}
        found.append(row if name == options.caches[0] else row | {"kl_mean": kl / n, "top1": same / n})
    about = {"peer": "mlx-lm", "version": importlib.metadata.version("mlx-lm"), "mlx": importlib.metadata.version("mlx")}
    words = [pathlib.Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    about |= {"command": " ".join(words), "model": pathlib.Path(options.model).stem}
    about |= {"windows": len(windows), "context": options.context, "chunk": options.chunk, "caches": found, "device": options.device}
    about["seconds"] = time.perf_counter() - start
    json.dump(about, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
