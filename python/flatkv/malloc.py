"""Settings of the C library's memory allocator for programs that run for a long time.

MLX's CPU backend allocates arrays with malloc(). By default, glibc raises its mmap threshold to the size of the largest array that was
freed, up to 32 MiB. Later arrays are then allocated on a heap, which fragments and does not shrink, so resident memory grows in steps.
"""
from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of mallopt(), from glibc's malloc.h
LARGE_BYTES = 1 << 20  # blocks of at least this size are returned to the system when they are freed
TRIM_BYTES = 4 << 20  # amount of free memory at the end of the heap that is not returned to the system
MAX_ARENAS = 2  # glibc's default is 8 per CPU core; Python code needs fewer, because only one thread runs at a time


def return_freed_memory() -> bool:
    """Makes malloc() return freed memory to the system. Affects the whole process. Returns False if the C library is not glibc."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = (M_MMAP_THRESHOLD, LARGE_BYTES), (M_TRIM_THRESHOLD, TRIM_BYTES), (M_ARENA_MAX, MAX_ARENAS)
    return all([libc.mallopt(name, value) == 1 for name, value in settings])
