#!/usr/bin/env python3
"""Times torch's scaled_dot_product_attention over a bfloat16 cache on a CUDA GPU, with the shapes of `bench_attn --device mlx`.

    python3 bench/peers/torch_attn_peer.py > torch.json

Times are defined as in bench_attn: *chained* is the time per call of many calls in one CUDA graph; *single* is the time of one call with
synchronization. All backends of torch that support a shape (cuDNN, flash, memory-efficient) are timed. Calls alternate between two
caches, so that neither stays in the L2 cache of the GPU. No test needs this script. It prints one JSON object.
"""

import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# name, query heads, KV heads, head dimension, batch size, cached tokens, queries
CASES = [
    ("decode", 32, 8, 128, 1, 131072, 1),
    ("batch", 32, 8, 128, 8, 32768, 1),
    ("wide heads", 32, 2, 256, 1, 131072, 1),
    ("one wide head", 8, 1, 512, 1, 131072, 1),
    ("prefill", 32, 8, 128, 1, 131072, 512),
]
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
CHAIN, ROUNDS = 20, 15


def median_us(call, divide):
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / divide)
    return statistics.median(times)


def measure(case, backend):
    name, q_heads, kv_heads, dim, batch, cached, queries = case
    q = torch.randn(batch, q_heads, queries, dim, device="cuda", dtype=torch.bfloat16)
    caches = [[torch.randn(batch, kv_heads, cached, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"] for _ in range(2)]

    # Without a causal mask, all queries of a prefill chunk attend to the whole history. This is 0.2 % more work, equal for every backend.
    def attend(i):
        return F.scaled_dot_product_attention(q, *caches[i % 2], enable_gqa=True)

    with sdpa_kernel(backend):
        attend(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(CHAIN):
                attend(i)
        graph.replay()
        torch.cuda.synchronize()
        return {"us_chained": median_us(graph.replay, CHAIN), "us_single": median_us(lambda: attend(0), 1)}


def main():
    rows = []
    for case in CASES:
        for who, backend in BACKENDS.items():
            row = dict(zip(["case", "q_heads", "kv_heads", "head_dim", "batch", "cached", "queries"], case, strict=True), who=f"torch {who} bf16")
            try:
                row |= measure(case, backend)
            except RuntimeError as error:
                row["refused"] = str(error).splitlines()[0][:120]
            rows.append(row)
            torch.cuda.empty_cache()
    about = {"bench": "torch_attn", "torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": rows}
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
