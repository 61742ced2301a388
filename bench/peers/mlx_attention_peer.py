#!/usr/bin/env python3
"""Runs mlx-lm's attention on MLX's CPU backend as a peer of bench_compare, which starts this script and requests calls. The protocol is
described in bench/compare_peer.h.

    bench/compare --peer mlx-lm=PYTHON         PYTHON is an interpreter with mlx, mlx-lm and numpy

The types f16 and f32 select mlx-lm's KVCache with keys, values and queries of that type. The types 8 and 4 select its QuantizedKVCache
with groups of 64 and float32 queries and scales, which are much faster on MLX's CPU backend than 16-bit ones. The attention function is
the one that all models of mlx-lm call. MLX has no setting for the number of threads.
"""

import os
import sys
import time

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache

GROUP = 64
N_WARM = 256  # cached tokens of the warm-up case
SIDE_K, SIDE_V, SIDE_Q = 1, 2, 3
WEYL = np.uint64(0x9E3779B97F4A7C15)


def mixed(z):
    """Returns the output of splitmix64 for a state."""
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def rows(side, first, n, n_heads, dim):
    """Returns n rows [heads, n, dim] starting at token `first`, with the same values as compare_row()."""
    tokens = np.arange(first, first + n, dtype=np.uint64)
    start = mixed((tokens << np.uint64(8) | np.uint64(side)) + WEYL)
    steps = np.arange(1, n_heads * dim + 1, dtype=np.uint64) * WEYL
    bits = mixed(start[:, None] + steps)
    parts = [(bits >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.float32) / np.float32(65536) for i in range(4)]
    values = sum(part - np.float32(0.5) for part in parts) * np.float32(1.7320508)
    return values.reshape(n, n_heads, dim).transpose(1, 0, 2)


def anonymous_bytes():
    """Returns the anonymous memory of this process, or NaN if the system does not report it."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("Anonymous:"))
    except OSError:
        return float("nan")


class Attention:
    def __init__(self, types, n_q_heads, n_kv_heads, dim, n_cached, n_queries, n_seqs):
        kind = mx.float16 if types == "f16" else mx.float32
        self.cache = KVCache() if types in ("f16", "f32") else QuantizedKVCache(group_size=GROUP, bits=int(types))
        self.scale = dim**-0.5
        self.mask = "causal" if n_queries > 1 else None
        first = n_cached - n_queries
        self.q = mx.array(rows(SIDE_Q, first, n_queries, n_q_heads, dim)[None].repeat(n_seqs, 0)).astype(kind)
        k, v = (mx.array(rows(side, 0, n_cached, n_kv_heads, dim)[None].repeat(n_seqs, 0)).astype(kind) for side in (SIDE_K, SIDE_V))
        self.k, self.v = self.cache.update_and_fetch(k, v)
        mx.eval(self.q, self.k, self.v)

    def call(self):
        """Returns the output and the time in seconds."""
        q = self.q * 1  # a copy, because mlx-lm scales queries in place
        mx.eval(q)
        start = time.perf_counter()
        out = scaled_dot_product_attention(q, self.k, self.v, self.cache, self.scale, self.mask)
        mx.eval(out)
        return out, time.perf_counter() - start


def main():
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps output printed by libraries out of the answers
    mx.set_default_device(mx.cpu)
    types, (n_q_heads, n_kv_heads, dim, n_cached, n_queries, n_seqs, _) = sys.argv[1], map(int, sys.argv[2:])
    before = anonymous_bytes()
    asked = Attention(types, n_q_heads, n_kv_heads, dim, n_cached, n_queries, n_seqs)
    small = Attention(types, n_q_heads, n_kv_heads, dim, N_WARM, 1, 1)
    out, seconds = asked.call()
    answers.write(np.array(out[-1, :, -1].astype(mx.float32)).tobytes())
    answers.write(np.float64(anonymous_bytes() - before).tobytes())
    while True:
        answers.write(np.float64(seconds).tobytes())
        answers.flush()
        if not os.read(0, 1):
            return
        small.call()
        seconds = asked.call()[1]


if __name__ == "__main__":
    main()
