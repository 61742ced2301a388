#!/usr/bin/env python3
"""Checks which modules include which headers. The rules are described in docs/architecture.md.

usage: include_rules.py <source tree> | --self-test

Prints one line per violation, "file:line: violation and reason", and exits with status 1 if there are any. --self-test writes
small source trees that each violate one rule, and checks that exactly this violation is found.
"""
import os
import re
import sys
import tempfile

# Includes allowed in each module in addition to system headers: modules (folders of src), single headers that a module exports,
# and the public headers.
RULES = {
    "base": {"base", "public"},
    "codec": {"base", "codec", "public"},
    "pager": {"base", "pager", "public"},  # uses only integers
    "store": {"base", "codec", "pager", "store", "public"},
    "attn": {"base", "codec", "attn", "public"},
    "matrix": {"base", "matrix", "public"},
    "cache": {"base", "codec", "pager", "store", "attn", "cache", "public"},
    "mlx": {"base", "codec", "store", "attn", "cache", "mlx", "public"},  # implements the device interface of src/cache/device.h
    "text": {"base", "text", "public"},  # tokenizers, chat templates, reply parsing
    "model": {"base", "matrix", "text", "model", "src/cache/cache_workers.h", "public"},  # uses the public cache API for everything else
    "model_mlx": {"base", "model", "model_mlx", "src/mlx/mlx_graph.h", "src/mlx/mlx_kernel.h", "src/mlx/mlx_product.h", "public"},  # src/model/mlx
    "engine": {"base", "engine", "public"},  # uses the public APIs of models and caches
    "kit": {"kit"},  # shared by the programs; independent of flatkv
    "hub": {"kit", "hub", "public"},  # the program's downloads
    "serve": {"kit", "serve", "public"},  # the program's HTTP server
    "cli": {"cli", "kit", "hub", "src/serve/serve.h", "public"},
    "bench": {"base", "codec", "attn", "matrix", "mlx", "bench", "kit", "tests", "public"},  # kernels and their references
    "tests": {"base", "codec", "pager", "store", "attn", "matrix", "cache", "mlx", "text", "model", "model_mlx", "kit", "cli", "tests",
              "engine", "serve", "hub", "public"},
    "python": {"python", "public"},  # the package's extension
    "fuzz": {"base", "codec", "pager", "store", "attn", "cache", "matrix", "text", "model", "engine", "serve", "hub", "fuzz", "tests", "public"},
}

# Headers of instruction sets, SDKs and libraries, each with the only folders that may include it.
SIMD = "src/base/simd or src/attn/cpu or src/matrix/cpu"
RESTRICTED = {
    "immintrin.h": SIMD, "x86intrin.h": SIMD, "arm_neon.h": SIMD, "arm_sve.h": SIMD,
    "mlx/": "src/mlx", "flatkv/mlx.h": "src/mlx or src/model/mlx", "Metal/": "src/mlx", "cuda": "src/attn/gpu/cuda",
    "jemalloc/": "no folder of the library", "mach/": "src/base", "isa-l": "src/base", "openssl/": "src/base or src/hub", "curl/": "src/hub", "xxhash.h": "src/pager",
    "flatkv/model.h": "src/text or src/model or src/engine", "flatkv/engine.h": "src/engine",  # libflatkv contains only the cache
    "pcre2.h": "src/text", "jansson.h": "src/text or src/model or src/hub", "utf8proc.h": "src/text", "event2/": "src/serve",
}
# The restrictions apply to the library only. Tests and programs may include anything, and one public header uses MLX arrays.
UNRESTRICTED = ("tests/", "bench/", "fuzz/", "src/cli/", "src/kit/", "src/serve/", "python/", "include/flatkv/mlx.h")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def module_of(path):
    """Returns the module of a file, or None for a file without rules."""
    parts = path.split("/")
    if parts[0] == "include":
        return "public"
    if parts[:3] == ["src", "model", "mlx"]:
        return "model_mlx"
    if parts[0] == "src":
        return parts[1] if len(parts) > 2 else "src"
    return parts[0] if parts[0] in RULES else None


def source_files(root):
    for top in ("include", "src", "tests", "bench", "fuzz", "python"):
        for folder, folders, names in os.walk(os.path.join(root, top)):
            folders.sort()
            for name in sorted(names):
                if name.endswith((".c", ".h", ".cpp", ".hpp")):
                    yield os.path.relpath(os.path.join(folder, name), root)


def check_include(root, path, quote, target, module):
    """Returns the violation of one include, or None."""
    if target.endswith((".c", ".cpp")):
        return f"includes the source file {target}; only headers may be included"
    if quote == "<":
        for restricted, home in RESTRICTED.items():
            homes = tuple(folder + "/" for folder in home.split(" or "))
            if target.startswith(restricted) and not path.startswith(homes + UNRESTRICTED):
                return f"includes <{target}>, which belongs inside {home}"
        return None
    resolved = os.path.normpath(os.path.join(os.path.dirname(path), target))
    if resolved.startswith("..") or not os.path.isfile(os.path.join(root, resolved)):
        return f'includes "{target}", which does not exist relative to the file'
    other = module_of(resolved)
    if module == "public":
        return None if other == "public" else f"a public header includes {resolved}"
    allowed = RULES[module]
    if other not in allowed and resolved not in allowed:
        return f"{module} includes {resolved} of {other}; {module} may include {', '.join(sorted(allowed))}"
    return None


def violations(root):
    found = []
    seen_names = {}
    for path in source_files(root):
        module = module_of(path)
        if module not in RULES and module != "public":
            found.append(f"{path}:1: module {module} has no rules; add it to tests/include_rules.py and docs/architecture.md")
            continue
        if path.startswith("src/"):
            name = os.path.basename(path)
            if name in seen_names:
                found.append(f"{path}:1: the name {name} is already used by {seen_names[name]}; file names are unique in src")
            seen_names.setdefault(name, path)
        with open(os.path.join(root, path), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                match = INCLUDE.match(line)
                wrong = match and check_include(root, path, match[1], match[2], module)
                if wrong:
                    found.append(f"{path}:{number}: {wrong}")
    return found


GOOD_TREE = {
    "include/flatkv/flatkv.h": "#include <stdint.h>\n",
    "include/flatkv/mlx.h": "#include <mlx/c/mlx.h>\n",
    "src/base/base.h": "#include <flatkv/flatkv.h>\n",
    "src/base/simd/vec_avx2.h": '#include "../base.h"\n#include <immintrin.h>\n',
    "src/codec/codec.h": '#include "../base/base.h"\n',
    "src/pager/pager.h": '#include "../base/base.h"\n',
    "src/store/slab.h": '#include "../pager/pager.h"\n',
    "src/attn/attn.h": '#include "../codec/codec.h"\n',
    "src/matrix/matrix.h": '#include "../base/base.h"\n',
    "src/cache/device.h": '#include "../attn/attn.h"\n',
    "src/cache/cache_workers.h": '#include "../base/base.h"\n',
    "src/cache/cache.c": '#include "device.h"\n#include "../store/slab.h"\n',
    "src/mlx/mlx_graph.h": "#include <mlx/c/mlx.h>\n",
    "src/mlx/mlx_device.c": '#include "../cache/device.h"\n#include "mlx_graph.h"\n',
    "src/text/tokenizer/tokenizer.h": '#include "../../base/base.h"\n#include <pcre2.h>\n#include <jansson.h>\n',
    "src/model/runner.h": '#include "../matrix/matrix.h"\n#include "../cache/cache_workers.h"\n#include "../text/tokenizer/tokenizer.h"\n',
    "src/model/config.c": "#include <jansson.h>\n",
    "src/model/mlx/array_runner.c": '#include "../runner.h"\n#include "../../mlx/mlx_graph.h"\n#include <flatkv/mlx.h>\n',
    "src/kit/options.h": "\n",
    "src/cli/main.c": '#include "../kit/options.h"\n#include <flatkv/flatkv.h>\n',
    "tests/test_pager.c": '#include "../src/pager/pager.h"\n#include <openssl/evp.h>\n',
    "bench/bench_attn.c": '#include "../src/attn/attn.h"\n',
}
BAD_FILES = [  # (file, contents, expected violation)
    ("src/base/low.c", '#include "../codec/codec.h"\n', "base includes src/codec/codec.h"),
    ("src/pager/tree.c", '#include "../codec/codec.h"\n', "pager includes src/codec/codec.h"),
    ("src/pager/file.c", '#include "../store/slab.h"\n', "pager includes src/store/slab.h"),
    ("src/store/up.c", '#include "../cache/device.h"\n', "store includes src/cache/device.h"),
    ("src/codec/up.c", '  #  include "../attn/attn.h"\n', "codec includes src/attn/attn.h"),
    ("src/attn/page.c", '#include "../pager/pager.h"\n', "attn includes src/pager/pager.h"),
    ("src/attn/product.c", '#include "../matrix/matrix.h"\n', "attn includes src/matrix/matrix.h"),
    ("src/matrix/score.c", '#include "../attn/attn.h"\n', "matrix includes src/attn/attn.h"),
    ("src/cli/deep.c", '#include "../base/base.h"\n', "cli includes src/base/base.h"),
    ("src/kit/plot.c", '#include "../base/base.h"\n', "kit includes src/base/base.h"),
    ("bench/bench_attn.c", '#include "../src/cache/device.h"\n', "bench includes src/cache/device.h"),
    ("src/attn/device.c", '#include "../cache/device.h"\n', "attn includes src/cache/device.h"),
    ("src/attn/reach.c", "#include <mlx/c/mlx.h>\n", "belongs inside src/mlx"),
    ("src/attn/all.c", '#include "cpu/one.c"\n', "includes the source file cpu/one.c"),
    ("src/codec/fast.c", "#include <immintrin.h>\n", "belongs inside src/base/simd"),
    ("src/pager/heap.c", "#include <jemalloc/jemalloc.h>\n", "belongs inside no folder"),
    ("src/pager/codec.h", "\n", "file names are unique in src"),
    ("src/codec/lost.c", '#include "nowhere.h"\n', "does not exist relative to the file"),
    ("src/novel/llama.c", "\n", "module novel has no rules"),
    ("src/landing.c", "\n", "module src has no rules"),
    ("src/text/weights.c", '#include "../model/runner.h"\n', "text includes src/model/runner.h"),
    ("src/model/regex.c", "#include <pcre2.h>\n", "belongs inside src/text"),
    ("src/model/fold.c", "#include <utf8proc.h>\n", "belongs inside src/text"),
    ("src/engine/parse.c", "#include <jansson.h>\n", "belongs inside src/text or src/model or src/hub"),
    ("src/model/curl.c", "#include <curl/curl.h>\n", "belongs inside src/hub"),
    ("src/model/deep.c", '#include "../attn/attn.h"\n', "model includes src/attn/attn.h"),
    ("src/model/seam.c", '#include "../cache/device.h"\n', "model includes src/cache/device.h"),
    ("src/model/reach_mlx.c", '#include "../mlx/mlx_graph.h"\n', "model includes src/mlx/mlx_graph.h"),
    ("src/model/public_mlx.c", "#include <flatkv/mlx.h>\n", "belongs inside src/mlx or src/model/mlx"),
    ("src/engine/deep.c", '#include "../model/runner.h"\n', "engine includes src/model/runner.h"),
    ("src/model/mlx/device.c", '#include "../../cache/device.h"\n', "model_mlx includes src/cache/device.h"),
    ("src/cache/runtime.c", "#include <flatkv/model.h>\n", "belongs inside src/text or src/model or src/engine"),
    ("src/store/requests.c", "#include <flatkv/engine.h>\n", "belongs inside src/engine"),
    ("include/flatkv/more.h", '#include "../../src/base/base.h"\n', "a public header includes src/base/base.h"),
]


def write_tree(root, files):
    for path, text in files.items():
        os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
        with open(os.path.join(root, path), "w", encoding="utf-8") as file:
            file.write(text)


def self_test():
    n_failed = 0
    cases = [(None, None, None)] + BAD_FILES
    for path, text, expected in cases:
        with tempfile.TemporaryDirectory() as root:
            write_tree(root, {**GOOD_TREE, **({path: text} if path else {})})
            found = violations(root)
        good = not found if path is None else any(line.startswith(path + ":") and expected in line for line in found)
        if not good or len(found) > 1:
            n_failed += 1
            print(f"FAIL {path or 'the valid tree'}: expected {expected or 'nothing'}, got {found}")
    print(f"{len(cases) - n_failed} passed, {n_failed} failed")
    return n_failed


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--self-test":
        sys.exit(1 if self_test() else 0)
    found = violations(sys.argv[1])
    for line in found:
        print(line)
    print("no violations of the include rules" if not found else f"{len(found)} violations of the include rules")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
