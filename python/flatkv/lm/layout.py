"""KV layers of a model, the page layers that store them, and the plan of their pool.

An attended layer has one page layer, over which attention is computed. An *unpacked* layer belongs to a model that uses keys and
values outside mx.fast.scaled_dot_product_attention; its rows are decoded for every pass and returned to the model as arrays. The keys
of an unpacked layer with latent attention (MLA) are latent rows, and its values are RoPE rows. Both are stored once: each of the two
has its own page layer, whose keys and values are the two halves of a row. Latent rows have as many bits as the keys of the codec, and
RoPE rows have 16 bits.
"""
from __future__ import annotations

import dataclasses
import json
from typing import Any, Iterable

import mlx.core as mx

from .._config import Config, Layer, codec_name
from .._library import count
from ..mlx_cache import mlx_plan
from ..plan import Plan
from . import products

#: version of flatkv's CUDA kernels in the identity of rows
CUDA_KERNELS_VERSION = 4


@dataclasses.dataclass(frozen=True)
class KVLayer:
    """Shape of an attention layer in the model. Rows in pages can be wider (see page_layers())."""

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
    center: tuple[float, ...] = ()  # [KV heads * k_dim] vector that is subtracted from all keys before they are quantized; (): none
    unpacked: bool = False  # whether rows are decoded and returned to the model, which computes attention with its own scale and masks

    @property
    def is_latent(self) -> bool:
        """Whether the keys are latent rows and the values are RoPE rows of latent attention."""
        return self.unpacked and self.n_kv_heads == 1 and self.v_dim < self.k_dim


class KVLayers(list[KVLayer]):
    """The attention layers of a model, and the size of the states of its recurrent layers."""

    def __init__(self, layers: Iterable[KVLayer] = (), state_bytes: int = 0):
        super().__init__(layers)
        self.state_bytes = state_bytes  # bytes of the recurrent states of one sequence


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of install(). max_tokens and codec are None until sized_options() chooses them."""

    max_tokens: int | None = None
    codec: str | None = None
    rotate: str | None = "kv"
    max_seqs: int = 32
    max_step_tokens: int = 2048
    page_tokens: int = 64
    memory_limit: int = 0
    compile: bool = True
    max_checkpoints: int = 16  # maximum number of checkpoints of recurrent states in a pool (hybrid models)
    max_contexts: int = 8  # without max_tokens: number of sequences of maximum length that a pool holds if there is enough memory
    products: bool = True  # on CUDA and with compile, products with quantized weights are computed by flatkv's kernel

    @property
    def n_tokens(self) -> int:
        """max_tokens, after it has been chosen."""
        assert self.max_tokens is not None, "the pool has not been sized"
        return self.max_tokens

    @property
    def codec_text(self) -> str:
        """codec, after it has been chosen."""
        assert self.codec is not None, "the codec has not been chosen"
        return self.codec


def page_layer(layer: KVLayer, codec: str) -> tuple[Layer, str]:
    """Returns the layer and codec of the pages. Rows are zero-padded to a width that the codec supports, which keeps attention exact."""
    wide = max(layer.k_dim, layer.v_dim)
    halves = codec_name(codec).replace("16", "") == "/"
    group = 16 if halves else 64 if wide % 64 == 0 else 32
    grouped = any(side[:1].isdigit() for side in codec.split("/"))
    dim = -(-wide // group) * group
    return (Layer(layer.n_q_heads, layer.n_kv_heads, dim, layer.window, layer.n_sinks, layer.scale, layer.softcap, layer.sink_logits),
            codec if halves or not grouped or "g" in codec else f"{codec}g{group}")


def page_layers(layer: KVLayer, codec: str) -> list[tuple[Layer, str]]:
    """Returns the page layers of a layer with their codecs: two for latent attention, otherwise one."""
    if not layer.unpacked:
        return [page_layer(layer, codec)]
    if codec_name(codec)[:1] in ("s", "c"):  # rows of sealed pages cannot be returned to the model
        codec = SEALED_UNPACKED
    if not layer.is_latent:
        return [page_layer(layer, codec)]
    sides, group = codec.partition("g")[0].split("/"), codec.partition("g")[1:]
    latent = codec if len(sides) == 1 else f"{sides[0]}/{sides[0]}{''.join(group)}"

    def halves(dim: int) -> KVLayer:
        return dataclasses.replace(layer, k_dim=first_half(dim), v_dim=first_half(dim))

    return [page_layer(halves(layer.k_dim), latent), page_layer(halves(layer.v_dim), "16/16")]


SEALED_UNPACKED = "8/4"  # codec of unpacked layers in a pool with sealed pages


def first_half(dim: int) -> int:
    """Returns the number of channels in the first half of a row of latent attention."""
    return (dim + 1) // 2


def pool_config(layers: list[KVLayer], options: Options) -> tuple[list[Layer], dict[str, Any]]:
    """Returns the layers and the Config options of a pool."""
    made = [page for layer in layers for page in page_layers(layer, options.codec_text)]
    exact = options.codec == "16/16"
    # A decode pass has one token per sequence and cannot be split.
    n_step = max(count("max_step_tokens", options.max_step_tokens), count("max_seqs", options.max_seqs))
    # Unquantized pages keep the model's type; quantization scales are more precise in float16.
    page_type = "bfloat16" if exact and any(l.dtype == "bfloat16" for l in layers) else "float16"
    return [layer for layer, _ in made], dict(
        codec=[codec for _, codec in made], rotate=None if exact else options.rotate, max_tokens=options.n_tokens,
        max_seqs=options.max_seqs, max_step_tokens=n_step, page_tokens=options.page_tokens, page_type=page_type,
        memory_limit=options.memory_limit, numerics=numerics(options.products and options.compile))


def numerics(own_products: bool) -> str:
    """Returns the identity of the arithmetic that computes rows, which page files store: MLX's version, device and GPU architecture.

    The prefix distinguishes rows of mlx-lm from those of flatkv's own models. On CUDA, the identity contains the version of flatkv's
    kernels, which must be increased by every change that changes bits, and a "p" if flatkv computes products with quantized weights.
    """
    version = mx.__version__[:9]
    if mx.default_device().type != mx.DeviceType.gpu:
        return f"mlx-lm {version} cpu"
    architecture = str(mx.device_info().get("architecture", "")).removeprefix("applegpu_")[:6]
    kernels = f"{CUDA_KERNELS_VERSION}p" if own_products and products.available() else CUDA_KERNELS_VERSION
    return f"mlx-lm {version} " + (f"metal {architecture}" if mx.metal.is_available() else f"cuda {kernels} {architecture}")


UNBOUNDED = (2**31 - 1, 1 << 24, 1 << 20)  # sequence lengths to try for pools without full-attention layers, longest first


def plan_pool(layers: list[KVLayer], options: Options) -> tuple[Config, Plan]:
    """Returns the configuration and the plan of a pool. The plan includes the recurrent states of all sequences and checkpoints."""
    config, plan = plan_pages(layers, options)
    n_states = plan_states(config.struct.max_seqs, options)
    states = n_states * getattr(layers, "state_bytes", 0)
    return config, dataclasses.replace(plan, total_bytes=plan.total_bytes + states, state_bytes=states)


def plan_states(max_seqs: int, options: Options) -> int:
    """Returns the maximum number of recurrent states: those of every sequence and every checkpoint, and those from before the last pass."""
    return max_seqs + options.max_checkpoints + 1


def plan_pages(layers: list[KVLayer], options: Options) -> tuple[Config, Plan]:
    """Returns the configuration and the plan of the pages of a pool.

    If every layer has a window, the pages of a sequence are bounded, so its length need not be. The pool then reserves no more page
    memory than max_tokens full-attention tokens, and admits as many sequences of unlimited length as this memory can hold.
    """
    page_layers, given = pool_config(layers, options)
    config = Config(page_layers, **given)
    plan = mlx_plan(config)
    if all(layer.window for layer in layers):
        n_step = min(given["max_step_tokens"], -(-options.n_tokens // options.page_tokens) * options.page_tokens)
        for length in UNBOUNDED:
            most = None
            low, high = 1, options.max_seqs
            while low <= high:
                n_seqs = (low + high) // 2
                tried = Config(page_layers, **given | {"max_tokens": length, "max_seqs": n_seqs, "max_step_tokens": max(n_step, n_seqs)})
                tried_plan = mlx_plan(tried)
                if tried_plan.slab_bytes <= plan.slab_bytes:
                    most, low = (tried, tried_plan), n_seqs + 1
                else:
                    high = n_seqs - 1
            if most is not None:
                return most
    return config, plan


def _fields(layer: KVLayer) -> list[Any]:
    """Returns the values of a layer's fields. The last fields are omitted if they have their default values."""
    values = list(dataclasses.astuple(layer))
    while len(values) > N_IDENTITY and values[-1] == dataclasses.fields(KVLayer)[len(values) - 1].default:
        values.pop()
    return values


N_IDENTITY = 10  # number of fields that are always part of an identity


def identity_of(layers: list[KVLayer], options: Options) -> str:
    """Returns the key of compatible pools as JSON."""
    states = [layers.state_bytes] if isinstance(layers, KVLayers) and layers.state_bytes else []
    listed = [_fields(l) for l in layers]
    return json.dumps([listed, options.codec, options.rotate, options.page_tokens, *states])


def codec_of(identity: str) -> str | None:
    """Returns the codec that a pool key describes."""
    codec: str | None = json.loads(identity)[1]
    return codec


def layers_of(identity: str) -> list[KVLayer]:
    """Returns the layers that a pool key describes."""
    layers, _, _, _, *states = json.loads(identity)
    plain: list[list[Any]] = [[tuple(x) if isinstance(x, list) else x for x in fields] for fields in layers]
    return KVLayers((KVLayer(*fields) for fields in plain), *states)
