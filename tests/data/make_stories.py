#!/usr/bin/env python3
"""Converts llama2.c's files to stories260K.gguf, the smallest real language model with a golden output.

    tests/data/make_stories.py stories260K.bin tok512.bin tests/data/stories260K.gguf

The result is committed, so this script is only needed to recreate it. The model (260 thousand parameters, trained on TinyStories, MIT: see
stories_LICENSE) is stored as in llama2.c's file: float32, Q and K rows for RoPE over adjacent pairs, output tied to the
embeddings. The tokenizer is SentencePiece with byte fallback. llama2.c stores spaces and control tokens in printable form, so this
script converts them back to the form of SentencePiece, which GGUF uses. stories_golden.txt is the greedy output of llama2.c: the 256 tokens after
the BOS token, without the leading space of the first, and a newline.
"""

import struct
import sys

ALIGNMENT = 32
# Numeric codes of GGUF value types and SentencePiece token types.
U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
N_CONTROL, N_BYTES = 3, 256


def string(text):
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def entry(key, kind, value):
    """Encodes one key of the header. The value of an array is (element type, packed elements, count)."""
    head = string(key) + struct.pack("<I", kind)
    if kind == STRING:
        return head + string(value)
    if kind == ARRAY:
        element, data, count = value
        return head + struct.pack("<IQ", element, count) + data
    return head + struct.pack({U32: "<I", F32: "<f", BOOL: "<?"}[kind], value)


def read_tokens(path, n_vocab):
    with open(path, "rb") as file:
        data = file.read()
    tokens, scores, types = [], [], []
    at = 4  # skips the first field, the length of the longest token
    for index in range(n_vocab):
        score, length = struct.unpack_from("<fi", data, at)
        text = data[at + 8 : at + 8 + length].decode("utf-8")
        at += 8 + length
        scores.append(score)
        if index < N_CONTROL:
            tokens.append(("<unk>", "<s>", "</s>")[index])
            types.append(UNKNOWN if index == 0 else CONTROL)
        elif index < N_CONTROL + N_BYTES:
            assert text == f"<0x{index - N_CONTROL:02X}>", text
            tokens.append(text)
            types.append(BYTE)
        else:
            tokens.append(text.replace(" ", "\u2581"))
            types.append(NORMAL)
    assert at == len(data), "the tokenizer file is too long"
    return tokens, scores, types


def read_tensors(path):
    """Returns the shape of the model and its tensors: name, dimensions (fastest first, as in GGUF) and bytes."""
    with open(path, "rb") as file:
        data = file.read()
    dim, ffn, n_layers, n_heads, n_kv_heads, n_vocab, context = struct.unpack_from("<7i", data)
    assert n_vocab > 0, "a negative vocabulary size means an untied output, which is not supported"
    kv_dim = dim // n_heads * n_kv_heads
    at = 28
    tensors = []

    def read_tensor(name, dims, layers=1):
        nonlocal at
        size = 4 * dims[0] * (dims[1] if len(dims) > 1 else 1)
        for layer in range(layers):
            tensors.append((name.format(layer), dims, data[at : at + size]))
            at += size

    read_tensor("token_embd.weight", (dim, n_vocab))
    read_tensor("blk.{}.attn_norm.weight", (dim,), n_layers)
    read_tensor("blk.{}.attn_q.weight", (dim, dim), n_layers)
    read_tensor("blk.{}.attn_k.weight", (dim, kv_dim), n_layers)
    read_tensor("blk.{}.attn_v.weight", (dim, kv_dim), n_layers)
    read_tensor("blk.{}.attn_output.weight", (dim, dim), n_layers)
    read_tensor("blk.{}.ffn_norm.weight", (dim,), n_layers)
    read_tensor("blk.{}.ffn_gate.weight", (dim, ffn), n_layers)
    read_tensor("blk.{}.ffn_down.weight", (ffn, dim), n_layers)
    read_tensor("blk.{}.ffn_up.weight", (dim, ffn), n_layers)
    read_tensor("output_norm.weight", (dim,))
    at += 2 * 4 * context * (dim // n_heads // 2)  # skips RoPE tables that llama2.c no longer reads
    assert at == len(data), "the model file is too long"
    shape = {"dim": dim, "ffn": ffn, "layers": n_layers, "heads": n_heads, "kv_heads": n_kv_heads, "vocab": n_vocab}
    return shape | {"context": context}, tensors


def main():
    model_path, tokens_path, out_path = sys.argv[1:]
    shape, tensors = read_tensors(model_path)
    tokens, scores, types = read_tokens(tokens_path, shape["vocab"])
    n_vocab = shape["vocab"]
    entries = [
        entry("general.architecture", STRING, "llama"),
        entry("general.name", STRING, "stories260K"),
        entry("general.license", STRING, "mit"),
        entry("general.alignment", U32, ALIGNMENT),
        entry("general.file_type", U32, 0),
        entry("llama.context_length", U32, shape["context"]),
        entry("llama.embedding_length", U32, shape["dim"]),
        entry("llama.block_count", U32, shape["layers"]),
        entry("llama.feed_forward_length", U32, shape["ffn"]),
        entry("llama.attention.head_count", U32, shape["heads"]),
        entry("llama.attention.head_count_kv", U32, shape["kv_heads"]),
        entry("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        entry("llama.rope.dimension_count", U32, shape["dim"] // shape["heads"]),
        entry("llama.rope.freq_base", F32, 10000.0),
        entry("llama.vocab_size", U32, n_vocab),
        entry("tokenizer.ggml.model", STRING, "llama"),
        entry("tokenizer.ggml.tokens", ARRAY, (STRING, b"".join(map(string, tokens)), n_vocab)),
        entry("tokenizer.ggml.scores", ARRAY, (F32, struct.pack(f"<{n_vocab}f", *scores), n_vocab)),
        entry("tokenizer.ggml.token_type", ARRAY, (I32, struct.pack(f"<{n_vocab}i", *types), n_vocab)),
        entry("tokenizer.ggml.bos_token_id", U32, 1),
        entry("tokenizer.ggml.eos_token_id", U32, 2),
        entry("tokenizer.ggml.unknown_token_id", U32, 0),
        entry("tokenizer.ggml.add_bos_token", BOOL, True),
        entry("tokenizer.ggml.add_eos_token", BOOL, False),
    ]
    infos, blobs, offset = b"", b"", 0
    for name, dims, data in tensors:
        infos += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, offset)
        padded = data + bytes(-len(data) % ALIGNMENT)
        blobs += padded
        offset += len(padded)
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries)) + b"".join(entries) + infos
    with open(out_path, "wb") as file:
        file.write(header + bytes(-len(header) % ALIGNMENT) + blobs)


if __name__ == "__main__":
    main()
