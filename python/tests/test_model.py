"""Tests flatkv.Model and flatkv.Runner with the needle model."""
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


def test_generate_finds_a_fact_in_the_prompt(model):
    book = (NEEDLE / "book.txt").read_text(encoding="utf-8")
    text = book[:1500] + " The vault number of Vorselzu is 3352009. " + book[1500:3000]
    answer = flatkv.generate(model, text + QUESTION, max_new_tokens=9)
    assert "3352009" in answer


def test_tokenize_and_plan(model):
    ids = model.tokenize("The vault", bos=False)
    assert model.text(ids) == "The vault"
    assert model.plan(4096).total_bytes > model.plan(2048).total_bytes
    assert flatkv.plan(model, 4096) == model.plan(4096)


def test_a_decoder_joins_characters_that_are_split_over_tokens(model):
    ids = model.tokenize("naïve 数字 🙂", bos=False)
    decoder = model.decoder()
    parts = [decoder.add(t) for t in ids]
    assert "".join(parts) + decoder.finish() == "naïve 数字 🙂" and "" in parts
    assert "\ufffd" in "".join(model.text([t]) for t in ids)


def test_repr_of_a_model(model):
    assert repr(model).startswith("<flatkv.Model") and f"{model.n_layers} layers" in repr(model)


def test_tokens_do_not_depend_on_the_chunk_size(model):
    ids = model.tokenize("The vault number of Vorselzu is 3352009. The vault number of Vorselzu is")
    with flatkv.Runner(model, 512, max_step_tokens=5) as small, flatkv.Runner(model, 512) as large:
        assert list(small.stream(ids, 8)) == list(large.stream(ids, 8))


def test_a_missing_file_is_named_in_the_error():
    with pytest.raises(FileNotFoundError, match="nowhere.gguf"):
        flatkv.Model("nowhere.gguf")
    with pytest.raises(FileNotFoundError, match="nobody/nothing does not exist; pass the path of a model, or a model that mlx_lm.load"):
        flatkv.plan("nobody/nothing", 64)


def test_closed_models_and_runners_raise():
    model = flatkv.Model(NEEDLE)
    runner = flatkv.Runner(model, 64)
    runner.close()
    with pytest.raises(flatkv.BadCall, match="this Runner is closed"):
        list(runner.stream([1, 2], 1))
    model.close()
    with pytest.raises(flatkv.BadCall, match="this Model is closed"):
        model.tokenize("x")
    with pytest.raises(flatkv.BadCall, match="max_tokens must be"):
        flatkv.plan(NEEDLE, -1)
