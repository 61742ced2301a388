"""Products with quantized weights on CUDA: a replacement of mx.quantized_matmul for up to eight rows.

MLX's kernel reads 4-bit weights at a fraction of the memory bandwidth. flatkv's kernel (src/attn/gpu/cuda/affine_product.h) computes the
same sums in float32, so results differ from MLX's only by rounding. The result of a row does not depend on the other rows. All other
products, and all products on other devices, are left to MLX. The kernel has no gradient.
"""
from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from .. import _native

MAX_ROWS = 8


def available() -> bool:
    """Returns whether this MLX has a CUDA device."""
    cuda = getattr(mx, "cuda", None)
    return cuda is not None and cuda.is_available()


def wrapped_product(original: Any) -> Any:
    """Returns the replacement of mx.quantized_matmul."""
    _native.mlx_open()

    @functools.wraps(original)
    def quantized_matmul(x: Any, w: Any, /, scales: Any, biases: Any = None, transpose: bool = True, group_size: int | None = None,
                         bits: int | None = None, mode: str = "affine", **named: Any) -> Any:
        if transpose and mode == "affine" and biases is not None and w.ndim == 2 and x.size <= MAX_ROWS * x.shape[-1] and not named:
            product = _native.mlx_product(x, w, scales, biases, group_size or 64, bits or 4)
            if not isinstance(product, int):
                return product
        return original(x, w, scales, biases, transpose, group_size, bits, mode, **named)

    return quantized_matmul
