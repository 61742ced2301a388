"""Measures prefill and decode rates of flatkv and llama.cpp with a given number of cached tokens (depth), interleaved. Imported by
bench/compare.

One turn of a subject is a prefill of 512 tokens after `depth` cached tokens, and decode steps after the same cached tokens. flatkv runs as its command-line
program and loads the cached tokens from a saved prefix. llama.cpp runs as a process that keeps its cache filled and answers requests
for turns (bench/peers). Each round runs one turn of every subject, so that noise on the machine affects all subjects equally. Slow
subjects run fewer rounds.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BOOK = ROOT / "models" / "needle" / "book.txt"
PEER = ROOT / "bench" / "peers" / "llama_cpp_peer.py"
PROMPT = 512  # tokens per timed prefill
NEW = 48
ROUNDS = 5


def weights_path(name):
    """Returns the path of a model: a GGUF file, or the name of a downloaded model."""
    if name.endswith(".gguf"):
        return pathlib.Path(name)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "flatkv" / "models" / f"{name}.gguf"


def cut_text(text, n_bytes):
    """Returns at least n_bytes of the text, cut between a letter and a space. Every tokenizer splits there, so the tokens of a
    shorter text are a prefix of those of a longer one."""
    while not (text[n_bytes - 1 : n_bytes].isalpha() and text[n_bytes : n_bytes + 1] == b" "):
        n_bytes += 1
    return text[:n_bytes]


class Subject:
    """A program with one cache type at one depth. turn() returns prefill_tps and decode_tps."""

    def __init__(self, who, types, depth):
        self.row = {"who": who, "types": types, "depth": depth}
        self.turns = []
        self.seconds = 0.0

    def close(self):
        pass


class Flatkv(Subject):
    def __init__(self, program, model, codec, depth, threads):
        super().__init__("flatkv", codec, depth)
        self.program, self.threads = program, threads
        text = BOOK.read_bytes()[:1000000]
        token_bytes = BOOK.stat().st_size / self.call("tokenize", "-m", model, "-f", BOOK, "--count")["n_tokens"]
        common = ["-m", model, "--raw", "--ignore-end", "--codecs", codec]
        self.folder = tempfile.TemporaryDirectory()
        prompt, short, prefix = (pathlib.Path(self.folder.name) / name for name in ("prompt.txt", "short.txt", "prefix.fkv"))
        start = cut_text(text, int(token_bytes * depth)) if depth else b""
        if depth:
            prompt.write_bytes(start)
            self.call("run", *common, "-f", prompt, "-n", 1, "--save-prefix", prefix)
        prompt.write_bytes(cut_text(text, len(start) + int(token_bytes * PROMPT)))
        short.write_bytes(cut_text(text, len(start) + 1))
        common += ["--prefix", prefix] if depth else []
        self.prefill, self.decode = ["run", *common, "-f", prompt, "-n", 1], ["run", *common, "-f", short, "-n", NEW]

    def call(self, *arguments):
        command = [self.program, *arguments, "--json"]
        if self.threads and arguments[0] == "run":
            command += ["--threads", self.threads]
        return json.loads(subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True).stdout)

    def turn(self):
        found = self.call(*self.prefill)
        self.row |= {"cached": found["prefix_tokens"], "prefilled": found["prompt_tokens"] - found["prefix_tokens"]}
        return {"prefill_tps": found["prefill_tps"], "decode_tps": self.call(*self.decode)["decode_tps"]}

    def close(self):
        self.folder.cleanup()


class LlamaCpp(Subject):
    def __init__(self, python, package, model, cache, depth, threads):
        super().__init__("llama.cpp", cache, depth)
        command = [python, PEER, "turns", "-m", weights_path(model), "--caches", cache, "--depths", depth]
        command += ["--package", package, *(["--threads", threads] if threads else [])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(list(map(str, command)), **pipes)
        self.about = self.answer()
        self.row |= {"package": self.about["package"], "cached": depth, "prefilled": self.about["prefilled"]}

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp with a {self.row['types']} cache exited with status {self.process.wait()}")
        return json.loads(line)

    def turn(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def run_interleaved(subjects, patience):
    """Runs up to ROUNDS rounds. A subject skips rounds that would extend its total time beyond `patience` seconds."""
    for number in range(ROUNDS):
        for subject in subjects:
            if number and subject.seconds / number * (number + 1) > patience:
                continue
            start = time.monotonic()
            subject.turns.append(subject.turn())
            subject.seconds += time.monotonic() - start


def row_of(subject, first):
    """Returns the median rates of a subject, and the medians over the rounds of its rates relative to the first subject, which is flatkv
    with its default codec."""
    row = subject.row | {"rounds": len(subject.turns)}
    for key in ("prefill_tps", "decode_tps"):
        row[key] = statistics.median(turn[key] for turn in subject.turns)
        row[f"{key}_to_flatkv"] = statistics.median(t[key] / f[key] for t, f in zip(subject.turns, first.turns))
    return row


def measure(program, model, depth, codecs, python=None, packages=(), caches=(), threads=None, patience=15.0):
    """Returns one row per flatkv codec and per llama.cpp package and cache type, and a description of each llama.cpp package."""
    with contextlib.ExitStack() as opened:
        subjects = []

        def add(kind, *arguments):
            try:
                subjects.append(kind(*arguments, threads))
            except (RuntimeError, subprocess.CalledProcessError) as error:
                if not subjects:
                    sys.exit(f"rates: flatkv with {codecs[0]} pages, the reference for all ratios, cannot run: {error}")
                print(f"rates: subject skipped: {error}", file=sys.stderr)
                return
            opened.callback(subjects[-1].close)

        for codec in codecs:
            add(Flatkv, program, model, codec, depth)
        for package in packages:
            for cache in caches:
                add(LlamaCpp, python, package, model, cache, depth)
        run_interleaved(subjects, patience)
        about = {s.row["package"]: s.about for s in subjects if isinstance(s, LlamaCpp)}
        return [row_of(s, subjects[0]) for s in subjects], about
