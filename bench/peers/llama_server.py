#!/usr/bin/env python3
"""Runs llama.cpp's HTTP server from the package xllamacpp, and accepts some options of llama-server. llama.cpp need not be compiled.

    python3 -m venv peers && peers/bin/pip install xllamacpp
    peers/bin/python bench/peers/llama_server.py -m MODEL.gguf -c 8192 -t 2 --port 8081
"""
import argparse
import signal

import xllamacpp


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF file")
    parser.add_argument("-c", "--ctx-size", type=int, default=4096, help="context size of all slots together, in tokens")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-np", "--parallel", type=int, default=1, help="number of slots")
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--version", action="store_true", help="print the version of the package and the CPU features of its build")
    options = parser.parse_args()
    if options.version:
        print(f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip(' |')}")
        return
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.n_ctx, params.n_parallel, params.port = options.ctx_size, options.parallel, options.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    signal.pause()


main()
