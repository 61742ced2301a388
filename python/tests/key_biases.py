"""Measures the KL divergence of quantized caches for a model with large key biases, relative to mlx-lm's float32 cache.

usage: key_biases.py [--json FILE]

The model is a small Qwen2 with random weights, because trained models are not part of this repository. Its key biases in slowly
rotating channels are 150 times as large as the other channels, as in trained models of this family, or, for comparison, small.
"""
import argparse
import json
import pathlib
import sys

import mlx.core as mx
import mlx_lm.models.cache as caches
from conftest import qwen2, random_tokens

import flatkv
from flatkv.lm import probe

CODECS = ("8/8", "8/4", "4/4", "sealed")
N_TOKENS, CHUNK = 400, 200


def log_probabilities(model, cache):
    tokens, found = random_tokens(N_TOKENS), []
    for at in range(0, N_TOKENS, CHUNK):
        logits = model(tokens[None, at:at + CHUNK], cache=cache)[0].astype(mx.float32)
        found.append(logits - mx.logsumexp(logits, -1, keepdims=True))
        mx.eval(found[-1])
    return mx.concatenate(found)


def kl(model, cache):
    wanted, found = log_probabilities(model, flatkv.lm.own_prompt_cache(model)), log_probabilities(model, cache)
    return mx.mean(mx.sum(mx.exp(wanted) * (wanted - found), -1)).item()


def divergence(model, codec):
    """Returns the KL divergence of a codec of flatkv."""
    flatkv.install(max_tokens=1024, codec=codec, max_seqs=2)
    try:
        return kl(model, caches.make_prompt_cache(model))
    finally:
        flatkv.uninstall()


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    centered, result = probe.key_center, {}
    for name, bias in (("large biases", 150.0), ("small biases", 0.5)):
        model = qwen2(bias)
        own = {f"mlx-lm {bits}-bit": kl(model, [c.to_quantized(group_size=32, bits=bits) for c in flatkv.lm.own_prompt_cache(model)]) for bits in (8, 4)}
        probe.key_center = lambda *_: ()
        plain = {f"{codec}, not centered": divergence(model, codec) for codec in CODECS}
        probe.key_center = centered
        result[name] = own | plain | {codec: divergence(model, codec) for codec in CODECS}
        for codec, value in result[name].items():
            print(f"{name:14}{codec:24}{value:9.4f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
