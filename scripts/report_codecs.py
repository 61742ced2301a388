"""One table and one picture of what every codec costs and gives: bytes of a long cache, divergence, perplexity, many facts. Imported
by report_page.py and report."""

import math

MODELS = {"smollm2": "SmolLM2-135M", "qwen2.5-0.5b": "Qwen2.5-Coder-0.5B", "gemma3-270m": "Gemma-3-270M", "qwen2.5-1.5b": "Qwen2.5-1.5B"}
ORDER = ("16/16", "8/8", "8/4", "4/4", "tq4/tq4", "tq3/tq3", "tq2/tq2", "s4/s4", "s4/4", "s3/s3")
NAMES = {"s4/s4": "sealed 4/4", "s4/4": "sealed K4, V4", "s3/s3": "sealed 3/3", "tq4/tq4": "tq4", "tq3/tq3": "tq3", "tq2/tq2": "tq2"}
COLOURS = ("#0b4fb3", "#c2410c", "#15803d", "#7c3aed")


def by_codec(rows):
    return {r["codec"]: r for r in rows if "codec" in r}


class Codecs:
    """What a machine has measured of codecs by their names."""

    def __init__(self, machine):
        self.sizes = next((r for r in machine.of("codec-bytes")), None)
        self.quality = {}
        for record in machine.of("quality"):
            result = record["result"]
            known = self.quality.get(result["model"])
            named = result["window"] == 2048 and "kl_mean" in result["codecs"][0] and by_codec(result["codecs"])
            if named and (known is None or known["result"]["windows"] < result["windows"]):
                self.quality[result["model"]] = record
        many = [r for r in machine.of("facts") if by_codec(r["result"]["codecs"])]
        self.facts = max(many, key=lambda r: r["result"]["codecs"][0]["length"], default=None)
        self.models = [m for m in MODELS if m in self.quality]

    def bytes(self, codec):
        return by_codec(self.sizes["result"]["codecs"])[codec]["total_bytes"]

    def kl(self, model, codec):
        found = by_codec(self.quality[model]["result"]["codecs"]).get(codec)
        return found and found["kl_mean"]

    def change(self, model, codec):
        found = by_codec(self.quality[model]["result"]["codecs"]).get(codec)
        return found and found["ppl"] / self.quality[model]["result"]["ppl_16bit"] - 1

    def nll(self, codec):
        found = self.facts and by_codec(self.facts["result"]["codecs"])
        return found[codec]["nll"] / found["16/16"]["nll"] if found and codec in found else None

    def present(self):
        sizes = by_codec(self.sizes["result"]["codecs"]) if self.sizes else {}
        return [c for c in ORDER if c in sizes and any(self.kl(m, c) is not None for m in self.models)]


def peer_rows(machine, n_models):
    """llama.cpp and mlx-lm by their own scales, on the first model alone: bits a number with their scales, no tables."""
    bits = {"q8_0": 8.5, "q8_0/q4_0": 6.5, "q4_0": 4.5, "8:64": 8.5, "4:64": 4.5}
    rows = []
    for record in machine.of("peer-quality"):
        peer = record["result"]
        for c in peer["caches"][1:]:
            if c["cache"] not in bits or peer["model"] != next(iter(MODELS)):
                continue
            kl = f"{c['kl_mean']:.4f}" if "kl_mean" in c else "-"
            size = bits[c["cache"]] / 8 * 131072 * 32 * 8 * 128 * 2
            change = f"{100 * (c['ppl'] / peer['caches'][0]['ppl'] - 1):+.2f} %"
            name = f"{peer['peer']} {c['cache']}, {peer['windows']} windows"
            rows.append([name, f"{bits[c['cache']]:.2f}", f"{size / (1 << 20):,.0f}", f"{kl}, {change}", *["-"] * (n_models - 1), "-"])
    return rows


def table_of(machine, table, made_by):
    """The lines of the section."""
    codecs = Codecs(machine)
    if not codecs.present():
        return []
    rows = []
    for codec in codecs.present():
        size = codecs.bytes(codec)
        cells = [NAMES.get(codec, codec), f"{size * 8 / (131072 * 32 * 8 * 128 * 2):.2f}", f"{size / (1 << 20):,.0f}"]
        for model in codecs.models:
            kl = codecs.kl(model, codec)
            cells.append(f"{kl:.4f}, {100 * codecs.change(model, codec):+.2f} %" if kl is not None else "-")
        nll = codecs.nll(codec)
        rows.append([*cells, f"{nll:.2f}" if nll is not None else "-"])
    rows += peer_rows(machine, len(codecs.models))
    windows = [f"{MODELS[m]}, {codecs.quality[m]['result']['windows']} windows: KL, perplexity" for m in codecs.models]
    lines = [
        "Bits a number and MiB are of a whole cache, tables and scratch included: 131072 tokens of 32 layers with 8 KV heads of 128; of peers, of "
        "their pages alone. KL in nats a token, and perplexity, against the same model's 16-bit cache; rotated as the codecs are by default. "
        "Facts: nll a digit of the right answers, 300 facts in 32768 tokens of the needle model, times that of 16/16. Peers are against their own "
        "16-bit caches; llama.cpp rounds activations to 8 bits, which is part of its KL.",
        table(["cache", "bits", "MiB", *windows, "facts"], rows),
        "![KL against bytes](codecs.svg)",
    ]
    for record in [*(codecs.quality[m] for m in codecs.models), *([codecs.facts] if codecs.facts else []), codecs.sizes]:
        lines += [made_by([record]), *([record["note"]] if "note" in record else [])]
    return lines


# ---- the picture

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 480, 70, 20, 96, 60


def picture(machine):
    """KL over bytes, KL by powers of ten; a line through the codecs that no smaller one beats. "" where nothing was measured."""
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
        f'<text x="{LEFT}" y="24" font-size="16">KL divergence from a 16-bit cache against its bytes</text>',
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
    return "\n".join([*out, "</svg>"]) + "\n"
