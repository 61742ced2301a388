#!/usr/bin/env python3
"""Tests flatkv pull and model names with a hub on this machine (local_hub.py). Each function tests one behaviour.

usage: hub_test.py FLATKV BEHAVIOUR     hub_test.py --list prints the behaviours
"""
import fcntl
import hashlib
import json
import os
import pty
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

from local_hub import File, Hub, Repository

TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GOOD, FAILED, USAGE, NO_FIT, INTERRUPTED = 0, 1, 2, 3, 130
SKIPPED = 77
NAME = "some/needle"
SNAPSHOTS = "hub/models--some--needle/snapshots"

program = ""


def expect(condition, *what):
    if not condition:
        sys.exit(f"FAIL {sys.argv[2]}: {' '.join(str(w) for w in what)}")


def read(path):
    with open(os.path.join(TREE, path), "rb") as file:
        return file.read()


def needle():
    """Returns the files of the needle model, and files that pull must ignore."""
    folder = os.path.join(TREE, "models/needle")
    files = {name: read(os.path.join(folder, name)) for name in ("config.json", "lexicon.json", "needle.safetensors")}
    return {**files, "pytorch_model.bin": b"x" * 200_000, "onnx/model.onnx": b"y", "README.md": b"# needle", ".gitattributes": b"",
            "notes folder/it's 100% ü.txt": b"z"}


def noise(n, seed=1):
    return random.Random(seed).randbytes(n)


def big(n=80 << 20):
    """Returns a repository whose weights are downloaded in several parts. Their contents are not valid weights, which only the model loader would detect."""
    return Repository({"config.json": read("models/needle/config.json"), "model.safetensors": noise(n)})


def gguf(fill):
    """Returns stories260K.gguf with a header that is about `fill` bytes larger."""
    def text(value):
        return struct.pack("<Q", len(value)) + value

    sound = read("tests/data/stories260K.gguf")
    start = text(b"test.fill") + struct.pack("<I", 8)
    more = start + text(b"x" * (fill + -(len(start) + 8 + fill) % 32))
    n = struct.unpack_from("<Q", sound, 16)[0]
    return sound[:16] + struct.pack("<Q", n + 1) + more + sound[24:]


def wait_until(condition):
    end = time.monotonic() + 120
    while not condition():
        expect(time.monotonic() < end, "nothing happened within two minutes")
        time.sleep(0.05)


class Place:
    """A hub and an empty cache."""

    def __init__(self, **repositories):
        self.hub = Hub({name.replace("__", "/"): r if isinstance(r, Repository) else Repository(r) for name, r in repositories.items()})

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.home = self.folder.name
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and not k.lower().endswith("_proxy")}
        self.environment.update(HF_ENDPOINT=self.hub.endpoint, HF_HOME=self.home, TMPDIR=self.home, XDG_CACHE_HOME=os.path.join(self.home, "xdg"))
        return self

    def __exit__(self, *details):
        left = [name for name in os.listdir(self.home) if name.startswith("flatkv-")]
        if details[0] is None:
            expect(not left, "temporary folders were left behind:", left)
        self.hub.__exit__()
        self.folder.cleanup()

    def path(self, *parts):
        return os.path.join(self.home, *parts)

    def run(self, *arguments, stdin=b"", **environment):
        done = subprocess.run([program, *arguments], input=stdin, capture_output=True, check=False, env={**self.environment, **environment})
        return done.returncode, done.stdout.decode(), done.stderr.decode("utf-8", "replace")

    def pull(self, *arguments, code=GOOD, words=(), **environment):
        """Runs flatkv pull and returns its standard output and error."""
        got, out, err = self.run("pull", *arguments, **environment)
        expect(got == code, f"exit code {got}, expected {code}:", out, err)
        for word in words:
            expect(word in out + err, f'"{word}" is missing from:', out, err)
        return out, err

    def start(self, *arguments, **environment):
        return subprocess.Popen([program, "pull", *arguments], env={**self.environment, **environment}, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def saved_bytes(self):
        """Returns the number of bytes that the saved state of an incomplete file counts as downloaded."""
        blobs = self.path("hub/models--some--needle/blobs")
        total = 0
        for name in os.listdir(blobs) if os.path.isdir(blobs) else ():
            if name.endswith(".flatkv-state"):
                try:
                    with open(os.path.join(blobs, name), encoding="ascii") as file:
                        total += sum(int(line) for line in file.read().splitlines()[1:])
                except FileNotFoundError:  # the file was completed in the meantime
                    pass
        return total

    def check(self, name=NAME):
        """Checks the layout of the cache and the contents of every file in the snapshot. Returns the names of the files."""
        repository = self.hub.repositories[name]
        base = self.path("hub", "models--" + name.replace("/", "--"))
        with open(os.path.join(base, "refs/main"), encoding="ascii") as file:
            expect(file.read() == repository.commit, "refs/main")
        snapshot = os.path.join(base, "snapshots", repository.commit)
        names = []
        for folder, _, files in os.walk(snapshot):
            for file in files:
                path = os.path.join(folder, file)
                names.append(os.path.relpath(path, snapshot))
                data = repository.files[names[-1]]
                target = os.readlink(path)
                expect(not os.path.isabs(target) and os.path.basename(target) == data.id, path, target)
                expect(os.path.realpath(path) == os.path.realpath(os.path.join(base, "blobs", data.id)), path, target)
                with open(path, "rb") as content:
                    expect(content.read() == data.data, "contents of", path)
        left = [f for f in os.listdir(os.path.join(base, "blobs")) if "flatkv" in f]
        expect(not left, "incomplete files were left behind:", left)
        return set(names)


# ---- behaviours


def another_revision_is_downloaded():
    with Place(some__needle=needle()) as place:
        files = needle()
        old = Repository({**files, "lexicon.json": files["lexicon.json"] + b"\n"})
        old.commit = "0123456789" * 4
        place.hub.revisions[NAME, "refs/old-1.0"] = old
        place.pull(NAME)
        base, path = place.path("hub/models--some--needle"), place.path(SNAPSHOTS, old.commit)
        out, _ = place.pull(NAME, "--revision", "refs/old-1.0", words=[f"flatkv run -m {path} -i"])
        expect(out == path + "\n" and place.hub.count("hub", "/revision/refs/old-1.0"), out)
        with open(os.path.join(base, "refs/refs/old-1.0"), encoding="ascii") as file:
            expect(file.read() == old.commit, "the reference of the revision")
        with open(os.path.join(path, "lexicon.json"), "rb") as file:
            expect(file.read() == old.files["lexicon.json"].data, "the file of the revision")
        place.check()  # the main branch is unchanged
        code, out, err = place.run("run", "-m", path, "-p", "Call me", "-n", "4")
        expect(code == GOOD and out, code, err)
        place.pull(NAME, "--revision", old.commit, words=["already complete"])
        expect(sorted(os.listdir(os.path.join(base, "refs"))) == ["main", "refs"], os.listdir(os.path.join(base, "refs")))
        place.pull(NAME, "--revision", "v9", code=FAILED, words=["v9"])
        for wrong in ("", "..", "a/../b", ".main", "/a", "a/", "a b", "x" * 200):
            place.pull(NAME, "--revision", wrong, code=USAGE, words=["expected a branch"])


def a_folder_is_downloaded_and_runs():
    with Place(some__needle=needle()) as place:
        out, err = place.pull(NAME, words=["safetensors", "of memory is available", f"flatkv run -m {NAME} -i"])
        expect(out == place.path(SNAPSHOTS, place.hub.repositories[NAME].commit) + "\n", out)
        expect(place.check() == {"config.json", "lexicon.json", "needle.safetensors"}, place.check())
        before = len(place.hub.requests)
        code, out, err = place.run("run", "-m", NAME, "-p", "Call me", "-n", "4")
        expect(code == GOOD and out, code, err)
        code, out, err = place.run("plan", "-m", NAME)
        expect(code == GOOD and "It fits" in out, code, err)
        code, out, _ = place.run("models", "--json")
        expect([m for m in json.loads(out)["found"] if m["path"].endswith(place.hub.repositories[NAME].commit)], out)
        code, out, _ = place.run("models", "--names")
        expect(NAME in out.splitlines(), out)
        expect(len(place.hub.requests) == before, "local models need no hub")
        place.pull(NAME, words=["already complete"])
        expect(place.hub.count("cdn", "/signed/") == 1, "complete files are not downloaded again")


def a_missing_model_says_to_pull():
    with Place(some__needle=needle()) as place:
        for command in (["run", "-m", NAME, "-p", "x"], ["serve", "-m", NAME], ["niah", "-m", NAME]):
            code, out, err = place.run(*command)
            expect(code == FAILED and f"flatkv pull {NAME}" in err and out == "", command, code, err)
        for word in (f"{NAME}:Q4_0", "smollm2"):
            code, _, err = place.run("run", "-m", word, "-p", "x")
            expect(code == FAILED and f"flatkv pull {word}" in err, code, err)
        code, _, err = place.run("run", "-m", "some/model.gguf", "-p", "x")
        expect(code == FAILED and "pull some/model.gguf" not in err, err)
        expect(not place.hub.requests, "only pull and plan connect to a hub")
        os.makedirs(place.path("x/some/needle"))  # a path takes precedence over a name
        done = subprocess.run([program, "run", "-m", NAME, "-p", "x"], cwd=place.path("x"), env=place.environment, capture_output=True, check=False)
        expect(b"config.json" in done.stderr and b"pull" not in done.stderr, done)


def a_downloaded_model_is_suggested():
    with Place(some__needle=needle()) as place:
        place.pull(NAME)
        for command, code, words in ((["run", "-p", "x"], USAGE, f"use -m {NAME}, which is on this machine"), (["serve"], USAGE, f"use -m {NAME}"),
                                     (["run", "-m", "Needle-", "-p", "x"], FAILED, "flatkv models"), (["run", "-m", "NEEDLE", "-p", "x"], FAILED, f"use -m {NAME}"),
                                     (["run", "-m", "Some/Needle", "-p", "x"], FAILED, f"use -m {NAME}"),
                                     (["run", "-m", "other/needle", "-p", "x"], FAILED, "flatkv pull other/needle")):
            got, out, err = place.run(*command)
            expect(got == code and words in err and out == "", command, got, err)


def gguf_repository():
    return Repository({
        "tiny-Q8_0.gguf": gguf(4 << 20),
        "tiny-q4_k_m.gguf": gguf(1 << 20),
        "tiny-F16.gguf": gguf(6 << 20),
        "split/tiny-Q6_K-00001-of-00002.gguf": gguf(2 << 20),
        "split/tiny-Q6_K-00002-of-00002.gguf": gguf(0),
        "mmproj-tiny-Q8_0.gguf": gguf(9 << 20),
        "imatrix.gguf": gguf(0),
        "broken-Q5_0-00001-of-00003.gguf": gguf(0),
        "README.md": b"x"})


def the_best_quantization_that_fits_is_chosen():
    with Place(some__needle=gguf_repository()) as place:
        out, _ = place.pull(NAME, words=["Q8_0", "the largest quantization up to 8 bits that fits"])
        expect(out.endswith("/tiny-Q8_0.gguf\n"), out)
        expect(place.check() == {"tiny-Q8_0.gguf"}, place.check())
        code, _, err = place.run("run", "-m", NAME, "-p", "Once", "-n", "2")
        expect(code == GOOD, err)
        place.pull(NAME + ":q4_k_m", words=["Q4_K_M", f"flatkv run -m {NAME}:Q4_K_M -i"])
        code, _, err = place.run("run", "-m", NAME, "-p", "Once", "-n", "2")
        expect(code == FAILED and "ambiguous" in err and f"{NAME}:Q8_0, {NAME}:Q4_K_M" in err, err)
        code, _, err = place.run("run", "-m", NAME + ":q4_K_m", "-p", "Once", "-n", "2")
        expect(code == GOOD, err)
        place.pull(NAME + ":Q3_K", code=FAILED, words=["has no Q3_K", "Q8_0 (", "Q4_K_M ("])
        place.pull(NAME + ":Q5_0", code=FAILED, words=["incomplete", "part"])
        out, _ = place.pull(NAME, "--list")
        expect([line.split()[0] for line in out.splitlines()] == ["F16", "Q8_0", "Q6_K", "Q4_K_M", "Q5_0"], out)
        expect("Q8_0" in next(line for line in out.splitlines() if "chosen" in line), out)


def a_quantization_that_does_not_fit_is_not_chosen():
    huge = File(gguf(1 << 20), claimed=1 << 43)
    with Place(some__needle=Repository({"m-Q8_0.gguf": huge, "m-Q4_0.gguf": gguf(0)}), some__huge=Repository({"m-Q8_0.gguf": huge})) as place:
        out, _ = place.pull(NAME, "--json")
        result = json.loads(out)
        expect(result["quant"] == "Q4_0" and result["fits"] and result["path"].endswith("m-Q4_0.gguf"), result)
        expect(result["files"][0]["sha256"] == hashlib.sha256(gguf(0)).hexdigest(), result)
        place.pull("some/huge", code=FAILED, words=["not enough disk space", "8.80 TB", "HF_HOME"])
        expect(not os.path.exists(place.path("hub/models--some--huge/refs/main")), "nothing was published")


def an_unsupported_model_is_not_downloaded():
    config = b'{"model_type": "mamba2", "hidden_size": 64}'
    with Place(some__needle={"config.json": config, "model.safetensors": noise(300_000)}) as place:
        place.pull(NAME, code=FAILED, words=["flatkv cannot run", "mamba2", "--force"])
        expect(place.hub.count("cdn") == 0, "weights were requested")
        place.pull(NAME, "--force", words=["warning"])
        place.check()
    with Place(some__needle={"README.md": b"x", "pytorch_model.bin": noise(300_000)}) as place:
        place.pull(NAME, code=FAILED, words=["no model that flatkv can read", "safetensors"])


def a_plan_reads_only_headers():
    weights = File(gguf(3 << 20) + noise(40 << 20))
    with Place(some__needle=needle(), some__gguf=Repository({"m-Q4_0.gguf": weights})) as place:
        code, out, err = place.run("plan", NAME)
        expect(code == GOOD and "flatkv pull would download 7.2" in out and "It fits" in out, code, out, err)
        expect(place.hub.count("cdn") == 0, "weights were requested")
        code, out, err = place.run("plan", "-m", "some/gguf:Q4_0", "--json")
        expect(code == GOOD and json.loads(out)["architecture"] == "llama", code, out, err)
        wanted = [headers["Range"] for role, _, _, headers in place.hub.requests if role == "cdn"]
        expect(wanted and all(int(r.split("-")[1]) < 8 << 20 for r in wanted), wanted)
        expect(not os.path.exists(place.path("hub")), "plan left files in the cache")
        code, _, err = place.run("plan", NAME, NAME)
        expect(code == USAGE and "takes one model" in err, err)
        code, _, err = place.run("plan", "-m", "some/missing")
        expect(code == FAILED and "does not exist" in err, err)


def the_layout_is_that_of_huggingface_hub():
    """Skipped unless huggingface_hub is installed for the Python that runs this test."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        print("skipped: huggingface_hub is not installed")
        sys.exit(SKIPPED)
    code = ("import sys, os, huggingface_hub as h\n"
            "patterns = ['*.json', '*.safetensors']\n"
            "mine = h.snapshot_download(sys.argv[1], local_files_only=True, allow_patterns=patterns)\n"
            "print(mine, len(h.scan_cache_dir().warnings))\n"
            "theirs = h.snapshot_download(sys.argv[1], cache_dir=sys.argv[2], allow_patterns=patterns)\n"
            "links = lambda f: sorted((n, os.readlink(os.path.join(f, n))) for n in os.listdir(f))\n"
            "assert links(mine) == links(theirs), (links(mine), links(theirs))\n"
            "base = os.path.dirname(os.path.dirname(theirs))\n"
            "assert sorted(os.listdir(base + '/blobs')) == sorted(os.listdir(os.path.dirname(os.path.dirname(mine)) + '/blobs'))\n"
            "assert open(base + '/refs/main').read() == open(os.path.dirname(os.path.dirname(mine)) + '/refs/main').read()\n")
    with Place(some__needle=needle()) as place:
        place.pull(NAME)
        theirs = place.path("theirs")
        done = subprocess.run([sys.executable, "-c", code, NAME, theirs], env=place.environment, capture_output=True, text=True, check=False)
        expect(done.returncode == 0, done.stdout, done.stderr)
        expect(done.stdout.split() == [place.path(SNAPSHOTS, place.hub.repositories[NAME].commit), "0"], done.stdout)
        code, _, err = place.run("run", "-m", NAME, "-p", "Call me", "-n", "2", HF_HUB_CACHE=theirs)
        expect(code == GOOD, err)


def parts_are_downloaded_in_parallel_and_verified():
    with Place(some__needle=big()) as place:
        together = threading.Barrier(3)  # no part is sent until three have been requested

        def fault(handler, role, path):
            if role == "cdn":
                together.wait(timeout=60)
            return False

        place.hub.fault = fault
        place.pull(NAME, "--connections", "3")
        expect(place.check() == {"config.json", "model.safetensors"}, place.check())
        starts = {h.get("Range") for role, _, _, h in place.hub.requests if role == "cdn"}
        expect(len(starts) == 3, starts)


def the_token_goes_only_to_the_hub():
    gated = Repository(needle(), gated=True, token="hf_secret")
    with Place(some__needle=gated) as place:
        page = f"{place.hub.endpoint}/{NAME}"
        place.pull(NAME, code=FAILED, words=["gated", page, "HF_TOKEN"])
        place.pull(NAME, code=FAILED, words=["gated", page, "HF_TOKEN", "does not give access"], HF_TOKEN="hf_other")
        with open(place.path("token"), "w", encoding="ascii") as file:
            file.write("hf_secret\n")
        place.pull(NAME)
        place.check()
        for role, _, path, headers in place.hub.requests:
            expect(role == "hub" or "Authorization" not in headers, role, path, headers)
        place.pull(NAME, code=USAGE, words=["token", "not valid"], HF_TOKEN="hf_a\nX-Evil: 1")


def missing_and_renamed_models_are_explained():
    with Place(some__needle=needle()) as place:
        place.hub.renamed["old/name"] = NAME
        place.pull("some/thing", code=FAILED, words=["some/thing does not exist", "spelling", "private"])
        place.pull("some/thing", code=FAILED, words=["some/thing does not exist", "HF_TOKEN"], HF_TOKEN="hf_x")
        place.pull("old/name", code=FAILED, words=[f"old/name has been renamed to {NAME}"])
        for word in ("needle", "a", "a/b/c", "a/", "/b", "../b", "a/..", "a/b:", "-a/b", "a/b--c", "a/b:c/d", "a/b c", "a" * 100 + "/b"):
            place.pull(word, code=USAGE)
        place.pull(NAME, NAME, code=USAGE, words=["one model"])
        place.pull(NAME, code=USAGE, words=["HF_ENDPOINT"], HF_ENDPOINT="ftp://x")
        place.pull(NAME, code=FAILED, words=["HF_HUB_OFFLINE"], HF_HUB_OFFLINE="1")
        place.pull(NAME, "--tries", "2", code=FAILED, words=["cannot reach http://127.0.0.1:1"], HF_ENDPOINT="http://127.0.0.1:1")


def dropped_connections_are_resumed():
    with Place(some__needle=big()) as place:
        drops = iter(range(6))

        def fault(handler, role, path):
            if role != "cdn" or next(drops, None) is None:
                return False
            start, end = handler.range_of(80 << 20)
            data = place.hub.repositories[NAME].files["model.safetensors"].data[start:end]
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{80 << 20}")
            handler.send_header("Content-Length", str(end - start))
            handler.end_headers()
            handler.wfile.write(data[:3 << 20])
            handler.close_connection = True
            return True

        place.hub.fault = fault
        place.pull(NAME)
        place.check()
        starts = sorted(int(h["Range"].split("=")[1].split("-")[0]) for role, _, _, h in place.hub.requests if role == "cdn")
        expect(len(set(starts)) > 3 and 3 << 20 in starts, "a part continues after its last byte:", starts)


def an_interrupted_download_is_resumed():
    with Place(some__needle=big()) as place:
        slow = True
        wanted = 0

        def fault(handler, role, path):
            if role != "cdn" or not slow:
                return False
            start, end = handler.range_of(80 << 20)
            data = place.hub.repositories[NAME].files["model.safetensors"].data[start:end]
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{80 << 20}")
            handler.send_header("Content-Length", str(end - start))
            handler.end_headers()
            handler.wfile.write(data[:5 << 20])
            handler.wfile.flush()
            time.sleep(60)
            return True

        place.hub.fault = fault
        for number in (signal.SIGINT, signal.SIGKILL):
            running = place.start(NAME)
            wanted += 3 * (5 << 20)
            wait_until(lambda: place.saved_bytes() >= wanted)  # the state is saved every second
            running.send_signal(number)
            _, err = running.communicate(timeout=60)
            if number == signal.SIGINT:
                expect(running.returncode == INTERRUPTED and "run the same command to continue" in err, running.returncode, err)
            expect(not os.path.exists(place.path("hub/models--some--needle/refs/main")), "an incomplete model was published")
            code, _, err = place.run("run", "-m", NAME, "-p", "x")
            expect(code == FAILED and "flatkv pull" in err, err)
            place.hub.requests.clear()
        slow = False
        out, _ = place.pull(NAME, "--json")
        place.check()
        starts = [int(h["Range"].split("=")[1].split("-")[0]) for role, _, _, h in place.hub.requests if role == "cdn"]
        expect(all(start % (32 << 20) >= 5 << 20 for start in starts), "data was downloaded again:", starts)


def wrong_checksums_are_rejected():
    with Place(some__needle=big(40 << 20)) as place:
        repository = place.hub.repositories[NAME]
        right = repository.files["model.safetensors"].data
        for name, old, new in (("config.json", b"\n", b" "), ("model.safetensors", right[-9:], b"damaged!!")):
            file = repository.files[name]
            data = file.data
            file.data = data.replace(old, new)
            place.pull(NAME, code=FAILED, words=[f"checksum of {name} is wrong", "second download"])
            expect(not os.path.exists(place.path("hub/models--some--needle/refs/main")), "published")
            expect(not os.path.exists(place.path("hub/models--some--needle/blobs", file.id)), "a wrong file became a blob")
            file.data = data
            shutil.rmtree(place.path("hub"))  # also removes the other file, which was downloaded at the same time and may be complete
        once = iter([True])

        def fault(handler, role, path):
            if role == "cdn" and next(once, False):  # the first answer is bad, later ones are good
                start, end = handler.range_of(len(right))
                handler.reply(206, b"\0" * (end - start), Content_Range=f"bytes {start}-{end - 1}/{len(right)}")
                return True
            return False

        place.hub.fault = fault
        place.pull(NAME, words=["checksum of model.safetensors is wrong: downloading it again"])
        place.check()
        blob = place.path("hub/models--some--needle/blobs", repository.files["model.safetensors"].id)
        with open(blob, "r+b") as file:
            file.write(b"damage")
        place.pull(NAME, words=["already complete"])
        place.pull(NAME, "--verify", words=["checksum of model.safetensors is wrong"])
        place.check()


def busy_servers_are_retried():
    with Place(some__needle=needle()) as place:
        answers = []

        def fault(handler, role, path):
            if not answers or (role, answers[0][0]) not in (("hub", "api"), ("cdn", "cdn"), ("hub", "file")):
                return False
            if answers[0][0] == "api" and not path.startswith("/api") or answers[0][0] == "file" and path.startswith("/api"):
                return False
            handler.reply(answers.pop(0)[1], b"busy", **({"Retry_After": "1"} if role == "cdn" else {}))
            return True

        place.hub.fault = fault
        for kind in ("api", "file", "cdn"):
            answers = [(kind, status) for status in (503, 429, 500)]
            start = time.monotonic()
            place.pull(NAME)
            expect(not answers, "not all answers were requested")
            expect(kind != "cdn" or time.monotonic() - start >= 2.9, "Retry-After was ignored")
            place.check()
            os.rename(place.path("hub"), place.path("hub-" + kind))
        answers = [("api", 503)] * 99
        place.pull(NAME, "--tries", "3", code=FAILED, words=["503", "later"])
        expect(len(answers) == 96, len(answers))
        place.hub.fault = lambda handler, role, path: role == "cdn" and (handler.reply(429, b"", Retry_After="3"), True)[1]
        place.pull(NAME, "--tries", "2", code=FAILED, words=["trying again in 3 s", "limits the number of requests", "HF_TOKEN"])
        place.hub.fault = lambda handler, role, path: (handler.reply(429, b"", Retry_After="9999"), True)[1]
        place.pull(NAME, code=FAILED, words=["wait 9999 s"])


def an_expired_storage_address_is_renewed():
    with Place(some__needle=big()) as place:
        expired = iter([False, True, True, False, True])

        def fault(handler, role, path):
            if role == "cdn" and next(expired, False):
                handler.reply(403, b"expired")
                return True
            return False

        place.hub.fault = fault
        place.pull(NAME, "--connections", "1")
        place.check()


def stalled_connections_are_given_up():
    with Place(some__needle=big(40 << 20)) as place:
        stalls = iter(range(2))
        ended = threading.Event()

        def fault(handler, role, path):
            if role == "cdn" and next(stalls, None) is not None:
                start, end = handler.range_of(40 << 20)
                handler.send_response(206)
                handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{40 << 20}")
                handler.send_header("Content-Length", str(end - start))
                handler.end_headers()
                while not ended.wait(1):  # one byte per second also counts as a stall
                    handler.wfile.write(place.hub.repositories[NAME].files["model.safetensors"].data[start:start + 1])
                    handler.wfile.flush()
                    start += 1
                return True
            return False

        place.hub.fault = fault
        place.pull(NAME, HF_HUB_DOWNLOAD_TIMEOUT="2")  # never ends if the stalls are not detected
        ended.set()
        place.check()


def servers_without_ranges_work():
    with Place(some__needle=big(70 << 20)) as place:
        place.hub.ranges = False
        place.pull(NAME)
        place.check()


def huge_and_malformed_answers_are_bounded():
    with Place(some__needle=needle()) as place:
        sent = []

        def answering(body, chunked=False):
            def fault(handler, role, path):
                if not path.startswith("/api"):
                    return False
                if not chunked:
                    handler.reply(200, body)
                    return True
                handler.send_response(200)
                handler.send_header("Transfer-Encoding", "chunked")
                handler.end_headers()
                for _ in range(4096):  # up to 4 GB
                    handler.wfile.write(b"100000\r\n" + b"[" * 0x100000 + b"\r\n")
                    sent.append(1 << 20)
                return True
            return fault

        sound = place.hub.repositories[NAME].listing(NAME)

        def changed(**members):
            return json.dumps({**sound, **members}).encode()

        large = {"rfilename": "a.safetensors", "lfs": {"sha256": "0" * 64, "size": 1}}
        cases = [(b"", "JSON"), (b"<html>", "JSON"), (b"[]", "id"), (b"{}", "id"), (b"[" * 100_000, "JSON"), (changed(id=5), "id"),
                 (changed(id="../x"), "id"), (changed(sha="main"), "sha"), (changed(sha="../" * 13 + "x"), "sha"),
                 (changed(siblings={}), "siblings"), (changed(siblings=[1]), "no file name"), (changed(siblings=[{"rfilename": "x"}]), "digest"),
                 (changed(siblings=[{**large, "lfs": {"sha256": "0" * 64, "size": -1}}]), "size"),
                 (changed(siblings=[{**large, "lfs": {"sha256": "0" * 64, "size": 1 << 62}}]), "size"),
                 (changed(siblings=[{**large, "lfs": {"sha256": "/" * 64, "size": 1}}]), "digest"),
                 (changed(siblings=[large, large]), "twice"),
                 (changed(siblings=[{"rfilename": f"{i}", "size": 1, "blobId": "0" * 40} for i in range(40000)]), "40000 files")]
        cases += [(changed(siblings=[{**large, "rfilename": name}]), "not safe")
                  for name in ("../../evil.safetensors", "/etc/evil.gguf", "a/../../b.gguf", "a//b.gguf", "..", ".", "", "a\\..\\b", "a\nb.gguf",
                               "a\x1b[2J.gguf", "a\u202eb.gguf", "x" * 300, "a/" * 600 + "b", "a/" * 20 + "b.gguf")]
        for body, word in cases:
            place.hub.fault = answering(body)
            _, err = place.pull(NAME, code=FAILED, words=[word])
            expect("\x1b" not in err, "control characters of the hub were printed")
        place.hub.fault = answering(b"", chunked=True)
        place.pull(NAME, code=FAILED, words=["more than"])
        expect(sum(sent) < 64 << 20, "the answer was not cut off:", sum(sent))
        expect(os.listdir(place.home) == [], os.listdir(place.home))

        def circle(handler, role, path):
            handler.reply(302, b"", Location=path)
            return True

        place.hub.fault = circle
        place.pull(NAME, code=FAILED, words=["redirects form a loop"])
        place.hub.fault = lambda handler, role, path: (handler.reply(302, b"", Location="file:///etc/passwd"), True)[1]
        place.pull(NAME, code=FAILED)


def a_file_of_another_size_is_rejected():
    with Place(some__needle=big(40 << 20)) as place:
        file = place.hub.repositories[NAME].files["model.safetensors"]
        whole = file.data
        for data in (whole + b"more", whole[:-5]):
            def fault(handler, role, path, data=data):
                if role != "cdn":
                    return False
                start, end = handler.range_of(len(data))
                handler.reply(206, data[start:end], Content_Range=f"bytes {start}-{end - 1}/{len(data)}")
                return True

            place.hub.fault = fault
            place.pull(NAME, "--tries", "2", code=FAILED, words=["model.safetensors"])
        expect(not os.path.exists(place.path("hub/models--some--needle/refs/main")), "published")


def a_full_disk_is_reported():
    with Place(some__needle=big()) as place:
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, 10 << 20))

        done = subprocess.run([program, "pull", NAME], env=place.environment, preexec_fn=limit, capture_output=True, text=True, check=False)
        expect(done.returncode == FAILED and "cannot" in done.stderr and "flatkv-part" in done.stderr, done)
        place.pull(NAME)
        place.check()
        os.chmod(place.home, 0o500)
        if os.getuid() != 0:
            place.pull(NAME, code=FAILED, words=["cannot create"], HF_HOME=place.path("other"))
        os.chmod(place.home, 0o700)


def two_pulls_at_once_share_the_work():
    with Place(some__needle=big()) as place:
        def fault(handler, role, path):
            if role == "cdn":
                wait_until(lambda: place.hub.count("hub", "config.json") >= 4)  # all four pulls have selected their files
                time.sleep(1)
            return False

        place.hub.fault = fault
        pulls = [place.start(NAME) for _ in range(4)]
        errors = [p.communicate(timeout=300)[1] for p in pulls]
        expect(all(p.returncode == GOOD for p in pulls), errors)
        expect(sum("another flatkv pull" in e for e in errors) >= 1, errors)
        expect(place.hub.count("cdn") == 3, "parts were downloaded twice:", place.hub.count("cdn"))
        place.check()


def a_lock_of_another_program_is_respected():
    with Place(some__needle=needle()) as place:
        file = place.hub.repositories[NAME].files["needle.safetensors"]
        locks = place.path("hub/.locks/models--some--needle")
        os.makedirs(locks)
        with open(os.path.join(locks, file.id + ".lock"), "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            running = place.start(NAME)
            for line in running.stderr:
                if "another program is downloading needle.safetensors" in line:
                    break
            expect(running.poll() is None and place.hub.count("cdn") == 0, "the lock was ignored")
            blobs = place.path("hub/models--some--needle/blobs")
            with open(os.path.join(blobs, file.id), "wb") as blob:  # the other program completes the file
                blob.write(file.data)
        _, err = running.communicate(timeout=60)
        expect(running.returncode == GOOD, err)
        expect(place.hub.count("cdn") == 0, "the file was downloaded again")


class Terminal:
    """The program on a pseudoterminal."""

    def __init__(self, place, *arguments):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(program, [program, *arguments], {**place.environment, "TERM": "xterm"})
        self.shown = b""

    def wait(self, words=None, seconds=60):
        """Waits for the words, or for the end of the program."""
        end = time.monotonic() + seconds
        while words is None or words not in self.shown:
            expect(time.monotonic() < end, words, "was not printed:", self.shown)
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.fd, 65536)
                except OSError:
                    if words is None:
                        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                    expect(False, words, "was not printed:", self.shown)
        return None


def progress_is_shown_on_a_terminal():
    with Place(some__needle=big()) as place:
        def fault(handler, role, path):
            if role == "cdn":
                time.sleep(1)
            return False

        place.hub.fault = fault
        terminal = Terminal(place, "pull", NAME, "--connections", "1")
        terminal.wait(b" of 83.9 MB")
        terminal.wait(b"/s")
        expect(terminal.wait() == GOOD, terminal.shown)
        expect(b"#" in terminal.shown and b" %" in terminal.shown and b"left" in terminal.shown, terminal.shown)
        place.check()


def run_offers_to_download_on_a_terminal():
    with Place(some__needle=needle()) as place:
        terminal = Terminal(place, "run", "-m", NAME, "-p", "Call me", "-n", "4")
        terminal.wait(b"Download it (7.22 MB)? [Y/n]")
        os.write(terminal.fd, b"n\n")
        expect(terminal.wait() == FAILED and b"was not downloaded" in terminal.shown, terminal.shown)
        expect(place.hub.count("cdn") == 0, "the weights were downloaded")
        terminal = Terminal(place, "run", "-m", NAME, "-p", "Call me", "-n", "4")
        terminal.wait(b"[Y/n]")
        os.write(terminal.fd, b"\n")
        expect(terminal.wait() == GOOD, terminal.shown)
        place.check()


def main():
    global program
    behaviours = {name: value for name, value in globals().items()
                  if callable(value) and getattr(value, "__module__", "") == "__main__" and name not in
                  ("expect", "read", "needle", "noise", "big", "gguf", "gguf_repository", "main", "Place", "Terminal", "wait_until")}
    if sys.argv[1:] == ["--list"]:
        print("\n".join(behaviours))
        return
    if len(sys.argv) != 3 or sys.argv[2] not in behaviours:
        sys.exit(__doc__)
    program = os.path.abspath(sys.argv[1])
    threading.excepthook = lambda details: print("local hub:", details.exc_value, file=sys.stderr)
    behaviours[sys.argv[2]]()


if __name__ == "__main__":
    main()
