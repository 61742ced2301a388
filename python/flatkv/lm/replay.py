"""Compiled graphs of decode steps: traced once by mx.compile and replayed for later tokens.

The graph of a decode step does not change while flatkv's kernels have the same grids, because token positions are stored in the
step's page table, which is an array. Replaying a graph skips the Python code of the model and of flatkv.

Graphs belong to a pool and a model. They capture the model's weights, so they are dropped when a weight is replaced by another array
or the model is deleted. The first pass of a model is computed both with and without compilation, and graphs are used only if both
results are bit-identical.
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
from .prompt import FlatKVCache, PagedArray

TREE = (mx.array, dict, list, tuple)
N_GRAPHS = 32  # maximum number of graphs per model; the least recently used one is dropped


class Untraceable(Exception):
    """Raised if a model reads a cache value that changes with every step."""


class _TracedArray(PagedArray):
    """Placeholder for keys or values during tracing. Reading its shape is an error, because the shape changes with every step."""

    __slots__ = ()

    @property
    def shape(self) -> Any:
        raise Untraceable("the model reads the shape of the cached keys")

    @shape.setter
    def shape(self, _: Any) -> None:
        pass


class TracedCache:
    """Cache of one layer during tracing. Its offset is an array, and attributes that change with every step are errors."""

    def __init__(self, pool: Pool, layer: int, offset: Any):
        self.pool = pool
        self.layer = layer
        self.offset = offset

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self.pool.write(self.layer, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        placeholder = _TracedArray(self, (0, 0, 0, 0), None, 0)
        return placeholder, placeholder

    def attend(self, queries: Any, scale: float) -> Any:
        page_scale = self.pool.layers[self.layer].scale
        return self.pool.attend(self.layer, queries if scale == page_scale else queries * (scale / page_scale))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if return_array:
            raise Untraceable("the model requests its mask as an array")
        return None if N == 1 else "causal"

    def __getattr__(self, name: str) -> Any:
        if hasattr(FlatKVCache, name):
            raise Untraceable(f"the model reads {name} of its cache")
        raise AttributeError(name)


class _Weights:
    """References to a model's arrays and submodules, to detect replaced weights. Does not keep the model alive."""

    def __init__(self, model: Any):
        self.top = [key for key, value in model.items() if isinstance(value, TREE)]
        self.owners: list[Any] = []
        self.keys: list[Any] = []
        for key in self.top:
            self._walk(model[key])
        self.captured = self._current(model)

    def _walk(self, node: Any) -> None:
        if isinstance(node, mx.array):
            return
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, TREE):
                self.owners.append(node)
                self.keys.append(key)
                self._walk(value)

    def _current(self, model: Any) -> list[Any]:
        return [model[key] for key in self.top] + list(map(operator.getitem, self.owners, self.keys))

    def unchanged(self, model: Any) -> bool:
        try:
            return all(map(operator.is_, self._current(model), self.captured))
        except (KeyError, IndexError):
            return False


class _ModelGraphs:
    """The compiled graphs of one model and one pool."""

    def __init__(self, model: Any, call: Callable[..., Any]):
        self.model = weakref.ref(model)
        self.call = call
        self.weights: _Weights | None = None
        self.graphs: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
        self.checked: set[int] = set()  # batch sizes for which both results were bit-identical
        self.disabled = False
        self.building = False  # true during an uncompiled pass, so that nested calls are not replayed
        self.traced = False  # whether the last call of a graph traced it

    def disable(self, reason: str) -> None:
        """Drops the graphs and warns once."""
        self.disabled = True
        self.forget()
        kind = getattr(self.model(), "model_type", type(self.model()).__module__.rpartition(".")[2])
        warnings.warn(f"flatkv does not compile the decode steps of {kind}: {reason}", stacklevel=6)

    def forget(self) -> None:
        self.graphs.clear()
        self.weights = None

    def graph(self, key: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """Returns the graph for this key, and creates it if it is missing or the weights were replaced."""
        model = self.model()
        if self.weights is None or not self.weights.unchanged(model):
            self.forget()
            self.weights = _Weights(model)
        graph = self.graphs.get(key)
        if graph is None:
            graph = self.graphs[key] = make()
            if len(self.graphs) > N_GRAPHS:
                self.graphs.popitem(last=False)
        else:
            self.graphs.move_to_end(key)
        return graph


class DecodeGraphs:
    """The compiled decode steps of all models."""

    def __init__(self) -> None:
        self._by_pool: weakref.WeakKeyDictionary[Pool, dict[int, _ModelGraphs]] = weakref.WeakKeyDictionary()

    def forget(self, model_id: int) -> None:
        """Drops the graphs of a deleted model."""
        for by_model in list(self._by_pool.values()):
            by_model.pop(model_id, None)

    def graphs_of(self, model: Any, call: Callable[..., Any], cache: Any) -> _ModelGraphs | None:
        """Returns the graphs of a model, or None if this pass cannot be replayed."""
        first = cache[0]
        if type(first) is not FlatKVCache or not first.pool.fused or first.pool.has_unpacked or len(cache) != len(first.pool.layers):
            return None
        for c in cache:
            if type(c) is not FlatKVCache or c._remaining is not None or c.lengths != first.lengths or c.seqs != first.seqs:
                return None
        by_model = self._by_pool.setdefault(first.pool, {})
        graphs = by_model.get(id(model))
        if graphs is None or graphs.model() is not model:
            graphs = by_model[id(model)] = _ModelGraphs(model, call)
        return None if graphs.disabled or graphs.building else graphs

    def step(self, graphs: _ModelGraphs, model: Any, tokens: Any, cache: list[FlatKVCache]) -> Any:
        """Runs a decode pass. For each batch size, the first pass is checked against a pass without compilation."""
        first = cache[0]
        if len(first.seqs) in graphs.checked:
            return self._replay(graphs, tokens, cache)
        lengths = [c.lengths for c in cache]
        graphs.building = True
        try:
            built = graphs.call(model, tokens, cache=cache)
        finally:
            graphs.building = False
        mx.eval(built, first.pool.pending())
        self._undo(cache, lengths)
        try:
            replayed = self._replay(graphs, tokens, cache)
            mx.eval(replayed)
            same = mx.array_equal(built, replayed, equal_nan=True).item()
            reason = None if same else "the compiled results are not bit-identical"
        except Error:  # an error of the cache, not of the model
            raise
        except Exception as error:  # the model used a placeholder in an operation that only arrays support
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        if reason is None:
            graphs.checked.add(len(first.seqs))
            return replayed
        self._undo(cache, lengths)
        graphs.disable(reason)
        return graphs.call(model, tokens, cache=cache)

    @staticmethod
    def _undo(cache: list[FlatKVCache], lengths: list[list[int]]) -> None:
        """Aborts the open step and restores the lengths of every layer."""
        cache[0].pool.abort_pass()
        for c, n in zip(cache, lengths):
            c.lengths = n

    def _replay(self, graphs: _ModelGraphs, tokens: Any, cache: list[FlatKVCache]) -> Any:
        first = cache[0]
        pool = first.pool
        first._truncate(first._now())
        now = first._now()
        step = pool.begin_pass([(seq, 1) for seq in first.seqs])
        shape, state = state_of(step)
        n_tables = len(shape) // TABLE_SHAPE_BYTES
        key = (shape, tokens.shape, tokens.dtype, repr(mx.default_stream(mx.default_device())), threading.get_ident())
        graph = graphs.graph(key, lambda: self._graph(graphs, pool, [c.layer for c in cache], n_tables))
        graphs.traced = False
        try:
            logits, dependencies = graph(tokens, mx.array(now) if first.batched else mx.array(now[0]), state)
        except BaseException:
            check(_native.mlx_step_put_state(step._at, state, False))
            graphs.graphs.pop(key, None)
            raise
        check(_native.mlx_step_put_state(step._at, state[:n_tables] + dependencies, not graphs.traced))
        pool.mark_all_written()
        lengths = [n + 1 for n in now]
        for c in cache:
            c.lengths = lengths
        return logits

    def _graph(self, graphs: _ModelGraphs, pool: Pool, layers: list[int], n_tables: int) -> Callable[..., Any]:
        """Returns a function that is traced on its first call. It holds weak references, because its owners hold the graph."""
        call, model_ref, pool_ref, graphs_ref = graphs.call, graphs.model, weakref.ref(pool), weakref.ref(graphs)

        def traced(tokens: Any, offset: Any, state: list[Any]) -> Any:
            pool, graphs = pool_ref(), graphs_ref()
            assert pool is not None and graphs is not None
            graphs.traced = True
            step = pool.open_step()
            check(_native.mlx_step_put_state(step._at, state, False))
            logits = call(model_ref(), tokens, cache=[TracedCache(pool, layer, offset) for layer in layers])
            return logits, state_of(step)[1][n_tables:]

        compiled: Callable[..., Any] = mx.compile(traced)
        return compiled


TABLE_SHAPE_BYTES = 28  # bytes of the graph key for each page table
