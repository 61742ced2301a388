"""Generates one table and one picture that compare all codecs by cache size, KL divergence, perplexity, recall of many facts and
attention time. Imported by report_page.py, report_tables.py and report."""

import math

MODELS = {"smollm2": "SmolLM2-135M", "qwen2.5-0.5b": "Qwen2.5-Coder-0.5B", "gemma3-270m": "Gemma-3-270M", "qwen2.5-1.5b": "Qwen2.5-Coder-1.5B"}
ORDER = ("16/16", "8/8", "8/4", "4/4", "tq4/tq4", "tq3/tq3", "tq2/tq2", "s4/s4", "s4/4", "c4/s4", "s3/s3", "c3/s3")
NAMES = {"s4/s4": "sealed 4/4", "s4/4": "sealed K4, V4", "s3/s3": "sealed 3/3", "c4/s4": "calibrated 4/4", "c3/s3": "calibrated 3/3"}
NAMES |= {f"tq{bits}/tq{bits}": f"tq{bits}" for bits in (4, 3, 2)}
COLOURS = ("#0b4fb3", "#c2410c", "#15803d", "#7c3aed")
SHAPE = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "cached": 16384}


def name_of(row):
    """Returns the codec name of a row as used by --codecs. Rows of older files have no name; for them, returns the bit widths if the
    row is rotated and has groups of 64, and otherwise None."""
    usual = {row[f"{side}_group"] for side in "kv" if row.get(f"{side}_bits", 16) != 16} <= {0, 64}
    old = f"{row.get('k_bits')}/{row.get('v_bits')}" if usual and row.get("rotate") == "kv" else None
    return row.get("codec", old)


def by_codec(rows):
    return {name_of(r): r for r in rows if name_of(r)}


class Codecs:
    """Measurements of one machine by codec name. For each model and codec, uses the run with the most windows, or the latest of
    several runs with the same number of windows."""

    def __init__(self, machine):
        self.sizes = next((r for r in machine.of("codec-bytes")), None)
        self.quality = {}
        for record in sorted(machine.of("quality"), key=lambda r: (r["result"]["windows"], r["when"])):
            result = record["result"]
            found = by_codec([r for r in result["codecs"] if "kl_mean" in r])
            if result["window"] == 2048:
                self.quality.setdefault(result["model"], {}).update(dict.fromkeys(found, record))
        many = [r for r in machine.of("facts") if by_codec(r["result"]["codecs"])]
        self.facts = max(many, key=lambda r: r["result"]["codecs"][0]["length"], default=None)
        self.attention = next((r for r in machine.of("attention")), None)
        self.models = [m for m in MODELS if self.quality.get(m)]

    def bytes(self, codec):
        return by_codec(self.sizes["result"]["codecs"])[codec]["total_bytes"]

    def row(self, model, codec):
        record = self.quality[model].get(codec)
        return record and by_codec(record["result"]["codecs"])[codec]

    def kl(self, model, codec):
        found = self.row(model, codec)
        return found and found["kl_mean"]

    def change(self, model, codec):
        found = self.row(model, codec)
        return found and found["ppl"] / self.quality[model][codec]["result"]["ppl_16bit"] - 1

    def windows(self, model, codec=None):
        """Returns the number of windows measured with a codec. If codec is None, returns the maximum over all codecs."""
        found = [self.quality[model][codec]] if codec else self.quality[model].values()
        return max(r["result"]["windows"] for r in found)

    def nll(self, codec):
        found = self.facts and by_codec(self.facts["result"]["codecs"])
        return found[codec]["nll"] / found["16/16"]["nll"] if found and codec in found else None

    def milliseconds(self, codec, op):
        rows = self.attention["result"]["results"] if self.attention else []
        return next((r["ms_p50"] for r in rows if r["codec"] == codec and r["op"] == op), None)

    def present(self):
        sizes = by_codec(self.sizes["result"]["codecs"]) if self.sizes else {}
        return [c for c in ORDER if c in sizes and (c == "16/16" or any(self.kl(m, c) is not None for m in self.models))]


def shown_ms(ms):
    return "-" if ms is None else f"{ms:.2f}" if ms < 10 else f"{ms:,.0f}"


def peer_milliseconds(machine, who, types):
    """Returns the peer's decode and prefill times for SHAPE from the comparison runs; "-" if a time was not measured."""
    found = {}
    for name, cases in (("compare_decode", "cases"), ("compare_prefill", "cases"), ("compare_mlx-lm", "attention"), ("compare_llama.cpp", "cases")):
        part = machine.file(name).get(cases, [])
        for case in part["cases"] if isinstance(part, dict) else part:
            if any(case[k] != v for k, v in SHAPE.items()) or case["queries"] not in (1, 512):
                continue
            found |= {case["queries"]: s["ms_p50"] for s in case["subjects"] if (s["who"], s["types"]) == (who, types)}
    return [shown_ms(found.get(queries)) for queries in (1, 512)]


def peer_caches(machine, model=next(iter(MODELS))):
    """Yields the measured caches of llama.cpp and mlx-lm for one model, with their bits per value (including scales) and their size
    without tables. For each cache, uses the latest run that measured the KL divergence."""
    bits = {"q8_0": 8.5, "q8_0/q4_0": 6.5, "q4_0": 4.5, "8:64": 8.5, "4:64": 4.5}
    found = {}
    for record in sorted(machine.of("peer-quality"), key=lambda r: r["when"]):
        peer = record["result"]
        for c in peer["caches"][1:] if peer["model"] == model else []:
            known = found.get((peer["peer"], c["cache"]))
            if c["cache"] in bits and ("kl_mean" in c or known is None or "kl_mean" not in known[1]):
                found[peer["peer"], c["cache"]] = peer, c
    order = list(bits)
    for peer, c in sorted(found.values(), key=lambda f: (f[0]["peer"], order.index(f[1]["cache"]))):
        yield peer, c, bits[c["cache"]], bits[c["cache"]] / 8 * 131072 * 32 * 8 * 128 * 2


def peer_cell(peer, c):
    kl = f"{c['kl_mean']:.4f}" if "kl_mean" in c else "-"
    return f"{kl}, {100 * (c['ppl'] / peer['caches'][0]['ppl'] - 1):+.2f} %"


def peer_rows(machine, models):
    """Returns one row for each peer cache that was measured with the first model. The row includes the results of other models, if any."""
    others = [{(peer["peer"], c["cache"]): f"{peer_cell(peer, c)} ({peer['windows']} windows)" for peer, c, _, _ in peer_caches(machine, m)} for m in models[1:]]
    rows = []
    for peer, c, bits, size in peer_caches(machine, models[0]):
        who = peer["peer"], c["cache"]
        times = peer_milliseconds(machine, who[0], who[1].partition(":")[0])
        rounded = ", activations in 8 bits" if who[0] == "llama.cpp" and peer.get("weights") != "float32" else ""
        name = f"{who[0]} {who[1]}, {peer['windows']} windows{rounded}"
        cells = [peer_cell(peer, c), *(found.get(who, "-") for found in others)]
        rows.append([name, f"{bits:.2f}", f"{size / (1 << 20):,.0f}", *cells, "-", *times])
    return rows


def quality_cell(codecs, model, codec):
    kl = codecs.kl(model, codec)
    if codec == "16/16":
        return "0, 0 %"
    if kl is None:
        return "-"
    n = codecs.windows(model, codec)
    fewer = f" ({n} windows)" if n < codecs.windows(model) else ""
    return f"{kl:.4f}, {100 * codecs.change(model, codec):+.2f} %{fewer}"


def sources(codecs):
    """Returns every record that contributes a number to the table."""
    used = [r for m in codecs.models for c, r in codecs.quality[m].items() if c in ORDER]
    used += [codecs.facts, codecs.attention, codecs.sizes]
    return list({id(r): r for r in used if r is not None}.values())


def table_of(machine, table):
    """Returns the paragraphs of the section."""
    codecs = Codecs(machine)
    if not codecs.present():
        return []
    rows = []
    for codec in codecs.present():
        size = codecs.bytes(codec)
        cells = [NAMES.get(codec, codec), f"{size * 8 / (131072 * 32 * 8 * 128 * 2):.2f}", f"{size / (1 << 20):,.0f}"]
        cells += [quality_cell(codecs, model, codec) for model in codecs.models]
        nll = codecs.nll(codec)
        times = [shown_ms(codecs.milliseconds(codec, op)) for op in ("decode", "prefill")]
        rows.append([*cells, f"{nll:.2f}" if nll is not None else "-", *times])
    rows += peer_rows(machine, codecs.models)
    windows = [f"{MODELS[m]}, {codecs.windows(m)} windows: KL, perplexity" for m in codecs.models]
    lines = [
        "The \"bits\" column (bits per value) and the \"MiB\" column refer to a whole cache of 131072 tokens, 32 layers and 8 KV heads of dimension 128, including tables and scratch memory. "
        "For llama.cpp and mlx-lm, both columns include only the packed keys and values.",
        "KL divergences are in nats per token. KL divergences and changes in perplexity are relative to the 16-bit cache of the same model. Each codec uses its default rotation. "
        "Calibrated codecs were calibrated on 16384 tokens of a novel. Each cache of llama.cpp and mlx-lm is compared with the 16-bit cache of the same program, with the same weights expanded to float32. "
        "If the weights are quantized, llama.cpp rounds activations to 8 bits; rows in which this rounding affects the KL divergence are labeled \"activations in 8 bits\".",
        "For the column \"facts\", the needle model reads 300 facts in 32768 tokens. The column shows the negative log-likelihood per digit of the correct answers, divided by the same quantity for the codec 16/16. "
        "The columns \"decode\" and \"prefill\" show the attention time of one layer with 32 query heads over 16384 cached tokens, on two cores. Decode processes one query token, and prefill processes a chunk of 512 query tokens. "
        "llama.cpp and mlx-lm were timed in separate runs (`compare_*.json`). mlx-lm has no quantized cache for the sliding-window layers of Gemma 3.",
        table(["cache", "bits", "MiB", *windows, "facts", "decode, ms", "prefill, ms"], rows),
        "![KL divergence by cache size](codecs.svg)",
    ]
    return [*lines, *machine.sources.cite(sources(codecs))]


# ---- the picture

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 480, 70, 20, 96, 60


def picture(machine):
    """Draws KL divergence (log scale) over cache size, with a line through all codecs that have a lower divergence than every smaller
    codec. Returns "" if there are no measurements."""
    codecs = Codecs(machine)
    shown = [c for c in codecs.present() if c != "16/16"]
    if not shown:
        return ""
    most = max(codecs.bytes(c) for c in shown) * 1.06
    kls = [codecs.kl(m, c) for m in codecs.models for c in shown if codecs.kl(m, c)]
    low, high = math.floor(math.log10(min(kls))), math.ceil(math.log10(max(kls)))

    def x_of(size):
        return LEFT + (WIDTH - LEFT - RIGHT) * size / most

    def y_of(kl):
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(kl)) / (high - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16">KL divergence from a 16-bit cache, by cache size</text>',
        f'<text x="{LEFT}" y="42" fill="#555">131072 tokens of 32 layers, 8 KV heads of 128; WikiText-2, windows of 2048</text>',
    ]
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for gib in range(0, int(most / (1 << 30)) + 1):
        x = x_of(gib << 30)
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{gib} GiB</text>')
    for i, codec in enumerate(sorted(shown, key=codecs.bytes)):
        x = x_of(codecs.bytes(codec))
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        out.append(f'<text x="{x:.1f}" y="{TOP - 6 - 14 * (i % 3)}" text-anchor="middle">{NAMES.get(codec, codec)}</text>')
    for i, model in enumerate(codecs.models):
        points = sorted((codecs.bytes(c), codecs.kl(model, c)) for c in shown if codecs.kl(model, c))
        best = [p for n, p in enumerate(points) if all(q[1] > p[1] for q in points[:n])]
        line = " ".join(f"{x_of(b):.1f},{y_of(k):.1f}" for b, k in best)
        out.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.5"/>')
        out += [f'<circle cx="{x_of(b):.1f}" cy="{y_of(k):.1f}" r="4" fill="{COLOURS[i]}"/>' for b, k in points]
        out.append(f'<circle cx="{LEFT + 10 + 200 * i}" cy="{HEIGHT - 18}" r="4" fill="{COLOURS[i]}"/>')
        out.append(f'<text x="{LEFT + 20 + 200 * i}" y="{HEIGHT - 14}">{MODELS[model]}</text>')
    for peer, c, _, size in peer_caches(machine):
        if "kl_mean" not in c:
            continue
        x, y = x_of(size), y_of(c["kl_mean"])
        out.append(f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="none" stroke="{COLOURS[0]}"/>')
        side = 'x="{:.1f}" text-anchor="end"'.format(x - 8) if x > 0.8 * WIDTH else f'x="{x + 8:.1f}"'
        out.append(f'<text {side} y="{y + 4:.1f}" font-size="10">{peer["peer"]} {c["cache"]}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
