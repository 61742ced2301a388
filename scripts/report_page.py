"""Makes docs/results.md out of the files under bench/results. Imported by scripts/report, which measures; this only reads.

A file is one measurement: its kind, command, time, revision and result. Nothing on the page has another source; what was not
measured on a machine is not on the page. Numbers are rounded for reading; the files have them in full.
"""

import pathlib

import report_codecs
import report_serving
from report_records import Machine
from report_tables import build, markdown as table

REAL_MODELS = ["smollm2", "gemma3-270m", "qwen2.5-0.5b", "qwen2.5-1.5b"]
RATE_MODELS = ["smollm2", "qwen2.5-0.5b", "qwen2.5-1.5b"]


def codec_name(c):
    """8/4, 4/4 kv, 4/4 g32, s4/s4 v: keys and values, the group where it is not 64, what is rotated."""
    name = c["codec"].split(":")[0].split("g")[0] if "codec" in c else f"{c['k_bits']}/{c['v_bits']}"
    groups = {c[f"{side}_group"] for side in "kv" if c[f"{side}_bits"] != 16} - {0, 64}
    name += "".join(f" g{group}" for group in sorted(groups))
    return name + ("" if c.get("rotate", "none") == "none" else f" {c['rotate']}")


def megabytes(n):
    return f"{n / (1 << 20):.1f}" if n < 1 << 30 else f"{n / (1 << 20):,.0f}"


def percent(x, digits=2):
    return f"{100 * x:.{digits}f} %"


def signed(x):
    return f"{100 * x:+.2f} %"


def count(n, thing):
    return f"{n} {thing}" + ("" if n == 1 else "s")


def made_by(records):
    """When and from what, for a reader who wants to do it again."""
    days = sorted({r["when"][:10] for r in records})
    revisions = sorted({r["revision"] for r in records})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"*{span}, revision {', '.join(revisions)}.* `{records[-1]['command']}`"


def made_with_note(record):
    return [made_by([record]), *([record["note"]] if "note" in record else [])]


# ---- sections: each returns the lines of one machine ----


def quality_table(record):
    """One run over several codecs; without KL where it was not asked for."""
    result = record["result"]
    codecs = result["codecs"]
    base = result.get("ppl_16bit") or next(c["ppl"] for c in codecs if c["k_bits"] == c["v_bits"] == 16)
    rows = []
    for c in codecs:
        divergence = [f"{c['kl_mean']:.2e}", f"{c['kl_p99']:.2e}", percent(c["top1"])] if "kl_mean" in c else ["-"] * 3
        rows.append([codec_name(c), f"{c['ppl']:.4f}", signed(c["ppl"] / base - 1), *divergence])
    title = (
        f"**{result['model']}**, windows of {result['window']}: {count(result['windows'], 'window')}, "
        f"{codecs[0]['tokens']} tokens scored. 16-bit: {base:.4f}"
    )
    head = ["cache (K/V bits)", "perplexity", "to 16-bit", "KL mean", "KL p99", "same top-1"]
    return [title, table(head, rows), *made_with_note(record)]


def quality(machine):
    lines = []
    for window in (2048, 8192):
        for model in REAL_MODELS:
            records = [r for r in machine.of("quality") if r["result"]["model"] == model and r["result"]["window"] == window]
            for record in sorted(records, key=lambda r: -r["result"]["windows"]):
                lines += quality_table(record)
    return lines


def peers_quality(machine):
    records = machine.of("peer-quality")
    if not records:
        return []
    lines = []
    for record in records:
        peer = record["result"]
        same = machine.results("quality", model=peer["model"], window=peer["context"], windows=peer["windows"])
        rows = [
            [
                f"{peer['peer']} {c['cache']}",
                f"{c['ppl']:.4f}",
                signed(c["ppl"] / peer["caches"][0]["ppl"] - 1),
                f"{c['kl_mean']:.2e}" if "kl_mean" in c else "-",
                percent(c["top1"]) if "top1" in c else "-",
            ]
            for c in peer["caches"]
        ]
        for ours in same[:1]:
            rows += [
                [
                    f"flatkv {codec_name(c)}",
                    f"{c['ppl']:.4f}",
                    signed(c["ppl"] / ours["ppl_16bit"] - 1),
                    f"{c['kl_mean']:.2e}" if "kl_mean" in c else "-",
                    percent(c["top1"]) if "top1" in c else "-",
                ]
                for c in ours["codecs"]
            ]
        lines.append(
            f"**{peer['model']}**, the first {peer['windows']} windows of {peer['context']}, {peer['caches'][0]['tokens']} "
            f"tokens scored; {peer['peer']} {peer['version']}. Each against its own 16-bit cache."
        )
        lines.append(table(["cache", "perplexity", "to own 16-bit", "KL mean", "same top-1"], rows))
        if peer["peer"] == "mlx-lm":
            lines += mlx_distance(peer, same)
        lines += made_with_note(record)
    return lines


def mlx_distance(peer, same):
    """The same codec on both sides: groups of 64, no rotation, float32 activations."""
    theirs = {c["cache"]: c["ppl"] for c in peer["caches"]}
    names = {"16": "16/16", "8:64": "8/8", "4:64": "4/4"}
    said = [
        f"{ours}: {signed(c['ppl'] / theirs[cache] - 1)}"
        for cache, ours in names.items()
        for s in same[:1]
        for c in s["codecs"]
        if codec_name(c) == ours and cache in theirs
    ]
    return ["flatkv's perplexity to mlx-lm's with the same codec: " + ", ".join(said) + "."] if said else []


def agreement(machine):
    records = machine.of("agreement")
    if not records:
        return []
    rows = []
    for result in sorted((r["result"] for r in records), key=lambda r: REAL_MODELS.index(r["model"])):
        pairs = [result[k] for k in ("flatkv_expanded", "flatkv_llama", "llama_expanded")]
        rows.append([result["model"], *(cell for p in pairs for cell in (percent(p["top1"]), f"{p['rel_l2']:.4f}"))])
    first = records[0]["result"]
    head = [
        "model",
        "flatkv and llama.cpp on float32: same top-1",
        "error",
        "flatkv and llama.cpp: same top-1",
        "error",
        "llama.cpp and itself on float32: same top-1",
        "error",
    ]
    close = [(r["result"]["model"], r["result"]["flatkv_llama"]) for r in records]
    calls = ", ".join(f"{name} {c['margin_where_different']:.2f} of {c['margin_median']:.2f}" for name, c in close)
    return [
        f"{first['tokens']} positions of book text, 16-bit caches, {first['package']} {first['version']}. Error: L2 of the "
        "difference relative to that of the logits around their mean.",
        table(head, rows),
        "For quantized weights llama.cpp rounds activations to 8 bits in blocks, for float32 weights it does not. The same "
        "weights expanded to float32 are therefore the better oracle, and the last two columns are what its own rounding "
        "costs llama.cpp. Where flatkv and llama.cpp differ, llama.cpp's two candidates are close (median logit margin "
        f"there, of that everywhere: {calls}).",
        made_by(records),
    ]


def needles(machine):
    records = machine.of("niah")
    if not records:
        return []
    lines, rows = [], []
    for record in records:
        result = record["result"]
        for codec in result.get("codecs", [result]):
            cells = codec["cells"]
            for length in sorted({c["length"] for c in cells}):
                row = sorted((c for c in cells if c["length"] == length), key=lambda c: c["depth"])
                marks = "".join("\u25a0" if c["found"] else "\u25a1" for c in row)
                rows.append(
                    [
                        f"{result['model']} {codec_name(codec)}",
                        f"{length}",
                        f"{sum(c['found'] for c in row)} of {len(row)}",
                        marks,
                    ]
                )
    order = ["needle", *REAL_MODELS]
    rows.sort(key=lambda r: (order.index(r[0].split()[0]), int(r[1]), r[0]))
    lines.append(
        "Facts planted in a book and asked for at its end, each as if it were the only question (with `--together` all facts of a "
        "length are in one haystack). A square for each depth from the beginning to the end: filled where the answer was right."
    )
    lines.append(table(["model, cache", "tokens", "found", "depths"], rows))
    lines.append(made_by(records))
    return lines


def facts(machine):
    records = machine.of("facts")
    if not records:
        return []
    rows = []
    for record in records:
        result = record["result"]
        for codec in result.get("codecs", [result]):
            name = codec_name(codec)
            simulated = machine.simulated.get((codec["length"], name))
            rows.append(
                (
                    codec["length"],
                    codec["nll"],
                    [
                        f"{name}",
                        f"{codec['length']}, {codec['facts']}",
                        percent(codec["right"], 1),
                        f"{codec['nll']:.4f}",
                        "-" if simulated is None else f"{percent(simulated[0], 1)}, {simulated[1]:.4f}",
                    ],
                )
            )
    asked = next(c for r in records for c in r["result"].get("codecs", [r["result"]]))
    return [
        f"The needle model; facts of the same form at random places, {asked['asked']} of them asked one after another over "
        f"{asked['haystacks']} haystacks. Simulated: the same model in floating point with exact attention over simulated "
        "codes, on other haystacks.",
        table(["cache", "tokens, facts", "answers right", "nats a digit", "simulated"], [row for _, _, row in sorted(rows)]),
        made_by(records),
    ]


def memory(machine):
    records = machine.of("memory")
    if not records:
        return []
    rows = []
    for r in (record["result"] for record in records):
        rows.append(
            [
                f"{r['model']} {codec_name(r)}",
                f"{r['tokens']}",
                megabytes(r["plan_bytes"]),
                megabytes(r["open_bytes"]),
                megabytes(r["peak_bytes"]),
                signed(r["peak_bytes"] / r["plan_bytes"] - 1),
                f"{(r['peak_bytes'] - r['open_bytes']) / 1024:+.0f} KiB",
                "yes" if r["flat"] else "**no**",
            ]
        )
    return [
        "Anonymous memory of the process beyond its start and its weights, while the whole context is filled. MiB.",
        table(["model, cache", "tokens", "plan", "after open", "peak", "peak to plan", "peak to open", "flat"], rows),
        made_by(records),
    ]


def filled_cache(machine):
    """bench_flat: the cache alone, no model."""
    lines = []
    for record in machine.of("flat"):
        r = record["result"]
        name = f"{r['layers']} layers, {r['q_heads']}/{r['kv_heads']}/{r['head_dim']}, {r.get('codec', '8/4')}"
        sizes = [f"{r[key]:,}" for key in ("plan_bytes", "open_bytes", "peak_bytes", "end_bytes")]
        head = ["cache", "tokens", "plan", "after open", "peak", "at the end", "flat"]
        lines += [table(head, [[name, f"{r['tokens']}", *sizes, "yes" if r["flat"] else "**no**"]]), *made_with_note(record)]
    return lines


def plans(machine):
    records = machine.of("plan")
    if not records:
        return []
    lines = []
    for model in ["needle", *REAL_MODELS]:
        for result in machine.results("plan", model=model):
            contexts = [p["tokens"] for p in next(iter(result["codecs"].values()))]
            rows = []
            for codec, points in result["codecs"].items():
                sizes = [megabytes(p["total_bytes"]) + ("" if p["fits"] else " *") for p in points]
                rows.append([codec, *sizes, f"{points[-1]['longest_context']:,}"])
            available = min(p["available_bytes"] for points in result["codecs"].values() for p in points)
            lines.append(f"**{model}**; the machine could give {megabytes(available)} MiB:")
            lines.append(table(["cache", *(f"{c} tokens" for c in contexts), "crosses the machine at"], rows))
    return [
        "What is reserved for pages, tables, scratch and activations, without the weights, by `flatkv plan`. MiB; a star where "
        "the machine could not give it. The last column is the longest context whose plan the machine could still give.",
        *lines,
        made_by(records),
    ]


def rates(machine):
    lines = []
    for model in RATE_MODELS:
        ours = [r for r in machine.of("rates") if r["result"]["model"] == model]
        theirs = [r for r in machine.of("peer-rates") if r["result"]["model"] == model]
        if not ours and not theirs:
            continue
        cells = {}
        for record in ours:
            for r in record["result"]["rates"]:
                cells.setdefault(f"flatkv {r['codec'].replace(':', ' ')}", {})[r["depth"]] = r
        for record in theirs:
            for r in record["result"]["rates"]:
                cells.setdefault(f"llama.cpp {r['cache']}, {build(record['result']['system'])}", {})[r["depth"]] = r
        depths = sorted({d for c in cells.values() for d in c})
        rows = [
            [name, *(f"{by[d][k]:.1f}" if d in by else "-" for d in depths for k in ("prefill_tps", "decode_tps"))]
            for name, by in cells.items()
        ]
        head = ["cache", *(f"{what} at {d}" for d in depths for what in ("prefill", "decode"))]
        times = ", ".join(f"{who} {r['when']}" for who, found in (("flatkv", ours), ("llama.cpp", theirs)) for r in found)
        lines += [f"**{model}**, tokens a second; {times} UTC", table(head, rows)]
    peers = machine.of("peer-rates")
    if peers:
        peer = peers[0]["result"]
        lines.append(
            f"llama.cpp of {peer['package']} {peer['version']} ({build(peer['system'])}), {peer['threads']} threads, "
            f"flash attention on: {peer['system']}"
        )
    return lines


def codecs(machine):
    return report_codecs.table_of(machine, table, made_by)


def serving(machine):
    return report_serving.section(machine, table, made_by)


def codecs_picture(results):
    """docs/codecs.svg, of the machine that has measured most models."""
    machines = [Machine(p.parent) for p in sorted(pathlib.Path(results).glob("*/machine.json"))]
    return report_codecs.picture(max(machines, key=lambda m: len(report_codecs.Codecs(m).models)))


SECTIONS = (
    ("Codecs: bytes, divergence, perplexity, facts", codecs),
    ("Agreement with llama.cpp", agreement),
    ("Perplexity, divergence and agreement with a 16-bit cache", quality),
    ("The same windows under llama.cpp and mlx-lm", peers_quality),
    ("Needles", needles),
    ("Many facts", facts),
    ("A cache filled to its last token, bytes", filled_cache),
    ("Peak memory", memory),
    ("Memory against context, and where it crosses the machine", plans),
    ("Rates", rates),
    ("Serving", serving),
)


def make(results):
    """The page, from the folders of machines under `results`."""
    folders = sorted(p for p in pathlib.Path(results).glob("*") if (p / "machine.json").is_file())
    parts = [
        "# Results",
        "Written by `scripts/report` from the files under `bench/results`; it says how to measure again. Perplexity is that"
        " of WikiText-2's raw test file, cut into windows that do not overlap; the second half of each is scored, with all "
        "before it as context, prefilled in chunks, so that later chunks attend to packed history. KL and top-1 are against"
        " the 16-bit cache on the same tokens. Caches are named by the bits of keys and values, in groups of 64; `kv` means"
        " both are rotated.",
    ]
    if not folders:
        parts.append("*Nothing was measured yet.*")
    for folder in folders:
        machine = Machine(folder)
        about = machine.about
        parts.append(f"## {machine.name}")
        parts.append(
            f"{about['processor']}, {about['cores']} cores, {about['memory_bytes'] / (1 << 30):.0f} GiB, {about['system']}; "
            + " ".join(about["instructions"])
        )
        for title, section in SECTIONS:
            lines = section(machine)
            parts += [f"### {title}", *lines] if lines else []
    return "\n\n".join(parts) + "\n"
