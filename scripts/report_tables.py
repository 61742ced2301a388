"""The tables of README.md and docs, by name, from the files under bench/results. Imported by report_figures.py.

A table reads the files named in it and nothing else. Peers carry their build in their column: "native" was compiled on the
machine that ran it, for it; "AVX2 wheel" is a prebuilt package.
"""

import report_codecs
from report_records import Machine

CPU = "xeon-sapphire-rapids-2c"
FLAT = "xeon-granite-rapids-2c/flat_32-8-128-131072"
GPU = "h200"
MODEL_NAMES = {
    "smollm2": "SmolLM2-135M",
    "gemma3-270m": "Gemma-3-270M",
    "qwen2.5-0.5b": "Qwen2.5-Coder-0.5B",
    "qwen2.5-1.5b": "Qwen2.5-Coder-1.5B",
}


def markdown(head, rows):
    """A table whose first column is words and whose others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def three_digits(x):
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:,.0f}"


def times(x):
    return f"{x:.1f}x" if x < 10 else f"{x:.0f}x"


# ---- memory


def flat(results):
    """bench_flat: a cache of a model's shape filled to its last token."""
    r = results.file(FLAT)["result"]
    rows = [
        ["planned, before anything is taken", f"{r['plan_bytes']:,}"],
        ["resident after open", f"{r['open_bytes']:,}"],
        [f"resident at the end, {r['tokens']} tokens later", f"{r['end_bytes']:,}"],
        [f"highest of {len(r['samples'])} samples", f"{r['peak_bytes']:,}"],
        ["the same tokens in a 16-bit cache, computed", f"{r['layers'] * r['kv_heads'] * r['head_dim'] * 4 * r['tokens']:,}"],
    ]
    if "capacity_ratio" in r:
        rows.append(["decode time with room for 8 times the tokens", f"{r['capacity_ratio']:.2f}x"])
    return markdown(["", "bytes"], rows)


# ---- attention on the CPU


def subject(case, who, types):
    found = [s for s in case["subjects"] if s["who"] == who and s["types"] == types]
    return found[0] if found else None


def milliseconds(s):
    return "-" if s is None else three_digits(s["ms_p50"])


def with_ratio(s, name=""):
    return "-" if s is None else f"{three_digits(s['ms_p50'])}{name}, {times(s['time_to_flatkv'])}"


def case_name(case):
    what = "decode" if case["queries"] == 1 else f"prefill of {case['queries']}"
    return f"{what}, {case['q_heads']}/{case['kv_heads']}/{case['head_dim']}, {case['cached']} cached"


def attention_cpu(results, shape=None):
    """bench_compare: all subjects of a row by turns in one run. Ratios are medians over the rounds, to flatkv's 8/4."""
    rows = []
    for case in results.file(f"{CPU}/compare_decode")["cases"] + results.file(f"{CPU}/compare_prefill")["cases"]:
        if shape and (case["q_heads"], case["kv_heads"], case["head_dim"]) != shape:
            continue
        ik = min((s for s in case["subjects"] if s["who"] == "ik_llama.cpp"), key=lambda s: s["ms_p50"])
        ours = [milliseconds(subject(case, "flatkv", types)) for types in ("8/4", "4/4", "16/16")]
        theirs = [with_ratio(subject(case, "llama.cpp", types)) for types in ("f16", "q8_0")]
        rows.append([case_name(case), *ours, with_ratio(ik, f" ({ik['types']})"), *theirs])
    head = ["ms", "flatkv 8/4", "4/4", "16/16", "ik_llama.cpp's best, native", "llama.cpp f16, native", "q8_0, native"]
    return markdown(head, rows)


def attention_cpu_128(results):
    """The same, of one shape."""
    return attention_cpu(results, (32, 8, 128))


def read_roof(results):
    """Decode: packed bytes by time, as a share of the read bandwidth that the same run measured."""
    rows = []
    for case in results.file(f"{CPU}/compare_decode")["cases"]:
        found = [subject(case, "flatkv", types) for types in ("8/4", "4/4", "16/16")]
        shares = [s["packed_bytes"] / s["ms_p50"] / 1e6 / case["read_roof_gb_s"] for s in found]
        rows.append([case_name(case), f"{case['read_roof_gb_s']:.1f}", *(f"{100 * share:.0f} %" for share in shares)])
    return markdown(["share of the read roof", "roof, GB/s", "8/4", "4/4", "16/16"], rows)


def attention_codecs(results):
    """Codecs that pack more tightly than 8/4, beside it, by turns. Ratios: 8/4's time by theirs."""
    rows = []
    for case in results.file(f"{CPU}/compare_sealed_decode")["cases"] + results.file(f"{CPU}/compare_sealed_prefill")["cases"]:
        cells = [milliseconds(subject(case, "flatkv", "8/4"))]
        for types in ("s4/s4", "s3/s3", "tq4", "tq3", "tq2", "2/2"):
            found = subject(case, "flatkv", types)
            cells.append(f"{milliseconds(found)}, {1 / found['time_to_flatkv']:.2f}x")
        rows.append([case_name(case), *cells])
    head = ["ms", "8/4", "sealed 4/4", "sealed 3/3", "tq4", "tq3", "tq2", "2/2"]
    return markdown(head, rows)


def attention_mlx_lm(results):
    """bench_compare beside mlx-lm on MLX's CPU."""
    rows = []
    for case in results.file(f"{CPU}/compare_mlx-lm")["attention"]["cases"]:
        theirs = [with_ratio(subject(case, "mlx-lm", types)) for types in ("f16", "f32", "8", "4")]
        rows.append([case_name(case), milliseconds(subject(case, "flatkv", "8/4")), *theirs])
    return markdown(["ms", "flatkv 8/4", "mlx-lm f16, wheel", "f32", "8 bits", "4 bits"], rows)


# ---- models on the CPU


def build(system):
    """How a llama.cpp was built, told by the instructions it knows."""
    return "native" if "AVX512 = 1" in system else "AVX2 wheel"


def best_row(rows, key):
    return max(rows, key=lambda r: r[key])


def models_cpu(results):
    """bench/compare --models: flatkv and two builds of llama.cpp by turns, each with the best of its cache types."""
    rows = []
    for model in ("smollm2", "qwen2.5-0.5b"):
        found = results.file(f"{CPU}/compare_models-{model}")["models"]
        builds = {name: build(peer["system"]) for name, peer in found["peers"].items()}
        ours = {r["types"]: r for r in found["rows"] if r["who"] == "flatkv"}
        for what in ("prefill", "decode"):
            key = f"{what}_tps"
            cells = [three_digits(ours[types][key]) for types in ("8/4:kv", "16/16")]
            for wanted in ("AVX2 wheel", "native"):
                best = best_row([r for r in found["rows"] if builds.get(r.get("package")) == wanted], key)
                cells.append(f"{three_digits(best[key])} ({best['types']}), {times(1 / best[key + '_to_flatkv'])}")
            rows.append([f"{MODEL_NAMES[model]}, {what}", *cells])
    return markdown(["tokens a second", "flatkv 8/4", "16/16", "llama.cpp, AVX2 wheel", "llama.cpp, native"], rows)


# ---- quality

QUALITY_CODECS = ("8/8", "8/4", "4/4", "tq4/tq4", "s4/s4", "c4/s4", "s3/s3", "c3/s3")


def quality(results):
    """KL and perplexity against the same model's 16-bit cache, with what a long cache takes."""
    codecs = report_codecs.Codecs(Machine(results.folder / CPU))
    head = [f"{report_codecs.NAMES.get(c, c)} ({codecs.bytes(c) / codecs.bytes('16/16'):.2f})" for c in QUALITY_CODECS]
    rows = []
    for model in codecs.models:
        cells = [report_codecs.quality_cell(codecs, model, c) for c in QUALITY_CODECS]
        rows.append([f"{MODEL_NAMES[model]}, {codecs.windows(model)} windows", *cells])
    return markdown(["KL, perplexity (bytes to 16-bit)", *head], rows)


def calibrated(results):
    """KL of calibrated keys beside the codecs that they are to be compared with."""
    codecs = report_codecs.Codecs(Machine(results.folder / CPU))
    shown = ("c4/s4", "s4/s4", "8/4", "c3/s3", "s3/s3")
    rows = []
    for model in [m for m in codecs.models if "c4/s4" in codecs.quality[m]]:
        cells = [report_codecs.quality_cell(codecs, model, c).split(",")[0] for c in shown]
        rows.append([f"{MODEL_NAMES[model]}, {codecs.windows(model, 'c4/s4')} windows", *cells])
    return markdown(["KL", *(report_codecs.NAMES.get(c, c) for c in shown)], rows)


# ---- GPU


def decode_step_gpu(results):
    """bench_decode_mlx: a whole step of Llama-3-8B's shape."""
    rows = []
    for r in results.file(f"{GPU}/decode_step")["result"]["results"]:
        sizes = [f"{r[key] / (1 << 30):.2f}" for key in ("cache_bytes", "active_after")]
        rows.append([r["who"], f"{r['tokens_per_second']:.1f}", *sizes, f"{r['step_bytes'] / (1 << 20):.0f}"])
    return markdown(["cache", "tokens a second", "cache, GiB", "all of MLX, GiB", "beside it in a step, MiB"], rows)


GPU_CASES = (
    ("decode 8/4", "decode", "decode, 32/8/128, 131072 cached, 8/4"),
    ("decode 4/4", None, "the same, 4/4"),
    ("decode 16/16", None, "the same, 16/16"),
    ("batch 8/4", "batch", "batch of 8, 32768 each, 8/4"),
    ("wide heads 8/4", "wide heads", "decode, 32/2/256, 131072 cached, 8/4"),
    ("one wide head 8/4", "one wide head", "decode, 8/1/512, 131072 cached, 8/4"),
    ("prefill 8/4", "prefill", "prefill of 512, 32/8/128, 131072 cached, 8/4"),
)


def attention_gpu(results):
    """bench_attn --device mlx and torch's attention, microseconds of chained calls."""
    ours = results.file(f"{GPU}/attention")["result"]["results"]
    torch = results.file(f"{GPU}/torch")["result"]["rows"]
    rows = []
    for case, torch_case, name in GPU_CASES:
        by = {r["who"]: r for r in ours if r["case"] == case}
        cells = [three_digits(by[who]["us_chained"]) if who in by else "-" for who in ("MLX bf16", "MLX q8", "MLX q4")]
        cudnn = [r for r in torch if r["case"] == torch_case and r["who"] == "torch cuDNN bf16"]
        cells.append("-" if not cudnn else three_digits(cudnn[0]["us_chained"]) if "us_chained" in cudnn[0] else "refused")
        r = by["flatkv fused"]
        rows.append([name, three_digits(r["us_chained"]), three_digits(r["us_single"]), *cells])
    head = ["microseconds", "flatkv", "flatkv, single call", "MLX bf16", "MLX 8 bits", "MLX 4 bits", "torch cuDNN bf16"]
    return markdown(head, rows)


KERNEL_CASES = (  # rows of kernels_decode.json that differ by their pieces alone are named by its note
    (0, "8/4"),
    (2, "4/4"),
    (9, "8/8"),
    (8, "16/16"),
    (10, "2/2"),
    (4, "8/4, batch of 8, 32768 each"),
    (14, "8/4, four queries"),
    (7, "8/4, 32/4/128"),
    (5, "8/4, 32/2/256"),
    (6, "8/4, 8/1/512"),
    (13, "8/4 over 32768"),
    (12, "8/4 over 16384"),
    (11, "8/4 over 4096"),
)


def kernels_gpu(results):
    """Decode kernels launched directly: time with the merge, the read bandwidth's floor, its share."""
    found = results.file(f"{GPU}/kernels_decode")["result"]["rows"]
    rows = []
    for index, name in KERNEL_CASES:
        r = found[index]
        whole, merge = r["decode_and_merge_us"], r["decode_and_merge_us"] - r["decode_us"]
        share = f"{100 * r['floor_us'] / whole:.0f} %"
        cells = [f"{whole:.1f}", f"{merge:.1f}", f"{r['floor_us']:.1f}", share, f"{r['parts_mib']:.2f}", f"{1e4 * r['error_l2']:.1f}e-4"]
        rows.append([name, *cells])
    head = ["decode and merge", "the merge of it", "floor", "share of the floor", "partial results, MiB", "error"]
    return markdown(["32/8/128, 131072 cached unless said, microseconds", *head], rows)


# ---- models


def families(results):
    """How far every golden's logits are from those of transformers, on both backends and from both kinds of file."""
    mlx, gguf = ({row["model"]: row for row in results.file(f"families_{what}")["models"]} for what in ("mlx", "gguf"))
    rows = []
    for row in results.file("families_cpu")["models"]:
        cells = (row, mlx.get(row["model"]), gguf.get(row["model"]))
        texts = [f"{max(r['chunked'], r['single']):.1e}" if r else "" for r in cells]
        rows.append([f"`{row['model']}`", row["architecture"], *texts])
    return markdown(["golden", "architecture", "CPU", "MLX's CPU", "CPU, from GGUF"], rows)


MADE = (flat, attention_cpu, attention_cpu_128, read_roof, attention_codecs, attention_mlx_lm, models_cpu, quality, calibrated)
MADE += (decode_step_gpu, attention_gpu, kernels_gpu, families)
TABLES = {f.__name__: f for f in MADE}
