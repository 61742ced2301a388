"""flatkv: a quantized, paged KV cache that reserves all of its memory in advance.

With mlx-lm, call `flatkv.install(max_tokens=131072)` once and then use mlx-lm unchanged. Without mlx-lm, Cache stores numpy arrays,
and Model and generate() run models on the CPU. docs/python.md describes the package.
"""
from __future__ import annotations

import importlib
import os
from typing import Any

from ._config import Layer
from ._library import BadCall, BadFile, DoesNotFit, Error, FileError, MissingFile, version
from .cache import Cache, GroupStats, Sequence, Stats, Step, file_tokens
from .model import Model, Runner, Sampling, TextDecoder, generate
from .plan import Plan
from .planning import plan

__version__ = version()
__all__ = ["BadCall", "BadFile", "Cache", "DoesNotFit", "Error", "FileError", "GroupStats", "Layer", "MissingFile", "Model", "Plan", "Runner",
           "Sampling", "Sequence", "Stats", "Step", "TextDecoder", "export_prompt_cache", "file_tokens", "generate", "install", "installed", "plan", "uninstall"]


def __getattr__(name: str) -> Any:
    """Imports the modules that require MLX when they are first used."""
    if name in ("lm", "mlx_cache"):
        return importlib.import_module(f"flatkv.{name}")
    raise AttributeError(f"module 'flatkv' has no attribute {name!r}")


def install(max_tokens: int | None = None, *, codec: str | None = None, rotate: str | None = "kv", max_seqs: int = 32, max_step_tokens: int = 2048,
            page_tokens: int = 64, memory_limit: int = 0, compile: bool = True, max_checkpoints: int = 16, max_contexts: int = 8, products: bool = True) -> None:
    """Replaces the prompt caches of mlx-lm; flatkv.lm.install() documents the options."""
    from . import lm
    lm.install(max_tokens, codec=codec, rotate=rotate, max_seqs=max_seqs, max_step_tokens=max_step_tokens, page_tokens=page_tokens,
               memory_limit=memory_limit, compile=compile, max_checkpoints=max_checkpoints, max_contexts=max_contexts, products=products)


def export_prompt_cache(file_name: str | os.PathLike[str], cache: list[Any], model: Any, **options: Any) -> None:
    """Saves a prompt cache for mlx-lm without flatkv; flatkv.lm.export_prompt_cache() documents the options."""
    from . import lm
    lm.export_prompt_cache(file_name, cache, model, **options)


def uninstall() -> None:
    """Restores the caches of mlx-lm."""
    from . import lm
    lm.uninstall()


def installed() -> bool:
    """Returns whether install() is in effect."""
    import sys
    lm = sys.modules.get("flatkv.lm")
    return lm is not None and lm.is_installed()
