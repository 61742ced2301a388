"""Tests the replacement of mx.quantized_matmul (flatkv.lm.products)."""
import mlx.core as mx
import pytest

import flatkv
from flatkv.lm import products

ORIGINAL = mx.quantized_matmul


@pytest.fixture
def installed():
    """Returns flatkv.install() with few tokens; flatkv is uninstalled after the test."""
    yield lambda **options: flatkv.install(max_tokens=256, codec="16/16", **options)
    flatkv.uninstall()


def test_products_are_replaced_on_cuda_only(installed):
    installed()
    assert (mx.quantized_matmul is not ORIGINAL) == products.available()


def test_products_can_be_disabled_and_are_restored(installed, monkeypatch):
    monkeypatch.setattr(products, "available", lambda: True)
    installed(products=False)
    assert mx.quantized_matmul is ORIGINAL
    installed(compile=False)
    assert mx.quantized_matmul is ORIGINAL
    installed(products=True)
    assert mx.quantized_matmul is not ORIGINAL and mx.quantized_matmul.__wrapped__ is ORIGINAL
    installed(products=True)
    assert mx.quantized_matmul.__wrapped__ is ORIGINAL
    flatkv.uninstall()
    assert mx.quantized_matmul is ORIGINAL


@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 4), (9,), (3, 3)])
@pytest.mark.parametrize("bits, group", [(4, 64), (8, 32), (4, 128), (3, 64)])
def test_every_call_has_the_result_of_mlx(rows, bits, group):
    product = products.wrapped_product(ORIGINAL)
    w = mx.quantize(mx.random.normal((48, 256)) / 16, group_size=group, bits=bits)
    x = mx.random.normal((*rows, 256))
    y = mx.random.normal((*rows, 48))
    for args, named in (((x, *w), {"group_size": group, "bits": bits}), ((x, *w, True, group, bits), {}),
                        ((x, w[0]), {"scales": w[1], "biases": w[2], "transpose": True, "group_size": group, "bits": bits, "mode": "affine"}),
                        ((x, *w), {"group_size": group, "bits": bits, "stream": mx.default_device()}),
                        ((y, *w), {"transpose": False, "group_size": group, "bits": bits})):
        found, expected = product(*args, **named), ORIGINAL(*args, **named)
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert mx.allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_other_modes_are_computed_by_mlx():
    codes, scales = mx.quantize(mx.random.normal((48, 256)), group_size=32, bits=4, mode="mxfp4")
    x = mx.random.normal((1, 256))
    args = {"scales": scales, "group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert mx.array_equal(products.wrapped_product(ORIGINAL)(x, codes, **args), ORIGINAL(x, codes, **args))


@pytest.mark.skipif(not products.available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_result_of_a_row_does_not_depend_on_other_rows(dtype):
    product = products.wrapped_product(ORIGINAL)
    w = mx.quantize(mx.random.normal((1000, 1024)).astype(dtype) / 32, group_size=64, bits=4)
    x = mx.random.normal((8, 1024)).astype(dtype)
    together = product(x, *w, group_size=64, bits=4)
    assert all(mx.array_equal(product(x[i:i + 1], *w, group_size=64, bits=4)[0], together[i]) for i in range(8))
