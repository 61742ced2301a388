"""Generates the tables of README.md and docs/results.md, by name. Imported by report_readme.py and report_page.py.

Each function reads only the files under bench/results that it names. The column heads of peers state how the peer was built: a
"native" build was compiled on and for the machine that ran it, and an "AVX2 wheel" is a prebuilt package.
"""

import report_codecs
from report_records import Machine

CPU = "xeon-sapphire-rapids-2c"
CPU_VNNI = "xeon-cascade-lake-2c"
FLAT = "xeon-granite-rapids-2c/flat_32-8-128-131072"
GPU = "h200"
MODEL_NAMES = {
    "smollm2": "SmolLM2-135M",
    "gemma3-270m": "Gemma-3-270M",
    "qwen2.5-0.5b": "Qwen2.5-Coder-0.5B",
    "qwen2.5-1.5b": "Qwen2.5-Coder-1.5B",
}


# Models of compare_models-*.json. Weights of the types in parentheses were converted by bench/peers/expand.py.
RATE_MODELS = {name: MODEL_NAMES[name] for name in ("smollm2", "qwen2.5-0.5b", "qwen2.5-1.5b")}
CONVERTED = {f"{name}-{kind}": f"{MODEL_NAMES[name]} ({kind.upper()})" for name in RATE_MODELS for kind in ("q8_0", "q4_0")}


def table_of_text(head, rows):
    """Formats a table of text columns."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def markdown(head, rows):
    """Formats a table with one text column followed by numeric columns."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def three_digits(x):
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:,.0f}"


def times(x):
    return f"{x:.1f}x" if x < 10 else f"{x:.0f}x"


# ---- memory


def flat(results):
    """Memory of a cache with the shape of Llama-3-8B, filled to its last token."""
    r = results.file(FLAT)["result"]
    rows = [
        ["plan, printed before allocation", f"{r['plan_bytes']:,}"],
        ["resident after open", f"{r['open_bytes']:,}"],
        [f"resident after {r['tokens']} tokens", f"{r['end_bytes']:,}"],
        [f"highest of {len(r['samples'])} samples", f"{r['peak_bytes']:,}"],
        ["16-bit cache of the same size (computed)", f"{r['layers'] * r['kv_heads'] * r['head_dim'] * 4 * r['tokens']:,}"],
    ]
    if "capacity_ratio" in r:
        rows.append(["decode time at 8 times the capacity", f"{r['capacity_ratio']:.2f}x"])
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


CPU_CODECS = ("s4/s4", "8/4", "4/4", "16/16")


def attention_cpu(results, shape=None):
    """bench_compare: the measurements of all caches in a row are interleaved in one run. Ratios are medians over rounds, relative to the first codec."""
    rows = []
    for case in results.file(f"{CPU}/compare_decode")["cases"] + results.file(f"{CPU}/compare_prefill")["cases"]:
        if shape and (case["q_heads"], case["kv_heads"], case["head_dim"]) != shape:
            continue
        ik = min((s for s in case["subjects"] if s["who"] == "ik_llama.cpp"), key=lambda s: s["ms_p50"])
        ours = [milliseconds(subject(case, "flatkv", types)) for types in CPU_CODECS]
        theirs = [with_ratio(subject(case, "llama.cpp", types)) for types in ("f16", "q8_0")]
        rows.append([case_name(case), *ours, with_ratio(ik, f" ({ik['types']})"), *theirs])
    head = ["ms", *(f"flatkv {report_codecs.NAMES.get(c, c)}" for c in CPU_CODECS), "ik_llama.cpp, best type", "llama.cpp f16", "llama.cpp q8_0"]
    return markdown(head, rows)


def attention_cpu_128(results):
    """attention_cpu for the shape of Llama-3-8B only."""
    return attention_cpu(results, (32, 8, 128))


def read_roof(results):
    """Decode bandwidth as a percentage of the memory read bandwidth, which is measured in the same run."""
    rows = []
    for case in results.file(f"{CPU}/compare_decode")["cases"]:
        found = [subject(case, "flatkv", types) for types in CPU_CODECS]
        shares = ["-" if s is None else f"{100 * s['packed_bytes'] / s['ms_p50'] / 1e6 / case['read_roof_gb_s']:.0f} %" for s in found]
        rows.append([case_name(case), f"{case['read_roof_gb_s']:.1f}", *shares])
    return markdown(["share of read bandwidth", "bandwidth, GB/s", *(report_codecs.NAMES.get(c, c) for c in CPU_CODECS)], rows)


def attention_llama(results):
    """bench_compare: decode over sealed pages next to llama.cpp, with the share of the read bandwidth. Ratios are medians over rounds."""
    rows = []
    for case in results.file(f"{CPU}/compare_llama.cpp")["cases"]:
        ours = subject(case, "flatkv", "s4/s4")
        share = ours["packed_bytes"] / ours["ms_p50"] / 1e6 / case["read_roof_gb_s"]
        theirs = [with_ratio(subject(case, "llama.cpp", types)) for types in ("f16", "q8_0", "q4_0")]
        rows.append([case_name(case), milliseconds(ours), f"{100 * share:.0f} % of {case['read_roof_gb_s']:.1f} GB/s", *theirs])
    return markdown(["ms", "flatkv sealed 4/4", "share of read bandwidth", "llama.cpp f16", "llama.cpp q8_0", "llama.cpp q4_0"], rows)


def attention_codecs(results):
    """Codecs smaller than 8/4, measured interleaved with 8/4. Each ratio is the time of 8/4 divided by the time of the codec."""
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
    """bench_compare against mlx-lm on the MLX CPU backend."""
    rows = []
    for case in results.file(f"{CPU}/compare_mlx-lm")["attention"]["cases"]:
        theirs = [with_ratio(subject(case, "mlx-lm", types)) for types in ("f16", "f32", "8", "4")]
        rows.append([case_name(case), milliseconds(subject(case, "flatkv", "8/4")), *theirs])
    return markdown(["ms", "flatkv 8/4", "mlx-lm f16", "mlx-lm f32", "mlx-lm 8-bit", "mlx-lm 4-bit"], rows)


# ---- models on the CPU


def build(system):
    """Returns how a llama.cpp build was compiled, from its list of instruction sets."""
    return "native" if "AVX512 = 1" in system else "AVX2 wheel"


def best_row(rows, key):
    return max(rows, key=lambda r: r[key])


def model_rows(results, names, machine=CPU):
    """Yields the name of a model, a depth, the rows of flatkv by codec, those of llama.cpp by cache type, and llama.cpp's description."""
    for model in names:
        if not (results.folder / machine / f"compare_models-{model}.json").is_file():
            continue
        models = results.file(f"{machine}/compare_models-{model}")["models"]
        for depth in sorted({r["depth"] for r in models["rows"]}):
            rows = [r for r in models["rows"] if r["depth"] == depth]
            ours, theirs = ({r["types"]: r for r in rows if (r["who"] == "flatkv") == own} for own in (True, False))
            yield names[model], depth, ours, theirs, models["peers"]


def depth_name(depth):
    return f"after {depth} tokens" if depth else "without cached tokens"


def models_cpu(results, machine=CPU):
    """bench/compare --models: flatkv interleaved with llama.cpp."""
    caches = ("f16", "q8_0", "q4_0")
    rows = []
    for model, depth, ours, theirs, _ in model_rows(results, RATE_MODELS | CONVERTED, machine):
        for what in ("prefill", "decode"):
            key = f"{what}_tps"
            cells = [three_digits(theirs[cache][key]) if cache in theirs else "-" for cache in caches]
            fastest = f"{1 / best_row(theirs.values(), key)[key + '_to_flatkv']:.2f}x"
            once = ", one round" if ours["sealed"]["rounds"] == 1 else ""
            rows.append([f"{model}, {what} {depth_name(depth)}{once}", three_digits(ours["sealed"][key]), *cells, fastest])
    return markdown(["tokens/s", "flatkv sealed 4/4", *(f"llama.cpp {cache}" for cache in caches), "flatkv to the fastest llama.cpp"], rows)


def models_cpu_vnni(results):
    """The same on a processor with AVX-512 VNNI and without AMX."""
    return models_cpu(results, CPU_VNNI)


# ---- quality

README_CODECS = ("8/4", "s4/s4", "c4/s4")


def quality(results):
    """KL divergence and perplexity against the same model's 16-bit cache, with the relative cache size."""
    codecs = report_codecs.Codecs(Machine(results.folder / CPU))
    head = [f"{report_codecs.NAMES.get(c, c)} ({codecs.bytes(c) / codecs.bytes('16/16'):.2f})" for c in README_CODECS]
    rows = []
    for model in codecs.models:
        cells = [report_codecs.quality_cell(codecs, model, c) for c in README_CODECS]
        rows.append([f"{MODEL_NAMES[model]}, {codecs.windows(model)} windows", *cells])
    return markdown(["KL, perplexity (size relative to 16-bit)", *head], rows)


def calibrated(results):
    """KL divergence of calibrated keys next to uncalibrated codecs of similar size."""
    codecs = report_codecs.Codecs(Machine(results.folder / CPU))
    shown = ("c4/s4", "s4/s4", "8/4", "c3/s3", "s3/s3")
    rows = []
    for model in [m for m in codecs.models if "c4/s4" in codecs.quality[m]]:
        cells = [report_codecs.quality_cell(codecs, model, c).split(",")[0] for c in shown]
        rows.append([f"{MODEL_NAMES[model]}, {codecs.windows(model, 'c4/s4')} windows", *cells])
    return markdown(["KL", *(report_codecs.NAMES.get(c, c) for c in shown)], rows)


# ---- GPU


def decode_step_gpu(results):
    """bench_decode_mlx: whole decode steps of a model with the shape of Llama-3-8B, with products of flatkv's kernel and of MLX's."""
    found = results.file(f"{GPU}/decode_step")
    with_mlx = {r["who"]: r for r in found["result_mlx_products"]["results"]}
    rows = []
    for r in found["result"]["results"]:
        speeds = [f"{x['tokens_per_second']:.1f}" for x in (r, with_mlx[r["who"]])]
        sizes = [f"{r[key] / (1 << 30):.2f}" for key in ("cache_bytes", "active_after")]
        rows.append([r["who"], *speeds, *sizes, f"{r['step_bytes'] / (1 << 20):.0f}"])
    return markdown(["cache", "tokens/s", "tokens/s, MLX's products", "cache, GiB", "all MLX memory, GiB", "extra memory per step, MiB"], rows)


GPU_CASES = (
    ("decode 8/4", "decode", "decode, 32/8/128, 131072 cached, 8/4"),
    ("decode 4/4", None, "decode, 32/8/128, 131072 cached, 4/4"),
    ("decode 16/16", None, "decode, 32/8/128, 131072 cached, 16/16"),
    ("batch 8/4", "batch", "batch of 8, 32768 each, 8/4"),
    ("wide heads 8/4", "wide heads", "decode, 32/2/256, 131072 cached, 8/4"),
    ("one wide head 8/4", "one wide head", "decode, 8/1/512, 131072 cached, 8/4"),
    ("prefill 8/4", "prefill", "prefill of 512, 32/8/128, 131072 cached, 8/4"),
)


def attention_gpu(results):
    """bench_attn --device mlx next to torch's attention, in microseconds per call of a chain."""
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
    head = ["microseconds", "flatkv", "flatkv, single call", "MLX bf16", "MLX 8-bit", "MLX 4-bit", "torch cuDNN bf16"]
    return markdown(head, rows)


KERNEL_CASES = (  # row numbers in kernels_decode.json, whose note describes them
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
    """Decode kernels launched directly: the time including the merge, the time to read the packed bytes at full bandwidth, and their ratio."""
    found = results.file(f"{GPU}/kernels_decode")["result"]["rows"]
    rows = []
    for index, name in KERNEL_CASES:
        r = found[index]
        whole, merge = r["decode_and_merge_us"], r["decode_and_merge_us"] - r["decode_us"]
        share = f"{100 * r['floor_us'] / whole:.0f} %"
        cells = [f"{whole:.1f}", f"{merge:.1f}", f"{r['floor_us']:.1f}", share, f"{r['parts_mib']:.2f}", f"{1e4 * r['error_l2']:.1f}e-4"]
        rows.append([name, *cells])
    head = ["decode and merge", "merge alone", "bandwidth limit", "limit / measured", "partial results, MiB", "relative error"]
    return markdown(["microseconds; 32/8/128, 131072 cached unless stated", *head], rows)


# ---- the README's summary

README_DEPTHS = (0, 7168)


def ratio(ours, theirs):
    return f"{ours / theirs:.2f}x" if ours < 10 * theirs else f"{ours / theirs:.0f}x"


def speed(results):
    """Summary of README.md: flatkv next to the fastest peer configuration of the same run. Whole models that ran only one round are left out."""
    rows = []
    for model, depth, ours, theirs, peers in model_rows(results, RATE_MODELS):
        if depth not in README_DEPTHS or ours["sealed"]["rounds"] < 2:
            continue
        for what in ("prefill", "decode"):
            best = best_row(theirs.values(), f"{what}_tps")
            a, b = ours["sealed"][f"{what}_tps"], best[f"{what}_tps"]
            cells = [f"{three_digits(a)} tokens/s", f"{three_digits(b)} tokens/s (llama.cpp {best['types']}, {build(peers[best['package']]['system'])})"]
            rows.append([f"CPU, {model}, {what} {depth_name(depth)}", *cells, f"{1 / best[f'{what}_tps_to_flatkv']:.2f}x"])
    longest = results.file(f"{GPU}/python_lengths")["runs"]["sealed"]["lengths"][-1]
    for what in ("prefill", "decode"):
        a, b = (longest[what][who] for who in ("flatkv", "mlx-lm bf16"))
        cells = [f"{three_digits(a)} tokens/s", f"{three_digits(b)} tokens/s (mlx-lm bf16)"]
        rows.append([f"H200, Llama-3-8B shape, {what} at {longest['tokens']} tokens", *cells, ratio(a, b)])
    return markdown(["measurement", "flatkv", "fastest peer", "speedup"], rows)


# ---- models


def families(results):
    """Relative error of the logits against transformers, for each test model, backend and file format."""
    mlx, gguf = ({row["model"]: row for row in results.file(f"families_{what}")["models"]} for what in ("mlx", "gguf"))
    rows = []
    for row in results.file("families_cpu")["models"]:
        cells = (row, mlx.get(row["model"]), gguf.get(row["model"]))
        texts = [f"{max(r['chunked'], r['single']):.1e}" if r else "" for r in cells]
        rows.append([f"`{row['model']}`", row["architecture"], *texts])
    return markdown(["test model", "architecture", "CPU", "MLX (CPU backend)", "CPU, from GGUF"], rows)


# ---- GPU: sealed pages, Python


SEALED_CASES = (
    ("decode sealed", "decode, 32/8/128, 131072 cached"),
    ("wide heads sealed", "decode, 32/2/256, 131072 cached"),
    ("one wide head sealed", "decode, 8/1/512, 131072 cached"),
    ("prefill sealed", "prefill of 512, 32/8/128, 131072 cached"),
)


def sealed_gpu(results):
    """bench_attn --device mlx --case sealed."""
    by = {r["case"]: r for r in results.file(f"{GPU}/sealed")["result"]["results"]}
    rows = [[name, *(three_digits(by[case][key]) for key in ("us_chained", "us_single"))] for case, name in SEALED_CASES]
    return markdown(["microseconds", "per call, chained", "single call"], rows)


def lengths_gpu(results):
    """bench_attn --device mlx --lengths: sealed pages next to MLX's bf16 attention, by history length."""
    keys = {"us_chained": "chained", "us_in_parts": "in parts", "us_single": "single call"}
    tables = []
    for what in ("prefill", "decode"):
        rows = {}
        for r in results.file(f"{GPU}/{what}_lengths")["result"]["results"]:
            rows.setdefault(r["cached"], {})[r["who"]] = [three_digits(r[key]) for key in keys]
        head = [f"{who}, {name}" for who in ("flatkv", "MLX bf16") for name in keys.values()]
        cells = [[str(length), *by["flatkv fused"], *by["MLX bf16"]] for length, by in sorted(rows.items())]
        tables.append(markdown([f"{what}: microseconds, by cached tokens", *head], cells))
    return "\n\n".join(tables)


def wide_gpu(results):
    """Prefill of wide heads by history length: sealed pages and 8/4 next to MLX's bf16 attention."""
    rows = {}
    for r in results.file(f"{GPU}/prefill_wide")["result"]["results"]:
        who = r["who"] if r["who"].startswith("MLX") else r["case"].rsplit(" ", 1)[1]
        rows.setdefault(r["cached"], {})[who] = [three_digits(r[key]) for key in ("us_chained", "us_single")]
    columns = ("sealed", "8/4", "MLX bf16")
    head = [f"{who}{single}" for who in columns for single in ("", ", single call")]
    return markdown(["microseconds, by cached tokens", *head], [[str(length), *(cell for who in columns for cell in by[who])] for length, by in sorted(rows.items())])


def latent_gpu(results):
    """bench_attn --device mlx --case latent: latent layers next to MLX's attention over bf16 latents, by history length."""
    rows = []
    for what in ("decode", "prefill"):
        found = results.file(f"{GPU}/latent_{what}")["result"]["results"]
        for ours, mlx in zip(found[::2], found[1::2]):
            cells = [three_digits(r[key]) for r in (ours, mlx) for key in ("us_chained", "us_single")]
            rows.append([f"{what}, {ours['cached']} cached", *cells])
    return markdown(["microseconds", "flatkv, chained", "flatkv, single call", "MLX bf16, chained", "MLX bf16, single call"], rows)


def calibrated_gpu(results):
    """bench_attn --device mlx for calibrated keys, by history length, next to MLX's bf16 attention."""
    rows = {}
    for r in results.file(f"{GPU}/calibrated")["result"]["results"]:
        what, codec = r["case"].split(" ", 1)
        who = "MLX bf16" if r["who"].startswith("MLX") else codec.replace("calibrated", "c4/s4")
        rows.setdefault((what, r["cached"]), {})[who] = [three_digits(r[key]) for key in ("us_in_parts", "us_single")]
    columns = ("c4/s4", "c3/s3", "MLX bf16")
    head = [f"{who}, {name}" for who in columns for name in ("in parts", "single call")]
    cells = [[f"{what}, {cached} cached", *(cell for who in columns for cell in by[who])] for (what, cached), by in rows.items()]
    return markdown(["microseconds, 32/8/128", *head], cells)


def small_codecs_gpu(results):
    """bench_attn --device mlx for pages of 2 and 3 bits and TurboQuant pages."""
    found = [r for name in ("decode", "prefill_narrow") for r in results.file(f"{GPU}/{name}")["result"]["results"]]
    rows = [[r["case"], str(r["cached"]), *(three_digits(r[key]) for key in ("us_chained", "us_in_parts", "us_single"))] for r in found]
    return markdown(["microseconds, 32/8/128", "cached tokens", "chained", "in parts", "single call"], rows)


def rate_row(r):
    return [
        r["who"].replace("s4/s4", "sealed 4/4"),
        f"{r['prefill_tokens_per_s']:,.0f}",
        f"{r['decode_tokens_per_s']:.1f}",
        f"{r['cache_bytes'] / (1 << 30):.2f}",
        f"{r['peak_bytes'] / 1e9:.1f}",
    ]


def python_model(results):
    """mlx-lm's generate_step over 131072 tokens, with its bf16 cache and with flatkv."""
    parts = results.file(f"{GPU}/python")["result"]["parts"]
    rows = [rate_row(r) for r in [*parts["model"]["runs"], *parts["sealed"]["runs"]]]
    return markdown(["cache (rows in pairs, one run each)", "prefill, tokens/s", "decode, tokens/s", "cache, GiB", "peak with weights, GB"], rows)


def python_decode(results):
    """One-token steps of mlx-lm after a long and a short history, with the host time per token."""
    parts = results.file(f"{GPU}/python")["result"]["parts"]
    found = [(r, "flatkv" if r["who"].startswith("flatkv") else "MLX") for r in parts["decode"]["runs"]]
    found += [(r, "MLX") for r in parts["decode_mlx_products"]["runs"]]
    found += [({"cached": 2048} | r, "MLX") for r in parts["short"]["mean"]]
    rows = []
    for r, products in found:
        cells = [f"{r['decode_tokens_per_s']:.1f}", *(f"{r[key]:.2f}" for key in ("token_ms", "build_ms", "send_ms"))]
        rows.append([r["who"].replace("s4/s4", "sealed 4/4").replace(" built anew", ", compile=False"), products, f"{r['cached']}", *cells])
    return markdown(["cache", "products", "tokens cached", "tokens/s", "ms per token", "graph building, ms", "submission, ms"], rows)


def python_batch(results):
    """Two long prompts in mlx-lm's BatchGenerator."""
    rows = []
    for r in results.file(f"{GPU}/python")["result"]["parts"]["batch"]["runs"]:
        sizes = [f"{r[key] / 1e9:.1f}" for key in ("peak_bytes", "in_decode_bytes")]
        rows.append([r["who"], f"{r['first_token_s']:.1f}", f"{r['new']}", f"{r['decode_tokens_per_s']:.0f}", *sizes])
    head = ["first token, s", "new tokens per prompt in 6 s", "tokens/s, both prompts", "peak without weights, GB", "during decode, GB"]
    return markdown(["cache", *head], rows)


def python_lengths(results):
    """Prefill and decode of mlx-lm by prompt length, with flatkv and with its own cache (python/tests/gpu_defaults.py)."""
    rows = []
    for codec, run in results.file(f"{GPU}/python_lengths")["runs"].items():
        for found in run["lengths"]:
            speeds = [f"{found[part][who]:,.0f}" for part in ("prefill", "decode") for who in ("flatkv", "mlx-lm bf16")]
            ratios = [f"{found[part]['ratio']:.2f}x" for part in ("prefill", "decode")]
            rows.append([codec, str(found["tokens"]), *speeds[:2], ratios[0], *speeds[2:], ratios[1]])
    return markdown(["flatkv codec", "prompt tokens", "prefill, tokens/s", "mlx-lm bf16", "ratio", "decode, tokens/s", "mlx-lm bf16", "ratio"], rows)


def python_soak(results):
    """The server of mlx-lm with flatkv under load (python/tests/soak_server.py)."""
    rows = [[str(level["clients"]), f"{level['seconds']:.0f}", f"{level['answered']:,}", f"{level['rejected']:,}", str(level["wrong"]), f"{level['growth'] - 1:+.1%}",
             f"{level['max_growth'] - 1:+.1%}"]
            for level in results.file("python_soak")["levels"]]
    return markdown(["clients", "seconds", "answered like mlx-lm", "rejected with 400", "wrong", "growth of minimum", "growth of maximum"], rows)


def python_turns(results):
    """Tokens that each turn of a conversation with a hybrid model computes (python/tests/turns.py)."""
    found = results.file("python_turns")
    rows = []
    for family, counts in found["families"].items():
        for name in ("flatkv", "mlx-lm"):
            rows.append([family, name, *(f"{n:,}" for n in counts[name]), *[""] * (found["turns"] - len(counts[name]))])
    return markdown(["model", "cache", *(f"turn {i + 1}" for i in range(found["turns"]))], rows)


def hybrid_turns(results):
    """Tokens computed and time to the first token in conversations with a hybrid model, next to other servers (bench/hybrid_turns)."""
    labels = {"turn": "new turn", "edit": "edited turn", "regenerate": "last turn again, after the edit", "branch": "different next message"}
    files = {n: results.file(f"hybrid_turns_{n}")["summary"] for n in ("8K", "32K") if (results.folder / f"hybrid_turns_{n}.json").is_file()}
    servers = list(dict.fromkeys(name for summary in files.values() for s in summary.values() for name in s if isinstance(s[name], dict)))
    measures = {"computed": "{:,}", "first_s": "{:.2f} s", "cpu_s": "{:.1f} s"}
    rows = []
    for length, summary in files.items():
        for kind, s in summary.items():
            rows.append([length, labels[kind], str(s["requests"]), f"{s['new']:,}",
                         *(form.format(s[name][measure]) if name in s else "not measured" for measure, form in measures.items() for name in servers)])
    head = ["conversation", "request", "requests", "new tokens", *(f"{name}: {what}" for what in ("computed", "first token", "CPU") for name in servers)]
    return markdown(head, rows)


def hybrid_rates(results):
    """Prefill and decode rates of hybrid and latent-attention models, next to llama.cpp (bench/hybrid_rates)."""
    labels = {"hybrid": "Qwen3.5-4B layers", "dense": "dense, equal FLOPs", "latent": "latent attention"}
    rows = []
    for row in results.file(f"{CPU}/hybrid_rates")["rows"]:
        test = f"{row['test']}, {row['tokens']:,} tokens" + (f" after {row['depth']:,}" if row["depth"] else "")
        ours, theirs = row["flatkv"]["tps"], row.get("llama.cpp", {}).get("tps")
        rows.append([labels[row["model"]], test, f"{ours:.1f}", f"{theirs:.1f}" if theirs else "", ratio(ours, theirs) if theirs else ""])
    return markdown(["model", "test", "flatkv, tokens/s", "llama.cpp, tokens/s", "ratio"], rows)


def shares(right, asked):
    return f"{right} of {asked}"


def hybrid_codecs(results):
    """Page codecs with the trained hybrid model (bench/hybrid_quality, part codecs)."""
    rows = [[r["codec"], f"{r['ppl']:.4f}", f"{r['kl_mean']:.1e}", f"{r['kl_p99']:.1e}", f"{r['top1']:.2%}", shares(r["right"], r["asked"])]
            for r in results.file("hybrid_quality")["codecs"]["rows"]]
    return markdown(["codec", "perplexity", "mean KL", "99th percentile of KL", "same top token", "right answers"], rows)


def hybrid_states(results):
    """Recurrent states rounded to 16 bits, with the trained hybrid model (bench/hybrid_quality, part states)."""
    rows = [[r["state"], f"every {r['every']} tokens" if r["every"] else "" if r["state"] == "f32" else "once", f"{r['ppl']:.5f}", f"{r['kl_mean']:.1e}", f"{r['kl_p99']:.1e}",
             f"{r['top1']:.2%}", shares(r["right"], r["asked"])]
            for r in results.file("hybrid_quality")["states"]["rows"]]
    return markdown(["state", "changed", "perplexity", "mean KL", "99th percentile of KL", "same top token", "right answers"], rows)


def hybrid_chat(results):
    """Computed tokens and answers in a conversation with the trained hybrid model (bench/hybrid_quality, part turns)."""
    rows = [[r["request"], r["question"], r["answer"].strip(), f"{r['prompt']:,}", f"{r['new']:,}", f"{r['computed']:,}"] for r in results.file("hybrid_quality")["turns"]["rows"]]
    lines = ["| request | question | answer | prompt tokens | new tokens | computed tokens |", "|---|---|---|---:|---:|---:|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def python_key_biases(results):
    """KL divergence of quantized caches with large and small key biases (python/tests/key_biases.py)."""
    found = results.file("python_key_biases")
    return markdown(["cache", *found], [[codec, *(f"{column[codec]:.4f}" for column in found.values())] for codec in next(iter(found.values()))])


def python_census(results):
    """Model types of mlx-lm: served from pages, decoded for each pass, or rejected (python/tests/census.py)."""
    found = results.file("python_census")["models"]
    decoded = [name for name, f in found.items() if f.get("unpacked")]
    attended = [name for name, f in found.items() if f["kept"] and name not in decoded]
    rejected = {}
    for name, f in found.items():
        if not f["kept"]:
            rejected.setdefault(f["reason"].replace(" (found ArraysCache)", ""), []).append(name)
    rows = [["attention over pages", str(len(attended)), "all types that are not listed below"], ["rows are decoded for each pass", str(len(decoded)), ", ".join(decoded)]]
    return markdown(["result", "types", "names"], rows + [[f"rejected: {reason}", str(len(names)), ", ".join(names)] for reason, names in rejected.items()])


def outside_checks(results):
    """Counts of checks made by programs and test suites that are not part of flatkv."""
    census, fuzz = results.file("python_census"), results.file("serve_fuzz")
    lm = results.file("python_mlx_lm_tests")["counts"]
    llama, openapi = results.file("llama_server_tests"), results.file("serve_openapi")
    kill, suite = results.file(f"{CPU}/serve_prefix_kill")["folder"], llama["counts"]
    rows = [
        ["mlx-lm model types served by flatkv (python/tests/census.py)", f"{census['counts']['kept']} of {census['types']}"],
        ["largest relative logit error among them at 16/16", f"{census['largest']['16/16']:.4f}"],
        ["the same relative to mlx-lm with keys and values rounded to 16 bits", f"{census['largest_to_rounded_rows']:.4f}"],
        ["mlx-lm tests passed with flatkv / failed / left out", f"{lm['passed']} / {lm['FAILED']} / {lm['skipped']}"],
        ["llama.cpp server tests passed / failed / left out", f"{suite['passed']} / {suite['failed']} / {suite['left_out']}"],
        ["schemathesis requests / server errors", f"{openapi['release']['cases']:,} / {openapi['release']['server_errors']}"],
        [f"request bodies fuzzed in {fuzz['seconds']} s / failures", f"{fuzz['runs']:,} / {fuzz['failures']}"],
        ["prefix-folder writers killed / pages lost / wrong answers", f"{kill['kills']:,} / {kill['lost']} / {kill['wrong']}"],
    ]
    return markdown(["check", "result"], rows)


MADE = (flat, attention_cpu, attention_cpu_128, attention_llama, read_roof, attention_codecs, attention_mlx_lm, models_cpu, models_cpu_vnni, quality, calibrated)
MADE += (decode_step_gpu, attention_gpu, sealed_gpu, lengths_gpu, wide_gpu, latent_gpu, calibrated_gpu, small_codecs_gpu, kernels_gpu, python_model, python_decode, python_batch, python_lengths)
MADE += (python_soak, python_census, python_turns, hybrid_turns, hybrid_rates, hybrid_chat, hybrid_codecs, hybrid_states, python_key_biases)
MADE += (families, outside_checks, speed)
TABLES = {f.__name__: f for f in MADE}
