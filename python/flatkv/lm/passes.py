"""Forward passes of a model over a pool: model calls are serialized, split into steps and, where decode graphs allow it, replayed.

The ids of all tokens are recorded, and recurrent states are saved in checkpoints. In pools with sealed pages or recurrent layers, a
trimmed prompt cache is restored to the last available position, and the tokens up to the wanted position are computed again with the
next pass.
"""
from __future__ import annotations

import weakref
from typing import Any, Callable, Iterator

import mlx.core as mx

from .history import Checkpoint
from .pool import Pool, PooledSequence
from .prompt import FlatKVCache
from .recurrent import RecurrentCache
from .replay import DecodeGraphs

CHECKPOINT_TOKENS = 64  # distance between checkpoints during generation, in tokens
TAIL_TOKENS = 16  # each prompt chunk has a checkpoint at least this many tokens before its end, because the next turn may differ near the end
SHORT_PASS = 16  # passes of up to this many tokens, such as drafts, count as decoding


def layer_caches(cache: Any) -> Iterator[FlatKVCache | RecurrentCache]:
    """Yields the caches of flatkv in a prompt cache, including those inside CacheList objects."""
    for c in cache if isinstance(cache, (list, tuple)) else ():
        if isinstance(c, (FlatKVCache, RecurrentCache)):
            yield c
        else:
            yield from layer_caches(getattr(c, "caches", None))


def pool_of_cache(cache: Any) -> Pool | None:
    """Returns the pool of a model's caches, or None if flatkv does not own them."""
    return next((c.pool for c in layer_caches(cache) if isinstance(c, FlatKVCache)), None)


# ---- trims ----

def rewind(cache: Any) -> tuple[int, list[int]] | None:
    """Restores trimmed sequences to the last available position. Other pools truncate pages directly.

    Returns the position and the ids of the tokens from there to the wanted position, or None if no sequence was trimmed. If the
    prompt cache has several sequences (of a model and of its draft model), all return to the same position, and no ids are returned.
    """
    by_seq: dict[PooledSequence, list[FlatKVCache | RecurrentCache]] = {}
    for c in layer_caches(cache):
        if not c.batched and c.seqs[0].pool.recomputes:
            by_seq.setdefault(c.seqs[0], []).append(c)
    wanted = {seq: min(c._now()[0] for c in layers) for seq, layers in by_seq.items()}
    if all(n == seq.length + seq.n_pending for seq, n in wanted.items()):
        return None
    position = min(wanted.values())
    ids: list[int] = []
    while True:
        reached = []
        for seq, layers in by_seq.items():
            if seq.length + seq.n_pending > position:
                at, states, missing = seq.rewind(position)
                ids = missing if len(by_seq) == 1 else []
                for c in layers:
                    if isinstance(c, RecurrentCache):
                        c.restore(states, at)
                    else:
                        c.lengths = [at]
            reached.append(seq.length)
        if len(set(reached)) == 1:
            return reached[0], ids
        position = min(reached)


def recompute_trimmed(cache: Any) -> None:
    """Restores the trimmed sequences of a prompt cache to exactly the wanted positions."""
    by_seq: dict[PooledSequence, list[Any]] = {}
    for c in cache if isinstance(cache, (list, tuple)) else ():
        first = next(layer_caches([c]), None)
        if first is not None and not first.batched:
            by_seq.setdefault(first.seqs[0], []).append(c)
    for seq, layers in by_seq.items():
        rewound = rewind(layers)
        if rewound is not None and rewound[1]:
            assert seq.recompute is not None, "a sequence with tokens has a model that can recompute them"
            seq.recompute(layers, rewound[1])


# ---- passes ----

def _counts(first: FlatKVCache, tokens: Any) -> list[int]:
    """Returns the number of tokens of each row in a pass, without right padding, or [] if the token ids are unknown."""
    if not isinstance(tokens, mx.array) or tokens.ndim != 2:
        return []
    n_rows, n = tokens.shape
    return [n] * n_rows if first._remaining is None else [min(n, remaining) for remaining in first._remaining]


def _record(seqs: list[PooledSequence], starts: list[int], tokens: Any, counts: list[int]) -> None:
    """Appends the token ids of a pass to the histories of its sequences. starts: lengths of the sequences before the pass."""
    for row, (seq, start, n) in enumerate(zip(seqs, starts, counts)):
        if n and len(seq.history) == start:
            seq.history.append(tokens, row, n)


def _save_checkpoints(recurrent: list[RecurrentCache], seqs: list[PooledSequence], counts: list[int]) -> None:
    """Saves the states after a pass at the ends of prompt chunks and, between generated tokens, every CHECKPOINT_TOKENS tokens."""
    for row, (seq, n) in enumerate(zip(seqs, counts)):
        end = seq.length + seq.n_pending
        decoded = n <= SHORT_PASS
        if n == 0 or (decoded and end // CHECKPOINT_TOKENS == (end - n) // CHECKPOINT_TOKENS):
            continue
        states = [c.row(row) for c in recurrent]
        mx.async_eval([a for layer in states for a in layer if a is not None])
        seq.checkpoints.add(Checkpoint(end, states, decoded))


def _run_recorded(pool: Pool, cache: Any, tokens: Any, build: Callable[[], Any]) -> Any:
    """Runs one pass and records its token ids and recurrent states."""
    layers = list(layer_caches(cache)) if pool.is_hybrid else []
    recurrent = [c for c in layers if isinstance(c, RecurrentCache)]
    first = next(c for c in layers or layer_caches(cache) if isinstance(c, FlatKVCache))
    before = [list(c.cache) for c in recurrent]
    seqs, starts = first.seqs, [seq.length + seq.n_pending for seq in first.seqs]
    counts = _counts(first, tokens)
    for c in recurrent:
        if c.lengths is not None and counts:  # limited to the tokens of this pass, because mlx-lm's Mamba 2 layers read past the end for longer rows
            c.lengths = mx.array(counts)
    try:
        result = pool.run_pass(build)
    except BaseException:
        for c, arrays in zip(recurrent, before):
            c.cache = arrays
        raise
    _record(seqs, starts, tokens, counts)
    for c in recurrent:
        c.n_tokens = [seq.length + seq.n_pending for seq in seqs]
    if recurrent and counts:
        if len(seqs) == 1 and counts[0] <= CHECKPOINT_TOKENS:
            pool.recent = weakref.ref(seqs[0]), Checkpoint(starts[0], before)
        _save_checkpoints(recurrent, seqs, counts)
    return result


def _cuts(pool: Pool, cache: Any, n_rows: int, n: int) -> list[int]:
    """Returns the positions in a pass of n tokens at which it is split, including 0 and n."""
    width = pool.max_step_tokens // n_rows
    if width == 0:
        return [0, n]
    cuts = [*range(0, n, width), n]
    if pool.is_hybrid and n_rows == 1 and n > CHECKPOINT_TOKENS + TAIL_TOKENS:
        start = next(layer_caches(cache))._now()[0]
        at = (start + n - TAIL_TOKENS) // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS - start
        if at > 0:
            cuts = sorted({*cuts, at})
    return cuts


def _pieces(pool: Pool, cache: Any, args: tuple[Any, ...], named: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Splits the arguments of a model call into calls of at most max_step_tokens tokens each.

    A call with arguments other than tokens, cache and input_embeddings is not split.
    """
    tokens = args[0] if args else None
    if not isinstance(tokens, mx.array) or tokens.ndim != 2 or len(args) > 2 or not set(named) <= {"cache", "input_embeddings"}:
        return [(args, named)]
    embeddings = named.get("input_embeddings")
    cuts = _cuts(pool, cache, *tokens.shape)
    if len(cuts) <= 2:
        return [(args, named)]

    def piece(first: int, last: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part = {} if embeddings is None else {"input_embeddings": embeddings[:, first:last]}
        return (tokens[:, first:last], *args[1:]), named | part

    return [piece(first, last) for first, last in zip(cuts, cuts[1:])]


def wrap_model_call(call: Callable[..., Any], decode_graphs: DecodeGraphs) -> Callable[..., Any]:
    """Returns a __call__ for model classes that serializes passes over a pool, splits large passes and replays decode steps."""

    def run_pass(pool: Pool, model: Any, cache: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        def build() -> Any:
            if pool.options.compile and len(args) == len(named) == 1 and args[0].ndim == 2 and args[0].shape[1] == 1:
                graphs = decode_graphs.graphs_of(model, call, cache)
                if graphs is not None:
                    return decode_graphs.step(graphs, model, args[0], cache)
            return call(model, *args, **named)

        ids = args[0] if args and named.get("input_embeddings") is None else None
        return _run_recorded(pool, cache, ids, build)

    def run_pieces(pool: Pool, model: Any, cache: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        pieces = _pieces(pool, cache, args, named)
        if len(pieces) == 1:
            return run_pass(pool, model, cache, *pieces[0])
        with pool.lock:  # holds the lock, so that no pass of another thread runs between the parts of this pass
            results = [run_pass(pool, model, cache, *piece) for piece in pieces]
        return mx.concatenate(results, 1) if all(isinstance(r, mx.array) for r in results) else results[-1]

    def recomputing(model: Any) -> Callable[[Any, list[int]], None]:
        """Returns the function that computes tokens of a sequence again."""
        reference = weakref.ref(model)

        def recompute(cache: Any, ids: list[int]) -> None:
            pool, owner = pool_of_cache(cache), reference()
            assert pool is not None and owner is not None
            for first in range(0, len(ids), pool.max_step_tokens):
                run_pieces(pool, owner, cache, (mx.array([ids[first:first + pool.max_step_tokens]]),), {"cache": cache})
                mx.eval([c.state for c in cache])

        return recompute

    def __call__(model: Any, *args: Any, **named: Any) -> Any:
        cache = named.get("cache", args[1] if len(args) > 1 else None)
        pool = pool_of_cache(cache)
        if pool is None:
            return call(model, *args, **named)
        if not pool.recomputes:
            return run_pieces(pool, model, cache, args, named)
        with pool.lock:
            for seq in next(layer_caches(cache)).seqs:
                seq.recompute = seq.recompute or recomputing(model)
            rewound = rewind(cache)
            ids = rewound[1] if rewound is not None else []
            simple = len(args) <= 2 and set(named) <= {"cache"} and isinstance(args[0], mx.array) and args[0].ndim == 2
            if not ids or not simple or len(ids) > CHECKPOINT_TOKENS:
                if ids:
                    recomputing(model)(cache, ids)
                return run_pieces(pool, model, cache, args, named)
            tokens = mx.concatenate([mx.array([ids], args[0].dtype), args[0]], 1)
            result = run_pieces(pool, model, cache, (tokens, *args[1:]), named)
            return result[:, len(ids):] if isinstance(result, mx.array) else result

    return __call__
