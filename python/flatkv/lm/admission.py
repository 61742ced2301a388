"""Admission of mlx-lm's requests to a pool.

A request is admitted once pages for its prompt and for all tokens that it may generate are reserved, so an admitted request never runs
out of pages. Requests of a BatchGenerator that do not fit yet wait in its queue, in order. A request that can never fit raises
DoesNotFit before it starts. In mlx-lm's server, only this request fails.
"""
from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
import sys
import threading
import time
from collections import deque
from itertools import islice
from typing import Any, Callable, Iterator

import mlx_lm.models.cache as caches

from .._library import DoesNotFit
from .passes import recompute_trimmed, rewind
from .pool import Pool, PooledSequence
from .prompt import FlatKVCache, transferring

generation = importlib.import_module("mlx_lm.generate")  # the attribute mlx_lm.generate is a function, which hides the module
RETRY_PASSES = 64  # number of passes after which a blocked queue is tried again even if no running request has ended
IDLE_SECONDS = 0.01  # pause, in seconds, of a generator whose queue waits for pages of other threads


def flat_caches(cache: Any) -> Iterator[FlatKVCache]:
    """Yields the FlatKVCache objects of a prompt cache, including those inside CacheList objects."""
    for c in cache if isinstance(cache, (list, tuple)) else ():
        if isinstance(c, FlatKVCache):
            yield c
        else:
            yield from flat_caches(getattr(c, "caches", None))


def sequences_of(cache: Any) -> dict[PooledSequence, int]:
    """Returns the sequences of a prompt cache that is not batched, with their lengths."""
    return {c.seqs[0]: c._now()[0] for c in flat_caches(cache) if not c.batched}


def reserve_request(cache: Any, n_prompt: int, max_new_tokens: int, n_extra: int = 0) -> list[PooledSequence]:
    """Reserves pages for a request that continues a prompt cache, and returns its sequences.

    A negative max_new_tokens means that the number of tokens is unknown; only the prompt is reserved then. n_extra: tokens that are
    written temporarily, such as rejected draft tokens.
    """
    found = sequences_of(cache)
    for seq, length in found.items():
        seq.pool.check_request(length + n_prompt, max(max_new_tokens, 0))
        seq.finished = False
        seq.reserve(min(length + n_prompt + max(max_new_tokens, 0) + n_extra, seq.pool.max_tokens))
    return list(found)


# ---- single generation ----

def reserving(original: Callable[..., Any], make_prompt_cache: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps generate_step() or speculative_generate_step() to reserve the pages of the whole request before it starts."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(*args: Any, **named: Any) -> Iterator[Any]:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given = bound.arguments
        embeddings, draft = given.get("input_embeddings"), given.get("draft_model")
        if given.get("prompt_cache") is None:
            given["prompt_cache"] = make_prompt_cache(given["model"], given.get("max_kv_size"))
            if draft is not None:
                given["prompt_cache"] += make_prompt_cache(draft)
        n_prompt = len(embeddings if embeddings is not None else given["prompt"])
        n_extra = given.get("num_draft_tokens", 0) + 1 if draft is not None else 0
        seqs = reserve_request(given["prompt_cache"], n_prompt, given["max_tokens"], n_extra)
        try:
            yield from original(*bound.args, **bound.kwargs)
        finally:
            for seq in seqs:
                seq.finish()

    return generate


# ---- stored prompt caches ----

def remove_oldest(store: Any) -> list[PooledSequence]:
    """Removes the least recently used entry of an LRUPromptCache and returns its sequences.

    mlx-lm's server still refers to the prompt caches of the last responses in local variables, so removing the entry does not release
    its pages. The caller closes the sequences.
    """
    removed: list[Any] = []
    trie = getattr(store, "_trie", None)
    if trie is None:
        store.trim_to(n_sequences=len(store) - 1)
        return []

    def pop(*args: Any) -> Any:
        removed.append(type(trie).pop(trie, *args))
        return removed[-1]

    trie.pop = pop
    try:
        store.trim_to(n_sequences=len(store) - 1)
    finally:
        del trie.pop
    return [seq for entry in removed for seq in sequences_of(getattr(entry, "prompt_cache", None))]


# ---- batches ----

class _Discard(threading.local):
    """Whether prompt caches of finished requests are dropped, because the caller of batch_generate() does not want them."""

    active = False


_discard = _Discard()


def discarding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps batch_generate() to release the pages of a finished prompt before the next one is admitted."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def batch_generate(*args: Any, **named: Any) -> Any:
        previous = _discard.active
        _discard.active = not signature.bind(*args, **named).arguments.get("return_prompt_caches", False)
        try:
            return original(*args, **named)
        finally:
            _discard.active = previous

    return batch_generate


def _can_run(entry: tuple[Any, ...]) -> DoesNotFit | None:
    """Reserves the pages of a queued request. Returns the error if they are not available."""
    try:
        reserve_request(entry[3], sum(map(len, entry[1])), entry[2])
    except DoesNotFit as error:
        error.__traceback__ = error.__context__ = None  # the frames of a traceback would keep prompt caches alive
        return error
    return None


def _copy_if_shared(queue: Any, i: int) -> None:
    """Forks the prompt cache of a queued request if the caller still refers to it.

    mlx-lm copies prompt caches into a batch, so that the caller's prompt cache does not change.
    """
    entry = queue[i]
    if sys.getrefcount(entry[3]) > 2 and any(sequences_of(entry[3]).values()):  # two references are those of the entry and of getrefcount()
        try:
            queue[i] = (*entry[:3], copy.deepcopy(entry[3]), *entry[4:])
        except DoesNotFit:  # the batch uses the caller's prompt cache itself, so the caller must wait until the batch has ended
            pass


def _reserve_first(queue: Any, n: int) -> tuple[int, DoesNotFit | None]:
    """Reserves pages for up to n requests of the queue, in order, until one does not fit. Returns the number of admitted requests, and the error."""
    for i in range(min(n, len(queue))):
        _copy_if_shared(queue, i)
        error = _can_run(queue[i])
        if error is not None:
            return i, error
    return min(n, len(queue)), None


def _without_cache(generator: Any, entry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a queued request that computes its whole prompt again instead of holding pages while it waits."""
    uid, segments, max_tokens, cache, tokens, *rest = entry
    if not tokens or not sequences_of(cache):
        return entry
    segments = [list(tokens), *segments] if len(segments) == 1 else [list(tokens) + segments[0], *segments[1:]]
    return (uid, segments, max_tokens, caches.make_prompt_cache(generator.model, getattr(generator, "max_kv_size", None)), [], *rest)


class _Blocked:
    """A queue whose first request did not fit. It is tried again when a running request ends, or after RETRY_PASSES passes."""

    def __init__(self, generator: Any, error: DoesNotFit):
        self.error = error
        self.state = self.state_of(generator)
        self.n_skipped = 0

    @staticmethod
    def state_of(generator: Any) -> tuple[int, ...]:
        return generator._unprocessed_sequences[0][0], *generator._prompt_batch.uids, *generator._generation_batch.uids

    def still_blocked(self, generator: Any) -> bool:
        self.n_skipped += 1
        return len(self.state) > 1 and self.state_of(generator) == self.state and self.n_skipped < RETRY_PASSES


def _admit(generator: Any) -> tuple[int, DoesNotFit | None]:
    """Reserves pages for the first requests of the queue. Returns the number of admitted requests, and the error of the first one that does not fit."""
    blocked = getattr(generator, "_flatkv_blocked", None)
    if blocked is not None and blocked.still_blocked(generator):
        return 0, blocked.error
    n_free = min(generator.prefill_batch_size - len(generator._prompt_batch), generator.completion_batch_size - len(generator._generation_batch))
    n_admitted, error = _reserve_first(generator._unprocessed_sequences, n_free)
    if error is not None and n_admitted == 0 and not len(generator._prompt_batch) and not len(generator._generation_batch):
        # No running request will release pages, so drop the cached prefixes of waiting requests, that of the first request last.
        for n_kept in (1, 0):
            generator._unprocessed_sequences = deque(
                entry if i < n_kept else _without_cache(generator, entry) for i, entry in enumerate(generator._unprocessed_sequences))
            error = _can_run(generator._unprocessed_sequences[0])
            if error is None:
                n_admitted = 1
                break
    generator._flatkv_blocked = _Blocked(generator, error) if error is not None and n_admitted == 0 else None
    return n_admitted, error


def wrapped_batch_methods(pool_of: Callable[[Any, Any], Pool | None], before: Callable[[], None]) -> dict[tuple[type, str], Any]:
    """Returns replacements for methods of mlx-lm's batch classes.

    pool_of: returns the pool of a model and max_kv_size, or None. before: called before a BatchGenerator is created.
    """
    batch, prompts, decoding = generation.BatchGenerator, generation.PromptProcessingBatch, generation.GenerationBatch
    create, insert, step, extract = batch.__init__, batch.insert_segments, batch._next, batch.extract_cache
    next_both, next_generated = batch.next, batch.next_generated
    copy_batch, next_tokens = prompts._copy, decoding.next

    @functools.wraps(create)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        before()
        create(self, *args, **named)

    @functools.wraps(insert)
    def insert_segments(self: Any, segments: Any, max_tokens: Any = None, caches: Any = None, *args: Any, **named: Any) -> Any:
        pool = pool_of(self.model, getattr(self, "max_kv_size", None))
        for cache in caches or ():
            recompute_trimmed(cache)
        complete = all(option is None or len(option) == len(segments) for option in (max_tokens, caches))  # if false, mlx-lm raises an exception
        for i, prompt in enumerate(segments if complete else ()):
            if pool is None:
                break
            length = max(sequences_of(caches[i]).values(), default=0) if caches and caches[i] is not None else 0
            pool.check_request(length + sum(map(len, prompt)), max_tokens[i] if max_tokens else self.max_tokens, f"prompt {i}")
        return insert(self, segments, max_tokens, caches, *args, **named)

    @functools.wraps(step)
    def _next(self: Any) -> Any:
        queue = self._unprocessed_sequences
        if not queue:
            return step(self)
        del queue  # _admit() may replace it
        n_admitted, self._flatkv_error = _admit(self)
        queue = self._unprocessed_sequences
        waiting = list(islice(queue, n_admitted, None))
        for _ in waiting:
            queue.pop()
        try:
            return step(self)
        finally:
            queue.extend(waiting)

    @functools.wraps(next_both)
    def next_responses(self: Any) -> Any:
        responses = next_both(self)
        if not any(responses) and self._unprocessed_sequences:
            time.sleep(IDLE_SECONDS)
        return responses

    @functools.wraps(next_generated)
    def next_generated_responses(self: Any) -> Any:
        responses = next_generated(self)
        if not responses and self._unprocessed_sequences and getattr(self, "_flatkv_error", None) is not None:
            raise self._flatkv_error
        return responses

    @functools.wraps(extract)
    def extract_cache(self: Any, uids: Any) -> Any:
        """Omits sequences for which the pool has no space for a snapshot."""
        found: dict[Any, Any] = {}
        for uid in uids:
            try:
                found.update(extract(self, [uid]))
            except DoesNotFit as error:
                logging.debug("flatkv: no snapshot of sequence %s: %s", uid, error)
        return found

    @functools.wraps(copy_batch)
    def _copy(self: Any) -> Any:
        with transferring():  # split() assigns every sequence to one of the two batches
            return copy_batch(self)

    @functools.wraps(next_tokens)
    def next_batch(self: Any) -> Any:
        with transferring():  # the batch drops finished sequences after it extracts them
            responses = next_tokens(self)
        for response in responses if _discard.active else ():
            response.prompt_cache = None
        return responses

    fetch = caches.LRUPromptCache.fetch_nearest_cache

    @functools.wraps(fetch)
    def fetch_nearest_cache(self: Any, model: Any, tokens: Any) -> Any:
        """Restores a trimmed prompt cache to a position that needs no recomputation, and returns the tokens from there on."""
        try:
            cache, rest = fetch(self, model, tokens)
            rewound = rewind(cache) if cache is not None else None
            if rewound is None:
                return cache, rest
            n_kept, shorter = rewound[0], self._trie.search(model, tokens).shorter
            if shorter is not None and len(shorter) > n_kept:
                return copy.deepcopy(self._trie.get(model, shorter).prompt_cache), tokens[len(shorter):]
            return (cache, tokens[n_kept:]) if n_kept else (None, tokens)
        except DoesNotFit:  # a fork does not fit, so the prompt is computed again
            return None, tokens

    return {(batch, "__init__"): __init__, (batch, "insert_segments"): insert_segments, (batch, "_next"): _next, (batch, "next"): next_responses,
            (batch, "next_generated"): next_generated_responses, (batch, "extract_cache"): extract_cache, (prompts, "_copy"): _copy,
            (decoding, "next"): next_batch, (caches.LRUPromptCache, "fetch_nearest_cache"): fetch_nearest_cache}
