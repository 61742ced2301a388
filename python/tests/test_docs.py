"""Runs the Python examples of docs/python.md and python/README.md, except for the one that test_readme.py runs."""
import pathlib
import re
import subprocess
import sys

import pytest
import readme_lines

from flatkv import _library

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = [(name, i, code) for name, page in readme_lines.PAGES.items()
            for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)) if code != readme_lines.lines(page)]


def run(code, folder):
    """Runs code in folder, outside the checkout, and returns its output."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


#: The needle model has no chat template, so conversations are replaced by their last message.
WITHOUT_TEMPLATE = "import flatkv\nflatkv.Model.chat_tokens = lambda model, messages: model.tokenize(messages[-1]['content'])\n"


@pytest.mark.parametrize("page,number,code", EXAMPLES, ids=[f"{page}-{i}" for page, i, _ in EXAMPLES])
def test_example_runs(page, number, code, tmp_path):
    if "mlx_lm" in code:
        pytest.importorskip("mlx_lm")
        folder = readme_lines.needle(tmp_path / "model")
        code = re.sub(r'mlx_lm\.load\("[^"]+"\)', f"mlx_lm.load({str(folder)!r})", code)
    elif "smollm2.gguf" in code:
        if not _library.has_models:
            pytest.skip("flatkv was built without model support")
        code = WITHOUT_TEMPLATE + code.replace("smollm2.gguf", str(ROOT / "models" / "needle"))
    assert run(code, tmp_path)


def test_every_page_has_examples():
    assert [page for page, _, _ in EXAMPLES].count("docs/python.md") >= 2
