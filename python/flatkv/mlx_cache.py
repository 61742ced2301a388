"""KV cache in MLX memory. Rows are mx.array objects; operations are lazy and run on the current stream."""
from __future__ import annotations

import ctypes as C
import dataclasses
from typing import Any, Iterable, Sequence as Many

from . import _abi, _native
from ._config import Config, Layer
from ._library import check, held
from .cache import Sequence, _Pages, _Transaction
from .plan import Plan


def mlx_plan(config: Config) -> Plan:
    """Returns the plan of an MlxCache with this configuration."""
    _native.mlx_open()
    made = _abi.fkv_plan()
    check(held.fkv_mlx_plan_make(config.address, None, C.addressof(made)))
    step_bytes = C.c_uint64()
    check(held.fkv_mlx_step_bytes(config.address, None, C.addressof(step_bytes)))
    return dataclasses.replace(Plan._of(made, config.struct), step_bytes=step_bytes.value)


class MlxCache(_Pages):
    """A Cache in MLX memory. It has the options of Cache, ignores n_threads and lazy, and accepts rows of any floating-point type.

    `fused` is True on a GPU, where flatkv's kernels run. Otherwise MLX operations run, and each step must be evaluated before the
    next step begins.
    """

    def __init__(self, layers: Many[Layer] | Layer | Config, *, max_tokens: int = 0, **options: Any):
        _native.mlx_open()
        config = layers if isinstance(layers, Config) else Config(layers, max_tokens=max_tokens, **options)
        handle = C.c_void_p()
        self._closing: list[int] = []
        self._aborting: list[int] = []
        check(held.fkv_mlx_cache_open(config.address, None, C.addressof(handle)))
        super().__init__(config, mlx_plan(config), handle.value or 0)
        self.fused: bool = held.fkv_mlx_cache_way(self._handle) == _abi.FKV_MLX_FUSED

    def _drop(self, number: int) -> None:
        """Queues a sequence for closing, because the garbage collector can run inside a library call."""
        self._closing.append(number)

    def _drop_step(self, pointer: int) -> None:
        """Queues a dropped step for aborting, because the garbage collector can run inside a library call."""
        self._aborting.append(pointer)

    def _close_dropped(self) -> None:
        while self._aborting:
            held.fkv_step_abort(self._aborting.pop())
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
    """One forward pass with mx.array rows. Leaving the `with` block commits; an exception aborts. Nothing is evaluated."""

    def __init__(self, cache: MlxCache, rows: Iterable[tuple[Sequence, int]]):
        super().__init__(cache, rows)

    @property
    def _at(self) -> int:
        """Address of the step."""
        return self._handle.value or 0

    def write(self, layer: int, k: Any, v: Any) -> None:
        """Quantizes rows into pages. k, v: [T, KV heads, head dimension]."""
        check(_native.mlx_write(self._at, layer, k, v))

    def attend(self, layer: int, q: Any) -> Any:
        """Returns the attention over the pages. q and the result: [T, query heads, head dimension]."""
        out = _native.mlx_attend(self._at, layer, q)
        if isinstance(out, int):
            check(out)
        return out

    def fetch(self, layer: int, row: int) -> tuple[Any, Any]:
        """Returns all keys and values of the step's sequence number `row`, decoded: two float32 arrays [KV heads, tokens, head dimension]."""
        found: tuple[Any, Any] | int = _native.mlx_fetch(self._at, layer, row)
        if isinstance(found, int):
            check(found)
            raise AssertionError("mlx_fetch() returned FKV_OK without arrays")
        return found

    def pending(self) -> list[Any]:
        """Returns the arrays whose evaluation completes all writes of this step."""
        arrays: list[Any] | int = _native.mlx_pending(self._at)
        if isinstance(arrays, int):
            check(arrays)
            return []
        return arrays


def state_of(step: MlxStep) -> tuple[bytes, list[Any]]:
    """Returns the key of the step's graph and its input arrays other than rows: page tables, then dependency arrays."""
    found: tuple[bytes, list[Any]] | int = _native.mlx_step_state(step._at)
    if isinstance(found, int):
        check(found)
        return b"", []
    return found
