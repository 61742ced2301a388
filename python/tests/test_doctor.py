"""Checks that doctor detects kernels that ignore an option of the layer."""
import dataclasses

import pytest

import flatkv
from flatkv import doctor

LAYERS = {"8/8": doctor.LAYER, **doctor.SHAPES}


def passes(layer, made):
    """Returns whether doctor accepts a cache that was created with the layer `made` when it checks for `layer`."""
    page = doctor.Page()
    codec = "8/8g32" if layer.head_dim % 64 else "8/8"
    page.attempt("x", lambda: page.kernel("x", layer, codec, lambda _, **o: flatkv.Cache(made, **o), lambda x: x, lambda *_: None))
    return page.good


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_shape_passes(name):
    assert passes(LAYERS[name], LAYERS[name])


@pytest.mark.parametrize("ignored", ["window", "n_sinks", "softcap", "sink_logits"])
def test_an_ignored_layer_option_is_detected(ignored, capsys):
    layer = next(layer for layer in doctor.SHAPES.values() if getattr(layer, ignored))
    fields = {ignored: type(getattr(layer, ignored))()} | ({"n_sinks": 0} if ignored == "window" else {})
    assert not passes(layer, dataclasses.replace(layer, **fields))
    assert "WRONG" in capsys.readouterr().out


def test_an_exception_in_a_check_is_reported(capsys):
    assert not passes(doctor.LAYER, flatkv.Layer(8, 3, 128))
    assert "x" in (output := capsys.readouterr().out) and "BadCall" in output
