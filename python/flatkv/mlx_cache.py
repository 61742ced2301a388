"""Caches whose pages are in MLX's memory, with mx.array in and out: lazy, on the stream that is current."""
from __future__ import annotations

import ctypes as C
from typing import Any, Iterable, Sequence as Many

from . import _abi, _native
from ._config import Config, Layer
from ._library import check, held
from .cache import Sequence, _Pages, _Transaction
from .plan import Plan


def mlx_plan(config: Config) -> Plan:
    made = _abi.fkv_plan()
    check(held.fkv_mlx_plan_make(config.address, None, C.addressof(made)))
    return Plan._of(made, config.struct)


class MlxCache(_Pages):
    """As Cache, on MLX. Options are Cache's; n_threads and lazy are not looked at, and rows may be of any float type.

    On a GPU flatkv's own kernels run (`fused`); elsewhere MLX's operations do, and a step is evaluated before the next begins.
    """

    def __init__(self, layers: Many[Layer] | Layer, *, max_tokens: int, **options: Any):
        _native.mlx_open()
        config = Config(layers, max_tokens=max_tokens, **options)
        handle = C.c_void_p()
        self._closing: list[int] = []
        check(held.fkv_mlx_cache_open(config.address, None, C.addressof(handle)))
        super().__init__(config, mlx_plan(config), handle.value or 0)
        self.fused: bool = held.fkv_mlx_cache_way(self._handle) == _abi.FKV_MLX_FUSED

    def _drop(self, number: int) -> None:
        """The collector runs inside of the library's calls, which use Python here: closes wait for a moment outside of them."""
        self._closing.append(number)

    def _close_dropped(self) -> None:
        while self._closing:
            held.fkv_seq_close(self._handle, self._closing.pop())

    def open(self, *args: Any, **options: Any) -> Sequence:
        self._close_dropped()
        return super().open(*args, **options)

    def step(self, rows: Iterable[tuple[Sequence, int]]) -> MlxStep:
        self._close_dropped()
        return MlxStep(self, rows)

    @property
    def stats(self) -> Any:
        self._close_dropped()
        return super().stats


class MlxStep(_Transaction):
    """One forward pass over mx.array. Leaving the `with` commits, an exception in it aborts; nothing is evaluated here."""

    def __init__(self, cache: MlxCache, rows: Iterable[tuple[Sequence, int]]):
        super().__init__(cache, rows)
        self._at: int = self._handle.value or 0

    def write(self, layer: int, k: Any, v: Any) -> None:
        """k, v: [T, KV heads, head dimension]"""
        check(_native.mlx_write(self._at, layer, k, v))

    def attend(self, layer: int, q: Any) -> Any:
        """q and the answer: [T, query heads, head dimension]"""
        out = _native.mlx_attend(self._at, layer, q)
        if isinstance(out, int):
            check(out)
        return out

    def pending(self) -> list[Any]:
        """What must be evaluated for all writes of this step to have happened."""
        arrays = _native.mlx_pending(self._at)
        if isinstance(arrays, int):
            check(arrays)
        return arrays


def state_of(step: MlxStep) -> tuple[bytes, list[Any]]:
    """The form of the step's graph, and the arrays that it is made of beside its rows: tables, then tickets."""
    found = _native.mlx_step_state(step._at)
    if isinstance(found, int):
        check(found)
    return found
