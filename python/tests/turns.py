"""Counts the tokens that mlx-lm's server computes in a conversation with a hybrid model, with flatkv and without.

usage: turns.py [FAMILY...] [--turns N] [--own-turns N] [--tokens N] [--json FILE]

Every turn appends a message of --tokens tokens to the conversation. The message ends with the TAIL tokens that begin a reply. In the
next turn, the tail and the reply are rendered differently, as by chat templates that remove reasoning, so every turn diverges from
the stored prompt cache TAIL tokens before the end of the previous prompt. The exit status
is 1 if a turn with flatkv computes more than 80 tokens in addition to its new ones, or if a reply differs from that of mlx-lm.
"""
import argparse
import json
import os
import pathlib
import random
import sys
import time

import census_models
import mlx.core as mx
import mlx_lm.models.cache as caches
import pytest
import test_hybrid
import test_server
from mlx_lm.server import ResponseGenerator

import flatkv

MARGIN = 80  # tokens that a turn may compute in addition to the new ones
REPLY = 8  # generated tokens
TAIL = 14


class Counter:
    """Counts the tokens in all calls of a model class."""

    def __init__(self, model):
        self.cls, self.call, self.n = type(model), type(model).__call__, 0

        def counted(model, tokens, *args, **named):
            self.n += tokens.size
            return self.call(model, tokens, *args, **named)

        self.cls.__call__ = counted

    def stop(self):
        self.cls.__call__ = self.call


def small_model(family):
    """Returns a hybrid model with few and narrow layers, because MLX's CPU backend computes long prompts slowly."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "num_hidden_layers": 4,
                            "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                            "num_experts": 2, "num_experts_per_tok": 2}.items():
            patch.setitem(census_models.SMALL, name, value)
        patch.setitem(census_models.LFM2, "layer_types", ["", "full_attention", "", ""])
        patch.setitem(census_models.LFM2, "block_dim", 64)
        return test_hybrid.hybrid(family)


def converse(family, n_turns, n_tokens):
    """Returns the number of computed tokens and the reply of every turn. The conversation does not depend on replies."""
    provider = test_server.Provider()
    provider.model = small_model(family)
    counter = Counter(provider.model)
    chance, prompt, found = random.Random(1), "", []
    generator = ResponseGenerator(provider, caches.LRUPromptCache(max_size=10))
    httpd = test_server.start(generator)
    try:
        for turn in range(n_turns):
            prompt += "".join(chance.choice("abcdefgh ") for _ in range(n_tokens - TAIL - (TAIL + REPLY if turn else 0)))
            before, began = counter.n, time.monotonic()
            status, body = test_server.complete(httpd.server_port, prompt + "<" * TAIL, REPLY, timeout=3600)
            assert status == 200, body
            found.append({"prompt": len(prompt) + TAIL, "computed": counter.n - before - (REPLY - 1), "seconds": round(time.monotonic() - began, 2),
                          "reply": body["choices"][0]["text"]})
            prompt += "X" * (TAIL + REPLY)
    finally:
        test_server.stop(httpd, generator)
        counter.stop()
    return found


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("families", nargs="*", default=["lfm2", "qwen3_next"])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--own-turns", type=int, help="turns of mlx-lm alone (default: all)")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    result, good = {}, True
    for family in options.families:
        own = converse(family, options.turns if options.own_turns is None else options.own_turns, options.tokens)
        flatkv.install(max_tokens=(options.turns + 2) * options.tokens, codec="16/16", max_seqs=12)
        flat = converse(family, options.turns, options.tokens)
        flatkv.uninstall()
        same = [a["reply"] == b["reply"] for a, b in zip(own, flat)]
        result[family] = {"flatkv": [t["computed"] for t in flat], "mlx-lm": [t["computed"] for t in own], "seconds": sum(t["seconds"] for t in flat),
                          "seconds_mlx_lm": sum(t["seconds"] for t in own), "same_replies": sum(same)}
        good = good and all(same) and all(t["computed"] <= options.tokens + MARGIN for t in flat)
        print(family, result[family], flush=True)
        mx.clear_cache()
    if options.json:
        options.json.write_text(json.dumps({"turns": options.turns, "tokens": options.tokens, "good": good, "families": result}, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # skips the destructors of MLX's threads, which abort the process
