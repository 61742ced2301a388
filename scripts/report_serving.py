"""Generates the section of docs/results.md about `flatkv serve` from the files serve_*.json of a machine. Imported by report_page.py."""

QUIET = 0.05  # if other processes used at most this share of the CPU time, their load is not mentioned


def ms(seconds):
    return f"{1000 * seconds:.0f} ms"


def noise(result):
    """Describes the load of other processes, if it was not negligible."""
    others = result.get("others", 0.0)
    return f"; other processes used {100 * others:.0f} % of the CPU time" if others > QUIET else ""


def best_peer(rows, n):
    peers = [r for r in rows if r["clients"] == n and r["who"] != "flatkv"]
    return max(peers, key=lambda r: r["tokens_per_s"], default=None)


def place(result):
    return f"after a prefix of {result['prefix_tokens']} tokens" if result["prefix_tokens"] else "short prompts"


def peer_caches(results):
    """Describes which cache types of the peer were measured."""
    of = [(r, sorted({row["who"].split()[1] for row in r["rows"] if row["who"] != "flatkv"})) for r in results]
    names = sorted({name for _, caches in of for name in caches})
    best = {best_peer(r["rows"], row["clients"])["who"].split()[1] for r, caches in of if len(caches) > 1 for row in r["rows"]}
    alone = [(place(r), caches[0]) for r, caches in of if len(caches) == 1 < len(names)]
    alone = "; ".join(f"{where}, only {name} was measured" + (", which is never faster elsewhere" if best and name not in best else "") for where, name in alone)
    return f"llama-server was measured with the cache types {' and '.join(', '.join(names).rsplit(', ', 1))}; its first-token times are those of the fastest type" + (f" ({alone})" if alone else "")


def peer_rates(row, rows):
    """Formats the peer's rates for each of its cache types, fastest first."""
    peers = sorted((r for r in rows if r["who"] != "flatkv" and r["clients"] == row["clients"]), key=lambda r: -r["tokens_per_s"])
    return "; ".join(f"{r['tokens_per_s']:.0f} ({r['who'].split()[1]}), {row['tokens_per_s'] / r['tokens_per_s']:.1f}x" for r in peers) or "-"


def turns_rows(result):
    rows = result["rows"]
    where = place(result)
    for row in (r for r in result["rows"] if r["who"] == "flatkv"):
        peer = best_peer(rows, row["clients"])
        yield [
            f"{row['clients']}, {where}",
            f"{row['tokens_per_s']:.0f}",
            peer_rates(row, rows),
            ms(row["first_s"]),
            ms(peer["first_s"]) if peer else "-",
            f"{1000 * row['gap_s']:.1f} ms",
            f"{100 * row['others']:.0f} %",
        ]


def mixed(r):
    grown = r["resident_bytes_most"] - r["resident_bytes_after_warm_up"]
    return [
        f"{r['requests']:,} requests from {r['clients']} clients; {100 * r['leave']:.0f} % of the requests are cancelled early because their client disconnects",
        f"resident memory is {r['resident_bytes_after_warm_up']:,} bytes after the first tenth of the requests and grows after that by at most {grown / 1024:,.0f} KiB ({r['samples']} samples); "
        f"{r['pages_held_end']} pages are held and {r['pages_promised_end']} are reserved at the end; page accounting is {'consistent' if r['consistent'] else '**inconsistent**'}; "
        f"{r['failed']} requests failed",
    ]


def overload_peer(r):
    p = r["llama-server"]
    answers = ", ".join(f"{n:,} responses with status {status}" for status, n in sorted(p["answers"].items()))
    times = ", ".join(f"{q} {p['first_token_s'][k]:.1f} s" for q, k in (("p50", "0.5"), ("p99", "0.99"), ("max", "1")))
    return f"in {p['seconds']:.0f} s, llama-server returned {answers}; its time to first token was {times}"


def overload(r):
    if "flatkv" not in r:
        return [f"{r['llama-server']['clients']} clients on {r['parallel']} slots and {r['context']} tokens of llama-server", overload_peer(r)]
    f = r["flatkv"]
    bad = sum(n for status, n in f["answers"].items() if status not in ("200", "429"))
    told = f"{100 * f['within_twice']:.1f} % of {f['told_to_wait']} requests that received a `Retry-After` header got their first token within twice the time in this header" if f["told_to_wait"] else ""
    text = (
        f"{f['answers'].get('200', 0):,} answers, {f['answers'].get('429', 0):,} rejections (half within {ms(f['refused_in_s']['0.5'])}, 99 % within "
        f"{ms(f['refused_in_s']['0.99'])}, all within {ms(f['refused_in_s']['1'])}), {bad} errors or broken streams, {f['recomputed_tokens']} tokens recomputed; {told}{noise(f)}"
    )
    if "llama-server" in r:
        text += "; " + overload_peer(r)
    return [f"{f['clients']} clients on {r['parallel']} + {r['queue']} slots and {r['context']} tokens, {f['seconds']:.0f} s", text]


def once(r):
    return [
        f"{r['clients']} concurrent requests with a common prefix of {r['prefix_tokens']} tokens",
        f"{r['computed_tokens']:,} tokens are computed, of which {r['questions_tokens']:,} belong to the questions; {r['page_waits']} requests wait for pages",
    ]


def stalls(r):
    gaps = r["gap_ms"]
    return [
        f"gaps between tokens while {r['prompt_tokens']} tokens are prefilled, `--step-ms {r['step_ms']:.0f}`",
        f"p50 {gaps['0.5']:.0f} ms, p99 {gaps['0.99']:.0f} ms, maximum {gaps['1']:.0f} ms over {r['gaps']} gaps; {r['gap_alone_ms']:.1f} ms without prefill{noise(r)}",
    ]


def codecs(r):
    rows = {(row["clients"], row["who"].split()[1]): row for row in r["rows"]}
    names = sorted({name for _, name in rows})
    seen = (f"{n} client{'' if n == 1 else 's'}: " + ", ".join(f"{name} {ms(rows[n, name]['first_s'])} and {rows[n, name]['tokens_per_s']:.0f} tokens/s" for name in names)
            for n in sorted({n for n, _ in rows}))
    return [f"time to first token after a shared prefix of {r['prefix_tokens']} tokens, and generated tokens per second, for each codec", "; ".join(seen) + noise(max(r["rows"], key=lambda row: row["others"]))]


def cancel(r):
    steps, phases = r["steps_most"], " and ".join(", ".join(r["steps_most"]).rsplit(", ", 1))
    return [
        "steps between a client's disconnect and the release of its pages",
        f"at most {max(steps.values())} step{'' if max(steps.values()) == 1 else 's'} in any phase ({phases}; {r['rounds']} disconnects in each phase)",
    ]


def fair(r):
    return ["two tenants, one with ten times as many clients as the other", f"the larger tenant gets {100 * r['greedy_share']:.1f} % of the tokens"]


def warm(r):
    median, times = r["median_ms"], r["first_token_ms"]
    return [
        f"time to first token for a prefix of {r['tokens']} tokens and a question",
        f"{times['cold']:,.0f} ms without a cached prefix, {median['memory']:.0f} ms from memory, {median['cold_files']:.0f} ms from disk after a restart, "
        f"{median['cached_files']:.0f} ms with the files in the page cache of the system (all but the first are medians); pages are restored and verified at {100 * r['restore_of_raw']:.0f} % of the raw read rate",
    ]


def kill(r):
    return [
        f"{r['kills']} servers are killed while they compute and write pages",
        f"{r['answers']:,} answers, {r['wrong']} wrong; {r['read_pages']:,.0f} pages read back, {r['damaged_pages']:.0f} damaged",
    ]


LINES = {"mixed": mixed, "overload": overload, "once": once, "warm": warm, "kill": kill, "stalls": stalls, "cancel": cancel, "fair": fair, "codecs": codecs}


def section(machine, table):
    records = machine.of("serve")
    if not records:
        return []
    lines = []
    turns = [r for r in records if r["case"] == "turns"]
    if turns:
        head = ["clients", "flatkv, tokens/s", "llama-server, tokens/s", "flatkv first token", "llama-server first token", "flatkv token interval", "other load"]
        lines += [
            f"`flatkv serve` runs SmolLM2 (codecs: {' and '.join(sorted({r['result'].get('codec', '8/4') for r in turns}))}), and one or more clients send requests concurrently. Each rate is the number of generated tokens per second, summed over all clients; the table shows the median over all rounds. "
            "The last column shows the share of the machine's CPU time that other processes used.",
            f"The peer is {', '.join(sorted({r['result'].get('peer', 'llama-server') for r in turns}))} with the same model file (Q4_1, output matrix Q8_0), the same number of threads, "
            f"one slot per client and flash attention. {peer_caches([r['result'] for r in turns])}. llama-server was compiled natively (with clang 19 for short prompts, with gcc 12 for long prefixes), and the rounds of both servers were interleaved. "
            "The default cache type of llama-server is f16. By default, flatkv uses speculative decoding and llama-server does not; a suffix such as `:ngram-mod` names the speculative decoding that llama-server used.",
            table(head, [row for r in turns for row in turns_rows(r["result"])]),
        ]
    rest = [(LINES[r["case"]], r) for case in LINES for r in records if r["case"] == case]
    if rest:
        lines.append(table(["load", "observed"], [[*line(r["result"])[:1], line(r["result"])[1] + f" ({model_of(r)}{r['when'][:10]}, {r['revision']})"] for line, r in rest]))
    return [*lines, *machine.sources.cite(records)]


def model_of(record):
    words = record["command"].split()
    return f"{words[words.index('-m') + 1].removesuffix('.gguf')}, " if "-m" in words else "needle, "
