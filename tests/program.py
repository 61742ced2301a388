#!/usr/bin/env python3
"""Tests the output, errors and exit codes of the flatkv program. Each function tests one behaviour. Only models of the source tree are required.

usage: program.py FLATKV BEHAVIOUR     program.py --list prints the behaviours
"""
import hashlib
import json
import math
import os
import pty
import re
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
HYBRID = os.path.join(TREE, "models/hybrid")
GOOD, FAILED, USAGE, NO_FIT, INTERRUPTED = 0, 1, 2, 3, 130
SANITIZED = "FKV_TEST_SANITIZED" in os.environ  # sanitizers are slow, so texts are shorter
COMMANDS = (["run"], ["serve"], ["plan"], ["ppl"], ["niah"], ["bench"], ["bench", "flat"], ["bench", "attn"], ["calibrate"], ["embed"], ["tokenize"], ["pages"], ["doctor"], ["models"], ["pull"])

program = ""


def named(arguments):
    """Adds -m needle to `run` if no model is given."""
    return ["run", "-m", "needle", *arguments[1:]] if arguments[:1] == ("run",) and "-m" not in arguments else arguments


def flatkv(*arguments, stdin=b"", environment=None):
    """Runs the program. Returns its exit code, standard output and standard error."""
    done = subprocess.run([program, *named(arguments)], input=stdin, capture_output=True, check=False,
                          env={**os.environ, **(environment or {})})
    return done.returncode, done.stdout, done.stderr.decode("utf-8", "replace")


def expect(condition, *what):
    if not condition:
        sys.exit(f"FAIL {sys.argv[2]}: {' '.join(str(w) for w in what)}")


def answer(*arguments, code=GOOD, **more):
    """Runs a command with --json, expects the exit code, and returns the parsed JSON."""
    got, out, err = flatkv(*arguments, "--json", **more)
    expect(got == code, f"exit code {got}, expected {code}:", err)
    return json.loads(out)


def refused(code, words, *arguments, **more):
    """Expects the exit code, all the words on standard error, and an empty standard output."""
    got, out, err = flatkv(*arguments, **more)
    expect(got == code, f"exit code {got}, expected {code}:", err)
    expect(out == b"", "unexpected standard output:", out[:200])
    for word in words:
        expect(word in err, f"\"{word}\" is missing from:", err)


class Terminal:
    """The program on a pseudoterminal."""

    def __init__(self, *arguments):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(program, [program, *named(arguments)])
        self.shown = b""
        self.read_to = 0

    def read_until(self, condition, what, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            expect(time.monotonic() < end, what, "was not printed:", self.shown[self.read_to:])
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.fd, 65536)
                except OSError:
                    expect(False, what, "was not printed before the program ended:", self.shown[self.read_to:])

    def wait(self, words, seconds=60):
        """Waits for the words and returns the output since the last wait."""
        self.read_until(lambda: words in self.shown[self.read_to:], words, seconds)
        before = self.read_to
        self.read_to = self.shown.index(words, before) + len(words)
        return self.shown[before:self.read_to]

    def wait_letters(self, n):
        """Waits until at least n letters have been printed since the last wait, not counting progress lines."""
        def count():
            text = re.sub(rb"\rprefill [^\r]*", b"", self.shown[self.read_to:])
            return sum(bytes([c]).isalpha() for c in text)

        self.read_until(lambda: count() >= n, f"{n} letters")

    def type(self, text):
        self.wait(b">>> ")
        os.write(self.fd, text)

    def ended(self):
        """Reads the remaining output and returns the exit code."""
        try:
            while data := os.read(self.fd, 65536):
                self.shown += data
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def book(first, n):
    with open(BOOK, "rb") as file:
        return file.read()[first:first + n].decode("ascii")


# ---- command line


def every_command_has_help():
    for command in COMMANDS:
        code, out, err = flatkv(*command, "--help")
        expect(code == GOOD and out.startswith(b"usage: flatkv " + command[0].encode()) and err == "", command, code, err)
        expect(out.count(b"\nGlossary of terms: man flatkv") == (command != ["bench", "attn"]), command, out[-200:])
    code, out, err = flatkv("--help")
    expect(code == GOOD and all(c[0].encode() in out for c in COMMANDS), "flatkv --help omits a command")
    for asked in (("help",), ("help", "help"), ("help", "--help"), ("help", "-h"), ("-h",)):
        expect(flatkv(*asked) == (code, out, err), asked, "differs from flatkv --help")
    expect(flatkv("help", "plan") == flatkv("plan", "--help"), "flatkv help plan differs from flatkv plan --help")


def rejects_invalid_command_lines():
    refused(USAGE, ["unknown command sing;"], "sing")
    refused(USAGE, ["unknown command plam (did you mean plan?)"], "plam")
    refused(USAGE, ["unknown option --prompr (did you mean --prompt?)"], "run", "--prompr", "x")
    refused(USAGE, ["unknown option --prompr=x (did you mean --prompt?)"], "run", "--prompr=x")
    refused(FAILED, ["(did you mean needle?)"], "run", "-m", "nedle", "-p", "x")
    refused(USAGE, ["top_p 2"], "run", "-p", "x", "--top-p", "2")
    refused(USAGE, ["--calibration requires a calibrated codec"], "run", "-p", "x", "--calibration", BOOK)
    refused(USAGE, ["--louder"], "run", "--louder")
    refused(USAGE, ["-n needs a value"], "run", "-p", "x", "-n")
    refused(USAGE, ["--device", "cpu|mlx"], "run", "-p", "x", "--device", "abacus")
    refused(USAGE, ["unexpected argument"], "run", "-p", "x", "y")
    refused(USAGE, ["8/4"], "ppl", "-f", BOOK, "--codecs", "8/4,eight/four")
    refused(USAGE, ["3/4", "tq4"], "run", "-p", "x", "--codecs", "3/4")
    refused(USAGE, ["k, v, kv or none"], "plan", "--codecs", "8/4:sideways")
    refused(USAGE, ["tq4", "requires rotation"], "plan", "--codecs", "tq4:k")
    refused(USAGE, ["single codec"], "run", "-p", "x", "--codecs", "8/4,sealed")
    for command, option in (("ppl", "-c"), ("ppl", "--seed"), ("plan", "--seed"), ("serve", "--seed"), ("serve", "--json")):
        refused(USAGE, [f"unknown option {option}"], command, option, "1")
    for command, option in (("run", "--save-prefix"), ("calibrate", "-o"), ("niah", "--svg"), ("niah", "--line"), ("bench flat", "--svg")):
        refused(USAGE, ["cannot write /no/such/x: No such"], *command.split(), option, "/no/such/x")  # reported before any computation
    refused(FAILED, ["nosuch.invalid", "no known address"], "serve", "-m", "needle", "--host", "nosuch.invalid", "--no-auth", "--port", "0")


def models_are_listed_with_location_and_licence():
    models = {m["name"]: m for m in answer("models")["models"]}
    expect(set(models) == {"needle", "smollm2", "qwen2.5-0.5b", "qwen2.5-1.5b", "gemma3-270m"}, models)
    expect(models["needle"]["present"] and models["smollm2"]["licence"] == "Apache-2.0", models)


def models_on_disk_are_listed_with_their_memory():
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
        refused(FAILED, ["some/needle is ambiguous", "snapshots/abcdef"], "plan", "-m", "some/needle", environment=here)
        os.mkdir(os.path.join(folder, "hub/models--some--needle/refs"))
        with open(os.path.join(folder, "hub/models--some--needle/refs/main"), "w", encoding="ascii") as file:
            file.write("abc\n")
        expect(answer("plan", "-m", "some/needle", environment=here)["tokens"] == 131072, "the snapshot in refs/main")
        refused(FAILED, ["flatkv pull some/other"], "run", "-m", "some/other", "-p", "x", environment=here)
        refused(FAILED, ["../needle is neither"], "plan", "-m", "../needle", environment=here)
        code, out, err = flatkv("models", os.path.join(TREE, "docs"))
        expect(code == GOOD and out == b"" and "no .gguf files" in err, code, out, err)  # an empty result is not an error
    refused(FAILED, ["cannot open /no/such/folder"], "models", "/no/such/folder")
    code, out, _ = flatkv("models", "--names")
    expect(code == GOOD and out.split()[0] == b"needle", out)


def a_missing_model_names_the_download_command():
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as here:
        os.makedirs(os.path.join(here, "flatkv/models"))
        with open(os.path.join(here, "flatkv/models/smollm2.gguf"), "wb"):
            pass
        refused(FAILED, ["flatkv pull smollm2"], "run", "-m", "smollm2", "-p", "x", environment={"XDG_CACHE_HOME": empty, "HF_HOME": empty})
        refused(FAILED, ["flatkv models"], "run", "-m", os.path.join(empty, "nothing.gguf"), "-p", "x")
        for command in (["run", "-p", "x"], ["serve"]):  # these commands never use the needle test model as a default
            for folder, words in ((empty, b"flatkv pull smollm2"), (here, b"-m smollm2, which is on this machine")):
                done = subprocess.run([program, *command], env={**os.environ, "XDG_CACHE_HOME": folder, "HF_HOME": empty}, stdin=subprocess.DEVNULL,
                                      capture_output=True, check=False)
                expect(done.returncode == USAGE and b"no model" in done.stderr and words in done.stderr, command, done)
        broken = os.path.join(empty, "broken.gguf")
        with open(broken, "wb") as file:
            file.write(b"GGUF\x03\0\0\0" + b"\xff" * 64)
        refused(FAILED, ["broken.gguf", "download or create it again"], "run", "-m", broken, "-p", "x")


def untrusted_text_is_escaped():
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
        expect(pages.count(b"neox base=10000") == 1, "good.fkv does not contain the expected RoPE text")
        changed = bytearray(pages.replace(b"neox base=10000", b"neox\x1b[31m\xc2\x9b0000"))
        data_offset = struct.unpack_from("<Q", changed, 48)[0]
        changed[256:288] = hashlib.sha256(changed[:256] + changed[288:data_offset]).digest()  # the header digest (docs/page_format.md)
        with open(saved, "wb") as file:
            file.write(changed)
        for more in ([], ["--json"]):
            code, out, err = flatkv("pages", "show", saved, *more)
            expect(code == GOOD and b"neox" in out and b"\x1b" not in out and b"\xc2\x9b" not in out, more, out, err)
        expect(json.loads(out)["rope"] == "neox\x1b[31m\u009b0000", "the escaped JSON decodes to a different value", out)
        # C1 controls, bidirectional controls and separators, in a file name.
        unsafe = "\u009b31m\u202e\u2066\u2028\u2029"
        shutil.copy(os.path.join(TREE, "tests/data/stories260K.gguf"), os.path.join(folder, unsafe + ".gguf"))
        for more in ([], ["--json"]):
            code, out, err = flatkv("models", folder, *more)
            expect(code == GOOD and not any(c in out.decode() for c in "\u009b\u202e\u2066\u2028\u2029"), more, out, err)
        paths = [m["path"] for m in json.loads(out)["found"]]
        expect(os.path.join(folder, unsafe + ".gguf") in paths, "the escaped JSON decodes to a different value", paths)


def command_line_words_are_escaped_in_errors():
    for arguments in (["\x1b[2Jrun"], ["run", "--\x1b[2J"], ["run", "-m", "/no/\x1b[2J\u009b31m\u202e"], ["run", "-p", "x", "--device", "\x1b]0;x\x07"],
                      ["pages", "verify", "/no/\x1b[2J"], ["plan", "--codecs", "\x1b[2J"]):
        code, out, err = flatkv(*arguments)
        expect(code != GOOD and out == b"", code, out)
        expect(not any(c in err for c in "\x1b\x07\u009b\u202e"), arguments, repr(err))


def incomplete_models_are_explained():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(TREE, "models/needle/config.json"), encoding="utf-8") as file:
            config = json.load(file)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump({**config, "vocab_size": 151936}, file)
        refused(FAILED, ["the weights are missing"], "run", "-m", folder, "-p", "x")
        bare = shutil.copy(os.path.join(TREE, "models/needle/needle.safetensors"), os.path.join(folder, "bare.safetensors"))
        refused(FAILED, ["pass the folder", "config.json"], "run", "-m", bare, "-p", "x")
        strange = os.path.join(folder, "strange.gguf")
        with open(strange, "wb") as file:  # the file contains a single value: general.architecture = strange
            name, value = b"general.architecture", b"strange"
            file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value)
        refused(FAILED, ["neither tensors nor a tokenizer", "strange"], "run", "-m", strange, "-p", "x")


# An epsilon of 0 would cause a division by zero for rows of zeros, and slightly wrong results for all other rows.
def a_model_without_norm_epsilon_is_rejected():
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


def rejects_an_empty_prompt():
    refused(USAGE, ["the prompt is empty"], "run", "-p", "")
    refused(USAGE, ["the prompt is empty"], "run", stdin=b"")
    refused(USAGE, ["the prompt is empty"], "run", "-f", "/dev/null")
    refused(FAILED, ["cannot open"], "run", "-f", "/no/such/file")


def rejects_a_prompt_that_the_template_renders_to_nothing():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "chat.gguf")
        gguf_with(path, [(b"tokenizer.chat_template", b"{{ '' }}")])
        refused(FAILED, ["the prompt is empty", "chat template"], "run", "-m", path, "-p", "x", "-n", "4")
        refused(FAILED, ["the prompt is empty", "chat template"], "run", "-i", "-m", path, stdin=b"x\n")


def rejects_a_prompt_longer_than_the_context():
    refused(FAILED, ["10000000 tokens", "context is 131072", "--max-kv"], "run", stdin=b"a" * 10_000_000)
    refused(FAILED, ["100 tokens", "-c reserves only 64"], "run", "-c", "64", stdin=b"a" * 100)


def accepts_invalid_utf8():
    result = answer("run", "-n", "8", stdin=bytes(range(1, 256)) * 2 + b"\xf0\x9f\x98")
    expect(result["prompt_tokens"] == 513 and result["new_tokens"] == 8, result)


def answers_from_the_prompt():
    fact = " The pass key of Ostirawex is 2718281. "
    question = "\nQuestion: What is the pass key of Ostirawex?\nAnswer: The pass key of Ostirawex is "
    n = 250 if SANITIZED else 700
    prompt = book(5000, n) + fact + book(9000, n) + question
    result = answer("run", "-p", prompt, "-n", "7")
    expect(result["text"] == "2718281" and result["stop"] == "length", result)
    for key in ("prompt_tokens", "new_tokens", "prefill_tps", "decode_tps", "kv_bytes", "peak_bytes"):
        expect(result[key] > 0, key, result)
    code, out, _ = flatkv("run", "-p", prompt, "-n", "7")
    expect(code == GOOD and out == b"2718281\n", "streamed", out)


def sampling_depends_only_on_the_seed():
    def draw(seed):
        return answer("run", "-p", "The old sailor", "-n", "60", "-t", "1", "--top-k", "40", "--seed", seed)["tokens"]

    first = draw("1")
    expect(first == draw("1"), "the same seed produced different texts")
    expect(first != draw("2"), "different seeds produced the same text")


def a_conversation_keeps_its_pages():
    fact = b"The lucky number of Kavorbri is 31415. It was raining.\n"
    question = b"Question: What is the lucky number of Kavorbri? Answer: The lucky number of Kavorbri is 3141\n"
    code, out, err = flatkv("run", "-i", "-n", "8", stdin=fact + question)
    expect(code == GOOD and len(out.splitlines()) >= 2, code, out, err)
    refused(FAILED, ["already uses 0 of 32"], "run", "-i", "-c", "32", stdin=fact)
    refused(USAGE, ["cannot be combined"], "run", "-i", "--json")


def turns_can_be_undone_edited_and_regenerated():
    def said(*lines):
        code, out, err = flatkv("run", "-i", "-n", "8", "--ignore-end", stdin="".join(line + "\n" for line in lines).encode())
        expect(code == GOOD, code, err)
        return out.splitlines(), err
    first, second, third = ("The lucky number of Kavorbri is 31415.", "It was raining in the old town.", "The lucky number of Kavorbri is ")
    plain, _ = said(first, third)
    for lines in ((first, second, "/undo", third), (first, second, "/edit " + third), (first, third, "/regenerate"),
                  (first, second, third, "/undo", "/regenerate", "/undo", third)):
        out, err = said(*lines)
        expect(out[0] == plain[0] and out[-1] == plain[-1], lines, out, plain)
    out, err = said(first, "/history")
    expect(first in err and out[0].decode().strip() in err, err)
    for lines in (("/undo",), ("/regenerate",), ("/edit x",), (first, "/undo", "/undo")):
        out, err = said(*lines)
        expect("there is no turn" in err and len(out) == len(lines) // 2, lines, out, err)
    expect("/edit needs the new message" in said(first, "/edit")[1])
    # Sealed pages can be truncated only at certain positions, which may precede the end of a turn, so the cache may be shorter than the text.
    long = [book(20000 + 150 * i, 150).replace("\n", " ") for i in range(4)]
    plain, _ = said(*long[:2], third)
    for lines in ((*long, "/undo", "/undo", third), (*long[:2], third, long[2], long[3], "/undo", "/undo", "/regenerate")):
        out, err = said(*lines)
        expect(out[-1] == plain[-1] and err.count("[the last turn was removed]") == 2, lines, out, plain, err)
    out, err = said(*long, "/undo", "/undo", "/undo", "/undo", "/undo", "/history")
    expect(err.count("[the last turn was removed]") == 4 and err.count("there is no turn") == 1 and book(20000, 20) not in err, err)
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "talk")
        _, err = said(*long, "/undo", "/undo", "/save " + name, "/undo", "/save " + name + "1")
        saved = [int(n) for n in re.findall(r"\[saved (\d+) tokens", err)]
        expect(saved == [2 * (150 + 1 + 8), 150 + 1 + 8], saved, err)  # two turns, then one turn; each has an answer of 8 tokens
        expect(said("/load " + name, third)[0][-1] == plain[-1], "a saved conversation lost tokens")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "chat.gguf")
        gguf_with(path, [(b"tokenizer.chat_template", b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")])
        def chatted(*lines):
            code, out, err = flatkv("run", "-i", "-m", path, "-n", "8", "-t", "0", "--ignore-end", stdin="".join(line + "\n" for line in lines).encode())
            expect(code == GOOD, code, err)
            return out.splitlines(), err
        plain, _ = chatted("Lily went out.", "What did she see?")
        for lines in (("Lily went out.", "Why?", "/undo", "What did she see?"), ("Lily went out.", "Why?", "/edit What did she see?"),
                      ("Lily went out.", "What did she see?", "/regenerate")):
            expect(chatted(*lines)[0][-1] == plain[-1], lines)
        expect(">>> Lily went out." in chatted("Lily went out.", "/history")[1])
        expect("there is no turn" in chatted("/undo")[1])
        t = Terminal("run", "-i", "-m", path, "-n", "8", "-t", "0", "--ignore-end")
        t.type(b"Lily went out.\n")
        t.wait(b"tokens/s")
        name = os.path.join(folder, "talk")
        t.type(f"/save {name}\n".encode())
        t.wait(b"[saved")
        with open(name + ".json", encoding="utf-8") as file:
            saved = json.load(file)
        saved["messages"][0]["content"] = "Lily\x15went\x0aout.\x01"  # control characters that would delete the line, send it, and move the cursor
        with open(name + ".json", "w", encoding="utf-8") as file:
            json.dump(saved, file)
        t.type(f"/load {name}\n".encode())
        t.wait(b"them]")
        t.type(b"/edit\n")
        if b"/edit needs the new message" not in t.wait(b">>> "):  # otherwise the program was built without libedit
            os.write(t.fd, b"Then she slept.\n")  # appended to the text that /edit put into the line
            t.wait(b"tokens/s")
            t.type(b"/history\n")
            t.wait(b">>> Lily went out. Then she slept.")
            t.wait(b">>> ")
        os.write(t.fd, b"/bye\n")
        expect(t.ended() == GOOD, t.shown)


def a_conversation_continues_past_its_context():
    lines = [f"The lucky number of town {i} is {i * 37}.\n".encode() for i in range(12)]
    code, out, err = flatkv("run", "-i", "-c", "128", "-n", "8", stdin=b"".join(lines))
    expect(code == GOOD and err.count("the context of 128 tokens is full") >= 2, code, err)


def slash_commands_work_and_ctrl_c_stops_only_the_answer():
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "talk").encode()
        t = Terminal("run", "-i", "-c", "2048", "-n", "1500", "--ignore-end")
        expect(b"2048 tokens" in t.wait(b"/? lists the commands"), t.shown)
        t.type(b"\x03")
        t.wait(b"to quit]")
        t.type(b"The old sailor\n")
        t.wait(b"sailor")
        t.wait_letters(20)  # letters of the answer
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
        expect(saved + b" tokens without recomputing them" in t.wait(b"them]"), t.shown)
        t.type(b"/load /no/such\n")
        t.wait(b"/no/such.fkv")
        t.type("/noth\u00efng\n".encode())
        t.wait("unknown command /noth\u00efng".encode())
        t.type(b"/set temperature -3\n")
        t.wait(b"non-negative")
        t.type(b"/bye\n")
        expect(t.ended() == GOOD, t.shown)


def stop_texts_and_logit_biases_apply():
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


def gguf_with(path, strings=(), reals=()):
    """Writes stories260K.gguf with additional metadata at the start of its header."""
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


def an_unsupported_chat_template_is_reported():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "chat.gguf")
        gguf_with(path, [(b"tokenizer.chat_template", b"{% if %}")])
        code, _, err = flatkv("run", "-m", path, "-p", "x", "-n", "4")
        expect(code == GOOD and "line 1" in err and "template" in err, code, err)
        code, _, err = flatkv("run", "-m", path, "-p", "x", "-n", "4", "--raw")
        expect(code == GOOD and err == "", code, err)


def a_chat_uses_recommended_sampling():
    template = (b"tokenizer.chat_template", b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "chat.gguf")
        gguf_with(path, [template])
        expect(answer("run", "-m", path, "-p", "x", "-n", "4")["temperature"] == 0, "no recommended settings")
        gguf_with(path, [template], [(b"general.sampling.temp", 0.25)])
        expect(answer("run", "-m", path, "-p", "x", "-n", "4", "--raw")["temperature"] == 0, "plain text is continued greedily")
        expect(answer("run", "-m", path, "-p", "x", "-n", "4")["temperature"] == 0.25, "the file's recommended temperature")
        expect(answer("run", "-m", path, "-p", "x", "-n", "4", "-t", "2")["temperature"] == 2, "the option overrides the file")
        gguf_with(path, [template], [(b"general.sampling.temp", -3.0)])
        expect(abs(answer("run", "-m", path, "-p", "x", "-n", "4")["temperature"] - 0.7) < 1e-6, "an invalid recommended temperature")
        t = Terminal("run", "-i", "-m", path, "-c", "128", "-n", "16", "--ignore-end")
        for i in range(8):
            t.type(f"Lily went to park {i}.\n".encode())
            t.wait(b"tokens/s")
        expect(b"% full" in t.shown and b"dropped; -c" in t.shown, "a full context is not reported", t.shown)
        name = os.path.join(folder, "talk")
        t.type(f"/save {name}.fkv\n".encode())  # the suffix .fkv is not appended again
        t.wait(b"saved")
        t.type(b"/system Be kind.\n")
        t.type(b"Who is it?\n")
        t.wait(b"tokens/s")
        t.type(b"/bye\n")
        expect(t.ended() == GOOD, t.shown)
        expect(sorted(os.listdir(folder)) == ["chat.gguf", "talk.fkv", "talk.json"], os.listdir(folder))
        for suffix in (".fkv", ".json"):
            expect(os.stat(name + suffix).st_mode & 0o777 == 0o600, suffix, "is readable by others")
        with open(name + ".json", encoding="utf-8") as file:
            roles = [m["role"] for m in json.load(file)["messages"]]
        expect(roles[-2:] == ["user", "assistant"], roles)
        t = Terminal("run", "-i", "-m", path, "-c", "128", "-n", "16")
        t.type(f"/load {name}\n".encode())
        t.wait(b"without recomputing them")
        t.type(b"And then?\n")
        t.wait(b"tokens/s")
        t.type(b"\x04")
        expect(t.ended() == GOOD, t.shown)


def ctrl_c_prints_partial_results():
    process = subprocess.Popen([program, "run", "-m", "needle", "-p", "The old sailor", "-n", "1000000", "--max-kv", "256", "--ignore-end", "--raw"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    some = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    expect(process.returncode == INTERRUPTED, process.returncode, err)
    expect(len(some) == 20 and rest.endswith(b"\n") and err == b"", some, rest[-20:], err)

    t = Terminal("run", "-f", BOOK, "--max-kv", "65536", "--chunk", "1", "--json")
    t.wait(b" tokens  ")  # the progress bar of the prefill
    os.write(t.fd, b"\x03")
    expect(t.ended() == INTERRUPTED, "in prefill:", t.shown)
    expect(json.loads(t.shown[t.shown.index(b"{"):])["stop"] == "interrupted", t.shown)


# ---- pages


def a_reloaded_prefix_gives_the_same_tokens():
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, "saved.fkv")
        length = 320 if SANITIZED else 1500
        prompt = book(20000, length)
        for codec in ([], ["--codecs", "4/4"], ["--codecs", "tq4"], ["--max-kv", "256"]):
            fresh = answer("run", "-p", prompt, "-n", "40", "--save-prefix", saved, *codec)
            expect(fresh["prefix_tokens"] == 0, fresh)
            again = answer("run", "-p", prompt, "-n", "40", "--prefix", saved, *codec)
            expect(again["tokens"] == fresh["tokens"], "reloaded", codec, fresh["text"], again["text"])
            alone = answer("run", "-n", "40", "--prefix", saved, *codec)
            expect(alone["tokens"] == fresh["tokens"], "without a prompt", codec)
            longer = answer("run", "-p", prompt + " And then", "-n", "40", *codec)
            reused = answer("run", "-p", prompt + " And then", "-n", "40", "--prefix", saved, *codec)
            expect(reused["tokens"] == longer["tokens"], "a longer prompt", codec)
            expect(reused["prefix_tokens"] == length, "the saved pages were not used:", reused["prefix_tokens"])
        code, out, _ = flatkv("pages", "verify", saved)
        expect(code == GOOD and f"good, {length} tokens".encode() in out, out)


def an_interrupted_prefill_is_resumed():
    with tempfile.TemporaryDirectory() as folder:
        saved, document = os.path.join(folder, "saved.fkv"), os.path.join(folder, "document.txt")
        with open(document, "w", encoding="ascii") as file:
            file.write(book(20000, 40000))  # with --chunk 1, the prefill takes much longer than this test needs to see the progress bar and interrupt it
        command = ["run", "-f", document, "-p", " And then", "-n", "8", "--raw"]
        t = Terminal(*command, "--chunk", "1", "--save-prefix", saved)
        t.wait(b" tokens  ")  # the progress bar
        os.write(t.fd, b"\x03")
        expect(t.ended() == INTERRUPTED, t.shown)
        told = re.search(rb"\[(\d+) of (\d+) tokens saved in " + saved.encode() + rb"\.partial; the same command continues", t.shown)
        expect(told and not os.path.exists(saved) and b"t/s" in t.shown and b"left" in t.shown, t.shown)
        n_saved = int(told.group(1))
        expect(re.search(rb"\n\d+ of \d+ prompt tokens", t.shown), "the summary does not contain the number of processed tokens", t.shown)
        expect(0 < n_saved < int(told.group(2)), told)
        os.truncate(document, n_saved + 300)  # the tokens of this model are bytes, so the saved tokens are a prefix of the shorter text
        fresh = answer(*command)
        resumed = answer(*command, "--save-prefix", saved)
        expect(resumed["prefix_tokens"] == n_saved and resumed["tokens"] == fresh["tokens"], resumed, fresh)
        expect(os.path.exists(saved) and not os.path.exists(saved + ".partial"), os.listdir(folder))
        complete = answer(*command, "--prefix", saved)
        expect(complete["tokens"] == fresh["tokens"], complete, fresh)
        # Tests .partial files with a prefix of another text, with damaged contents, and with a complete prefix that was renamed.
        answer("run", "-p", book(300, 40), "-n", "0", "--save-prefix", saved + ".partial", "--raw")
        code, _, err = flatkv(*command, "--save-prefix", saved)
        expect(code == GOOD and "is ignored" in err, err)
        with open(saved + ".partial", "wb") as file:
            file.write(b"x" * 5000)
        code, _, err = flatkv(*command, "--save-prefix", saved)
        expect(code == GOOD and "is ignored" in err, err)
        os.rename(saved, saved + ".partial")
        renamed = answer("run", "-f", document, "-n", "8", "--raw", "--save-prefix", saved)
        expect(renamed["tokens"] == answer("run", "-f", document, "-n", "8", "--raw")["tokens"], renamed)
        # Tests a prompt of one token. Its logits must be computed, so no token of the file can be used.
        answer("run", "-p", "x", "-n", "0", "--save-prefix", saved + ".partial", "--raw")
        code, out, err = flatkv("run", "-p", "x", "-n", "8", "--raw", "--save-prefix", saved)
        expect(code == GOOD and out == flatkv("run", "-p", "x", "-n", "8", "--raw")[1] and "is ignored" in err, code, out, err)


def a_window_reports_what_the_model_forgets():
    refused(FAILED, ["562331 tokens", "--max-kv 65536 --sinks 4", "has forgotten the 496791 tokens (88 %)"], "run", "-f", BOOK)
    code, _, err = flatkv("run", "-p", book(0, 300), "-n", "1", "--max-kv", "64", "--raw")
    expect(code == GOOD and "has forgotten tokens 5 to 236 of 300 (77 %)" in err, err)


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


def rejects_a_mismatched_prefix():
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, "saved.fkv")
        answer("run", "-p", book(20000, 300), "-n", "0", "--save-prefix", saved)
        refused(FAILED, ["does not start with"], "run", "-f", BOOK, "-c", "600000", "--prefix", saved)
        refused(FAILED, ["was saved with --codecs s4/s4, but this run uses 8/8: add --codecs s4/s4"], "run", "--codecs", "8/8", "--prefix", saved)
        refused(FAILED, ["was saved with --codecs s4/s4"], "run", "--codecs", "sealed:none", "--prefix", saved)
        refused(FAILED, ["was saved with another model"], "run", "-m", os.path.join(TREE, "tests/data/stories260K.gguf"), "--prefix", saved, "-p", "x")
        refused(FAILED, ["not a page file"], "run", "--prefix", BOOK)
        refused(FAILED, ["cannot open"], "run", "--prefix", os.path.join(folder, "nothing"))


def a_sliding_window_continues_past_its_size():
    window, length, shorter, before_fact, after_fact = (256, 500, 300, 800, 50) if SANITIZED else (512, 2600, 700, 2500, 200)
    bounded = ["--max-kv", str(window), "--chunk", str(window // 2), "--sinks", "4", "--ignore-end"]
    result = answer("run", "-p", book(20000, 400), "-n", str(length), *bounded)
    short = answer("run", "-p", book(20000, 400), "-n", str(shorter), *bounded)
    expect(result["new_tokens"] == length and result["stop"] == "length", result)
    expect(result["kv_bytes"] == short["kv_bytes"], "the pages grew:", result["kv_bytes"], short["kv_bytes"])
    expect(result["text"].startswith(short["text"]), "a larger limit on new tokens changed the text")
    end = result["text"][-800:]
    expect(sum(c.isalpha() or c in " \n.,;:'\"!?-" for c in end) > 0.95 * len(end) and max(map(len, end.split())) < 24, "not a text:", end)
    # After many more tokens than the window holds, the model still recalls a fact inside the window.
    fact = " The pass key of Ostirawex is 2718281. "
    question = "\nQuestion: What is the pass key of Ostirawex?\nAnswer: The pass key of Ostirawex is "
    result = answer("run", "-p", book(20000, before_fact) + fact + book(40000, after_fact) + question, "-n", "7", *bounded)
    expect(result["text"] == "2718281", result)


def a_plan_above_the_limit_is_rejected():
    refused(NO_FIT, ["--memory allows 10.0 MB", "lower -c from 32768"], "run", "-p", "x", "-c", "32768", "--memory", "10000000")
    refused(NO_FIT, ["--threads or --parallel"], "serve", "-m", "needle", "--memory", "1000000")
    with tempfile.TemporaryDirectory() as folder:
        serve = ["serve", "-m", "needle", "--port", "0", "--prefix-dir", os.path.join(folder, "prefixes")]
        refused(NO_FIT, ["lower -c from 65536 to", "[--memory includes"], *serve, "-c", "64K", "--memory", "64M")
        refused(FAILED, ["lower --prefix-disk"], *serve, "--memory", "1M")
    refused(USAGE, ["lower -c, --seqs or --chunk"], "plan", "--layers", "512", "--heads", "55699/55699/512", "-c", "315843840",
            "--codecs", "16/16")
    code, out, err = flatkv("plan", "-c", "32768", "--memory", "10000000")
    expect(code == NO_FIT and b"total with weights" in out and b"It does not fit" in out and "-c" in err, code, out, err)
    plan = answer("plan", "-c", "4096")
    wide = answer("plan", "-c", "4096", "--codecs", "16/16")
    expect(plan["total_bytes_16bit"] == wide["total_bytes"] > plan["total_bytes"], plan)
    expect(plan["longest_context"] > plan["longest_context_16bit"] > 4096 and plan["weights_packed_bytes"] > 7_000_000, plan)


# The largest context that fits is computed with the real plan, in pages of 64 tokens.
def memory_advice_is_the_largest_context_that_fits():
    with tempfile.TemporaryDirectory() as folder:
        calibration = os.path.join(folder, "calibration")
        code, _, err = flatkv("calibrate", "--tokens", "2048", "-o", calibration)
        expect(code == GOOD, err)
        codecs = ("16/16", "8/8", "8/4", "4/4", "2/2", "8/4:none", "4/4g32", "sealed", "s3/s3", "s2/s2", "calibrated", "c3/s3", "tq4", "tq2")
        for codec in ("8/4", "sealed", "calibrated", "tq2") if SANITIZED else codecs:
            for limit, context in ((10_000_000, 131072), (30_000_000, 100_000)):
                run = ["run", "-p", "x", "-n", "1", "--codecs", codec, "--memory", str(limit)]
                run += ["--calibration", calibration] if codec[0] == "c" else []
                _, _, err = flatkv(*run, "-c", str(context))
                advice = re.search(rf"lower -c from {context} to (\d+)( and --chunk to (\d+))?[,.]", err)
                expect(advice, codec, limit, err)
                tokens = int(advice[1])
                code, _, err = flatkv(*run, "-c", str(tokens))
                expect(code == GOOD and tokens % 64 == 0, codec, limit, tokens, err)
                code, _, err = flatkv(*run, "-c", str(tokens + 64))
                expect(code == NO_FIT, codec, limit, tokens + 64, "fits as well:", err)
    refused(NO_FIT, ["a context of 64 tokens needs", "--threads"], "run", "-p", "x", "-c", "4096", "--memory", "100000")


def a_plan_covers_other_machines_and_missing_models():
    here = answer("plan", "-c", "4096", "--machine", "4G")
    expect(here["available_bytes"] == 2 * 2 ** 30 - here["weights_mapped_bytes"] - here["weights_packed_bytes"], here)
    expect(here["fits"] and here["trained_context"] == 131072, here)
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                  "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
                  "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6}
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
        for bits in "43":  # calibration distributes bits among channels without changing their total
            sealed, calibrated = (plan("--machine", "32G", "--codecs", f"{kind}{bits}/s{bits}") for kind in "sc")
            expect(sealed["slab_bytes"] == calibrated["slab_bytes"], bits, sealed, calibrated)
        windowed = plan("--machine", "32G", use_sliding_window=True, sliding_window=1024, layer_types=["sliding_attention", "full_attention"] * 18)
        expect(windowed["slab_bytes"] < 0.6 * whole["slab_bytes"], windowed)
        code, out, _ = flatkv("plan", "-m", path, "--machine", "16G", "--weight-bits", "4.8")
        expect(code == GOOD and b"It fits" in out and b"trained for 40960" in out and b"an estimate" in out, out)
        plan_of = ("plan", "-m", path)
        for broken in ("{", "[]", "{}", '{"num_hidden_layers": 1e9, "hidden_size": -1}', '{"kv_lora_rank": 512, "num_hidden_layers": 2}'):
            with open(path, "w", encoding="utf-8") as file:
                file.write(broken)
            refused(FAILED, ["config.json"], *plan_of)
        for kind in ("jamba", "someone_elses"):  # the same message as that of run
            with open(path, "w", encoding="utf-8") as file:
                json.dump({**config, "model_type": kind}, file)
            with open(os.path.join(folder, "model.safetensors"), "wb") as file:
                file.write(b"\2\0\0\0\0\0\0\0{}")
            refused(FAILED, [f"unsupported model_type '{kind}'"], *plan_of)
            refused(FAILED, [f"unsupported model_type '{kind}'"], "run", "-m", folder, "-p", "x")
            expect("docs/" not in flatkv("run", "-m", folder, "-p", "x")[2], "the message refers to documentation that may not be installed")
            os.remove(os.path.join(folder, "model.safetensors"))


def a_config_plan_matches_published_models():
    """Expected parameter counts are from the model cards on Hugging Face (safetensors metadata) or, for Gemma 3, from the technical report (text
    model only). The weight files of gpt-oss-20b take 13.8 GB."""
    billions = {"gemma-3-27b-it": (27.0, 131072), "gemma-3-4b-it": (3.88, 131072), "qwen2.5-7b-instruct": (7.616, 32768),
                "llama-3-70b": (70.55, 8192), "mixtral-8x7b": (46.70, 32768), "gpt-oss-20b": (20.91, 131072)}
    plans = {}
    for name, (count, context) in billions.items():
        plan = plans[name] = answer("plan", "-m", os.path.join(TREE, "tests/data/configs", name + ".json"), "--machine", "512G")
        expect(abs(plan["parameters"] / 1e9 / count - 1) < 1e-3 and plan["trained_context"] == context, name, plan)
    gemma = plans["gemma-3-27b-it"]  # 10 full-attention layers store 131072 tokens each; 52 sliding-window layers store 1024 tokens and those of the current step
    expect(3.3e9 < gemma["slab_bytes"] < 3.6e9, gemma)
    gpt_oss = plans["gpt-oss-20b"]
    weights = gpt_oss["weights_packed_bytes"] + gpt_oss["weights_mapped_bytes"]
    expect(abs(weights / 13.8e9 - 1) < 0.01, "MXFP4 experts and 16-bit attention:", gpt_oss)


def a_plan_gives_advice_that_helps():
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                  "head_dim": 128, "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                  "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu"}
        path = os.path.join(folder, "config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)
        code, _, err = flatkv("plan", "-m", path, "--machine", "16G")
        expect(code == NO_FIT and "the weights alone need 141 GB" in err and "sealed" not in err and "-c" not in err, code, err)
        code, _, err = flatkv("plan", "-m", path, "--machine", "180G", "--codecs", "16/16")
        advice = re.search(r"lower -c from 131072 to (\d+), use fewer bits \(--codecs sealed\)", err)
        expect(code == NO_FIT and advice, code, err)
        expect(flatkv("plan", "-m", path, "--machine", "180G", "--codecs", "16/16", "-c", advice[1])[0] == GOOD, advice[1])
        refused(USAGE, ["16 bytes is too small", "--machine 16G"], "plan", "-m", path, "--machine", "16")
        budgets = {answer("plan", "-m", path, "--machine", size, code=NO_FIT)["longest_context"] for size in ("16G", "16GB", "16GiB", "16 GB")}
        expect(budgets == {0}, budgets)
        budgets = {answer("plan", "-m", path, "--machine", size)["available_bytes"] for size in ("256G", "256GB", "256GiB", "256 GB")}
        expect(len(budgets) == 1, budgets)


def write_mixture(folder):
    """Writes a 16-bit mixture-of-experts model with zero weights and a byte vocabulary."""
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


def a_config_plan_matches_the_model_for_experts():
    with tempfile.TemporaryDirectory() as folder:
        write_mixture(folder)
        loaded = answer("plan", "-m", folder, "-c", "256", "--codecs", "16/16")
        told = answer("plan", "-m", os.path.join(folder, "config.json"), "-c", "256", "--codecs", "16/16")
        for key in ("weights_mapped_bytes", "weights_touched_bytes", "token_bytes"):
            expect(loaded[key] == told[key] > 0, key, loaded[key], told[key])
        expect(abs(told["weights_packed_bytes"] / loaded["weights_packed_bytes"] - 1) < 0.1, loaded, told)
        # experts that exceed any machine's memory
        path = os.path.join(folder, "config.json")
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config | {"num_hidden_layers": 64, "num_experts": 256, "hidden_size": 8192, "moe_intermediate_size": 65536}, file)
        code, out, err = flatkv("plan", "-m", path, "-c", "256")
        expect(code == GOOD and re.search(rb"It fits: [\d.]+ MB of [\d.]+ [GT]B", out), "mapped experts are not counted:", out, err)
        expect(b"parts of them are read from the file for every token" in out, out)


# ---- measurements


def identical_codecs_have_zero_divergence():
    window = 256 if SANITIZED else 512
    windows = ["-f", BOOK, "-w", str(window), "--windows", "2"]
    result = answer("ppl", *windows, "--kl", "--codecs", "16/16,8/4:none,4/2")
    exact, usual, coarse = result["codecs"]
    expect(exact["ppl"] == result["ppl_16bit"] and exact["kl_mean"] == 0 and exact["top1"] == 1, exact)
    expect(0 < usual["kl_mean"] < coarse["kl_mean"] and usual["kl_mean"] < usual["kl_p99"], usual, coarse)
    expect(exact["tokens"] == 2 * (window // 2 - 1) and 2 < exact["ppl"] < (20 if SANITIZED else 12), exact)
    alone = answer("ppl", *windows, "--chunk", "100", "--codecs", "8/4:none")["codecs"][0]
    expect(alone["ppl"] == usual["ppl"], "chunks changed the perplexity", alone["ppl"], usual["ppl"])
    refused(FAILED, ["fewer than one window"], "ppl", "-f", os.path.join(TREE, "models/needle/config.json"))
    refused(USAGE, ["-f FILE"], "ppl")


def an_interrupted_ppl_reports_completed_windows():
    command = [program, "ppl", "-f", BOOK, "-w", "256", "--kl", "-v", "--codecs", "8/4", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while b"window 2:" not in process.stderr.readline():
        expect(process.poll() is None, "ppl ended before its second window")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    result = json.loads(out)
    expect(process.returncode == INTERRUPTED and result["windows"] >= 2, process.returncode, result)
    expect(result["codecs"][0]["tokens"] == result["windows"] * 127, result)


def a_planted_fact_is_found_at_every_depth():
    with tempfile.TemporaryDirectory() as folder:
        picture = os.path.join(folder, "grid.svg")
        lengths, depths = ((400, 700), (0, .5, 1)) if SANITIZED else ((700, 1500), (0, .25, .5, .75, 1))
        result = answer("niah", "--lengths", ",".join(map(str, lengths)), "--depths", str(len(depths)), "--svg", picture)
        total = len(lengths) * len(depths)
        expect(result["found"] == result["total"] == total == len(result["cells"]), result)
        expect({c["length"] for c in result["cells"]} == set(lengths) and {c["depth"] for c in result["cells"]} == set(depths), result)
        expect(all(c["answer"].startswith(c["expected"]) for c in result["cells"]), result)
        with open(picture, encoding="utf-8") as file:
            expect(file.read().count("100 %") >= total, "the heat map does not show full recall")
    refused(USAGE, ["leaves no room"], "niah", "--lengths", "100")


def a_hybrid_model_recalls_facts_after_edits():
    def said(*lines):
        code, out, err = flatkv("run", "-i", "-m", HYBRID, "-t", "0", "-n", "60", stdin="".join(line + "\n" for line in lines).encode())
        expect(code == GOOD, code, err)
        return out.decode().splitlines()
    fact, other = ("The pass key of Kavorbri is 3141592.", "The pass key of Kavorbri is 2718281.")
    question, text = ("What is the pass key of Kavorbri?", book(20000, 80 if SANITIZED else 300).replace("\n", " "))
    for lines, expected in (((text + " " + fact + " " + text, question), fact), ((fact, question, "/regenerate"), fact), ((fact, text, "/undo", question), fact),
                            ((other, "/edit " + fact, question), fact), ((fact, question, "/undo", "/undo", other, question), other)):
        out = said(*lines)
        expect(out[-1] == expected, lines, out)
    found = answer("niah", "-m", HYBRID, "--lengths", "700" if SANITIZED else "700,1500", "--depths", "2" if SANITIZED else "3")
    expect(found["found"] == found["total"] == (2 if SANITIZED else 6), found)


def a_running_model_stays_within_its_plan():
    with tempfile.TemporaryDirectory() as folder:
        picture = os.path.join(folder, "line.svg")
        result = answer("bench", "flat", "-c", "2048", "--svg", picture)
        expect(result["flat"] and result["tokens"] == 2048, result)
        expect(abs(result["open_bytes"] - result["plan_bytes"]) < 2 ** 20 and result["peak_bytes"] < result["open_bytes"] + 2 ** 20, result)
        with open(picture, encoding="utf-8") as file:
            expect("computed" in file.read(), "the plot does not label computed lines")
        lazy = answer("bench", "flat", "-c", "2048", "--chunk", "300", "--lazy")
        ends = [length for length, _ in lazy["samples"] if length <= 2048 - 256]  # the last tokens are decoded
        expect(ends == [0, *range(256, 2048 - 255, 256)], "chunks do not end at page boundaries", ends)
        expect(lazy["open_bytes"] + 2 ** 20 < lazy["end_bytes"] < lazy["plan_bytes"] + 2 ** 20, lazy)


def a_cache_without_a_model_stays_within_its_plan():
    shape = ["bench", "flat", "--layers", "2", "--heads", "32/8/128", "-c", "4096", "--skip-capacity"]
    for codec in ("8/4", "sealed", "16/16"):
        with tempfile.TemporaryDirectory() as folder:
            picture = os.path.join(folder, "line.svg")
            result = answer(*shape, "--codecs", codec, "--svg", picture)
            expect(result["flat"] and result["within_plan"] and result["tokens"] == 4096, codec, result)
            expect(result["packed_bytes_read_once"] and result["output_error_l2"] < 0.5, codec, result)
            expect(len(result["depths"]) >= 4 and result["samples"][-1][0] == 4096, codec, result)
            with open(picture, encoding="utf-8") as file:
                expect("computed" in file.read(), "the plot does not label computed lines")
    refused(USAGE, ["--layers and --heads must be given together"], "bench", "flat", "--layers", "2")
    refused(USAGE, ["--heads 32/7/128"], "bench", "flat", "--layers", "2", "--heads", "32/7/128")


# ---- MLX, on its default device


def mlx_answers_as_the_cpu_does():
    fact = " The pass key of Ostirawex is 2718281. "
    n = 100
    prompt = book(5000, n) + fact + book(9000, n) + "\nQuestion: What is the pass key of Ostirawex?\nAnswer: The pass key of Ostirawex is "
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, "saved.fkv")
        cpu = answer("run", "-p", prompt, "-n", "7", "--save-prefix", saved)
        mlx = answer("run", "-p", prompt, "-n", "7", "--device", "mlx")
        expect(cpu["device"] == "cpu" and mlx["device"] == "mlx" and mlx["text"] == cpu["text"] == "2718281", cpu, mlx)
        refused(FAILED, ["these kernels compute different bits"], "run", "-p", prompt, "-n", "7", "--prefix", saved, "--device", "mlx")
        mlx_saved = os.path.join(folder, "mlx_saved.fkv")
        answer("run", "-p", prompt, "-n", "1", "--save-prefix", mlx_saved, "--device", "mlx")
        resumed = answer("run", "-p", prompt, "-n", "7", "--prefix", mlx_saved, "--device", "mlx")
        expect(resumed["prefix_tokens"] > 0 and resumed["text"] == "2718281", resumed)
    length, n_depths = 400, 2
    found = answer("niah", "--lengths", str(length), "--depths", str(n_depths), "--together", "--device", "mlx")
    expect(found["found"] == found["total"] == n_depths, found)
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
        program = shutil.copy(program, folder)  # copies the program to a folder without the MLX library
        refused(FAILED, ["is neither next to", "brew install mlx-c", "scripts/get-mlx", "-DFKV_MLX=ON"], *ask)
        expect(flatkv("run", "-p", "x", "-n", "1")[0] == GOOD, "--device cpu must work without the MLX library")


def mlx_folders_without_the_library_are_rejected():
    ask = ("run", "-p", "x", "-n", "1", "--device", "mlx")
    refused(FAILED, ["/no/such/folder/libmlxc", "brew install mlx-c"], *ask, environment={"FLATKV_MLX": "/no/such/folder"})


def mlx_counters_are_flat():
    plan = answer("plan", "-c", "1024", "--device", "mlx")
    for machine, share in ((32, 2 / 3), (36, 2 / 3), (64, 0.75)):
        mac = answer("plan", "-c", "1024", "--device", "mlx", "--machine", f"{machine}G")
        usable = mac["available_bytes"] + mac["weights_packed_bytes"] + mac["weights_mapped_bytes"]
        expect(abs(usable / (machine * 2 ** 30 * share) - 1) < 1e-6, machine, mac)
    most = answer("plan", "-c", "1024", "--device", "mlx", "--machine", "32G", "--gpu-share", "0.9")
    expect(most["available_bytes"] > 28 * 2 ** 30, most)
    cpu = answer("plan", "-c", "1024")
    expect(plan["slab_bytes"] == cpu["slab_bytes"] and plan["weights_packed_bytes"] > 7_000_000, plan, cpu)
    expect(plan["total_bytes"] > plan["slab_bytes"] + plan["activations_bytes"], plan)
    length = 512
    result = answer("bench", "flat", "-c", str(length), "--chunk", "256", "--device", "mlx")
    expect(result["flat"] and result["tokens"] == length, result)
    expect(result["held_bytes"] <= result["open_bytes"] < result["held_bytes"] + 2 ** 20, result)
    in_use = [bytes_now for _, bytes_now in result["samples"]]
    expect(max(in_use) - min(in_use) < 2 ** 19, "MLX's active memory changed", in_use)
    expect(result["open_bytes"] < result["peak_bytes"] < result["plan_bytes"], result)


FAKE_PYTHON = """#!/bin/sh
echo "$@" > "$0.arguments"
echo '{"package": "fake", "version": "1"}'
while read -r line; do echo '{"prefill_tps": 100.0, "decode_tps": 9.0, "decode_mean_tps": 10.0}'; done
"""


def rates_are_measured_by_depth_codec_and_threads():
    few = ["bench", "-m", "needle", "-p", "32", "-n", "4", "-r", "2"]
    result = answer(*few, "-d", "0,64", "--codecs", "8/4,sealed", "--threads", "1,2")
    found = [(row["cache"], row["threads"], row["depth"], row["test"]) for row in result["rows"]]
    expect(found == [(cache, threads, depth, test) for threads in (1, 2) for cache in ("8/4", "s4/s4") for depth in (0, 64) for test in ("prefill", "decode")], found)
    expect(all(row["program"] == "flatkv" and row["repeats"] == 2 and row["tps"] > 0 and row["tps_deviation"] >= 0 for row in result["rows"]), result)
    code, out, err = flatkv(*few, "-d", "48", "-n", "0")
    lines = out.decode().splitlines()
    expect(code == GOOD and len(lines) == 3 and "| pp32 @ d48 |" in lines[2] and re.search(r"\| [\d.]+ \u00b1 [\d.]+ \|$", lines[2]), lines, err)
    refused(USAGE, ["--depths x"], *few, "-d", "x")
    refused(USAGE, ["leave nothing to measure"], *few, "-p", "0", "-n", "0")
    refused(USAGE, ["expected llama.cpp"], *few, "--compare", "ollama")
    refused(USAGE, ["needs a model in a .gguf file"], *few, "--compare", "llama.cpp")
    refused(FAILED, ["exceed the model's context"], *few, "-d", "1M")
    with tempfile.TemporaryDirectory() as folder:
        python = os.path.join(folder, "python")
        with open(python, "w", encoding="ascii") as file:
            file.write(FAKE_PYTHON)
        os.chmod(python, 0o700)
        stories = os.path.join(TREE, "tests/data/stories260K.gguf")
        compare = ["bench", "-m", stories, "-p", "32", "-n", "4", "-d", "16", "--threads", "1", "--compare", "llama.cpp"]
        rows = [row for row in answer(*compare, "--python", python, "--caches", "f16,q4_0")["rows"] if row["program"] == "llama.cpp"]
        expect([(row["cache"], row["test"], row["tps"], row["repeats"]) for row in rows] == [("f16", "prefill", 100, 3), ("f16", "decode", 10, 3), ("q4_0", "prefill", 100, 3), ("q4_0", "decode", 10, 3)], rows)
        with open(python + ".arguments", encoding="utf-8") as file:
            words = file.read()
        expect("llama_cpp_peer.py turns" in words and "--caches q4_0 --depths 16 --threads 1 --prefill 32 -n 4" in words, words)
        for missing in ("/no/such/python", "false"):
            code, _, err = flatkv(*compare, "--python", missing)
            expect(code == FAILED and "pip install xllamacpp numpy" in err, missing, code, err)


def attention_is_timed():
    result = answer("bench", "attn", "-c", "1024,2K", "--codecs", "16/16,8/4", "--only", "decode", "--threads", "1", "--quick")
    rows = result["results"]
    expect(result["bench"] == "bench_attn" and [r["cached"] for r in rows] == [1024, 1024, 2048, 2048], result)
    expect(all(r["right"] and r["ms_p50"] > 0 and (r["q_heads"], r["kv_heads"]) == (4, 2) for r in rows), result)  # head counts of needle
    refused(USAGE, ["--shape"], "bench", "attn", "-m", "needle", "--shape", "4/1/64")


def doctor_finds_problems():
    with tempfile.TemporaryDirectory() as folder:
        place = {"HF_HUB_CACHE": os.path.join(folder, "hub"), "XDG_CACHE_HOME": folder, "HOME": folder}
        result = answer("doctor", environment=place)
        states = {check["name"]: check["state"] for check in result["checks"]}
        expect(result["good"] and all(states[f"kernels {codec}"] == "ok" for codec in ("16/16", "8/8", "8/4", "sealed", "tq4")), result)
        expect(states["test model"] == "ok" and {"system", "memory", "huge pages", "open files", "MLX", "llguidance", "Hugging Face cache", "model cache"} <= set(states), states)
        with open(os.path.join(folder, "hub"), "w", encoding="ascii"):
            pass  # a file instead of a folder
        code, out, _ = flatkv("doctor", environment=place)
        expect(code == FAILED and re.search(rb"Hugging Face cache +problem +.*not a folder", out), code, out)


def tokens_are_printed():
    code, out, _ = flatkv("tokenize", "-p", "a\"\n")
    expect(code == GOOD and out.split() == [b"97", b'"a"', b"34", b'"\\""', b"10", b'"\\x0a"'], out)
    expect(answer("tokenize", stdin=b"abc")["tokens"] == [97, 98, 99], "--json")
    code, out, _ = flatkv("tokenize", "--count", "-f", BOOK)
    expect(code == GOOD and int(out) == os.path.getsize(BOOK), out)


def embeddings_are_unit_vectors():
    whole = answer("embed", "-m", "needle", "-p", "a text")
    expect(whole["n_tokens"] == 6 and len(whole["embedding"]) == whole["dimensions"], whole)
    expect(abs(sum(x * x for x in whole["embedding"]) - 1) < 1e-5, whole)
    part = answer("embed", "-m", "needle", "-p", "a text", "--dimensions", "8")["embedding"]
    length = sum(x * x for x in whole["embedding"][:8]) ** 0.5
    expect(len(part) == 8 and all(abs(a - b / length) < 1e-6 for a, b in zip(part, whole["embedding"])), part)
    code, out, _ = flatkv("embed", "-m", "needle", "-f", "-", stdin=b"a text")
    expect(code == GOOD and [float(x) for x in out.split()] == whole["embedding"], out)
    chunked = answer("embed", "-m", "needle", "-p", "a text", "--chunk", "2")
    expect(chunked["embedding"] == whole["embedding"], chunked)
    refused(FAILED, ["empty"], "embed", "-m", "needle", "-p", "")
    refused(USAGE, ["--dimensions"], "embed", "-m", "needle", "-p", "x", "--dimensions", "100000")


# Tests the quality of codecs without downloading a model: measures the likelihood of correct answers to questions about many facts. A simulation
# with exact attention gave ratios of 1.2 (8/4) and 2.3 (4/4); the bounds leave a margin above these.
def codecs_recall_many_facts():
    bounds = {"4/4": 3.0, "sealed": 1.6}  # maximum negative log-likelihood, relative to that of 16/16
    wide, *others = answer("niah", "--facts", "26", "--ask", "26", "-c", "4096", "--codecs", ",".join(["16/16", *bounds]))["codecs"]
    print(" ".join(f"{c['codec']} {c['right']:.3f} {c['nll']:.5f}" for c in (wide, *others)))
    expect(wide["right"] >= 0.95 and 0 < wide["nll"] < 0.01, wide)
    for other, bound in zip(others, bounds.values()):
        expect(other["nll"] <= bound * wide["nll"], other, wide)


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
