"""Runs the programs of mlx-lm with flatkv installed: `python -m flatkv server`, `chat` and `generate`.

All options of mlx-lm's programs are passed on. Because --max-tokens is their option for the maximum number of generated tokens, the
size of the pool is set by --kv-tokens.
"""
from __future__ import annotations

import argparse
import functools
import importlib
import re
import sys
from typing import Any, Callable

import flatkv
from . import malloc

NAMES = {"server": "serve a model of mlx-lm over HTTP", "chat": "chat with a model of mlx-lm", "generate": "generate text with a model of mlx-lm"}
CONTEXTS = {"server": 8, "chat": 1, "generate": 1}  # number of sequences of maximum length that the default pool holds
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_count(text: str) -> int:
    """Returns a number of tokens or bytes such as 131072, 128K, 2.5G or 8GB. Units are powers of 1024.

    >>> parse_count("128K"), parse_count("1.5GB")
    (131072, 1610612736)
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(float(match[1]) * UNITS[match[2].upper()]) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number such as 4096, 128K or 8G (got {text!r})")
    return int(float(match[1]) * UNITS[match[2].upper()])


def make_parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of flatkv's own options."""
    parser = argparse.ArgumentParser(prog=f"python -m flatkv {name}", add_help=False, allow_abbrev=False,
                                     usage=f"python -m flatkv {name} [--kv-tokens N] [--memory SIZE] [--codec NAME] [--max-seqs N] [options of mlx_lm.{name}]")
    group = parser.add_argument_group("options of flatkv")
    group.add_argument("--kv-tokens", type=parse_count, metavar="N",
                       help="total number of tokens in all sequences and stored prompts, such as 131072 or 128K (default: "
                       f"{CONTEXTS[name]} x the maximum length of the model, or fewer if they need more than half of the available memory)")
    group.add_argument("--memory", type=parse_count, metavar="SIZE", help="maximum memory of the pool, such as 8G (default: half of the available memory)")
    group.add_argument("--codec", metavar="NAME", help="bits of keys / bits of values, or sealed (default: sealed if this needs no more memory than 8/4, otherwise 8/4)")
    group.add_argument("--max-seqs", type=parse_count, default=32, metavar="N", help="maximum number of sequences, including stored prompts (default: %(default)s)")
    return parser


def describe(pool: Any) -> str:
    """Returns the plan of a pool as one line."""
    from .lm.sizing import bytes_text
    plan, options = pool.plan, pool.options
    states = f"; recurrent states take up to {bytes_text(plan.state_bytes)} more" if plan.state_bytes else ""
    return (f"flatkv: {bytes_text(plan.total_bytes - plan.state_bytes)} reserved for {options.n_tokens:,} tokens in up to {options.max_seqs} sequences "
            f"({plan.token_bytes:,} bytes per token, codec {options.codec}, {len(pool.layers)} attention layers){states}")


def report_plans(max_kv_size: int | None) -> Callable[[], None]:
    """Opens the pool of every model that mlx-lm loads, and prints its plan. Returns a function that undoes this."""
    import mlx_lm.utils

    from .lm.hook import Redirection
    redirection = Redirection(mlx_lm.utils.load)

    @functools.wraps(redirection.original)
    def load(*args: Any, **named: Any) -> Any:
        loaded = redirection.original(*args, **named)
        pool = flatkv.lm.open_pool(loaded[0], max_kv_size)
        if pool is not None:
            print(describe(pool), file=sys.stderr, flush=True)
        return loaded

    redirection.to(load)
    return redirection.undo


def main(name: str, arguments: list[str]) -> int:
    parser = make_parser(name)
    if "-h" in arguments or "--help" in arguments:
        print(parser.format_help())
    options, rest = parser.parse_known_args(arguments)
    malloc.return_freed_memory()
    try:
        program = importlib.import_module(f"mlx_lm.{name}")  # must precede install(), which changes only functions of modules that are already imported
    except ImportError as error:
        parser.error(f"{error}; install mlx-lm with `pip install mlx-lm`")
    of_lm = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    of_lm.add_argument("--max-kv-size", type=int)
    try:
        flatkv.install(options.kv_tokens, codec=options.codec, max_seqs=options.max_seqs, memory_limit=options.memory or 0, max_contexts=CONTEXTS[name])
    except (flatkv.Error, ValueError) as error:
        parser.error(str(error))
    end_reports = report_plans(of_lm.parse_known_args(rest)[0].max_kv_size)
    before, sys.argv = sys.argv, [f"mlx_lm.{name}", *rest]
    try:
        program.main()
    except flatkv.DoesNotFit as error:
        print(f"flatkv: {error.message}", file=sys.stderr)
        return 1
    finally:
        sys.argv = before
        end_reports()
        flatkv.uninstall()
    return 0
