#!/usr/bin/env python3
"""Converts the tensors of a GGUF file to another type: to float32, or matrices to Q8_0, Q5_0, Q4_1 or Q4_0.

    peers/bin/pip install gguf
    peers/bin/python bench/peers/expand.py MODEL.gguf OUT.gguf [--type Q8_0]

llama.cpp rounds activations to 8 bits for quantized tensors, but not for float32 tensors. The expanded file contains the same model,
so the difference between the results of both files is caused by llama.cpp's rounding. Other types are for speed measurements only,
because quantizing quantized weights again loses precision. Vectors stay float32. The metadata is copied byte by byte.
"""

import argparse
import struct

import gguf
import numpy as np

F32 = gguf.GGMLQuantizationType.F32


def type_of(tensor, wanted):
    """Returns the new type of a tensor: `wanted` for matrices whose rows consist of whole blocks, otherwise float32."""
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    return wanted if len(tensor.shape) > 1 and int(tensor.shape[0]) % block == 0 else F32


def n_bytes(tensor, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(tensor.n_elements) // block * size


def main():
    parser = argparse.ArgumentParser(description="Converts the tensors of a GGUF file to another type.")
    parser.add_argument("source", help="GGUF file")
    parser.add_argument("target", help="GGUF file to write")
    parser.add_argument("--type", choices=("F32", "Q8_0", "Q5_0", "Q4_1", "Q4_0"), default="F32", help="type of matrices (default: %(default)s)")
    options = parser.parse_args()
    wanted = gguf.GGMLQuantizationType[options.type]
    reader = gguf.GGUFReader(options.source)
    first_info = min(int(t.field.offset) for t in reader.tensors)
    with open(options.target, "wb") as out:
        out.write(bytes(reader.data[:first_info]))
        offset = 0
        for tensor in reader.tensors:
            kind = type_of(tensor, wanted)
            name = tensor.name.encode()
            dims = [int(d) for d in tensor.shape]
            out.write(struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, int(kind), offset))
            offset += -(-n_bytes(tensor, kind) // reader.alignment) * reader.alignment
        out.write(bytes(-out.tell() % reader.alignment))
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            out.write(gguf.quants.quantize(values, type_of(tensor, wanted)).tobytes())
            out.write(bytes(-out.tell() % reader.alignment))


if __name__ == "__main__":
    main()
