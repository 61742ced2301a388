"""Export of prompt caches to files that mlx-lm can load without flatkv."""
from __future__ import annotations

import os
from typing import Any

import mlx.core as mx

from .._library import BadCall
from .hook import original_function, own_prompt_cache
from .passes import layer_caches


def export_prompt_cache(file_name: str | os.PathLike[str], cache: list[Any], model: Any, *, metadata: dict[str, str] | None = None,
                        max_kv_size: int | None = None, step_size: int = 512) -> None:
    """Saves a prompt cache of flatkv to a file that mlx_lm.models.cache.load_prompt_cache() can load without flatkv.

    The tokens of the prompt are computed again with mlx-lm's own caches, so the file contains no quantization errors. The memory of
    these caches is not part of the pool. max_kv_size: as in make_prompt_cache(), if the prompt cache was created with it. step_size:
    tokens per forward pass. Raises BadCall if the token ids are unknown, because the prompt was computed from embeddings.

    >>> flatkv.export_prompt_cache("prompt.safetensors", cache, model)  # doctest: +SKIP
    """
    first = next(layer_caches(cache), None)
    if first is None or first.batched:
        raise BadCall("FKV_BAD_ARGUMENT", "cache must be a prompt cache of flatkv for one sequence, as make_prompt_cache() returns it")
    n_tokens, seq = first._now()[0], first.seqs[0]
    if not seq.can_rewind():
        raise BadCall("FKV_BAD_STATE", "the token ids of this prompt cache are unknown, because it was computed from embeddings; save it with "
                      "save_prompt_cache()")
    ids, own = mx.array(seq.history.ids(0, n_tokens), mx.int32), own_prompt_cache(model, max_kv_size)
    for at in range(0, n_tokens, step_size):
        model(ids[None, at:at + step_size], cache=own)
        mx.eval([c.state for c in own])
    original_function("save_prompt_cache")(os.fspath(file_name), own, metadata or {})
