"""Generates docs/results.md from the files under bench/results. Imported by scripts/report.

Each file holds one measurement with its kind, command, time, revision and result. Every number on the page comes from one of these
files. A section without measurements is omitted. The page shows rounded numbers; the files contain all digits.
"""

import pathlib

import report_codecs
import report_fleet
import report_scaling
import report_serving
from report_records import Machine
from report_tables import TABLES, markdown as table, table_of_text

REAL_MODELS = ["smollm2", "gemma3-270m", "qwen2.5-0.5b", "qwen2.5-1.5b"]
TABLES = TABLES | {"scaling_lengths": report_scaling.lengths, "scaling_steps": report_scaling.steps}


def codec_name(c):
    """Returns a short codec name such as "8/4", "4/4 g32" or "s4/s4 kv": the bits of K and V, the group size if it is not 64, and
    k, v or kv if keys or values are rotated."""
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


class Sources:
    """Collects the records that the sections of one machine cite, for the table of sources at the end."""

    def __init__(self):
        self.records = {}

    def cite(self, records):
        self.records |= {id(r): r for r in records}
        return []

    def table(self):
        rows = []
        for r in sorted(self.records.values(), key=lambda r: (r.get("kind", ""), r.get("when", ""))):
            rows.append([r.get("kind", ""), r.get("when", "")[:10], r.get("revision", ""), f"`{r['command'].replace('|', '/')}`", r.get("note", "")])
        return table_of_text(["measurement", "date", "revision", "command", "note"], rows)


# ---- sections: each returns the paragraphs of one machine ----


def quality_table(machine, record):
    """Formats one run that measured several codecs. The KL columns are empty if the run did not measure KL divergence."""
    result = record["result"]
    codecs = result["codecs"]
    base = result.get("ppl_16bit") or next(c["ppl"] for c in codecs if c["k_bits"] == c["v_bits"] == 16)
    rows = []
    for c in codecs:
        divergence = [f"{c['kl_mean']:.2e}", f"{c['kl_p99']:.2e}", percent(c["top1"])] if "kl_mean" in c else ["-"] * 3
        rows.append([codec_name(c), f"{c['ppl']:.4f}", signed(c["ppl"] / base - 1), *divergence])
    title = (
        f"The table for **{result['model']}** covers {count(result['windows'], 'window')} of {result['window']} tokens{' each' if result['windows'] > 1 else ''}, "
        f"in which a total of {codecs[0]['tokens']} tokens are scored. The perplexity of the 16-bit cache is {base:.4f}."
    )
    head = ["cache (K/V bits)", "perplexity", "change", "mean KL", "p99 KL", "top-1 agreement"]
    return [title, table(head, rows), *machine.sources.cite([record])]


def quality(machine):
    lines = []
    for window in (2048, 8192):
        for model in REAL_MODELS:
            records = [r for r in machine.of("quality") if r["result"]["model"] == model and r["result"]["window"] == window]
            for record in sorted(records, key=lambda r: -r["result"]["windows"]):
                lines += quality_table(machine, record)
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
            f"The table for **{peer['model']}** shows results for the caches of {'flatkv and ' if same else ''}{peer['peer']} {peer['version']}. The table covers the first "
            f"{peer['windows']} windows of {peer['context']} tokens each, in which a total of {peer['caches'][0]['tokens']} tokens are scored. Changes in perplexity and KL divergences are relative to the 16-bit cache of the same program."
        )
        lines.append(table(["cache", "perplexity", "change", "mean KL", "top-1 agreement"], rows))
        if peer["peer"] == "mlx-lm":
            lines += mlx_distance(peer, same)
        lines += machine.sources.cite([record])
    return lines


def mlx_distance(peer, same):
    """Compares the codecs that both programs have: groups of 64, no rotation, float32 activations."""
    theirs = {c["cache"]: c["ppl"] for c in peer["caches"]}
    names = {"16": "16/16", "8:64": "8/8", "4:64": "4/4"}
    said = [
        f"{signed(c['ppl'] / theirs[cache] - 1)} for {ours}"
        for cache, ours in names.items()
        for s in same[:1]
        for c in s["codecs"]
        if codec_name(c) == ours and cache in theirs
    ]
    return ["With the same codec, the perplexity of flatkv differs from that of mlx-lm by " + " and ".join(", ".join(said).rsplit(", ", 1)) + "."] if said else []


def agreement(machine):
    records = machine.of("agreement")
    if not records:
        return []
    rows = []
    for result in sorted((r["result"] for r in records), key=lambda r: REAL_MODELS.index(r["model"])):
        pairs = [result[k] for k in ("flatkv_expanded", "flatkv_llama", "llama_expanded")]
        rows.append([result["model"], *(cell for p in pairs for cell in (percent(p["top1"]), f"{p['rel_l2']:.4f}"))])
    first = records[0]["result"]
    head = ["model"]
    for pair in ("flatkv and llama.cpp with float32 weights", "flatkv and llama.cpp", "llama.cpp and llama.cpp with float32 weights"):
        head += [f"{pair}: top-1 agreement", "relative error"]
    close = [(r["result"]["model"], r["result"]["flatkv_llama"]) for r in records]
    margins = " and ".join(", ".join(f"{name} ({c['margin_where_different']:.2f} and {c['margin_median']:.2f})" for name, c in close).rsplit(", ", 1))
    return [
        f"The table compares the next-token logits of flatkv and llama.cpp at {first['tokens']} positions in the text of a book. Both programs use 16-bit caches. "
        f"The llama.cpp build is {first['package']} {first['version']}. "
        "The relative error is the L2 norm of the difference between the logits, divided by the L2 norm of the centered logits.",
        table(head, rows),
        "If the weights are quantized, llama.cpp rounds blocks of activations to 8 bits; with float32 weights, it does not. llama.cpp with "
        "weights expanded to float32 is therefore the better reference. The last two columns compare llama.cpp with and without this rounding. "
        "At positions where the two programs choose different top tokens, the two best candidates of llama.cpp have similar logits.",
        "The list at the end of this paragraph contains two numbers for each model, both computed from the logits of llama.cpp. The first number is the median difference between the logits of the two tokens that the programs choose, over the positions at which they choose different tokens. "
        f"The second number is the median difference between the logits of the two most likely tokens, over all positions. The numbers are: {margins}.",
        *machine.sources.cite(records),
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
        "In this test, facts are inserted into the text of a book, and the model is asked to recall these facts at the end of the text. With `--together`, all facts that are tested at the "
        "same context length share one haystack. Each square represents one depth, which is the position of the fact between the beginning and the end of the text. A filled square represents a correct answer."
    )
    lines.append(table(["model, cache", "tokens", "found", "depths"], rows))
    lines += machine.sources.cite(records)
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
        f"The needle model reads haystacks with many facts of identical form at random positions. Over all {asked['haystacks']} haystacks, the model is asked for "
        f"a total of {asked['asked']} facts, one after another. The last column comes from a simulation of the same codecs. In the simulation, the same model reads different haystacks, "
        "and attention is computed exactly over simulated codes.",
        table(["cache", "tokens, facts", "correct answers", "nats per digit", "simulated"], [row for _, _, row in sorted(rows)]),
        *machine.sources.cite(records),
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
        "The table shows the anonymous memory of the process, in MiB, while a prompt fills the whole context. The memory used at program start and the weights are not included.",
        table(["model, cache", "tokens", "plan", "after open", "peak", "peak - plan", "peak - open", "flat"], rows),
        *machine.sources.cite(records),
    ]


def filled_cache(machine):
    """Formats the memory measurements of caches that were filled without a model."""
    lines = []
    for record in machine.of("flat"):
        r = record["result"]
        name = f"{r['layers']} layers, {r['q_heads']}/{r['kv_heads']}/{r['head_dim']}, {r.get('codec', '8/4')}"
        sizes = [f"{r[key]:,}" for key in ("plan_bytes", "open_bytes", "peak_bytes", "end_bytes")]
        head = ["cache", "tokens", "plan", "after open", "peak", "at the end", "flat"]
        lines += [table(head, [[name, f"{r['tokens']}", *sizes, "yes" if r["flat"] else "**no**"]]), *machine.sources.cite([record])]
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
            lines.append(f"The table shows the planned memory of **{model}** on a machine with {megabytes(available)} MiB of available memory:")
            lines.append(table(["cache", *(f"{c} tokens" for c in contexts), "longest context that fits"], rows))
    return [
        "`flatkv plan` reports the memory reserved for pages, tables, scratch memory and activations, without weights. All sizes are in MiB. "
        "An asterisk marks a plan that does not fit in the available memory.",
        *lines,
        *machine.sources.cite(records),
    ]


def codecs(machine):
    return report_codecs.table_of(machine, table)


def serving(machine):
    return report_serving.section(machine, table)


def codecs_picture(results):
    """Draws docs/codecs.svg from the machine with the most measured models."""
    machines = [Machine(p.parent) for p in sorted(pathlib.Path(results).glob("*/machine.json"))]
    return report_codecs.picture(max(machines, key=lambda m: len(report_codecs.Codecs(m).models)))


SECTIONS = (
    ("Codecs: size, divergence, perplexity, facts", codecs),
    ("Agreement with llama.cpp", agreement),
    ("Perplexity and divergence from a 16-bit cache", quality),
    ("llama.cpp and mlx-lm on the same windows", peers_quality),
    ("Needle in a haystack", needles),
    ("Many facts", facts),
    ("Memory of a full cache, in bytes", filled_cache),
    ("Peak memory", memory),
    ("Memory by context length", plans),
    ("Serving", serving),
)

COMPARISONS = (
    ("Attention on the CPU, next to llama.cpp and ik_llama.cpp", "attention_cpu",
     "`bench_compare` measures the attention of one layer with 2 threads. Times are medians in milliseconds. The KV caches in one row of the table are measured alternately in one run, "
     "and the cached tokens are evicted from the CPU caches before every call. "
     "llama.cpp b21e4de and ik_llama.cpp 8337e4c were compiled natively. Each ratio is the time of llama.cpp or ik_llama.cpp divided by the time of the first flatkv codec in the row."),
    ("Decode over sealed pages on the CPU, next to llama.cpp", "attention_llama",
     "llama.cpp b21e4de was compiled by clang 19 for this processor and uses AMX. Each ratio is the time of llama.cpp divided by the time of flatkv."),
    ("Attention on the CPU by codec", "attention_codecs", "Times are in milliseconds. Each ratio is the time of 8/4 divided by the time of the codec in that column. For each ratio, the codec and 8/4 were measured alternately in one run."),
    ("Attention on the CPU, next to mlx-lm", "attention_mlx_lm", "mlx-lm runs on the CPU backend of the MLX wheel. Each ratio is the time of mlx-lm divided by the time of flatkv 8/4."),
    ("Decode bandwidth on the CPU", "read_roof", "The table shows the rate at which flatkv reads packed bytes, as a percentage of the memory read bandwidth. The read bandwidth was measured in the same run."),
    ("How cost grows", "scaling_lengths",
     "![time and memory of attention by context length, batch size, threads, heads and bits](scaling.svg)\n\n"
     "`bench/scaling` measures one layer while one parameter varies. flatkv and its peers are interleaved in one run, and all threads of the CPU are used unless stated. "
     "Memory is the growth of the anonymous memory of the process. For flatkv, this value is the whole reservation of the cache, including scratch memory for steps of 512 tokens; "
     "for the peers, it is the memory of the cache, the mask and the buffers of one call. A missing value was not measured because one call would have taken too long or the memory did not suffice."),
    ("Steps in the cost", "scaling_steps",
     "The table shows the largest step of each line in the plot. A step is the growth of the cost from one point to the next, divided by the growth of the parameter (for prefill, of the mean number of visible tokens per query). "
     "It is 1 if the cost is proportional to the parameter. If the cost does not depend on the parameter, it is 0.5 where the parameter doubles. The last column shows the value of the parameter before the step."),
    ("Whole models on the CPU", "models_cpu",
     "`bench/compare --models` measures a prefill of 512 tokens and decode steps, with 2 threads. Runs of flatkv and of llama.cpp b21e4de were interleaved. llama.cpp was compiled by clang 19 for this processor, with AMX, "
     "and uses flash attention. Most weights are Q4_1 in SmolLM2, Q5_0 in Qwen2.5-Coder-0.5B and Q4_K in Qwen2.5-Coder-1.5B; a type in parentheses means that all matrices were converted to this type. "
     "The last column is the median over all rounds of flatkv's speed divided by that of the fastest cache type of llama.cpp."),
    ("Whole models on a CPU without AMX", "models_cpu_vnni",
     "The same measurement on two virtual cores of a Xeon (Cascade Lake) with AVX-512 VNNI, for which llama.cpp b21e4de was compiled by clang 19. Other virtual machines run on the same host, so speeds vary from run to run."),
    ("Attention on an H200", "attention_gpu",
     "The table shows attention times measured with `bench_attn --device mlx`. Unless noted otherwise, each time is the time per call in a chain of attention calls. The whole chain is one MLX evaluation, and each call depends on the "
     "result of the previous call. In the column \"single call\", each evaluation contains only one call. "
     "The quantized MLX columns use the method of mlx-lm, which calls quantized_matmul for the scores, then softmax, then quantized_matmul for the values. The torch column shows the time per call in a CUDA graph of 20 cuDNN calls."),
    ("Sealed pages on an H200", "sealed_gpu", "The table shows attention times measured with `bench_attn --device mlx --case sealed`."),
    ("Sealed pages on an H200, by history length", "lengths_gpu",
     "The tables compare flatkv with MLX's bf16 attention, measured in the same run, for 512 queries (prefill) and one query (decode). The shape is 32/8/128. "
     "The number of cached tokens includes the queries. "
     "Chained: one evaluation contains many calls, and no kernel runs before MLX has built the graph of all of them. In parts: the same chain, but each group of four calls is submitted before the next group is built. Single call: one evaluation per call."),
    ("Prefill of wide heads on an H200", "wide_gpu",
     "The shape is 32/2/256, with 512 queries, which are included in the number of cached tokens. MLX's attention allocates memory that grows with the number of cached tokens here, probably for the scores."),
    ("Latent layers on an H200", "latent_gpu",
     "The layer has 16 query heads, 512 latent channels in 8 bits and 64 RoPE channels in 16 bits, as in multi-head latent attention (MLA). MLX's scaled_dot_product_attention reads bf16 keys of 576 channels, whose first 512 channels are also the values. "
     "Prefill has 512 queries, which are included in the number of cached tokens. The latent channels of this benchmark are not rotated, so queries have three bytes; in the default configuration of models, the latent channels are rotated, and queries have two bytes. The times include appending the RoPE channels of the queries to the output, which chained calls need."),
    ("Calibrated keys on an H200", "calibrated_gpu",
     "The table compares flatkv with MLX's bf16 attention, measured in the same run. With `c4/s4`, half of the key channels have 4 bits, a quarter have 6 bits and a quarter have 2 bits. With `c3/s3`, an eighth have 6 bits, a quarter have 4 bits and the others have 2 bits. "
     "Prefill has 512 queries, which are included in the number of cached tokens. [Sealed pages on an H200, by history length](#sealed-pages-on-an-h200-by-history-length) explains \"in parts\"."),
    ("Pages of 2 and 3 bits and TurboQuant pages on an H200", "small_codecs_gpu",
     "The table shows attention times measured with `bench_attn --device mlx`. `s2` and `s3` are sealed pages, and `2/2` are rows of 2-bit codes. Prefill has 512 queries, which are included in the number of cached tokens."),
    ("Decode kernels on an H200", "kernels_gpu", "The kernels are launched directly, without MLX. The column \"bandwidth limit\" shows the time needed to read the packed bytes at the measured memory bandwidth."),
    ("Decode steps on an H200", "decode_step_gpu", "`bench_decode_mlx` runs a model with the shape of Llama-3-8B, random 4-bit weights and 131072 cached tokens on the CUDA wheel of MLX 0.32.2. "
     "The row \"MLX bf16\" uses MLX's attention over constant keys and values. In the first run, flatkv's kernel computes the products with weights in all rows of the table, including this row. The column \"MLX's products\" shows a second run, with `--mlx-products`. The memory columns are from the first run."),
    ("mlx-lm on an H200", "python_model",
     "`python/tests/gpu_check.py` runs a prompt of 131072 tokens through `generate_step` of mlx-lm 0.32.2, with a model that has the shape of Llama-3-8B and random 4-bit weights."),
    ("mlx-lm on an H200: decode", "python_decode",
     "The table shows decode steps of one token each, after the cache was filled with random rows. The column \"products\" shows whose kernel multiplies by quantized weights: flatkv's, or MLX's (`products=False`, or mlx-lm without flatkv). The rows with 2048 cached tokens were measured earlier. The columns \"graph building\" and \"submission\" show how much time per token the host spends on these tasks."),
    ("mlx-lm on an H200: two prompts", "python_batch", "The `BatchGenerator` of mlx-lm processes two prompts of 50000 and 49983 tokens in one batch."),
    ("mlx-lm on an H200: prompt lengths", "python_lengths",
     "`python/tests/gpu_defaults.py` runs prompts of several lengths through mlx-lm 0.32.2, alternately with flatkv and with mlx-lm's own bf16 cache. The model has the shape of Llama-3-8B and random 4-bit weights. Two short warm-up prompts precede each run. Speeds are medians of 3 to 5 runs."),
    ("mlx-lm's server under load", "python_soak",
     "`python/tests/soak_server.py` sends requests of mixed lengths to `python -m flatkv server` without pause. One request in ten has a prompt that does not fit in the page pool. Answers are compared with those of mlx-lm's own server. "
     "The model is a small Llama with random weights on the CPU, and pages are 16-bit. The last two columns compare the minimum and the maximum of the resident memory in the second half of each load level with those in the first half. "
     "The minimum is the memory between forward passes. The maximum includes temporary arrays, whose size depends on the requests that are computed together. "
     "The runs with 10 and 64 clients followed each other on one server. The run with 200 clients used a new server without warm-up, so its minimum includes the start of the server. Other programs used the machine at the same time."),
    ("Model types of mlx-lm", "python_census",
     "`python/tests/census.py` builds a small model of every model type with random float32 weights and compares its logits with those of mlx-lm's own caches. For a rejected type, flatkv issues a warning, and mlx-lm uses its own cache."),
    ("Tokens computed per turn with hybrid models in mlx-lm", "python_turns",
     "`python/tests/turns.py` holds a conversation through mlx-lm's server. Every turn adds 5000 tokens. The template renders the previous reply and the 14 tokens before it differently than in the previous turn, so that they no longer match the cache. The models are small and have random weights. "
     "The prompts are sent to `/v1/completions`, where mlx-lm keeps no intermediate states of these models. Without flatkv, it therefore computes the whole prompt in every turn, so only its first turns were measured. In `/v1/chat/completions`, mlx-lm keeps states at the boundaries of messages; the next table measures this case."),
    ("Conversations with a hybrid model, next to llama.cpp's and mlx-lm's servers", "hybrid_turns",
     "`bench/hybrid_turns` holds a conversation of 20 turns with each server. Prompts do not contain the reasoning of earlier turns. Then the 10th user message is edited, the last turn is generated again, and 8 different messages continue "
     "the conversation. The model has the architecture of Qwen3.5, 4 layers and the same random weights in all servers. One token is one byte, except for the special tokens of the chat template and `<think>`. "
     "llama.cpp's server is that of the package xllamacpp 2026.10.11549, which is compiled for AVX2; flatkv also uses wider instruction sets. flatkv and llama.cpp use one thread and a 16-bit cache. llama.cpp's server has one slot; when a turn is edited, the slot discards the state of all later turns. "
     "mlx-lm 0.32.2 runs on MLX's CPU backend in float32. This backend computes the recurrence token by token with separate operations. On Apple GPUs, mlx-lm uses a fused kernel, so these times do not apply there. "
     "mlx-lm's server copies the cache at the end of the system prompt, before `<think>`, before the last token of the prompt and after the answer. By default, it keeps 10 copies; 100 copies are enough for all requests. "
     "Token counts and CPU times are sums over all requests, and times to the first token are medians. Requests to the servers were interleaved on a busy machine, so times are longer than on an idle machine."),
    ("Hybrid models and latent attention on the CPU, next to llama.cpp", "hybrid_rates",
     "`bench/hybrid_rates` measures models with random Q8_0 weights on 2 cores. The hybrid model has 4 layers with the widths of Qwen3.5-4B, three of them gated delta nets. The dense model has no recurrent layers and needs as many operations per prompt token. "
     "The latent model has 4 layers with the widths of GLM-4.7-Flash, but 8 experts per layer. Rates are medians of runs in interleaved order. Both programs use a 16-bit cache and were compiled for this machine."),
    ("A conversation with a trained hybrid model", "hybrid_chat",
     "`bench/hybrid_quality` holds a conversation with the model in models/hybrid, which has the architecture of Qwen3.5, 4.7 million parameters and one token per byte. The system prompt is a text with 12 facts. The model reasons before each answer, and the "
     "template drops the reasoning of earlier turns. New tokens are the tokens of a prompt that no earlier prompt contains. The server uses the default codec and the default number of snapshots. The last request is sent to a restarted server with the same `--prefix-dir`."),
    ("Page codecs with a trained hybrid model", "hybrid_codecs",
     "The text is the book in models/needle, on which the model in models/hybrid was not trained. Perplexity is per byte, and KL divergence is relative to 16-bit pages. "
     "For the last column, flatkv's server answers questions about documents of 4096 bytes with 16 facts each. Recurrent states are in f32."),
    ("16-bit recurrent states in a trained hybrid model", "hybrid_states",
     "flatkv stores recurrent states and snapshots in f32. This simulation rounds the states of the model in models/hybrid to 16 bits, either once, at the start of the scored text or shortly before the question, or at regular intervals. The last row sets the state to zero. "
     "Attention is exact. Perplexity is per byte, and KL divergence is relative to states in f32; both are means over the 1024 tokens after the start of the scored text, in 6 windows. For the last column, the model answers questions about documents with 8 facts. "
     "The answers are correct even without the state, because attention recalls the facts."),
    ("Large key biases in mlx-lm", "python_key_biases",
     "The table shows KL divergences from mlx-lm's float32 cache. `python/tests/key_biases.py` runs a small Qwen2 model with random weights twice: with large key biases in slowly rotating channels, as in trained models of this family, and with small key biases. "
     "\"Not centered\" means that the mean key biases are not subtracted."),
    ("Calibrated keys", "calibrated", "The table shows the mean KL divergence from the 16-bit cache on WikiText-2. The keys were calibrated on 16384 tokens of a novel."),
    ("Model families", "families", "The table shows the relative error of the logits for tiny models with random weights. The error is relative to the logits that transformers computes in float32."),
    ("Checks by other programs", "outside_checks", "The table shows the results of test suites and tools that are not part of flatkv."),
)


def make(results):
    """Returns the page. `results` is a report_readme.Results."""
    parts = [
        "# Results",
        "`scripts/report` generates this page from the files under `bench/results`. [bench/README.md](../bench/README.md) lists the command "
        "that produced each file. Shapes are written as query heads / KV heads / head dimension. Codecs are written as key bits / value bits. Quantization groups have 64 values unless another size is given. The suffix `kv` means that both keys and values are rotated.",
        "Perplexity is measured on the raw test file of WikiText-2, which is divided into windows that do not overlap. Only the second half of each window is scored. "
        "The first half of the window serves as context and is prefilled in chunks, so that later chunks attend to the packed pages of earlier chunks. "
        "KL divergence and top-1 agreement compare each cache with the 16-bit cache on the same tokens.",
        "## Comparisons",
    ]
    for title, name, text in COMPARISONS:
        parts += [f"### {title}", text, TABLES[name](results)]
    parts += report_fleet.section(results)
    for folder in sorted(p.parent for p in results.folder.glob("*/machine.json")):
        machine = Machine(folder)
        machine.sources = Sources()
        about = machine.about
        parts.append(f"## Machine {machine.name}")
        parts.append(
            f"This machine has {about['cores']} cores ({about['processor']}) and {about['memory_bytes'] / (1 << 30):.0f} GiB of memory, and runs {about['system']}. "
            f"The CPU supports the instruction sets {' and '.join(', '.join(about['instructions']).rsplit(', ', 1))}."
        )
        for title, section in SECTIONS:
            lines = section(machine)
            parts += [f"### {title}", *lines] if lines else []
        parts += ["### Sources", machine.sources.table()]
    return "\n\n".join(parts) + "\n"
