"""What a model asks of its caches: its forward pass is built over probes, and never evaluated.

A layer is taken where keys and values go straight from update_and_fetch() into MLX's attention, under a causal or windowed mask that
the cache made. What a model does otherwise with them is an exception here, and becomes the reason of a refusal.
"""
from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as caches
from mlx_lm.models.base import create_causal_mask

from .._library import Error
from .pool import KVLayer
from .prompt import Fetched

KINDS = (caches.KVCache, caches.RotatingKVCache)
N_PROBED = 3  # tokens of the pass: more than one, so that there are masks


class Refusal(Exception):
    """Why flatkv cannot keep a model's KV, with the layer."""


class _Causal(str):
    """"causal", with the window that was asked for."""

    window = 0


class Probe(caches._BaseCache):
    offset = 0

    def __init__(self, number: int, own: Any, masks: list[tuple[Any, int]]):
        self.number = number
        self.window = own.max_size - own.keep if isinstance(own, caches.RotatingKVCache) else 0
        self.n_sinks = own.keep if isinstance(own, caches.RotatingKVCache) else 0
        self.masks = masks  # those made by probes, with their windows
        self.rows: tuple[Any, Any] | None = None
        self.seen: list[tuple[int, float]] = []  # query heads and scale of each attention over it
        self.caps: set[float] = set()
        self.sinks: list[tuple[float, ...]] = []  # learned, of each attention over it

    def refuse(self, reason: str) -> None:
        raise Refusal(f"layer {self.number}: {reason}")

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Fetched, Fetched]:
        if self.rows is not None:
            self.refuse("is written twice in a pass")
        self.rows = keys, values
        self.offset = keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Fetched, Fetched]:
        assert self.rows is not None
        keys, values = self.rows
        return Fetched(self, keys.shape, keys.dtype, self.offset), Fetched(self, values.shape, values.dtype, self.offset)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        mask = create_causal_mask(N, window_size=window_size) if return_array else _Causal("causal")
        self.masks.append((mask, window_size or 0))
        return mask

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.rows is None

    def attend(self, queries: Any, values: Any, scale: float, mask: Any, sinks: Any, softcap: float) -> Any:
        made = next((window for m, window in self.masks if m is mask), None)
        if made is None and not (isinstance(mask, str) and mask == "causal"):
            self.refuse("has no causal mask" if mask is None else "has a mask of its own")
        if made:
            if made > self.window > 0 and self.n_sinks == 0:  # then what is seen depends on how a prompt is cut
                self.refuse(f"masks a window of {made} tokens over a cache of {self.window}")
            self.window = min(self.window or made, made)
        self.seen.append((queries.shape[1], float(scale)))
        self.caps.add(softcap)
        self.sinks.append(() if sinks is None else tuple(sinks.astype(mx.float32).tolist()))
        return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)

    def layer(self) -> KVLayer:
        if self.rows is None:
            self.refuse("is never written")
        if not self.seen:
            self.refuse("has attention of its own: its keys never reach MLX's")
        heads = {n for n, _ in self.seen}
        if len(heads) > 1:
            self.refuse(f"is attended with {sorted(heads)} query heads: one number is expected")
        if len(set(self.sinks)) > 1 or len(self.caps) > 1:
            self.refuse("is attended with several learned sinks or soft caps: one for each head is expected")
        keys, values = self.rows
        if values.shape[:3] != keys.shape[:3]:
            self.refuse(f"has values {values.shape} for keys {keys.shape}")
        dtype = str(keys.dtype).rpartition(".")[2]
        if dtype not in ("float16", "bfloat16", "float32"):
            self.refuse(f"has keys of {dtype}")
        if self.window < 0 or (self.n_sinks and self.window == 0):
            self.refuse(f"has a window of {self.window} beside {self.n_sinks} tokens to keep")
        return KVLayer(heads.pop(), keys.shape[1], keys.shape[3], values.shape[3], self.seen[0][1], self.window, self.n_sinks, dtype,
                       self.caps.pop(), self.sinks[0])


def replaced(own: list[Any], make: Any) -> list[Any]:
    """mlx-lm's caches with make(cache) in the place of those that hold KV, inside of lists of caches too."""
    made = []
    for cache in own:
        if type(cache) in KINDS:
            made.append(make(cache))
        elif type(cache) is caches.CacheList:
            made.append(caches.CacheList(*replaced(list(cache.caches), make)))
        else:
            made.append(cache)
    return made


def kinds_of(own: list[Any]) -> str:
    """What look_at() depends on, beside the model."""
    return str([(type(c).__name__, getattr(c, "max_size", 0), getattr(c, "keep", 0)) for c in own])


def look_at(model: Any, own: list[Any]) -> list[KVLayer]:
    """The KV layers of a model whose own caches these are, in their order. Refusal, with the layer and the reason."""
    probes: list[Probe] = []
    masks: list[tuple[Any, int]] = []

    def probe(cache: Any) -> Probe:
        probes.append(Probe(len(probes), cache, masks))
        return probes[-1]

    given = replaced(own, probe)
    if not probes:
        kinds = ", ".join(sorted({type(c).__name__ for c in own}))
        raise Refusal(f"no layer has a KV cache that grows ({kinds})")
    try:
        model(mx.zeros((1, N_PROBED), mx.int32), cache=given)
    except (Refusal, Error):
        raise
    except Exception as error:  # whatever a model does with what is not an array
        at = next((p.number for p in reversed(probes) if p.rows is not None), None)
        what = "does not run here" if at is None else f"layer {at}: has attention of its own"
        raise Refusal(f"{what} ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]})") from error
    return [p.layer() for p in probes]
