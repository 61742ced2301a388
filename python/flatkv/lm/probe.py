"""Inspects how a model uses its KV caches, by building a forward pass over probes that is never evaluated.

The keys and values of most models go directly from update_and_fetch() to MLX's attention, with a causal or sliding-window mask that
the cache created. Any other use of a placeholder raises an exception. The model is then probed again with arrays in place of
placeholders, and its layers are unpacked (layout.py). If this pass fails as well, the exception becomes the reason why the model is
unsupported.
"""
from __future__ import annotations

import copy
import sys
from typing import Any, Callable, Iterable

import mlx.core as mx
import mlx_lm.models.cache as caches
from mlx_lm.models.base import create_causal_mask

from .._library import Error
from .layout import KVLayer, KVLayers
from .prompt import PagedArray
from .sizing import context_length

KINDS = (caches.KVCache, caches.RotatingKVCache)
RECURRENT = tuple(getattr(caches, name) for name in ("ArraysCache", "MambaCache") if hasattr(caches, name))
#: model types with sparse attention, which select tokens with an index and store the index keys in the cache
SPARSE = {"deepseek_v32": "DeepSeek V3.2", "deepseek_v41": "DeepSeek V4.1", "glm_moe_dsa": "GLM-5"}
N_PROBED = 3  # number of tokens in the pass; models create masks only for more than one token


class UnsupportedModel(Exception):
    """Raised if flatkv cannot store the KV cache of a model. The message names the layer and the reason."""


class _Causal(str):
    """The string "causal" as a distinct object, so that a mask can be matched by identity."""


class Probe(caches._BaseCache):
    """Stands in for one layer's cache and records how the model uses it."""

    offset = 0

    def __init__(self, number: int, own: Any, masks: list[tuple[Any, int]], unpacked: bool = False):
        self.number = number
        self.unpacked = unpacked  # whether update_and_fetch() returns arrays
        self.window = own.max_size - own.keep if isinstance(own, caches.RotatingKVCache) else 0
        self.n_sinks = own.keep if isinstance(own, caches.RotatingKVCache) else 0
        self.masks = masks  # masks that probes created, with their windows
        self.rows: tuple[Any, Any] | None = None
        self.attended: list[tuple[int, float]] = []  # query heads and scale of each attention call
        self.caps: set[float] = set()
        self.sinks: list[tuple[float, ...]] = []  # learned sink logits of each attention call
        self.module: Any = None  # the attention layer that wrote the keys

    def reject(self, reason: str) -> None:
        raise UnsupportedModel(f"layer {self.number} {reason}")

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.rows is not None:
            self.reject("is written twice in one pass")
        self.rows = keys, values
        self.module = sys._getframe(1).f_locals.get("self")
        self.offset = keys.shape[2]
        return self.rows if self.unpacked else self.keys_and_values()

    def keys_and_values(self) -> tuple[PagedArray, PagedArray]:
        assert self.rows is not None
        keys, values = self.rows
        return PagedArray(self, keys.shape, keys.dtype, self.offset), PagedArray(self, values.shape, values.dtype, self.offset)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        mask = create_causal_mask(N, window_size=window_size) if return_array else "causal" if self.unpacked else _Causal("causal")
        self.masks.append((mask, window_size or 0))
        return mask

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.rows is None

    def attend(self, queries: Any, values: Any, scale: float, mask: Any, sinks: Any, softcap: float) -> Any:
        made = next((window for m, window in self.masks if m is mask), None)
        if made is None and not (isinstance(mask, str) and mask == "causal"):
            self.reject("has no causal mask" if mask is None else "uses a custom attention mask")
        if made:
            if made > self.window > 0 and self.n_sinks == 0:  # the visible tokens would depend on the prompt's chunk size
                self.reject(f"has a window of {made} tokens, which is larger than its cache of {self.window}")
            self.window = min(self.window or made, made)
        self.attended.append((queries.shape[1], float(scale)))
        self.caps.add(softcap)
        self.sinks.append(() if sinks is None else tuple(sinks.astype(mx.float32).tolist()))
        return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)

    def layer(self, context: int) -> KVLayer:
        """Returns the layer. context: maximum sequence length of the model."""
        if self.rows is None:
            self.reject("is never written")
        if self.unpacked:
            return self._unpacked_layer()
        if not self.attended:
            self.reject("computes attention itself instead of calling mx.fast.scaled_dot_product_attention")
        heads = {n for n, _ in self.attended}
        if len(heads) > 1:
            self.reject(f"has attention calls with different numbers of query heads: {sorted(heads)}")
        if len(set(self.sinks)) > 1 or len(self.caps) > 1:
            self.reject("has attention calls with different sink logits or soft caps")
        keys, values, dtype = self._checked_rows()
        if self.window < 0 or (self.n_sinks and self.window == 0):
            self.reject(f"has a window of {self.window} tokens in addition to {self.n_sinks} sink tokens")
        cap = self.caps.pop()
        center = key_center(self.module, keys.shape[1], keys.shape[3], context) if cap == 0 and not self.sinks[0] else ()
        return KVLayer(heads.pop(), keys.shape[1], keys.shape[3], values.shape[3], self.attended[0][1], self.window, self.n_sinks, dtype,
                       cap, self.sinks[0], center)

    def _unpacked_layer(self) -> KVLayer:
        if self.window or self.n_sinks:
            self.reject(f"computes attention itself over a window of {self.window} tokens")
        keys, values, dtype = self._checked_rows()
        return KVLayer(keys.shape[1], keys.shape[1], keys.shape[3], values.shape[3], 1.0, 0, 0, dtype, unpacked=True)

    def _checked_rows(self) -> tuple[Any, Any, str]:
        """Returns the keys and values of the pass and the name of their type."""
        assert self.rows is not None
        keys, values = self.rows
        if values.shape[:3] != keys.shape[:3]:
            self.reject(f"has values of shape {values.shape} but keys of shape {keys.shape}")
        dtype = str(keys.dtype).rpartition(".")[2]
        if dtype not in ("float16", "bfloat16", "float32"):
            self.reject(f"has keys of type {dtype} (expected float16, bfloat16 or float32)")
        return keys, values, dtype


CENTER_POSITIONS, CENTER_CHUNK = 8192, 4096  # positions over which key biases are averaged, and positions per operation
MIN_CENTER = 0.5  # smaller key biases do not affect quantization


def key_center(attention: Any, n_heads: int, dim: int, context: int) -> tuple[float, ...]:
    """Returns the key bias of an attention layer after RoPE, averaged over positions: n_heads * dim values, or () if there is none.

    Subtracting one vector from all keys shifts all scores of a query equally, so softmax does not change. Any vector would be correct;
    this one removes large biases, such as those of Qwen2, from the range of the quantization groups.
    """
    projection = getattr(attention, "k_proj", None)
    bias = getattr(getattr(projection, "linear", projection), "bias", None)  # a LoRA layer contains the original layer
    rope = getattr(attention, "rope", None)
    normed = any(hasattr(attention, name) for name in ("k_norm", "k_layernorm", "key_layernorm"))
    if not isinstance(bias, mx.array) or bias.size != n_heads * dim or not callable(rope) or normed:
        return ()
    n, total = min(context, CENTER_POSITIONS), mx.zeros((n_heads, dim))
    try:
        for first in range(0, n, CENTER_CHUNK):
            rows = mx.broadcast_to(bias.astype(mx.float32).reshape(1, n_heads, 1, dim), (1, n_heads, min(CENTER_CHUNK, n - first), dim))
            total = total + mx.sum(rope(rows, offset=first), (0, 2))
            mx.eval(total)
    except (TypeError, ValueError):  # the RoPE module takes different arguments
        return ()
    center = total / n
    return tuple(round(x, 3) for x in center.flatten().tolist()) if mx.max(mx.abs(center)).item() >= MIN_CENTER else ()


def replace_caches(own: Iterable[Any], make_kv: Callable[[Any], Any], make_recurrent: Callable[[Any], Any] = lambda cache: cache) -> list[Any]:
    """Returns the caches with each KV cache and each recurrent state replaced, including those inside CacheList objects."""
    made = []
    for cache in own:
        if type(cache) in KINDS:
            made.append(make_kv(cache))
        elif type(cache) in RECURRENT:
            made.append(make_recurrent(cache))
        elif type(cache) is caches.CacheList:
            made.append(caches.CacheList(*replace_caches(cache.caches, make_kv, make_recurrent)))
        else:
            made.append(cache)
    return made


def cache_types(own: list[Any]) -> str:
    """Returns a key for the types and sizes of caches, on which the result of probe_model() depends."""
    return str([(type(c).__name__, getattr(c, "max_size", 0), getattr(c, "keep", 0)) for c in own])


def memory_of(own: list[Any]) -> str:
    """Describes how the memory of mlx-lm's caches grows, for a warning."""
    if all(type(c) in RECURRENT for c in own):
        return "whose memory is constant"
    if all(type(c) in (*RECURRENT, caches.RotatingKVCache) for c in own):
        return "whose memory is bounded by its maximum size"
    return "whose memory grows with every token"


class _PlaceholderUsed(UnsupportedModel):
    """Raised if a model uses keys or values outside mx.fast.scaled_dot_product_attention."""


def probe_model(model: Any, own: list[Any]) -> KVLayers:
    """Returns the KV layers of a model in the order of its caches. own: caches that mlx-lm created for the model.

    Raises UnsupportedModel if flatkv cannot store the KV cache of a layer.
    """
    kind = model_type(model)
    if kind in SPARSE:
        raise UnsupportedModel(f"{SPARSE[kind]} attends to tokens that a sparse index selects, and flatkv does not store the index")
    try:
        return _probe(model, own, unpacked=False)
    except _PlaceholderUsed:
        return _probe(model, own, unpacked=True)


def model_type(model: Any) -> str:
    """Returns the name of a model's type in mlx-lm."""
    return str(getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2])


def _probe(model: Any, own: list[Any], unpacked: bool) -> KVLayers:
    probes: list[Probe] = []
    masks: list[tuple[Any, int]] = []

    def probe(cache: Any) -> Probe:
        probes.append(Probe(len(probes), cache, masks, unpacked))
        return probes[-1]

    recurrent: list[Any] = []

    def found(cache: Any) -> Any:
        recurrent.append(copy.copy(cache))
        recurrent[-1].cache = [None] * len(cache.cache)
        return recurrent[-1]

    given = replace_caches(own, probe, found)
    if not probes:
        types = ", ".join(sorted({type(c).__name__ for c in own}))
        raise UnsupportedModel(f"no layer uses KVCache or RotatingKVCache (found {types})")
    try:
        model(mx.zeros((1, N_PROBED), mx.int32), cache=given)
    except (UnsupportedModel, Error):
        raise
    except Exception as error:  # the model used a placeholder in an operation that only arrays support
        at = next((p.number for p in reversed(probes) if p.rows is not None), None)
        detail = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        if isinstance(error, AttributeError) and isinstance(error.obj, Probe):
            raise UnsupportedModel(f"layer {error.obj.number} reads {error.name} of its cache, which only mlx-lm's caches have") from error
        if "PagedArray" not in str(error):
            raise UnsupportedModel(f"the forward pass fails{'' if at is None else f' after layer {at} was written'} ({detail})") from error
        raise _PlaceholderUsed(f"layer {at} uses its keys or values outside mx.fast.scaled_dot_product_attention") from error
    context = context_length(model)
    return KVLayers((p.layer(context) for p in probes), sum(a.nbytes for c in recurrent for a in c.cache if a is not None))
