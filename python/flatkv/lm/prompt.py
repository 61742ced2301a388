"""FlatKVCache: one layer of a batch of sequences. It replaces mlx-lm's KVCache, RotatingKVCache and their batched forms.

Every layer has its own token counts, as in mlx-lm. trim() changes the counts, and the sequence is truncated when the next pass
begins. update_and_fetch() returns PagedArray placeholders for keys and values, and attention over them reads the pages. Models that
compute attention themselves get arrays instead, which are decoded from the pages and left-padded like those of mlx-lm's batches.
"""
from __future__ import annotations

import contextlib
import copy
import json
import threading
import uuid
from typing import Any, Iterator

import mlx.core as mx
import mlx_lm.models.cache as caches
from mlx_lm.models.base import create_causal_mask

from .._library import BadCall
from .pool import Pool, PooledSequence


EARLY_TOKENS = 64  # passes of at least this many tokens per row are submitted while they are built
EARLY_LAYERS = 8  # number of layers that are built between two submissions


def _submit(*arrays: Any) -> None:
    """Starts the computation of arrays, so that the GPU does not wait until the whole pass is built."""
    with contextlib.suppress(ValueError):  # raised inside a graph transformation such as mx.compile
        mx.async_eval(*arrays)


class PagedArray:
    """Placeholder for all keys or values of a layer. It has their shape and type and refers to the cache with the pages."""

    ndim = 4
    __slots__ = ("cache", "dtype", "shape")

    def __init__(self, cache: Any, shape: tuple[int, ...], dtype: Any, length: int):
        self.cache = cache
        self.dtype = dtype
        self.shape = (*shape[:2], length, shape[3])


class FlatKVCache(caches._BaseCache):
    """One layer of one sequence (offset is an int) or of a batch of sequences (offset is an array)."""

    def __init__(self, layer: int, seqs: list[PooledSequence], lengths: list[int] | None = None, batched: bool = False):
        self.layer = layer
        self.seqs = seqs
        self.lengths = [0] * len(seqs) if lengths is None else lengths
        self.batched = batched
        self.pool: Pool = seqs[0].pool
        self._remaining: list[int] | None = None  # prompt tokens of each row that precede its right padding and are not yet written
        self._counts: list[int] = []  # tokens of each row in the current pass
        self._shapes: tuple[Any, Any, Any] = ((), (), None)  # shapes of the current pass's keys and values, and their type

    def __repr__(self) -> str:
        return f"<flatkv.FlatKVCache: layer {self.layer}, tokens {', '.join(map(str, self._now()))}>"

    @property
    def window(self) -> int:
        return self.pool.layers[self.layer].window

    def _now(self) -> list[int]:
        """Returns the number of tokens of each row, without the tokens of an aborted pass."""
        return [min(n, seq.length + seq.n_pending) for seq, n in zip(self.seqs, self.lengths)]

    @property
    def offset(self) -> Any:
        return mx.array(self._now()) if self.batched else self._now()[0]

    # ---- forward pass ----

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        n_rows, _, n, _ = keys.shape
        counts = [n] * n_rows if self._remaining is None else [min(n, remaining) for remaining in self._remaining]
        if self.pool.begins(self.layer, self.seqs, counts):
            if not hasattr(caches, "FlatKVCache"):  # removed by uninstall()
                raise BadCall("FKV_BAD_STATE", "this prompt cache belongs to flatkv, which was uninstalled; create a new cache with make_prompt_cache()")
            self._truncate(self._now())
            self.pool.begin_pass(list(zip(self.seqs, counts)))
        now = self._now()
        if n >= EARLY_TOKENS and self.pool.fused and self.layer % EARLY_LAYERS == 1:
            _submit(keys, values)
        if n == 1 and self.pool.fused and sum(counts) == n_rows:
            self.pool.write(self.layer, keys, values)
        else:
            self.pool.write(self.layer, self._rows(keys, counts), self._rows(values, counts))
        self._counts = counts
        if self._remaining is not None:
            self._remaining = [remaining - n for remaining, n in zip(self._remaining, counts)]
        self.lengths = [length + n for length, n in zip(now, counts)]
        self._shapes = keys.shape, values.shape, keys.dtype
        return self._decoded(now, n) if self._is_unpacked else self.keys_and_values()

    @property
    def _is_unpacked(self) -> bool:
        return self.pool.layers[self.layer].unpacked

    def _decoded(self, starts: list[int], n: int) -> tuple[Any, Any]:
        """Returns the keys and values of all rows, [B, G, S, D], in a pass of n tokens. starts: lengths of the rows before the pass.

        The new tokens of all rows are in the last n columns. Padding consists of zeros.
        """
        shape, longest, fetched = self.pool.layers[self.layer], max(starts), 0
        dtype, found = self._shapes[2], []
        for start, count in zip(starts, self._counts):
            if count == 0:
                found.append([mx.zeros((1, shape.n_kv_heads, longest + n, dim), dtype) for dim in (shape.k_dim, shape.v_dim)])
                continue
            arrays = [a.astype(dtype)[None] for a in self.pool.fetch(self.layer, fetched)]
            fetched += 1
            if start < longest or count < n:
                arrays = [mx.pad(a, [(0, 0), (0, 0), (longest - start, n - count), (0, 0)]) for a in arrays]
            found.append(arrays)
        if len(found) == 1:
            return found[0][0], found[0][1]
        return mx.concatenate([row[0] for row in found]), mx.concatenate([row[1] for row in found])

    def keys_and_values(self) -> tuple[PagedArray, PagedArray]:
        keys, values, dtype = self._shapes
        longest = max(self.lengths)
        return PagedArray(self, keys, dtype, longest), PagedArray(self, values, dtype, longest)

    def _truncate(self, lengths: list[int]) -> None:
        """Commits the open step and truncates every sequence to its length."""
        self.pool.settle()
        for seq, n in zip(self.seqs, lengths):
            seq.truncate(n)

    @staticmethod
    def _rows(x: Any, counts: list[int]) -> Any:
        """Converts [B, H, L, D] to [T, H, D] without padding. Kept to few operations because it runs for every layer and token."""
        n_rows, heads, n, dim = x.shape
        flat = (x if n == 1 else x.swapaxes(1, 2)).reshape(n_rows * n, heads, dim)
        if sum(counts) == n_rows * n:
            return flat
        return flat[mx.array([b * n + i for b, count in enumerate(counts) for i in range(count)])]

    def attend(self, queries: Any, scale: float) -> Any:
        n_rows, heads, n, _ = queries.shape
        page_scale = self.pool.layers[self.layer].scale
        if scale != page_scale:
            queries = queries * (scale / page_scale)
        counts = self._counts
        if n == 1 and self.pool.fused and all(counts):
            return self.pool.attend(self.layer, queries)
        out = self.pool.attend(self.layer, self._rows(queries, counts))
        if n == 1 and all(counts):
            return out.reshape(n_rows, heads, 1, -1)
        if sum(counts) != n_rows * n:  # padding rows repeat the result of a token; the model ignores them
            index, first = [], 0
            for count in counts:
                index += [first + min(i, count - 1) if count else 0 for i in range(n)]
                first += count
            out = out[mx.array(index)]
        return out.reshape(n_rows, n, heads, out.shape[-1]).swapaxes(1, 2)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Returns a causal mask for the model. Attention over pages applies its own mask."""
        now = self._now()
        if self._is_unpacked and (self.batched or window_size):
            padding = mx.array([max(now) - n for n in now]) if self.batched else None
            return create_causal_mask(N, max(now), window_size=window_size, left_padding=padding)
        if return_array and not (self._is_unpacked and N == 1):
            return create_causal_mask(N, max(now), window_size=window_size)
        return None if N == 1 else "causal"

    # ---- cache interface of mlx-lm ----

    def size(self) -> int:
        return min(max(self._now()), self.window or 1 << 62)

    def empty(self) -> bool:
        return max(self._now()) == 0

    @property
    def nbytes(self) -> int:
        return self.pool.layer_bytes * sum(self._now())

    def is_trimmable(self) -> bool:
        if self.pool.recomputes and (self.batched or not self.seqs[0].can_rewind()):
            return False
        return self.window == 0 or max(self._now()) < self.window

    def trim(self, n: int) -> int:
        now = self._now()
        n = min(min(now), n)
        self.lengths = [length - n for length in now]
        return n

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatKVCache:
        now = self._now()
        if _transfer.active:
            return FlatKVCache(self.layer, list(self.seqs), now, self.batched)
        return FlatKVCache(self.layer, [copy.deepcopy(seq, memo) for seq in self.seqs], now, self.batched)

    # ---- batches ----

    @classmethod
    def merge(cls, given: list[FlatKVCache]) -> FlatKVCache:
        return cls(given[0].layer, [s for c in given for s in c.seqs], [n for c in given for n in c._now()], True)

    def extend(self, other: FlatKVCache) -> None:
        self.lengths = self._now() + other._now()
        self.seqs = self.seqs + other.seqs

    def filter(self, batch_indices: Any) -> None:
        keep = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        now = self._now()
        self.seqs = [self.seqs[i] for i in keep]
        self.lengths = [now[i] for i in keep]

    def extract(self, idx: int) -> FlatKVCache:
        now, seq = self._now()[idx], self.seqs[idx]
        if _transfer.active:
            seq.finish()
        return FlatKVCache(self.layer, [seq if _transfer.active else seq.snapshot()], [now])

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None and max(left_padding) > 0:
            raise ValueError("flatkv does not support left padding; pad prompts on the right and pass their lengths")
        if right_padding is not None and max(right_padding) > 0:
            self._remaining = list(lengths)

    def finalize(self) -> None:
        self._remaining = None

    # ---- evaluation and files ----

    @property
    def state(self) -> Any:
        """Arrays that mlx-lm evaluates after each prompt chunk. Inside saving(), the bytes that mlx-lm writes to a file."""
        if _files.saving is not None:
            return _saved_state(self)
        return self.pool.pending() if self.layer == len(self.pool.layers) - 1 else []

    @state.setter
    def state(self, v: Any) -> None:
        if v is not None and len(v):
            raise ValueError("a FlatKVCache can only be loaded by load_prompt_cache()")

    @classmethod
    def from_state(cls, state: Any, meta_state: Any = None) -> FlatKVCache:
        about, pages = json.loads(bytes_of(state[0])), bytes_of(state[1])[1:]
        seq = loaded_sequence(about)
        if pages:
            seq.load_pages(pages, about["length"])
        return cls(about["layer"], [seq], [about["length"]])


class _Transfer(threading.local):
    """Whether copies and extracts in this thread move sequences instead of forking them."""

    active = False


_transfer = _Transfer()


@contextlib.contextmanager
def transferring() -> Iterator[None]:
    """Moves sequences to copies of a cache. The caller must drop each sequence from the original or from the copy."""
    previous, _transfer.active = _transfer.active, True
    try:
        yield
    finally:
        _transfer.active = previous


def moving_sequences() -> bool:
    """Returns whether this thread is inside transferring()."""
    return _transfer.active


class _Files(threading.local):
    """State of the prompt cache file that the current thread saves or loads."""

    saving: dict[int, str] | None = None  # names of the saved sequences, by object id
    described: set[int] = set()  # ids of sequences whose pool was already written
    written: set[int] = set()  # ids of sequences whose pages were already written
    loading: tuple[dict[str, PooledSequence], Any] | None = None  # loaded sequences by name, and the function that finds a pool


_files = _Files()


def saved_name(cache: Any) -> str | None:
    """Returns the name of a cache's sequence in the file that this thread saves, or None outside saving()."""
    if _files.saving is None:
        return None
    if len(cache.seqs) != 1:
        raise ValueError("a batched cache cannot be saved; extract() its sequences and save them one at a time")
    return _files.saving.setdefault(id(cache.seqs[0]), uuid.uuid4().hex)


def saved_pool(seq: PooledSequence) -> str:
    """Returns the key of a sequence's pool for the first layer of the sequence in the file, and "" for the other layers."""
    if id(seq) in _files.described:
        return ""
    _files.described.add(id(seq))
    return seq.pool.identity


def loaded_sequence(about: dict[str, Any]) -> PooledSequence:
    """Returns the sequence that the header of a saved layer names."""
    if _files.loading is None:
        raise ValueError("a prompt cache of flatkv can only be loaded by load_prompt_cache()")
    seqs, find_pool = _files.loading
    if about["text"] not in seqs:
        seqs[about["text"]] = PooledSequence(find_pool(about["pool"]))
    return seqs[about["text"]]


def _saved_state(cache: FlatKVCache) -> tuple[Any, Any]:
    """Returns two byte arrays: a JSON header, and the page file if this is the first saved layer of its sequence."""
    name, seq, pages = saved_name(cache), cache.seqs[0], b""
    with seq.lock:
        cache._truncate(cache._now())
        if id(seq) not in _files.written:
            _files.written.add(id(seq))
            pages = seq.page_file()
    header = {"layer": cache.layer, "text": name, "length": seq.length, "pool": saved_pool(seq)}
    return bytes_array(json.dumps(header).encode()), bytes_array(b"-" + pages)


def bytes_array(data: bytes) -> Any:
    return mx.array(memoryview(data))


def bytes_of(a: Any) -> bytes:
    return bytes(a.tolist()) if a.size < 1 << 16 else bytes(memoryview(a))


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Makes FlatKVCache.state return the bytes of a prompt cache file."""
    _files.saving, _files.described, _files.written = {}, set(), set()
    try:
        yield
    finally:
        _files.saving = None


@contextlib.contextmanager
def loading(find_pool: Any) -> Iterator[None]:
    """Enables FlatKVCache.from_state(). find_pool: returns the pool of an identity."""
    _files.loading = {}, find_pool
    try:
        yield
    finally:
        _files.loading = None
