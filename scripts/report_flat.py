"""Draws docs/flat.svg: the measured memory of flatkv and of mlx-lm's own cache as a function of the number of tokens. Imported
by scripts/report. (flatkv bench flat --svg plots its own run, with computed 16-bit caches for comparison.)"""

import json
import pathlib

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 430, 70, 110, 84, 62
GIB = 1 << 30
PLAN, FLAT, OWN = "#8ec5ff", "#0b4fb3", "#c2410c"


def read(path):
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["result"]


def own_line(result):
    """Returns (tokens, bytes in addition to the weights) of mlx-lm's cache after each chunk of the prompt."""
    part = result["parts"]["model"]
    run = next(r for r in part["runs"] if r["who"] == "mlx-lm bf16")
    return [(i * part["chunk"], b - part["weights_bytes"]) for i, b in enumerate(run["chunk_bytes"])]


def thinned(points):
    """Removes points whose two neighbors have the same value as the point itself."""
    inner = [p for a, p, b in zip(points, points[1:], points[2:]) if not a[1] == p[1] == b[1]]
    return [points[0], *inner, points[-1]]


def picture(results):
    flat = read(results / "xeon-granite-rapids-2c" / "flat_32-8-128-131072.json")
    own = own_line(read(results / "h200" / "python.json"))
    most, tokens = 18 * GIB, flat["tokens"]

    def at(point):
        return (f"{LEFT + (WIDTH - LEFT - RIGHT) * point[0] / tokens:.1f},"
                f"{TOP + (HEIGHT - TOP - BOTTOM) * (1 - point[1] / most):.1f}")

    def line(points, colour, width):
        return f'<polyline points="{" ".join(map(at, points))}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def value(point, colour):
        x, y = at(point).split(",")
        return f'<text x="{float(x) + 8:.1f}" y="{float(y) + 4:.1f}" fill="{colour}">{point[1] / GIB:.2f} GiB</text>'

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           f'<text x="{LEFT}" y="24" font-size="16">Memory of a KV cache by number of cached tokens</text>',
           f'<text x="{LEFT}" y="42" fill="#555">{flat["layers"]} layers, {flat["kv_heads"]} KV heads of {flat["head_dim"]}, {tokens} tokens</text>']
    for gib in range(0, 18, 4):
        x, y = at((0, gib * GIB)).split(",")
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{gib} GiB</text>')
    for k in range(0, tokens // 1024 + 1, 32):
        out.append(f'<text x="{at((k * 1024, 0)).split(",")[0]}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{k}K</text>')
    plan = flat["plan_bytes"]
    out += [line([(0, plan), (tokens, plan)], PLAN, 8), line(thinned(flat["samples"]), FLAT, 2.5), line(own, OWN, 2.5)]
    out += [value(flat["samples"][-1], FLAT), value(own[-1], OWN)]
    legend = ((PLAN, "flatkv's plan, before allocation"), (FLAT, "flatkv K8/V4: resident, after each step"),
              (OWN, "mlx-lm's bf16 cache: MLX's count, after chunks"))
    for i, (colour, text) in enumerate(legend):
        out.append(f'<rect x="{LEFT + 236 * i}" y="{TOP - 27}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + 18 + 236 * i}" y="{TOP - 16}">{text}</text>')
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 16}" fill="#555">flatkv: growth of the anonymous memory of the process (flatkv bench flat). mlx-lm: '
               "generate_step on an H200 (gpu_check.py).</text>")
    return "\n".join([*out, "</svg>"]) + "\n"
