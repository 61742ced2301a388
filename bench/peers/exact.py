#!/usr/bin/env python3
"""Computes reference logits of a model in plain float32 arithmetic with the exact weights of a GGUF file.

    peers/bin/pip install gguf numpy
    peers/bin/python bench/peers/exact.py -m MODEL --tokens tokens.json -n 512 --out exact.npz

flatkv and llama.cpp both round activations to 8 bits for integer products, but in different ways. If they disagree about the most
likely token, these logits show which one is closer. The code is written for readability, not speed. It supports llama, qwen2 and
gemma3, and processes one window of tokens without a cache.
"""

import argparse
import json
import pathlib
import sys

import gguf
import numpy as np


class Weights:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = reader.fields
        self.tensors = {t.name: t for t in reader.tensors}
        self.architecture = self.fields["general.architecture"].contents()

    def value(self, key, default=None):
        field = self.fields.get(f"{self.architecture}.{key}")
        return default if field is None else field.contents()

    def tensor(self, name):
        if name not in self.tensors:
            return None
        tensor = self.tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x, base, interleaved):
    """Applies RoPE to x [T, heads, D], starting at position 0."""
    n_tokens, _, dim = x.shape
    angles = np.arange(n_tokens)[:, None] * base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : dim // 2], x[..., dim // 2 :])
    turned = first * cos - second * sin, first * sin + second * cos
    return np.stack(turned, axis=-1).reshape(x.shape) if interleaved else np.concatenate(turned, axis=-1)


def softmax(scores):
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


def attention(q, k, v, scale, window):
    """Computes causal attention. q: [T, H, D]; k, v: [T, G, D]; window: number of visible tokens, or 0 for all."""
    n_tokens, n_heads, _ = q.shape
    distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)[None, :]
    hidden = (distance < 0) | ((distance >= window) if window else False)
    shared = n_heads // k.shape[1]
    out = np.empty_like(q)
    for head in range(n_heads):
        scores = q[:, head] @ k[:, head // shared].T * np.float32(scale)
        scores[hidden] = -np.inf
        out[:, head] = softmax(scores) @ v[:, head // shared]
    return out.reshape(n_tokens, -1)


def activation(gate, is_gemma):
    if is_gemma:
        return 0.5 * gate * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)))
    return gate / (1 + np.exp(-gate))


def forward(w, tokens):
    is_gemma = w.architecture == "gemma3"
    eps = w.value("attention.layer_norm_rms_epsilon")
    n_heads, n_kv_heads = w.value("attention.head_count"), w.value("attention.head_count_kv")
    dim = w.value("embedding_length")
    head_dim = w.value("attention.key_length", dim // n_heads)
    window, base = w.value("attention.sliding_window", 0) if is_gemma else 0, w.value("rope.freq_base", 10000.0)
    embeddings = w.tensor("token_embd.weight")
    x = embeddings[tokens] * (np.float32(np.sqrt(dim)) if is_gemma else np.float32(1))
    for layer in range(w.value("block_count")):

        def part(name, layer=layer):
            return w.tensor(f"blk.{layer}.{name}")

        def project(x, name, n):
            y = x @ part(f"{name}.weight").T
            bias = part(f"{name}.bias")
            return (y if bias is None else y + bias).reshape(len(x), n, head_dim)

        is_local = is_gemma and layer % 6 != 5
        h = rms_norm(x, part("attn_norm.weight"), eps)
        q, k, v = project(h, "attn_q", n_heads), project(h, "attn_k", n_kv_heads), project(h, "attn_v", n_kv_heads)
        if part("attn_q_norm.weight") is not None:
            q, k = rms_norm(q, part("attn_q_norm.weight"), eps), rms_norm(k, part("attn_k_norm.weight"), eps)
        q, k = (rope(t, 10000.0 if is_local else base, w.architecture == "llama") for t in (q, k))
        h = attention(q, k, v, head_dim**-0.5, window if is_local else 0) @ part("attn_output.weight").T
        x = x + (rms_norm(h, part("post_attention_norm.weight"), eps) if is_gemma else h)
        h = rms_norm(x, part("ffn_norm.weight"), eps)
        h = activation(h @ part("ffn_gate.weight").T, is_gemma) * (h @ part("ffn_up.weight").T)
        h = h @ part("ffn_down.weight").T
        x = x + (rms_norm(h, part("post_ffw_norm.weight"), eps) if is_gemma else h)
    x = rms_norm(x, w.tensor("output_norm.weight"), eps)
    output = w.tensor("output.weight")
    return x @ (embeddings if output is None else output).T


def main():
    parser = argparse.ArgumentParser(description="Computes reference logits in plain float32 arithmetic.")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument(
        "--tokens", type=pathlib.Path, required=True, help='JSON file with "tokens", or .npz file with `tokens`'
    )
    parser.add_argument("-n", type=int, default=512)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    if options.tokens.suffix == ".npz":
        tokens = np.load(options.tokens)["tokens"][: options.n]
    else:
        tokens = np.array(json.loads(options.tokens.read_text())["tokens"][: options.n])
    logits = forward(Weights(options.model), tokens)
    np.savez(options.out, tokens=tokens, logits=logits, top1=logits.argmax(axis=-1))
    print(f"{len(tokens)} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
