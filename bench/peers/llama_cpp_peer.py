#!/usr/bin/env python3
"""Computes tokens, logits, perplexities and rates of llama.cpp, for comparison with flatkv. No test needs this script.

    python3 -m venv peers && peers/bin/pip install xllamacpp numpy        (or llama-cpp-python, which is compiled for the local machine)
    peers/bin/python bench/peers/llama_cpp_peer.py tokens -m MODEL -f FILE
    peers/bin/python bench/peers/llama_cpp_peer.py greedy -m MODEL -p PROMPT -n 64
    peers/bin/python bench/peers/llama_cpp_peer.py logits -m MODEL -f FILE -n 512 --out logits.npz
    peers/bin/python bench/peers/llama_cpp_peer.py ppl -m MODEL -f FILE -c 2048 --windows 4 --caches f16,q8_0,q8_0/q4_0
    peers/bin/python bench/peers/llama_cpp_peer.py turns -m MODEL --caches q8_0 --depths 7168        (used by scripts/rates.py)
    peers/bin/python bench/peers/llama_cpp_peer.py agreement -m MODEL -f FILE -n 512 --flatkv-logits build/release/peer_logits

Both packages contain llama.cpp as a shared library, and --package also accepts a folder with libllama.so. The script calls its C API. The
layout of the parameter structs changes between versions, so the script locates fields by llama.cpp's default values, and rejects an
unknown layout. Results are printed to standard output as one JSON object.
"""

import argparse
import ctypes
import importlib.metadata
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
CHUNK = 512  # tokens per timed prefill
BATCH = 2048  # maximum number of tokens per call
PARAMS_BYTES = 512  # larger than both structs in every version; the excess is never read


class Params(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * PARAMS_BYTES)]

    def ints(self):
        return np.frombuffer(self, dtype=np.int32)

    def floats(self):
        return np.frombuffer(self, dtype=np.float32)

    def octets(self):
        return np.frombuffer(self, dtype=np.uint8)


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


def open_library(package):
    """Returns the shared library that contains llama.cpp, and its version if the library does not belong to a Python package."""
    if package == "xllamacpp":
        import xllamacpp

        return ctypes.CDLL(xllamacpp.xllamacpp.__file__), None
    if package == "llama-cpp-python":
        import llama_cpp

        return ctypes.CDLL(str(pathlib.Path(llama_cpp.__file__).parent / "lib" / "libllama.so")), None
    folder = pathlib.Path(package)
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    base.ggml_version.restype = ctypes.c_char_p
    return ctypes.CDLL(str(folder / "libllama.so")), "ggml " + base.ggml_version().decode()


class Llama:
    """A model loaded by one build of llama.cpp. `context` creates contexts for it."""

    def __init__(self, package, path, n_threads):
        self.lib, self.version = open_library(package)
        lib = self.lib
        self.n_threads = n_threads
        self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, user: None)
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        for name, result, arguments in (
            ("llama_log_set", None, [pointer, pointer]),
            ("llama_backend_init", None, []),
            ("llama_print_system_info", ctypes.c_char_p, []),
            ("llama_model_default_params", Params, []),
            ("llama_context_default_params", Params, []),
            ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Params]),
            ("llama_model_get_vocab", pointer, [pointer]),
            ("llama_model_free", None, [pointer]),
            ("llama_vocab_n_tokens", i32, [pointer]),
            ("llama_vocab_bos", i32, [pointer]),
            ("llama_vocab_is_eog", ctypes.c_bool, [pointer, i32]),
            ("llama_vocab_get_add_bos", ctypes.c_bool, [pointer]),
            ("llama_tokenize", i32, [pointer, ctypes.c_char_p, i32, pointer, i32, ctypes.c_bool, ctypes.c_bool]),
            ("llama_token_to_piece", i32, [pointer, i32, ctypes.c_char_p, i32, i32, ctypes.c_bool]),
            ("llama_init_from_model", pointer, [pointer, Params]),
            ("llama_free", None, [pointer]),
            ("llama_get_memory", pointer, [pointer]),
            ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
            ("llama_memory_seq_cp", None, [pointer, i32, i32, i32, i32]),
            ("llama_memory_seq_rm", ctypes.c_bool, [pointer, i32, i32, i32]),
            ("llama_state_seq_get_size", ctypes.c_size_t, [pointer, i32]),
            ("llama_state_seq_get_data", ctypes.c_size_t, [pointer, pointer, ctypes.c_size_t, i32]),
            ("llama_state_seq_set_data", ctypes.c_size_t, [pointer, pointer, ctypes.c_size_t, i32]),
            ("llama_decode", i32, [pointer, Batch]),
            ("llama_get_logits_ith", pointer, [pointer, i32]),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        lib.llama_log_set(ctypes.cast(self.quiet, pointer), None)
        lib.llama_backend_init()
        self.system = lib.llama_print_system_info().decode()
        self.model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp cannot load this model")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        self.bos = lib.llama_vocab_bos(self.vocab)
        self.add_bos = lib.llama_vocab_get_add_bos(self.vocab)

    def tokenize(self, text, bos=True, special=False):
        buffer = np.zeros(len(text) + 16, dtype=np.int32)
        n = self.lib.llama_tokenize(self.vocab, text, len(text), buffer.ctypes.data, len(buffer), bos, special)
        if n < 0:
            raise SystemExit("llama.cpp cannot tokenize this text")
        return buffer[:n].copy()

    def piece(self, token):
        buffer = ctypes.create_string_buffer(512)
        length = self.lib.llama_token_to_piece(self.vocab, int(token), buffer, len(buffer), 0, True)
        return buffer.raw[:length]

    def context(self, n_ctx, cache, n_seqs=1):
        return Context(self, n_ctx, cache, n_seqs)


def patched(defaults, n_ctx, k_type, v_type, n_threads, n_seqs):
    """Sets the context parameters. Locates each field by llama.cpp's default values."""
    ints, floats, octets = defaults.ints(), defaults.floats(), defaults.octets()
    fours = [i for i in range(4, 10) if ints[i] == 4 and ints[i + 1] == 4]
    modes = [i for i in range(8, 20) if (ints[i : i + 3] == -1).all() and ints[i + 3] == -1]
    yarn = [i for i in range(10, 24) if (floats[i : i + 4] == -1.0).all() or (floats[i] == -1.0 and floats[i + 2] == 32.0)]
    types = [i for i in range(20, 40) if ints[i] == 1 and ints[i + 1] == 1]
    flags = octets.tobytes().find(bytes([0, 1, 1, 1, 1, 0]), 4 * types[0] + 8 if types else 0)
    if tuple(ints[:3]) != (512, 2048, 512) or not (fours and modes and yarn and types) or flags < 0:
        raise SystemExit("unknown layout of the context parameters in this version of llama.cpp: adapt patched() or use another version")
    ints[0], ints[1], ints[3] = n_ctx, BATCH, n_seqs
    ints[fours[0]] = ints[fours[0] + 1] = n_threads
    ints[modes[0] + 3] = 1  # flash attention, which quantized values require; also used for 16-bit values, so that conditions are equal
    ints[types[0]], ints[types[0] + 1] = k_type, v_type
    octets[flags + 5] = 1 if n_seqs > 1 else 0  # unified KV buffer for all sequences
    return defaults


class Context:
    def __init__(self, llama, n_ctx, cache, n_seqs):
        self.llama, self.lib = llama, llama.lib
        k_name, _, v_name = cache.partition("/")
        types = CACHE_TYPES[k_name], CACHE_TYPES[v_name or k_name]
        params = patched(self.lib.llama_context_default_params(), n_ctx, *types, llama.n_threads, n_seqs)
        self.handle = self.lib.llama_init_from_model(llama.model, params)
        if not self.handle:
            raise SystemExit(f"llama.cpp cannot create a context of {n_ctx} tokens with a {cache} cache")
        self.memory = self.lib.llama_get_memory(self.handle)

    def close(self):
        self.lib.llama_free(self.handle)

    def clear(self):
        self.lib.llama_memory_clear(self.memory, True)

    def decode(self, tokens, position, rows=None, seq=0):
        """Decodes tokens in one call, starting at this position. Returns logits [len(rows), n_vocab] of the given rows, by default of the last token."""
        n = len(tokens)
        rows = [n - 1] if rows is None else rows
        token = np.ascontiguousarray(tokens, dtype=np.int32)
        pos = np.arange(position, position + n, dtype=np.int32)
        n_seq_id = np.ones(n, dtype=np.int32)
        seq_of = np.full(n, seq, dtype=np.int32)
        seq_id = seq_of.ctypes.data + 4 * np.arange(n, dtype=np.uintp)
        wanted = np.zeros(n, dtype=np.int8)
        wanted[rows] = 1
        batch = Batch(n, *(a if a is None else a.ctypes.data for a in (token, None, pos, n_seq_id, seq_id, wanted)))
        status = self.lib.llama_decode(self.handle, batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with status {status}")
        out = np.empty((len(rows), self.llama.n_vocab), dtype=np.float32)
        for i, row in enumerate(rows):
            address = self.lib.llama_get_logits_ith(self.handle, int(row))
            out[i] = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (self.llama.n_vocab,))
        return out


def log_softmax(logits):
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top, dtype=np.float64).sum(axis=-1, keepdims=True)).astype(np.float32)


def command_tokens(llama, options):
    return {"tokens": llama.tokenize(options.file.read_bytes(), bos=options.bos).tolist()}


def command_greedy(llama, options):
    tokens = llama.tokenize(options.prompt.encode(), special=True)
    context = llama.context(len(tokens) + options.n, options.caches[0])
    new, fed, position = [], tokens, 0
    while len(new) < options.n:
        logits = context.decode(fed, position)
        position += len(fed)
        fed = logits.argmax(axis=-1)
        if llama.lib.llama_vocab_is_eog(llama.vocab, int(fed[0])):
            break
        new.append(int(fed[0]))
    context.close()
    return {"prompt_tokens": tokens.tolist(), "tokens": new, "text": b"".join(map(llama.piece, new)).decode(errors="replace")}


def command_logits(llama, options):
    tokens = llama.tokenize(options.file.read_bytes()[: 16 * options.n])[: options.n]
    context = llama.context(len(tokens), options.caches[0])
    logits = context.decode(tokens, 0, rows=range(len(tokens)))
    np.savez(options.out, tokens=tokens, logits=logits, top1=logits.argmax(axis=-1))
    return {"tokens": len(tokens), "out": str(options.out)}


def compare(ours, theirs):
    """Returns measures of agreement between two sets of logits, and the margin of the most likely token where it differs."""
    mine, other = ours.argmax(axis=-1), theirs.argmax(axis=-1)
    differ = np.flatnonzero(mine != other)
    spread = np.linalg.norm(theirs - theirs.mean(axis=-1, keepdims=True))
    margins = theirs[differ, other[differ]] - theirs[differ, mine[differ]]
    result = {"top1": 1 - len(differ) / len(ours), "rel_l2": float(np.linalg.norm(ours - theirs) / spread)}
    result["kl_mean"] = float(
        np.mean([(np.exp(b := log_softmax(t)) * (b - log_softmax(o))).sum() for o, t in zip(ours, theirs)])
    )
    result["margin_where_different"] = float(np.median(margins)) if len(differ) else 0.0
    runner_up = np.partition(theirs, -2, axis=-1)[:, -2]
    result["margin_median"] = float(np.median(theirs.max(axis=-1) - runner_up))
    return result


def command_agreement(llama, options):
    """Compares flatkv's logits with llama.cpp's, and both with llama.cpp's logits for the same weights expanded to float32. llama.cpp does not
    round activations for float32 weights, so the expanded model shows the contribution of its rounding."""
    tokens = llama.tokenize(options.file.read_bytes()[: 16 * options.n])[: options.n]

    def logits_of(model):
        return model.context(len(tokens), "f16").decode(tokens, 0, rows=range(len(tokens)))

    with tempfile.TemporaryDirectory() as folder:
        at = {name: os.path.join(folder, name) for name in ("tokens", "logits", "expanded.gguf")}
        tokens.astype(np.uint32).tofile(at["tokens"])
        subprocess.run([options.flatkv_logits, options.model, at["tokens"], at["logits"], str(llama.n_threads)], check=True)
        ours = np.fromfile(at["logits"], dtype=np.float32).reshape(len(tokens), -1)
        expand = pathlib.Path(__file__).with_name("expand.py")
        subprocess.run([sys.executable, expand, options.model, at["expanded.gguf"]], check=True)
        rounded = logits_of(llama)
        expanded = logits_of(Llama(options.package, at["expanded.gguf"], llama.n_threads))
    result = {"flatkv_llama": compare(ours, rounded), "flatkv_expanded": compare(ours, expanded)}
    return {"tokens": len(tokens), "text": options.file.name} | result | {"llama_expanded": compare(rounded, expanded)}


def score_window(context, ids, first, chunk):
    """Returns the log-probabilities of the scored rows: [context - first - 1, n_vocab]."""
    context.clear()
    parts = []
    for at in range(0, len(ids), chunk):
        scored = [i for i in range(chunk) if first <= at + i < len(ids) - 1]
        parts.append(context.decode(ids[at : at + chunk], at, scored))
    logs = np.concatenate(parts)
    for row in logs:
        row[:] = log_softmax(row)
    return logs


def command_ppl(llama, options):
    """Computes perplexities over the same windows as llama.cpp's perplexity tool: the second half of each window is scored, with the first half as
    context. After an interruption, reports the completed windows."""
    text = options.file.read_bytes()
    tokens = llama.tokenize(text[: options.windows * options.context * 16])
    contexts = {cache: llama.context(options.context, cache) for cache in options.caches}
    done = []  # per window and cache: negative log-likelihood, seconds, KL divergences, number of equal top-1 tokens
    first = options.context // 2
    try:
        for window in range(min(options.windows, len(tokens) // options.context)):
            ids = tokens[window * options.context : (window + 1) * options.context].copy()
            if llama.add_bos:
                ids[0] = llama.bos
            reference, row = None, {}
            for cache, context in contexts.items():
                start = time.perf_counter()
                logs = score_window(context, ids, first, options.chunk)
                seconds = time.perf_counter() - start
                reference = logs if reference is None else reference
                kl = [float((np.exp(theirs) * (theirs - ours)).sum(dtype=np.float64)) for ours, theirs in zip(logs, reference)]
                nll = -float(logs[np.arange(len(logs)), ids[first + 1 :]].sum(dtype=np.float64))
                row[cache] = (nll, seconds, kl, int((logs.argmax(axis=-1) == reference.argmax(axis=-1)).sum()))
            done.append(row)
            so_far = ", ".join(f"{c} {math.exp(v[0] / len(v[2])):.4f}, KL {np.mean(v[2]):.5f}" for c, v in row.items())
            print(f"window {window + 1}: {so_far}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {len(done)} windows", file=sys.stderr)
    n = options.context - first - 1
    found = []
    for cache in options.caches if done else []:
        nlls, seconds, kls, same = zip(*(row[cache] for row in done))
        row = {"cache": cache, "ppl": math.exp(sum(nlls) / (n * len(done))), "tokens": n * len(done), "seconds": sum(seconds)}
        row["window_ppl"] = [math.exp(nll / n) for nll in nlls]
        if cache != options.caches[0]:
            row |= {"kl_mean": float(np.mean(kls)), "kl_p99": float(np.quantile(kls, 0.99)), "top1": sum(same) / (n * len(done))}
        found.append(row)
    return {"windows": len(done), "context": options.context, "chunk": options.chunk, "caches": found}


def fill(llama, context, depth, rng):
    """Fills sequence 0 with `depth` tokens by copying one computed chunk repeatedly. The copies have equal positions, which does not change the
    cost of a step. Returns the next position."""
    chunk = min(depth, CHUNK)
    if not depth:
        return 0
    context.decode(rng.integers(1000, llama.n_vocab - 1000, chunk), 0, seq=1)
    state = ctypes.create_string_buffer(context.lib.llama_state_seq_get_size(context.handle, 1))
    context.lib.llama_state_seq_get_data(context.handle, state, len(state), 1)
    for _ in range(depth // chunk):
        if not context.lib.llama_state_seq_set_data(context.handle, state, len(state), 1):
            raise SystemExit("llama.cpp cannot restore the state of a sequence")
        context.lib.llama_memory_seq_cp(context.memory, 1, 0, -1, -1)
        context.lib.llama_memory_seq_rm(context.memory, 1, -1, -1)
    return chunk


def command_turns(llama, options):
    """Measures one turn per line of standard input: a prefill after the cached tokens, and decode steps after the same cached tokens. The prefill
    is shortened if it would exceed --patience. The first line of output describes the configuration."""
    (depth,), (cache,) = options.depths, options.caches
    rng = np.random.default_rng(1)
    context = llama.context(depth + CHUNK + options.prefill + options.n, cache, n_seqs=2)
    start = fill(llama, context, depth, rng)
    prompt = rng.integers(1000, llama.n_vocab - 1000, max(options.prefill, 1))

    def seconds(tokens, position):
        began = time.perf_counter()
        for at in range(0, len(tokens), BATCH):
            context.decode(tokens[at : at + BATCH], position + at)
        return time.perf_counter() - began

    def prefill(n):
        context.lib.llama_memory_seq_rm(context.memory, 0, start, -1)
        return seconds(prompt[:n], start)

    prefill(1)
    eighth = max(options.prefill // 8, 1)
    slow = prefill(eighth) * 8 > options.patience
    n = eighth if slow else len(prompt)
    print(json.dumps(about(llama, options) | {"threads": llama.n_threads, "prefilled": n}), flush=True)
    for _ in sys.stdin:
        rate = n / prefill(n)
        context.lib.llama_memory_seq_rm(context.memory, 0, start, -1)
        steps = [seconds(prompt[i % len(prompt) :][:1], start + i) for i in range(max(options.n, 1))]
        print(json.dumps({"prefill_tps": rate, "decode_tps": 1 / statistics.median(steps), "decode_mean_tps": len(steps) / sum(steps)}), flush=True)


def about(llama, options):
    """Returns a description of the peer, the model and the command."""
    version = llama.version or importlib.metadata.version(options.package)
    package = "libllama" if llama.version else options.package
    words = [pathlib.Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    found = {"peer": "llama.cpp", "package": package, "version": version, "system": llama.system}
    return found | {"command": " ".join(words), "model": pathlib.Path(options.model).stem}


def main():
    def names(text):
        return text.split(",")

    parser = argparse.ArgumentParser(description="Runs llama.cpp for comparison with flatkv.")
    parser.add_argument("command", choices=("tokens", "greedy", "logits", "ppl", "turns", "agreement"))
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-f", "--file", type=pathlib.Path)
    parser.add_argument("-p", "--prompt", default="")
    parser.add_argument("-n", type=int, default=32, help="number of tokens: generated by greedy, evaluated by logits and agreement, decoded per turn")
    parser.add_argument("-c", "--context", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=512, help="ppl: tokens per call")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument(
        "--caches", type=names, default=["f16"], help="K/V cache types such as f16,q8_0,q8_0/q4_0; the first one is the reference"
    )
    parser.add_argument("--depths", type=lambda text: [int(d) for d in text.split(",")], default=[0])
    parser.add_argument("--prefill", type=int, default=CHUNK, help="turns: tokens of the timed prefill")
    parser.add_argument("--patience", type=float, default=18, help="turns: time limit of a prefill, in seconds")
    parser.add_argument("--bos", action="store_true", help="tokens: add the beginning-of-sequence token")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--flatkv-logits", help="agreement: program that writes flatkv's logits, peer_logits of the build folder")
    parser.add_argument("--package", default="xllamacpp", help="xllamacpp, llama-cpp-python, or a folder with libllama.so (default: %(default)s)")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored; this enables it again
    llama = Llama(options.package, options.model, options.threads)
    result = globals()[f"command_{options.command}"](llama, options)
    if result:
        json.dump(about(llama, options) | result, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
