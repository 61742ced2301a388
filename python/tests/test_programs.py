"""Tests `python -m flatkv server`, `chat` and `generate`, and pools that are sized for the machine."""
import argparse
import concurrent.futures
import ctypes
import http.client
import importlib
import io
import json
import re
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("mlx_lm")
import mlx_lm.models.cache as caches  # noqa: E402

import flatkv  # noqa: E402
import soak_server  # noqa: E402
from conftest import gemma3, llama  # noqa: E402
from flatkv import programs  # noqa: E402
from flatkv.lm import sizing  # noqa: E402

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a small model with a chat template."""
    made = soak_server.save_model(tmp_path_factory.mktemp("model") / "llama")
    (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return made


def flatkv_command(*arguments):
    return [sys.executable, "-m", "flatkv", *map(str, arguments)]


def run(capsys, name, *arguments):
    """Runs a command in this process. Returns its exit status and its output on stdout and stderr."""
    try:
        status = programs.main(name, list(map(str, arguments)))
    except SystemExit as end:
        status = end.code
    assert not flatkv.installed()
    return status, *capsys.readouterr()


def test_generate_prints_the_plan_and_the_text_of_mlx_lm(folder, capsys, monkeypatch):
    options = ["--model", folder, "--prompt", "The vault number of Vorselzu is", "--max-tokens", 6, "--verbose", "False"]
    status, printed, errors = run(capsys, "generate", *options, "--kv-tokens", "2K", "--codec", "16/16")
    assert status == 0
    assert re.search(r"flatkv: [\d.]+ MB reserved for 2,048 tokens in up to 32 sequences \([\d,]+ bytes per token, codec 16/16", errors)
    monkeypatch.setattr(sys, "argv", ["generate", *map(str, options)])
    importlib.import_module("mlx_lm.generate").main()
    assert capsys.readouterr().out == printed != ""


def test_chat_stays_within_the_given_memory(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nq\n"))
    status, _, errors = run(capsys, "chat", "--model", folder, "--max-tokens", 4, "--memory", "6M")
    assert status == 0
    n_bytes, n_tokens = re.search(r"flatkv: ([\d.]+) MB reserved for ([\d,]+) tokens", errors).groups()
    assert 5.9 < float(n_bytes) * 1e6 / 2**20 <= 6 and int(n_tokens.replace(",", "")) > 1024


@pytest.mark.parametrize("arguments,message", [
    (["generate", "--codec", "x"], 'unknown codec "x"'), (["chat", "--kv-tokens", "none"], "expected a positive number such as 4096, 128K or 8G")])
def test_wrong_arguments_are_reported(capsys, arguments, message):
    status, _, errors = run(capsys, *arguments)
    assert status == 2 and message in errors


def test_an_unknown_command_is_reported(tmp_path):
    done = subprocess.run(flatkv_command("serve"), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "unknown command 'serve'" in done.stderr


def test_a_prompt_that_does_not_fit_ends_the_command_with_a_message(folder, capsys):
    status, _, errors = run(capsys, "generate", "--model", folder, "--prompt", "x" * 500, "--kv-tokens", 256)
    assert status == 1 and "flatkv: the prompt has 500 tokens" in errors and "--kv-tokens" in errors


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def request(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


def test_the_server_rejects_long_prompts_with_400_and_accepts_many_connections(folder, tmp_path):
    port = free_port()
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(flatkv_command("server", "--model", folder, "--port", port, "--kv-tokens", 1024), cwd=tmp_path, stdout=log, stderr=log)
    try:
        for _ in range(300):
            try:
                if request(port, "GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.1)
        status, body = request(port, "POST", "/v1/completions", {"prompt": "x" * 2000, "max_tokens": 4})
        assert status == 400
        error = json.loads(body)["error"]
        assert "2000 tokens" in error["message"] and error["type"] == "invalid_request_error" and error["code"] == "context_length_exceeded"

        def ask(i):
            return request(port, "POST", "/v1/completions", {"prompt": f"request {i} " + "y" * (3000 if i % 10 == 9 else i), "max_tokens": 2})[0]

        with concurrent.futures.ThreadPoolExecutor(40) as clients:
            assert list(clients.map(ask, range(40))) == ([200] * 9 + [400]) * 4
        assert request(port, "GET", "/health")[0] == 200
        assert "flatkv: " in (tmp_path / "log").read_text(encoding="utf-8")
    finally:
        server.terminate()
        server.wait()


#: prints whether a block of 8 MiB is allocated on the heap after a larger one was freed, which is the default of glibc
LARGE_BLOCK = """
import ctypes
from flatkv import malloc
assert malloc.return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(24 << 20))
block = libc.malloc(8 << 20)
heaps = [line.split()[0].split("-") for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
print(any(int(first, 16) <= block < int(end, 16) for first, end in heaps))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
def test_large_blocks_are_not_allocated_on_the_heap():
    assert subprocess.run([sys.executable, "-c", LARGE_BLOCK], capture_output=True, text=True, check=True).stdout == "False\n"


def test_counts():
    assert [programs.parse_count(text) for text in ("512", "4K", "1.5g", "2GiB")] == [512, 4096, 3 << 29, 2 << 30]
    for wrong in ("", "K", "-1", "0", "1X", "1e9"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a positive number"):
            programs.parse_count(wrong)


def test_a_pool_without_max_tokens_is_sized_for_the_model_and_the_memory(monkeypatch):
    model = llama(layers=1)  # maximum sequence length: 32768 tokens
    assert sizing.context_length(model) == 32768 and sizing.context_length(object()) == sizing.DEFAULT_CONTEXT
    flatkv.install(max_contexts=2)
    try:
        caches.make_prompt_cache(model)
        assert flatkv.lm.pools()[0].max_tokens == 2 * 32768
    finally:
        flatkv.uninstall()
    for make in (llama, gemma3):
        monkeypatch.setattr(sizing, "available_memory", lambda: 40 << 20)
        flatkv.install()
        try:
            kept = make()  # keeps the model alive, because the pool closes when its model is deleted
            caches.make_prompt_cache(kept)
            pool, = flatkv.lm.pools()
            assert 19 << 20 < pool.plan.total_bytes <= 20 << 20
        finally:
            flatkv.uninstall()
    monkeypatch.setattr(sizing, "available_memory", lambda: 1 << 20)
    flatkv.install()
    try:
        with pytest.raises(flatkv.DoesNotFit, match=r"a pool of 1024 tokens needs [\d.]+ MB, but only 0.52 MB can be reserved"):
            caches.make_prompt_cache(model)
    finally:
        flatkv.uninstall()
