"""Models on flatkv's own runner: the model of the tree."""
import pathlib

import pytest

import flatkv
from flatkv import _library

NEEDLE = pathlib.Path(__file__).parents[2] / "models" / "needle"
QUESTION = "\nQuestion: What is the vault number of Vorselzu?\nAnswer: The vault number of Vorselzu is "
pytestmark = pytest.mark.skipif(not _library.has_models, reason="built without models")


@pytest.fixture(scope="module")
def model():
    path = next((p for p in sorted(NEEDLE.iterdir()) if p.suffix == ".gguf"), NEEDLE)
    with flatkv.Model(path) as loaded:
        yield loaded


def test_it_finds_a_fact(model):
    book = (NEEDLE / "book.txt").read_text(encoding="utf-8")
    text = book[:1500] + " The vault number of Vorselzu is 3352009. " + book[1500:3000]
    answer = flatkv.generate(model, text + QUESTION, max_new_tokens=9)
    assert "3352009" in answer


def test_tokens_and_plans(model):
    ids = model.tokenize("The vault", bos=False)
    assert model.text(ids) == "The vault"
    assert model.plan(4096).total_bytes > model.plan(2048).total_bytes
    assert flatkv.plan(model, 4096) == model.plan(4096)


def test_the_same_tokens_however_they_are_chunked(model):
    ids = model.tokenize("The vault number of Vorselzu is 3352009. The vault number of Vorselzu is")
    with flatkv.Runner(model, 512, max_step_tokens=5) as small, flatkv.Runner(model, 512) as large:
        assert list(small.stream(ids, 8)) == list(large.stream(ids, 8))


def test_a_missing_file_is_named():
    with pytest.raises(flatkv.Error, match="nowhere.gguf"):
        flatkv.Model("nowhere.gguf")
    with pytest.raises(flatkv.Error, match="nobody/nothing is no file or folder here; for a model of mlx-lm"):
        flatkv.plan("nobody/nothing", 64)


def test_what_is_closed_says_so():
    model = flatkv.Model(NEEDLE)
    runner = flatkv.Runner(model, 64)
    runner.close()
    with pytest.raises(flatkv.BadCall, match="this Runner is closed"):
        list(runner.stream([1, 2], 1))
    model.close()
    with pytest.raises(flatkv.BadCall, match="this Model is closed"):
        model.tokenize("x")
    with pytest.raises(flatkv.BadCall, match="max_tokens is -1"):
        flatkv.plan(NEEDLE, -1)
