#!/usr/bin/env python3
"""Checks scripts/make-sbom: the bill of materials lists every library that the program needs, identical builds produce identical files, and
unknown libraries and changed vendored files are errors.

usage: sbom_test.py BUILD_FOLDER
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

TREE = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(sys.argv[1]).resolve()


def make(tree=TREE, **environment):
    done = subprocess.run([sys.executable, tree / "scripts/make-sbom", BUILD], capture_output=True, text=True, check=False, env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


def main():
    code, text, error = make(SOURCE_DATE_EPOCH="86400")
    assert code == 0, error
    assert make(SOURCE_DATE_EPOCH="86400")[1] == text
    sbom = json.loads(text)
    assert (sbom["bomFormat"], sbom["specVersion"], sbom["metadata"]["timestamp"]) == ("CycloneDX", "1.5", "1970-01-02T00:00:00Z"), sbom
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", sbom["serialNumber"]), sbom["serialNumber"]
    components = {one["name"]: one for one in sbom["components"]}
    assert {"isa-l", "openssl", "xxhash", "marked", "dompurify"} <= set(components), sorted(components)
    assert len({one["bom-ref"] for one in sbom["components"]}) == len(sbom["components"])
    for one in sbom["components"]:
        assert one["version"] and one["purl"].endswith("@" + one["version"]), one
    needed = subprocess.run(["readelf", "-d", BUILD / "flatkv"], check=True, capture_output=True, text=True).stdout
    listed = {p["value"] for one in sbom["components"] for p in one.get("properties", []) if p["name"] == "flatkv:soname"}
    assert {"libevent-2.1.so.7", "libjansson.so.4"} & set(re.findall(r"\[(.*?)\]", needed)) <= listed, (needed, listed)

    with tempfile.TemporaryDirectory() as folder:
        fake = os.path.join(folder, "readelf")
        with open(fake, "w", encoding="ascii") as file:
            file.write("#!/bin/sh\necho ' 0x1 (NEEDED) Shared library: [libsurprise.so.1]'\n")
        os.chmod(fake, 0o700)
        code, _, error = make(PATH=folder + ":" + os.environ["PATH"])
        assert code == 1 and "unknown libraries: libsurprise.so.1" in error, (code, error)
        tree = pathlib.Path(folder) / "tree"
        for part in ("scripts", "src/serve/page/vendor"):
            shutil.copytree(TREE / part, tree / part)
        with open(tree / "src/serve/page/vendor/marked.esm.js", "a", encoding="ascii") as file:
            file.write("\n")
        code, _, error = make(tree)
        assert code == 1 and "marked.esm.js is not the file of marked" in error, (code, error)
    print(f"{len(components)} components")


main()
