"""mlx-lm's own tests of prompt caches, generation, batching and the server's cache, with flatkv installed.

usage: mlx_lm_tests.py <folder with mlx-lm's tests> [--json FILE]

The tests are those of the mlx-lm that is installed: its wheel has none, its repository has them under the tag of the version. They need `requests`.
Their model, which would be downloaded, is replaced by a small Llama with random weights and a tokenizer of bytes. Pages are of 16 bits.
Tests that ask for the insides or the type of mlx-lm's own caches are left out, with the reason; so are those that fail without flatkv:
that model is not the one they were written for.
"""
import argparse
import importlib.metadata
import json
import sys
import unittest

import mlx.core as mx
import mlx_lm.utils
from conftest import llama, tokenizer

import flatkv

INSIDES = "asks for the type or the insides of mlx-lm's own cache"
QUANTIZED = "turns mlx-lm's cache into mlx-lm's quantized one: flatkv's pages are packed from the start"
LEFT_OUT = {
    "test_trim_cache": INSIDES,
    "test_cache_to_quantized": QUANTIZED,
    "test_batch_max_kv_size_creates_rotating_cache": INSIDES,
    "test_batch_max_kv_size_limits_cache_growth": INSIDES,
    "test_batch_max_kv_size_none_creates_regular_cache": INSIDES,
}
FILES = ("test_prompt_cache", "test_generate", "test_server")


def load(*_, **__):
    return llama(layers=2, vocab=300), tokenizer()


class Result(unittest.TextTestResult):
    """Remembers every test by name."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.found = {}

    def _note(self, test, what):
        self.found[test.id()] = what

    def addSuccess(self, test):
        super().addSuccess(test)
        self._note(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._note(test, f"left out: {reason}")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._note(test, f"FAILED: {str(err[1]).splitlines()[0][:200] if str(err[1]) else err[0].__name__}")

    addError = addFailure


def chosen(suite, reasons):
    """The tests, one after the other; those with a reason are skipped."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from chosen(test, reasons)
            continue
        reason = reasons.get(test.id()) or LEFT_OUT.get(test.id().rpartition(".")[2])
        if reason:
            test.setUp = lambda reason=reason, test=test: test.skipTest(reason)
        yield test


def run(reasons):
    for name in FILES:  # they import functions that install() replaces
        sys.modules.pop(name, None)
    loader = unittest.TestLoader()
    tests = unittest.TestSuite(chosen(loader.loadTestsFromNames(FILES), reasons))
    if loader.errors:
        sys.exit(f"{loader.errors[0].strip()}\nthese tests cannot be imported: are they of mlx-lm {importlib.metadata.version('mlx-lm')}?")
    return unittest.TextTestRunner(resultclass=Result, stream=sys.stderr).run(tests)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("tests")
    parser.add_argument("--json")
    options = parser.parse_args()
    sys.path.insert(0, options.tests)
    mlx_lm.utils.load = load
    plain = run({}).found
    reasons = {name: f"fails without flatkv too: {text[8:]}" for name, text in plain.items() if text.startswith("FAILED")}
    flatkv.install(max_tokens=16384, codec="16/16", max_seqs=64, max_step_tokens=8192)
    result = run(reasons)
    counts = {word: sum(text.startswith(word) for text in result.found.values()) for word in ("passed", "left out", "FAILED")}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"mlx": mx.__version__, "mlx_lm": importlib.metadata.version("mlx-lm"), "counts": counts,
                       "tests": dict(sorted(result.found.items()))}, file, indent=1)
            file.write("\n")
    print(counts)
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
