"""Checks every model type of mlx-lm: whether flatkv supports it, and whether its logits match those of mlx-lm.

usage: census.py [NAME...] [--look] [--json FILE]     --look: do not compare logits; NAME: only these model types

census_models.py builds a small model of each type. Supported models run a prompt in two chunks and several single tokens in float32,
with flatkv and with mlx-lm's own caches. With 16-bit pages the logits must match. If they differ by more than MATCH, the reason must be
the rounding of rows to 16 bits: the error relative to mlx-lm with rounded rows must be at most MATCH. With quantized pages the error is
bounded, and a nonzero error shows that the logits depend on the cache. The exit status is 1 if a model fails.
"""
import argparse
import collections
import contextlib
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

MATCH = 1e-3  # maximum relative error of logits with 16-bit pages
LIMITS = {"16/16": 5e-3, "8/8": 0.1, "8/4": 0.5, "sealed": 0.5}  # maximum relative error of logits; random models amplify errors
PAGE = 16  # tokens per page; several pages are full, so that sealed codecs repack them
CUTS = [0, 20, 33, *range(34, 41)]
OWN = flatkv.lm.own_prompt_cache


def logits(model, cache, tokens):
    out = []
    for a, b in zip(CUTS, CUTS[1:]):
        rows = model(tokens[:, a:b], cache=cache).astype(mx.float32)
        out.append(mx.where(mx.isinf(rows), 0, rows))  # infinite logits mark tokens that must not be generated
        mx.eval(out[-1])
    return mx.concatenate(out, 1)


@contextlib.contextmanager
def rounded_rows():
    """Makes mlx-lm's caches round keys and values to float16."""
    methods = {cls: cls.update_and_fetch for cls in (caches.KVCache, caches.RotatingKVCache)}
    for cls, method in methods.items():
        cls.update_and_fetch = lambda self, k, v, _method=method: _method(self, k.astype(mx.float16).astype(k.dtype), v.astype(mx.float16).astype(v.dtype))
    try:
        yield
    finally:
        for cls, method in methods.items():
            cls.update_and_fetch = method


def relative(found, wanted):
    return mx.linalg.norm(found - wanted).item() / mx.linalg.norm(wanted).item()


def logit_errors(model):
    """Returns the relative error of the logits for each codec, and for 16-bit pages also the error relative to mlx-lm with rows rounded to 16 bits."""
    mx.random.seed(1)
    tokens = mx.random.randint(0, census_models.SMALL["vocab_size"], (1, CUTS[-1]))
    own = logits(model, OWN(model), tokens)
    with rounded_rows():
        rounded = logits(model, OWN(model), tokens)
    errors, after_rounding = {}, None
    for codec in LIMITS:
        flatkv.install(max_tokens=128, codec=codec, max_seqs=2, max_step_tokens=64, page_tokens=PAGE)
        found = logits(model, caches.make_prompt_cache(model), tokens)
        errors[codec] = relative(found, own)
        if codec == "16/16":
            after_rounding = relative(found, rounded)
        flatkv.uninstall()
    return {"relative": errors, "relative_to_rounded_rows": after_rounding}


def check_type(name, look):
    """Returns the result of one model type."""
    if name in census_models.EXCLUDED:
        return {"kept": False, "reason": census_models.EXCLUDED[name]}
    try:
        model = census_models.build(name)
        layers = layers_for(model)
        found = {"kept": True, "layers": len(layers), "unpacked": any(l.unpacked for l in layers), "windows": sorted({l.window for l in layers}),
                 "head_dims": sorted({(l.k_dim, l.v_dim) for l in layers})}
        return found if look else found | logit_errors(model)
    except UnsupportedModel as error:
        return {"kept": False, "reason": str(error)}
    except Exception as error:  # includes exceptions of models that mlx-lm cannot run on this machine
        return {"kept": True, "error": f"{type(error).__name__}: {str(error)[:200]}"}


def has_failed(found, look):
    """Returns whether a supported type did not run, has wrong logits, or has logits that do not depend on the cache."""
    if not found["kept"]:
        return False
    if "error" in found or look:
        return "error" in found
    errors = found["relative"]
    matches = min(errors["16/16"], found["relative_to_rounded_rows"]) <= MATCH
    return not matches or not all(errors[codec] < limit for codec, limit in LIMITS.items()) or errors["8/4"] == 0


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
    rounded = max((f["relative_to_rounded_rows"] for f in found.values() if "relative" in f), default=None)
    result = {"mlx": importlib.metadata.version("mlx"), "mlx_lm": importlib.metadata.version("mlx-lm"), "limits": LIMITS,
              "types": len(found), "counts": dict(counts), "largest": largest,
              "largest_to_rounded_rows": rounded, "wrong": wrong, "models": dict(sorted(found.items()))}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} model types: {dict(counts)}; wrong: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
