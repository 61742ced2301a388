"""Runs the first example of python/README.md with the needle model. readme_lines.py repeats it in a new environment."""
import pytest

pytest.importorskip("mlx_lm")
import readme_lines as r  # noqa: E402


def test_readme_and_docs_have_the_same_first_example():
    first, second = ([line.partition("#")[0].rstrip() for line in r.lines(page).splitlines()] for page in r.PAGES.values())
    assert first == second and len(first) == 4


def test_first_example_finds_a_fact_with_a_4_bit_model(tmp_path):
    book = (r.NEEDLE / "book.txt").read_text(encoding="utf-8")
    folder = r.quantized(r.needle(tmp_path / "needle"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in folder.iterdir()}
    found = r.run_lines(r.lines(r.PAGES["python/README.md"]), folder, book[:100] + r.FACT + r.QUESTION)
    assert found["printed"] and "3352009" in found["answer"]
    assert found["codec"] == "sealed" and found["max_tokens"] == 131072
