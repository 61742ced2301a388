"""Tests models that compute attention themselves: latent attention (MLA), with and without recurrent layers, and older models.

Every result is compared with that of mlx-lm's own caches.
"""
import copy
import warnings

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
import mlx_lm  # noqa: E402
import mlx_lm.models.cache as caches  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402

import census_models  # noqa: E402
import flatkv  # noqa: E402
from conftest import random_tokens, tokenizer  # noqa: E402
import test_server  # noqa: E402
from test_hybrid import VOCAB, hybrid, installed, own_logits, relative, run  # noqa: E402, F401

FAMILIES = ["deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_linear", "mistral4", "longcat_flash", "stablelm"]
LIMIT = 1e-3  # relative error of logits with 16-bit pages
LATENT_BYTES = 512 + 2 * 2 * 512 // 64  # 8-bit latent row of 512 channels, with a scale and a bias in 16 bits for each group of 64
ROPE_BYTES = 2 * 64


@pytest.fixture(params=FAMILIES)
def model(request):
    return hybrid(request.param)


@pytest.fixture(autouse=True)
def no_compiler():
    """Disables mx.compile, which starts a C++ compiler on the CPU backend."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def test_prompts_can_be_trimmed_saved_and_continued(installed, model, tmp_path):
    tokens, others = random_tokens(170, vocab=VOCAB), random_tokens(20, seed=7, vocab=VOCAB)
    cache = caches.make_prompt_cache(model)
    assert any(isinstance(c, flatkv.lm.FlatKVCache) for top in cache for c in getattr(top, "caches", [top]))
    assert relative(run(model, cache, tokens), own_logits(model, tokens)) < LIMIT
    caches.trim_prompt_cache(cache, 67)
    caches.save_prompt_cache(str(tmp_path / "p.safetensors"), cache)
    loaded = caches.load_prompt_cache(str(tmp_path / "p.safetensors"))
    wanted = own_logits(model, mx.concatenate([tokens[:103], others]))
    for continued in (copy.deepcopy(cache), loaded, cache):
        assert relative(run(model, continued, others), wanted) < LIMIT
    assert flatkv.lm.pools()[0].consistent()


def test_generated_tokens_match_alone_and_in_batches(installed, model):
    prompts = [random_tokens(n, seed=n, vocab=VOCAB).tolist() for n in (70, 5, 131, 64)]
    own = [[t for t, _ in generate_step(mx.array(p), model, max_tokens=6, prompt_cache=flatkv.lm.own_prompt_cache(model))] for p in prompts]
    assert own == [[t for t, _ in generate_step(mx.array(p), model, max_tokens=6)] for p in prompts]
    found = mlx_lm.batch_generate(model, tokenizer(), prompts, max_tokens=6, return_token_ids=True).token_ids
    assert found == own and flatkv.lm.pools()[0].consistent()


def test_latent_rows_are_stored_once_and_quantized():
    census_models.SMALL, before = census_models.SMALL | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, census_models.SMALL
    try:
        model = hybrid("deepseek_v3")
    finally:
        census_models.SMALL = before
    assert flatkv.plan(model, 4096).token_bytes == len(model.layers) * (LATENT_BYTES + ROPE_BYTES)
    assert flatkv.plan(model, 4096, codec="sealed").token_bytes == len(model.layers) * (LATENT_BYTES + ROPE_BYTES)
    assert flatkv.plan(model, 4096, codec="16/16").token_bytes == len(model.layers) * 2 * (512 + 64)


@pytest.mark.parametrize(("codec", "limit"), [("8/4", 0.02), ("4/4", 0.2), ("tq4", 0.3), ("sealed", 0.02)])
def test_codecs_are_decoded(codec, limit):
    model, tokens = hybrid("deepseek_v3"), random_tokens(150, vocab=VOCAB)
    flatkv.install(max_tokens=1024, codec=codec, max_seqs=2)
    try:
        error = relative(run(model, caches.make_prompt_cache(model), tokens), own_logits(model, tokens))
        assert 0 < error < limit
    finally:
        flatkv.uninstall()


def test_a_server_serves_latent_models(monkeypatch):
    model = hybrid("deepseek_v3")
    run(model, flatkv.lm.own_prompt_cache(model), random_tokens(2))  # MLX evaluates an operation only in the thread that created it
    monkeypatch.setattr(test_server, "llama", lambda **_: model)
    with test_server.running_server(10, max_tokens=4096) as server:
        assert test_server.statuses(server, ["short", "x" * 200, "a longer request " * 5, "short again"]) == [200] * 4
        assert flatkv.lm.pools()[0].layers[0].is_latent and flatkv.lm.pools()[0].consistent()


@pytest.mark.parametrize(("name", "words"), [("deepseek_v32", ["sparse index", "memory grows with every token"]),
                                             ("glm_moe_dsa", ["sparse index", "memory grows with every token"]),
                                             ("mamba2", ["no layer uses KVCache", "memory is constant"])])
def test_rejected_models_warn_with_the_reason_and_their_memory(installed, name, words):
    model = hybrid(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        caches.make_prompt_cache(model)
    message, = [str(w.message) for w in caught]
    assert all(word in message for word in [name, *words])


def test_latent_attention_with_a_bounded_cache_is_rejected(installed):
    with pytest.warns(UserWarning, match="computes attention itself over a window.*memory is bounded by its maximum size"):
        caches.make_prompt_cache(hybrid("deepseek_v3"), max_kv_size=64)
