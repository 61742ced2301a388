"""Runs the commands `python -m flatkv bench` and `python -m flatkv doctor`."""
from __future__ import annotations

import sys


def main() -> int:
    commands = {"bench": "compare the caches of mlx-lm with flatkv: memory, speed, KL divergence",
                "doctor": "check this machine and print a page for bug reports"}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "bench":
        from .bench import main as run
    elif name == "doctor":
        from .doctor import main as run
    else:
        print("usage: python -m flatkv COMMAND\n" + "".join(f"  {n:8} {purpose}\n" for n, purpose in commands.items()), end="",
              file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
