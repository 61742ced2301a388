#!/usr/bin/env python3
"""Checks that the source files of src form no dependency cycles.

usage: cycles.py <build folder> | --self-test

Reads the symbols of the object files in the build folder with nm, so it follows references rather than includes. Prints one line
per cycle with the symbols that cause it. The exit status is 1 if there is a cycle.
"""
import os
import re
import subprocess
import sys


def cycles(needs):
    """Returns the strongly connected components with more than one file (Tarjan's algorithm)."""
    number, low, stack, found = {}, {}, [], []

    def visit(file):
        number[file] = low[file] = len(number)
        stack.append(file)
        for other in sorted(needs[file]):
            if other not in number:
                visit(other)
            if other in stack:
                low[file] = min(low[file], low[other])
        if low[file] == number[file]:
            part = stack[stack.index(file):]
            del stack[-len(part):]
            if len(part) > 1:
                found.append(sorted(part))

    for file in sorted(needs):
        if file not in number:
            visit(file)
    return found


def graph_of(symbols):
    """Converts {file: (defined symbols, needed symbols)} to {file: {other file: symbols}}."""
    home = {name: file for file, (defined, _) in symbols.items() for name in defined}
    graph = {file: {} for file in symbols}
    for file, (_, needed) in symbols.items():
        for name in needed:
            if name in home and home[name] != file:
                graph[file].setdefault(home[name], set()).add(name)
    return graph


def source_tree(build):
    with open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8") as cache:
        return next(line.split("=", 1)[1].strip() for line in cache if line.startswith("CMAKE_HOME_DIRECTORY:"))


def source_of(path):
    """Returns the source file in src from which an object file was compiled, or None."""
    if not path.endswith((".c.o", ".c.obj")) or "/src/" not in path or ".dir/" not in path:
        return None
    return "src/" + re.sub(r"CMakeFiles/[^/]+\.dir/", "", path.rsplit("/src/", 1)[1]).rsplit(".", 1)[0]


def read_symbols(build):
    """Reads the symbols of every object file compiled from src, by source path. Skips object files whose source no longer exists."""
    tree = source_tree(build)
    objects = {}
    for folder, _, names in os.walk(build):
        for name in names:
            path = os.path.join(folder, name)
            source = source_of(path)
            if source is not None and os.path.isfile(os.path.join(tree, source)):
                objects[path] = source
    symbols = {source: (set(), set()) for source in objects.values()}
    listing = subprocess.run(["nm", "-A", "-P", "-g", *objects], check=True, capture_output=True, text=True).stdout if objects else ""
    for line in listing.splitlines():
        path, symbol, kind = line.rsplit(": ", 1)[0], *line.rsplit(": ", 1)[1].split()[:2]
        defined, needed = symbols[objects[path]]
        (needed if kind in "Uw" else defined).add(symbol)
    return symbols


def report(symbols):
    graph = graph_of(symbols)
    lines = []
    for part in cycles(graph):
        ties = [f"{a} -> {b}: {', '.join(sorted(graph[a][b])[:3])}" for a in part for b in sorted(graph[a]) if b in part]
        lines.append("dependency cycle: " + "; ".join(ties))
    return lines


def self_test():
    good = {"a.c": ({"a"}, {"b", "c"}), "b.c": ({"b"}, {"c", "malloc"}), "c.c": ({"c"}, {"memcpy"})}
    bad = {**good, "c.c": ({"c"}, {"a"})}
    cases = [("valid tree", not report(good)), ("cycle of three files", len(report(bad)) == 1 and "c.c -> a.c: a" in report(bad)[0])]
    cases += [(path, source_of(path) == source) for path, source in (
        ("b/CMakeFiles/flatkv_objects.dir/src/base/cpu.c.o", "src/base/cpu.c"),
        ("b/src/kit/CMakeFiles/flatkv_kit.dir/json.c.o", "src/kit/json.c"),
        ("b/tests/CMakeFiles/parts.dir/__/src/cli/text.c.o", "src/cli/text.c"),
        ("b/tests/CMakeFiles/test_base.dir/test_base.c.o", None))]
    failed = [name for name, right in cases if not right]
    print(f"{len(cases) - len(failed)} passed, {len(failed)} failed", *failed)
    return 1 if failed else 0


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--self-test":
        sys.exit(self_test())
    symbols = read_symbols(sys.argv[1])
    if len(symbols) < 50:
        sys.exit(f"found only {len(symbols)} object files of src in {sys.argv[1]}; build the tree first")
    lines = report(symbols)
    print("\n".join(lines) or f"no dependency cycle in {len(symbols)} files")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
