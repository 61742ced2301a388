"""Translates layers, codecs and cache options into the configuration structs of the C library."""
from __future__ import annotations

import ctypes as C
import dataclasses
from typing import Any, Sequence as Many

from . import _abi
from ._library import check, choice, count, held

ROTATIONS = {None: 0, "none": 0, "k": 1, "v": 2, "kv": 3}
TYPES = {"float32": _abi.FKV_F32, "float16": _abi.FKV_F16, "bfloat16": _abi.FKV_BF16}


@dataclasses.dataclass(frozen=True)
class Layer:
    """The heads and the attention mask of one layer."""

    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    window: int = 0  #: sliding window in tokens, including the query; 0: full attention
    n_sinks: int = 0  #: number of initial tokens that stay visible outside the window
    scale: float = 0.0  #: score scale; 0: 1 / sqrt(head_dim)
    softcap: float = 0.0  #: soft cap c of scores, applied as c * tanh(score / c); 0: none
    sink_logits: tuple[float, ...] = ()  #: learned sink logit of each query head, with a zero value vector; (): none


def codec_name(codec: Any) -> str:
    """Returns the codec after checking that it is a string."""
    if not isinstance(codec, str):
        raise TypeError(f'codec must be a string such as "8/4" (got {codec!r})')
    return codec


def _layer_struct(layer: Layer, codec: str, group: int | None) -> Any:
    made = _abi.fkv_layer_config()
    for field in dataclasses.fields(layer):
        if field.name != "sink_logits":
            value = getattr(layer, field.name)
            setattr(made, field.name, value if field.name in ("scale", "softcap") else count(field.name, value))
    default = held.fkv_config_default().layer
    made.k, made.v = default.k, default.v
    if group is not None:
        made.k.group = made.v.group = count("group", group)
    check(held.fkv_codec_parse(codec_name(codec).encode(), C.addressof(made) + _abi.fkv_layer_config.k.offset,
                               C.addressof(made) + _abi.fkv_layer_config.v.offset))
    return made


def _sink_logits(layer: Layer) -> Any:
    if not layer.sink_logits:
        return None
    if len(layer.sink_logits) != layer.n_q_heads:
        raise ValueError(f"sink_logits must have one value per query head: expected {layer.n_q_heads}, got {len(layer.sink_logits)}")
    return (C.c_float * layer.n_q_heads)(*layer.sink_logits)


class Config:
    """An fkv_config struct together with the layer structs that it points to."""

    def __init__(self, layers: Many[Layer] | Layer, *, max_tokens: int, codec: str | Many[str] = "sealed", n_layers: int | None = None,
                 group: int | None = None, rotate: str | None = "auto", rotation_seed: int = 0, max_seqs: int = 1,
                 max_step_tokens: int = 512, page_tokens: int = 64, page_type: str = "float16", row_type: str = "float32",
                 n_threads: int = 0, lazy: bool = False, memory_limit: int = 0, weights_id: bytes = b"", rope_id: str = "",
                 numerics: str = ""):
        listed = [layers] * (n_layers or 1) if isinstance(layers, Layer) else list(layers)
        codecs: list[Any] = list(codec) if isinstance(codec, (list, tuple)) else [codec] * len(listed)
        if len(codecs) != len(listed):
            raise ValueError(f"codec must be one name or a list of {len(listed)} names, one per layer (got {len(codecs)})")
        self.layers = listed
        self.codecs = codecs
        self._sinks = [_sink_logits(l) for l in listed]
        self._structs = (_abi.fkv_layer_config * len(listed))(*[_layer_struct(l, c, group) for l, c in zip(listed, codecs)])
        for made, sinks in zip(self._structs, self._sinks):
            made.sink_logits = C.addressof(sinks) if sinks is not None else None
        self.struct = struct = held.fkv_config_default()
        struct.n_layers = len(listed)
        struct.layers = C.addressof(self._structs)
        struct.max_tokens, struct.max_seqs = count("max_tokens", max_tokens), count("max_seqs", max_seqs)
        struct.max_step_tokens, struct.page_tokens = count("max_step_tokens", max_step_tokens), count("page_tokens", page_tokens)
        struct.n_threads, struct.lazy, struct.memory_limit = count("n_threads", n_threads), lazy, count("memory_limit", memory_limit, 64)
        struct.page_type, struct.row_type = choice("page_type", page_type, TYPES), choice("row_type", row_type, TYPES)
        if rotate == "auto":  # the sealed codec for values assumes rotated values
            rotate = "v" if any(made.v.kind == _abi.FKV_CODEC_SEALED_V for made in self._structs) else None
        struct.rotate, struct.rotation_seed = choice("rotate", rotate, ROTATIONS), count("rotation_seed", rotation_seed, 64)
        struct.weights_id = (C.c_uint8 * 32)(*weights_id[:32])
        struct.rope_id = rope_id.encode()[:63]
        if len(numerics.encode()) > 31:
            raise ValueError(f"numerics has more than 31 bytes: {numerics!r}")
        struct.numerics = numerics.encode()
        self.row_type = row_type

    @property
    def address(self) -> int:
        return C.addressof(self.struct)
