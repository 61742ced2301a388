"""Draws docs/scaling.svg and its tables: how time and memory of attention grow with context length, batch size, threads, heads and bits.
Imported by scripts/report. The CPU panels come from bench/scaling, the H200 panels from bench_attn --device mlx with --lengths or --batches.

Every panel except the one by bits has logarithmic axes, on which a cost that is proportional to the parameter is a line with slope 1.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable

from report_tables import CPU, GPU, markdown, three_digits

FILE = f"{CPU}/scaling"
GPU_FILES = ("decode_lengths", "decode_batches", "prefill_lengths")
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT, TOP, MARGIN = 2, 470, 300, 76, 20
LEFT, RIGHT, ABOVE, BELOW = 62, 24, 40, 44  # margins of the frame inside a panel
# Names, colors on light and dark pages, and dash patterns. Peers are dashed.
STYLES = {
    "flatkv s4/s4": ("flatkv sealed 4/4", "#0b4fb3", "#6ea8fe", ""),
    "flatkv 16/16": ("flatkv 16/16", "#0f766e", "#4fd1c5", ""),
    "llama.cpp f16": ("llama.cpp f16", "#c2410c", "#fb923c", "9 5"),
    "llama.cpp q8_0": ("llama.cpp q8_0", "#854d0e", "#facc15", "9 5"),
    "mlx-lm f16": ("MLX, 16-bit", "#9d174d", "#f472b6", "9 5"),
    "limit": ("limit: reading the sealed pages from memory", "#0b4fb3", "#6ea8fe", "2 4"),
}
STYLE = (
    "text{font-family:system-ui,'Helvetica Neue',Arial,sans-serif;fill:#24292f}.title{font-size:20px;font-weight:600}"
    ".subtitle{font-size:13px;fill:#57606a}.panel{font-size:14px;font-weight:600}.tick{font-size:12px;fill:#57606a}.label{font-size:12px}"
    ".middle{text-anchor:middle}.end{text-anchor:end}.grid{stroke:#e3e7eb}.axis{stroke:#57606a;fill:none}.page{fill:#ffffff}"
    "path.line{fill:none;stroke-width:2.2;stroke-linejoin:round}"
)
DARK = (
    "text{fill:#e6edf3}.subtitle,.tick{fill:#9da7b1}.grid{stroke:#30363d}.axis{stroke:#9da7b1}.page{fill:#0d1117}"
)


@dataclasses.dataclass(frozen=True)
class Line:
    style: str  # key of STYLES
    points: list[tuple[float, float]]
    names: tuple[str, ...] = ()  # labels of the points


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    unit: str
    lines: list[Line]
    is_log: bool = True
    queries: int = 1  # new tokens, which attend to each other causally


# ---- lines


def lines_of(cases: list[dict], x: Callable[[dict], float], key: str, factor: float = 1.0) -> list[Line]:
    """Returns one line for each program and cache type of a sweep."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        for subject in case["subjects"]:
            name = f"{subject['who']} {subject['types']}"
            if subject["right"] and subject.get(key) and name in STYLES:
                found.setdefault(name, []).append((x(case), subject[key] * factor))
    return [Line(name, sorted(found[name])) for name in STYLES if name in found]


def limit_of(cases: list[dict], x: Callable[[dict], float]) -> list[Line]:
    """Returns the time to read the packed bytes of sealed pages at the read bandwidth of the same run."""
    points = []
    for case in cases:
        for s in case["subjects"]:
            if f"{s['who']} {s['types']}" == "flatkv s4/s4":
                points.append((x(case), s["packed_bytes"] / case["read_roof_gb_s"] / 1e6))
    return [Line("limit", points)]


def gpu_lines(results: list[dict], x: str = "cached", key: str = "us_chained", factor: float = 1.0) -> list[Line]:
    names = {"flatkv fused": "flatkv s4/s4", "MLX bf16": "mlx-lm f16"}
    return [Line(names[who], [(r[x], r[key] * factor) for r in results if r["who"] == who]) for who in names]


def bits_line(case: dict) -> Line:
    values = 2 * case["kv_heads"] * case["head_dim"] * case["cached"]
    found = sorted((8 * s["packed_bytes"] / values, s["ms_p50"], s["types"]) for s in case["subjects"] if s["right"] and s["who"] == "flatkv")
    return Line("flatkv s4/s4", [(bits, ms) for bits, ms, _ in found], tuple(name for _, _, name in found))


def cached(case: dict) -> float:
    return case["cached"]


def panels(sweeps: dict, gpu: dict[str, list[dict]]) -> list[Panel]:
    decode, prefill, batch, threads, group, bits = (sweeps[name]["cases"] for name in ("decode", "prefill", "batch", "threads", "group", "bits"))
    by_threads = [lines_of([c for c in threads if c["queries"] == n], lambda c: c["threads"], "ms_p50") for n in (1, 512)]
    by_threads = [[line for line in lines if line.style != "mlx-lm f16"] for lines in by_threads]  # MLX has no setting for the number of threads
    return [
        Panel("CPU, decode", "cached tokens", "ms", lines_of(decode, cached, "ms_p50") + limit_of(decode, cached)),
        Panel("CPU, prefill of 512", "cached tokens", "ms", lines_of(prefill, cached, "ms_p50"), queries=512),
        Panel("H200, decode", "cached tokens", "\u00b5s", gpu_lines(gpu["decode_lengths"])),
        Panel("H200, prefill of 512", "cached tokens", "\u00b5s", gpu_lines(gpu["prefill_lengths"]), queries=512),
        Panel("H200, decode, 4096 cached tokens per sequence", "sequences", "\u00b5s", gpu_lines(gpu["decode_batches"], "batch")),
        Panel("H200, energy of a decode call", "cached tokens", "mJ", gpu_lines(gpu["decode_lengths"], key="joules", factor=1e3)),
        Panel("CPU, memory of the decode cases", "cached tokens", "MiB", lines_of(decode, cached, "memory_bytes", 1 / (1 << 20))),
        Panel("CPU, decode, 8192 cached tokens per sequence", "sequences", "ms", lines_of(batch, lambda c: c["sequences"], "ms_p50") + limit_of(batch, lambda c: c["sequences"])),
        Panel("CPU, decode (lower) and prefill (upper lines)", "threads", "ms", [line for lines in by_threads for line in lines]),
        Panel("CPU, decode, 16384 cached tokens", "query heads per KV head", "ms", lines_of(group, lambda c: c["q_heads"] / c["kv_heads"], "ms_p50") + limit_of(group, lambda c: c["q_heads"] / c["kv_heads"])),
        Panel("CPU, decode, 16384 cached tokens, by codec", "stored bits per value, including scales", "ms", [bits_line(bits[0])], is_log=False),
    ]


# ---- picture


def number(x: float) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if x >= size and x % size == 0:
            return f"{x / size:.0f}{unit}"
    return f"{x:g}"


class Frame:
    """Maps the values of a panel to pixels."""

    def __init__(self, panel: Panel, left: float, top: float) -> None:
        self.is_log = panel.is_log
        self.box = (left + LEFT, left + PANEL_WIDTH - RIGHT, top + PANEL_HEIGHT - BELOW, top + ABOVE)
        points = [p for line in panel.lines for p in line.points]
        self.x, self.y = (self.range([p[i] for p in points]) for i in (0, 1))

    def range(self, values: list[float]) -> tuple[float, float]:
        if not self.is_log:
            return 0.0, 1.08 * max(values)
        low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
        return float(low), float(max(high, low + 1))

    def place(self, x: float, y: float) -> tuple[float, float]:
        share = [((math.log2(v) if self.is_log else v) - low) / (high - low) for v, (low, high) in ((x, self.x), (y, self.y))]
        left, right, bottom, top = self.box
        return left + (right - left) * share[0], bottom + (top - bottom) * share[1]

    def ticks(self, low: float, high: float) -> list[float]:
        if self.is_log:
            step = max(1, math.ceil((high - low) / 7))
            return [2.0**i for i in range(int(low), int(high) + 1, step)]
        step = 2.0 ** math.ceil(math.log2(high / 6))
        return [step * i for i in range(int(high / step) + 1)]


def text(x: float, y: float, kind: str, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{words}</text>'


def draw_panel(panel: Panel, left: float, top: float) -> list[str]:
    frame = Frame(panel, left, top)
    x0, x1, y0, y1 = frame.box
    out = [text(left + 4, top + 22, "panel", f"{panel.title}, {panel.unit}")]
    for value in frame.ticks(*frame.y):
        y = frame.place(2.0 ** frame.x[0] if frame.is_log else 0, value)[1]
        out += [f'<line class="grid" x1="{x0:.1f}" y1="{y:.1f}" x2="{x1:.1f}" y2="{y:.1f}"/>', text(x0 - 7, y + 4, "tick end", f"{value:.2g}" if value < 1 else f"{value:.0f}")]
    for value in frame.ticks(*frame.x):
        x = frame.place(value, 2.0 ** frame.y[0] if frame.is_log else 0)[0]
        out += [f'<line class="axis" x1="{x:.1f}" y1="{y0:.1f}" x2="{x:.1f}" y2="{y0 + 4:.1f}"/>', text(x, y0 + 18, "tick middle", number(value))]
    out += [f'<path class="axis" d="M{x0:.1f} {y1:.1f}V{y0:.1f}H{x1:.1f}"/>', text((x0 + x1) / 2, y0 + 36, "label middle", panel.x_label)]
    for line in panel.lines:
        style, places = list(STYLES).index(line.style), [frame.place(*p) for p in line.points]
        out.append(f'<path class="line s{style}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>')
        if line.style != "limit":
            out += [f'<circle class="d{style}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in places]
        out += [text(x, y - 8 if i % 2 else y + 18, "tick middle", name) for i, ((x, y), name) in enumerate(zip(places, line.names))]
    return out


def legend(left: float, top: float, notes: list[str]) -> list[str]:
    out = []
    for i, (name, *_) in enumerate(STYLES.values()):
        y = top + 50 + 24 * i
        out += [f'<path class="line s{i}" d="M{left + LEFT:.1f} {y:.1f}h40"/>', text(left + LEFT + 52, y + 4, "label", name)]
    first = top + 50 + 24 * len(STYLES) + 12
    return out + [text(left + LEFT, first + 18 * i, "tick", note) for i, note in enumerate(notes)]


def style_sheet() -> str:
    """Returns the colors of lines and dots for light and dark pages."""
    light, dark = "", ""
    for i, (_, on_light, on_dark, dash) in enumerate(STYLES.values()):
        light += f".s{i}{{stroke:{on_light}" + (f";stroke-dasharray:{dash}" if dash else "") + f"}}.d{i}{{fill:{on_light}}}"
        dark += f".s{i}{{stroke:{on_dark}}}.d{i}{{fill:{on_dark}}}"
    return f"<style>{STYLE}{light}@media (prefers-color-scheme:dark){{{DARK}{dark}}}</style>"


def energy(sweeps: dict) -> str:
    measured = any(s.get("joules") for sweep in sweeps.values() for case in sweep["cases"] for s in case["subjects"])
    cpu = "The file scaling.json has the energy of calls on the CPU." if measured else "The CPU machine has no energy counters."
    return f"{cpu} On the H200, energy is measured for the whole GPU."


def read(folder: pathlib.Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def inputs(folder: pathlib.Path) -> tuple[dict, dict[str, list[dict]]]:
    return read(folder, FILE)["sweeps"], {name: read(folder, f"{GPU}/{name}")["result"]["results"] for name in GPU_FILES}


def picture(folder: pathlib.Path) -> str:
    """Returns docs/scaling.svg. `folder` is bench/results."""
    sweeps, gpu = inputs(folder)
    drawn = panels(sweeps, gpu)
    rows = len(drawn) // COLUMNS + 1
    width, height = COLUMNS * PANEL_WIDTH + MARGIN, TOP + rows * PANEL_HEIGHT + MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        style_sheet(),
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        text(24, 36, "title", "How the cost of attention grows"),
        text(24, 58, "subtitle", f"One layer, 32/8/128 unless stated. CPU: {sweeps['decode']['isa']} kernels, pages in memory. H200: chained calls."),
    ]
    places = [(MARGIN / 2 + PANEL_WIDTH * (i % COLUMNS), TOP + PANEL_HEIGHT * (i // COLUMNS)) for i in range(rows * COLUMNS)]
    for panel, place in zip(drawn, places):
        out += draw_panel(panel, *place)
    out += legend(*places[len(drawn)], ["Medians of single calls.", *energy(sweeps).replace(". ", ".\n").split("\n")])
    return "\n".join([*out, "</svg>"]) + "\n"


# ---- tables


def growth(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Returns the largest growth of the cost between two neighboring points, relative to the growth of x, and the x value after which it occurs."""
    return max((y1 / y0 / (x1 / x0), x0) for (x0, y0), (x1, y1) in zip(points, points[1:]))


def steps(results) -> str:
    """For each line of the picture with at least three points, the step at which the cost grows fastest relative to the parameter."""
    sweeps, gpu = inputs(results.folder)
    rows = []
    for panel in panels(sweeps, gpu):
        for line in panel.lines:
            if line.style != "limit" and len(line.points) > 2 and panel.is_log:
                masked = (panel.queries - 1) / 2  # mean number of cached tokens that are masked for a query
                factor, at = growth([(x - masked, y) for x, y in line.points])
                rows.append([panel.title, panel.x_label, STYLES[line.style][0], f"{factor:.2f}", number(at + masked)])
    return markdown(["panel", "parameter", "cache", "largest step", "after"], rows)


def lengths(results) -> str:
    """Time and memory on the CPU by context length, for sealed pages and the 16-bit caches of the peers."""
    sweeps, _ = inputs(results.folder)
    names = ("flatkv s4/s4", "llama.cpp f16", "mlx-lm f16")
    found: dict[float, dict[tuple[str, str], float]] = {}
    for what, sweep, key, factor in (("decode", "decode", "ms_p50", 1.0), ("prefill", "prefill", "ms_p50", 1.0), ("memory", "decode", "memory_bytes", 1 / (1 << 20))):
        for line in lines_of(sweeps[sweep]["cases"], cached, key, factor):
            for x, y in line.points:
                found.setdefault(x, {})[what, line.style] = y
    columns = [c for c in ((what, name) for what in ("decode", "prefill", "memory") for name in names) if any(c in row for row in found.values())]
    units = {"decode": "ms", "prefill": "ms", "memory": "MiB"}
    rows = [[number(x), *(three_digits(row[c]) if c in row else "-" for c in columns)] for x, row in sorted(found.items())]
    return markdown(["cached tokens", *(f"{what}, {units[what]}: {STYLES[name][0]}" for what, name in columns)], rows) + f"\n\n{energy(sweeps)}"
