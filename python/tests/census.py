"""Checks every model type of mlx-lm: whether flatkv supports it, and whether its logits match those of mlx-lm.

usage: census.py [NAME...] [--look] [--json FILE]     --look: do not compare logits; NAME: only these model types

census_models.py builds a small model of each type. Supported models run a prompt in two chunks and several single tokens in float32,
with flatkv and with mlx-lm's own caches. With 16-bit pages the logits must match. With quantized pages the error is bounded, and a
nonzero error shows that the logits depend on the cache. The exit status is 1 if a model fails.
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
from flatkv.lm import UnsupportedModel
from flatkv.lm.hook import layers_for

LIMITS = {"16/16": 5e-3, "8/8": 0.1, "8/4": 0.5}  # maximum relative error of logits; random models amplify errors
CUTS = [0, 20, 33, *range(34, 41)]
OWN = flatkv.lm.own_prompt_cache


def logits(model, cache, tokens):
    out = []
    for a, b in zip(CUTS, CUTS[1:]):
        out.append(model(tokens[:, a:b], cache=cache).astype(mx.float32))
        mx.eval(out[-1])
    return mx.concatenate(out, 1)


def logit_errors(model):
    """Returns the relative error of the logits for each codec."""
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


def check_type(name, look):
    """Returns the result of one model type."""
    if name in census_models.EXCLUDED:
        return {"kept": False, "reason": census_models.EXCLUDED[name]}
    try:
        model = census_models.build(name)
        layers = layers_for(model)
        found = {"kept": True, "layers": len(layers), "windows": sorted({l.window for l in layers}),
                 "head_dims": sorted({(l.k_dim, l.v_dim) for l in layers})}
        return found if look else found | {"relative": logit_errors(model)}
    except UnsupportedModel as error:
        return {"kept": False, "reason": str(error)}
    except Exception as error:  # also raised by models that mlx-lm cannot run on this machine
        return {"kept": True, "error": f"{type(error).__name__}: {str(error)[:200]}"}


def has_failed(found, look):
    """Returns whether a supported type did not run, has wrong logits, or has logits that do not depend on the cache."""
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
        found[name] = check_type(name, options.look)
        print(name, found[name], flush=True)
        gc.collect()
        mx.clear_cache()
    wrong = [n for n, f in found.items() if has_failed(f, options.look)]
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
