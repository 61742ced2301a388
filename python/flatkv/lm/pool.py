"""The pages of one model (or of several of one shape), the texts in them, and the step that a forward pass makes.

mlx-lm says neither when a pass begins nor when it ends: a step begins with the first layer that is written and is committed when
the next one begins, or before a text is forked, trimmed or saved. A pass that broke off never was.

Threads take turns: a model's call is one turn of its pool (Pool.turn), and what is done to texts between calls waits for the end of
it. MLX evaluates an operation only in the thread that asked for it, so a turn ends with its writes under way, or done where threads
alternate. In a process of one thread they wait for the answer to be evaluated.
"""
from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import tempfile
import threading
import weakref
from typing import Any, Callable

import mlx.core as mx

from .._config import Layer, codec_name
from .._library import BadCall, DoesNotFit
from ..cache import Sequence
from ..mlx_cache import MlxCache, MlxStep


@dataclasses.dataclass(frozen=True)
class KVLayer:
    """A layer as the model has it. Pages may be wider: see stored()."""

    n_q_heads: int
    n_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int
    n_sinks: int
    dtype: str
    softcap: float = 0.0
    sink_logits: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Options:
    """How pages are made: see install()."""

    max_tokens: int
    codec: str = "8/4"
    rotate: str | None = "kv"
    max_seqs: int = 16
    max_step_tokens: int = 2048
    page_tokens: int = 64
    memory_limit: int = 0
    compile: bool = True


def stored(layer: KVLayer, options: Options) -> tuple[Layer, str]:
    """The layer and codec of the pages. Rows are padded with zeros to a width that the codec can have, which changes no answer."""
    wide = max(layer.k_dim, layer.v_dim)
    halves = codec_name(options.codec).replace("16", "") == "/"
    group = 16 if halves else 64 if wide % 64 == 0 else 32
    grouped = any(side[:1].isdigit() for side in options.codec.split("/"))
    codec = options.codec if halves or not grouped or "g" in options.codec else f"{options.codec}g{group}"
    dim = -(-wide // group) * group
    return Layer(layer.n_q_heads, layer.n_kv_heads, dim, layer.window, layer.n_sinks, layer.scale,
                 layer.softcap, layer.sink_logits), codec


def cache_options(layers: list[KVLayer], options: Options) -> tuple[list[Layer], dict[str, Any]]:
    made = [stored(layer, options) for layer in layers]
    exact = options.codec == "16/16"
    # 16 bits keep a model's own bits; scales of codes have more of them in float16.
    page_type = "bfloat16" if exact and any(l.dtype == "bfloat16" for l in layers) else "float16"
    return [layer for layer, _ in made], dict(
        codec=[codec for _, codec in made], rotate=None if exact else options.rotate, max_tokens=options.max_tokens,
        max_seqs=options.max_seqs, max_step_tokens=options.max_step_tokens, page_tokens=options.page_tokens, page_type=page_type,
        memory_limit=options.memory_limit)


ALTERNATING = 64  # turns of one thread in a row, before the next is no longer expected to be another's


def alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a pool, or of a text in it, during which no other thread has a turn."""
    @functools.wraps(method)
    def locked(self: Any, *args: Any, **named: Any) -> Any:
        with self.lock:
            return method(self, *args, **named)

    return locked


class Pool(MlxCache):
    """A cache on MLX that follows mlx-lm's forward passes."""

    def __init__(self, layers: list[KVLayer], options: Options, make_room: Callable[[], bool]):
        stored_layers, given = cache_options(layers, options)
        super().__init__(stored_layers, **given)
        self.layers = layers
        self.options = options
        self.page_tokens = options.page_tokens
        self.sealed = any(side[:1] in ("s", "c") for side in options.codec.split("/"))
        self.layer_bytes = self.plan.token_bytes // len(layers)
        self._make_room = make_room  # lets go of a prompt that mlx-lm keeps; False where there is none
        self._step: MlxStep | None = None
        self._rows: list[tuple[weakref.ref[Text], int]] = []  # of the open step, which keeps no text that everybody else has dropped
        self._wrote: set[int] = set()
        self._every_layer = set(range(len(layers)))
        self._waits: list[Any] = []  # the plain way: what the next step must find evaluated, or MLX copies whole pools
        self.lock = threading.RLock()  # of a turn; whatever changes below or above is changed by who has it
        self._thread = 0  # that made the last step
        self._in_a_row = ALTERNATING  # turns of that thread

    @property
    def identity(self) -> str:
        """Pools of the same identity can hold each other's texts."""
        return identity_of(self.layers, self.options)

    def fits(self, call: Callable[[], Any]) -> Any:
        """call(), again and again while it does not fit and mlx-lm keeps prompts that can be let go."""
        while True:
            try:
                return call()
            except DoesNotFit as error:
                if error.status not in ("FKV_POOL_FULL", "FKV_SEQS_FULL"):
                    raise
                if not self._make_room() and not self._collected():
                    raise DoesNotFit(error.status, f"{error.message} (flatkv.install(max_tokens={self.options.max_tokens}, "
                                     f"max_seqs={self.options.max_seqs}) decides how much there is)") from None
                self._close_dropped()

    def _collected(self) -> bool:
        """Whether the collector found texts that nobody holds."""
        gc.collect()
        return bool(self._closing)

    # ---- turns ----

    @alone
    def turn(self, build: Callable[[], Any]) -> Any:
        """A forward pass of this thread, build(); those of others wait until it is built, and find what it wrote."""
        me = threading.get_ident()
        self._in_a_row = self._in_a_row + 1 if self._thread in (0, me) else 0
        self._finish_others()
        self._thread = me
        answer, written = build(), self.pending()
        if self._in_a_row < ALTERNATING:
            _evaluate(written)
        elif threading.active_count() > 1:
            mx.async_eval(written)
        elif self.fused and written and isinstance(answer, mx.array):
            return mx.depends(answer, written)  # whoever evaluates the one has evaluated the other, for a thread that comes later
        return answer

    def _finish_others(self) -> None:
        """What another thread has left under way is done, or it is said that it cannot be."""
        if self._thread in (0, threading.get_ident()):
            return
        try:
            _evaluate(self._written() + self._waits)
        except RuntimeError as error:
            raise BadCall("FKV_BAD_STATE", "another thread has called a model over these pages and not evaluated what came of it: let it mx.eval() "
                          f"the model's answer before other threads go on ({error})") from error

    # ---- the step ----

    def begins(self, layer: int, texts: list[Text], counts: list[int]) -> bool:
        """Whether a layer that is written for these texts is the first of a new pass."""
        return self._step is None or layer in self._wrote or [t for t, n in zip(texts, counts) if n] != [t() for t, _ in self._rows]

    def write(self, layer: int, k: Any, v: Any) -> None:
        """k, v: [T, G, D] of the model, T the tokens of all rows; [T, G, 1, D] for kernels."""
        self.open_step().write(layer, self._padded(layer, k), self._padded(layer, v))
        self._wrote.add(layer)

    def open_step(self) -> MlxStep:
        assert self._step is not None, "queries before keys"
        return self._step

    def attend(self, layer: int, q: Any) -> Any:
        out = self.open_step().attend(layer, self._padded(layer, q))
        dim = self.layers[layer].v_dim
        return out if out.shape[-1] == dim else out[..., :dim]

    def _padded(self, layer: int, x: Any) -> Any:
        missing = self.config.layers[layer].head_dim - x.shape[-1]
        return x if missing == 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])

    @alone
    def begin_pass(self, rows: list[tuple[Text, int]]) -> MlxStep:
        """rows: texts and the tokens that they get, 0 of them for those that are not in the pass."""
        self.settle()
        self._thread = threading.get_ident()
        rows = [(text, n) for text, n in rows if n]
        if self._waits:
            mx.eval(self._waits)
            self._waits = []
        for text, n in rows:
            text.promise(text.length + n)
        self._step = self.step([(text.sequence(), n) for text, n in rows])
        self._rows, self._wrote = [(weakref.ref(text), n) for text, n in rows], set()
        for text, n in rows:
            text.adding = n
        return self._step

    def wrote_all(self) -> None:
        """A kept graph wrote every layer of the open step."""
        self._wrote = self._every_layer

    @alone
    def abort_pass(self) -> None:
        """The open step never was."""
        self._wrote = set()
        self.settle()

    @alone
    def pending(self) -> list[Any]:
        """What stands for the writes of the open step, once every layer has been written; nothing where it is another thread's."""
        return self._written() if self._thread in (0, threading.get_ident()) else []

    def _written(self) -> list[Any]:
        return self._step.pending() if self._step is not None and len(self._wrote) == len(self.layers) else []

    @alone
    def settle(self) -> None:
        """The open step becomes part of its texts, or never was where a pass broke off."""
        self._finish_others()
        step, rows, self._step, self._rows = self._step, self._rows, None, []
        if step is not None:
            texts = [(text, n) for text, n in ((ref(), n) for ref, n in rows) if text is not None]
            whole = False
            try:
                if len(self._wrote) == len(self.layers):
                    with step:
                        self._waits = [] if self.fused else step.pending()
                    whole = True
                else:
                    step.abort()
            finally:
                for text, n in texts:  # the length first: who reads both without the lock never sees a text that is too short
                    text.length += n if whole else 0
                    text.adding = 0
        self._close_dropped()

    @property
    def stats(self) -> Any:
        with self.lock:
            self.settle()
            return super().stats


def _evaluate(arrays: list[Any]) -> None:
    """For other threads: MLX marks as done what it finds done when it is asked again."""
    mx.eval(arrays)
    mx.eval(arrays)


def identity_of(layers: list[KVLayer], options: Options) -> str:
    return json.dumps([[dataclasses.astuple(l) for l in layers], options.codec, options.rotate, options.page_tokens])


def layers_of(identity: str) -> list[KVLayer]:
    return [KVLayer(*fields, tuple(sinks)) for *fields, sinks in json.loads(identity)[0]]


class Text:
    """A text in a pool. Its sequence is opened by the first token, and promised more as it grows."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.lock = pool.lock
        self.length = 0  # committed
        self.adding = 0  # in the open step of the pool
        self._sequence: Sequence | None = None
        self._promised = 0
        self._snapshot: Callable[[], Text | None] = lambda: None

    def sequence(self) -> Sequence:
        assert self._sequence is not None
        return self._sequence

    def promise(self, n_tokens: int) -> None:
        if n_tokens <= self._promised:
            return
        pages = -(-n_tokens // self.pool.page_tokens) * self.pool.page_tokens
        pages = max(n_tokens, min(pages, self.pool.options.max_tokens))  # the last page may be a part of one
        if self._sequence is None:
            self._sequence = self.pool.fits(lambda: self.pool.open(pages))
        else:
            self.pool.fits(lambda: self.sequence().reserve(pages))
        self._promised = pages

    def _child(self, sequence: Sequence | None, length: int) -> Text:
        child = Text(self.pool)
        child._sequence, child.length, child._promised = sequence, length, length if sequence else 0
        return child

    @alone
    def fork(self) -> Text:
        """A text of the same tokens, which shares their pages and is promised no more than these."""
        self.pool.settle()
        if self._sequence is None or self.length == 0:
            return Text(self.pool)
        return self._child(self.pool.fits(lambda: self.sequence().fork(self.length)), self.length)

    @alone
    def snapshot(self) -> Text:
        """A fork, the same one for every layer that asks before the text changes."""
        self.pool.settle()
        last = self._snapshot()
        if last is None or last.length != self.length:
            last = self.fork()
            self._snapshot = weakref.ref(last)
        return last

    def __deepcopy__(self, memo: dict[int, Any]) -> Text:
        memo[id(self)] = child = self.fork()
        return child

    @alone
    def truncate(self, n_tokens: int) -> None:
        if n_tokens < self.length:
            self._snapshot = lambda: None
            self.pool.fits(lambda: self.sequence().truncate(n_tokens))
            self.length = n_tokens

    @alone
    def page_file(self) -> bytes:
        """The pages as a page file. mlx-lm does not say what the tokens were: their places stand for them."""
        self.pool.settle()
        if self.length == 0:
            return b""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "pages.fkv")
            self.sequence().save(path, range(self.length))
            with open(path, "rb") as file:
                return file.read()

    @classmethod
    def from_page_file(cls, pool: Pool, data: bytes, length: int) -> Text:
        text = cls(pool)
        if data:
            with pool.lock, tempfile.TemporaryDirectory() as folder:
                pool.settle()
                path = os.path.join(folder, "pages.fkv")
                with open(path, "wb") as file:
                    file.write(data)
                text._sequence = pool.fits(lambda: pool.load(path, length))
            text.length = text._promised = length
        return text
