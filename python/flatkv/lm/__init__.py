"""flatkv as the KV cache of mlx-lm.

pool.py     the pages of one model, its texts, and the step of a forward pass
prompt.py   FlatKVCache: one layer of a batch of texts, as mlx-lm's caches are used
look.py     what a model asks of its caches, found out by a forward pass that is never evaluated
replay.py   decode steps whose graph is built once
hook.py     install() and uninstall()
"""
from .hook import install, is_installed, plan_for, pools, uninstall
from .look import Refusal, look_at
from .prompt import FlatKVCache

__all__ = ["FlatKVCache", "Refusal", "install", "is_installed", "look_at", "plan_for", "pools", "uninstall"]
