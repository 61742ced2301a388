"""Runs the commands of `python -m flatkv`."""
from __future__ import annotations

import sys

from . import programs

COMMANDS = {**programs.NAMES, "bench": "compare the caches of mlx-lm with flatkv: memory, speed, KL divergence",
            "doctor": "check this machine and print a page for bug reports"}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in programs.NAMES:
        return programs.main(name, sys.argv[2:])
    if name == "bench":
        from .bench import main as run
    elif name == "doctor":
        from .doctor import main as run
    else:
        wanted = name in ("-h", "--help")
        unknown = "" if wanted or not name else f"unknown command {name!r}\n"
        print(f"{unknown}usage: python -m flatkv COMMAND\n" + "".join(f"  {n:9} {purpose}\n" for n, purpose in COMMANDS.items()), end="",
              file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
