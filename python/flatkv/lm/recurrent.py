"""RecurrentCache: the state of one recurrent layer of a hybrid model. It replaces mlx-lm's ArraysCache.

The layer belongs to the same sequences as the attention layers of the model. trim() only changes the number of tokens; the state is
restored from a checkpoint, and tokens are computed again, when the model is called next (passes.py).
"""
from __future__ import annotations

import copy
import json
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as caches

from .history import States
from .pool import PooledSequence
from .prompt import bytes_array, bytes_of, loaded_sequence, moving_sequences, saved_name, saved_pool


class RecurrentCache(caches.ArraysCache):
    """The state of one layer for one sequence or for a batch of sequences: arrays of shape [sequences, ...]."""

    def __init__(self, number: int, size: int, seqs: list[PooledSequence], n_tokens: list[int] | None = None, batched: bool = False):
        super().__init__(size)
        self.cache: list[Any]
        self.number = number  # index of the layer among the recurrent layers of the model
        self.seqs = seqs
        self.n_tokens = [0] * len(seqs) if n_tokens is None else n_tokens
        self.batched = batched

    def __repr__(self) -> str:
        return f"<flatkv.RecurrentCache: layer {self.number}, tokens {', '.join(map(str, self._now()))}>"

    def _now(self) -> list[int]:
        """Returns the number of tokens of each row, without the tokens of an aborted pass."""
        return [min(n, seq.length + seq.n_pending) for seq, n in zip(self.seqs, self.n_tokens)]

    def row(self, index: int) -> list[Any]:
        """Returns the arrays of one row, detached from the arrays of the batch and of the forward pass."""
        alone = len(self.seqs) == 1
        return [None if a is None else mx.contiguous(a if alone else a[index:index + 1]) for a in self.cache]

    def restore(self, states: States | None, position: int) -> None:
        """Sets the state of a sequence that is not batched. states: the states of all layers, or None for an empty sequence."""
        self.cache = [None] * len(self.cache) if states is None else list(states[self.number])
        self.left_padding = self.lengths = None
        self.n_tokens = [position]

    def _made(self, seqs: list[PooledSequence], n_tokens: list[int], arrays: list[Any], batched: bool) -> RecurrentCache:
        made = RecurrentCache(self.number, len(self.cache), seqs, n_tokens, batched)
        made.cache = arrays
        return made

    # ---- cache interface of mlx-lm ----

    def is_trimmable(self) -> bool:
        return not self.batched and self.seqs[0].can_rewind()

    def trim(self, n: int) -> int:
        now = self._now()
        n = min(min(now), n)
        self.n_tokens = [length - n for length in now]
        return n

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentCache:
        seqs = list(self.seqs) if moving_sequences() else [copy.deepcopy(seq, memo) for seq in self.seqs]
        made = self._made(seqs, self._now(), list(self.cache), self.batched)
        # copied, because mlx-lm changes these two arrays in place
        made.left_padding = None if self.left_padding is None else self.left_padding + 0
        made.lengths = None if self.lengths is None else self.lengths + 0
        return made

    @classmethod
    def merge(cls, given: list[RecurrentCache]) -> RecurrentCache:
        first = given[0]
        arrays = caches.ArraysCache.merge([_plain(c) for c in given])
        made = first._made([s for c in given for s in c.seqs], [n for c in given for n in c._now()], arrays.cache, True)
        made.left_padding = arrays.left_padding
        return made

    def extend(self, other: RecurrentCache) -> None:
        n_tokens, seqs = self._now() + other._now(), self.seqs + other.seqs
        super().extend(other)
        self.n_tokens, self.seqs = n_tokens, seqs

    def filter(self, batch_indices: Any) -> None:
        keep = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        now = self._now()
        super().filter(batch_indices)
        self.seqs = [self.seqs[i] for i in keep]
        self.n_tokens = [now[i] for i in keep]

    def extract(self, idx: int) -> RecurrentCache:
        now, seq = self._now()[idx], self.seqs[idx]
        moved = moving_sequences()
        if moved:
            seq.finish()
        arrays = [None if a is None else mx.contiguous(a[idx:idx + 1]) for a in self.cache]
        return self._made([seq if moved else seq.snapshot()], [now], arrays, False)

    # ---- files ----

    @property
    def state(self) -> Any:
        """Arrays that mlx-lm evaluates after each prompt chunk. Inside saving(), the contents of a prompt cache file."""
        name = saved_name(self)
        if name is None:
            return self.cache, self.left_padding, self.lengths
        seq = self.seqs[0]
        seq.pool.settle()
        header = {"layer": self.number, "text": name, "length": seq.length, "pool": saved_pool(seq)}
        return bytes_array(json.dumps(header).encode()), list(self.cache)

    @state.setter
    def state(self, v: Any) -> None:
        self.cache, self.left_padding, self.lengths = v

    @classmethod
    def from_state(cls, state: Any, meta_state: Any = None) -> RecurrentCache:
        header, arrays = state
        about = json.loads(bytes_of(header))
        made = cls(about["layer"], len(arrays), [loaded_sequence(about)], [about["length"]])
        made.cache = list(arrays)
        return made


def _plain(cache: RecurrentCache) -> Any:
    """Returns an ArraysCache with the same arrays."""
    made = caches.ArraysCache(len(cache.cache))
    made.cache = list(cache.cache)
    return made
