"""Tests the HTTP server of mlx-lm with flatkv installed."""
import argparse
import concurrent.futures
import contextlib
import json
import threading
import urllib.error
import urllib.request

import pytest

pytest.importorskip("mlx_lm")
import mlx_lm.models.cache as caches  # noqa: E402
from mlx_lm.server import APIHandler, ResponseGenerator  # noqa: E402

import flatkv  # noqa: E402
from conftest import llama, tokenizer  # noqa: E402
from flatkv.lm.server import HTTPServer  # noqa: E402

N_REQUESTS = 100
PAGE = 64
PREFIX = "Every request of this test starts with this sentence and ends with a different question. " * 6


class Arguments(argparse.Namespace):
    """Server options. Options that a test does not set are None, which supports several versions of mlx-lm."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


class Provider:
    """Replaces mlx-lm's ModelProvider with a model that is created in memory."""

    def __init__(self):
        self.model, self.tokenizer = llama(layers=1, vocab=300), tokenizer()
        self.model_key, self.draft_model, self.draft_model_key, self.is_batchable = ("local", None), None, None, True
        self.cli_args = Arguments(
            num_draft_tokens=3, temp=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=512, chat_template_args={}, decode_concurrency=32,
            prompt_concurrency=8, prefill_step_size=512, prompt_cache_bytes=1 << 62, allowed_origins=["*"])

    def load(self, *_):
        return self.model, self.tokenizer

    load_default = load

    def reset(self):
        self.model = self.tokenizer = None


def start(generator):
    """Starts an HTTP server for a ResponseGenerator and returns it."""
    httpd = HTTPServer(("localhost", 0), lambda *a, **n: APIHandler(generator, *a, **n))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    return httpd


def stop(httpd, generator):
    """Stops both."""
    httpd.shutdown()
    httpd.server_close()
    generator.stop_and_join()


@contextlib.contextmanager
def running_server(max_prompts, **options):
    """Installs flatkv, starts a server that stores up to max_prompts prompt caches, and yields its port."""
    flatkv.install(**options)
    generator = ResponseGenerator(Provider(), caches.LRUPromptCache(max_size=max_prompts))
    httpd = start(generator)
    try:
        yield httpd.server_port
    finally:
        stop(httpd, generator)
        flatkv.uninstall()


def complete(port, prompt, max_tokens=4, timeout=120):
    """Returns the HTTP status and the body of a completion request."""
    body = json.dumps({"model": "default_model", "prompt": prompt, "max_tokens": max_tokens}).encode()
    request = urllib.request.Request(f"http://localhost:{port}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def statuses(port, prompts, max_tokens=4):
    """Sends all prompts concurrently and returns the HTTP statuses."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as clients:
        return [status for status, _ in clients.map(lambda p: complete(port, p, max_tokens), prompts)]


def is_healthy(port):
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=10) as response:
            return response.status == 200
    except urllib.error.HTTPError:
        return False


def ask(port, question):
    status, body = complete(port, PREFIX + question)
    assert status == 200, body
    return body["usage"]["completion_tokens"]


def test_a_common_prefix_is_stored_once():
    with running_server(4 * N_REQUESTS, max_tokens=65536, codec="8/4", max_seqs=4 * N_REQUESTS, max_step_tokens=8192) as server:
        assert ask(server, "first") > 0
        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            n_tokens = list(clients.map(lambda i: ask(server, f"question {i}"), range(N_REQUESTS)))
        assert len(n_tokens) == N_REQUESTS and min(n_tokens) > 0
        pool = flatkv.lm.pools()[0]
        pages = pool.stats.groups[0]
        prefix = len(PREFIX) // PAGE
        assert pages.shared >= prefix
        assert pages.held <= prefix + 4 * (N_REQUESTS + 1), "each prompt must add only the pages of its own suffix"
        assert pool.consistent()


def test_default_options_serve_concurrent_requests():
    with running_server(10, max_tokens=131072) as server:
        assert statuses(server, [f"short request {i}" for i in range(10)]) == [200] * 10
        assert statuses(server, [f"{i} " + "long request " * 76 for i in range(8)]) == [200] * 8
        assert statuses(server, [f"request number {i}" for i in range(40)]) == [200] * 40
        assert is_healthy(server) and flatkv.lm.pools()[0].consistent()


def test_a_prompt_that_can_never_fit_fails_alone():
    with running_server(10, max_tokens=2048) as server:
        with concurrent.futures.ThreadPoolExecutor(6) as clients:
            others = [clients.submit(complete, server, f"request {i}", 40) for i in range(5)]
            status, body = complete(server, "x" * 3000)
            assert status == 400
            assert "3000 tokens" in json.loads(body)["error"]["message"] and "flatkv.install()" in body
            assert [f.result()[0] for f in others] == [200] * 5
        assert complete(server, "later request")[0] == 200
        status, body = complete(server, "y" * 2000, max_tokens=100000)
        assert status == 200 and body["usage"]["completion_tokens"] <= 48
        assert is_healthy(server)


def test_requests_wait_for_pages_and_cached_prefixes_are_recomputed():
    with running_server(10, max_tokens=1024, max_seqs=4) as server:
        assert statuses(server, [f"{PREFIX[:300]} {i}" for i in range(12)], 20) == [200] * 12
        assert statuses(server, [f"{i} " + "z" * 700 for i in range(4)], 10) == [200] * 4
        assert is_healthy(server) and flatkv.lm.pools()[0].consistent()
