"""flatkv: a KV cache whose memory is a flat line.

With mlx-lm: `import flatkv; flatkv.install(max_tokens=131072)`, then use mlx-lm as always. On its own: Cache with numpy arrays,
Model and generate() over flatkv's own runner. docs/python.md has the whole story.
"""
from __future__ import annotations

from ._config import Layer
from ._library import BadCall, BadFile, DoesNotFit, Error, version
from .cache import Cache, GroupStats, Sequence, Stats, Step, file_tokens
from .model import Model, Runner, Sampling, generate
from .plan import Plan, plan

__version__ = version()
__all__ = ["BadCall", "BadFile", "Cache", "DoesNotFit", "Error", "GroupStats", "Layer", "Model", "Plan", "Runner", "Sampling",
           "Sequence", "Stats", "Step", "file_tokens", "generate", "install", "installed", "plan", "uninstall"]


def install(max_tokens: int, *, codec: str = "8/4", rotate: str | None = "kv", max_seqs: int = 16, max_step_tokens: int = 2048,
            page_tokens: int = 64, memory_limit: int = 0, compile: bool = True) -> None:
    """mlx-lm's prompt caches are flatkv's from now on: see flatkv.lm.install()."""
    from . import lm
    lm.install(max_tokens, codec=codec, rotate=rotate, max_seqs=max_seqs, max_step_tokens=max_step_tokens, page_tokens=page_tokens,
               memory_limit=memory_limit, compile=compile)


def uninstall() -> None:
    """mlx-lm makes its own caches again."""
    from . import lm
    lm.uninstall()


def installed() -> bool:
    import sys
    lm = sys.modules.get("flatkv.lm")
    return lm is not None and lm.is_installed()
