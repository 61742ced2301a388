"""Runs models on the CPU with the flatkv runner, without mlx-lm."""
from __future__ import annotations

import codecs
import ctypes as C
import dataclasses
import json
import os
import time
from typing import Any, Iterable, Iterator

import numpy as np

from . import _abi
from ._config import ROTATIONS
from ._library import Error, Owner, check, choice, count, has_models, held, host
from .plan import Plan


def _need_models() -> None:
    if not has_models:
        raise Error("FKV_UNSUPPORTED", "flatkv was built without model support; install PCRE2, jansson and utf8proc with their headers, "
                    "then reinstall flatkv")


class Model(Owner):
    """Weights and vocabulary of a .gguf file or of a folder that contains config.json and .safetensors files."""

    def __init__(self, path: str | os.PathLike[str], *, n_threads: int = 0, plan_only: bool = False):
        _need_models()
        config = host.fkv_model_config_default()
        config.n_threads, config.plan_only = count("n_threads", n_threads), plan_only
        handle = C.c_void_p()
        check(host.fkv_model_load(os.fspath(path).encode(), C.addressof(config), C.addressof(handle)), path)
        self._own(handle.value or 0, host.fkv_model_close)
        self._about = _abi.fkv_model_info.from_address(host.fkv_model_about(handle))
        self.architecture: str = self._text("architecture")
        self.name: str = self._text("name")
        self.context: int = self._about.context
        self.n_layers: int = self._about.n_layers
        self.n_vocab: int = self._about.n_vocab
        self.end_tokens: list[int] = list(self._about.end[:self._about.n_end])
        self.has_chat: bool = self._about.has_chat

    def __repr__(self) -> str:
        if not self._close.alive:
            return "<flatkv.Model (closed)>"
        return f"<flatkv.Model {self.name or self.architecture!r}: {self.n_layers} layers, {self.n_vocab:,} tokens in the vocabulary, context {self.context:,}>"

    def _text(self, field: str) -> str:
        return (getattr(self._about, field) or b"").decode(errors="replace")

    def tokenize(self, text: str | bytes, *, bos: bool = True, special: bool = False) -> list[int]:
        """Returns the token ids of a text. bos: prepend the BOS token. special: parse special tokens."""
        raw = text.encode() if isinstance(text, str) else text
        flags = (_abi.FKV_TOKENIZE_BOS if bos else 0) | (_abi.FKV_TOKENIZE_SPECIAL if special else 0)
        return self._fill(lambda ids, capacity, n: host.fkv_tokenize(self._handle, raw, len(raw), flags, ids, capacity, n))

    def chat_tokens(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Returns the token ids of a conversation, formatted by the model's chat template.

        options: further template variables, such as tools or enable_thinking.
        """
        raw = json.dumps({"messages": messages, "add_generation_prompt": True, **options}).encode()
        now = C.c_int64(int(time.time()))
        return self._fill(lambda ids, capacity, n: host.fkv_chat_tokenize(self._handle, raw, len(raw), C.addressof(now), ids, capacity, n))

    @staticmethod
    def _fill(call: Any) -> list[int]:
        n = C.c_size_t()
        check(call(None, 0, C.addressof(n)))
        ids = np.empty(n.value, np.uint32)
        check(call(ids.ctypes.data, len(ids), C.addressof(n)))
        return ids.tolist()

    def text(self, tokens: Iterable[int]) -> str:
        """Returns the text of token ids. Invalid UTF-8 is replaced by U+FFFD."""
        return b"".join(self._bytes(t) for t in tokens).decode(errors="replace")

    def decoder(self) -> TextDecoder:
        """Returns a decoder that converts tokens to text one at a time."""
        return TextDecoder(self)

    def _bytes(self, token: int) -> bytes:
        n = C.c_size_t()
        at = host.fkv_token_text(self._handle, token, False, C.addressof(n))
        return at[:n.value] if at else b""

    def plan(self, max_tokens: int = 0, **options: Any) -> Plan:
        """Returns the plan of a runner's cache, without activations. Runner.total_bytes includes activations."""
        config, made = _runner_config(max_tokens, **options), _abi.fkv_runner_plan()
        check(host.fkv_runner_plan_make(self._handle, C.addressof(config), C.addressof(made)))
        config.max_tokens = config.max_tokens or self.context
        return Plan._of(made.cache, config)


class TextDecoder:
    """Converts tokens to text one at a time. Characters whose UTF-8 bytes are split over several tokens are returned once complete."""

    def __init__(self, model: Model):
        self._model = model
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """Returns the text that this token completes, which can be empty."""
        return self._utf8.decode(self._model._bytes(token))

    def finish(self) -> str:
        """Returns U+FFFD if the last character is incomplete, otherwise an empty string."""
        return self._utf8.decode(b"", final=True)


def _runner_config(max_tokens: int, *, codec: str = "sealed", rotate: str | None = "kv", max_seqs: int = 1, max_step_tokens: int = 512,
                   max_kv: int = 0, n_sinks: int = 0, n_threads: int = 0, lazy: bool = False, memory_limit: int = 0) -> Any:
    config = host.fkv_runner_config_default()
    where = C.addressof(config)
    check(host.fkv_codec_parse(codec.encode(), where + _abi.fkv_runner_config.k.offset, where + _abi.fkv_runner_config.v.offset))
    config.rotate, config.lazy, config.memory_limit = choice("rotate", rotate, ROTATIONS), lazy, count("memory_limit", memory_limit, 64)
    for name in ("max_tokens", "max_seqs", "max_step_tokens", "max_kv", "n_sinks", "n_threads"):
        setattr(config, name, count(name, locals()[name]))
    return config


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 selects the most likely token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


class Runner(Owner):
    """A model with a cache and activation buffers. The constructor reserves all memory."""

    def __init__(self, model: Model, max_tokens: int = 0, **options: Any):
        config, handle, made = _runner_config(max_tokens, **options), C.c_void_p(), _abi.fkv_runner_plan()
        check(host.fkv_runner_plan_make(model._handle, C.addressof(config), C.addressof(made)))
        check(host.fkv_runner_open(model._handle, C.addressof(config), C.addressof(handle)))
        self.model = model
        self.total_bytes: int = made.total_bytes
        self.max_step_tokens: int = config.max_step_tokens
        self._max_tokens = config.max_tokens or model.context
        self._own(handle.value or 0, host.fkv_runner_close)

    @property
    def _cache(self) -> C.c_void_p:
        return C.c_void_p(host.fkv_runner_cache(self._handle))

    def forward(self, seq: int, tokens: list[int]) -> np.ndarray:
        """Appends tokens to the sequence and returns the logits of the last token."""
        logits, _ = C.c_void_p(), self.model._handle  # accessing _handle raises BadCall if the model is closed
        for at in range(0, len(tokens), self.max_step_tokens):
            ids = np.array(tokens[at:at + self.max_step_tokens], np.uint32)
            last = at + len(ids) == len(tokens)
            row = _abi.fkv_tokens(seq, ids.ctypes.data, len(ids), _abi.FKV_LOGITS_LAST if last else _abi.FKV_LOGITS_NONE)
            check(host.fkv_runner_forward(self._handle, C.addressof(row), 1, C.addressof(logits)))
        return np.ctypeslib.as_array((C.c_float * self.model.n_vocab).from_address(logits.value or 0))

    def stream(self, tokens: list[int], max_new_tokens: int = 128, sampling: Sampling = Sampling()) -> Iterator[int]:
        """Yields generated token ids until an end token or max_new_tokens."""
        if not tokens:
            raise ValueError("tokens is empty; pass at least one prompt token")
        total = min(len(tokens) + max_new_tokens, self._max_tokens)
        wanted, seq = _abi.fkv_seq_config(total, 0, None, 0), C.c_uint64()
        settings = _abi.fkv_sampler_config(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed)
        sampler = C.c_void_p()
        check(host.fkv_sampler_open(C.addressof(settings), self.model.n_vocab, C.addressof(sampler)))
        try:
            check(held.fkv_seq_open(self._cache, C.addressof(wanted), C.addressof(seq), None))
            inputs, token = tokens, C.c_uint32()
            for _ in range(max_new_tokens):
                logits = self.forward(seq.value, inputs)
                check(host.fkv_sample(sampler, logits.ctypes.data, C.addressof(token)))
                if token.value in self.model.end_tokens:
                    return
                yield token.value
                inputs = [token.value]
        finally:
            host.fkv_sampler_close(sampler)
            if seq.value and self._close.alive:
                held.fkv_seq_close(self._cache, seq.value)


def generate(model: Model | str | os.PathLike[str], prompt: str | list[dict[str, Any]], *, max_new_tokens: int = 128,
             sampling: Sampling = Sampling(), max_tokens: int = 0, **options: Any) -> str:
    """Returns generated text on the CPU. prompt: a string, or a conversation as a list of messages."""
    loaded = model if isinstance(model, Model) else Model(model)
    tokens = loaded.tokenize(prompt) if isinstance(prompt, str) else loaded.chat_tokens(prompt)
    with Runner(loaded, max_tokens or min(loaded.context, len(tokens) + max_new_tokens), **options) as runner:
        return loaded.text(list(runner.stream(tokens, max_new_tokens, sampling)))
