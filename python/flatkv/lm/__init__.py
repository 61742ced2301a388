"""flatkv as the KV cache of mlx-lm.

pool.py     the pages of one model, its texts, and the step of a forward pass
prompt.py   FlatKVCache: one layer of a batch of texts, as mlx-lm's caches are used
look.py     what a model asks of its caches, found out by a forward pass that is never evaluated
replay.py   decode steps whose graph is built once
hook.py     install() and uninstall()
"""
import importlib.metadata as _metadata

import mlx_lm.models.cache as _caches

for _name in ("KVCache", "RotatingKVCache", "CacheList", "LRUPromptCache", "_BaseCache", "make_prompt_cache", "save_prompt_cache", "load_prompt_cache"):
    if not hasattr(_caches, _name):
        raise ImportError(f"mlx-lm {_metadata.version('mlx-lm')} has no mlx_lm.models.cache.{_name}, which flatkv needs: "
                          "pip install -U mlx mlx-lm, or mlx-lm 0.31.2 to 0.32 where yours is newer")

from .hook import install, is_installed, plan_for, pools, uninstall  # noqa: E402
from .look import Refusal, look_at  # noqa: E402
from .prompt import FlatKVCache  # noqa: E402

__all__ = ["FlatKVCache", "Refusal", "install", "is_installed", "look_at", "plan_for", "pools", "uninstall"]
