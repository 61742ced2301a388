"""Token ids of a sequence, and checkpoints of the states of its recurrent layers.

A recurrent layer keeps one state for the whole sequence, so it cannot be truncated. Its state at an earlier position is restored from
a checkpoint, and the tokens between the checkpoint and the wanted position are computed again. The token ids are taken from the
arguments of the model, without evaluating them.

Arrays are immutable in MLX, so a checkpoint of an unbatched sequence shares the arrays of the cache. Forks share checkpoints. The
number of checkpoints in a pool is bounded (Options.max_checkpoints), and the least recently used ones are dropped.
"""
from __future__ import annotations

import weakref
from array import array
from typing import Any, Iterator, Sequence as Many

N_UNREAD = 64  # token ids are read from an array after this number of newer arrays, when it has been evaluated
N_PER_SEQUENCE = 6  # maximum number of checkpoints of one sequence
States = Many[Many[Any]]  # the arrays of each recurrent layer; an array is None before the first token


class TokenHistory:
    """The token ids of a sequence. Ids are read from their arrays late, so that recording does not wait for the GPU.

    >>> import mlx.core as mx
    >>> history = TokenHistory()
    >>> history.append(mx.array([[1, 2, 3], [4, 5, 6]]), 1, 2)
    >>> len(history), history.ids(0, 2)
    (2, [4, 5])
    """

    def __init__(self) -> None:
        self._read = array("I")
        self._unread: list[tuple[Any, int, int]] = []  # array of shape [rows, tokens], row, and number of tokens
        self._n_unread = 0

    def __len__(self) -> int:
        return len(self._read) + self._n_unread

    def copy(self) -> TokenHistory:
        made = TokenHistory()
        made._read, made._unread, made._n_unread = self._read[:], list(self._unread), self._n_unread
        return made

    def append(self, tokens: Any, row: int, n: int) -> None:
        """Appends the first n token ids of a row. tokens: array of shape [rows, tokens]."""
        self._unread.append((tokens, row, n))
        self._n_unread += n
        if len(self._unread) > N_UNREAD:
            self._read_first(len(self._unread) - 8)

    def _read_first(self, n_arrays: int) -> None:
        for tokens, row, n in self._unread[:n_arrays]:
            self._read.extend(tokens[row, :n].tolist())
            self._n_unread -= n
        del self._unread[:n_arrays]

    def ids(self, first: int, last: int) -> list[int]:
        """Returns the token ids at positions first to last - 1."""
        self._read_first(len(self._unread))
        return self._read[first:last].tolist()

    def extend(self, ids: list[int]) -> None:
        """Appends token ids."""
        self._read_first(len(self._unread))
        self._read.extend(ids)

    def truncate(self, n: int) -> None:
        """Removes all ids after the first n."""
        if n < len(self):
            self._read_first(len(self._unread))
            del self._read[n:]


class Checkpoint:
    """The states of all recurrent layers of one sequence after `position` tokens. `states` is None after it was dropped."""

    __slots__ = ("__weakref__", "is_decoded", "position", "states")

    def __init__(self, position: int, states: States, is_decoded: bool = False):
        self.position = position
        self.states: States | None = states
        self.is_decoded = is_decoded  # true for a checkpoint between generated tokens, false at the end of a prompt chunk


class CheckpointStore:
    """Bounds the number of checkpoints in a pool. Sequences own the checkpoints; the store refers to them weakly."""

    def __init__(self, n_max: int):
        self.n_max = n_max
        self._kept: dict[weakref.ref[Checkpoint], None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, checkpoint: Checkpoint) -> None:
        """Marks a checkpoint as the most recently used one, and drops the least recently used ones that exceed the bound."""
        self._kept.pop(weakref.ref(checkpoint), None)
        self._kept[weakref.ref(checkpoint, self._forget)] = None
        while len(self._kept) > self.n_max:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            dropped = oldest()
            if dropped is not None:
                dropped.states = None

    def _forget(self, reference: weakref.ref[Checkpoint]) -> None:
        self._kept.pop(reference, None)


class Checkpoints:
    """The checkpoints of one sequence in order of position."""

    def __init__(self, store: CheckpointStore, kept: Many[Checkpoint] = ()):
        self._store = store
        self._kept = list(kept)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter([c for c in self._kept if c.states is not None])

    def copy(self) -> Checkpoints:
        return Checkpoints(self._store, list(self))

    def add(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint at the end, and thins out older ones.

        The two last checkpoints of the prompt are kept, because the next turn of a conversation often changes the text after them.
        The other ones are denser near the end of the sequence.
        """
        kept = [c for c in self if c.position < checkpoint.position] + [checkpoint]
        if len(kept) > N_PER_SEQUENCE:
            def cost(i: int) -> float:  # number of tokens to recompute without checkpoint i, relative to the distance of the checkpoint from the end
                before = kept[i - 1].position if i else 0
                return (kept[i + 1].position - before) / (checkpoint.position - kept[i].position)

            prompt = [i for i, c in enumerate(kept) if not c.is_decoded][-2:]
            del kept[min((i for i in range(len(kept) - 1) if i not in prompt), key=cost)]
        self._kept = kept
        self._store.use(checkpoint)

    def before(self, position: int) -> list[Checkpoint]:
        """Returns the checkpoints up to a position, the last one first."""
        return [c for c in reversed(list(self)) if c.position <= position]

    def truncate(self, position: int) -> None:
        """Removes the checkpoints after a position."""
        self._kept = [c for c in self if c.position <= position]

    def use(self, checkpoint: Checkpoint) -> None:
        self._store.use(checkpoint)
