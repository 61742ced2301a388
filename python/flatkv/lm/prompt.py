"""FlatKVCache: one layer of a batch of texts, in the place of mlx-lm's KVCache, RotatingKVCache and their batched forms.

Every layer keeps its own count of tokens, as mlx-lm's caches do: trim() changes the count, and the text follows when the next pass
begins. update_and_fetch() gives Fetched in place of keys and values; attention over them is attention over the pages.
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
from .pool import Pool, Text


class Fetched:
    """Stands for the keys or values of a whole history: shapes that a model may ask for, and the way to the pages."""

    ndim = 4
    __slots__ = ("cache", "dtype", "shape")

    def __init__(self, cache: Any, shape: tuple[int, ...], dtype: Any, length: int):
        self.cache = cache
        self.dtype = dtype
        self.shape = (*shape[:2], length, shape[3])


class FlatKVCache(caches._BaseCache):
    """One layer of one text (offset is an int) or of a batch of them (offset is an array)."""

    def __init__(self, layer: int, texts: list[Text], lengths: list[int] | None = None, batched: bool = False):
        self.layer = layer
        self.texts = texts
        self.lengths = [0] * len(texts) if lengths is None else lengths
        self.batched = batched
        self.pool: Pool = texts[0].pool
        self._left: list[int] | None = None  # tokens of a right-padded prompt that are still to come, for each row
        self._counts: list[int] = []  # tokens of each row in the pass
        self._shapes: tuple[Any, Any, Any] = ((), (), None)  # of the pass' keys and values, and their type

    def __repr__(self) -> str:
        return f"<flatkv.FlatKVCache: layer {self.layer}, tokens {', '.join(map(str, self._now()))}>"

    @property
    def window(self) -> int:
        return self.pool.layers[self.layer].window

    def _now(self) -> list[int]:
        """Tokens of each row; those of a pass that broke off never were."""
        return [min(n, text.length + text.adding) for text, n in zip(self.texts, self.lengths)]

    @property
    def offset(self) -> Any:
        return mx.array(self._now()) if self.batched else self._now()[0]

    # ---- a pass ----

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Fetched, Fetched]:
        n_rows, _, n, _ = keys.shape
        counts = [n] * n_rows if self._left is None else [min(n, left) for left in self._left]
        if self.pool.begins(self.layer, self.texts, counts):
            if not hasattr(caches, "FlatKVCache"):  # install() put it there
                raise BadCall("FKV_BAD_STATE", "this prompt cache is flatkv's and flatkv was uninstalled: make_prompt_cache() makes one of mlx-lm's own")
            self._trim_texts(self._now())
            self.pool.begin_pass(list(zip(self.texts, counts)))
        now = self._now()
        if n == 1 and self.pool.fused and sum(counts) == n_rows:
            self.pool.write(self.layer, keys, values)
        else:
            self.pool.write(self.layer, self._rows(keys, counts), self._rows(values, counts))
        self._counts = counts
        if self._left is not None:
            self._left = [left - n for left, n in zip(self._left, counts)]
        self.lengths = [length + n for length, n in zip(now, counts)]
        self._shapes = keys.shape, values.shape, keys.dtype
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Fetched, Fetched]:
        keys, values, dtype = self._shapes
        longest = max(self.lengths)
        return Fetched(self, keys, dtype, longest), Fetched(self, values, dtype, longest)

    def _trim_texts(self, lengths: list[int]) -> None:
        self.pool.settle()
        for text, n in zip(self.texts, lengths):
            text.truncate(n)

    @staticmethod
    def _rows(x: Any, counts: list[int]) -> Any:
        """[B, H, L, D] -> [T, H, D], without the padding. Every operation here is paid for in every layer of every token."""
        n_rows, heads, n, dim = x.shape
        flat = (x if n == 1 else x.swapaxes(1, 2)).reshape(n_rows * n, heads, dim)
        if sum(counts) == n_rows * n:
            return flat
        return flat[mx.array([b * n + i for b, count in enumerate(counts) for i in range(count)])]

    def attend(self, queries: Any, scale: float) -> Any:
        n_rows, heads, n, _ = queries.shape
        own = self.pool.layers[self.layer].scale
        if scale != own:
            queries = queries * (scale / own)
        counts = self._counts
        if n == 1 and self.pool.fused and all(counts):
            return self.pool.attend(self.layer, queries)
        out = self.pool.attend(self.layer, self._rows(queries, counts))
        if n == 1 and all(counts):
            return out.reshape(n_rows, heads, 1, -1)
        if sum(counts) != n_rows * n:  # padding is given the answer of some token: nobody looks at it
            index, first = [], 0
            for count in counts:
                index += [first + min(i, count - 1) if count else 0 for i in range(n)]
                first += count
            out = out[mx.array(index)]
        return out.reshape(n_rows, n, heads, out.shape[-1]).swapaxes(1, 2)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """For the model's eyes: pages know who sees whom."""
        if return_array:
            return create_causal_mask(N, max(self._now()), window_size=window_size)
        return None if N == 1 else "causal"

    # ---- what mlx-lm asks of a cache ----

    def size(self) -> int:
        return min(max(self._now()), self.window or 1 << 62)

    def empty(self) -> bool:
        return max(self._now()) == 0

    @property
    def nbytes(self) -> int:
        return self.pool.layer_bytes * sum(self._now())

    def is_trimmable(self) -> bool:
        if self.pool.sealed:  # sealed pages can be cut at their ends alone
            return False
        return self.window == 0 or max(self._now()) < self.window

    def trim(self, n: int) -> int:
        now = self._now()
        n = min(min(now), n)
        self.lengths = [length - n for length in now]
        return n

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatKVCache:
        now = self._now()
        return FlatKVCache(self.layer, [copy.deepcopy(text, memo) for text in self.texts], now, self.batched)

    # ---- batches ----

    @classmethod
    def merge(cls, given: list[FlatKVCache]) -> FlatKVCache:
        return cls(given[0].layer, [t for c in given for t in c.texts], [n for c in given for n in c._now()], True)

    def extend(self, other: FlatKVCache) -> None:
        self.lengths = self._now() + other._now()
        self.texts = self.texts + other.texts

    def filter(self, batch_indices: Any) -> None:
        keep = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        now = self._now()
        self.texts = [self.texts[i] for i in keep]
        self.lengths = [now[i] for i in keep]

    def extract(self, idx: int) -> FlatKVCache:
        now = self._now()[idx]
        return FlatKVCache(self.layer, [self.texts[idx].snapshot()], [now])

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None and max(left_padding) > 0:
            raise ValueError("flatkv has no left padding: give prompts padded at the right, with their lengths")
        if right_padding is not None and max(right_padding) > 0:
            self._left = list(lengths)

    def finalize(self) -> None:
        self._left = None

    # ---- evaluation, files ----

    @property
    def state(self) -> Any:
        """Evaluated by mlx-lm after a chunk of a prompt; written by it into files (inside of saving())."""
        if _files.saving is not None:
            return _saved_state(self)
        return self.pool.pending() if self.layer == len(self.pool.layers) - 1 else []

    @state.setter
    def state(self, v: Any) -> None:
        if v is not None and len(v):
            raise ValueError("a FlatKVCache is loaded by load_prompt_cache() alone")

    @classmethod
    def from_state(cls, state: Any, meta_state: Any = None) -> FlatKVCache:
        header, pages = (bytes(a.tolist()) if a.size < 1 << 16 else bytes(memoryview(a)) for a in state)
        about = json.loads(header)
        if _files.loading is None:
            raise ValueError("a FlatKVCache is loaded by load_prompt_cache() alone")
        texts, find_pool = _files.loading
        if about["text"] not in texts:
            texts[about["text"]] = Text.from_page_file(find_pool(about["pool"]), pages[1:], about["length"])
        return cls(about["layer"], [texts[about["text"]]], [about["length"]])


class _Files(threading.local):
    """The file that this thread saves or loads."""

    saving: dict[int, str] | None = None  # the texts that are in it already, by id
    loading: tuple[dict[str, Text], Any] | None = None


_files = _Files()


def _saved_state(cache: FlatKVCache) -> tuple[Any, Any]:
    """Two arrays of bytes: what this is, and the pages where it is the first layer of its text."""
    saved = _files.saving
    assert saved is not None
    if len(cache.texts) != 1:
        raise ValueError("a batch is saved one text at a time: extract() them first")
    text, pages = cache.texts[0], b""
    with text.lock:
        cache._trim_texts(cache._now())
        if id(text) not in saved:
            saved[id(text)] = uuid.uuid4().hex
            pages = text.page_file()
    header = {"layer": cache.layer, "text": saved[id(text)], "length": text.length, "pool": cache.pool.identity}
    return _bytes_array(json.dumps(header).encode()), _bytes_array(b"-" + pages)


def _bytes_array(data: bytes) -> Any:
    return mx.array(memoryview(data))


@contextlib.contextmanager
def saving() -> Iterator[None]:
    _files.saving = {}
    try:
        yield
    finally:
        _files.saving = None


@contextlib.contextmanager
def loading(find_pool: Any) -> Iterator[None]:
    """find_pool: the pool of an identity."""
    _files.loading = {}, find_pool
    try:
        yield
    finally:
        _files.loading = None
