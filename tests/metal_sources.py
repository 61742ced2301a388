#!/usr/bin/env python3
"""Compiles the Metal kernel sources with clang++ and a shim of metal_stdlib to check names, types and address spaces. Unlike
Metal, clang accepts pointers and references without an address space, so the script searches for them separately.

usage: metal_sources.py <make_kernel_sources> <clang++> [--self-test]

--self-test breaks sources in ways that must be detected.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

SHIM = pathlib.Path(__file__).parent / "metal_shim"
FLAGS = ["-x", "c++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
         "-Wno-unused-parameter", "-Wno-unused-function", "-isystem", str(SHIM)]
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
PART = re.compile(r"[,;{}]|(?<!\w)\(|\((?![&*])")
NO_SPACE = re.compile(r"\s*(?!return )(?:const |static |FKV_FN )*\w+(?:<[^<>]*>)?(?: const)? \(?[*&]+\w+")
#: These kernels depend little on the layer, so only those of every sixth case are compiled.
SIMPLE = re.compile(r"kernel_case_(\d+)_(?:copy_decoded|copy_pages|put_numbers|merge)\.metal")
BREAKS = [  # (case, kernel, old text, new text)
    (0, "decode", "FKV_DEVICE const fkv_u8 *block = blocks", "FKV_SHARED const fkv_u8 *block = blocks"),
    (0, "decode", "FKV_SHARED float *weights = shared", "float *weights = shared"),
    (2, "decode", "FKV_SHARED const float *stats = sums", "FKV_DEVICE const float *stats = sums"),
    (0, "prefill", "FKV_DEVICE const fkv_u8 *block;", "FKV_SHARED const fkv_u8 *block;"),
    (0, "prefill", "fkv_left_load(FKV_SHARED const float *at", "fkv_left_load(const float *at"),
    (0, "prefill", "typedef metal::simdgroup_float8x8 fkv_sums;", "typedef metal::simdgroup_half8x8 fkv_sums;"),
    (0, "prefill", "FKV_LOCAL const sg_keys &keys", "const sg_keys &keys"),
    (44, "decode", "FKV_LOCAL const chunk &x", "const chunk &x"),
    (44, "decode", "typedef sg_side<opened::fkv_v_shape> v;", "typedef sg_side<opened::fkv_v_form> v;"),
    (0, "merge", "fkv_sync();", "fkv_sink();"),
    (0, "write", "(FKV_DEVICE fkv_u8 *)pool", "(FKV_SHARED fkv_u8 *)pool"),
]


def compiles(compiler, path):
    for part in PART.split(COMMENT.sub("", path.read_text())):
        if NO_SPACE.match(part):
            return False, f"no address space: {part.strip()}"
    run = subprocess.run([compiler, *FLAGS, path], capture_output=True, text=True, check=False)
    return run.returncode == 0, run.stderr


def main():
    maker, compiler = sys.argv[1:3]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([maker, "metal", folder], check=True)
        sources = [path for path in sorted(pathlib.Path(folder).glob("*.metal"))
                   if not (simple := SIMPLE.fullmatch(path.name)) or int(simple[1]) % 6 == 0]
        if "--self-test" in sys.argv:
            for case, kernel, old, new in BREAKS:
                path = pathlib.Path(folder) / f"kernel_case_{case}_{kernel}.metal"
                text = path.read_text()
                assert old in text, old
                path.write_text(text.replace(old, new))
                if compiles(compiler, path)[0]:
                    failed += 1
                    print(f"case {case}, {kernel}: replacing '{old}' by '{new}' was not detected")
                path.write_text(text)
        else:
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                results = list(pool.map(lambda path: compiles(compiler, path), sources))
            for path, (good, errors) in zip(sources, results):
                if not good:
                    failed += 1
                    print(f"{path.name}\n{errors[:2000]}")
        print(f"{len(sources)} sources, {failed} failed")
    sys.exit(1 if failed or not sources else 0)


main()
