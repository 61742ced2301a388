"""Every model type of mlx-lm: does flatkv keep its KV, and are the logits mlx-lm's?

usage: census.py [NAME...] [--look] [--json FILE]     --look: compare nothing; NAME: only these model types

census_models.py builds a small model of each type. Each is looked at as install() does; those that are accepted run a prompt in two chunks
and some single tokens, in float32, over flatkv's pages and over mlx-lm's own caches. Pages of 16 bits have to give mlx-lm's logits; what
packed pages may change is bounded too, and shows that the logits depend on the cache at all. Exit status 1 where one is wrong.
"""
import argparse
import collections
import gc
import importlib.metadata
import json
import pathlib
import sys

import census_models
import mlx.core as mx
import mlx_lm.models.cache as caches

import flatkv
from flatkv.lm import Refusal
from flatkv.lm.hook import layers_for

LIMITS = {"16/16": 5e-3, "8/8": 0.1, "8/4": 0.5}  # of the change of logits; random models are not forgiving
CUTS = [0, 20, 33, *range(34, 41)]
OWN = caches.make_prompt_cache


def logits(model, cache, tokens):
    out = []
    for a, b in zip(CUTS, CUTS[1:]):
        out.append(model(tokens[:, a:b], cache=cache).astype(mx.float32))
        mx.eval(out[-1])
    return mx.concatenate(out, 1)


def compared(model):
    """The change of the logits by codec, as a fraction of their size."""
    mx.random.seed(1)
    tokens = mx.random.randint(0, census_models.SMALL["vocab_size"], (1, CUTS[-1]))
    own = logits(model, OWN(model), tokens)
    size = mx.linalg.norm(own).item()
    found = {}
    for codec in LIMITS:
        flatkv.install(max_tokens=128, codec=codec, max_seqs=2, max_step_tokens=64)
        found[codec] = mx.linalg.norm(logits(model, caches.make_prompt_cache(model), tokens) - own).item() / size
        flatkv.uninstall()
    return found


def counted(name, look):
    """What is found of one model type."""
    if name in census_models.WITHOUT:
        return {"kept": False, "reason": census_models.WITHOUT[name]}
    try:
        model = census_models.build(name)
        layers = layers_for(model)
        found = {"kept": True, "layers": len(layers), "windows": sorted({l.window for l in layers}),
                 "head_dims": sorted({(l.k_dim, l.v_dim) for l in layers})}
        return found if look else found | {"relative": compared(model)}
    except Refusal as refusal:
        return {"kept": False, "reason": str(refusal)}
    except Exception as error:  # a model that mlx-lm itself cannot run here is told apart by the text
        return {"kept": True, "error": f"{type(error).__name__}: {str(error)[:200]}"}


def is_wrong(found, look):
    """An accepted type that did not run, or whose logits are not mlx-lm's, or do not depend on the cache."""
    if not found["kept"]:
        return False
    if "error" in found or look:
        return "error" in found
    relative = found["relative"]
    return not all(relative[codec] < limit for codec, limit in LIMITS.items()) or relative["8/4"] == 0


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--look", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    found = {}
    for name in options.names or census_models.names():
        found[name] = counted(name, options.look)
        print(name, found[name], flush=True)
        gc.collect()
        mx.clear_cache()
    wrong = [n for n, f in found.items() if is_wrong(f, options.look)]
    counts = collections.Counter("refused" if not f["kept"] else "failed" if "error" in f else "kept" for f in found.values())
    largest = {codec: max((f["relative"][codec] for f in found.values() if "relative" in f), default=None) for codec in LIMITS}
    result = {"mlx": importlib.metadata.version("mlx"), "mlx_lm": importlib.metadata.version("mlx-lm"), "limits": LIMITS,
              "types": len(found), "counts": dict(counts), "largest": largest, "wrong": wrong, "models": dict(sorted(found.items()))}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} model types: {dict(counts)}; wrong: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
