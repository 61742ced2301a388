"""Compares mlx-lm with flatkv installed to mlx-lm with its own caches."""
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
from conftest import gemma2, gemma3, gpt_oss, llama, settled_memory, random_tokens  # noqa: E402
from flatkv import bench  # noqa: E402

OWN = flatkv.lm.own_prompt_cache
LIMIT = 5e-3  # maximum relative error of logits with 16-bit pages


def logits(model, cache, tokens, cuts):
    out = [model(tokens[None, a:b], cache=cache) for a, b in zip(cuts, cuts[1:])]
    return mx.concatenate(out, 1)


def relative(a, b):
    return (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item()


def generated(model, prompt, n=12, cache=None, **more):
    return [int(t) for t, _ in generate_step(prompt, model, max_tokens=n, prompt_cache=cache, prefill_step_size=64, **more)]


class Odd:
    """An unsupported model, which reads the arrays of mlx-lm's cache."""

    model_type = "odd"
    layers = [None]

    def __call__(self, tokens, cache):
        cache[0].update_and_fetch(mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 64)))
        return cache[0].keys


@pytest.mark.parametrize("make", [llama, gemma2, gemma3, gpt_oss])
def test_logits_match_mlx_lm(flat, make):
    model, tokens, cuts = make(), random_tokens(90), [0, 40, 80, *range(81, 91)]
    cache = caches.make_prompt_cache(model)
    assert {type(c).__name__ for c in cache} == {"FlatKVCache"}
    own = OWN(model)
    assert relative(logits(model, cache, tokens, cuts), logits(model, own, tokens, cuts)) < LIMIT
    assert [c.offset for c in cache] == [c.offset for c in own] and cache[0].size() == own[0].size()


def test_a_sequence_can_end_inside_the_last_page():
    flatkv.install(max_tokens=100, codec="16/16", max_seqs=1)
    try:
        assert len(generated(llama(), random_tokens(80), 20)) == 20
    finally:
        flatkv.uninstall()


def test_generate_matches_mlx_lm_with_constant_memory(flat):
    model, prompt = llama(), random_tokens(300)
    own = generated(model, prompt, cache=OWN(model))
    assert generated(model, prompt) == own
    cache = caches.make_prompt_cache(model)
    generated(model, prompt, 4, cache)
    start = settled_memory()
    generated(model, random_tokens(200, seed=5), 30, cache)
    assert settled_memory() - start < 1024, "only page numbers of 4 bytes may be added"
    assert flatkv.lm.pools()[0].consistent()


@pytest.mark.parametrize("n", [1, 3])
def test_trim_right_after_a_pass(flat, n):
    model, tokens = llama(), random_tokens(60)
    results = []
    for cache in (caches.make_prompt_cache(model), OWN(model)):
        model(tokens[None, :40], cache=cache)
        model(tokens[None, 40:43], cache=cache)
        caches.trim_prompt_cache(cache, n)
        results.append(model(tokens[None, 50:52], cache=cache))
        assert cache[0].offset == 45 - n
    assert relative(*results) < LIMIT


def test_a_step_that_fails_to_commit_is_aborted(flat):
    model, tokens = llama(), random_tokens(60)
    cache = caches.make_prompt_cache(model)
    mx.eval(model(tokens[None, :40], cache=cache))
    pool = flatkv.lm.pools()[0]
    if pool.fused:
        pytest.skip("fused steps do not evaluate anything when they are committed")

    def fails():
        raise RuntimeError("commit failed")
    pool._step.pending = fails
    with pytest.raises(RuntimeError, match="commit failed"):
        pool.settle()
    assert cache[0].offset == 0 and pool.consistent()
    assert generated(model, tokens, cache=cache) == generated(model, tokens, cache=OWN(model))


def test_bench_with_max_kv_size_skips_quantized_caches(monkeypatch, capsys):
    options = ["-c", "96", "-n", "3", "--chunk", "32", "--codec", "16/16", "--max-kv-size", "64"]
    model = llama()
    monkeypatch.delattr(type(model), "make_cache", raising=False)
    monkeypatch.setattr(bench, "load", lambda *_: (model, random_tokens(96)))
    assert bench.main(options) == 0
    rows = [line[:16].strip() for line in capsys.readouterr().out.splitlines()]
    assert rows[-2:] == ["mlx-lm float32", "flatkv 16/16"] and "mlx-lm 8-bit" not in rows and any(r.startswith("8-bit and 4-bit") for r in rows)
    monkeypatch.setattr(bench, "load", lambda *_: (gemma3(), random_tokens(96)))
    with pytest.raises(SystemExit):
        bench.main(options)
    assert "--max-kv-size 64: this model creates its own caches" in capsys.readouterr().err
    monkeypatch.setattr(bench, "load", lambda *_: (Odd(), random_tokens(96)))
    with pytest.raises(SystemExit):
        bench.main(options[:-2])
    assert "flatkv does not support this model: layer 0 reads keys of its cache" in capsys.readouterr().err


def test_trim_truncates_and_deepcopy_forks(flat):
    model, prompt = llama(), random_tokens(200)
    cache = caches.make_prompt_cache(model)
    generated(model, prompt, 5, cache)
    twin = copy.deepcopy(cache)
    assert len({id(c.seqs[0]) for c in twin}) == 1 and twin[0].offset == cache[0].offset
    pool = flatkv.lm.pools()[0]
    assert pool.stats.groups[0].shared >= 3
    assert caches.trim_prompt_cache(twin, twin[0].offset - 150) == cache[0].offset - 150
    rest = random_tokens(30, seed=9)
    fresh = generated(model, mx.concatenate([prompt[:150], rest]), cache=OWN(model))
    assert generated(model, rest, cache=twin) == fresh
    assert pool.consistent()


def test_stored_prompts_share_pages_and_are_evicted(flat):
    model, tokens = llama(layers=1), random_tokens(256).tolist()
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
    assert pool.stats.groups[0].held <= 4 + 2 * 21, "the pages of the common 256 tokens must be shared"
    kept.clear()
    gc.collect()
    for seed in range(40):  # more prompts than max_seqs, so that the oldest are evicted
        cache = caches.make_prompt_cache(model)
        other = random_tokens(70, seed=100 + seed)
        generated(model, other, 1, cache)
        store.insert_cache("m", other.tolist(), cache)
    assert pool.consistent() and 0 < len(store) < 40


def test_a_batch_matches_single_generation(flat):
    model = llama()
    prompts = [random_tokens(n, seed=n).tolist() for n in (37, 211, 120, 3)]
    lengths = [12, 5, 9, 7]
    single = [generated(model, mx.array(p), n) for p, n in zip(prompts, lengths)]
    generator = BatchGenerator(model, max_tokens=12, prefill_batch_size=4, completion_batch_size=4, prefill_step_size=64)
    uids = generator.insert(prompts, lengths)
    out, kept = {u: [] for u in uids}, {}
    while len(kept) < len(prompts):
        _, responses = generator.next()
        for r in responses:
            out[r.uid].append(r.token)
            if r.finish_reason is not None:
                kept[r.uid] = r.prompt_cache
    assert [out[u] for u in uids] == single
    assert all(type(c).__name__ == "FlatKVCache" for cache in kept.values() for c in cache)
    generator.close()
    del kept
    gc.collect()
    assert flatkv.lm.pools()[0].consistent()


@pytest.mark.parametrize("make", [llama, gemma3, gpt_oss])
def test_saved_prompt_caches_can_be_loaded(flat, make, tmp_path):
    model, prompt, rest = make(), random_tokens(100), random_tokens(10, seed=4)
    cache = caches.make_prompt_cache(model)
    generated(model, prompt, 1, cache)
    caches.save_prompt_cache(str(tmp_path / "p.safetensors"), cache, {"source": "test"})
    continued = generated(model, rest, cache=cache)
    loaded, metadata = caches.load_prompt_cache(str(tmp_path / "p.safetensors"), return_metadata=True)
    assert metadata == {"source": "test"} and loaded[0].offset == cache[0].offset - len(rest) - len(continued)
    assert generated(model, rest, cache=loaded) == continued
    del cache, loaded
    gc.collect()
    assert flatkv.lm.pools()[0].stats.seqs == 0


def test_speculative_decoding_matches_plain_decoding(flat):
    model, draft, prompt = llama(seed=0), llama(layers=1, seed=3), random_tokens(60)
    own = generated(model, prompt, 16)
    got = [int(t) for t, *_ in speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=16)]
    assert got == own


def test_an_incomplete_pass_is_aborted(flat):
    model, prompt = llama(), random_tokens(50)
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


def test_the_default_codec_is_sealed_if_it_needs_no_more_memory(tmp_path):
    model, prompt, path = llama(layers=1), random_tokens(300), str(tmp_path / "p.safetensors")
    try:
        for max_tokens, max_seqs, codec in ((512, 32, "8/4"), (32768, 4, "sealed")):
            flatkv.install(max_tokens=max_tokens, max_seqs=max_seqs)
            cache = caches.make_prompt_cache(model)
            assert cache[0].pool.options.codec == codec
            plans = {name: flatkv.plan(model, max_tokens, max_seqs=max_seqs, codec=name).total_bytes for name in ("sealed", "8/4")}
            assert flatkv.plan(model, max_tokens, max_seqs=max_seqs).total_bytes == cache[0].pool.plan.total_bytes == plans[codec] == min(plans.values())
            mx.eval(model(prompt[None], cache=cache))
            caches.save_prompt_cache(path, cache)
            del cache
        flatkv.install(max_tokens=512)  # a new pool of this size would choose the codec 8/4, but the file contains sealed pages
        loaded = caches.load_prompt_cache(path)
        assert loaded[0].pool.options.codec == "sealed" and caches.make_prompt_cache(model)[0].pool is loaded[0].pool
        assert caches.trim_prompt_cache(loaded, 40) == 40  # sealed pages cannot be truncated to this position
        mx.eval(model(prompt[None, :5], cache=loaded))
        assert loaded[0].offset == 265
    finally:
        flatkv.uninstall()


def test_a_prompt_of_another_mlx_version_is_rejected(flat, tmp_path, monkeypatch):
    path, model, prompt = str(tmp_path / "p.safetensors"), llama(layers=1), random_tokens(70)
    cache = caches.make_prompt_cache(model)
    mx.eval(model(prompt[None], cache=cache))
    caches.save_prompt_cache(path, cache)
    numerics = f"mlx-lm {mx.__version__} {'cpu' if mx.default_device().type != mx.DeviceType.gpu else ''}"
    assert numerics.encode() in open(path, "rb").read()
    del cache
    monkeypatch.setattr(mx, "__version__", "0.1.2")
    flatkv.install(max_tokens=4096, codec="16/16")
    with pytest.raises(flatkv.BadFile, match=f'numerics is "{numerics}.*" in the file but "mlx-lm 0.1.2'):
        caches.load_prompt_cache(path)
    monkeypatch.undo()
    flatkv.install(max_tokens=4096, codec="16/16")
    assert caches.load_prompt_cache(path)[0].offset == 70


def test_an_unsupported_model_warns_once():
    flatkv.install(max_tokens=128)
    model = Odd()
    try:
        with pytest.warns(UserWarning, match="odd: layer 0 reads keys of its cache"):
            assert type(caches.make_prompt_cache(model)[0]) is caches.KVCache
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            caches.make_prompt_cache(model)
    finally:
        flatkv.uninstall()
    assert type(caches.make_prompt_cache(llama())[0]) is caches.KVCache


def test_a_window_larger_than_its_cache_is_unsupported(flat):
    """The results of mlx-lm would depend on the chunk size of the prompt."""
    pytest.importorskip("mlx_lm.models.plamo3", reason="this version of mlx-lm lacks the model")
    with pytest.warns(UserWarning, match="plamo3: layer 0 has a window of 17 tokens, which is larger than its cache of 16"):
        caches.make_prompt_cache(census_models.build("plamo3"))


@pytest.mark.parametrize("option,message", [({"max_tokens": -5}, "max_tokens must be"), ({"codec": "9/9"}, "unknown codec"),
                                            ({"rotate": "x"}, "rotate must be"), ({"codec": 8}, "codec must be")])
def test_install_rejects_invalid_options(option, message):
    with pytest.raises((flatkv.BadCall, TypeError), match=message):
        flatkv.install(**{"max_tokens": 64} | option)
    assert not flatkv.installed() and type(caches.make_prompt_cache(llama())[0]) is caches.KVCache


def test_a_rotating_cache_can_be_quantized(monkeypatch):
    """After the first chunk, tokens are fed one at a time, because mlx-lm masks its four sink tokens in later chunks."""
    model, tokens, cuts = llama(), random_tokens(200), [0, 60, *range(61, 201)]
    monkeypatch.delattr(type(model), "make_cache", raising=False)  # otherwise mlx-lm ignores max_kv_size
    own = logits(model, OWN(model, 64), tokens, cuts)
    for codec, limit in (("16/16", LIMIT), ("8/4", 0.12)):
        flatkv.install(max_tokens=256, codec=codec, max_seqs=1, max_step_tokens=64)
        try:
            cache = caches.make_prompt_cache(model, 64)
            assert relative(logits(model, cache, tokens, cuts), own) < limit
            assert cache[0].offset == 200 and flatkv.lm.pools()[0].stats.groups[0].held <= 3, "one page with the sink tokens, and the pages of the window"
        finally:
            flatkv.uninstall()


def test_max_kv_size_with_kv_bits_which_mlx_lm_rejects(flat, monkeypatch):
    model, both = llama(), {"max_kv_size": 64, "kv_bits": 8, "quantized_kv_start": 0}
    monkeypatch.delattr(type(model), "make_cache", raising=False)
    assert generated(model, random_tokens(100), 8, **both) == generated(model, random_tokens(100), 8, max_kv_size=64)
    flat.uninstall()
    with pytest.raises(NotImplementedError, match="Quantization NYI"):
        generated(model, random_tokens(100), 8, **both)


def test_plan_of_a_model_and_a_full_pool():
    model = llama()
    plan = flatkv.plan(model, 1024)
    flatkv.install(max_tokens=1024, max_seqs=2)
    try:
        cache = caches.make_prompt_cache(model)
        assert flatkv.plan(model, 1024, max_seqs=2).total_bytes == flatkv.lm.pools()[0].plan.total_bytes < plan.total_bytes
        with pytest.raises(flatkv.DoesNotFit, match="max_tokens=1024"):
            for _ in range(30):
                model(random_tokens(64)[None], cache=cache)
        cache = caches.make_prompt_cache(model)
        assert len(generated(model, random_tokens(64), 4, cache)) == 4
    finally:
        flatkv.uninstall()


def test_uninstall_releases_the_pool():
    """Neither the open step nor the model keeps the pool alive."""
    model = llama()
    flatkv.install(max_tokens=1024)
    cache = caches.make_prompt_cache(model)
    assert len(generated(model, random_tokens(64), 4, cache)) == 4
    pool = weakref.ref(flatkv.lm.pools()[0])
    assert repr(cache[1]) == "<flatkv.FlatKVCache: layer 1, tokens 68>"
    flatkv.uninstall()
    with pytest.raises(flatkv.BadCall, match="which was uninstalled"):
        model(random_tokens(4)[None], cache=cache)
    del cache
    gc.collect()
    assert pool() is None


def test_an_exported_prompt_is_loaded_by_mlx_lm_alone(tmp_path):
    for model in (llama(), gemma3()):
        prompt, others, file = random_tokens(150), random_tokens(10, seed=5), str(tmp_path / "p.safetensors")
        flatkv.install(max_tokens=1024, codec="8/4", max_seqs=4)
        try:
            cache = caches.make_prompt_cache(model)
            tokens = generated(model, prompt, 6, cache)
            flatkv.export_prompt_cache(file, cache, model, metadata={"name": "test"})
            n = cache[0].offset
            caches.save_prompt_cache(str(tmp_path / "own.safetensors"), cache)
            again = caches.load_prompt_cache(str(tmp_path / "own.safetensors"))  # token ids are part of the page file
            flatkv.export_prompt_cache(str(tmp_path / "again.safetensors"), again, model)
            with pytest.raises(flatkv.BadCall, match="must be a prompt cache of flatkv"):
                flatkv.export_prompt_cache(file, OWN(model), model)
            embedded = caches.make_prompt_cache(model)
            embeddings = mx.zeros((1, 5, 128))
            if isinstance(model, type(llama())):
                model(prompt[None, :5], cache=embedded, input_embeddings=embeddings)
                with pytest.raises(flatkv.BadCall, match="token ids of this prompt cache are unknown"):
                    flatkv.export_prompt_cache(file, embedded, model)
        finally:
            flatkv.uninstall()
        everything = mx.concatenate([prompt, mx.array(tokens), others])
        wanted = logits(model, OWN(model), mx.concatenate([everything[:n], others]), [0, n, n + 10])[:, n:]
        for path in (file, str(tmp_path / "again.safetensors")):
            loaded = caches.load_prompt_cache(path)
            assert type(loaded[-1]) in (caches.KVCache, caches.RotatingKVCache)
            assert relative(model(others[None], cache=loaded), wanted) < 1e-4
