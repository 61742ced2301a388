"""Helpers shared by serve_load and prefix_disk: starting and stopping servers, sending requests, and reading metrics.

A request records the received bytes with their arrival times and parses them only after the last byte, so that the client uses little CPU
time on the machine that it measures.
"""

import contextlib
import dataclasses
import datetime
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(TREE, "scripts"))
import machine  # noqa: E402
with open(os.path.join(TREE, "models/needle/book.txt"), encoding="ascii") as file:
    BOOK = " ".join(file.read().split())
HOST = "127.0.0.1"


@dataclasses.dataclass
class Answer:
    status: object  # HTTP status; "left": the client disconnected; "broken": the answer is incomplete
    text: str = ""
    n_new: int = 0
    n_cached: int = 0
    retry_after: float = None
    head_s: float = None  # time to the status line
    first_s: float = None  # time to the first token
    whole_s: float = None
    times: list = dataclasses.field(default_factory=list)  # arrival times of text chunks, in seconds since the request
    error: str = ""

    def gaps_at(self):
        """Returns the start and length in seconds of each gap between tokens. Tokens of one step (accepted drafts) have no gap between them."""
        return [(a, b - a) for a, b in zip(self.times, self.times[1:]) if b - a > 0.0005]

    def gaps(self):
        return [gap for _, gap in self.gaps_at()]


def send(port, body, key="", path="/v1/completions"):
    """Sends a request. Returns the socket without waiting for the answer."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    link = socket.create_connection((HOST, port), timeout=900)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(head.encode() + b"\r\n" + data)
    return link


def chunks(received, at):
    """Yields the arrival time and data of each chunk of the body. A body without chunked encoding is one chunk."""
    raw = b"".join(block for _, block in received)
    if b"chunked" not in raw[:at].lower():
        yield received[-1][0], raw[at:]
        return
    n, ends = 0, []
    for when, block in received:
        n += len(block)
        ends.append((n, when))
    i = 0
    while (end := raw.find(b"\r\n", at)) >= 0 and raw[at:end]:
        size = int(raw[at:end], 16)
        at = end + 2 + size + 2
        if size == 0 or at > len(raw):
            return
        while ends[i][0] < at - 2:
            i += 1
        yield ends[i][1], raw[end + 2 : end + 2 + size]


def read_stream(answer, received, at):
    ended = False
    for when, chunk in chunks(received, at):
        for line in chunk.split(b"\n"):
            ended = ended or line.startswith(b"data: [DONE]")
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[6:])
            usage = data.get("usage") or {}
            answer.n_new = usage.get("completion_tokens", answer.n_new)
            answer.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", answer.n_cached)
            if "error" in data:
                answer.error = json.dumps(data["error"])
            if data.get("choices") and data["choices"][0].get("text"):
                answer.text += data["choices"][0]["text"]
                answer.times.append(when)
    answer.first_s = answer.times[0] if answer.times else None
    answer.n_new = answer.n_new or len(answer.times)
    if not ended or answer.error:
        answer.status = "broken"


def read_answer(received):
    raw = b"".join(block for _, block in received)
    at = raw.find(b"\r\n\r\n") + 4
    if at < 4:
        return Answer("broken")
    answer = Answer(int(raw.split(b" ", 2)[1]), head_s=received[0][0], whole_s=received[-1][0])
    if found := re.search(rb"(?i)\r\nretry-after: *(\d+)", raw[:at]):
        answer.retry_after = float(found[1])
    if answer.status == 200:
        read_stream(answer, received, at)
    else:
        answer.error = raw[at:].decode(errors="replace")
    return answer


def ask(port, prompt, n_new, key="", leave_after=None, **more):
    """Requests one streamed completion. leave_after: number of tokens after which the client disconnects, or None."""
    body = {"prompt": prompt, "max_tokens": n_new, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, **more}
    start = time.monotonic()
    received, n = [], 0
    try:
        with send(port, body, key) as link:
            while leave_after != 0 and (block := link.recv(1 << 16)):
                received.append((time.monotonic() - start, block))
                n += block.count(b"data: {") if leave_after is not None else 0
                if leave_after is not None and n >= leave_after:
                    return Answer("left")
    except OSError as error:
        return Answer("broken", error=str(error))
    return Answer("left") if leave_after == 0 else read_answer(received)


class Server:
    """A server process with an OpenAI-compatible API."""

    def __init__(self, command):
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        command = [*command, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self.is_up():
            assert self.process.poll() is None, (command, "exited with status", self.process.returncode)
            time.sleep(0.005)

    def is_up(self):
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def request(self, method, path, body=None, key=""):
        connection = http.client.HTTPConnection(HOST, self.port, timeout=900)
        headers = {"Authorization": "Bearer " + key} if key else {}
        connection.request(method, path, body if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, data

    def post(self, path, body):
        status, data = self.request("POST", path, body)
        assert status == 200, (status, data)
        return json.loads(data)

    def tokens(self, text):
        return self.post("/tokenize", {"content": text})["tokens"]

    def metrics(self, key=""):
        text = self.request("GET", "/metrics", key=key)[1].decode()
        return {name: float(value) for name, value in re.findall(r"^flatkv:(\S+) (\S+)$", text, re.MULTILINE)}

    def ask(self, prompt, n_new, **more):
        return ask(self.port, prompt, n_new, **more)

    def cpu_seconds(self):
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait(60)


@contextlib.contextmanager
def serving(program, *options):
    """Runs `flatkv serve` for the duration of the with block."""
    server = Server([program, "serve", *options])
    try:
        yield server
        server.end()
    finally:
        server.end(signal.SIGKILL)


@contextlib.contextmanager
def peer_serving(program, *options):
    """Runs llama-server for the duration of the with block."""
    server = Server([program, *options])
    try:
        yield server
    finally:
        server.end(signal.SIGKILL)


def quantile(values, q):
    values = sorted(values)
    return round(values[min(len(values) - 1, int(q * len(values)))], 4) if values else None


class OthersWatch:
    """Measures the share of the machine's CPU time used by other processes; 0 means an idle machine. Child processes of the benchmark must
    end before share() is called. Their CPU time then counts as that of the benchmark."""

    def __init__(self, *servers):
        self.servers = servers
        self.start = self.look()

    @staticmethod
    def own():
        return sum(os.times()[:4])

    def look(self):
        with open("/proc/stat", encoding="ascii") as stat:
            fields = [int(word) for word in stat.readline().split()[1:9]]
        busy = sum(fields) - fields[3] - fields[4]
        return busy / os.sysconf("SC_CLK_TCK"), sum(s.cpu_seconds() for s in self.servers) + self.own(), time.monotonic()

    def share(self):
        busy, ours, now = (b - a for a, b in zip(self.start, self.look()))
        return round(max(0.0, busy - ours) / (now * os.cpu_count()), 3)


def keep_record(path, program, case, result, revision=None):
    """Writes one measurement in the format of scripts/report. Does nothing without a path."""
    if not path:
        return
    words, at = sys.argv[1:], sys.argv.index("--out") - 1
    words = [w if "/" not in w else os.path.basename(w) for w in words[:at] + words[at + 2 :]]
    record = {"kind": "serve", "case": case, "command": " ".join([program, *words]), "result": result,
              "revision": revision or machine.revision(),
              "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")}
    with open(path + ".part", "w", encoding="utf-8") as out:
        json.dump(record, out, indent=1, sort_keys=True)
        out.write("\n")
    os.replace(path + ".part", path)
