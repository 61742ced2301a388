"""install() and uninstall(): connect flatkv to mlx-lm.

mx.fast.scaled_dot_product_attention is wrapped. If its keys are PagedArray placeholders of a FlatKVCache, flatkv computes attention over
the pages; otherwise, MLX's function is called. On CUDA, mx.quantized_matmul is replaced as well (products.py). Functions of mlx-lm are redirected by replacing their code objects, so that references which other modules imported
before install() are redirected as well. Models that flatkv does not support keep mlx-lm's own caches, and a warning is issued once.
"""
from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import types
import warnings
import weakref
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as caches
from mlx_lm.models import gemma2

from .. import _native
from .._library import count
from ..plan import Plan
from . import admission, probe, products as quantized
from .layout import KVLayer, Options, codec_of, identity_of, layers_of, plan_pool
from .pool import Pool, PooledSequence
from .probe import Probe, UnsupportedModel
from .prompt import FlatKVCache, PagedArray, loading, saving
from .passes import recompute_trimmed, wrap_model_call
from .recurrent import RecurrentCache
from .replay import DecodeGraphs, TracedCache
from .server import ServerPatch
from .sizing import DEFAULT_CONTEXT, context_length, sized_options


class Redirection:
    """Redirects every reference to a function, including references that other modules imported, by replacing its code object."""

    def __init__(self, function: Any):
        self.function = function
        self.alias = f"_flatkv_{function.__name__}"
        self.saved = function.__code__, function.__defaults__, function.__kwdefaults__
        #: a copy of the function that is not redirected
        self.original = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
        self.original.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(self.original, function)

    def to(self, replacement: Any) -> None:
        scope: dict[str, Any] = {}
        exec(f"def call(*args, **named):\n    return {self.alias}(*args, **named)\n", scope)
        self.function.__globals__[self.alias] = replacement
        self.function.__code__, self.function.__defaults__, self.function.__kwdefaults__ = scope["call"].__code__, None, None

    def undo(self) -> None:
        self.function.__code__, self.function.__defaults__, self.function.__kwdefaults__ = self.saved
        self.function.__globals__.pop(self.alias, None)


class _Installation:
    """The original functions that install() replaced, and the open pools."""

    def __init__(self, options: Options):
        self.options = options
        self.attention = mx.fast.scaled_dot_product_attention
        self.product = mx.quantized_matmul
        self.redirections = {name: Redirection(getattr(module, name)) for name, module in REDIRECTED.items()}
        self.methods: dict[tuple[type, str], Any] = {}  # original methods of mlx-lm's classes
        self.layers_by_model: dict[tuple[int, str], tuple[Any, list[KVLayer] | UnsupportedModel]] = {}  # keyed by model id and cache types
        self.pools_by_model: dict[int, dict[str, Pool]] = {}  # keeps the pools of live models open, keyed by model id
        self.pools: weakref.WeakValueDictionary[str, Pool] = weakref.WeakValueDictionary()
        self.prompt_stores: weakref.WeakSet[Any] = weakref.WeakSet()  # LRUPromptCache objects of mlx-lm
        self.stored: weakref.WeakSet[PooledSequence] = weakref.WeakSet()  # sequences that were inserted into a store
        self.decode_graphs = DecodeGraphs()
        self.lock = threading.RLock()  # protects the dictionaries above
        self.server = ServerPatch(self.pool_of)  # applied again before batches, because the server may be imported after install()
        self.calls: dict[type, tuple[bool, Any]] = {}  # model class: whether it defines __call__ itself, and its original __call__

    def evict_prompt(self) -> bool:
        """Drops the least recently used prompt cache that mlx-lm stores. Returns False if there is none."""
        for store in list(self.prompt_stores):
            if len(store):
                for seq in admission.remove_oldest(store):
                    seq.evict()
                return True
        # The stores are empty, so sequences that they owned are only referenced by local variables of mlx-lm.
        return any([seq.evict() for seq in list(self.stored)])

    def pool(self, layers: list[KVLayer], context: int = DEFAULT_CONTEXT, saved_codec: str | None = None) -> Pool:
        """Returns the pool for these layers and opens it if necessary.

        context: maximum sequence length of the model. saved_codec: codec of a file that is loaded, which is used if install() has no codec.
        """
        identity = identity_of(layers, self.options)
        with self.lock:
            pool = self.pools.get(identity)
            if pool is None:
                options = self.options if self.options.codec else dataclasses.replace(self.options, codec=saved_codec)
                pool = self.pools[identity] = Pool(layers, sized_options(layers, options, context), self.evict_prompt)
        return pool

    def layers(self, model: Any, own: list[Any]) -> list[KVLayer] | UnsupportedModel:
        """Returns the KV layers of a model, or the reason why the model is unsupported. own: caches that mlx-lm created for the model."""
        key = id(model), probe.cache_types(own)
        known = self.layers_by_model.get(key)
        if known is not None and known[0]() is model:
            return known[1]
        try:
            layers: list[KVLayer] | UnsupportedModel = probe.probe_model(model, own)
        except UnsupportedModel as error:
            layers = error
            warnings.warn(f"flatkv does not support {probe.model_type(model)}: {error}; mlx-lm's own cache is used, {probe.memory_of(own)}", stacklevel=4)
        self.layers_by_model[key] = weakref.ref(model, lambda _: self.forget(key)), layers
        return layers

    def forget(self, key: tuple[int, str]) -> None:
        """Releases the pools of a deleted model. They close with their last sequence."""
        self.pools_by_model.pop(key[0], None)
        self.layers_by_model.pop(key, None)
        self.decode_graphs.forget(key[0])

    def wrap_calls(self, cls: type) -> None:
        """Wraps __call__ of a model class once."""
        if cls not in self.calls:
            self.calls[cls] = "__call__" in vars(cls), cls.__call__
            setattr(cls, "__call__", functools.wraps(cls.__call__)(wrap_model_call(cls.__call__, self.decode_graphs)))

    def restore_calls(self) -> None:
        """Restores __call__ of all wrapped model classes."""
        for cls, (own, call) in self.calls.items():
            if own:
                setattr(cls, "__call__", call)
            else:
                delattr(cls, "__call__")

    def pool_of(self, model: Any, max_kv_size: int | None = None) -> Pool | None:
        """Returns the pool of a model and opens it if necessary. Returns None if the model is unsupported."""
        with self.lock:
            layers = self.layers(model, self.original("make_prompt_cache")(model, max_kv_size))
            if isinstance(layers, UnsupportedModel):
                return None
            pools, identity = self.pools_by_model.setdefault(id(model), {}), identity_of(layers, self.options)
            if identity not in pools:  # max_kv_size has changed, so idle pools of the model are closed
                for key in [key for key, pool in pools.items() if pool.is_idle()]:
                    del pools[key]
            pool = pools[identity] = self.pool(layers, context_length(model))
            self.wrap_calls(type(model))
            return pool

    def prompt_cache(self, model: Any, max_kv_size: int | None = None) -> list[Any]:
        """Returns the caches of a model, with FlatKVCache in place of mlx-lm's KV caches if the model is supported."""
        own: list[Any] = self.original("make_prompt_cache")(model, max_kv_size)
        pool = self.pool_of(model, max_kv_size)
        if pool is None:
            return own
        seq, numbers, states = PooledSequence(pool), itertools.count(), itertools.count()
        return probe.replace_caches(own, lambda _: FlatKVCache(next(numbers), [seq]),
                                    lambda own: RecurrentCache(next(states), len(own.cache), [seq]) if pool.is_hybrid else own)

    def original(self, name: str) -> Any:
        """Returns a function of mlx-lm as it was before install()."""
        return self.redirections[name].original

    def redirect_functions(self) -> None:
        """Redirects the functions of mlx-lm that create, save and load caches or generate tokens."""
        save, load = self.original("save_prompt_cache"), self.original("load_prompt_cache")

        @functools.wraps(save)
        def save_prompt_cache(file_name: Any, cache: Any, *args: Any, **named: Any) -> Any:
            recompute_trimmed(cache)
            with saving():
                return save(file_name, cache, *args, **named)

        @functools.wraps(load)
        def load_prompt_cache(*args: Any, **named: Any) -> Any:
            with loading(lambda identity: self.pool(layers_of(identity), saved_codec=codec_of(identity))):
                return load(*args, **named)

        replacements = {"batch_generate": admission.discarding(self.original("batch_generate")), "make_prompt_cache": self.prompt_cache,
                        "save_prompt_cache": save_prompt_cache, "load_prompt_cache": load_prompt_cache}
        for name, redirection in self.redirections.items():
            redirection.to(replacements.get(name) or admission.reserving(redirection.original, self.prompt_cache))

    def replace_methods(self) -> None:
        """Replaces methods of mlx-lm's classes."""
        insert = caches.LRUPromptCache.insert_cache

        @functools.wraps(insert)
        def insert_cache(store: Any, model: Any, tokens: Any, prompt_cache: Any, *args: Any, **named: Any) -> Any:
            self.prompt_stores.add(store)
            for seq in admission.sequences_of(prompt_cache):
                seq.finished = True  # the store owns these sequences and returns forks of them
                self.stored.add(seq)
            return insert(store, model, tokens, prompt_cache, *args, **named)

        replacements = {(caches.LRUPromptCache, "insert_cache"): insert_cache, (gemma2.Attention, "__call__"): self.gemma2_attention(),
                        **admission.wrapped_batch_methods(self.pool_of, self.server.apply)}
        for (cls, name), method in replacements.items():
            self.methods[cls, name] = vars(cls)[name]
            setattr(cls, name, method)
        self.server.apply()

    def restore(self) -> None:
        """Restores all functions and methods."""
        mx.fast.scaled_dot_product_attention = self.attention
        if getattr(mx.quantized_matmul, "__wrapped__", None) is self.product:
            mx.quantized_matmul = self.product
        for redirection in self.redirections.values():
            redirection.undo()
        for (cls, name), method in self.methods.items():
            setattr(cls, name, method)
        self.server.undo()
        self.restore_calls()
        self.pools_by_model.clear()

    def wrapped_attention(self) -> Any:
        """Returns the replacement of mx.fast.scaled_dot_product_attention."""
        original = self.attention

        @functools.wraps(original)
        def scaled_dot_product_attention(q: Any, k: Any, v: Any, *args: Any, **named: Any) -> Any:
            if not isinstance(k, PagedArray):
                return original(q, k, v, *args, **named)
            if isinstance(k.cache, Probe):
                return k.cache.attend(q, v, named["scale"], named.get("mask"), named.get("sinks"),
                                      float(named.get("softcap", 0.0)))
            return k.cache.attend(q, float(named["scale"]))

        return scaled_dot_product_attention

    def gemma2_attention(self) -> Any:
        """Returns an attention layer for Gemma 2 that calls scaled_dot_product_attention with a soft cap, which MLX lacks."""
        original = gemma2.Attention.__call__

        @functools.wraps(original)
        def attention(layer: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
            if not isinstance(cache, (Probe, FlatKVCache, TracedCache)):
                return original(layer, x, mask, cache)
            n_rows, n, _ = x.shape

            def heads(rows: Any, n_heads: int) -> Any:
                return rows.reshape(n_rows, n, n_heads, -1).transpose(0, 2, 1, 3)

            q = layer.rope(heads(layer.q_proj(x), layer.n_heads), offset=cache.offset)
            k = layer.rope(heads(layer.k_proj(x), layer.n_kv_heads), offset=cache.offset)
            keys, values = cache.update_and_fetch(k, heads(layer.v_proj(x), layer.n_kv_heads))
            out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=layer.scale, mask=mask, softcap=layer.attn_logit_softcapping)
            return layer.o_proj(out.transpose(0, 2, 1, 3).reshape(n_rows, n, -1))

        return attention


#: functions of mlx-lm that install() redirects, and their modules
REDIRECTED = {"make_prompt_cache": caches, "save_prompt_cache": caches, "load_prompt_cache": caches, "generate_step": admission.generation,
              "speculative_generate_step": admission.generation, "batch_generate": admission.generation}
_installation: _Installation | None = None


def install(max_tokens: int | None = None, *, codec: str | None = None, rotate: str | None = "kv", max_seqs: int = 32, max_step_tokens: int = 2048,
            page_tokens: int = 64, memory_limit: int = 0, compile: bool = True, max_checkpoints: int = 16, max_contexts: int = 8, products: bool = True) -> None:
    """Replaces the prompt caches of mlx-lm. generate, batch_generate, chat and the server of mlx-lm then use flatkv unchanged.

    max_tokens: total tokens of all open sequences of a model, including stored prompt caches. All pages of a model are reserved when
    its first prompt cache is created; flatkv.plan(model, max_tokens) computes their bytes in advance. Without max_tokens, the pool holds
    up to max_contexts sequences of the model's maximum length, but takes at most half of the available memory.
    memory_limit: maximum size of a pool in bytes; 0 means the available memory.
    max_checkpoints: in models with recurrent layers, the maximum number of saved states to which a prompt cache can be trimmed.
    codec: bits of keys / bits of values, or "sealed". Without codec, pages are sealed if this needs no more memory than 8/4. rotate: "kv", "k", "v" or None; codec 16/16 is never rotated.
    max_seqs: maximum number of open sequences, including stored prompt caches. Further requests of a batch or of the server wait.
    max_step_tokens: maximum number of tokens in one step. Larger forward passes are split into several steps.
    compile: on a GPU, compile the graph of a decode step once and replay it for later tokens.
    products: on CUDA and with compile=True, multiply up to eight rows by 4-bit and 8-bit weights with flatkv's kernel instead of MLX's. Results
        differ by rounding.
    """
    global _installation
    uninstall()
    _native.mlx_open()
    options = Options(max_tokens, codec, rotate, max_seqs, max_step_tokens, page_tokens, memory_limit, compile, count("max_checkpoints", max_checkpoints),
                      count("max_contexts", max_contexts), products)
    checked = dataclasses.replace(options, max_tokens=1024 if max_tokens is None else max_tokens, codec="sealed" if codec is None else codec)
    plan_pool([KVLayer(1, 1, 128, 128, 1.0, 0, 0, "float16")], checked)  # raises on invalid options before a model is loaded
    _installation = installed = _Installation(options)
    mx.fast.scaled_dot_product_attention = installed.wrapped_attention()
    if products and compile and quantized.available():
        mx.quantized_matmul = quantized.wrapped_product(installed.product)
    installed.redirect_functions()
    installed.replace_methods()
    caches.FlatKVCache, caches.RecurrentCache = FlatKVCache, RecurrentCache  # load_prompt_cache() looks up classes by name in this module


def uninstall() -> None:
    """Restores the caches of mlx-lm. Prompt caches of flatkv can no longer be used after this call."""
    global _installation
    if _installation is None:
        return
    _installation.restore()
    del caches.FlatKVCache, caches.RecurrentCache
    _installation = None


def is_installed() -> bool:
    """Returns whether install() is in effect."""
    return _installation is not None


def pools() -> list[Pool]:
    """Returns the open pools, which have a plan and statistics."""
    return list(_installation.pools.values()) if _installation is not None else []


def open_pool(model: Any, max_kv_size: int | None = None) -> Pool | None:
    """Returns the pool of a model and opens it if necessary. Returns None if flatkv is not installed or does not support the model."""
    return _installation.pool_of(model, max_kv_size) if _installation is not None else None


def original_function(name: str) -> Any:
    """Returns a function of mlx-lm that install() redirects, as it is without flatkv."""
    return getattr(REDIRECTED[name], name) if _installation is None else _installation.original(name)


def own_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """Returns mlx-lm's own caches for a model, also while flatkv is installed."""
    own: list[Any] = original_function("make_prompt_cache")(model, max_kv_size)
    return own


def layers_for(model: Any, max_kv_size: int | None = None) -> list[KVLayer]:
    """Returns the KV layers of a model without reserving memory. Raises UnsupportedModel if flatkv cannot serve the model."""
    if _installation is None:
        install(64)
        try:
            return layers_for(model, max_kv_size)
        finally:
            uninstall()
    return probe.probe_model(model, _installation.original("make_prompt_cache")(model, max_kv_size))


def plan_for(model: Any, max_tokens: int, *, max_kv_size: int | None = None, **options: Any) -> Plan:
    """Returns the plan of the pool that install(max_tokens, **options) reserves for a model of mlx-lm."""
    layers = layers_for(model, max_kv_size)
    return plan_pool(layers, sized_options(layers, Options(max_tokens, **options)))[1]
