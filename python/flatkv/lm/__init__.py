"""flatkv as the KV cache of mlx-lm.

layout.py     KV layers of a model, and the pages that store them
pool.py       page pool of a model, its sequences, and the step of a forward pass
sizing.py     size of a pool on this machine
prompt.py     FlatKVCache, which replaces mlx-lm's cache classes: one layer of a batch of sequences
recurrent.py  RecurrentCache, which replaces mlx-lm's ArraysCache in hybrid models
history.py    token ids of a sequence and checkpoints of recurrent states
probe.py      inspection of a model's attention layers by a forward pass that is never evaluated
replay.py     compiled graphs of decode steps
passes.py     forward passes: splitting, recording, trims that recompute tokens
admission.py  reservation of pages for requests, and their queue
server.py     HTTP errors and the listen backlog of mlx-lm's server
hook.py       install() and uninstall()
export.py     prompt cache files for mlx-lm without flatkv
"""
import importlib.metadata as _metadata

import mlx_lm.models.cache as _caches

for _name in ("KVCache", "RotatingKVCache", "CacheList", "LRUPromptCache", "_BaseCache", "make_prompt_cache", "save_prompt_cache", "load_prompt_cache"):
    if not hasattr(_caches, _name):
        raise ImportError(f"mlx-lm {_metadata.version('mlx-lm')} has no mlx_lm.models.cache.{_name}, which flatkv needs: "
                          "install mlx-lm 0.31.2 to 0.32")

from .export import export_prompt_cache  # noqa: E402
from .hook import install, is_installed, open_pool, own_prompt_cache, plan_for, pools, uninstall  # noqa: E402
from .probe import UnsupportedModel, probe_model  # noqa: E402
from .prompt import FlatKVCache  # noqa: E402
from .recurrent import RecurrentCache  # noqa: E402

__all__ = ["FlatKVCache", "RecurrentCache", "UnsupportedModel", "export_prompt_cache", "install", "is_installed", "open_pool", "own_prompt_cache", "plan_for", "pools", "probe_model", "uninstall"]
