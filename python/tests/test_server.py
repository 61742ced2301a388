"""mlx-lm's HTTP server over flatkv: many requests with one beginning."""
import argparse
import concurrent.futures
import http.server
import json
import threading
import urllib.request

import pytest

pytest.importorskip("mlx_lm")
import mlx_lm.models.cache as caches  # noqa: E402
from mlx_lm.server import APIHandler, ResponseGenerator  # noqa: E402

import flatkv  # noqa: E402
from conftest import llama, tokenizer  # noqa: E402

N_REQUESTS = 100
PAGE = 64
PREFIX = "Every request of this test begins with these words, and asks something of its own at the end. " * 6


class Arguments(argparse.Namespace):
    """Options of the server; those that a test does not name, of whatever version, are not given."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


class Provider:
    """What the server asks of a model that is loaded: mlx-lm's ModelProvider without files."""

    def __init__(self):
        self.model, self.tokenizer = llama(vocab=300), tokenizer()
        self.model_key, self.draft_model, self.draft_model_key, self.is_batchable = ("local", None), None, None, True
        self.cli_args = Arguments(
            num_draft_tokens=3, temp=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=512, chat_template_args={}, decode_concurrency=32,
            prompt_concurrency=8, prefill_step_size=512, prompt_cache_bytes=1 << 62, allowed_origins=["*"])

    def load(self, *_):
        return self.model, self.tokenizer

    load_default = load


@pytest.fixture
def server():
    """The port of a server that keeps every prompt."""
    flatkv.install(max_tokens=65536, codec="8/4", max_seqs=4 * N_REQUESTS, max_step_tokens=8192)
    generator = ResponseGenerator(Provider(), caches.LRUPromptCache(max_size=4 * N_REQUESTS))
    httpd = http.server.ThreadingHTTPServer(("localhost", 0), lambda *a, **n: APIHandler(generator, *a, **n))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield httpd.server_port
    httpd.shutdown()
    httpd.server_close()
    thread.join()
    generator.stop_and_join()
    flatkv.uninstall()


def ask(port, question):
    body = json.dumps({"model": "default_model", "prompt": PREFIX + question, "max_tokens": 4}).encode()
    request = urllib.request.Request(f"http://localhost:{port}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def test_a_common_prefix_is_held_once(server):
    assert ask(server, "first") > 0
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda i: ask(server, f"question {i}"), range(N_REQUESTS)))
    assert len(answers) == N_REQUESTS and min(answers) > 0
    pool = flatkv.lm.pools()[0]
    pages = pool.stats.groups[0]
    prefix = len(PREFIX) // PAGE
    assert pages.shared >= prefix
    assert pages.held <= prefix + 4 * (N_REQUESTS + 1), "each prompt has its own end and no more"
    assert pool.consistent()
