#!/usr/bin/env python3
"""Tests two servers behind HAProxy with the configuration of docs/fleet.md: requests with a common prefix use the same server, and no request fails
while a server is stopped.

usage: fleet_test.py <flatkv> [test...]     exits with 77 if HAProxy is not installed
"""
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from serve_test import BOOK, TREE, run, serving

HAPROXY = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def documented_configuration():
    with open(os.path.join(TREE, "docs/fleet.md"), encoding="utf-8") as file:
        return re.search(r"```haproxy\n(.*?)```", file.read(), re.DOTALL)[1]


def until_idle(control):
    """Waits until HAProxy has closed the sessions of all earlier requests, because open sessions count as load of their server."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(control)
            sock.sendall(b"show stat -1 4 -1\n")
            with sock.makefile("r", encoding="ascii") as answer:
                rows = [line.split(",") for line in answer.read().splitlines() if line and not line.startswith("#")]
        if rows and all(int(row[4]) == 0 for row in rows):
            return
        time.sleep(0.002)
    raise AssertionError("HAProxy does not become idle")


@contextlib.contextmanager
def balancing(*ports):
    """Runs HAProxy in front of two servers. Yields its port and the path of its control socket once it forwards requests."""
    port = free_port()
    text = documented_configuration()
    for written, real in (("8080", port), ("8101", ports[0]), ("8102", ports[1])):
        assert text.count(f"127.0.0.1:{written}") == 1, text
        text = text.replace(f"127.0.0.1:{written}", f"127.0.0.1:{real}")
    with tempfile.TemporaryDirectory(prefix="flatkv-fleet-") as folder, tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:
        control = os.path.join(folder, "control")
        file.write(text.replace("global\n", f"global\n  stats socket {control}\n"))
        file.flush()
        process = subprocess.Popen([HAPROXY, "-db", "-f", file.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 600
            while True:
                assert process.poll() is None and time.monotonic() < end, process.returncode
                with contextlib.suppress(OSError):
                    if ask(port, "GET", "/ready")[0] == 200:
                        break
                time.sleep(0.02)
            yield port, control
        finally:
            process.terminate()
            process.wait()


def ask(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def completion(prompt):
    return {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def requests_with_a_common_prefix_use_the_same_server():
    rng = random.Random(7)
    words = BOOK.split()[:4000]
    prefixes = [" ".join(rng.sample(words, 220)) for _ in range(6)]
    n_prompt = n_cached = 0
    servers = {}
    with serving("-c", "32K", "--server-name", "a") as a, serving("-c", "32K", "--server-name", "b") as b, balancing(a.port, b.port) as (port, control):
        for turn in range(5):
            for i in rng.sample(range(6), 6):
                until_idle(control)
                status, headers, data = ask(port, "POST", "/v1/completions", completion(f"{prefixes[i]} question {turn}"))
                assert status == 200, (status, data)
                usage = json.loads(data)["usage"]
                n_prompt += usage["prompt_tokens"]
                n_cached += usage["prompt_tokens_details"]["cached_tokens"]
                servers.setdefault(i, set()).add(headers["x-flatkv-server"])
        sessions = set()
        for i in range(8):
            until_idle(control)
            sessions.add(ask(port, "POST", "/v1/completions", completion(f"{i} of one session"), {"x-session-id": "s1"})[1]["x-flatkv-server"])
    print(f"{n_cached} of {n_prompt} prompt tokens cached ({n_cached / n_prompt:.3f}; at most 0.8 is possible)")
    assert n_cached / n_prompt >= 0.75, servers
    assert set().union(*servers.values()) == {"a", "b"} and len(sessions) == 1, (servers, sessions)


def no_request_fails_while_a_server_stops():
    with serving("-c", "32K", "--server-name", "a", "--drain-seconds", "3", "--busy-status", "503") as a, \
            serving("-c", "32K", "--server-name", "b", "--busy-status", "503") as b, balancing(a.port, b.port) as (port, _):
        def one(i):
            if i == 20:
                a.process.send_signal(signal.SIGTERM)
            status, headers, _ = ask(port, "POST", "/v1/completions", completion(f"request {i} of many"))
            return status, headers.get("x-flatkv-server")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(one, range(100)))
            assert a.process.wait(600) == 0
            answers += pool.map(one, range(100, 200))
        assert all(status == 200 for status, _ in answers), answers
        assert {name for _, name in answers[:20]} == {"a", "b"} and {name for _, name in answers[100:]} == {"b"}, answers


if __name__ == "__main__":
    if HAPROXY is None:
        print("skipped: haproxy is not installed")
        sys.exit(77)
    run([requests_with_a_common_prefix_use_the_same_server, no_request_fails_while_a_server_stops])
