#!/usr/bin/env python3
"""Tests flatkv serve with schemathesis and docs/openapi.yaml: valid and invalid requests must cause neither 5xx responses nor crashes.

usage: openapi_test.py <flatkv> [seconds [result.json]]     requires a Python with schemathesis
"""
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile

from serve_test import TREE, serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# The HTTP library answers unknown methods with 501, as the standard requires.
CONFIG = '[phases.coverage]\nunexpected-methods = ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]\n'


def main():
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    with serving("-c", "16K", "--parallel", "4", "--embeddings") as server, tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "schemathesis.toml")
        with open(config, "w", encoding="utf-8") as file:
            file.write(CONFIG)
        done = subprocess.run([os.path.join(os.path.dirname(sys.executable), "schemathesis"), "--config-file", config, "run",
                               os.path.join(TREE, "docs/openapi.yaml"), "-u", f"http://127.0.0.1:{server.port}", "--phases", "coverage,fuzzing", "-n", "1000",
                               "--max-time", str(seconds), "--seed", "1", "--no-shrink", "-c", CHECKS],
                              capture_output=True, text=True, cwd=folder, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        n_cases = int(re.search(r"(\d+) generated", done.stdout)[1])
        assert n_cases > 50, done.stdout[-3000:]
        assert server.raw("GET", "/health")[0] == 200
    result = {"schemathesis": importlib.metadata.version("schemathesis"), "seconds": seconds, "cases": n_cases, "server_errors": 0, "checks": CHECKS.split(",")}
    print(json.dumps(result))
    if len(sys.argv) > 3:
        with open(sys.argv[3], "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
