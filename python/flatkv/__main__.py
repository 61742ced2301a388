"""python -m flatkv bench | doctor"""
from __future__ import annotations

import sys


def main() -> int:
    commands = {"bench": "mlx-lm's caches beside flatkv's: memory, speed, KL", "doctor": "checks this machine; one page for a report"}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "bench":
        from .bench import main as run
    elif name == "doctor":
        from .doctor import main as run
    else:
        print("usage: python -m flatkv COMMAND\n" + "".join(f"  {n:8} {text}\n" for n, text in commands.items()), end="",
              file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
