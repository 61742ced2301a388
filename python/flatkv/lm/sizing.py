"""Chooses the codec of a pool and sizes the pool for the machine, if install() was called without codec or max_tokens.

Sealed pages need the least memory per token and are the fastest on a GPU, but every sequence needs additional open pages. The
sealed codec is chosen if its pool holds at least as many tokens as a pool of 8/4 pages and takes no more memory; otherwise 8/4.

The pool holds up to Options.max_contexts conversations of the model's maximum length, but takes at most half of the memory that is
available when it is opened, or memory_limit if that option is given. The other half is left to activations and other programs.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx

from .._library import DoesNotFit, Error, held
from .layout import KVLayer, Options, plan_pool

DEFAULT_CONTEXT = 131072  # number of tokens, for models whose arguments do not state a maximum length
MIN_TOKENS = 1024  # a smaller pool is useless, so it is reported as an error
CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "n_ctx", "seq_length", "model_max_length")


def bytes_text(n: int) -> str:
    """Returns a number of bytes in GB, or in MB if it is less than one GB.

    >>> bytes_text(5_620_000_000), bytes_text(9_961_472)
    ('5.62 GB', '9.96 MB')
    """
    return f"{n / 1e9:.2f} GB" if n >= 10**9 else f"{n / 1e6:.2f} MB"


def memory_limit() -> int:
    """Returns MLX's memory limit. Old versions of MLX return it only when it is replaced."""
    if hasattr(mx, "get_memory_limit"):
        return int(mx.get_memory_limit())
    limit = int(mx.set_memory_limit(1 << 40))
    mx.set_memory_limit(limit)
    return limit


def available_memory() -> int:
    """Returns the number of bytes that a pool could use at present on the default device."""
    free: int = held.fkv_memory_available(None)
    if mx.default_device().type != mx.DeviceType.gpu:
        return free
    info, active = mx.device_info(), int(mx.get_active_memory())
    if "max_recommended_working_set_size" in info:  # a Mac, whose CPU and GPU share memory
        return max(0, min(free, int(info["max_recommended_working_set_size"]) - active))
    limit = max(0, memory_limit() - active)
    return min(limit, int(info["free_memory"])) if "free_memory" in info else limit


def context_length(model: Any) -> int:
    """Returns the maximum sequence length that the arguments of an mlx-lm model state, or DEFAULT_CONTEXT."""
    args = getattr(model, "args", None)
    for source in (args, getattr(args, "text_config", None), getattr(getattr(model, "language_model", None), "args", None)):
        for name in CONTEXT_NAMES:
            value = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return DEFAULT_CONTEXT


DEFAULT_CODECS = ("sealed", "8/4")  # the first one is preferred


def sized_options(layers: list[KVLayer], options: Options, context: int = DEFAULT_CONTEXT) -> Options:
    """Returns the options with max_tokens and codec set. Options that are already set are not changed."""
    if options.codec is not None:
        return _with_max_tokens(layers, options, context)
    found: list[tuple[int, int, Options]] = []
    failed: Error | None = None
    for codec in DEFAULT_CODECS:
        try:
            sized = _with_max_tokens(layers, dataclasses.replace(options, codec=codec), context)
            found.append((sized.n_tokens, -plan_pool(layers, sized)[1].total_bytes, sized))
        except Error as error:  # the pool does not fit, or the codec does not support the layers
            failed = error
    if not found:
        assert failed is not None
        raise failed
    return max(found, key=lambda candidate: candidate[:2])[2]


def _with_max_tokens(layers: list[KVLayer], options: Options, context: int) -> Options:
    """Returns the options with max_tokens set. Options that already have max_tokens are returned unchanged."""
    if options.max_tokens is not None:
        return options
    available = available_memory()
    budget = min(options.memory_limit or available // 2, available)
    page = options.page_tokens

    def with_pages(n_pages: int) -> Options:
        return dataclasses.replace(options, max_tokens=n_pages * page)

    def needed(n_pages: int) -> int:
        return plan_pool(layers, with_pages(n_pages))[1].total_bytes

    least, most = -(-min(MIN_TOKENS, context) // page), -(-context * options.max_contexts // page)
    if needed(least) > budget:
        raise DoesNotFit("FKV_NO_MEMORY", f"a pool of {least * page} tokens needs {bytes_text(needed(least))}, but only {bytes_text(budget)} can be "
                         f"reserved ({bytes_text(available)} is available); use a smaller model or codec, raise the memory limit, or free memory")
    while least < most:
        middle = (least + most + 1) // 2
        if needed(middle) <= budget:
            least = middle
        else:
            most = middle - 1
    return with_pages(least)
