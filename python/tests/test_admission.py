"""Tests that mlx-lm serves the same requests with flatkv's default options as without flatkv."""
import copy
import gc
import types
import warnings

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
import mlx_lm  # noqa: E402
import mlx_lm.models.cache as caches  # noqa: E402
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache as imported_before_install  # noqa: E402

import census_models  # noqa: E402
import flatkv  # noqa: E402
from conftest import gemma3, llama, random_tokens, settled_memory, tokenizer  # noqa: E402


@pytest.fixture
def installed():
    """Returns install(), and uninstalls after the test."""
    yield flatkv.install
    flatkv.uninstall()
    gc.collect()


def prompts_of(lengths):
    return [random_tokens(n, seed=i, vocab=256).tolist() for i, n in enumerate(lengths)]


def batch(model, lengths, max_tokens=4, **options):
    """Returns the tokens that batch_generate() generates for random prompts of these lengths."""
    return mlx_lm.batch_generate(model, tokenizer(), prompts_of(lengths), max_tokens=max_tokens, return_token_ids=True, **options).token_ids


def one_at_a_time(model, lengths, max_tokens=4):
    return [[t for t, _ in generate_step(mx.array(p), model, max_tokens=max_tokens)] for p in prompts_of(lengths)]


@pytest.mark.parametrize("lengths", [[12] * 20, [1500] * 8, [2100, 5, 700, 64, 1]], ids=["short", "large", "ragged"])
def test_batch_generate_with_default_options_generates_the_tokens_of_mlx_lm(installed, lengths):
    model = llama(layers=1, vocab=256)
    wanted = batch(model, lengths)
    installed(max_tokens=131072, codec="16/16")
    assert batch(model, lengths) == wanted
    assert flatkv.lm.pools()[0].consistent()


def test_the_callers_prompt_caches_do_not_change_in_a_batch(installed):
    model, prompts = llama(layers=1, vocab=256), prompts_of([20, 30])
    installed(max_tokens=1024, codec="16/16")
    stored = [caches.make_prompt_cache(model) for _ in prompts]
    for cache, prompt in zip(stored, prompts):
        mx.eval(model(mx.array([prompt]), cache=cache))
    generator = BatchGenerator(model, max_tokens=5)
    uids = generator.insert([[1, 2, 3], [4]], caches=stored)
    found = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for r in responses:
            found[r.uid].append(r.token)
    assert [cache[0].offset for cache in stored] == [20, 30]
    for uid, rest, cache in zip(uids, ([1, 2, 3], [4]), stored):
        assert [t for t, _ in generate_step(mx.array(rest), model, max_tokens=5, prompt_cache=cache)] == found[uid]


def test_passes_larger_than_a_step_are_split_without_changing_the_logits(installed):
    model, tokens = gemma3(), random_tokens(300)
    own = model(tokens[None], cache=flatkv.lm.own_prompt_cache(model))
    installed(max_tokens=1024, codec="16/16", max_step_tokens=64)
    split = model(tokens[None], cache=caches.make_prompt_cache(model))
    assert split.shape == own.shape and (mx.linalg.norm(split - own) / mx.linalg.norm(own)).item() < 5e-3


@pytest.mark.parametrize("make", [lambda: llama(layers=1, vocab=256), lambda: census_models.build("deepseek_v3")], ids=["attended", "unpacked"])
def test_no_pass_copies_the_pool(installed, make):
    """MLX copies an array on update if another operation still reads it, so every pass must be evaluated before the next one."""
    model = make()
    installed(max_tokens=1 << 17, codec="16/16", max_step_tokens=64)
    cache = caches.make_prompt_cache(model)
    pool, = flatkv.lm.pools()
    before = settled_memory()
    mx.reset_peak_memory()
    results = [model(random_tokens(200, vocab=50)[None], cache=cache), model(mx.array([[1]]), cache=cache), model(mx.array([[2]]), cache=cache)]
    mx.eval(results)
    batched = mlx_lm.batch_generate(model, tokenizer(), [[1] * 40, [2] * 70, [3]], max_tokens=3, return_token_ids=True)
    assert [len(ids) for ids in batched.token_ids] == [3, 3, 3]
    used = mx.get_peak_memory() - before
    assert used < pool.plan.slab_bytes / 2 / len(model.layers) and (pool.has_unpacked or used < pool.plan.step_bytes)


def test_requests_that_do_not_fit_together_wait(installed):
    model, lengths = llama(layers=1, vocab=256), [100, 90, 80, 110, 70, 60, 100]
    installed(max_tokens=256, max_seqs=3)
    assert batch(model, lengths, 20) == one_at_a_time(model, lengths, 20)
    installed(max_tokens=131072, max_seqs=2)
    assert batch(model, lengths, 20) == one_at_a_time(model, lengths, 20)


def test_a_request_that_can_never_fit_is_rejected_before_the_batch_starts(installed):
    model = llama(layers=1, vocab=256)
    installed(max_tokens=256)
    with pytest.raises(flatkv.DoesNotFit, match=r"prompt 1 has 300 tokens.*flatkv.install\(\) with a larger max_tokens"):
        batch(model, [100, 300])
    with pytest.raises(flatkv.DoesNotFit, match="prompt 0 has 200 tokens and max_tokens is 100.*to at most 56"):
        batch(model, [200], 100)
    assert [len(t) for t in batch(model, [100, 50])] == [4, 4]


def test_a_batch_raises_if_other_sequences_hold_the_pool(installed):
    model = llama(layers=1, vocab=256)
    installed(max_tokens=256, max_seqs=2)
    held = caches.make_prompt_cache(model)
    model(random_tokens(200, vocab=256)[None], cache=held)
    with pytest.raises(flatkv.DoesNotFit, match="max_tokens=256"):
        batch(model, [100])
    del held
    assert [len(t) for t in batch(model, [100])] == [4]


def test_cached_prefixes_of_waiting_requests_are_computed_again(installed):
    model, prefix = llama(layers=1, vocab=256), prompts_of([150])[0]
    installed(max_tokens=256, max_seqs=8, codec="16/16")
    cache = caches.make_prompt_cache(model)
    model(mx.array([prefix]), cache=cache)
    generator = BatchGenerator(model, max_tokens=60)
    rest = [[5, 6, 7], [8, 9]]
    uids = generator.insert(rest, caches=[copy.deepcopy(cache) for _ in rest], all_tokens=[list(prefix) for _ in rest])
    del cache
    tokens = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for r in responses:
            tokens[r.uid].append(r.token)
            r.prompt_cache = None
    generator.close()
    assert [len(tokens[u]) for u in uids] == [60, 60]
    flatkv.uninstall()
    assert tokens[uids[1]] == [t for t, _ in generate_step(mx.array(prefix + rest[1]), model, max_tokens=60)]


def test_functions_imported_before_install_use_flatkv(installed):
    model = llama(layers=1, vocab=256)
    installed(max_tokens=256)
    assert type(imported_before_install(model)[0]).__name__ == "FlatKVCache"
    assert type(flatkv.lm.own_prompt_cache(model)[0]) is caches.KVCache
    flatkv.uninstall()
    assert type(imported_before_install(model)[0]) is caches.KVCache
    assert imported_before_install.__defaults__ == (None,)


def test_a_request_is_reserved_with_its_max_tokens(installed):
    model, prompt = llama(layers=1, vocab=256), random_tokens(1000, vocab=256)
    installed(max_tokens=1024)
    with pytest.raises(flatkv.DoesNotFit, match="1000 tokens and max_tokens is 256.*to at most 24"):
        next(generate_step(prompt, model, max_tokens=256))
    assert len(list(generate_step(prompt, model, max_tokens=24))) == 24


def test_a_running_request_never_runs_out_of_pages(installed):
    model = llama(layers=1, vocab=256)
    installed(max_tokens=256, max_seqs=2)
    first = generate_step(random_tokens(64, vocab=256), model, max_tokens=100)
    next(first)
    with pytest.raises(flatkv.DoesNotFit):
        next(generate_step(random_tokens(64, vocab=256), model, max_tokens=100))
    assert len(list(first)) == 99
    assert len(list(generate_step(random_tokens(64, vocab=256), model, max_tokens=100))) == 100


def test_the_unused_reservation_of_a_finished_request_is_released(installed):
    model, cache = llama(vocab=256), None
    installed(max_tokens=512, max_seqs=2)
    cache = caches.make_prompt_cache(model)
    generator = generate_step(random_tokens(64, vocab=256), model, max_tokens=400, prompt_cache=cache)
    next(generator)
    generator.close()
    assert len(list(generate_step(random_tokens(64, vocab=256), model, max_tokens=200))) == 200
    assert cache[0].offset == 65 and flatkv.lm.pools()[0].consistent()


def test_speculative_decoding_in_a_pool_that_just_fits(installed):
    model, draft, prompt = llama(vocab=256), llama(layers=1, vocab=256, seed=3), random_tokens(60, vocab=256)
    own = [t for t, _ in generate_step(prompt, model, max_tokens=16)]
    installed(max_tokens=80, codec="16/16")
    assert [int(t) for t, *_ in speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=16)] == own


def test_a_bounded_cache_has_no_maximum_length(installed, monkeypatch):
    model = llama(layers=1, vocab=256)
    monkeypatch.delattr(type(model), "make_cache", raising=False)
    plain = flatkv.plan(model, 512)
    installed(max_tokens=512)
    tokens = list(generate_step(random_tokens(450, vocab=256), model, max_tokens=100, max_kv_size=128))
    assert len(tokens) == 100
    pool, = flatkv.lm.pools()
    assert pool.plan.total_bytes <= plain.total_bytes and pool.stats.groups[0].held <= 8


def test_max_kv_size_values_do_not_add_up_pools(installed, monkeypatch):
    model = llama(layers=1, vocab=256)
    monkeypatch.delattr(type(model), "make_cache", raising=False)
    installed(max_tokens=2048)
    for size in (128, 256, 512, 1024, None):
        assert len(list(generate_step(random_tokens(20, vocab=256), model, max_tokens=4, max_kv_size=size))) == 4
        assert len(flatkv.lm.pools()) == 1


def test_an_unsupported_model_warns_that_memory_is_not_bounded(installed):
    def call(self, tokens, cache):
        cache[0].update_and_fetch(mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 64)))
        return cache[0].values

    model = type("Odd", (), {"model_type": "odd", "layers": [None], "__call__": call})()
    installed(max_tokens=128)
    with pytest.warns(UserWarning, match="odd: layer 0 reads values of its cache.*memory grows"):
        caches.make_prompt_cache(model)


def test_functions_keep_their_signature_after_uninstall(installed):
    before = {f: (f.__code__, f.__defaults__, f.__kwdefaults__) for f in (generate_step, speculative_generate_step, caches.make_prompt_cache)}
    installed(max_tokens=128)
    flatkv.uninstall()
    assert {f: (f.__code__, f.__defaults__, f.__kwdefaults__) for f in before} == before
    assert all(isinstance(f, types.FunctionType) for f in before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(generate_step(random_tokens(5, vocab=256), llama(vocab=256), max_tokens=2))) == 2
