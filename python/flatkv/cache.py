"""A cache, its sequences and its steps on host memory, with numpy arrays."""
from __future__ import annotations

import ctypes as C
import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any, Iterable, Sequence as Many

import numpy as np

from . import _abi
from ._config import Config, Layer
from ._library import BadCall, Owner, check, count, held, host
from .pictures import pages_svg, table_html
from .plan import Plan, of_config

if TYPE_CHECKING:
    from typing_extensions import Self

NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Pages of one layer group: pages = free + held + cached."""

    pages: int
    free: int
    held: int
    shared: int
    cached: int
    pinned: int
    promised: int


@dataclasses.dataclass(frozen=True)
class Stats:
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


class Sequence:
    """The tokens of one text in a cache. Closed by close(), by `with`, or when nobody holds it."""

    def __init__(self, cache: _Pages, number: int, n_shared: int = 0):
        self.cache = cache
        self.number = number
        self.n_shared = n_shared  #: tokens of the prompt that were found in the prefix tree at open
        self._close = weakref.finalize(self, cache._drop, number)

    def __len__(self) -> int:
        n = C.c_uint32()
        check(held.fkv_seq_length(self.cache._handle, self.number, C.addressof(n)))
        return n.value

    def fork(self, max_tokens: int | None = None) -> Sequence:
        """A second sequence with the same tokens, which shares every page until one of the two writes."""
        child = C.c_uint64()
        wanted = count("max_tokens", max_tokens or self.cache.max_tokens)
        check(held.fkv_seq_fork(self.cache._handle, self.number, wanted, C.addressof(child)))
        return Sequence(self.cache, child.value)

    def truncate(self, n_tokens: int) -> None:
        """Forgets the tokens from n_tokens on."""
        check(held.fkv_seq_truncate(self.cache._handle, self.number, count("n_tokens", n_tokens)))

    def reserve(self, max_tokens: int) -> None:
        """Changes how many tokens are promised to this sequence."""
        check(held.fkv_seq_reserve(self.cache._handle, self.number, count("max_tokens", max_tokens)))

    def save(self, path: str | os.PathLike[str], tokens: Iterable[int]) -> None:
        """Saves the pages of the first len(tokens) tokens, which are what the rows were computed from."""
        ids = _tokens(tokens)
        check(held.fkv_seq_save(self.cache._handle, self.number, ids.ctypes.data, len(ids), os.fspath(path).encode()))

    def share(self, tokens: Iterable[int]) -> None:
        """Offers the full pages of these first tokens to sequences that will be opened with the same prompt."""
        ids = _tokens(tokens)
        check(held.fkv_prefix_insert(self.cache._handle, self.number, ids.ctypes.data, len(ids)))

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<flatkv.Sequence of {len(self)} tokens>" if self._close.alive and self.cache._close.alive else "<flatkv.Sequence, closed>"


class _Pages(Owner):
    """What caches on host memory and on MLX have in common: sequences, stats and the one open step."""

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
        """A sequence that is promised max_tokens tokens; `n_shared` of it says how much of the prompt is already there."""
        ids = _tokens(prompt)
        wanted = self._config_of(max_tokens, tenant, ids)
        number, shared = C.c_uint64(), C.c_uint32()
        check(held.fkv_seq_open(self._handle, C.addressof(wanted), C.addressof(number), C.addressof(shared)))
        return Sequence(self, number.value, shared.value)

    def load(self, path: str | os.PathLike[str], max_tokens: int | None = None, *, tenant: int = 0) -> Sequence:
        """Opens a sequence and fills it from a file, which is verified in full first."""
        wanted = self._config_of(max_tokens, tenant, _tokens(None))
        number = C.c_uint64()
        check(held.fkv_seq_load(self._handle, C.addressof(wanted), os.fspath(path).encode(), C.addressof(number)))
        return Sequence(self, number.value)

    def _drop(self, number: int) -> None:
        if self._close.alive:
            held.fkv_seq_close(self._handle, number)

    @property
    def stats(self) -> Stats:
        made = _abi.fkv_stats()
        check(held.fkv_cache_stats(self._handle, C.addressof(made)))
        return Stats._of(made)

    def consistent(self) -> bool:
        """Walks every structure and checks its invariants: for tests."""
        return held.fkv_cache_consistent(self._handle)

    def clear_prefixes(self) -> None:
        check(held.fkv_prefix_clear(self._handle))

    def close(self) -> None:
        """Gives everything back; sequences of it are closed too, and a step that is open is over."""
        step = self._open_step and self._open_step()
        if step is not None:
            step._over()
        super().close()

    def __repr__(self) -> str:
        name = f"flatkv.{type(self).__name__}"
        if not self._close.alive:
            return f"<{name}, closed>"
        return f"<{name}: {self.max_tokens:,} tokens, {len(self.config.layers)} layer(s), {self.plan.total_bytes / 1e6:,.1f} MB>"

    def _repr_svg_(self) -> str:
        return pages_svg(self.stats)

    def _repr_html_(self) -> str:
        s = self.stats
        rows = [("planned", f"{s.planned_bytes / 1e6:,.2f} MB"), ("sequences", s.seqs), ("tokens written", f"{s.tokens:,}"),
                ("kernels", s.isa)]
        return self.plan._repr_svg_() + pages_svg(s) + table_html(("cache", ""), rows)

    def _begin(self, rows: Iterable[tuple[Sequence, int]]) -> tuple[C.c_void_p, int]:
        listed = list(rows)
        array = (_abi.fkv_row * len(listed))(*[_abi.fkv_row(s.number, count("a row's tokens", n)) for s, n in listed])
        step = C.c_void_p()
        check(held.fkv_step_begin(self._handle, C.addressof(array), len(listed), C.addressof(step)))
        return step, sum(n for _, n in listed)


class _Transaction:
    """What steps on every device share. Leaving the `with` commits, an exception in it aborts."""

    def __init__(self, cache: _Pages, rows: Iterable[tuple[Sequence, int]]):
        self._handle, self.n_tokens = cache._begin(rows)
        cache._open_step = weakref.ref(self)

    def _over(self) -> None:
        """The cache is gone, and the step with it."""
        self._handle, self._at = C.c_void_p(None), 0

    def commit(self) -> None:
        """The step's tokens become part of their sequences."""
        check(held.fkv_step_commit(self._handle))

    def abort(self) -> None:
        """Every sequence is as it was before the step."""
        check(held.fkv_step_abort(self._handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            try:
                self.commit()
            except BaseException:
                held.fkv_step_abort(self._handle)
                raise
        else:
            self.abort()


class Step(_Transaction):
    """One forward pass: write and attend every layer. Leaving the `with` commits, an exception in it aborts."""

    def __init__(self, cache: Cache, rows: Iterable[tuple[Sequence, int]]):
        super().__init__(cache, rows)
        self._cache = cache
        self._type = NUMPY_TYPES[cache.config.row_type]

    def _rows(self, rows: Any, n_heads: int, dim: int, what: str) -> np.ndarray:
        array = np.ascontiguousarray(rows, dtype=self._type)
        if array.shape != (self.n_tokens, n_heads, dim):
            raise BadCall("FKV_BAD_ARGUMENT", f"{what} is {array.shape}: [{self.n_tokens}, {n_heads}, {dim}] is expected")
        return array

    def _layer(self, layer: int) -> Layer:
        if not 0 <= layer < len(self._cache.config.layers):
            raise BadCall("FKV_BAD_ARGUMENT", f"layer {layer} of {len(self._cache.config.layers)}")
        return self._cache.config.layers[layer]

    def write(self, layer: int, k: Any, v: Any) -> None:
        """Packs rows into pages. k, v: [T, KV heads, head dimension], the tokens of the step's sequences one after the other."""
        at = self._layer(layer)
        k, v = self._rows(k, at.n_kv_heads, at.head_dim, "k"), self._rows(v, at.n_kv_heads, at.head_dim, "v")
        check(host.fkv_write(self._handle, layer, k.ctypes.data, v.ctypes.data))

    def attend(self, layer: int, q: Any) -> np.ndarray:
        """softmax(scale * q.K + mask).V over packed pages. q and the answer: [T, query heads, head dimension]"""
        at = self._layer(layer)
        q = self._rows(q, at.n_q_heads, at.head_dim, "q")
        out = np.empty_like(q)
        check(host.fkv_attend(self._handle, layer, q.ctypes.data, out.ctypes.data))
        return out


class Cache(_Pages):
    """A KV cache on host memory. All of its memory is taken here, or DoesNotFit says what did not fit.

    layers: a Layer (with n_layers) or a list of them. codec: "8/4" is 8 bits for K and 4 for V; one, or one for each layer.
    Arrays of bfloat16 rows are uint16.
    """

    def __init__(self, layers: Many[Layer] | Layer, *, max_tokens: int, **options: Any):
        config = Config(layers, max_tokens=max_tokens, **options)
        plan = of_config(config)
        handle = C.c_void_p()
        check(host.fkv_cache_open(config.address, C.addressof(handle)))
        super().__init__(config, plan, handle.value or 0)

    def step(self, rows: Iterable[tuple[Sequence, int]]) -> Step:
        """Begins a step: pairs of a sequence and the number of tokens that are added to it."""
        return Step(self, rows)


def file_tokens(path: str | os.PathLike[str]) -> list[int]:
    """The tokens that a page file was saved with."""
    n, name = C.c_uint32(), os.fspath(path).encode()
    check(host.fkv_file_tokens(name, None, 0, C.addressof(n)))
    ids = np.empty(n.value, np.uint32)
    check(host.fkv_file_tokens(name, ids.ctypes.data, len(ids), C.addressof(n)))
    return ids.tolist()


