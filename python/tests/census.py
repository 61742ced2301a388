"""Every model type that mlx-lm tests: does flatkv keep its KV, and are the logits mlx-lm's?

usage: census.py <folder with mlx-lm's tests> [NAME...] [--look] [--json FILE]     --look: compare nothing; NAME: only these model types

mlx-lm's own test_models.py builds a small model of each type. Each is looked at as install() does; those that are accepted run a prompt
in two chunks and some single tokens, in float32, over 16-bit pages and over mlx-lm's own caches. Exit status 1 where one is wrong.
"""
import argparse
import collections
import gc
import importlib.metadata
import json
import os
import sys
import unittest

import mlx.core as mx
import mlx_lm.models.cache as caches
from mlx.utils import tree_map

import flatkv
from flatkv.lm import Refusal
from flatkv.lm.hook import layers_for

LIMIT = 5e-3
CUTS = [0, 20, 33, *range(34, 41)]
OWN = caches.make_prompt_cache


def logits(model, cache, tokens):
    out = []
    for a, b in zip(CUTS, CUTS[1:]):
        out.append(model(tokens[:, a:b], cache=cache).astype(mx.float32))
        mx.eval(out[-1])
    return mx.concatenate(out, 1)


def counted(model, vocab, look):
    """What is found of one model."""
    try:
        layers = layers_for(model)
    except Refusal as refusal:
        return {"kept": False, "reason": str(refusal)}
    found = {"kept": True, "layers": len(layers), "windows": sorted({l.window for l in layers}),
             "head_dims": sorted({(l.k_dim, l.v_dim) for l in layers})}
    if look:
        return found
    model.update(tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters()))
    mx.random.seed(1)
    tokens = mx.random.randint(0, min(vocab, 1000), (1, CUTS[-1]))
    own = logits(model, OWN(model), tokens)
    cache = caches.make_prompt_cache(model)
    size = mx.linalg.norm(own).item()
    found["relative"] = mx.linalg.norm(logits(model, cache, tokens) - own).item() / size if size else 0.0
    return found


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("tests")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--look", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    sys.path.insert(0, options.tests)
    import test_models
    found = {}

    def runner(_, model, model_type, vocab_size, num_layers):
        if options.names and model_type not in options.names:
            return
        try:
            found[model_type] = counted(model, vocab_size, options.look)
        except Exception as error:  # a model that mlx-lm itself cannot run here is told apart by the text
            found[model_type] = {"kept": True, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        print(model_type, found[model_type], flush=True)
        del model
        gc.collect()
        mx.clear_cache()

    test_models.TestModels.model_test_runner = runner
    skipped = ("rope", "mask", "quantized", "convert", "raw_hf", "kv_cache", "router", "memory")
    names = [n for n in unittest.defaultTestLoader.getTestCaseNames(test_models.TestModels) if not any(s in n for s in skipped)]
    flatkv.install(max_tokens=128, codec="16/16", max_seqs=2, max_step_tokens=64)
    with open(os.devnull, "w", encoding="utf-8") as quiet:
        unittest.TextTestRunner(stream=quiet).run(unittest.TestSuite(test_models.TestModels(n) for n in names))
    wrong = [n for n, f in found.items() if f["kept"] and not options.look and not f.get("relative", 1.0) < LIMIT]
    counts = collections.Counter("refused" if not f["kept"] else "failed" if "error" in f else "kept" for f in found.values())
    result = {"mlx": importlib.metadata.version("mlx"), "mlx_lm": importlib.metadata.version("mlx-lm"), "limit": LIMIT,
              "counts": dict(counts), "wrong": wrong, "models": dict(sorted(found.items()))}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    print(f"{len(found)} model types: {dict(counts)}; wrong: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
