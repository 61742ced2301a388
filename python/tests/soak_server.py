"""Runs `python -m flatkv server` with its default options under load and compares its answers with those of mlx-lm's own server.

usage: soak_server.py [--seconds N] [--clients 10,64,200] [--codec NAME] [--json FILE]

The model is a small Llama with random weights, whose maximum length results in a default pool of POOL_TOKENS tokens. Pages are 16-bit, so
that answers equal those of mlx-lm; with another codec, answers of flatkv's server to single requests are the reference. First, a
server answers a set of prompts one at a time. Then, for every number of clients and for N seconds each, the clients send random prompts
of this set to flatkv's server without pause. One request in ten has a prompt that exceeds the pool; it must be rejected with status 400.

The exit status is 1 if an answer differs, a status is unexpected, the server is not healthy, the minimum of its resident memory in the
second half of a level exceeds that in the first half by more than 1 %, or the memory that MLX has in use after a level differs by more
than 1 % of the plan from the weights and the pages. The minimum is the memory without the temporary arrays of forward passes, which are
released after each pass.
"""
import argparse
import concurrent.futures
import dataclasses
import http.client
import importlib.metadata
import json
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time

import mlx.core as mx
import readme_lines
from conftest import llama
from mlx.utils import tree_flatten

N_PROMPTS = 60
WARM_REQUESTS = 300  # requests before each level, to fill the prompt store of the server and MLX's buffer cache
MAX_GROWTH = 1.01  # limit for the minimum resident memory in the second half of a level, relative to that in the first half
MAX_EXCESS = 0.01  # limit for the memory of MLX in addition to weights and pages, relative to the plan
CONTEXT = 4096  # maximum length of the model
POOL_TOKENS = 8 * CONTEXT  # default size of the server's pool
#: runs flatkv's server with a thread that writes MLX's active and peak memory, and the plans of all pools, to the file argv[1] several times a second
MONITORED = """
import json, os, sys, threading, time
import mlx.core as mx
import flatkv.__main__
path = sys.argv.pop(1)
def monitor():
    while True:
        plans = [pool.plan for pool in flatkv.lm.pools()] if "flatkv.lm" in sys.modules else []
        about = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "pages": sum(p.slab_bytes for p in plans), "total": sum(p.total_bytes for p in plans)}
        with open(path + ".new", "w") as file:
            json.dump(about, file)
        os.replace(path + ".new", path)
        time.sleep(0.2)
threading.Thread(target=monitor, daemon=True).start()
sys.exit(flatkv.__main__.main())
"""


class Server:
    """A server process: flatkv's server if memory is a path, to which it writes its memory use; otherwise mlx-lm's server."""

    def __init__(self, folder, log, memory=None, *options):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        program = ["-m", "mlx_lm", "server"] if memory is None else ["-c", MONITORED, str(memory), "server"]
        command = [sys.executable, *program, "--model", str(folder), "--port", str(self.port), "--log-level", "ERROR", *map(str, options)]
        self.memory = memory
        with open(log, "w", encoding="utf-8") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder)
        self.wait()

    def request(self, method, path, body=None):
        """Returns the status and the body of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def is_healthy(self):
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def wait(self):
        for _ in range(600):
            if self.is_healthy():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise SystemExit("the server did not start")

    def complete(self, prompt, max_tokens):
        """Returns the status, and the text or the error."""
        status, body = self.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})
        return status, json.loads(body)["choices"][0]["text"] if status == 200 else body

    def excess(self, weights):
        """Returns the memory of MLX in addition to weights and pages, relative to the plan. The server must be idle."""
        least = None
        for _ in range(100):  # temporary arrays of the last request are released by another thread
            time.sleep(0.2)
            used = json.loads(self.memory.read_text(encoding="utf-8"))
            excess = (used["active"] - weights - used["pages"]) / used["total"]
            least = excess if least is None else min(least, excess)
            if least <= MAX_EXCESS:
                break
        return least

    def peak_bytes(self):
        """Returns the maximum memory of MLX since the start, without its cache of unused buffers."""
        return json.loads(self.memory.read_text(encoding="utf-8"))["peak"]

    def resident_bytes(self):
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise SystemExit("the server ended")

    def stop(self):
        self.process.terminate()
        self.process.wait()


def save_model(folder, context=32768):
    """Writes a Llama model with random weights and a byte tokenizer in Hugging Face format. context: maximum length."""
    folder.mkdir()
    model = llama(layers=1, vocab=256)
    model.args.max_position_embeddings = context
    config = {name: value for name, value in dataclasses.asdict(model.args).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    readme_lines.byte_tokenizer().save_pretrained(folder)
    return folder


def make_prompts(seed):
    """Returns random prompts of mixed lengths with the numbers of tokens to generate."""
    book = (readme_lines.NEEDLE / "book.txt").read_text(encoding="ascii", errors="ignore")
    chance = random.Random(seed)
    found = []
    for _ in range(N_PROMPTS):
        n = int(10 ** chance.uniform(1, 3))
        at = chance.randrange(len(book) - n)
        found.append((book[at:at + n], chance.choice((2, 8, 24))))
    return found


class Load:
    """Requests of many clients, and their results."""

    def __init__(self, server, prompts, wanted, too_long):
        self.server, self.prompts, self.wanted, self.too_long = server, prompts, wanted, too_long
        self.counts = {"answered": 0, "rejected": 0}
        self.wrong = []
        self.lock = threading.Lock()

    def one(self, chance):
        i = chance.randrange(N_PROMPTS)
        long = chance.random() < 0.1
        prompt, max_tokens = (self.too_long, 4) if long else self.prompts[i]
        try:
            status, text = self.server.complete(prompt, max_tokens)
        except OSError as error:
            status, text = 0, repr(error)
        with self.lock:
            if status == (400 if long else 200) and (long or text == self.wanted[i]):
                self.counts["rejected" if long else "answered"] += 1
            else:
                self.wrong.append({"prompt": -1 if long else i, "status": status, "text": text[:200]})

    def run(self, n_clients, seconds):
        """Sends requests until the time is over. Returns the resident memory of the server over time."""
        end, resident = time.monotonic() + seconds, []

        def client(number):
            chance = random.Random(number)
            while time.monotonic() < end and not len(self.wrong) > 100:
                self.one(chance)

        with concurrent.futures.ThreadPoolExecutor(n_clients) as clients:
            running = [clients.submit(client, i) for i in range(n_clients)]
            while not all(f.done() for f in running):
                resident.append(self.server.resident_bytes())
                time.sleep(0.5)
        return resident


def run_level(server, load, n_clients, seconds, weights):
    """Runs one number of clients. Returns the results and whether they are good."""
    while sum(load.counts.values()) < WARM_REQUESTS and not load.wrong:
        load.run(n_clients, min(5, seconds))
    load.counts = dict.fromkeys(load.counts, 0)
    began = time.monotonic()
    resident = load.run(n_clients, seconds)
    half = len(resident) // 2
    first, second = resident[:half], resident[half:]
    growth, excess = min(second) / min(first), server.excess(weights)
    level = {"clients": n_clients, "seconds": round(time.monotonic() - began, 1), **load.counts, "wrong": len(load.wrong), "examples": load.wrong[:3],
             "healthy": server.is_healthy(), "min_resident_bytes": min(resident), "max_resident_bytes": max(resident), "growth": round(growth, 4),
             "max_growth": round(max(second) / max(first), 4), "excess": round(excess, 5), "mlx_peak_bytes": server.peak_bytes()}
    return level, not load.wrong and level["healthy"] and growth <= MAX_GROWTH and abs(excess) <= MAX_EXCESS


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[10, 64, 200])
    parser.add_argument("--codec", default="16/16")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    prompts = make_prompts(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model, codec = save_model(folder / "model", CONTEXT), ["--codec", options.codec]
        weights = sum(a.nbytes for a in mx.load(str(model / "model.safetensors")).values())
        alone = Server(model, folder / "alone.log", *([] if options.codec == "16/16" else [folder / "alone.json", *codec]))
        wanted = [alone.complete(*p)[1] for p in prompts]
        alone.stop()
        server = Server(model, folder / "flatkv.log", folder / "memory.json", *codec)
        versions = {name.replace("-", "_"): importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
        levels, good, began = [], True, time.monotonic()
        for n_clients in options.clients:
            level, is_good = run_level(server, Load(server, prompts, wanted, "x" * (POOL_TOKENS + 100)), n_clients, options.seconds, weights)
            levels.append(level)
            good = good and is_good
            print(level, flush=True)
            plan = next((line for line in (folder / "flatkv.log").read_text(encoding="utf-8").splitlines() if line.startswith("flatkv: ")), "")
            if options.json:
                found = {**versions, "codec": options.codec, "plan": plan, "good": good, "load_seconds": round(time.monotonic() - began), "levels": levels}
                options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        server.stop()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
