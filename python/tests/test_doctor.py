"""The doctor notices kernels that do something else than a layer asks for."""
import dataclasses

import pytest

import flatkv
from flatkv import doctor

LAYERS = {"8/8": doctor.LAYER, **doctor.SHAPES}


def checked(layer, made):
    page = doctor.Page()
    codec = "8/8g32" if layer.head_dim % 64 else "8/8"
    page.attempt("x", lambda: page.kernel("x", layer, codec, lambda _, **o: flatkv.Cache(made, **o), lambda x: x, lambda *_: None))
    return page.good


@pytest.mark.parametrize("name", LAYERS)
def test_every_shape_is_good(name):
    assert checked(LAYERS[name], LAYERS[name])


@pytest.mark.parametrize("left_out", ["window", "n_sinks", "softcap", "sink_logits"])
def test_what_is_left_out_is_wrong(left_out, capsys):
    layer = next(layer for layer in doctor.SHAPES.values() if getattr(layer, left_out))
    fields = {left_out: type(getattr(layer, left_out))()} | ({"n_sinks": 0} if left_out == "window" else {})
    assert not checked(layer, dataclasses.replace(layer, **fields))
    assert "WRONG" in capsys.readouterr().out


def test_a_check_that_breaks_is_a_line_of_the_page(capsys):
    assert not checked(doctor.LAYER, flatkv.Layer(8, 3, 128))
    assert "x" in (said := capsys.readouterr().out) and "BadCall" in said
