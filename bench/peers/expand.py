#!/usr/bin/env python3
"""Converts all tensors of a GGUF file to float32, so that llama.cpp computes without rounding activations.

    peers/bin/pip install gguf
    peers/bin/python bench/peers/expand.py MODEL.gguf OUT.gguf

llama.cpp rounds activations to 8 bits for quantized tensors, but not for float32 tensors. The expanded file contains the same model,
so the difference between the results of both files is caused by llama.cpp's rounding. The metadata is copied byte by byte.
"""

import struct
import sys

import gguf
import numpy as np


def main():
    source, target = sys.argv[1:]
    reader = gguf.GGUFReader(source)
    first_info = min(int(t.field.offset) for t in reader.tensors)
    with open(target, "wb") as out:
        out.write(bytes(reader.data[:first_info]))
        offset = 0
        for tensor in reader.tensors:
            name = tensor.name.encode()
            dims = [int(d) for d in tensor.shape]
            out.write(struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, offset))
            offset += -(-4 * tensor.n_elements // reader.alignment) * reader.alignment
        out.write(bytes(-out.tell() % reader.alignment))
        for tensor in reader.tensors:
            out.write(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).tobytes())
            out.write(bytes(-out.tell() % reader.alignment))


if __name__ == "__main__":
    main()
