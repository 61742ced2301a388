"""install(): mlx-lm makes FlatKVCaches, and MLX's attention over them is flatkv's.

Two things are replaced. mx.fast.scaled_dot_product_attention looks at the type of its keys: what update_and_fetch() of a FlatKVCache
gave goes to the pages, everything else to MLX. make_prompt_cache, save_prompt_cache and load_prompt_cache of mlx-lm are wrapped
wherever they were imported. A model that flatkv cannot serve keeps mlx-lm's own caches, with one warning.
"""
from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as caches
from mlx_lm.models import gemma2

from .. import _native
from .._config import Config
from ..mlx_cache import mlx_plan
from ..plan import Plan
from . import look
from .look import Probe, Refusal
from .pool import KVLayer, Options, Pool, Text, cache_options, identity_of, layers_of
from .prompt import Fetched, FlatKVCache, loading, saving
from .replay import Replays, Traced, taking_turns


class _Installed:
    """What install() changed, and the pools that it opened."""

    def __init__(self, options: Options):
        self.options = options
        self.attention = mx.fast.scaled_dot_product_attention
        self.functions = {name: getattr(caches, name) for name in ("make_prompt_cache", "save_prompt_cache", "load_prompt_cache")}
        self.new = self.patched()
        self.insert = caches.LRUPromptCache.insert_cache
        self.capped = gemma2.Attention.__call__
        self.found: dict[tuple[int, str], tuple[Any, list[KVLayer] | Refusal]] = {}  # by id of the model and kinds of its caches
        self.kept: dict[int, dict[str, Pool]] = {}  # pools of a model that lives, by its id
        self.pools: weakref.WeakValueDictionary[str, Pool] = weakref.WeakValueDictionary()
        self.prompts: weakref.WeakSet[Any] = weakref.WeakSet()  # mlx-lm's stores of prompts
        self.replays = Replays()
        self.lock = threading.RLock()  # around what is looked up and made once
        self.calls: dict[type, tuple[bool, Any]] = {}  # of classes of models: whether it was the class' own, and the function

    def make_room(self) -> bool:
        """Lets go of the prompt that was kept longest without being asked for."""
        for store in list(self.prompts):
            if len(store):
                store.trim_to(n_sequences=len(store) - 1)
                return True
        return False

    def pool(self, layers: list[KVLayer]) -> Pool:
        identity = identity_of(layers, self.options)
        with self.lock:
            pool = self.pools.get(identity)
            if pool is None:
                pool = self.pools[identity] = Pool(layers, self.options, self.make_room)
        return pool

    def layers(self, model: Any, own: list[Any]) -> list[KVLayer] | Refusal:
        key = id(model), look.kinds_of(own)
        known = self.found.get(key)
        if known is not None and known[0]() is model:
            return known[1]
        try:
            layers: list[KVLayer] | Refusal = look.look_at(model, own)
        except Refusal as refusal:
            layers = refusal
            kind = getattr(model, "model_type", type(model).__module__.rpartition(".")[2])
            warnings.warn(f"flatkv does not keep the KV of {kind}: {refusal}; mlx-lm's own cache is used", stacklevel=4)
        self.found[key] = weakref.ref(model, lambda _: self.forget(key)), layers
        return layers

    def forget(self, key: tuple[int, str]) -> None:
        """The model is gone: its pools go with the last of their texts."""
        self.kept.pop(key[0], None)
        self.found.pop(key, None)
        self.replays.forget(key[0])

    def follow(self, kind: type) -> None:
        """Calls of models of this class are turns of their pools from now on."""
        if kind not in self.calls:
            self.calls[kind] = "__call__" in vars(kind), kind.__call__
            kind.__call__ = functools.wraps(kind.__call__)(taking_turns(kind.__call__, self.replays))

    def restore_calls(self) -> None:
        for kind, (own, call) in self.calls.items():
            if own:
                kind.__call__ = call
            else:
                del kind.__call__

    def prompt_cache(self, model: Any, max_kv_size: int | None) -> list[Any]:
        make = self.functions["make_prompt_cache"]
        own = make(model, max_kv_size)
        with self.lock:
            layers = self.layers(model, make(model, max_kv_size))
            if isinstance(layers, Refusal):
                return own
            pool = self.pool(layers)
            self.kept.setdefault(id(model), {})[pool.identity] = pool
            self.follow(type(model))
        text, numbers = Text(pool), iter(range(len(layers)))
        return look.replaced(own, lambda _: FlatKVCache(next(numbers), [text]))

    def patched(self) -> dict[str, Any]:
        originals = self.functions

        @functools.wraps(originals["make_prompt_cache"])
        def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
            return self.prompt_cache(model, max_kv_size)

        @functools.wraps(originals["save_prompt_cache"])
        def save_prompt_cache(*args: Any, **named: Any) -> Any:
            with saving():
                return originals["save_prompt_cache"](*args, **named)

        @functools.wraps(originals["load_prompt_cache"])
        def load_prompt_cache(*args: Any, **named: Any) -> Any:
            with loading(lambda identity: self.pool(layers_of(identity))):
                return originals["load_prompt_cache"](*args, **named)

        return {"make_prompt_cache": make_prompt_cache, "save_prompt_cache": save_prompt_cache, "load_prompt_cache": load_prompt_cache}

    def attention_of_pages(self) -> Any:
        original = self.attention

        @functools.wraps(original)
        def scaled_dot_product_attention(q: Any, k: Any, v: Any, *args: Any, **named: Any) -> Any:
            if not isinstance(k, Fetched):
                return original(q, k, v, *args, **named)
            if isinstance(k.cache, Probe):
                return k.cache.attend(q, v, named["scale"], named.get("mask"), named.get("sinks"),
                                      float(named.get("softcap", 0.0)))
            return k.cache.attend(q, float(named["scale"]))

        return scaled_dot_product_attention

    def capped_attention(self) -> Any:
        """mlx-lm writes gemma 2's attention out, because MLX's has no soft cap: over pages it is one call."""
        original = self.capped

        @functools.wraps(original)
        def attention(layer: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
            if not isinstance(cache, (Probe, FlatKVCache, Traced)):
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


_now: _Installed | None = None


def _replace(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Functions of mlx-lm, in every module of it that has imported them."""
    for name, module in list(sys.modules.items()):
        if module is not None and (name == "mlx_lm" or name.startswith("mlx_lm.")):
            for function, was in old.items():
                if vars(module).get(function) is was:
                    setattr(module, function, new[function])


def install(max_tokens: int, *, codec: str = "8/4", rotate: str | None = "kv", max_seqs: int = 16, max_step_tokens: int = 2048,
            page_tokens: int = 64, memory_limit: int = 0, compile: bool = True) -> None:
    """mlx-lm's prompt caches are flatkv's from now on: generate, batch_generate, chat, the server run unchanged.

    max_tokens: of all texts that are open at once, kept prompts included. For each model its pages are taken when its first prompt
    cache is made, and nothing afterwards; flatkv.plan(model, max_tokens) says the bytes. codec: bits of K / bits of V. rotate: "kv",
    "k", "v" or None; 16/16 is never rotated. max_seqs: texts that are open at once, those that mlx-lm's server keeps included.
    max_step_tokens: of one forward pass, at least mlx-lm's prefill_step_size times the prompts of a batch. compile: on a GPU the graph
    of a decode step is kept and replayed for the tokens after it; False builds every one anew.
    """
    global _now
    uninstall()
    _native.mlx_open()
    options = Options(max_tokens, codec, rotate, max_seqs, max_step_tokens, page_tokens, memory_limit, compile)
    layers, given = cache_options([KVLayer(1, 1, 128, 128, 1.0, 0, 0, "float16")], options)
    mlx_plan(Config(layers, **given))  # a wrong option is refused here, before there is a model
    _now = installed = _Installed(options)
    mx.fast.scaled_dot_product_attention = installed.attention_of_pages()
    _replace(installed.functions, installed.new)
    caches.FlatKVCache = FlatKVCache  # load_prompt_cache() finds classes by name there

    @functools.wraps(installed.insert)
    def insert_cache(store: Any, *args: Any, **named: Any) -> Any:
        installed.prompts.add(store)
        return installed.insert(store, *args, **named)

    caches.LRUPromptCache.insert_cache = insert_cache
    gemma2.Attention.__call__ = installed.capped_attention()


def uninstall() -> None:
    """mlx-lm makes its own caches again. FlatKVCaches that are still held lose their attention: let go of them first."""
    global _now
    if _now is None:
        return
    mx.fast.scaled_dot_product_attention = _now.attention
    _replace(_now.new, _now.functions)
    caches.LRUPromptCache.insert_cache = _now.insert
    gemma2.Attention.__call__ = _now.capped
    del caches.FlatKVCache
    _now.restore_calls()
    _now.kept.clear()
    _now = None


def is_installed() -> bool:
    return _now is not None


def pools() -> list[Pool]:
    """The pools that are open, for their plans and stats."""
    return list(_now.pools.values()) if _now is not None else []


def layers_for(model: Any, max_kv_size: int | None = None) -> list[KVLayer]:
    """What flatkv would keep of a model; Refusal with the layer and the reason. Opens nothing."""
    if _now is None:
        install(64)
        try:
            return layers_for(model, max_kv_size)
        finally:
            uninstall()
    return look.look_at(model, _now.functions["make_prompt_cache"](model, max_kv_size))


def plan_for(model: Any, max_tokens: int, *, max_kv_size: int | None = None, **options: Any) -> Plan:
    """The plan of the pages that install(max_tokens, **options) would take for this model of mlx-lm."""
    layers, given = cache_options(layers_for(model, max_kv_size), Options(max_tokens, **options))
    return mlx_plan(Config(layers, **given))
