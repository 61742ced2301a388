"""Computes the memory of a cache in bytes before it is reserved."""
from __future__ import annotations

import ctypes as C
import dataclasses
from typing import Any

from . import _abi
from ._config import Config
from ._library import check, host
from .svg import plan_svg, table_html


@dataclasses.dataclass(frozen=True)
class Plan:
    """Exact memory of a cache: total = slab + tables + scratch + stacks + states. Only slab and tables grow with max_tokens."""

    total_bytes: int
    slab_bytes: int  #: page memory
    tables_bytes: int
    scratch_bytes: int
    stacks_bytes: int
    token_bytes: int  #: bytes of one token in all layers, including quantization scales
    max_tokens: int
    page_tokens: int
    group_pages: tuple[int, ...]  #: pages of each layer group; the layers of a group have the same window and sinks
    group_page_bytes: tuple[int, ...]
    state_bytes: int = 0  #: maximum size of all recurrent states and checkpoints in a hybrid model of mlx-lm; allocated when used
    step_bytes: int = 0  #: with MLX: upper bound on the temporary arrays of write() and attend() in one layer, which total_bytes does not include

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
        rows += [("bytes per token", f"{self.token_bytes:,}"), ("tokens", f"{self.max_tokens:,}")]
        return plan_svg(self) + table_html(("plan", ""), rows)


def plan_of_config(config: Config) -> Plan:
    """Returns the plan of a host cache with this configuration."""
    made = _abi.fkv_plan()
    check(host.fkv_plan_make(config.address, C.addressof(made)))
    return Plan._of(made, config.struct)
