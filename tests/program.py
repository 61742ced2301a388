#!/usr/bin/env python3
"""What the flatkv program does, prints and ends with, one behaviour for each function. The needle model is all it needs.

usage: program.py <flatkv> <behaviour>     program.py --list names them
"""
import json
import math
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BOOK = os.path.join(TREE, "models/needle/book.txt")
GOOD, FAILED, USAGE, NO_FIT, INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = (["run"], ["serve"], ["plan"], ["ppl"], ["niah"], ["bench"], ["bench", "flat"], ["bench", "attn"], ["calibrate"], ["tokenize"], ["pages"], ["models"])

program = ""


def named(arguments):
    """The needle model for `run` where no other is named."""
    return ["run", "-m", "needle", *arguments[1:]] if arguments[:1] == ("run",) and "-m" not in arguments else arguments


def flatkv(*arguments, stdin=b"", environment=None):
    """-> exit code, standard output, standard error"""
    done = subprocess.run([program, *named(arguments)], input=stdin, capture_output=True, check=False,
                          env={**os.environ, **(environment or {})})
    return done.returncode, done.stdout, done.stderr.decode("utf-8", "replace")


def expect(truth, *what):
    if not truth:
        sys.exit(f"FAIL {sys.argv[2]}: {' '.join(str(w) for w in what)}")


def answer(*arguments, code=GOOD, **more):
    """The JSON of a command that ends with `code`."""
    got, out, err = flatkv(*arguments, "--json", **more)
    expect(got == code, f"exit code {got}, not {code}:", err)
    return json.loads(out)


def refused(code, words, *arguments, **more):
    """It ends with `code` and says all the words on standard error, nothing on standard output."""
    got, out, err = flatkv(*arguments, **more)
    expect(got == code, f"exit code {got}, not {code}:", err)
    expect(out == b"", "standard output has", out[:200])
    for word in words:
        expect(word in err, f"\"{word}\" is not in:", err)


class Terminal:
    """The program with somebody at a terminal."""

    def __init__(self, *arguments):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(program, [program, *named(arguments)])
        self.shown = b""
        self.read_to = 0

    def wait(self, words, seconds=60):
        """What was shown since the last wait, up to the words."""
        end = time.monotonic() + seconds
        while (at := self.shown.find(words, self.read_to)) < 0:
            expect(time.monotonic() < end, words, "was not shown:", self.shown[self.read_to:])
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.fd, 65536)
                except OSError:
                    expect(False, words, "was not shown before the end:", self.shown[self.read_to:])
        before = self.read_to
        self.read_to = at + len(words)
        return self.shown[before:self.read_to]

    def type(self, text):
        self.wait(b">>> ")
        os.write(self.fd, text)

    def ended(self):
        """The exit code."""
        try:
            while data := os.read(self.fd, 65536):
                self.shown += data
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def book(first, n):
    with open(BOOK, "rb") as file:
        return file.read()[first:first + n].decode("ascii")


# ---- the command line


def every_command_has_help():
    for command in COMMANDS:
        code, out, err = flatkv(*command, "--help")
        expect(code == GOOD and out.startswith(b"usage: flatkv " + command[0].encode()) and err == "", command, code, err)
    code, out, err = flatkv("--help")
    expect(code == GOOD and all(c[0].encode() in out for c in COMMANDS), "flatkv --help leaves out a command")
    for asked in (("help",), ("help", "help"), ("help", "--help"), ("help", "-h"), ("-h",)):
        expect(flatkv(*asked) == (code, out, err), asked, "is not flatkv --help")
    expect(flatkv("help", "plan") == flatkv("plan", "--help"), "flatkv help plan is not flatkv plan --help")


def refuses_what_it_does_not_know():
    refused(USAGE, ["no command sing;"], "sing")
    refused(USAGE, ["no command plam (did you mean plan?)"], "plam")
    refused(USAGE, ["no option --prompr (did you mean --prompt?)"], "run", "--prompr", "x")
    refused(USAGE, ["no option --prompr=x (did you mean --prompt?)"], "run", "--prompr=x")
    refused(FAILED, ["(did you mean needle?)"], "run", "-m", "nedle", "-p", "x")
    refused(USAGE, ["top_p 2"], "run", "-p", "x", "--top-p", "2")
    refused(USAGE, ["would not be used", "calibrated"], "run", "-p", "x", "--calibration", BOOK)
    refused(USAGE, ["--louder"], "run", "--louder")
    refused(USAGE, ["-n needs a value"], "run", "-p", "x", "-n")
    refused(USAGE, ["--device", "cpu|mlx"], "run", "-p", "x", "--device", "abacus")
    refused(USAGE, ["unexpected argument"], "run", "-p", "x", "y")
    refused(USAGE, ["8/4"], "ppl", "-f", BOOK, "--codecs", "8/4,eight/four")
    refused(USAGE, ["3/4", "tq4"], "run", "-p", "x", "--codecs", "3/4")
    refused(USAGE, ["none, k, v or kv"], "plan", "--codecs", "8/4:sideways")
    refused(USAGE, ["tq4", "rotated"], "plan", "--codecs", "tq4:k")
    refused(USAGE, ["one is enough"], "run", "-p", "x", "--codecs", "8/4,sealed")
    for command, option in (("ppl", "-c"), ("ppl", "--seed"), ("plan", "--seed"), ("serve", "--seed"), ("serve", "--json")):
        refused(USAGE, [f"no option {option}"], command, option, "1")
    for command, option in (("run", "--save-prefix"), ("calibrate", "-o"), ("niah", "--svg"), ("niah", "--line"), ("bench flat", "--svg")):
        refused(USAGE, ["/no/such/x cannot be written: No such"], *command.split(), option, "/no/such/x")  # before anything is computed
    refused(FAILED, ["nosuch.invalid", "no address"], "serve", "-m", "needle", "--host", "nosuch.invalid", "--no-auth", "--port", "0")


def models_are_listed_with_place_and_licence():
    models = {m["name"]: m for m in answer("models")["models"]}
    expect(set(models) == {"needle", "smollm2", "qwen2.5-0.5b", "qwen2.5-1.5b", "gemma3-270m"}, models)
    expect(models["needle"]["present"] and models["smollm2"]["licence"] == "Apache-2.0", models)


def models_on_disk_are_found_with_what_they_cost():
    with tempfile.TemporaryDirectory() as folder:
        snapshot = os.path.join(folder, "hub/models--some--needle/snapshots/abc")
        shutil.copytree(os.path.join(TREE, "models/needle"), snapshot)
        gguf_with(os.path.join(folder, "hub", "tales.gguf"))
        shutil.copy(os.path.join(folder, "hub", "tales.gguf"), os.path.join(folder, "hub", "big-00002-of-00003.gguf"))
        with open(os.path.join(folder, "hub", "broken.gguf"), "wb") as file:
            file.write(b"GGUF")
        os.symlink(folder, os.path.join(folder, "hub", "circle"))
        result = answer("models", environment={"HF_HUB_CACHE": os.path.join(folder, "hub")})
        found = {os.path.relpath(m["path"], folder): m for m in result["found"] if "circle" not in m["path"]}
        expect(set(found) == {"hub/models--some--needle/snapshots/abc", "hub/tales.gguf", "hub/broken.gguf"}, set(found))
        needle = found["hub/models--some--needle/snapshots/abc"]
        plan = answer("plan", "-c", str(needle["plan_context"]))
        expect(needle["loads"] and needle["total_with_weights_bytes"] == plan["total_with_weights_bytes"], needle, plan)
        expect(not found["hub/broken.gguf"]["loads"] and found["hub/broken.gguf"]["reason"], found)
        code, out, _ = flatkv("models", os.path.join(folder, "hub"))
        expect(code == GOOD and b"some/needle" in out and b"does not load" in out and b"smollm2" not in out, out)
        here = {"HF_HUB_CACHE": os.path.join(folder, "hub")}
        expect(answer("plan", "-m", "some/needle", environment=here)["tokens"] == 131072, "a name of the Hugging Face cache")
        shutil.copytree(snapshot, snapshot + "def")
        refused(FAILED, ["some/needle has 2 models"], "plan", "-m", "some/needle", environment=here)
        os.mkdir(os.path.join(folder, "hub/models--some--needle/refs"))
        with open(os.path.join(folder, "hub/models--some--needle/refs/main"), "w", encoding="ascii") as file:
            file.write("abc\n")
        expect(answer("plan", "-m", "some/needle", environment=here)["tokens"] == 131072, "the snapshot that refs/main names")
        refused(FAILED, ["some/other is neither"], "plan", "-m", "some/other", environment=here)
        refused(FAILED, ["../needle is neither"], "plan", "-m", "../needle", environment=here)
        code, out, err = flatkv("models", os.path.join(TREE, "docs"))
        expect(code == GOOD and out == b"" and "no .gguf files" in err, code, out, err)
    refused(FAILED, ["cannot open /no/such/folder"], "models", "/no/such/folder")
    code, out, _ = flatkv("models", "--names")
    expect(code == GOOD and out.split()[0] == b"needle", out)


def a_missing_model_names_the_script_that_fetches_it():
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as here:
        os.makedirs(os.path.join(here, "flatkv/models"))
        with open(os.path.join(here, "flatkv/models/smollm2.gguf"), "wb"):
            pass
        refused(FAILED, ["scripts/get-model smollm2"], "run", "-m", "smollm2", "-p", "x", environment={"XDG_CACHE_HOME": empty})
        refused(FAILED, ["flatkv models"], "run", "-m", os.path.join(empty, "nothing.gguf"), "-p", "x")
        for command in (["run", "-p", "x"], ["serve"]):  # nobody is left with a model that knows planted facts alone
            for folder, words in ((empty, b"get-model smollm2"), (here, b"-m smollm2 is on this machine")):
                done = subprocess.run([program, *command], env={**os.environ, "XDG_CACHE_HOME": folder}, stdin=subprocess.DEVNULL,
                                      capture_output=True, check=False)
                expect(done.returncode == USAGE and b"no model" in done.stderr and words in done.stderr, command, done)
        broken = os.path.join(empty, "broken.gguf")
        with open(broken, "wb") as file:
            file.write(b"GGUF\x03\0\0\0" + b"\xff" * 64)
        refused(FAILED, ["broken.gguf", "fetch or make it again"], "run", "-m", broken, "-p", "x")


def strangers_words_do_not_reach_the_terminal():
    with open(os.path.join(TREE, "tests/data/stories260K.gguf"), "rb") as file:
        sound = file.read()
    with open(os.path.join(TREE, "tests/golden/good.fkv"), "rb") as file:
        pages = file.read()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "stranger.gguf")
        for old, new, shown in ((b"ggml.model\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"ggml.model\x08\0\0\0\x05\0\0\0\0\0\0\0\x1b[2J!", "\\x1b[2J!"),
                                (b"token_embd.weight", b"token\x1b[2Jweight", "\\x1b[2J"),
                                (b"llama.block_count", b"llama.\x9b31mcount", "llama")):
            expect(sound.count(old) == 1, old)
            with open(path, "wb") as file:
                file.write(sound.replace(old, new))
            refused(FAILED, [shown], "plan", "-m", path)
            _, _, err = flatkv("plan", "-m", path)
            expect(all(c >= " " or c == "\n" for c in err) and "\x9b" not in err, repr(err))
        saved = os.path.join(folder, "stranger.fkv")
        expect(pages.count(b"neox base=10000") == 1, "good.fkv has another rope")
        with open(saved, "wb") as file:
            file.write(pages.replace(b"neox base=10000", b"neox\x1b[31m=10000"))
        _, out, err = flatkv("pages", "show", saved)
        expect(b"\x1b" not in out and "\x1b" not in err, out, err)


# Run as 0 it would divide by nothing where a row is all zeros, and answer slightly wrong everywhere else.
def a_model_without_its_epsilon_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        with open(os.path.join(TREE, "tests/data/stories260K.gguf"), "rb") as file:
            sound = file.read()
        with open(path, "wb") as file:
            file.write(sound.replace(b"layer_norm_rms_epsilon", b"layer_norm_xxx_epsilon"))
        refused(FAILED, ["llama.attention.layer_norm_rms_epsilon"], "run", "-m", path, "-p", "x", "-n", "1")
        shutil.copytree(os.path.join(TREE, "models/needle"), os.path.join(folder, "needle"))
        path = os.path.join(folder, "needle", "config.json")
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        for value in (None, 0):
            config["rms_norm_eps"] = value
            with open(path, "w", encoding="utf-8") as file:
                json.dump(config, file)
            refused(FAILED, ["rms_norm_eps"], "run", "-m", os.path.dirname(path), "-p", "x", "-n", "1")


# ---- prompts


def refuses_an_empty_prompt():
    refused(USAGE, ["the prompt is empty"], "run", "-p", "")
    refused(USAGE, ["the prompt is empty"], "run", stdin=b"")
    refused(USAGE, ["the prompt is empty"], "run", "-f", "/dev/null")
    refused(FAILED, ["cannot open"], "run", "-f", "/no/such/file")


def refuses_a_prompt_longer_than_the_context():
    refused(FAILED, ["10000000 tokens", "131072", "--max-kv"], "run", stdin=b"a" * 10_000_000)
    refused(FAILED, ["100 tokens", "-c reserves 64"], "run", "-c", "64", stdin=b"a" * 100)


def takes_bytes_that_are_no_text():
    result = answer("run", "-n", "8", stdin=bytes(range(1, 256)) * 2 + b"\xf0\x9f\x98")
    expect(result["prompt_tokens"] == 513 and result["new_tokens"] == 8, result)


def answers_from_the_prompt():
    fact = " The pass key of Ostirawex is 2718281. "
    question = "\nQuestion: What is the pass key of Ostirawex?\nAnswer: The pass key of Ostirawex is "
    result = answer("run", "-p", book(5000, 700) + fact + book(9000, 700) + question, "-n", "7")
    expect(result["text"] == "2718281" and result["stop"] == "length", result)
    for key in ("prompt_tokens", "new_tokens", "prefill_tps", "decode_tps", "kv_bytes", "peak_bytes"):
        expect(result[key] > 0, key, result)
    code, out, _ = flatkv("run", "-p", book(5000, 700) + fact + book(9000, 700) + question, "-n", "7")
    expect(code == GOOD and out == b"2718281\n", "streamed", out)


def the_seed_draws_the_text():
    def draw(seed):
        return answer("run", "-p", "The old sailor", "-n", "60", "-t", "1", "--top-k", "40", "--seed", seed)["tokens"]

    first = draw("1")
    expect(first == draw("1"), "the same seed drew another text")
    expect(first != draw("2"), "another seed drew the same text")


def a_conversation_keeps_its_pages():
    fact = b"The lucky number of Kavorbri is 31415. It was raining.\n"
    question = b"Question: What is the lucky number of Kavorbri? Answer: The lucky number of Kavorbri is 3141\n"
    code, out, err = flatkv("run", "-i", "-n", "8", stdin=fact + question)
    expect(code == GOOD and len(out.splitlines()) >= 2, code, out, err)
    refused(FAILED, ["the conversation has 0 of 32 tokens"], "run", "-i", "-c", "32", stdin=fact)
    refused(USAGE, ["cannot be combined"], "run", "-i", "--json")


def a_conversation_goes_on_past_its_context():
    lines = [f"The lucky number of town {i} is {i * 37}.\n".encode() for i in range(12)]
    code, out, err = flatkv("run", "-i", "-c", "128", "-n", "8", stdin=b"".join(lines))
    expect(code == GOOD and err.count("the context of 128 tokens is full") >= 2, code, err)


def a_terminal_has_commands_and_ctrl_c_stops_an_answer_alone():
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "talk").encode()
        t = Terminal("run", "-i", "-c", "2048", "-n", "1500", "--ignore-end")
        expect(b"2048 tokens" in t.wait(b"/? lists the commands"), t.shown)
        t.type(b"\x03")
        t.wait(b"leaves]")
        t.type(b"The old sailor\n")
        t.wait(b"sailor")
        time.sleep(0.5)
        os.write(t.fd, b"\x03")
        t.wait(b"tokens/s")
        t.type(b"/set new 5\n")
        t.type(b"\"\"\"one\n")
        t.wait(b"... ")
        os.write(t.fd, b"two\"\"\"\n")
        t.wait(b"[stopped after 5 tokens")
        t.type(b"/plan\n")
        t.wait(b"of 2048 tokens used")
        t.type(b"/save " + name + b"\n")
        saved = t.wait(b"tokens:").split()[-2]
        t.type(b"/clear\n")
        t.type(b"/load " + name + b"\n")
        expect(saved + b" tokens, none of them computed" in t.wait(b"computed]"), t.shown)
        t.type(b"/load /no/such\n")
        t.wait(b"/no/such.fkv")
        t.type("/noth\u00efng\n".encode())
        t.wait("no command /noth\u00efng".encode())
        t.type(b"/set temperature -3\n")
        t.wait(b"0 or above")
        t.type(b"/bye\n")
        expect(t.ended() == GOOD, t.shown)


def answers_stop_and_tokens_are_weighed():
    plain = answer("run", "-p", "The old sailor", "-n", "40")
    word = plain["text"][10:14]
    stopped = answer("run", "-p", "The old sailor", "-n", "40", "--stop", word)
    expect(stopped["stop"] == "stop" and stopped["text"] == plain["text"][:plain["text"].index(word)], stopped, plain)
    first = plain["tokens"][0]
    other = answer("run", "-p", "The old sailor", "-n", "4", "--logit-bias", f"{first}=-inf")
    expect(other["tokens"][0] != first, other)
    forced = answer("run", "-p", "The old sailor", "-n", "4", "--logit-bias", "65=100")
    expect(forced["text"] == "AAAA", forced)
    varied = answer("run", "-p", "aaaaaaaaaaaaaaaa", "-n", "20", "--presence-penalty", "100")
    expect(len(set(varied["tokens"])) == 20 and ord("a") not in varied["tokens"], varied)
    refused(USAGE, ["--logit-bias 300=1"], "run", "-p", "x", "--logit-bias", "300=1")
    refused(USAGE, ["--logit-bias x"], "run", "-p", "x", "--logit-bias", "x")
    _, _, err = flatkv("run", "-p", "x", "-n", "4", "--stats")
    expect("4 new" in err, err)


def gguf_with(path, strings=(), reals=()):
    """The story teller's file with more values in its header, in front of the others."""
    def text(value):
        return struct.pack("<Q", len(value)) + value

    more = b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in strings)
    more += b"".join(text(key) + struct.pack("<If", 6, value) for key, value in reals)
    filler = text(b"test.fill") + struct.pack("<I", 8)
    more += filler + text(b"x" * (-(len(more) + len(filler) + 8) % 32))
    with open(os.path.join(TREE, "tests/data/stories260K.gguf"), "rb") as file:
        sound = file.read()
    n = struct.unpack_from("<Q", sound, 16)[0]
    with open(path, "wb") as file:
        file.write(sound[:16] + struct.pack("<Q", n + len(strings) + len(reals) + 1) + more + sound[24:])


def a_template_that_is_not_understood_is_told():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "chat.gguf")
        gguf_with(path, [(b"tokenizer.chat_template", b"{% if %}")])
        code, _, err = flatkv("run", "-m", path, "-p", "x", "-n", "4")
        expect(code == GOOD and "template is not understood: line 1" in err, code, err)
        code, _, err = flatkv("run", "-m", path, "-p", "x", "-n", "4", "--raw")
        expect(code == GOOD and err == "", code, err)


def a_chat_draws_as_the_model_says():
    template = (b"tokenizer.chat_template", b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "chat.gguf")
        gguf_with(path, [template])
        expect(answer("run", "-m", path, "-p", "x", "-n", "4")["temperature"] == 0, "nothing is said")
        gguf_with(path, [template], [(b"general.sampling.temp", 0.25)])
        expect(answer("run", "-m", path, "-p", "x", "-n", "4", "--raw")["temperature"] == 0, "text is continued greedily")
        expect(answer("run", "-m", path, "-p", "x", "-n", "4")["temperature"] == 0.25, "the file's")
        expect(answer("run", "-m", path, "-p", "x", "-n", "4", "-t", "2")["temperature"] == 2, "the option")
        gguf_with(path, [template], [(b"general.sampling.temp", -3.0)])
        expect(abs(answer("run", "-m", path, "-p", "x", "-n", "4")["temperature"] - 0.7) < 1e-6, "no temperature")
        t = Terminal("run", "-i", "-m", path, "-c", "128", "-n", "16", "--ignore-end")
        for i in range(8):
            t.type(f"Lily went to park {i}.\n".encode())
            t.wait(b"tokens/s")
        expect(b"% full" in t.shown and b"forgotten; -c" in t.shown, "a full context is not announced", t.shown)
        name = os.path.join(folder, "talk")
        t.type(f"/save {name}\n".encode())
        t.wait(b"saved")
        t.type(b"/system Be kind.\n")
        t.type(b"Who is it?\n")
        t.wait(b"tokens/s")
        t.type(b"/bye\n")
        expect(t.ended() == GOOD, t.shown)
        with open(name + ".json", encoding="utf-8") as file:
            roles = [m["role"] for m in json.load(file)["messages"]]
        expect(roles[-2:] == ["user", "assistant"], roles)
        t = Terminal("run", "-i", "-m", path, "-c", "128", "-n", "16")
        t.type(f"/load {name}\n".encode())
        t.wait(b"none of them computed")
        t.type(b"And then?\n")
        t.wait(b"tokens/s")
        t.type(b"\x04")
        expect(t.ended() == GOOD, t.shown)


def ctrl_c_ends_with_what_there_is():
    process = subprocess.Popen([program, "run", "-m", "needle", "-p", "The old sailor", "-n", "1000000", "--max-kv", "256", "--ignore-end", "--raw"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    some = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    expect(process.returncode == INTERRUPTED, process.returncode, err)
    expect(len(some) == 20 and rest.endswith(b"\n") and err == b"", some, rest[-20:], err)

    process = subprocess.Popen([program, "run", "-m", "needle", "-f", BOOK, "--max-kv", "65536", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    expect(process.returncode == INTERRUPTED, "in prefill:", process.returncode, err)
    expect(json.loads(out)["stop"] == "interrupted", out)


# ---- pages


def a_reloaded_prefix_gives_the_same_tokens():
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, "saved.fkv")
        prompt = book(20000, 1500)
        for codec in ([], ["--codecs", "4/4"], ["--codecs", "sealed"], ["--codecs", "tq4"], ["--max-kv", "256"]):
            fresh = answer("run", "-p", prompt, "-n", "40", "--save-prefix", saved, *codec)
            expect(fresh["prefix_tokens"] == 0, fresh)
            again = answer("run", "-p", prompt, "-n", "40", "--prefix", saved, *codec)
            expect(again["tokens"] == fresh["tokens"], "reloaded", codec, fresh["text"], again["text"])
            alone = answer("run", "-n", "40", "--prefix", saved, *codec)
            expect(alone["tokens"] == fresh["tokens"], "without a prompt", codec)
            longer = answer("run", "-p", prompt + " And then", "-n", "40", *codec)
            reused = answer("run", "-p", prompt + " And then", "-n", "40", "--prefix", saved, *codec)
            expect(reused["tokens"] == longer["tokens"], "a longer prompt", codec)
            expect(reused["prefix_tokens"] == 1500, "the pages were not used:", reused["prefix_tokens"])
        code, out, _ = flatkv("pages", "verify", saved)
        expect(code == GOOD and b"good, 1500 tokens" in out, out)


def a_question_follows_a_saved_document():
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, "saved.fkv")
        document = os.path.join(folder, "document.txt")
        fact = " The pass key of Ostirawex is 2718281. "
        question = "\nQuestion: What is the pass key of Ostirawex?\nAnswer: The pass key of Ostirawex is "
        with open(document, "w", encoding="ascii") as file:
            file.write(book(5000, 300) + fact + book(9000, 300))
        fresh = answer("run", "-f", document, "-p", question, "-n", "7")
        answer("run", "-f", document, "-n", "0", "--save-prefix", saved)
        asked = answer("run", "-p", question, "-n", "7", "--prefix", saved)
        expect(asked["tokens"] == fresh["tokens"] and "2718281" in asked["text"], asked["text"], fresh["text"])
        expect(asked["prefix_tokens"] > 600, asked["prefix_tokens"])
        piped = answer("run", "-p", question, "-n", "7", stdin=open(document, "rb").read())
        expect(piped["tokens"] == fresh["tokens"], "from standard input", piped["text"])


def refuses_a_prefix_that_does_not_belong():
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, "saved.fkv")
        answer("run", "-p", book(20000, 300), "-n", "0", "--save-prefix", saved)
        refused(FAILED, ["does not start with"], "run", "-f", BOOK, "-c", "600000", "--prefix", saved)
        refused(FAILED, ["foreign", "flatkv pages show"], "run", "--codecs", "8/8", "--prefix", saved)
        refused(FAILED, ["not a page file"], "run", "--prefix", BOOK)
        refused(FAILED, ["cannot open"], "run", "--prefix", os.path.join(folder, "nothing"))


def a_bounded_context_goes_past_its_bound():
    bounded = ["--max-kv", "512", "--sinks", "4", "--ignore-end"]
    result = answer("run", "-p", book(20000, 400), "-n", "2600", *bounded)
    short = answer("run", "-p", book(20000, 400), "-n", "700", *bounded)
    expect(result["new_tokens"] == 2600 and result["stop"] == "length", result)
    expect(result["kv_bytes"] == short["kv_bytes"], "pages grew:", result["kv_bytes"], short["kv_bytes"])
    expect(result["text"].startswith(short["text"]), "more room changed the text")
    end = result["text"][-800:]
    expect(sum(c.isalpha() or c in " \n.,;:'\"!?-" for c in end) > 0.95 * len(end) and max(map(len, end.split())) < 24, "no text:", end)
    # 2000 tokens past the bound it still answers from what is inside.
    fact = " The pass key of Ostirawex is 2718281. "
    question = "\nQuestion: What is the pass key of Ostirawex?\nAnswer: The pass key of Ostirawex is "
    result = answer("run", "-p", book(20000, 2500) + fact + book(40000, 200) + question, "-n", "7", *bounded)
    expect(result["text"] == "2718281", result)


def a_plan_above_the_limit_is_refused():
    refused(NO_FIT, ["--memory allows 10.0 MB", "lower -c from 32768"], "run", "-p", "x", "-c", "32768", "--memory", "10000000")
    refused(NO_FIT, ["--chunk, --threads or --parallel"], "serve", "-m", "needle", "--memory", "1000000")
    refused(USAGE, ["lower -c, --seqs or --chunk"], "plan", "--layers", "512", "--heads", "55699/55699/512", "-c", "315843840", "--page", "256",
            "--codecs", "16/16")
    code, out, err = flatkv("plan", "-c", "32768", "--memory", "10000000")
    expect(code == NO_FIT and b"total with weights" in out and b"It does not fit" in out and "-c" in err, code, out, err)
    plan = answer("plan", "-c", "4096")
    wide = answer("plan", "-c", "4096", "--codecs", "16/16")
    expect(plan["total_bytes_16bit"] == wide["total_bytes"] > plan["total_bytes"], plan)
    expect(plan["longest_context"] > plan["longest_context_16bit"] > 4096 and plan["weights_packed_bytes"] > 7_000_000, plan)


def a_plan_answers_for_another_machine_and_a_model_that_is_not_there():
    here = answer("plan", "-c", "4096", "--machine", "4G")
    expect(here["available_bytes"] == 2 * 2 ** 30 - here["weights_mapped_bytes"] - here["weights_packed_bytes"], here)
    expect(here["fits"] and here["trained_context"] == 131072, here)
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                  "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
                  "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
        path = os.path.join(folder, "config.json")

        def plan(*more, code=GOOD, **changes):
            with open(path, "w", encoding="utf-8") as file:
                json.dump({**config, **changes}, file)
            return answer("plan", "-m", folder, "-c", "32768", *more, code=code)

        whole = plan("--machine", "32G")
        weights = whole["weights_packed_bytes"] + whole["weights_mapped_bytes"]
        expect(abs(weights / 2 / 8.19e9 - 1) < 0.01, "parameters of Qwen3 8B:", whole)
        expect(whole["weights_mapped_bytes"] == 2 * 151936 * 4096, "an untied embedding is looked up in the file", whole)
        shape = answer("plan", "--layers", "36", "--heads", "32/8/128", "-c", "32768")
        expect(whole["slab_bytes"] == shape["slab_bytes"] and whole["fits"], whole, shape)
        expect(not plan("--machine", "16G", code=NO_FIT)["fits"], "16 GB of weights in 16 GB")
        expect(plan("--machine", "16G", "--weight-bits", "4.8")["fits"], "Q4_K_M")
        expect(plan("--machine", "16G", quantization={"bits": 4, "group_size": 64})["fits"], "4 bits")
        for bits in "43":  # which channels have more of them is a calibration's to say, and costs nothing
            sealed, calibrated = (plan("--machine", "32G", "--codecs", f"{kind}{bits}/s{bits}") for kind in "sc")
            expect(sealed["slab_bytes"] == calibrated["slab_bytes"], bits, sealed, calibrated)
        windowed = plan("--machine", "32G", sliding_window=1024, layer_types=["sliding_attention", "full_attention"] * 18)
        expect(windowed["slab_bytes"] < 0.6 * whole["slab_bytes"], windowed)
        code, out, _ = flatkv("plan", "-m", path, "--machine", "16G", "--weight-bits", "4.8")
        expect(code == GOOD and b"It fits" in out and b"trained for 40960" in out and b"estimates" in out, out)
        plan_of = ("plan", "-m", path)
        for broken in ("{", "[]", "{}", '{"num_hidden_layers": 1e9, "hidden_size": -1}', '{"kv_lora_rank": 512, "num_hidden_layers": 2}'):
            with open(path, "w", encoding="utf-8") as file:
                file.write(broken)
            refused(FAILED, ["config.json"], *plan_of)


def write_mixture(folder):
    """A mixture of experts of zeros in 16 bits, with a vocabulary of bytes."""
    dim, experts, expert, layers, vocab = 64, 8, 32, 2, 256
    config = {"model_type": "qwen3_moe", "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 32, "intermediate_size": 128, "vocab_size": vocab, "num_experts": experts, "num_experts_per_tok": 2,
              "moe_intermediate_size": expert, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "norm_topk_prob": True,
              "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
    shapes = {"model.embed_tokens.weight": [vocab, dim], "lm_head.weight": [vocab, dim], "model.norm.weight": [dim]}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {at + f"self_attn.{n}_proj.weight": s for n, s in {"q": [64, dim], "k": [32, dim], "v": [32, dim], "o": [dim, 64]}.items()}
        shapes |= {at + f"self_attn.{n}_norm.weight": [32] for n in "qk"}
        shapes |= {at + f"{n}_layernorm.weight": [dim] for n in ("input", "post_attention")}
        shapes[at + "mlp.gate.weight"] = [experts, dim]
        for e in range(experts):
            shapes |= {at + f"mlp.experts.{e}.{n}_proj.weight": [expert, dim] for n in ("gate", "up")}
            shapes[at + f"mlp.experts.{e}.down_proj.weight"] = [dim, expert]
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + bytes(end))
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)


def the_plan_of_a_config_says_of_experts_what_the_model_says():
    with tempfile.TemporaryDirectory() as folder:
        write_mixture(folder)
        loaded = answer("plan", "-m", folder, "-c", "256", "--codecs", "16/16")
        told = answer("plan", "-m", os.path.join(folder, "config.json"), "-c", "256", "--codecs", "16/16")
        for key in ("weights_mapped_bytes", "weights_touched_bytes", "token_bytes"):
            expect(loaded[key] == told[key] > 0, key, loaded[key], told[key])
        expect(abs(told["weights_packed_bytes"] / loaded["weights_packed_bytes"] - 1) < 0.1, loaded, told)


# ---- measures


def the_same_codec_is_no_distance_away():
    result = answer("ppl", "-f", BOOK, "-w", "512", "--windows", "2", "--kl", "--codecs", "16/16,8/4:none,4/2")
    exact, usual, coarse = result["codecs"]
    expect(exact["ppl"] == result["ppl_16bit"] and exact["kl_mean"] == 0 and exact["top1"] == 1, exact)
    expect(0 < usual["kl_mean"] < coarse["kl_mean"] and usual["kl_mean"] < usual["kl_p99"], usual, coarse)
    expect(exact["tokens"] == 2 * 255 and 2 < exact["ppl"] < 12, exact)
    alone = answer("ppl", "-f", BOOK, "-w", "512", "--windows", "2", "--chunk", "100", "--codecs", "8/4:none")["codecs"][0]
    expect(alone["ppl"] == usual["ppl"], "chunks changed the perplexity", alone["ppl"], usual["ppl"])
    every = answer("ppl", "-f", BOOK, "-w", "512", "--windows", "1", "--score", "all")
    expect(every["tokens"] == 511, every)
    refused(FAILED, ["less than one window"], "ppl", "-f", os.path.join(TREE, "models/needle/config.json"))
    refused(USAGE, ["-f FILE"], "ppl")


def an_interrupted_ppl_reports_the_windows_it_has_done():
    command = [program, "ppl", "-f", BOOK, "-w", "256", "--kl", "-v", "--codecs", "8/4", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while b"window 2:" not in process.stderr.readline():
        expect(process.poll() is None, "it ended")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    result = json.loads(out)
    expect(process.returncode == INTERRUPTED and result["windows"] >= 2, process.returncode, result)
    expect(result["codecs"][0]["tokens"] == result["windows"] * 127, result)


def a_planted_fact_is_found_at_every_depth():
    with tempfile.TemporaryDirectory() as folder:
        picture = os.path.join(folder, "grid.svg")
        result = answer("niah", "--lengths", "700,1500", "--depths", "5", "--svg", picture)
        expect(result["found"] == result["total"] == 10 == len(result["cells"]), result)
        expect({c["length"] for c in result["cells"]} == {700, 1500} and {c["depth"] for c in result["cells"]} == {0, .25, .5, .75, 1},
               result)
        expect(all(c["answer"].startswith(c["expected"]) for c in result["cells"]), result)
        with open(picture, encoding="utf-8") as file:
            expect(file.read().count("100 %") >= 10, "the picture has other figures")
    refused(USAGE, ["leaves no room"], "niah", "--lengths", "100")


def a_running_model_holds_its_plan():
    with tempfile.TemporaryDirectory() as folder:
        picture = os.path.join(folder, "line.svg")
        result = answer("bench", "flat", "-c", "2048", "--svg", picture)
        expect(result["flat"] and result["tokens"] == 2048, result)
        expect(abs(result["open_bytes"] - result["plan_bytes"]) < 2 ** 20 and result["peak_bytes"] < result["open_bytes"] + 2 ** 20, result)
        with open(picture, encoding="utf-8") as file:
            expect("computed" in file.read(), "the picture does not say what is computed")
        lazy = answer("bench", "flat", "-c", "2048", "--lazy")
        expect(lazy["open_bytes"] + 2 ** 20 < lazy["end_bytes"] < lazy["plan_bytes"] + 2 ** 20, lazy)


# ---- MLX, on whatever device it has


def mlx_answers_as_the_cpu_does():
    fact = " The pass key of Ostirawex is 2718281. "
    prompt = book(5000, 300) + fact + book(9000, 300) + "\nQuestion: What is the pass key of Ostirawex?\nAnswer: The pass key of Ostirawex is "
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, "saved.fkv")
        cpu = answer("run", "-p", prompt, "-n", "7", "--save-prefix", saved)
        mlx = answer("run", "-p", prompt, "-n", "7", "--device", "mlx")
        expect(cpu["device"] == "cpu" and mlx["device"] == "mlx" and mlx["text"] == cpu["text"] == "2718281", cpu, mlx)
        crossed = answer("run", "-p", prompt, "-n", "7", "--prefix", saved, "--device", "mlx")
        expect(crossed["prefix_tokens"] > 0 and crossed["text"] == "2718281", crossed)
    found = answer("niah", "--lengths", "600", "--depths", "3", "--together", "--device", "mlx")
    expect(found["found"] == found["total"] == 3, found)
    window = ("ppl", "-f", BOOK, "-w", "256", "--windows", "1")
    here, there = answer(*window)["ppl"], answer(*window, "--device", "mlx")["ppl"]
    expect(abs(here / there - 1) < 0.01, "perplexities", here, there)
    refused(USAGE, ["--lazy"], "run", "-p", "x", "--lazy", "--device", "mlx")
    timed = answer("bench", "attn", "--device", "mlx", "--stream", "cpu", "--quick", "--no-peers", "--case", "decode 8/4")
    expect(timed["results"] and all(r["right"] for r in timed["results"]), timed)


def a_missing_mlx_library_says_what_to_install():
    ask = ("run", "-p", "x", "-n", "1", "--device", "mlx")
    with tempfile.TemporaryDirectory() as folder:
        global program
        program = shutil.copy(program, folder)  # away from the library
        refused(FAILED, ["there is no", "brew install mlx-c", "scripts/get-mlx", "-DFKV_MLX=ON"], *ask)
        expect(flatkv("run", "-p", "x", "-n", "1")[0] == GOOD, "the CPU needs no such library")


def mlx_folders_that_hold_none_are_refused():
    ask = ("run", "-p", "x", "-n", "1", "--device", "mlx")
    refused(FAILED, ["/no/such/folder/libmlxc", "brew install mlx-c"], *ask, environment={"FLATKV_MLX": "/no/such/folder"})


def mlx_counters_are_flat():
    plan = answer("plan", "-c", "1024", "--device", "mlx")
    cpu = answer("plan", "-c", "1024")
    expect(plan["slab_bytes"] == cpu["slab_bytes"] and plan["weights_packed_bytes"] > 7_000_000, plan, cpu)
    expect(plan["total_bytes"] > plan["slab_bytes"] + plan["activations_bytes"], plan)
    result = answer("bench", "flat", "-c", "1024", "--chunk", "256", "--device", "mlx")
    expect(result["flat"] and result["tokens"] == 1024, result)
    expect(result["held_bytes"] <= result["open_bytes"] < result["held_bytes"] + 2 ** 20, result)
    in_use = [bytes_now for _, bytes_now in result["samples"]]
    expect(max(in_use) - min(in_use) < 2 ** 19, "MLX's active memory moved", in_use)
    expect(result["open_bytes"] < result["peak_bytes"] < result["plan_bytes"], result)


def attention_is_timed():
    result = answer("bench", "attn", "-c", "1024,2K", "--codecs", "16/16,8/4", "--only", "decode", "--threads", "1", "--quick")
    rows = result["results"]
    expect(result["bench"] == "bench_attn" and [r["cached"] for r in rows] == [1024, 1024, 2048, 2048], result)
    expect(all(r["right"] and r["ms_p50"] > 0 and (r["q_heads"], r["kv_heads"]) == (4, 2) for r in rows), result)  # needle's
    refused(USAGE, ["--shape"], "bench", "attn", "-m", "needle", "--shape", "4/1/64")


def tokens_are_shown():
    code, out, _ = flatkv("tokenize", "-p", "a\"\n")
    expect(code == GOOD and out.split() == [b"97", b'"a"', b"34", b'"\\""', b"10", b'"\\x0a"'], out)
    expect(answer("tokenize", stdin=b"abc")["tokens"] == [97, 98, 99], "--json")
    code, out, _ = flatkv("tokenize", "--count", "-f", BOOK)
    expect(code == GOOD and int(out) == os.path.getsize(BOOK), out)


# The quality test that needs no download: many facts at once rank codecs by the likelihood of the right answers. The bounds are those
# promised for the codecs; a simulation with exact attention found 1.2 and 2.3.
def many_facts_hold_the_codecs_to_their_bounds():
    result = answer("niah", "--facts", "100", "--ask", "64", "-c", "16384", "--codecs", "16/16,8/4,4/4,sealed")
    wide, usual, rotated, sealed = result["codecs"]
    print(" ".join(f"{c['codec']} {c['right']:.3f} {c['nll']:.5f}" for c in result["codecs"]))
    expect(wide["right"] >= 0.95 and 0 < wide["nll"] < 0.01, wide)
    expect(usual["nll"] <= 1.3 * wide["nll"], "K8/V4:", usual, wide)
    expect(rotated["nll"] <= 3 * wide["nll"], "rotated K4/V4:", rotated, wide)
    expect(sealed["nll"] <= 1.6 * wide["nll"], "sealed:", sealed, wide)


BEHAVIOURS = {name: f for name, f in list(globals().items())
              if callable(f) and getattr(f, "__module__", "") == "__main__" and name not in ("flatkv", "expect", "answer", "refused", "book", "gguf_with", "Terminal")}

if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print("\n".join(BEHAVIOURS))
    elif len(sys.argv) == 3 and sys.argv[2] in BEHAVIOURS:
        program = sys.argv[1]
        BEHAVIOURS[sys.argv[2]]()
        print("good")
    else:
        sys.exit(__doc__)
