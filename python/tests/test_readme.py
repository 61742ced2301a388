"""The lines that the pages show, on the needle model as mlx-community would have it. readme_lines.py does it in a fresh environment, with a GGUF file too."""
import pytest

pytest.importorskip("mlx_lm")
import readme_lines as r  # noqa: E402


def test_the_pages_show_the_same_lines():
    first, second = ([line.partition("#")[0].rstrip() for line in r.lines(page).splitlines()] for page in r.PAGES.values())
    assert first == second and len(first) == 4


def test_the_lines_find_a_fact_in_a_folder_of_4_bits(tmp_path):
    book = (r.NEEDLE / "book.txt").read_text(encoding="utf-8")
    folder = r.quantized(r.needle(tmp_path / "needle"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in folder.iterdir()}
    found = r.run_lines(r.lines(r.PAGES["python/README.md"]), folder, book[:100] + r.FACT + r.QUESTION)
    assert found["printed"] and "3352009" in found["answer"]
    assert found["codec"] == "8/4" and found["max_tokens"] == 131072
