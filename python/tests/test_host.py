"""Tests the host cache against attention in numpy: sequences, files and errors."""
import errno
import gc
import importlib.metadata
import pickle

import numpy as np
import pytest

import flatkv

H, G, D = 4, 2, 64
LAYER = flatkv.Layer(n_q_heads=H, n_kv_heads=G, head_dim=D)


def attention(q, k, v, start, window=0, n_sinks=0):
    """Computes attention in double precision. q: [T, H, D] at positions from start on; k, v: [S, G, D]."""
    out = np.empty(q.shape)
    for t in range(len(q)):
        at = start + t
        visible = np.arange(len(k)) <= at
        if window:
            visible &= (np.arange(len(k)) > at - window) | (np.arange(len(k)) < n_sinks)
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            s = k[:, g].astype(float) @ q[t, h].astype(float) / np.sqrt(q.shape[2])
            p = np.where(visible, np.exp(s - s[visible].max()), 0)
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
def test_attention_matches_numpy(codec, limit, window, n_sinks):
    layer = flatkv.Layer(H, G, D, window=window, n_sinks=n_sinks)
    k, v, q = rows(150, G, 1), rows(150, G, 2), rows(150, H, 3)
    with flatkv.Cache(layer, max_tokens=256, codec=codec, n_threads=2) as cache, cache.open() as seq:
        assert relative(fill(cache, seq, k, v, q), attention(q, k, v, 0, window, n_sinks)) < limit
        assert len(seq) == 150 and cache.consistent()


def test_cache_reserves_exactly_the_planned_bytes():
    plan = flatkv.plan(LAYER, 4096, codec="8/4")
    with flatkv.Cache(LAYER, max_tokens=4096, codec="8/4") as cache:
        assert cache.stats.planned_bytes == cache.plan.total_bytes == plan.total_bytes
    assert plan.total_bytes == plan.slab_bytes + plan.tables_bytes + plan.scratch_bytes + plan.stacks_bytes
    assert "<svg" in plan._repr_svg_() and "MB" in plan._repr_html_()


def test_fork_truncate_save_load_and_share_are_bit_identical(tmp_path):
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


def test_failed_steps_change_nothing_and_dropped_sequences_close():
    with flatkv.Cache(LAYER, max_tokens=256, max_seqs=4) as cache:
        seq = cache.open(100)
        with pytest.raises(ZeroDivisionError), cache.step([(seq, 3)]) as step:
            step.write(0, rows(3, G, 1), rows(3, G, 2))
            raise ZeroDivisionError
        assert len(seq) == 0 and cache.stats.aborts == 1
        with pytest.raises(flatkv.BadCall, match="0 of 1 layers"), cache.step([(seq, 3)]):
            pass  # the commit fails because a layer was not written, and the step is aborted
        other = cache.open(10)
        assert cache.stats.seqs == 2
        del other
        gc.collect()
        assert cache.stats.seqs == 1 and cache.consistent()


def test_errors_contain_the_librarys_message(tmp_path):
    with flatkv.Cache(LAYER, max_tokens=64, max_seqs=2) as cache:
        seq = cache.open(64)
        with pytest.raises(flatkv.DoesNotFit, match="FKV_POOL_FULL") as caught:
            cache.open(1000)
        assert caught.value.status == "FKV_POOL_FULL" and isinstance(caught.value, MemoryError)
        seq.close()
        with pytest.raises(flatkv.BadCall, match="FKV_BAD_SEQ"):
            len(seq)
        (tmp_path / "bad").write_bytes(b"not a page file" * 100)
        with pytest.raises(flatkv.BadFile):
            cache.load(tmp_path / "bad")
    with pytest.raises(flatkv.BadCall, match="FKV_BAD_CONFIG"):
        flatkv.Cache(flatkv.Layer(3, 2, 64), max_tokens=64)
    with pytest.raises(flatkv.DoesNotFit, match="memory_limit"):
        flatkv.Cache(LAYER, max_tokens=1 << 20, memory_limit=1000)


@pytest.mark.parametrize("option,message", [
    ({"max_tokens": -1}, r"max_tokens must be from 0 to 4294967295 \(got -1\)"), ({"max_tokens": 1 << 40}, r"got 1099511627776"),
    ({"rotate": "x"}, r"rotate must be one of None, 'none', 'k', 'v', 'kv' \(got 'x'\)"),
    ({"row_type": "f32"}, r"row_type must be one of 'float32', .* \(got 'f32'\)"), ({"memory_limit": -1}, r"memory_limit must be .* \(got -1\)")])
def test_an_invalid_option_is_named_with_its_value(option, message):
    with pytest.raises(flatkv.BadCall, match=message):
        flatkv.Cache(LAYER, **{"max_tokens": 64} | option)


def test_arguments_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"max_tokens must be an integer \(got '128K'\)"):
        flatkv.plan(LAYER, "128K")
    with pytest.raises(TypeError, match="codec must be a string"):
        flatkv.plan(LAYER, 64, codec=8)
    with pytest.raises(TypeError, match="model must be a Layer"):
        flatkv.plan(3, 64)
    with pytest.raises(flatkv.BadCall, match="n_kv_heads must be"):
        flatkv.plan(flatkv.Layer(4, -2, 64), 64)


def test_closed_objects_raise():
    cache = flatkv.Cache(LAYER, max_tokens=64, max_seqs=2)
    seq = cache.open(64)
    step = cache.step([(seq, 3)])
    assert "64 tokens" in repr(cache) and repr(seq) == "<flatkv.Sequence of 0 tokens>"
    cache.close()
    for call in (lambda: cache.stats, cache.open, lambda: len(seq), cache.consistent):
        with pytest.raises(flatkv.BadCall, match="this Cache is closed"):
            call()
    with pytest.raises(flatkv.BadCall, match="this step is over"):
        step.write(0, rows(3, G, 1), rows(3, G, 2))
    cache.close()
    seq.close()
    assert "closed" in repr(cache) and "closed" in repr(seq)


def test_errors_can_be_pickled():
    for error in (flatkv.DoesNotFit("FKV_POOL_FULL", "full"), flatkv.MissingFile("FKV_IO", "gone"), flatkv.BadCall("FKV_BAD_SEQ", "bad")):
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error) and str(copied) == str(error) and copied.status == error.status


def test_a_dropped_step_is_aborted():
    with flatkv.Cache(LAYER, max_tokens=64) as cache:
        seq = cache.open(64)
        step = cache.step([(seq, 3)])
        del step
        with cache.step([(seq, 3)]) as step:
            step.write(0, rows(3, G, 1), rows(3, G, 2))
        assert len(seq) == 3 and cache.stats.aborts == 1 and cache.consistent()
        with pytest.raises(flatkv.BadCall, match="this step is over"):
            step.write(0, rows(3, G, 1), rows(3, G, 2))


def test_a_missing_page_file_is_an_os_error(tmp_path):
    with flatkv.Cache(LAYER, max_tokens=64) as cache, pytest.raises(FileNotFoundError, match="none.fkv") as caught:
        cache.load(tmp_path / "none.fkv")
    assert caught.value.errno == errno.ENOENT and isinstance(caught.value, flatkv.FileError)
    with pytest.raises(FileNotFoundError):
        flatkv.file_tokens(tmp_path / "none.fkv")


def test_messages_name_python_functions():
    with flatkv.Cache(LAYER, max_tokens=64) as cache, cache.open(4) as seq, pytest.raises(flatkv.DoesNotFit, match=r"Sequence.reserve\(\)") as caught:
        cache.step([(seq, 5)])
    assert "fkv_" not in str(caught.value)


def test_the_installed_package_names_its_author_and_contains_its_license():
    package = importlib.metadata.distribution("flatkv")
    assert package.metadata["Author"] and any(file.name == "LICENSE" for file in package.files)


def test_rows_of_other_libraries_are_accepted():
    """Rows with __dlpack__, such as those of MLX and PyTorch, are read without conversion by the caller."""
    class Foreign:
        def __init__(self, rows):
            self.rows = rows

        def __dlpack__(self, **options):
            return self.rows.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.rows.__dlpack_device__()

    rows = np.random.default_rng(1).normal(size=(5, 2, 64)).astype(np.float32)
    found = []
    for given in (rows, Foreign(rows)):
        cache = flatkv.Cache(flatkv.Layer(2, 2, 64), max_tokens=64)
        with cache.step([(cache.open(8), 5)]) as step:
            step.write(0, given, given)
            found.append(step.attend(0, given))
    assert np.array_equal(*found) and np.array_equal(np.from_dlpack(found[0]), found[0])
