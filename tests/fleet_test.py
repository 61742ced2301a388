#!/usr/bin/env python3
"""Tests several servers: behind HAProxy with the configuration of docs/fleet.md, and with prefixes shared through Redis.

usage: fleet_test.py <flatkv> [test...]     exits with 77 if HAProxy or Redis is not installed

FKV_REDIS_SERVER is the path of the server program to test with. The default is redis-server or, if it is not installed, valkey-server.
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

try:
    import yaml
except ImportError:
    yaml = None

from serve_test import BOOK, SANITIZED, TREE, check_resident_growth, run, serving

PATHS = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
HAPROXY = shutil.which("haproxy", path=PATHS)
OPENSSL = shutil.which("openssl", path=PATHS)
REDIS = os.environ.get("FKV_REDIS_SERVER") or shutil.which("redis-server", path=PATHS) or shutil.which("valkey-server", path=PATHS)


def skip(program):
    print(f"skipped: {program} is not installed")
    sys.exit(77)


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


def start_balancer(folder, control, ports):
    """Starts HAProxy on a free port. Returns the process and the port, or None if HAProxy exited, which happens if another program took the port first."""
    port = free_port()
    text = documented_configuration()
    for written, real in (("8080", port), ("8101", ports[0]), ("8102", ports[1])):
        assert text.count(f"127.0.0.1:{written}") == 1, text
        text = text.replace(f"127.0.0.1:{written}", f"127.0.0.1:{real}")
    path = os.path.join(folder, "haproxy.cfg")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text.replace("global\n", f"global\n  stats socket {control}\n"))
    process = subprocess.Popen([HAPROXY, "-db", "-f", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 600
    while process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if ask(port, "GET", "/ready")[0] == 200 and os.path.exists(control):
                return process, port
        if time.monotonic() >= end:
            process.kill()
            raise AssertionError("HAProxy does not forward requests")
        time.sleep(0.02)
    return None


@contextlib.contextmanager
def balancing(*ports):
    """Runs HAProxy in front of two servers. Yields its port and the path of its control socket once it forwards requests."""
    with tempfile.TemporaryDirectory(prefix="flatkv-fleet-") as folder:
        control = os.path.join(folder, "control")
        started = next(filter(None, (start_balancer(folder, control, ports) for _ in range(5))), None)
        assert started is not None, "HAProxy exited after every start"
        process, port = started
        try:
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
    if HAPROXY is None:
        skip("haproxy")
    rng = random.Random(7)
    words = BOOK.split()[:4000]
    n_words, least = (100, 0.65) if SANITIZED else (220, 0.75)  # with short prefixes, a larger share of the prompt is not a full page
    prefixes = [" ".join(rng.sample(words, n_words)) for _ in range(6)]
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
    assert n_cached / n_prompt >= least, servers
    assert set().union(*servers.values()) == {"a", "b"} and len(sessions) == 1, (servers, sessions)


def compose_file_has_the_documented_configuration():
    if HAPROXY is None or yaml is None:
        skip("haproxy or PyYAML")
    with open(os.path.join(TREE, "docs/compose.yaml"), encoding="utf-8") as file:
        compose = yaml.safe_load(file)
    text = compose["configs"]["haproxy"]["content"]
    backend = text[text.index("backend"):].replace(" a:8080 ", " 127.0.0.1:8101 ").replace(" b:8080 ", " 127.0.0.1:8102 ")
    documented = re.sub(r"  #.*\n", "", documented_configuration())
    assert backend == documented[documented.index("backend"):], backend
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:  # container names cannot be resolved on this machine
        file.write(text[:text.index("backend")] + backend)
        file.flush()
        subprocess.run([HAPROXY, "-c", "-f", file.name], check=True, capture_output=True, timeout=600)
    known = subprocess.run([sys.argv[1], "serve", "--help"], check=True, capture_output=True, text=True, timeout=600).stdout
    for name in ("a", "b"):
        command = compose["services"][name]["command"]
        assert all(word in known for word in command if word.startswith("--")), command


def no_request_fails_while_a_server_stops():
    if HAPROXY is None:
        skip("haproxy")
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


class Redis:
    """A Redis server on a Unix socket in a temporary folder."""

    def __init__(self, *options, wrapper=()):
        if REDIS is None:
            skip("redis-server")
        self.wrapper = wrapper
        self.folder = tempfile.TemporaryDirectory(prefix="flatkv-redis-")
        self.path = os.path.join(self.folder.name, "socket")
        self.options = options
        self.start()

    def start(self):
        self.process = subprocess.Popen([*self.wrapper, REDIS, "--port", "0", "--unixsocket", self.path, "--save", "", "--dir", self.folder.name, "--maxmemory", "256mb",
                                         "--maxmemory-policy", "volatile-ttl", *self.options], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 600
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if self.command("PING").startswith((b"+PONG", b"-NOAUTH")):
                    return
            time.sleep(0.02)
        raise AssertionError("Redis does not start")

    def command(self, *words):
        """Sends a command and returns the first line of the reply, or the value of a bulk string."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self.path)
            parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
            sock.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
            with sock.makefile("rb") as file:
                line = file.readline().rstrip()
                if line.startswith(b"*"):
                    return [file.read(int(file.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
                return file.read(int(line[1:])) if line.startswith(b"$") and line != b"$-1" else line

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    @property
    def url(self):
        return f"redis://unix:{self.path}"


@contextlib.contextmanager
def redis_server(*options, wrapper=()):
    redis = Redis(*options, wrapper=wrapper)
    try:
        yield redis
    finally:
        redis.stop()
        redis.folder.cleanup()


def serving_redis(redis, *options):
    """Serves with a shared store. The timeout is long, because the machine may be busy."""
    return serving("-c", "8K", "--prefix-redis", redis.url, "--prefix-timeout", "20000", *options)


PROMPT = BOOK[5000:5350 if SANITIZED else 5700]


def text_and_cached(server, prompt=PROMPT):
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, headers, data = server.raw("POST", "/v1/completions", body)
    assert status == 200, data
    return json.loads(data)["choices"][0]["text"], int(headers["x-flatkv-cached-tokens"])


def until_written(server, n):
    return server.until(lambda f: f["prefix_store_written_pages_total"] >= n, "pages are not written")


def second_server_answers_from_the_pages_of_the_first():
    with serving("-c", "8K") as alone:
        expected, _ = text_and_cached(alone)
    n_pages = (len(PROMPT) - 1) // 64
    with redis_server() as redis:
        with serving_redis(redis) as first:
            assert text_and_cached(first) == (expected, 0)
            until_written(first, n_pages)
        with serving_redis(redis) as second, serving_redis(redis) as third:
            for server in (second, third):
                text, cached = text_and_cached(server)
                assert text == expected and cached >= 0.95 * n_pages * 64, (text, cached)
                metrics = server.metrics()
                assert metrics["prefix_store_refused_values_total"] == 0 and metrics["prefix_store_damaged_pages_total"] == 0, metrics
        names = redis.command("KEYS", "*")
        assert len(names) >= n_pages and all(re.fullmatch(rb"fkv:1:[0-9a-f]{64}", name) for name in names), names[:3]
        lifetimes = sorted(int(redis.command("PTTL", name)[1:]) for name in names)
        assert lifetimes[-1] <= 24 * 3600 * 1000 and lifetimes[-1] - lifetimes[0] >= (n_pages - 1) * 1000 - 500, lifetimes
        value = redis.command("GET", names[0])
        assert value.startswith(b"FKVR\1\0\0\0") and PROMPT[:16].encode() not in value


def changed_values_are_refused_and_computed():
    with redis_server() as redis:
        with serving_redis(redis) as first:
            expected, _ = text_and_cached(first)
            until_written(first, (len(PROMPT) - 1) // 64)
        names = redis.command("KEYS", "*")
        values = {name: redis.command("GET", name) for name in names}
        rng = random.Random(3)

        def flipped(value):
            at = rng.randrange(len(value))
            return value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1:]
        changes = (lambda v: flipped(v), lambda v: v[:len(v) // 2], lambda v: v + b"x", lambda v: values[names[0]][::-1], lambda v: b"",
                   lambda v: v[:8] + bytes(len(v) - 8))
        for change in changes:
            for name in names:
                redis.command("SET", name, change(values[name]))
            with serving_redis(redis) as server:
                text, cached = text_and_cached(server)
                assert (text, cached) == (expected, 0), (text, cached)
        for i, name in enumerate(names):  # stores values under the keys of other pages
            redis.command("SET", name, values[names[i - 1]])
        with serving_redis(redis) as server:
            assert text_and_cached(server) == (expected, 0)
            assert server.metrics()["prefix_store_refused_values_total"] > 0
        for name in names:
            redis.command("SET", name, values[name])
        with tempfile.NamedTemporaryFile("wb") as secret:  # reads pages that were encrypted with another secret
            secret.write(b"0123456789abcdef")
            secret.flush()
            with serving_redis(redis, "--prefix-secret-file", secret.name) as server:
                assert text_and_cached(server) == (expected, 0)
        with serving_redis(redis) as server:
            assert text_and_cached(server)[1] > 0


def until_used(server, name):
    """Sends new prompts until a page is written. A busy machine may miss the deadline of a write."""
    written = server.metrics()["prefix_store_written_pages_total"]
    end = time.monotonic() + 600
    for i in range(10**6):
        assert text_and_cached(server, f"{i} {name} {PROMPT}")[0]
        if server.metrics()["prefix_store_written_pages_total"] > written:
            return
        assert time.monotonic() < end, "pages are not written"


def requests_succeed_while_redis_hangs_or_dies():
    with redis_server() as redis, serving_redis(redis, "--prefix-timeout", "500") as server:
        expected, _ = text_and_cached(server)
        until_written(server, (len(PROMPT) - 1) // 64)
        before = server.metrics()
        redis.process.send_signal(signal.SIGSTOP)
        for i in range(6):
            assert text_and_cached(server, f"{i} {PROMPT}")[0], i
        server.until(lambda f: f["prefix_store_unavailable_servers"] == 1, "a hung Redis server stays in use")
        redis.process.send_signal(signal.SIGCONT)
        server.until(lambda f: f["prefix_store_unavailable_servers"] == 0, "the server is not used again")
        until_used(server, "hung")
        for i in range(3):
            redis.process.kill()
            redis.process.wait()
            assert text_and_cached(server, f"{i} other {PROMPT}")[0]
            server.until(lambda f: f["prefix_store_unavailable_servers"] == 1, "a killed Redis server stays in use")
            redis.start()
            server.until(lambda f: f["prefix_store_unavailable_servers"] == 0, "the server is not used again")
            until_used(server, f"dead {i}")
        assert text_and_cached(server)[0] == expected
        after = server.metrics()
        assert after["planned_bytes"] == before["planned_bytes"], (before, after)
        check_resident_growth(before, after, 16 << 20)
        assert after['request_success_total{finished_reason="error"}'] == 0
        errors = server.stop()
        assert errors.count("no reply before the deadline") >= 1 and errors.count("not reachable") >= 1 and errors.count("in use again") >= 4, errors


def redis_errors_are_logged_once():
    with redis_server("--requirepass", "right") as redis, tempfile.NamedTemporaryFile("w") as password:
        password.write("wrong\n")
        password.flush()
        with serving_redis(redis, "--prefix-password-file", password.name) as server:
            for i in range(3):
                assert text_and_cached(server, f"{i} {PROMPT}")[0]
            server.until(lambda f: f["prefix_store_unavailable_servers"] == 1, "a server that refuses the login stays in use")
            errors = server.stop()
            assert errors.count("WRONGPASS") == 1, errors
        password.seek(0)
        password.write("right\n")
        password.flush()
        with serving_redis(redis, "--prefix-password-file", password.name) as server:
            assert text_and_cached(server)[0]
            until_written(server, (len(PROMPT) - 1) // 64)
    with redis_server("--maxmemory-policy", "noeviction", "--maxmemory", "1mb") as redis, serving_redis(redis) as server:
        for i in range(4):
            assert text_and_cached(server, f"{i} {PROMPT}")[0]
        server.until(lambda f: f["prefix_store_failed_writes_total"] >= 2, "no write fails")
        errors = server.stop()
        assert errors.count("OOM") == 1, errors


def pages_of_redis_are_kept_in_the_folder():
    n_pages = (len(PROMPT) - 1) // 64
    with redis_server() as redis, tempfile.TemporaryDirectory(prefix="flatkv-near-") as folder:
        with serving_redis(redis) as first:
            expected, _ = text_and_cached(first)
            until_written(first, n_pages)
        with serving_redis(redis, "--prefix-dir", folder) as second:
            text, cached = text_and_cached(second)
            assert text == expected and cached >= 0.95 * n_pages * 64, (text, cached)
            second.until(lambda f: f["prefix_store_pages"] >= n_pages, "pages from Redis are not written to the folder")
        redis.command("FLUSHALL")
        with serving_redis(redis, "--prefix-dir", folder) as third:
            text, cached = text_and_cached(third)
            assert text == expected and cached >= 0.95 * n_pages * 64, (text, cached)
            end = time.monotonic() + 600  # pages that Redis lost are written again after a read has reported that they are missing
            while len(redis.command("KEYS", "*")) < n_pages and time.monotonic() < end:
                assert text_and_cached(third)[0] == expected
            assert len(redis.command("KEYS", "*")) >= n_pages
        redis.stop()
        with serving_redis(redis, "--prefix-dir", folder) as fourth:  # pages are read from the folder if Redis is not available
            text, cached = text_and_cached(fourth)
            assert text == expected and cached >= 0.95 * n_pages * 64, (text, cached)


def make_certificate(folder, name, alternative):
    """Makes a self-signed certificate. Returns the paths of the certificate and of its key."""
    paths = os.path.join(folder, name + ".pem"), os.path.join(folder, name + ".key")
    subprocess.run([OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=" + name, "-addext",
                    "subjectAltName=" + alternative, "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


def redis_over_tls_is_verified():
    if REDIS is None or OPENSSL is None:
        skip("redis-server or openssl")
    said = subprocess.run([REDIS, "--port", "0", "--tls-port", "1"], capture_output=True, check=False, timeout=600).stdout
    if b"Bad directive" in said:
        skip("redis-server with TLS")
    n_pages = (len(PROMPT) - 1) // 64
    with tempfile.TemporaryDirectory(prefix="flatkv-tls-") as folder:
        certificate, key = make_certificate(folder, "server", "DNS:localhost,IP:127.0.0.1")
        other = make_certificate(folder, "other", "DNS:localhost,IP:127.0.0.1")[0]
        port = free_port()
        with redis_server("--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate,
                          "--tls-auth-clients", "no") as redis:
            def serving_tls(host, trusted):
                return serving("-c", "8K", "--prefix-redis", f"rediss://{host}:{port}", "--prefix-timeout", "20000", "--prefix-ca-file", trusted)
            with serving_tls("localhost", certificate) as first:
                expected, _ = text_and_cached(first)
                until_written(first, n_pages)
            with serving_tls("127.0.0.1", certificate) as second:  # the same server under another name
                text, cached = text_and_cached(second)
                assert text == expected and cached >= 0.95 * n_pages * 64, (text, cached)
                assert second.metrics()["prefix_store_refused_values_total"] == 0
            for host, trusted, reason in (("localhost", other, "self-signed certificate"), ("127.0.0.2", certificate, "IP address mismatch")):
                with serving_tls(host, trusted) as server:
                    for i in range(2):
                        assert text_and_cached(server, f"{i} {PROMPT}")[1] == 0
                    server.until(lambda f: f["prefix_store_unavailable_servers"] == 1, "a server that cannot be verified is used")
                    assert server.metrics()["prefix_store_written_pages_total"] == 0
                    errors = server.stop()
                    assert errors.count("TLS handshake failed") == 1 and reason in errors, errors
    done = subprocess.run([sys.argv[1], "serve", "-m", "needle", "--port", "0", "-c", "8K", "--prefix-redis", "rediss://127.0.0.1:1", "--prefix-ca-file",
                           os.devnull], capture_output=True, check=False, timeout=600)
    assert done.returncode == 2 and b"cannot read certificates" in done.stderr, done


def empty_secrets_are_rejected():
    for option in ("--prefix-password-file", "--prefix-secret-file"):
        done = subprocess.run([sys.argv[1], "serve", "-m", "needle", "--port", "0", "-c", "8K", "--prefix-redis", "redis://127.0.0.1:1", option, os.devnull],
                              capture_output=True, check=False, timeout=600)
        assert done.returncode == 2 and b"is empty" in done.stderr, (option, done)


if __name__ == "__main__":
    run([requests_with_a_common_prefix_use_the_same_server, compose_file_has_the_documented_configuration, no_request_fails_while_a_server_stops, second_server_answers_from_the_pages_of_the_first,
         changed_values_are_refused_and_computed, requests_succeed_while_redis_hangs_or_dies, redis_errors_are_logged_once,
         empty_secrets_are_rejected, pages_of_redis_are_kept_in_the_folder, redis_over_tls_is_verified])
