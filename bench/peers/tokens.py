#!/usr/bin/env python3
"""Compares flatkv's tokenizers with llama.cpp's, and writes the test vectors of tests/data/vocab. Needs xllamacpp and numpy.

    cmake --build --preset release --target tokens_of
    peers/bin/python bench/peers/tokens.py compare -m MODEL.gguf -f TEXT... [--program build/release/tokens_of]
    peers/bin/python bench/peers/tokens.py vectors

`compare` appends seeded random text to the files (emoji, scripts, control characters, invalid UTF-8, special tokens) and runs both
tokenizers with and without special tokens. It compares all tokens, the texts of all tokens in the vocabulary, and the end-of-generation
tokens. `vectors` runs llama.cpp over the test cases with the GPT-2 vocabulary and each pre-tokenizer, and with the SentencePiece
vocabulary of stories260K.
"""

import argparse
import ctypes
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

import numpy as np
import xllamacpp

TREE = pathlib.Path(__file__).parents[2]
VOCAB = TREE / "tests/data/vocab"
SEPARATOR = b"\n__ggml_vocab_test__\n"
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe")  # scripts/make-tokenizer-vectors writes the vectors of the other pre-tokenizers
SCRIPTS = [(0x370, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x6FF), (0x900, 0x97F), (0xE00, 0xE5B), (0x1100, 0x11FF), (0x2000, 0x206F),
           (0x2190, 0x23FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x300, 0x36F), (0x1D400, 0x1D7FF),
           (0x20000, 0x2A6DF)]
SPECIAL = [b"<|im_start|>", b"<|im_end|>", b"<|endoftext|>", b"<bos>", b"</s>", b"<s>", b"<unk>", b"<end_of_turn>", b"<unused5>",
           b"<table>", b"</td>", b"<tool_call>", b"<|fim_pad|>", b"<reponame>"]
BITS = [b"don't", b"I'LL", b"we'Ve", b" 'tis", b"'", b"1234567890", b" 12 345", b"3.14", b" \r\n \n", b"\r\r", b"\xe2\x80\x89",
        b"\xc2\xa0", b"\xc2\x85", b"\xe1\xa0\x8e", b"\xe2\x96\x81", b"!!!\n\n", b" ?!", b"x" * 70, b"\x00", b"\x1c", b"\xf0\x9d\x8b\x80"]


def broken(rng):
    # Avoids sequences beyond U+10FFFF, which make llama.cpp abort.
    return bytes(b for b in (rng.randrange(256) for _ in range(rng.randrange(1, 9))) if b < 0xF4)


def fragment(rng):
    kind = rng.randrange(9)
    low, high = rng.choice(SCRIPTS)
    return (
        "".join(chr(rng.randint(low, high)) for _ in range(rng.randrange(1, 10))).encode() if kind == 0 else
        "".join(chr(rng.choice([0x1F300 + rng.randrange(0x380), 0x200D, 0xFE0F, 0x20])) for _ in range(rng.randrange(1, 9))).encode()
        if kind == 1 else
        chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])).encode() if kind == 2 else
        bytes(rng.randrange(33) for _ in range(rng.randrange(1, 12))) if kind == 3 else
        broken(rng) if kind == 4 else
        b"\xed" + bytes([rng.randrange(0xA0, 0xC0), rng.randrange(0x80, 0xC0)]) if kind == 5 else
        rng.choice(SPECIAL) if kind == 6 else
        rng.choice([b" ", b"\n", b"\t"]) * rng.randrange(1, 40) if kind == 7 else
        rng.choice(BITS)
    )


def mixed(rng, n):
    return b"".join(fragment(rng) + rng.choice([b"", b"", b" ", b"word", b"\n", b"  b", b". ", b"7"]) for _ in range(n))


class Params(ctypes.Structure):
    _fields_ = [("octets", ctypes.c_ubyte * 512)]  # larger than the struct in every version; the excess is never read


class Vocabulary:
    """llama.cpp's tokenizer for a GGUF file, loaded without the weights."""

    def __init__(self, path):
        self.lib = lib = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
        pointer, i32, flag = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
        for name, result, arguments in (
            ("llama_log_set", None, [pointer, pointer]),
            ("llama_backend_init", None, []),
            ("llama_model_default_params", Params, []),
            ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Params]),
            ("llama_model_get_vocab", pointer, [pointer]),
            ("llama_vocab_n_tokens", i32, [pointer]),
            ("llama_vocab_is_eog", flag, [pointer, i32]),
            ("llama_tokenize", i32, [pointer, ctypes.c_char_p, i32, pointer, i32, flag, flag]),
            ("llama_token_to_piece", i32, [pointer, i32, ctypes.c_char_p, i32, i32, flag]),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        self.quiet = ctypes.CFUNCTYPE(None, i32, ctypes.c_char_p, pointer)(lambda level, text, user: None)
        lib.llama_log_set(ctypes.cast(self.quiet, pointer), None)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        # vocab_only is the first of the flags after the pointers. The first flag that is set by default is the third one.
        params.octets[next(i for i in range(40, 512) if params.octets[i] == 1) - 2] = 1
        model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocab = lib.llama_model_get_vocab(model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text, bos=False, special=False):
        buffer = np.zeros(4 * len(text) + 4, dtype=np.int32)
        n = self.lib.llama_tokenize(self.vocab, text, len(text), buffer.ctypes.data, len(buffer), bos, special)
        return buffer[:n].astype(np.uint32)

    def text(self, token, special):
        buffer = ctypes.create_string_buffer(4096)
        size = self.lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[: max(0, size)]

    def ends(self):
        return [token for token in range(self.n_vocab) if self.lib.llama_vocab_is_eog(self.vocab, token)]


# ---- compare


def run(options, mode, text=b""):
    return subprocess.run([options.program, options.model, mode], input=text, stdout=subprocess.PIPE, check=True).stdout


def show_difference(llama, ours, theirs):
    i = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    for name, tokens in (("flatkv", ours), ("llama.cpp", theirs)):
        print(f"  {name} from token {i}:", [(int(t), llama.text(int(t), True)) for t in tokens[i : i + 8]])


def compare(options):
    llama = Vocabulary(options.model)
    rng = random.Random(options.seed)
    text = b"".join(file.read_bytes() for file in options.file) + mixed(rng, options.pieces)
    n_wrong = 0
    for mode, bos, special in (("plain", False, False), ("special", True, True)):
        ours = np.frombuffer(run(options, mode, text), dtype=np.uint32)
        theirs = llama.tokenize(text, bos, special)
        equal = np.array_equal(ours, theirs)
        print(f"{options.model}: {mode}: {len(text)} bytes, {len(theirs)} tokens,", "equal" if equal else f"NOT EQUAL ({len(ours)})")
        if not equal:
            n_wrong += 1
            show_difference(llama, ours, theirs)
    for mode in ("texts", "special-texts"):
        ours, at, n_different = run(options, mode), 0, 0
        for token in range(llama.n_vocab):
            (size,) = struct.unpack_from("<I", ours, at)
            n_different += ours[at + 4 : at + 4 + size] != llama.text(token, mode == "special-texts")
            at += 4 + size
        print(f"{options.model}: {mode}: {llama.n_vocab} tokens, {n_different} different")
        n_wrong += n_different
    ends = sorted(np.frombuffer(run(options, "ends"), dtype=np.uint32).tolist())
    print(f"{options.model}: ends {ends}, llama.cpp's {llama.ends()}")
    return n_wrong == 0 and ends == llama.ends()


# ---- vectors


def with_pre_tokenizer(gguf, name):
    """Returns the contents of a GGUF file without tensors with tokenizer.ggml.pre replaced."""
    key = b"tokenizer.ggml.pre" + struct.pack("<I", 8)
    at = gguf.index(key) + len(key)
    (size,) = struct.unpack_from("<Q", gguf, at)
    return gguf[:at] + struct.pack("<Q", len(name)) + name.encode() + gguf[at + 8 + size :]


def write_vectors(path, name):
    """Writes one line per case: its tokens as plain text, a semicolon, and its tokens with special tokens recognized."""
    llama = Vocabulary(path)
    for cases in ("cases", "edges"):
        if (cases, name) == ("cases", "gpt-2"):
            continue  # llama.cpp's own test data already contains these vectors
        texts = (VOCAB / f"{cases}.inp").read_bytes().removesuffix(SEPARATOR).split(SEPARATOR)
        lines = (";".join(" ".join(map(str, llama.tokenize(text, special=special))) for special in (False, True)) for text in texts)
        (VOCAB / f"{cases}.{name}.out").write_text("".join(line + "\n" for line in lines))


def vectors(options):
    rng = random.Random(options.seed)
    texts = [fragment(rng) + b"x" + fragment(rng) for _ in range(150)] + [mixed(rng, 6) for _ in range(100)]
    (VOCAB / "edges.inp").write_bytes(SEPARATOR.join(texts))
    gguf = (VOCAB / "gpt-2.gguf").read_bytes()
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        for name in PRE_TOKENIZERS:
            pathlib.Path(file.name).write_bytes(with_pre_tokenizer(gguf, name))
            write_vectors(file.name, name)
    write_vectors(TREE / "tests/data/stories260K.gguf", "stories")
    return True


def main():
    parser = argparse.ArgumentParser(description="Compares flatkv's tokenizers with llama.cpp's.")
    parser.add_argument("command", choices=("compare", "vectors"))
    parser.add_argument("-m", "--model")
    parser.add_argument("-f", "--file", type=pathlib.Path, nargs="*", default=[])
    parser.add_argument("--pieces", type=int, default=60000, help="number of random text fragments")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", default=str(TREE / "build/release/tokens_of"))
    options = parser.parse_args()
    sys.exit(0 if globals()[options.command](options) else 1)


if __name__ == "__main__":
    main()
