"""What a cache will take, in bytes, before anything is taken."""
from __future__ import annotations

import ctypes as C
import dataclasses
import os
from typing import Any, Sequence as Many

from . import _abi
from ._config import Config, Layer
from ._library import Error, check, host
from .pictures import plan_svg, table_html


@dataclasses.dataclass(frozen=True)
class Plan:
    """Exact bytes. total = slab + tables + scratch + stacks; only the slab grows with max_tokens."""

    total_bytes: int
    slab_bytes: int  #: the pages
    tables_bytes: int
    scratch_bytes: int
    stacks_bytes: int
    token_bytes: int  #: one token over all layers, scales included
    max_tokens: int
    page_tokens: int
    group_pages: tuple[int, ...]  #: pages of each layer group: layers with the same window and sinks
    group_page_bytes: tuple[int, ...]

    @classmethod
    def _of(cls, made: Any, config: Any) -> Plan:
        n = made.n_groups
        return cls(made.total_bytes, made.slab_bytes, made.tables_bytes, made.scratch_bytes, made.stacks_bytes, made.token_bytes,
                   config.max_tokens, config.page_tokens, tuple(made.group_pages[:n]), tuple(made.group_page_bytes[:n]))

    def _repr_svg_(self) -> str:
        return plan_svg(self)

    def _repr_html_(self) -> str:
        rows = [(name.replace("_bytes", ""), f"{getattr(self, name) / 1e6:,.2f} MB")
                for name in ("total_bytes", "slab_bytes", "tables_bytes", "scratch_bytes", "stacks_bytes")]
        rows += [("a token", f"{self.token_bytes:,} bytes"), ("tokens", f"{self.max_tokens:,}")]
        return plan_svg(self) + table_html(("plan", ""), rows)


def plan(model: Any, max_tokens: int, **options: Any) -> Plan:
    """The plan of a cache of max_tokens tokens.

    model: a Layer or a list of them (with the options of Cache), a flatkv.Model, a path of one, or a model of mlx-lm (with the
    options of install()).
    """
    if isinstance(model, Layer) or (isinstance(model, (list, tuple)) and all(isinstance(l, Layer) for l in model)):
        return of_config(Config(model, max_tokens=max_tokens, **options))
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        if not os.path.exists(model):
            raise Error("FKV_IO", f"{os.fspath(model)} is no file or folder here; for a model of mlx-lm's give what mlx_lm.load() returned")
        from .model import Model
        with Model(model, plan_only=True) as loaded:
            return loaded.plan(max_tokens, **options)
    if hasattr(model, "plan"):
        return model.plan(max_tokens, **options)
    if not callable(model):
        raise TypeError(f"{model!r} has no plan: a Layer, a list of them, a flatkv.Model, a path of one or a model of mlx-lm is expected")
    from .lm import plan_for
    return plan_for(model, max_tokens, **options)


def of_config(config: Config) -> Plan:
    made = _abi.fkv_plan()
    check(host.fkv_plan_make(config.address, C.addressof(made)))
    return Plan._of(made, config.struct)
