"""Runs mlx-lm's own tests with flatkv installed.

usage: mlx_lm_tests.py [<folder with mlx-lm's tests>] [--files NAME,...] [--json FILE]

The tests are not part of the wheel. Without a folder, they are taken from the sdist of the installed version, which pip downloads; they
require `requests`. The downloaded test model is replaced by a small Llama with random weights and a byte tokenizer. Pages are 16-bit.
Tests that check the type or the internals of mlx-lm's own caches are skipped with a reason. Tests that also fail without flatkv are
skipped as well, because they depend on the original model.
"""
import argparse
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # makes tests that download models fail immediately
import mlx.core as mx  # noqa: E402
import mlx_lm.utils  # noqa: E402
from conftest import llama, tokenizer  # noqa: E402

import flatkv  # noqa: E402

INTERNALS = "checks the type or the internals of mlx-lm's own cache"
QUANTIZED = "converts mlx-lm's cache to its quantized cache; flatkv quantizes on write"
SKIPPED = {
    "test_trim_cache": INTERNALS,
    "test_cache_to_quantized": QUANTIZED,
    "test_batch_max_kv_size_creates_rotating_cache": INTERNALS,
    "test_batch_max_kv_size_limits_cache_growth": INTERNALS,
    "test_batch_max_kv_size_none_creates_regular_cache": INTERNALS,
    "test_completion_quantizes_the_cache": QUANTIZED,
}
# test_models builds models with up to 8192 channels and 40 layers, and float16 models with experts, but never evaluates them. With
# flatkv, each pass on MLX's CPU backend is evaluated before the next one begins. These models are too large to evaluate, and MLX's CPU
# backend lacks float16 operations that they need. census.py tests every model type instead.
LEFT_OUT = ("test_models",)


def load(*_, **__):
    return llama(layers=2, vocab=300), tokenizer()


class Result(unittest.TextTestResult):
    """Records the outcome of every test by name."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.found = {}

    def _note(self, test, outcome):
        self.found[test.id()] = outcome

    def addSuccess(self, test):
        super().addSuccess(test)
        self._note(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._note(test, f"skipped: {reason}")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._note(test, f"FAILED: {str(err[1]).splitlines()[0][:200] if str(err[1]) else err[0].__name__}")

    addError = addFailure

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note(test, f"FAILED: {(str(err[1]).splitlines() or [err[0].__name__])[0][:200]}")


def with_skips(suite, reasons):
    """Yields all tests; those with a reason are skipped when they run."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from with_skips(test, reasons)
            continue
        reason = reasons.get(test.id()) or SKIPPED.get(test.id().rpartition(".")[2])
        if reason:
            test.setUp = lambda reason=reason, test=test: test.skipTest(reason)
        yield test


def download(folder):
    """Downloads the sdist of the installed mlx-lm and returns its folder of tests."""
    name = f"mlx-lm=={importlib.metadata.version('mlx-lm')}"
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder, name], check=True)
    with tarfile.open(next(pathlib.Path(folder).glob("*.tar.gz"))) as sdist:
        sdist.extractall(folder, filter="data")
    return next(pathlib.Path(folder).glob("mlx_lm-*/tests"))


def run(files, reasons):
    for name in files:  # reimported, because they import functions that install() replaces
        sys.modules.pop(name, None)
    loader = unittest.TestLoader()
    tests = unittest.TestSuite(with_skips(loader.loadTestsFromNames(files), reasons))
    if len(loader.errors) == len(files):  # some files may need packages that are not installed
        sys.exit(f"{loader.errors[0].strip()}\nthe tests cannot be imported; check that they belong to mlx-lm {importlib.metadata.version('mlx-lm')}")
    return unittest.TextTestRunner(resultclass=Result, stream=sys.stderr).run(tests)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("tests", nargs="?", type=pathlib.Path)
    parser.add_argument("--files", type=lambda text: text.split(","), help="files to run (default: all except test_models)")
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = options.tests or download(folder)
        files = options.files or sorted(path.stem for path in tests.glob("test_*.py") if path.stem not in LEFT_OUT)
        sys.path.insert(0, str(tests))
        mlx_lm.utils.load = load
        plain = run(files, {}).found
        reasons = {name: f"also fails without flatkv: {outcome[8:]}" for name, outcome in plain.items() if outcome.startswith("FAILED")}
        flatkv.install(max_tokens=16384, codec="16/16", max_seqs=64, max_step_tokens=8192)
        result = run(files, reasons)
        for name in reasons.keys() & result.found.keys():  # failures before a test can be skipped, such as in setUpClass()
            result.found[name] = f"skipped: {reasons[name]}"
    counts = {word: sum(outcome.startswith(word) for outcome in result.found.values()) for word in ("passed", "skipped", "FAILED")}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"mlx": mx.__version__, "mlx_lm": importlib.metadata.version("mlx-lm"), "counts": counts,
                       "tests": dict(sorted(result.found.items()))}, file, indent=1)
            file.write("\n")
    print(counts)
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips the destructors of MLX's threads, which abort the process
