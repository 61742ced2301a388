"""The host path: caches, sequences, files and errors against attention in numpy."""
import gc

import numpy as np
import pytest

import flatkv

H, G, D = 4, 2, 64
LAYER = flatkv.Layer(n_q_heads=H, n_kv_heads=G, head_dim=D)


def attention(q, k, v, start, window=0, n_sinks=0):
    """q: [T, H, D] at positions start.., k, v: [S, G, D]; in double."""
    out = np.empty(q.shape)
    for t in range(len(q)):
        at = start + t
        sees = np.arange(len(k)) <= at
        if window:
            sees &= (np.arange(len(k)) > at - window) | (np.arange(len(k)) < n_sinks)
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            s = k[:, g].astype(float) @ q[t, h].astype(float) / np.sqrt(q.shape[2])
            p = np.where(sees, np.exp(s - s[sees].max()), 0)
            out[t, h] = p @ v[:, g].astype(float) / p.sum()
    return out


def rows(n, heads, seed):
    return np.random.default_rng(seed).standard_normal((n, heads, D)).astype(np.float32)


def fill(cache, seq, k, v, q, chunk=7, first=0):
    out = []
    for i in range(first, len(k), chunk):
        n = min(chunk, len(k) - i)
        with cache.step([(seq, n)]) as step:
            step.write(0, k[i:i + n], v[i:i + n])
            out.append(step.attend(0, q[i:i + n]))
    return np.concatenate(out)


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("codec,limit", [("16/16", 1e-3), ("8/8", 2e-2), ("8/4", 1.5e-1)])
@pytest.mark.parametrize("window,n_sinks", [(0, 0), (32, 0), (32, 4)])
def test_attention_is_numpys(codec, limit, window, n_sinks):
    layer = flatkv.Layer(H, G, D, window=window, n_sinks=n_sinks)
    k, v, q = rows(150, G, 1), rows(150, G, 2), rows(150, H, 3)
    with flatkv.Cache(layer, max_tokens=256, codec=codec, n_threads=2) as cache, cache.open() as seq:
        assert relative(fill(cache, seq, k, v, q), attention(q, k, v, 0, window, n_sinks)) < limit
        assert len(seq) == 150 and cache.consistent()


def test_the_plan_is_what_is_taken():
    plan = flatkv.plan(LAYER, 4096, codec="8/4")
    with flatkv.Cache(LAYER, max_tokens=4096, codec="8/4") as cache:
        assert cache.stats.planned_bytes == cache.plan.total_bytes == plan.total_bytes
    assert plan.total_bytes == plan.slab_bytes + plan.tables_bytes + plan.scratch_bytes + plan.stacks_bytes
    assert "<svg" in plan._repr_svg_() and "MB" in plan._repr_html_()


def test_fork_truncate_save_load_and_share_give_the_same_bits(tmp_path):
    k, v, q = rows(200, G, 1), rows(200, G, 2), rows(200, H, 3)
    tokens = list(range(1000, 1200))
    with flatkv.Cache(LAYER, max_tokens=2048, max_seqs=8, n_threads=2) as cache:
        seq = cache.open(400)
        whole = fill(cache, seq, k, v, q)
        child = seq.fork(400)
        child.truncate(130)
        assert len(child) == 130 and cache.stats.groups[0].shared == 3
        np.testing.assert_array_equal(fill(cache, child, k, v, q, first=130), whole[130:])
        seq.save(tmp_path / "pages.fkv", tokens)
        assert flatkv.file_tokens(tmp_path / "pages.fkv") == tokens
        loaded = cache.load(tmp_path / "pages.fkv", 400)
        loaded.truncate(199)
        np.testing.assert_array_equal(fill(cache, loaded, k, v, q, first=199), whole[199:])
        seq.share(tokens)
        twin = cache.open(400, prompt=tokens)
        assert twin.n_shared == 192 and cache.stats.hits == 1
        np.testing.assert_array_equal(fill(cache, twin, k, v, q, first=192), whole[192:])
        assert cache.consistent() and "<svg" in cache._repr_svg_() and "tokens written" in cache._repr_html_()


def test_a_step_that_fails_changes_nothing_and_dropped_sequences_close():
    with flatkv.Cache(LAYER, max_tokens=256, max_seqs=4) as cache:
        seq = cache.open(100)
        with pytest.raises(ZeroDivisionError), cache.step([(seq, 3)]) as step:
            step.write(0, rows(3, G, 1), rows(3, G, 2))
            raise ZeroDivisionError
        assert len(seq) == 0 and cache.stats.aborts == 1
        with pytest.raises(flatkv.BadCall, match="0 of 1 layers"), cache.step([(seq, 3)]):
            pass  # a layer was not written: the commit is refused and the step is gone
        other = cache.open(10)
        assert cache.stats.seqs == 2
        del other
        gc.collect()
        assert cache.stats.seqs == 1 and cache.consistent()


def test_errors_have_the_librarys_words(tmp_path):
    with flatkv.Cache(LAYER, max_tokens=64, max_seqs=2) as cache:
        seq = cache.open(64)
        with pytest.raises(flatkv.DoesNotFit, match="FKV_POOL_FULL") as caught:
            cache.open(1000)
        assert caught.value.status == "FKV_POOL_FULL" and isinstance(caught.value, MemoryError)
        seq.close()
        with pytest.raises(flatkv.BadCall, match="FKV_BAD_SEQ"):
            len(seq)
        (tmp_path / "bad").write_bytes(b"nothing of the kind" * 100)
        with pytest.raises(flatkv.BadFile):
            cache.load(tmp_path / "bad")
    with pytest.raises(flatkv.BadCall, match="FKV_BAD_CONFIG"):
        flatkv.Cache(flatkv.Layer(3, 2, 64), max_tokens=64)
    with pytest.raises(flatkv.DoesNotFit, match="memory_limit"):
        flatkv.Cache(LAYER, max_tokens=1 << 20, memory_limit=1000)


@pytest.mark.parametrize("wrong,said", [
    ({"max_tokens": -1}, "max_tokens is -1"), ({"max_tokens": 1 << 40}, "max_tokens is 1099511627776"), ({"rotate": "x"}, "choose one of None, 'none', 'k'"),
    ({"row_type": "f32"}, "row_type is 'f32': choose one of 'float32'"), ({"memory_limit": -1}, "memory_limit is -1")])
def test_a_wrong_option_is_named_as_it_was_given(wrong, said):
    with pytest.raises(flatkv.BadCall, match=said):
        flatkv.Cache(LAYER, **{"max_tokens": 64} | wrong)


def test_numbers_that_are_none():
    with pytest.raises(TypeError, match="max_tokens is '128K': a whole number"):
        flatkv.plan(LAYER, "128K")
    with pytest.raises(TypeError, match="codec is 8: a name"):
        flatkv.plan(LAYER, 64, codec=8)
    with pytest.raises(TypeError, match="3 has no plan"):
        flatkv.plan(3, 64)
    with pytest.raises(flatkv.BadCall, match="n_kv_heads is -2"):
        flatkv.plan(flatkv.Layer(4, -2, 64), 64)


def test_what_is_closed_says_so():
    cache = flatkv.Cache(LAYER, max_tokens=64, max_seqs=2)
    seq = cache.open(64)
    step = cache.step([(seq, 3)])
    assert "64 tokens" in repr(cache) and repr(seq) == "<flatkv.Sequence of 0 tokens>"
    cache.close()
    for call in (lambda: cache.stats, cache.open, lambda: len(seq), cache.consistent):
        with pytest.raises(flatkv.BadCall, match="this Cache is closed"):
            call()
    with pytest.raises(flatkv.BadCall, match="step is NULL"):
        step.write(0, rows(3, G, 1), rows(3, G, 2))
    cache.close()
    seq.close()
    assert "closed" in repr(cache) and "closed" in repr(seq)
