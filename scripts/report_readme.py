"""Fills the tables of README.md from the files under bench/results, and checks that no page states a number by hand.

    <!-- table NAME -->                       a table of report_tables.TABLES
    <!-- /table -->

Only README.md has generated tables; docs/results.md is generated as a whole; other pages link to them. Measured times, rates and
ratios outside a table are rejected in all pages, so that no number can exist without a file. Code blocks are not checked.
Seconds and percentages are allowed because settings and bounds use them.
Imported by scripts/report.
"""

import json
import pathlib
import re

import report_tables

TABLE = re.compile(r"(?P<open><!-- table (?P<name>.*?) -->)(?P<body>.*?)(?P<close><!-- /table -->)", re.S)
MARKER = re.compile(r"<!-- /?(?:figure|table|given)\b")
UNCHECKED = re.compile(r"^```.*?^```|<!--.*?-->|\]\([^)]*\)|`[^`\n]*`", re.S | re.M)
MEASURED = re.compile(
    r"(?<![\w.])\d[\d.,]*(?:e-?\d+)?\s?(?:ns|us|µs|ms|microseconds|milliseconds|[GT]B/s|[GT]FLOP/s|tokens/s|tokens (?:a|per) second)(?!\w)"
    r"|(?<![\w.])\d+(?:\.\d+)?x(?!\w)"
    r"|(?<=\|)[ *+-]*\d[\d,]*\.\d+[ *]*(?=[|,])"  # a table cell with a decimal number
)


class Wrong(Exception):
    """A marker that cannot be filled, or a measured number outside a generated table."""


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


def table(results, name):
    if name not in report_tables.TABLES:
        raise Wrong(f"there is no table {name} in scripts/report_tables.py")
    return "\n" + report_tables.TABLES[name](results) + "\n"


def fill(results, text):
    """Returns the page with every table filled. Raises Wrong if a table is unknown or a measured number is outside a table."""
    rest = TABLE.sub("", text)
    left = MARKER.search(rest)
    if left:
        raise Wrong(f"unmatched or unknown marker: {left[0]}")
    check_by_hand(rest)
    return TABLE.sub(lambda m: m["open"] + table(results, m["name"]) + m["close"], text)


def check_by_hand(text):
    """Raises Wrong if the text states a measured number."""
    rest = UNCHECKED.sub("", text)
    found = MEASURED.search(rest)
    if found:
        line = rest.splitlines()[rest[: found.start()].count("\n")]
        raise Wrong(f'"{found[0]}" does not come from a file of bench/results: {line.strip()[:90]}')


SELF_TEST = (
    ("an unknown table", "<!-- table nonsense -->\n<!-- /table -->", "no table nonsense"),
    ("an unclosed marker", "<!-- table flat -->", "unmatched"),
    ("a figure marker", "a <!-- figure m/run bytes .1f -->3<!-- /figure -->", "unmatched or unknown"),
    ("a time", "Decode takes 1.77 ms.", '"1.77 ms"'),
    ("a rate", "Decode runs at 120 tokens/s.", '"120 tokens/s"'),
    ("a ratio", "| decode | 3.2x |", '"3.2x"'),
    ("a table cell", "| decode | 62.7 |", "62.7"),
    ("a setting", "The timeout is 60 s, and 1 % of memory is kept free.", None),
    ("code", "```\n157 tokens per second\n```\n", None),
)


def self_test(folder):
    """Returns the number of mistakes that the checks miss, or of correct texts that they reject."""
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
