"""Writes the figures of README.md and docs between markers, from the files under bench/results. Imported by scripts/report.

    <!-- table NAME -->                       a table of TABLES (report_tables.py)
    <!-- /table -->
    <!-- figure FILE PATH FORMAT -->1.77<!-- /figure -->

FILE is a path under bench/results without ".json". PATH walks the JSON: names joined by dots; [name=value,...] takes the one
element of a list that has these values. FORMAT is Python's, with a unit to divide by where one is wanted: .2f, .1f/MiB, .0f/%.

Times, rates, ratios and shares outside of a marker are refused, so that no figure can be without a file. A number that was not
measured here (a bound, a setting) stands between <!-- given --> and <!-- /given -->. Code blocks are not looked at.
"""

import json
import pathlib
import re

import report_tables

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 1e6, "GB": 1e9, "%": 0.01}
MARKED = re.compile(
    r"(?P<open><!-- (?P<kind>figure|table) (?P<what>.*?) -->)(?P<body>.*?)(?P<close><!-- /(?P=kind) -->)", re.S
)
MARKER = re.compile(r"<!-- /?(?:figure|table|given)\b")
GIVEN = re.compile(r"<!-- given -->.*?<!-- /given -->", re.S)
NOT_LOOKED_AT = re.compile(r"^```.*?^```|<!--.*?-->|\]\([^)]*\)|`[^`\n]*`", re.S | re.M)
UNMARKED = re.compile(
    r"(?<![\w.])\d[\d.,]*(?:e-?\d+)?\s?(?:ns|us|µs|ms|s|seconds|GB/s|TB/s|GFLOP/s|TFLOP/s|tokens (?:a|per) second|%)(?!\w)"
    r"|(?<![\w.])\d+(?:\.\d+)?x(?!\w)"
    r"|(?<=\|)[ *+-]*\d[\d,]*\.\d+[ *]*(?=[|,])"  # a cell with a decimal number
)


class Wrong(Exception):
    """A marker that cannot be filled, or a figure outside of one."""


class Results:
    """The JSON files of one folder, each read once."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.files = {}

    def file(self, name):
        if name not in self.files:
            path = self.folder / f"{name}.json"
            if not path.is_file():
                raise Wrong(f"there is no bench/results/{name}.json")
            self.files[name] = json.loads(path.read_text(encoding="utf-8"))
        return self.files[name]

    def get(self, name, path):
        value = self.file(name)
        for key, wanted in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
            value = self.step(value, key, wanted, f"{name} {path}")
        return value

    @staticmethod
    def step(value, key, wanted, place):
        if key:
            if not isinstance(value, dict) or key not in value:
                raise Wrong(f"{place}: no {key}")
            return value[key]
        pairs = [pair.split("=", 1) for pair in wanted.split(",")]
        found = [row for row in value if all(str(row.get(k)) == v for k, v in pairs)]
        if len(found) != 1:
            raise Wrong(f"{place}: {len(found)} elements with {wanted}")
        return found[0]


def figure(results, what):
    words = what.split()
    if len(words) < 3:
        raise Wrong(f"a figure is FILE PATH FORMAT, not: {what}")
    spec, _, unit = words[-1].partition("/")
    if unit and unit not in UNITS:
        raise Wrong(f"{what}: unknown unit {unit}")
    value = results.get(words[0], " ".join(words[1:-1]))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Wrong(f"{what}: {value!r:.40} is not a number")
    return format(value / UNITS.get(unit, 1), spec)


def table(results, name):
    if name not in report_tables.TABLES:
        raise Wrong(f"there is no table {name} in scripts/report_tables.py")
    return "\n" + report_tables.TABLES[name](results) + "\n"


def fill(results, text):
    """The page with every marker filled. Raises Wrong where one cannot be, or a figure stands outside."""
    makers = {"figure": figure, "table": table}
    if re.search(r"^<!-- (?:figure|given)", text, re.M):
        raise Wrong("a figure at the beginning of a line would end the paragraph there: put a word before it")
    rest = MARKED.sub("", GIVEN.sub("", text))
    left = MARKER.search(rest)
    if left:
        raise Wrong(f"a marker without its other end: {left[0]}")
    check_unmarked(NOT_LOOKED_AT.sub("", rest))
    return MARKED.sub(lambda m: m["open"] + makers[m["kind"]](results, m["what"]) + m["close"], text)


def check_unmarked(rest):
    found = UNMARKED.search(rest)
    if found:
        line = rest.splitlines()[rest[: found.start()].count("\n")]
        raise Wrong(f'"{found[0]}" has no file behind it: {line.strip()[:90]}')


SELF_TEST = (
    ("the right value", "a <!-- figure m/run rows[who=a].ms .2f -->1.77<!-- /figure --> ms", None),
    ("an older value", "a <!-- figure m/run rows[who=a].ms .2f -->2.95<!-- /figure --> ms", "differs"),
    ("a unit", "a <!-- figure m/run bytes .1f/MiB -->3.0<!-- /figure --> MiB", None),
    ("a file that is not there", "a <!-- figure m/gone rows .2f -->1<!-- /figure -->", "no bench/results/m/gone"),
    ("a name that is not there", "a <!-- figure m/run row .2f -->1<!-- /figure -->", "no row"),
    ("a value that is not a number", "a <!-- figure m/run rows[who=a].who .2f -->a<!-- /figure -->", "is not a number"),
    ("two rows that fit", "a <!-- figure m/run rows[bits=8].ms .2f -->1<!-- /figure -->", "2 elements"),
    ("a table nobody makes", "<!-- table nonsense -->\n<!-- /table -->", "no table nonsense"),
    ("a figure that begins a line", "<!-- figure m/run bytes .1f/MiB -->3.0<!-- /figure -->", "beginning of a line"),
    ("a marker left open", "a <!-- figure m/run bytes .1f -->3", "other end"),
    ("a time by hand", "Decode takes 1.77 ms.", '"1.77 ms"'),
    ("a ratio by hand", "| decode | 3.2x |", '"3.2x"'),
    ("a cell by hand", "| decode | 62.7 |", "62.7"),
    ("a share by hand", "within 81 % of the roof", '"81 %"'),
    ("a bound", "within <!-- given -->1 %<!-- /given --> of the plan, K8/V4, 16384 tokens", None),
    ("code", "```\n157 tokens a second\n```\n", None),
)


def self_test(folder):
    """Every kind of mistake is found, and what is right passes."""
    content = {"bytes": 3 << 20, "rows": [{"who": "a", "bits": 8, "ms": 1.767}, {"who": "b", "bits": 8, "ms": 5.68}]}
    (folder / "m").mkdir()
    (folder / "m" / "run.json").write_text(json.dumps(content), encoding="utf-8")
    failures = 0
    for name, text, expected in SELF_TEST:
        try:
            said = None if fill(Results(folder), text) == text else "differs"
        except Wrong as wrong:
            said = str(wrong)
        if (said is None) != (expected is None) or (expected and expected not in said):
            print(f"{name}: expected {expected}, found {said}")
            failures += 1
    return failures
