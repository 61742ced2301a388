"""mlx-lm with flatkv installed, against mlx-lm with its own caches."""
import copy
import gc
import warnings
import weakref

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
import mlx_lm.models.cache as caches  # noqa: E402
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step  # noqa: E402

import census_models  # noqa: E402
import flatkv  # noqa: E402
from conftest import gemma2, gemma3, gpt_oss, llama, settled_memory, text  # noqa: E402
from flatkv import bench  # noqa: E402

OWN = caches.make_prompt_cache
LIMIT = 5e-3  # 16-bit pages against mlx-lm's cache


def logits(model, cache, tokens, cuts):
    out = [model(tokens[None, a:b], cache=cache) for a, b in zip(cuts, cuts[1:])]
    return mx.concatenate(out, 1)


def relative(a, b):
    return (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item()


def generated(model, prompt, n=12, cache=None, **more):
    return [int(t) for t, _ in generate_step(prompt, model, max_tokens=n, prompt_cache=cache, prefill_step_size=64, **more)]


class Odd:
    """A model that flatkv refuses: it multiplies the keys itself."""

    model_type = "odd"
    layers = [None]

    def __call__(self, tokens, cache):
        k, _ = cache[0].update_and_fetch(mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 64)))
        return k @ k


@pytest.mark.parametrize("make", [llama, gemma2, gemma3, gpt_oss])
def test_logits_are_mlx_lms(flat, make):
    model, tokens, cuts = make(), text(90), [0, 40, 80, *range(81, 91)]
    cache = caches.make_prompt_cache(model)
    assert {type(c).__name__ for c in cache} == {"FlatKVCache"}
    own = OWN(model)
    assert relative(logits(model, cache, tokens, cuts), logits(model, own, tokens, cuts)) < LIMIT
    assert [c.offset for c in cache] == [c.offset for c in own] and cache[0].size() == own[0].size()


def test_a_text_may_end_inside_of_the_last_page():
    flatkv.install(max_tokens=100, codec="16/16", max_seqs=1)
    try:
        assert len(generated(llama(), text(80), 20)) == 20
    finally:
        flatkv.uninstall()


def test_generate_is_mlx_lms_and_memory_stays(flat):
    model, prompt = llama(), text(300)
    own = generated(model, prompt, cache=OWN(model))
    assert generated(model, prompt) == own
    cache = caches.make_prompt_cache(model)
    generated(model, prompt, 4, cache)
    start = settled_memory()
    generated(model, text(200, seed=5), 30, cache)
    assert settled_memory() - start < 1024, "the numbers of the new pages, 4 bytes each"
    assert flatkv.lm.pools()[0].consistent()


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_trimmed_right_behind_a_pass_is_gone(flat, n):
    model, tokens = llama(), text(60)
    answers = []
    for cache in (caches.make_prompt_cache(model), OWN(model)):
        model(tokens[None, :40], cache=cache)
        model(tokens[None, 40:43], cache=cache)
        caches.trim_prompt_cache(cache, n)
        answers.append(model(tokens[None, 50:52], cache=cache))
        assert cache[0].offset == 45 - n
    assert relative(*answers) < LIMIT


def test_a_step_that_fails_at_its_end_never_was(flat):
    model, tokens = llama(), text(60)
    cache = caches.make_prompt_cache(model)
    mx.eval(model(tokens[None, :40], cache=cache))
    pool = flatkv.lm.pools()[0]
    if pool.fused:
        pytest.skip("nothing is asked of a step's end on a GPU")

    def fails():
        raise RuntimeError("at the end")
    pool._step.pending = fails
    with pytest.raises(RuntimeError, match="at the end"):
        pool.settle()
    assert cache[0].offset == 0 and pool.consistent()
    assert generated(model, tokens, cache=cache) == generated(model, tokens, cache=OWN(model))


def test_bench_in_a_window_has_no_quantized_rows(monkeypatch, capsys):
    options = ["-c", "96", "-n", "3", "--chunk", "32", "--codec", "16/16", "--max-kv-size", "64"]
    model = llama()
    monkeypatch.delattr(type(model), "make_cache", raising=False)
    monkeypatch.setattr(bench, "load", lambda *_: (model, text(96)))
    assert bench.main(options) == 0
    rows = [line[:16].strip() for line in capsys.readouterr().out.splitlines()]
    assert rows[-2:] == ["mlx-lm float32", "flatkv 16/16"] and "mlx-lm 8 bits" not in rows and any(r.startswith("without 8 and 4") for r in rows)
    monkeypatch.setattr(bench, "load", lambda *_: (gemma3(), text(96)))
    with pytest.raises(SystemExit):
        bench.main(options)
    assert "--max-kv-size 64: mlx-lm makes this model's caches without it" in capsys.readouterr().err
    monkeypatch.setattr(bench, "load", lambda *_: (Odd(), text(96)))
    with pytest.raises(SystemExit):
        bench.main(options[:-2])
    assert "flatkv does not keep the KV of this model: layer 0: has attention of its own" in capsys.readouterr().err


def test_trim_and_deepcopy_are_truncate_and_fork(flat):
    model, prompt = llama(), text(200)
    cache = caches.make_prompt_cache(model)
    generated(model, prompt, 5, cache)
    twin = copy.deepcopy(cache)
    assert len({id(c.texts[0]) for c in twin}) == 1 and twin[0].offset == cache[0].offset
    pool = flatkv.lm.pools()[0]
    assert pool.stats.groups[0].shared >= 3
    assert caches.trim_prompt_cache(twin, twin[0].offset - 150) == cache[0].offset - 150
    rest = text(30, seed=9)
    fresh = generated(model, mx.concatenate([prompt[:150], rest]), cache=OWN(model))
    assert generated(model, rest, cache=twin) == fresh
    assert pool.consistent()


def test_prompts_of_the_server_share_pages_and_make_room(flat):
    model, tokens = llama(), text(256).tolist()
    store, pool = caches.LRUPromptCache(max_size=100), None
    first = caches.make_prompt_cache(model)
    generated(model, mx.array(tokens), 1, first)
    caches.trim_prompt_cache(first, first[0].offset - 256)
    store.insert_cache("m", tokens, first)
    kept = []
    for i in range(20):
        got, rest = store.fetch_nearest_cache("m", tokens + [i, i + 1, i + 2])
        assert rest == [i, i + 1, i + 2]
        generated(model, mx.array(rest), 1, got)
        kept.append(got)
    pool = flatkv.lm.pools()[0]
    assert pool.stats.groups[0].held <= 4 + 2 * 21, "256 tokens are held once"
    kept.clear()
    gc.collect()
    for seed in range(40):  # more prompts than there are sequences: the oldest are let go
        cache = caches.make_prompt_cache(model)
        other = text(150, seed=100 + seed)
        generated(model, other, 1, cache)
        store.insert_cache("m", other.tolist(), cache)
    assert pool.consistent() and 0 < len(store) < 40


def test_a_batch_gives_the_tokens_of_one_at_a_time(flat):
    model = llama()
    prompts = [text(n, seed=n).tolist() for n in (37, 211, 120, 3)]
    lengths = [12, 5, 9, 7]
    alone = [generated(model, mx.array(p), n) for p, n in zip(prompts, lengths)]
    generator = BatchGenerator(model, max_tokens=12, prefill_batch_size=4, completion_batch_size=4, prefill_step_size=64)
    uids = generator.insert(prompts, lengths)
    out, kept = {u: [] for u in uids}, {}
    while len(kept) < len(prompts):
        _, responses = generator.next()
        for r in responses:
            out[r.uid].append(r.token)
            if r.finish_reason is not None:
                kept[r.uid] = r.prompt_cache
    assert [out[u] for u in uids] == alone
    assert all(type(c).__name__ == "FlatKVCache" for cache in kept.values() for c in cache)
    generator.close()
    del kept
    gc.collect()
    assert flatkv.lm.pools()[0].consistent()


@pytest.mark.parametrize("make", [llama, gemma3, gpt_oss])
def test_saved_prompts_come_back(flat, make, tmp_path):
    model, prompt, rest = make(), text(100), text(10, seed=4)
    cache = caches.make_prompt_cache(model)
    generated(model, prompt, 1, cache)
    caches.save_prompt_cache(str(tmp_path / "p.safetensors"), cache, {"of": "a test"})
    going_on = generated(model, rest, cache=cache)
    loaded, metadata = caches.load_prompt_cache(str(tmp_path / "p.safetensors"), return_metadata=True)
    assert metadata == {"of": "a test"} and loaded[0].offset == cache[0].offset - len(rest) - len(going_on)
    assert generated(model, rest, cache=loaded) == going_on
    del cache, loaded
    gc.collect()
    assert flatkv.lm.pools()[0].stats.seqs == 0


def test_speculative_decoding(flat):
    model, draft, prompt = llama(seed=0), llama(layers=1, seed=3), text(60)
    own = generated(model, prompt, 16)
    got = [int(t) for t, *_ in speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=16)]
    assert got == own


def test_a_pass_that_breaks_off_never_was(flat):
    model, prompt = llama(), text(50)
    cache = caches.make_prompt_cache(model)
    generated(model, prompt, 1, cache)
    keep, model.model.layers[0].mlp = model.model.layers[0].mlp, None
    offset = cache[0].offset
    with pytest.raises(TypeError):
        model(prompt[None], cache=cache)
    model.model.layers[0].mlp = keep
    other = caches.make_prompt_cache(model)
    model(prompt[None], cache=other)
    assert cache[0].offset == offset and cache[1].offset == offset


def test_a_model_that_cannot_be_kept_is_named_once():
    flatkv.install(max_tokens=128)
    model = Odd()
    try:
        with pytest.warns(UserWarning, match="odd: layer 0: has attention of its own"):
            assert type(caches.make_prompt_cache(model)[0]) is caches.KVCache
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            caches.make_prompt_cache(model)
    finally:
        flatkv.uninstall()
    assert caches.make_prompt_cache is OWN


def test_a_mask_that_is_wider_than_its_cache_is_refused(flat):
    """mlx-lm's answers depend there on how a prompt is cut."""
    pytest.importorskip("mlx_lm.models.plamo3", reason="this mlx-lm is older than the model")
    with pytest.warns(UserWarning, match="plamo3: layer 0: masks a window of 17 tokens over a cache of 16"):
        caches.make_prompt_cache(census_models.build("plamo3"))


@pytest.mark.parametrize("wrong,said", [({"max_tokens": -5}, "max_tokens is -5"), ({"codec": "9/9"}, "names no codecs"), ({"rotate": "x"}, "rotate is 'x'"), ({"codec": 8}, "codec is 8")])
def test_wrong_options_are_refused_by_install(wrong, said):
    with pytest.raises((flatkv.BadCall, TypeError), match=said):
        flatkv.install(**{"max_tokens": 64} | wrong)
    assert not flatkv.installed() and caches.make_prompt_cache is OWN


def test_rotating_and_quantized_at_once(monkeypatch):
    """A window behind four kept tokens, in packed pages. After its first chunk mlx-lm is given single tokens: in chunks it hides those four."""
    model, tokens, cuts = llama(), text(200), [0, 60, *range(61, 201)]
    monkeypatch.delattr(type(model), "make_cache", raising=False)  # or mlx-lm does not hear of the window
    own = logits(model, OWN(model, 64), tokens, cuts)
    for codec, limit in (("16/16", LIMIT), ("8/4", 0.12)):
        flatkv.install(max_tokens=256, codec=codec, max_seqs=1, max_step_tokens=64)
        try:
            cache = caches.make_prompt_cache(model, 64)
            assert relative(logits(model, cache, tokens, cuts), own) < limit
            assert cache[0].offset == 200 and flatkv.lm.pools()[0].stats.groups[0].held <= 3, "the page of those four, and the window"
        finally:
            flatkv.uninstall()


def test_a_call_for_both_that_mlx_lm_refuses_runs(flat, monkeypatch):
    model, both = llama(), {"max_kv_size": 64, "kv_bits": 8, "quantized_kv_start": 0}
    monkeypatch.delattr(type(model), "make_cache", raising=False)
    assert generated(model, text(100), 8, **both) == generated(model, text(100), 8, max_kv_size=64)
    flat.uninstall()
    with pytest.raises(NotImplementedError, match="Quantization NYI"):
        generated(model, text(100), 8, **both)


def test_the_plan_of_a_model_and_what_does_not_fit():
    model = llama()
    plan = flatkv.plan(model, 1024)
    flatkv.install(max_tokens=1024, max_seqs=2)
    try:
        cache = caches.make_prompt_cache(model)
        assert flatkv.plan(model, 1024, max_seqs=2).total_bytes == flatkv.lm.pools()[0].plan.total_bytes < plan.total_bytes
        with pytest.raises(flatkv.DoesNotFit, match="max_tokens=1024"):
            for _ in range(30):
                model(text(64)[None], cache=cache)
        cache = caches.make_prompt_cache(model)
        assert len(generated(model, text(64), 4, cache)) == 4
    finally:
        flatkv.uninstall()


def test_nothing_is_held_after_uninstall():
    """Not by a pass that was never followed by another, nor by the model."""
    model = llama()
    flatkv.install(max_tokens=1024)
    cache = caches.make_prompt_cache(model)
    assert len(generated(model, text(64), 4, cache)) == 4
    pool = weakref.ref(flatkv.lm.pools()[0])
    assert repr(cache[1]) == "<flatkv.FlatKVCache: layer 1, tokens 68>"
    flatkv.uninstall()
    with pytest.raises(flatkv.BadCall, match="flatkv was uninstalled"):
        model(text(4)[None], cache=cache)
    del cache
    gc.collect()
    assert pool() is None
