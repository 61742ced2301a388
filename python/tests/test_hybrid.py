"""Tests models with recurrent layers: trims, prompt cache reuse, files, batches and speculative decoding.

Every result is compared with that of mlx-lm's own caches, which compute all tokens from the start.
"""
import copy

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
import mlx_lm  # noqa: E402
import mlx_lm.models.cache as caches  # noqa: E402
from mlx_lm.generate import generate_step, speculative_generate_step  # noqa: E402

import census_models  # noqa: E402
import flatkv  # noqa: E402
from conftest import llama, random_tokens, tokenizer  # noqa: E402
from flatkv.lm import passes  # noqa: E402

FAMILIES = ["qwen3_5", "qwen3_next", "lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1", "jamba"]
LIMIT = 5e-3  # relative error of logits with 16-bit pages
VOCAB = 256


def hybrid(name):
    """Returns a small model of a family."""
    census_models.SMALL["vocab_size"], before = VOCAB, census_models.SMALL["vocab_size"]
    try:
        model = census_models.build(name)
    finally:
        census_models.SMALL["vocab_size"] = before
    model.eval()
    return model


@pytest.fixture(params=FAMILIES)
def model(request):
    return hybrid(request.param)


@pytest.fixture
def installed():
    flatkv.install(max_tokens=4096, codec="16/16", max_seqs=16, max_step_tokens=256)
    yield flatkv
    flatkv.uninstall()


def run(model, cache, tokens):
    """Runs tokens in chunks of 100 and returns the logits of the last token."""
    for at in range(0, len(tokens), 100):
        out = model(tokens[None, at:at + 100], cache=cache)
        mx.eval(out, [c.state for c in cache])
    return out[0, -1].astype(mx.float32)


def relative(found, wanted):
    return (mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted)).item()


def own_logits(model, tokens):
    return run(model, flatkv.lm.own_prompt_cache(model), tokens)


def n_computed(calls):
    """Returns the number of tokens in recorded model calls."""
    return sum(calls)


@pytest.fixture
def computed(monkeypatch):
    """Records the number of tokens of every pass."""
    calls, original = [], passes._run_recorded

    def counted(pool, cache, tokens, build):
        calls.append(tokens.size)
        return original(pool, cache, tokens, build)

    monkeypatch.setattr(passes, "_run_recorded", counted)
    return calls


def test_a_trimmed_prompt_continues_like_a_new_one(installed, model, computed):
    tokens, others = random_tokens(170, vocab=VOCAB), random_tokens(20, seed=7, vocab=VOCAB)
    cache = caches.make_prompt_cache(model)
    run(model, cache, tokens)
    assert caches.can_trim_prompt_cache(cache)
    for n_kept in (165, 3):
        again = copy.deepcopy(cache)
        assert caches.trim_prompt_cache(again, 170 - n_kept) == 170 - n_kept
        wanted = mx.concatenate([tokens[:n_kept], others])
        computed.clear()
        assert relative(run(model, again, others), own_logits(model, wanted)) < LIMIT
        if n_kept > 100:
            assert n_computed(computed) <= len(others) + 80
    assert relative(run(model, cache, others), own_logits(model, mx.concatenate([tokens, others]))) < LIMIT
    assert flatkv.lm.pools()[0].consistent()


def test_generated_tokens_can_be_trimmed(installed, computed):
    model, prompt = hybrid("qwen3_next"), random_tokens(90, vocab=VOCAB)
    cache = caches.make_prompt_cache(model)
    tokens = [t for t, _ in generate_step(prompt, model, max_tokens=150, prompt_cache=cache)]
    n_cached = cache[-1].offset
    caches.trim_prompt_cache(cache, 20)
    computed.clear()
    found = run(model, cache, mx.array([5, 6, 7]))
    wanted = mx.concatenate([prompt, mx.array(tokens)])[:n_cached - 20]
    assert relative(found, own_logits(model, mx.concatenate([wanted, mx.array([5, 6, 7])]))) < LIMIT
    assert n_computed(computed) <= 3 + 80


def test_saved_prompts_are_restored_and_can_be_trimmed(installed, model, tmp_path):
    tokens, others = random_tokens(120, vocab=VOCAB), random_tokens(10, seed=7, vocab=VOCAB)
    cache = caches.make_prompt_cache(model)
    run(model, cache, tokens)
    caches.trim_prompt_cache(cache, 7)  # the file contains only the remaining tokens
    caches.save_prompt_cache(str(tmp_path / "p.safetensors"), cache)
    loaded = caches.load_prompt_cache(str(tmp_path / "p.safetensors"))
    wanted = own_logits(model, mx.concatenate([tokens[:113], others]))
    assert relative(run(model, copy.deepcopy(loaded), others), wanted) < LIMIT
    assert relative(run(model, cache, others), wanted) < LIMIT
    model(others[None], cache=loaded)  # tokens are recomputed by the model that used the prompt cache last
    caches.trim_prompt_cache(loaded, 20)
    assert relative(run(model, loaded, others), own_logits(model, mx.concatenate([tokens[:103], others]))) < LIMIT


def test_batches_match_single_prompts(installed, model):
    lengths = (70, 70) if "jamba" in type(model).__module__ else (70, 5, 131, 64)  # mlx-lm's Jamba ignores padding
    prompts = [random_tokens(n, seed=n, vocab=VOCAB).tolist() for n in lengths]
    found = mlx_lm.batch_generate(model, tokenizer(), prompts, max_tokens=6, return_token_ids=True).token_ids
    flatkv.uninstall()
    assert found == mlx_lm.batch_generate(model, tokenizer(), prompts, max_tokens=6, return_token_ids=True).token_ids


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_speculative_decoding_matches_plain_generation(installed, name):
    model, draft, prompt = hybrid(name), llama(layers=1, vocab=VOCAB), random_tokens(50, vocab=VOCAB)
    plain = [t for t, _ in generate_step(prompt, model, max_tokens=40)]
    cache = caches.make_prompt_cache(model) + caches.make_prompt_cache(draft)
    found = [t for t, _, _ in speculative_generate_step(prompt, model, draft, max_tokens=40, prompt_cache=cache)]
    assert found == plain
    same = caches.make_prompt_cache(model) + caches.make_prompt_cache(model)  # the model is its own draft model, so every draft is accepted
    assert [t for t, _, _ in speculative_generate_step(prompt, model, model, max_tokens=40, prompt_cache=same)] == plain


def test_stored_prompts_are_reused_across_turns(installed, computed):
    """The reply of each turn is rendered differently in the next one, so that every turn trims the stored prompt cache."""
    model, store = hybrid("qwen3_next"), caches.LRUPromptCache(max_size=4)
    prompt = random_tokens(150, vocab=VOCAB).tolist()
    for turn in range(3):
        computed.clear()
        cache, rest = store.fetch_nearest_cache("m", prompt)
        n_new = len(rest)
        if turn:
            assert cache is not None and n_new <= 100 + 80
        cache = cache or caches.make_prompt_cache(model)
        tokens = [t for t, _ in generate_step(mx.array(rest), model, max_tokens=20, prompt_cache=cache)]
        assert tokens == [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=20, prompt_cache=flatkv.lm.own_prompt_cache(model))]
        store.insert_cache("m", prompt + tokens[:-1], cache)
        del cache
        prompt = prompt + random_tokens(100, seed=turn + 2, vocab=VOCAB).tolist()


def test_checkpoints_are_bounded_and_planned():
    model = hybrid("qwen3_5")
    flatkv.install(max_tokens=8192, codec="16/16", max_seqs=8, max_checkpoints=5)
    try:
        stored = []
        for i in range(6):
            stored.append(caches.make_prompt_cache(model))
            run(model, stored[-1], random_tokens(150, seed=i, vocab=VOCAB))
        pool, = flatkv.lm.pools()
        assert 0 < len(pool.checkpoints) <= 5
        assert pool.plan.state_bytes == (8 + 5 + 1) * pool.layers.state_bytes > 0
        assert flatkv.plan(model, 8192, codec="16/16", max_seqs=8, max_checkpoints=5).total_bytes == pool.plan.total_bytes
        caches.trim_prompt_cache(stored[0], 30)  # its checkpoints were dropped, so the whole prompt is computed again
        others = random_tokens(5, seed=9, vocab=VOCAB)
        wanted = mx.concatenate([random_tokens(150, seed=0, vocab=VOCAB)[:120], others])
        assert relative(run(model, stored[0], others), own_logits(model, wanted)) < LIMIT
    finally:
        flatkv.uninstall()


def test_a_failed_pass_leaves_the_state_unchanged(installed, monkeypatch):
    model, tokens = hybrid("qwen3_5"), random_tokens(100, vocab=VOCAB)
    cache = caches.make_prompt_cache(model)
    run(model, cache, tokens)

    def fail(*args, **named):
        raise RuntimeError("broken layer")

    last = model.layers[-1]
    monkeypatch.setattr(type(last), "__call__", lambda self, *a, _call=type(last).__call__, **n: fail() if self is last else _call(self, *a, **n))
    with pytest.raises(RuntimeError, match="broken layer"):
        model(tokens[None, :10], cache=cache)
    monkeypatch.undo()
    assert relative(run(model, cache, tokens[:10]), own_logits(model, mx.concatenate([tokens, tokens[:10]]))) < LIMIT


def test_sealed_pages_are_trimmed_by_recomputing():
    model, tokens, others = llama(layers=1, vocab=VOCAB), random_tokens(600, vocab=VOCAB), random_tokens(20, seed=7, vocab=VOCAB)
    flatkv.install(max_tokens=4096, codec="sealed", max_seqs=8)
    try:
        cache = caches.make_prompt_cache(model)
        run(model, cache, tokens)
        for n_kept in (590, 450, 300, 100):
            again, new = copy.deepcopy(cache), caches.make_prompt_cache(model)
            assert caches.trim_prompt_cache(again, 600 - n_kept) == 600 - n_kept
            found, wanted = run(model, again, others), run(model, new, mx.concatenate([tokens[:n_kept], others]))
            assert mx.array_equal(found, wanted).item()
            assert again[0].offset == n_kept + 20
    finally:
        flatkv.uninstall()
