"""Page pool of a model (or of several models with equal layers), its sequences, and the step of a forward pass.

mlx-lm does not report when a forward pass begins or ends. A step begins when the first layer is written. It is committed when the
next pass begins, or before a sequence is forked, truncated or saved. The step of an incomplete pass is aborted.

Forward passes of several threads are serialized (Pool.run_pass), and changes of sequences between passes wait for the lock. MLX
evaluates an operation only in the thread that created it. In a process with several threads a pass therefore ends with its writes
submitted, or evaluated if threads alternate. In a process with one thread, writes are evaluated together with the result.
"""
from __future__ import annotations

import functools
import gc
import os
import tempfile
import threading
import weakref
from typing import Any, Callable, Iterator

import mlx.core as mx

from .._library import BadCall, DoesNotFit, Error
from ..cache import Sequence, file_tokens
from ..mlx_cache import MlxCache, MlxStep
from .history import Checkpoint, Checkpoints, CheckpointStore, States, TokenHistory
from .layout import KVLayer, Options, first_half, identity_of, page_layers, plan_pool

ENLARGE = "call flatkv.install() with a larger max_tokens (--kv-tokens of python -m flatkv)"
SPAN_PAGES = 4  # sealed pages can be truncated to a multiple of this number of pages
ALTERNATING = 64  # consecutive passes of one thread after which threads no longer count as alternating


def locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method of a pool or of its sequences to hold the pool's lock."""
    @functools.wraps(method)
    def with_lock(self: Any, *args: Any, **named: Any) -> Any:
        with self.lock:
            return method(self, *args, **named)

    return with_lock


class Pool(MlxCache):
    """An MlxCache whose steps follow mlx-lm's forward passes."""

    def __init__(self, layers: list[KVLayer], options: Options, evict_prompt: Callable[[], bool]):
        config, plan = plan_pool(layers, options)
        super().__init__(config)
        self.plan = plan
        self.layers = layers
        self.options = options
        self.page_tokens = options.page_tokens
        self.span_tokens = SPAN_PAGES * options.page_tokens
        self.max_step_tokens: int = self.config.struct.max_step_tokens
        self._finished: list[weakref.ref[PooledSequence]] = []  # sequences whose unused reservation can be released
        self.sealed = any(side[:1] in ("s", "c") for side in options.codec_text.split("/"))
        self._centers = [mx.array(l.center).reshape(l.n_kv_heads, l.k_dim) if l.center and options.codec != "16/16" else None for l in layers]
        mx.eval([c for c in self._centers if c is not None])
        sizes = [len(page_layers(l, options.codec_text)) for l in layers]
        self._first_page_layers = [sum(sizes[:i]) for i in range(len(layers))]
        self.has_unpacked = any(l.unpacked for l in layers)
        self.is_hybrid = getattr(layers, "state_bytes", 0) > 0
        self.recomputes = self.sealed or self.is_hybrid  # whether trimming a prompt cache recomputes tokens
        self.checkpoints = CheckpointStore(options.max_checkpoints)
        self.recent: tuple[weakref.ref[PooledSequence], Checkpoint] | None = None  # states before the last unbatched pass
        self.layer_bytes = self.plan.token_bytes // len(layers)
        self._evict_prompt = evict_prompt  # drops a stored prompt cache of mlx-lm; returns False if there is none
        self._step: MlxStep | None = None
        self._rows: list[tuple[weakref.ref[PooledSequence], int]] = []  # rows of the open step; the references are weak, so that a dropped sequence can be closed
        self._written_layers: set[int] = set()
        self._every_layer = set(range(len(layers)))
        #: Without fused kernels: arrays of the last step to evaluate before the next one. MLX updates a pool in place only if no other
        #: array or operation refers to it; otherwise it copies the whole pool.
        self._unevaluated: list[Any] = []
        self._last_reads: list[Any] = []  # without fused kernels: values that depend on the reads of pages by the last layer of the open step
        self._last_layer = -1  # the layer of these reads
        self.lock = threading.RLock()  # protects all mutable state of the pool and its sequences
        self._thread = 0  # id of the thread that began the last step
        self._n_consecutive = ALTERNATING  # consecutive passes of that thread

    @property
    def identity(self) -> str:
        """Key of compatible pools, which can load each other's saved prompt caches."""
        return identity_of(self.layers, self.options)

    def retry_evicting(self, call: Callable[[], Any]) -> Any:
        """Calls call() and, while it raises DoesNotFit, evicts stored prompt caches of mlx-lm and retries."""
        while True:
            try:
                return call()
            except DoesNotFit as error:
                if error.status not in ("FKV_POOL_FULL", "FKV_SEQS_FULL"):
                    raise
                if not self._shrink_finished() and not self._evict_prompt() and not self._collect_garbage():
                    raise DoesNotFit(error.status, f"{error.message} (the pool was opened with max_tokens={self.options.max_tokens} "
                                     f"and max_seqs={self.options.max_seqs})") from None
                self._close_dropped()

    @locked
    def is_idle(self) -> bool:
        """Returns whether no sequence is open."""
        gc.collect()
        return bool(self.stats.seqs == 0)

    def _shrink_finished(self) -> bool:
        """Releases the unused reservations of finished requests. Returns whether there were any."""
        finished, self._finished = [seq for seq in (ref() for ref in self._finished) if seq is not None and seq.finished], []
        self.settle()
        return any([seq.shrink() for seq in finished])

    def check_request(self, n_prompt: int, max_new_tokens: int, name: str = "the prompt") -> None:
        """Raises DoesNotFit if a request can never fit, even in an empty pool."""
        if n_prompt >= self.max_tokens:
            raise DoesNotFit("FKV_POOL_FULL", f"{name} has {n_prompt} tokens, but the pool holds {self.max_tokens} tokens including generated ones; "
                             f"shorten the prompt, or {ENLARGE}")
        if n_prompt + max_new_tokens > self.max_tokens:
            raise DoesNotFit("FKV_POOL_FULL", f"{name} has {n_prompt} tokens and max_tokens is {max_new_tokens}, which exceeds the pool of "
                             f"{self.max_tokens} tokens; lower max_tokens of the request to at most {max(0, self.max_tokens - n_prompt)}, or "
                             f"{ENLARGE}, at least {n_prompt + max_new_tokens}")

    def _collect_garbage(self) -> bool:
        """Runs the garbage collector and returns whether it found unused sequences."""
        gc.collect()
        return bool(self._closing)

    # ---- forward passes ----

    @locked
    def run_pass(self, build: Callable[[], Any]) -> Any:
        """Runs a forward pass, build(), of this thread. Passes of other threads wait until it is built."""
        me = threading.get_ident()
        self._n_consecutive = self._n_consecutive + 1 if self._thread in (0, me) else 0
        self._finish_others()
        self._thread = me
        result, written = build(), self.pending()
        needed = written if self.fused else self._last_reads  # without fused kernels, evaluating the result evaluates the writes
        if self._n_consecutive < ALTERNATING:
            _evaluate(written)
        elif threading.active_count() > 1:
            mx.async_eval(written)
        elif written and needed and isinstance(result, mx.array):
            return mx.depends(result, needed)  # evaluating the result also evaluates the arrays on which passes of other threads depend
        return result

    def _finish_others(self) -> None:
        """Evaluates the writes of another thread's last pass. Raises BadCall if only that thread can evaluate them."""
        if self._thread in (0, threading.get_ident()):
            return
        try:
            _evaluate(self._written() + self._unevaluated)
        except RuntimeError as error:
            raise BadCall("FKV_BAD_STATE", "another thread called the model and did not evaluate the result; call mx.eval() on the result in that "
                          f"thread before another thread uses the model ({error})") from error

    # ---- the step ----

    def begins(self, layer: int, seqs: list[PooledSequence], counts: list[int]) -> bool:
        """Returns whether writing this layer of these sequences begins a new pass."""
        return self._step is None or layer in self._written_layers or [s for s, n in zip(seqs, counts) if n] != [s() for s, _ in self._rows]

    def write(self, layer: int, k: Any, v: Any) -> None:
        """Writes keys and values of all rows, [T, G, D] or, for fused kernels, [T, G, 1, D]."""
        center = self._centers[layer]
        if center is not None:
            k = (k.astype(mx.float32) - (center if k.ndim == 3 else center[:, None])).astype(k.dtype)
        first = self._first_page_layers[layer]
        if not self.layers[layer].is_latent:
            self._write_pages(first, k, v)
        else:
            for number, rows in (first, k), (first + 1, v):
                middle = first_half(rows.shape[-1])
                self._write_pages(number, rows[..., :middle], rows[..., middle:])
        self._written_layers.add(layer)

    def _write_pages(self, number: int, k: Any, v: Any) -> None:
        self.open_step().write(number, self._padded(number, k), self._padded(number, v))

    def fetch(self, layer: int, row: int) -> tuple[Any, Any]:
        """Returns the decoded keys and values of an unpacked layer, [G, S, D]. row: index among the sequences with tokens in the open step."""
        k, v = self._fetch_pages(layer, row)
        self._note_read(layer, k, v)
        return k, v

    def _fetch_pages(self, layer: int, row: int) -> tuple[Any, Any]:
        shape, first, step = self.layers[layer], self._first_page_layers[layer], self.open_step()
        if not shape.is_latent:
            k, v = step.fetch(first, row)
            return k[..., :shape.k_dim], v[..., :shape.v_dim]

        def joined(number: int, dim: int) -> Any:
            left, right = step.fetch(number, row)
            return mx.concatenate([left[..., :first_half(dim)], right[..., :dim - first_half(dim)]], -1)

        return joined(first, shape.k_dim), joined(first + 1, shape.v_dim)

    def open_step(self) -> MlxStep:
        assert self._step is not None, "attention before the layer was written"
        return self._step

    def attend(self, layer: int, q: Any) -> Any:
        number = self._first_page_layers[layer]
        out = self.open_step().attend(number, self._padded(number, q))
        self._note_read(layer, out)
        dim = self.layers[layer].v_dim
        return out if out.shape[-1] == dim else out[..., :dim]

    def _note_read(self, layer: int, *arrays: Any) -> None:
        """Records arrays that were computed from pages. Layers depend on each other, so that those of the last layer suffice."""
        if self.fused:
            return
        if layer != self._last_layer:
            self._last_reads, self._last_layer = [], layer
        # The maximum of two elements is a new array. The maximum of one element would be a view, which would keep the whole array alive.
        self._last_reads += [mx.max(a[-1:, -1:, -2:]) for a in arrays]

    def _padded(self, number: int, x: Any) -> Any:
        """Returns rows with zeros appended up to the width of page layer `number`."""
        missing = self.config.layers[number].head_dim - x.shape[-1]
        return x if missing == 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])

    @locked
    def begin_pass(self, rows: list[tuple[PooledSequence, int]]) -> MlxStep:
        """Commits the open step and begins another. rows: sequences with their numbers of new tokens, which can be 0."""
        self.settle()
        self._thread = threading.get_ident()
        rows = [(seq, n) for seq, n in rows if n]
        if self._unevaluated:
            mx.eval(self._unevaluated)
            self._unevaluated = []
        for seq, n in rows:
            seq.reserve(seq.length + n)
        try:
            self._step = self.step([(seq.sequence(), n) for seq, n in rows])
        except DoesNotFit as error:
            if error.status != "FKV_STEP_FULL":
                raise
            raise DoesNotFit(error.status, f"a forward pass of {sum(n for _, n in rows)} tokens exceeds max_step_tokens={self.max_step_tokens}, and "
                             "this call of the model cannot be split; call flatkv.install() with a larger max_step_tokens") from None
        self._rows, self._written_layers = [(weakref.ref(seq), n) for seq, n in rows], set()
        for seq, n in rows:
            seq.n_pending = n
        return self._step

    def mark_all_written(self) -> None:
        """Records that a compiled graph wrote every layer of the open step."""
        self._written_layers = self._every_layer

    @locked
    def abort_pass(self) -> None:
        """Aborts the open step."""
        self._written_layers = set()
        self.settle()

    @locked
    def pending(self) -> list[Any]:
        """Returns the arrays to evaluate after the pass, or [] if layers are missing or another thread began the step."""
        return self._written() if self._thread in (0, threading.get_ident()) else []

    def _written(self) -> list[Any]:
        complete = self._step is not None and len(self._written_layers) == len(self.layers)
        return self.open_step().pending() + self._last_reads if complete else []

    @locked
    def settle(self) -> None:
        """Commits the open step, or aborts it if the pass is incomplete."""
        self._finish_others()
        step, rows, self._step, self._rows = self._step, self._rows, None, []
        reads, self._last_reads, self._last_layer = self._last_reads, [], -1
        if step is not None:
            seqs = [(seq, n) for seq, n in ((ref(), n) for ref, n in rows) if seq is not None]
            committed = False
            try:
                if len(self._written_layers) == len(self.layers):
                    with step:
                        self._unevaluated = [] if self.fused else step.pending() + reads
                    committed = True
                else:
                    step.abort()
            finally:
                for seq, n in seqs:  # set the length first, so that length + n_pending is never too small for threads without the lock
                    seq.length += n if committed else 0
                    seq.n_pending = 0
                    if not committed:
                        seq.forget_after(seq.length)
        self._close_dropped()

    @property
    def stats(self) -> Any:
        with self.lock:
            self.settle()
            return super().stats


def _evaluate(arrays: list[Any]) -> None:
    """Evaluates arrays for other threads. MLX marks arrays as available only in the second call."""
    mx.eval(arrays)
    mx.eval(arrays)


class PooledSequence:
    """A sequence in a pool. It is opened by its first token, and its reservation grows with its length."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.lock = pool.lock
        self.length = 0  # committed tokens
        self.n_pending = 0  # tokens in the open step of the pool
        self._sequence: Sequence | None = None
        self._reserved = 0  # reserved tokens
        self.evicted = False
        self.finished = False  # whether the reservation beyond the current length is no longer needed
        self._snapshot: Callable[[], PooledSequence | None] = lambda: None
        self.history = TokenHistory()
        self.checkpoints = Checkpoints(pool.checkpoints)
        self.recompute: Callable[[Any, list[int]], None] | None = None  # recomputes tokens with the model that last used this sequence

    def sequence(self) -> Sequence:
        if self.evicted:
            raise DoesNotFit("FKV_GONE", "this prompt cache was evicted from mlx-lm's prompt store because the pool was full; create a new one")
        assert self._sequence is not None
        return self._sequence

    @locked
    def reserve(self, n_tokens: int) -> None:
        """Opens the sequence if necessary and reserves pages for at least n_tokens."""
        if n_tokens <= self._reserved:
            return
        if self.evicted:
            self.sequence()
        self.pool.settle()
        pages = -(-n_tokens // self.pool.page_tokens) * self.pool.page_tokens
        pages = max(n_tokens, min(pages, self.pool.max_tokens))  # the last page of the pool can be partial
        if self._sequence is None:
            self._sequence = self.pool.retry_evicting(lambda: self.pool.open(pages))
        else:
            self.pool.retry_evicting(lambda: self.sequence().reserve(pages))
        self._reserved = pages

    def finish(self) -> None:
        """Marks the end of a request. Its unused reservation is released when the pool needs pages.

        Does not call the library, because an abandoned generator can be finalized during a library call.
        """
        self.finished = True
        self.pool._finished.append(weakref.ref(self))

    @locked
    def shrink(self) -> bool:
        """Reduces the reservation to the current length, after the open step was committed. Returns whether it was larger."""
        if self._sequence is None or self._reserved <= max(self.length, 1):
            return False
        self._reserved = max(self.length, 1)
        self._sequence.reserve(self._reserved)
        return True

    @locked
    def evict(self) -> bool:
        """Closes the sequence of a finished request, although mlx-lm may still refer to its prompt cache. Returns whether it was open."""
        if not self.finished or self._sequence is None:
            return False
        self.pool.settle()
        self._sequence.close()
        self._sequence, self.length, self._reserved, self.evicted = None, 0, 0, True
        self.forget_after(0)
        return True

    def _child(self, sequence: Sequence | None, length: int) -> PooledSequence:
        child = PooledSequence(self.pool)
        child._sequence, child.length, child._reserved = sequence, length, length if sequence else 0
        child.history, child.checkpoints, child.recompute = self.history.copy(), self.checkpoints.copy(), self.recompute
        return child

    @locked
    def fork(self) -> PooledSequence:
        """Returns a copy that shares all pages. Its reservation equals its length."""
        self.pool.settle()
        if self.evicted:
            self.sequence()
        if self._sequence is None or self.length == 0:
            return PooledSequence(self.pool)
        return self._child(self.pool.retry_evicting(lambda: self.sequence().fork(self.length)), self.length)

    @locked
    def snapshot(self) -> PooledSequence:
        """Returns a fork, which all layers share until the sequence changes."""
        self.pool.settle()
        last = self._snapshot()
        if last is None or last.length != self.length:
            made: PooledSequence = self.fork()
            self._snapshot = weakref.ref(made)
            return made
        return last

    def __deepcopy__(self, memo: dict[int, Any]) -> PooledSequence:
        child: PooledSequence = self.fork()
        memo[id(self)] = child
        return child

    @locked
    def truncate(self, n_tokens: int) -> None:
        """Removes all tokens after the first n_tokens."""
        if n_tokens < self.length:
            self._snapshot = lambda: None
            self.pool.retry_evicting(lambda: self.sequence().truncate(n_tokens))
            self.length = n_tokens
            if not self.pool.recomputes:  # otherwise rewind() still needs the ids
                self.forget_after(n_tokens)

    # ---- trims that recompute tokens ----

    def forget_after(self, n_tokens: int) -> None:
        """Removes the token ids and checkpoints after the first n_tokens."""
        self.history.truncate(n_tokens)
        self.checkpoints.truncate(n_tokens)

    def can_rewind(self) -> bool:
        """Returns whether the ids of all tokens are known, so that tokens can be computed again."""
        return len(self.history) == self.length + self.n_pending

    @locked
    def rewind(self, n_tokens: int) -> tuple[int, States | None, list[int]]:
        """Truncates to the last position up to n_tokens at which pages and recurrent states are available.

        Returns the position, the recurrent states there (None at position 0), and the ids of the tokens from there to n_tokens.
        """
        self.pool.settle()
        if self.evicted:
            self.sequence()
        for position, states in self._restorable(n_tokens):
            try:
                self.truncate(position)
            except Error as error:
                if error.status != "FKV_GONE":
                    raise
                continue  # sealed pages cannot be truncated to this position
            ids = self.history.ids(position, n_tokens)
            self.forget_after(position)
            return position, states, ids
        raise AssertionError("a sequence can always be truncated to 0")

    def _restorable(self, n_tokens: int) -> Iterator[tuple[int, States | None]]:
        """Yields positions up to n_tokens that may be restored, with the recurrent states there, the last one first."""
        if not self.pool.is_hybrid:
            yield n_tokens, None
            yield n_tokens // self.pool.span_tokens * self.pool.span_tokens, None
        else:
            recent = self.pool.recent
            if recent is not None and recent[0]() is self and recent[1].position <= n_tokens:
                yield recent[1].position, recent[1].states
            for checkpoint in self.checkpoints.before(n_tokens):
                self.checkpoints.use(checkpoint)
                yield checkpoint.position, checkpoint.states
        yield 0, None

    @locked
    def page_file(self) -> bytes:
        """Returns the pages as the bytes of a page file. If the token ids are unknown, positions are stored in their place."""
        self.pool.settle()
        if self.length == 0:
            return b""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "pages.fkv")
            self.sequence().save(path, self.history.ids(0, self.length) if self.can_rewind() else range(self.length))
            with open(path, "rb") as file:
                return file.read()

    def load_pages(self, data: bytes, length: int) -> None:
        """Fills an empty sequence with the pages of a page file."""
        with self.lock, tempfile.TemporaryDirectory() as folder:
            self.pool.settle()
            path = os.path.join(folder, "pages.fkv")
            with open(path, "wb") as file:
                file.write(data)
            self._sequence = self.pool.retry_evicting(lambda: self.pool.load(path, length))
            self.length = self._reserved = length
            ids = file_tokens(path)
            if ids != list(range(length)):
                self.history.extend(ids)
