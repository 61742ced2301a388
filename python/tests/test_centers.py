"""Tests that large key biases, as in Qwen2, do not reduce the precision of quantized keys."""
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
import mlx_lm.models.cache as caches  # noqa: E402

import flatkv  # noqa: E402
import key_biases  # noqa: E402
from conftest import llama, qwen2, random_tokens  # noqa: E402
from flatkv.lm import probe  # noqa: E402
from flatkv.lm.hook import layers_for  # noqa: E402


@pytest.mark.parametrize("codec", ["8/8", "4/4", "sealed"])
def test_large_key_biases_cost_no_precision(codec, monkeypatch):
    large, small = key_biases.divergence(qwen2(150.0), codec), key_biases.divergence(qwen2(0.5), codec)
    assert large < 1.5 * small
    monkeypatch.setattr(probe, "key_center", lambda *_: ())
    assert key_biases.divergence(qwen2(150.0), codec) > 1.5 * large


def test_centers_are_the_rotated_biases():
    model = qwen2(150.0, layers=1)
    layer, = layers_for(model)
    bias = model.layers[0].self_attn.k_proj.bias.reshape(2, 32)
    center = mx.array(layer.center).reshape(2, 32)
    slow = mx.array([14, 15, 30, 31])  # channels that rotate by less than 0.05 radians within 8192 tokens
    assert mx.max(mx.abs(center[:, slow] - bias[:, slow])).item() < 0.05 / 2 * mx.max(mx.abs(bias)).item()
    assert mx.max(mx.abs(center[:, :8])).item() < 0.5, "quickly rotating biases average to 0"
    assert layers_for(llama())[0].center == ()


def test_saved_prompts_keep_their_centers(tmp_path):
    model, tokens = qwen2(150.0), random_tokens(100)
    for codec in ("8/4", "16/16"):
        flatkv.install(max_tokens=1024, codec=codec, max_seqs=4)
        try:
            cache = caches.make_prompt_cache(model)
            mx.eval(model(tokens[None, :80], cache=cache))
            caches.save_prompt_cache(str(tmp_path / "p.safetensors"), cache)
            wanted = model(tokens[None, 80:], cache=cache)
            mx.eval(wanted)
            del cache
            flatkv.install(max_tokens=1024, codec=codec, max_seqs=4)  # the pool is opened when the file is loaded
            loaded = caches.load_prompt_cache(str(tmp_path / "p.safetensors"))
            found = model(tokens[None, 80:], cache=loaded)
            assert mx.array_equal(found, wanted).item()
            assert len(flatkv.lm.pools()) == 1 and caches.make_prompt_cache(model)[0].pool is loaded[0].pool
        finally:
            flatkv.uninstall()
