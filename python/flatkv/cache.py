"""KV cache in host memory, with its sequences and steps. Rows are numpy arrays."""
from __future__ import annotations

import ctypes as C
import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterable, Sequence as Many

import numpy as np

from . import _abi
from ._config import Config, Layer
from ._library import BadCall, Owner, check, count, held, host
from .svg import pages_svg, table_html
from .plan import Plan, plan_of_config

if TYPE_CHECKING:
    from typing_extensions import Self

NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Page counts of one layer group: pages = free + held + cached."""

    pages: int
    free: int
    held: int
    shared: int
    cached: int
    pinned: int
    promised: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters of a cache since it was opened, and the page counts of its layer groups."""

    planned_bytes: int
    groups: tuple[GroupStats, ...]
    seqs: int
    steps: int
    aborts: int
    tokens: int
    page_copies: int
    hit_tokens: int
    hits: int
    evictions: int
    packed_bytes_read: int
    isa: str

    @classmethod
    def _of(cls, made: Any) -> Stats:
        groups = tuple(GroupStats(**{f.name: getattr(g, f.name) for f in dataclasses.fields(GroupStats)})
                       for g in made.groups[:made.n_groups])
        plain = {f.name: getattr(made, f.name) for f in dataclasses.fields(cls) if f.name not in ("groups", "isa")}
        return cls(groups=groups, isa=(made.isa or b"").decode(), **plain)

    def _repr_svg_(self) -> str:
        return pages_svg(self)


def _tokens(tokens: Iterable[int] | None) -> np.ndarray:
    return np.ascontiguousarray([] if tokens is None else tokens, dtype=np.uint32)


def _numpy_of(rows: Any) -> Any:
    """Returns rows of another library (MLX, PyTorch, JAX) as a numpy array, without a copy if possible."""
    if isinstance(rows, np.ndarray) or not hasattr(rows, "__dlpack__"):
        return rows
    try:
        return np.from_dlpack(rows)
    except (BufferError, RuntimeError, TypeError):  # rows on another device, read-only rows, or rows of a type that numpy lacks
        return np.asarray(rows)


class Sequence:
    """One sequence of tokens in a cache. It is closed by close(), by `with`, or when it is garbage-collected."""

    def __init__(self, cache: _Pages, number: int, n_shared: int = 0):
        self.cache = cache
        self.number = number
        self.n_shared = n_shared  #: number of prompt tokens that were found in the prefix tree by open()
        self._close = weakref.finalize(self, cache._drop, number)

    def __len__(self) -> int:
        n = C.c_uint32()
        check(held.fkv_seq_length(self.cache._handle, self.number, C.addressof(n)))
        return n.value

    def fork(self, max_tokens: int | None = None) -> Sequence:
        """Returns a second sequence with the same tokens. Pages are shared and copied on write.

        >>> cache = Cache(Layer(n_q_heads=1, n_kv_heads=1, head_dim=64), max_tokens=128, max_seqs=2)
        >>> seq = cache.open(64)
        >>> with cache.step([(seq, 2)]) as step:
        ...     step.write(0, np.zeros((2, 1, 64)), np.zeros((2, 1, 64)))
        >>> fork = seq.fork(64)
        >>> fork.truncate(1)
        >>> len(seq), len(fork)
        (2, 1)
        """
        child = C.c_uint64()
        wanted = count("max_tokens", max_tokens or self.cache.max_tokens)
        check(held.fkv_seq_fork(self.cache._handle, self.number, wanted, C.addressof(child)))
        return Sequence(self.cache, child.value)

    def truncate(self, n_tokens: int) -> None:
        """Removes all tokens after the first n_tokens."""
        check(held.fkv_seq_truncate(self.cache._handle, self.number, count("n_tokens", n_tokens)))

    def reserve(self, max_tokens: int) -> None:
        """Changes the number of tokens that are reserved for this sequence."""
        check(held.fkv_seq_reserve(self.cache._handle, self.number, count("max_tokens", max_tokens)))

    def save(self, path: str | os.PathLike[str], tokens: Iterable[int]) -> None:
        """Saves the pages of the first len(tokens) tokens to a file, together with these token ids."""
        ids = _tokens(tokens)
        check(held.fkv_seq_save(self.cache._handle, self.number, ids.ctypes.data, len(ids), os.fspath(path).encode()))

    def share(self, tokens: Iterable[int]) -> None:
        """Inserts the full pages of these tokens into the prefix tree, where open(prompt=...) finds them."""
        ids = _tokens(tokens)
        check(held.fkv_prefix_insert(self.cache._handle, self.number, ids.ctypes.data, len(ids)))

    def close(self) -> None:
        """Closes the sequence and releases its pages."""
        self._close()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<flatkv.Sequence of {len(self)} tokens>" if self._close.alive and self.cache._close.alive else "<flatkv.Sequence (closed)>"


class _Pages(Owner):
    """Base class of host and MLX caches: sequences, statistics and the open step."""

    def __init__(self, config: Config, plan: Plan, handle: int):
        self.config = config
        self.plan = plan
        self.max_tokens: int = config.struct.max_tokens
        self._open_step: weakref.ref[_Transaction] | None = None
        self._own(handle, held.fkv_cache_close)

    def _config_of(self, max_tokens: int | None, tenant: int, ids: np.ndarray) -> Any:
        wanted = self.max_tokens if max_tokens is None else count("max_tokens", max_tokens)
        return _abi.fkv_seq_config(wanted, count("tenant", tenant, 64), ids.ctypes.data if len(ids) else None, len(ids))

    def open(self, max_tokens: int | None = None, *, prompt: Iterable[int] | None = None, tenant: int = 0) -> Sequence:
        """Opens a sequence with max_tokens reserved. Its `n_shared` is the number of prompt tokens that are already cached."""
        ids = _tokens(prompt)
        wanted = self._config_of(max_tokens, tenant, ids)
        number, shared = C.c_uint64(), C.c_uint32()
        check(held.fkv_seq_open(self._handle, C.addressof(wanted), C.addressof(number), C.addressof(shared)))
        return Sequence(self, number.value, shared.value)

    def load(self, path: str | os.PathLike[str], max_tokens: int | None = None, *, tenant: int = 0) -> Sequence:
        """Opens a sequence and fills it from a page file, which is verified completely first."""
        wanted = self._config_of(max_tokens, tenant, _tokens(None))
        number = C.c_uint64()
        check(held.fkv_seq_load(self._handle, C.addressof(wanted), os.fspath(path).encode(), C.addressof(number)), path)
        return Sequence(self, number.value)

    def _drop(self, number: int) -> None:
        if self._close.alive:
            held.fkv_seq_close(self._handle, number)

    def _drop_step(self, pointer: int) -> None:
        """Aborts a step that was dropped without commit() or abort()."""
        if self._close.alive:
            held.fkv_step_abort(pointer)

    @property
    def stats(self) -> Stats:
        """Current statistics of the cache."""
        made = _abi.fkv_stats()
        check(held.fkv_cache_stats(self._handle, C.addressof(made)))
        return Stats._of(made)

    def consistent(self) -> bool:
        """Returns whether all internal invariants hold. Intended for tests."""
        return bool(held.fkv_cache_consistent(self._handle))

    def clear_prefixes(self) -> None:
        """Removes all prefixes from the prefix tree."""
        check(held.fkv_prefix_clear(self._handle))

    def close(self) -> None:
        """Releases all memory, closes the sequences and invalidates an open step."""
        step = None if self._open_step is None else self._open_step()
        if step is not None:
            step._invalidate()
        super().close()

    def __repr__(self) -> str:
        name = f"flatkv.{type(self).__name__}"
        if not self._close.alive:
            return f"<{name} (closed)>"
        return f"<{name}: {self.max_tokens:,} tokens, {len(self.config.layers)} layer(s), {self.plan.total_bytes / 1e6:,.1f} MB>"

    def _repr_svg_(self) -> str:
        return pages_svg(self.stats)

    def _repr_html_(self) -> str:
        s = self.stats
        rows = [("planned", f"{s.planned_bytes / 1e6:,.2f} MB"), ("sequences", str(s.seqs)), ("tokens written", f"{s.tokens:,}"),
                ("kernels", s.isa)]
        return self.plan._repr_svg_() + pages_svg(s) + table_html(("cache", ""), rows)

    def _begin(self, rows: Iterable[tuple[Sequence, int]]) -> tuple[C.c_void_p, int]:
        listed = list(rows)
        array = (_abi.fkv_row * len(listed))(*[_abi.fkv_row(s.number, count("the number of tokens", n)) for s, n in listed])
        step = C.c_void_p()
        check(held.fkv_step_begin(self._handle, C.addressof(array), len(listed), C.addressof(step)))
        return step, sum(n for _, n in listed)


def _abort_dropped(cache: Callable[[], _Pages | None], pointer: int) -> None:
    """Finalizer of a step. Refers to the cache weakly, because a cache can own its open step."""
    owner = cache()
    if owner is not None:
        owner._drop_step(pointer)


class _Transaction:
    """Base class of host and MLX steps. Leaving the `with` block commits the step; an exception aborts it."""

    def __init__(self, cache: _Pages, rows: Iterable[tuple[Sequence, int]]):
        self._pointer, self.n_tokens = cache._begin(rows)
        cache._open_step = weakref.ref(self)
        self._dropped = weakref.finalize(self, _abort_dropped, weakref.ref(cache), self._pointer.value or 0)
        self._dropped.atexit = False

    @property
    def _handle(self) -> C.c_void_p:
        if not self._dropped.alive:
            raise BadCall("FKV_BAD_STATE", "this step is over, because it was committed or aborted, or its cache was closed; begin a new step")
        return self._pointer

    def _invalidate(self) -> None:
        """Marks the step as over."""
        self._dropped.detach()

    def commit(self) -> None:
        """Appends the step's tokens to their sequences."""
        check(held.fkv_step_commit(self._handle))
        self._invalidate()

    def abort(self) -> None:
        """Restores every sequence to its state before the step."""
        check(held.fkv_step_abort(self._handle))
        self._invalidate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            try:
                self.commit()
            except BaseException:
                self.abort()
                raise
        else:
            self.abort()


class Step(_Transaction):
    """One forward pass, which writes and attends every layer. Leaving the `with` block commits; an exception aborts."""

    def __init__(self, cache: Cache, rows: Iterable[tuple[Sequence, int]]):
        super().__init__(cache, rows)
        self._cache = cache
        self._type = NUMPY_TYPES[cache.config.row_type]

    def _rows(self, rows: Any, n_heads: int, dim: int, name: str) -> np.ndarray:
        array = np.ascontiguousarray(_numpy_of(rows), dtype=self._type)
        if array.shape != (self.n_tokens, n_heads, dim):
            raise BadCall("FKV_BAD_ARGUMENT", f"{name} must have shape ({self.n_tokens}, {n_heads}, {dim}) (got {array.shape})")
        return array

    def _layer(self, layer: int) -> Layer:
        if not 0 <= layer < len(self._cache.config.layers):
            raise BadCall("FKV_BAD_ARGUMENT", f"layer must be from 0 to {len(self._cache.config.layers) - 1} (got {layer})")
        return self._cache.config.layers[layer]

    def write(self, layer: int, k: Any, v: Any) -> None:
        """Quantizes rows into pages. k, v: [T, KV heads, head dimension], with the tokens of the step's sequences concatenated."""
        at = self._layer(layer)
        k, v = self._rows(k, at.n_kv_heads, at.head_dim, "k"), self._rows(v, at.n_kv_heads, at.head_dim, "v")
        check(host.fkv_write(self._handle, layer, k.ctypes.data, v.ctypes.data))

    def attend(self, layer: int, q: Any) -> np.ndarray:
        """Returns softmax(scale * q.K + mask).V over the pages. q and the result: [T, query heads, head dimension]."""
        at = self._layer(layer)
        rows = self._rows(q, at.n_q_heads, at.head_dim, "q")
        out: np.ndarray = np.empty_like(rows)
        check(host.fkv_attend(self._handle, layer, rows.ctypes.data, out.ctypes.data))
        return out


class Cache(_Pages):
    """A KV cache in host memory. The constructor reserves all memory or raises DoesNotFit.

    layers: a Layer (with n_layers) or a list of layers. codec: one name, or one per layer; "8/4" means 8-bit keys and 4-bit values.
    rotate: "k", "v", "kv" or None; by default, values of sealed layers are rotated.
    With row_type="bfloat16", rows are uint16 arrays that contain the bfloat16 bits. Rows can also be arrays of other libraries that
    support __dlpack__, such as MLX and PyTorch. Results are numpy arrays.

    >>> cache = Cache(Layer(n_q_heads=4, n_kv_heads=2, head_dim=64), max_tokens=256)
    >>> seq = cache.open(max_tokens=100)
    >>> rows = np.ones((3, 2, 64), np.float32)
    >>> with cache.step([(seq, 3)]) as step:
    ...     step.write(0, rows, rows)
    ...     out = step.attend(0, np.ones((3, 4, 64), np.float32))
    >>> len(seq), out.shape, bool(abs(out - 1).max() < 0.02)
    (3, (3, 4, 64), True)
    """

    def __init__(self, layers: Many[Layer] | Layer, *, max_tokens: int, **options: Any):
        config = Config(layers, max_tokens=max_tokens, **options)
        plan = plan_of_config(config)
        handle = C.c_void_p()
        check(host.fkv_cache_open(config.address, C.addressof(handle)))
        super().__init__(config, plan, handle.value or 0)

    def step(self, rows: Iterable[tuple[Sequence, int]]) -> Step:
        """Begins a step. rows: pairs of a sequence and the number of tokens to append to it."""
        return Step(self, rows)


def file_tokens(path: str | os.PathLike[str]) -> list[int]:
    """Returns the token ids that are stored in a page file."""
    n, name = C.c_uint32(), os.fspath(path).encode()
    check(host.fkv_file_tokens(name, None, 0, C.addressof(n)), path)
    ids = np.empty(n.value, np.uint32)
    check(host.fkv_file_tokens(name, ids.ctypes.data, len(ids), C.addressof(n)))
    return ids.tolist()


