"""Decode steps whose graph is kept: traced once by mx.compile, replayed for every token after it.

A token's graph is the same one again as long as flatkv's kernels have the same grids: where the texts' tokens are is in the step's
table, an array. So a pass of one token for each text costs neither the model's Python code nor flatkv's. mlx-lm's own caches grow,
and their graph with them.

What is kept belongs to a pool and a model: the weights that were seen are part of it, so it is dropped when one of them is another
array, or the model is gone. The first pass of a model is computed both ways: it is replayed only if both have the same bits.
"""
from __future__ import annotations

import operator
import threading
import warnings
import weakref
from collections import OrderedDict
from typing import Any, Callable

import mlx.core as mx

from .. import _native
from .._library import Error, check
from ..mlx_cache import state_of
from .pool import Pool
from .prompt import Fetched, FlatKVCache

TREE = (mx.array, dict, list, tuple)
N_KEPT = 32  # graphs of one model, those of the last forms


class Untraceable(Exception):
    """A model asks its cache for something that is another number in every step."""


class _FetchedOnce(Fetched):
    """Keys or values inside of a trace, where nobody may know how many they are."""

    __slots__ = ()

    @property
    def shape(self) -> Any:  # type: ignore[override]
        raise Untraceable("asks for the shape of the keys of all tokens")

    @shape.setter
    def shape(self, _: Any) -> None:
        pass


class Traced:
    """A layer's cache inside of a trace: its offset is an array, and it has nothing else that changes from step to step."""

    def __init__(self, pool: Pool, layer: int, offset: Any):
        self.pool = pool
        self.layer = layer
        self.offset = offset

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self.pool.write(self.layer, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        fetched = _FetchedOnce(self, (0, 0, 0, 0), None, 0)
        return fetched, fetched

    def attend(self, queries: Any, scale: float) -> Any:
        own = self.pool.layers[self.layer].scale
        return self.pool.attend(self.layer, queries if scale == own else queries * (scale / own))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if return_array:
            raise Untraceable("asks for a mask as an array")
        return None if N == 1 else "causal"

    def __getattr__(self, name: str) -> Any:
        if hasattr(FlatKVCache, name):
            raise Untraceable(f"asks its cache for {name}")
        raise AttributeError(name)


class _Weights:
    """The arrays of a model and the modules they are in, held, and whether they are still the same ones. The model itself is not held."""

    def __init__(self, model: Any):
        self.top = [key for key, value in model.items() if isinstance(value, TREE)]
        self.owners: list[Any] = []
        self.keys: list[Any] = []
        for key in self.top:
            self._walk(model[key])
        self.seen = self._now(model)

    def _walk(self, node: Any) -> None:
        if isinstance(node, mx.array):
            return
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, TREE):
                self.owners.append(node)
                self.keys.append(key)
                self._walk(value)

    def _now(self, model: Any) -> list[Any]:
        return [model[key] for key in self.top] + list(map(operator.getitem, self.owners, self.keys))

    def unchanged(self, model: Any) -> bool:
        try:
            return all(map(operator.is_, self._now(model), self.seen))
        except (KeyError, IndexError):
            return False


class _Kept:
    """The graphs of one model over one pool."""

    def __init__(self, model: Any, call: Callable[..., Any]):
        self.model = weakref.ref(model)
        self.call = call
        self.weights: _Weights | None = None
        self.graphs: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
        self.checked: set[int] = set()  # numbers of texts for which both ways had the same bits
        self.refused = False
        self.building = False  # a pass as mlx-lm makes it: no __call__ inside of it is replayed
        self.traced = False  # by the last call of a graph

    def refuse(self, reason: str) -> None:
        self.refused = True
        self.forget()
        kind = getattr(self.model(), "model_type", type(self.model()).__module__.rpartition(".")[2])
        warnings.warn(f"flatkv builds every decode step of {kind} anew: {reason}", stacklevel=6)

    def forget(self) -> None:
        self.graphs.clear()
        self.weights = None

    def graph(self, key: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The one that was made for this key, if the weights are those that it was made with."""
        model = self.model()
        if self.weights is None or not self.weights.unchanged(model):
            self.forget()
            self.weights = _Weights(model)
        graph = self.graphs.get(key)
        if graph is None:
            graph = self.graphs[key] = make()
            if len(self.graphs) > N_KEPT:
                self.graphs.popitem(last=False)
        else:
            self.graphs.move_to_end(key)
        return graph


class Replays:
    """The decode passes of all models of an install()."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[Pool, dict[int, _Kept]] = weakref.WeakKeyDictionary()

    def forget(self, model_id: int) -> None:
        for of_pool in list(self._kept.values()):
            of_pool.pop(model_id, None)

    def kept(self, model: Any, call: Callable[..., Any], cache: Any) -> _Kept | None:
        """Where these caches can be stepped by a kept graph; None: as mlx-lm does it."""
        first = cache[0]
        if type(first) is not FlatKVCache or not first.pool.fused or len(cache) != len(first.pool.layers):
            return None
        for c in cache:
            if type(c) is not FlatKVCache or c._left is not None or c.lengths != first.lengths or c.texts != first.texts:
                return None
        of_pool = self._kept.setdefault(first.pool, {})
        kept = of_pool.get(id(model))
        if kept is None or kept.model() is not model:
            kept = of_pool[id(model)] = _Kept(model, call)
        return None if kept.refused or kept.building else kept

    def step(self, kept: _Kept, model: Any, tokens: Any, cache: list[FlatKVCache]) -> Any:
        first = cache[0]
        if len(first.texts) in kept.checked:
            return self._replay(kept, tokens, cache)
        lengths = [c.lengths for c in cache]
        kept.building = True
        try:
            built = kept.call(model, tokens, cache=cache)
        finally:
            kept.building = False
        mx.eval(built, first.pool.pending())
        self._undo(cache, lengths)
        try:
            found = self._replay(kept, tokens, cache)
            mx.eval(found)
            same = mx.array_equal(built, found, equal_nan=True).item()
            reason = None if same else "compiled, its answers have other bits"
        except Error:  # the cache's own: not the model's fault
            raise
        except Exception as error:  # whatever a model does with what is a placeholder
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        if reason is None:
            kept.checked.add(len(first.texts))
            return found
        self._undo(cache, lengths)
        kept.refuse(reason)
        return kept.call(model, tokens, cache=cache)

    @staticmethod
    def _undo(cache: list[FlatKVCache], lengths: list[list[int]]) -> None:
        cache[0].pool.abort_pass()
        for c, n in zip(cache, lengths):
            c.lengths = n

    def _replay(self, kept: _Kept, tokens: Any, cache: list[FlatKVCache]) -> Any:
        first = cache[0]
        pool = first.pool
        first._trim_texts(first._now())
        now = first._now()
        step = pool.begin_pass([(text, 1) for text in first.texts])
        form, state = state_of(step)
        n_tables = len(form) // FORM_BYTES
        key = (form, tokens.shape, tokens.dtype, repr(mx.default_stream(mx.default_device())), threading.get_ident())
        graph = kept.graph(key, lambda: self._graph(kept, pool, [c.layer for c in cache], n_tables))
        kept.traced = False
        try:
            logits, tickets = graph(tokens, mx.array(now) if first.batched else mx.array(now[0]), state)
        except BaseException:
            check(_native.mlx_step_put_state(step._at, state, False))
            kept.graphs.pop(key, None)
            raise
        check(_native.mlx_step_put_state(step._at, state[:n_tables] + tickets, not kept.traced))
        pool.wrote_all()
        lengths = [n + 1 for n in now]
        for c in cache:
            c.lengths = lengths
        return logits

    def _graph(self, kept: _Kept, pool: Pool, layers: list[int], n_tables: int) -> Callable[..., Any]:
        call, of_model, of_pool, of_kept = kept.call, kept.model, weakref.ref(pool), weakref.ref(kept)  # a graph holds nobody that holds it

        def traced(tokens: Any, offset: Any, state: list[Any]) -> Any:
            here, at = of_pool(), of_kept()
            assert here is not None and at is not None
            at.traced = True
            step = here.open_step()
            check(_native.mlx_step_put_state(step._at, state, False))
            logits = call(of_model(), tokens, cache=[Traced(here, layer, offset) for layer in layers])
            return logits, state_of(step)[1][n_tables:]

        return mx.compile(traced)


FORM_BYTES = 28  # of one table


def _pool_of(caches_: Any) -> Pool | None:
    """The pool that a model's caches are in."""
    for cache in caches_ if isinstance(caches_, (list, tuple)) else ():
        pool = cache.pool if isinstance(cache, FlatKVCache) else _pool_of(getattr(cache, "caches", None))
        if pool is not None:
            return pool
    return None


def taking_turns(call: Callable[..., Any], replays: Replays) -> Callable[..., Any]:
    """A model's __call__ that is a turn of its pool, and whose decode steps are replayed."""
    def __call__(model: Any, *args: Any, **named: Any) -> Any:
        cache = named.get("cache", args[1] if len(args) > 1 else None)
        pool = _pool_of(cache)
        if pool is None:
            return call(model, *args, **named)

        def build() -> Any:
            if pool.options.compile and len(args) == len(named) == 1 and args[0].ndim == 2 and args[0].shape[1] == 1:
                kept = replays.kept(model, call, cache)
                if kept is not None:
                    return replays.step(kept, model, args[0], cache)
            return call(model, *args, **named)

        return pool.turn(build)

    return __call__
