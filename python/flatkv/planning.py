"""Computes plans for layers, for models of flatkv and for models of mlx-lm."""
from __future__ import annotations

import os
from typing import Any

from ._config import Config, Layer
from ._library import MissingFile
from .model import Model
from .plan import Plan, plan_of_config


def plan(model: Any, max_tokens: int, **options: Any) -> Plan:
    """Returns the plan of a cache with max_tokens.

    model: a Layer or a list of layers (with the options of Cache), a flatkv.Model or its path (with the options of Runner), or a
    model of mlx-lm (with the options of install()).

    >>> layer = Layer(n_q_heads=32, n_kv_heads=8, head_dim=128)
    >>> small, large = plan(layer, 4096, n_layers=32), plan(layer, 8192, n_layers=32)
    >>> large.slab_bytes < 2 * small.slab_bytes, small.token_bytes
    (True, 33280)
    """
    if isinstance(model, Layer) or (isinstance(model, (list, tuple)) and all(isinstance(l, Layer) for l in model)):
        return plan_of_config(Config(model, max_tokens=max_tokens, **options))
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        if not os.path.exists(model):
            raise MissingFile("FKV_IO", f"{os.fspath(model)} does not exist; pass the path of a model, or a model that mlx_lm.load() returned")
        with Model(model, plan_only=True) as loaded:
            return loaded.plan(max_tokens, **options)
    if hasattr(model, "plan"):
        made: Plan = model.plan(max_tokens, **options)
        return made
    if not callable(model):
        raise TypeError(f"model must be a Layer, a list of layers, a flatkv.Model, the path of a model or an mlx-lm model (got {model!r})")
    from .lm import plan_for
    return plan_for(model, max_tokens, **options)
