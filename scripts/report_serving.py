"""The section of docs/results.md about `flatkv serve`, from the files serve_*.json of a machine. Imported by report_page.py."""

QUIET = 0.05  # of the machine, taken by others


def ms(seconds):
    return f"{1000 * seconds:.0f} ms"


def noise(result):
    """What others took meanwhile, where it was more than a little."""
    others = result.get("others", 0.0)
    return f"; others took {100 * others:.0f} % of the machine" if others > QUIET else ""


def best_peer(rows, n):
    peers = [r for r in rows if r["clients"] == n and r["who"] != "flatkv"]
    return max(peers, key=lambda r: r["tokens_per_s"], default=None)


def place(result):
    return f"behind a prefix of {result['prefix_tokens']} tokens" if result["prefix_tokens"] else "short prompts"


def peer_caches(results):
    """Which of the peer's caches its figures are of, and where only one was measured."""
    of = [(r, sorted({row["who"].split()[1] for row in r["rows"] if row["who"] != "flatkv"})) for r in results]
    names = sorted({name for _, caches in of for name in caches})
    best = {best_peer(r["rows"], row["clients"])["who"].split()[1] for r, caches in of if len(caches) > 1 for row in r["rows"]}
    alone = [(place(r), caches[0]) for r, caches in of if len(caches) == 1 < len(names)]
    alone = "; ".join(f"{where} {name} alone was measured" + (", elsewhere it is never the faster" if best and name not in best else "") for where, name in alone)
    return f"{' and '.join(names)} for its cache, first tokens of the faster" + (f" ({alone})" if alone else "")


def beside(row, rows):
    """The peer's rates with each of its caches, the fastest first."""
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
            beside(row, rows),
            ms(row["first_s"]),
            ms(peer["first_s"]) if peer else "-",
            f"{1000 * row['gap_s']:.1f} ms",
            f"{100 * row['others']:.0f} %",
        ]


def mixed(r):
    grown = r["resident_bytes_most"] - r["resident_bytes_after_warm_up"]
    return [
        f"{r['requests']:,} requests of {r['clients']} clients, {100 * r['leave']:.0f} % leave early",
        f"resident {r['resident_bytes_after_warm_up']:,} bytes after a tenth of them, at most {grown / 1024:+,.0f} KiB in {r['samples']} samples; "
        f"{r['pages_held_end']} pages held and {r['pages_promised_end']} promised at the end, consistent: {'yes' if r['consistent'] else 'no'}; "
        f"{r['failed']} failed",
    ]


def overload_peer(r):
    p = r["llama-server"]
    answers = ", ".join(f"{n:,} with {status}" for status, n in sorted(p["answers"].items()))
    times = ", ".join(f"{q} {p['first_token_s'][k]:.1f} s" for q, k in (("p50", "0.5"), ("p99", "0.99"), ("most", "1")))
    return f"llama-server, {p['seconds']:.0f} s: {answers}; first token {times}"


def overload(r):
    if "flatkv" not in r:
        return [f"{r['llama-server']['clients']} clients on {r['parallel']} slots and {r['context']} tokens of llama-server", overload_peer(r)]
    f = r["flatkv"]
    bad = sum(n for status, n in f["answers"].items() if status not in ("200", "429"))
    told = f"waits to the first token within twice `Retry-After`: {100 * f['within_twice']:.1f} % of {f['told_to_wait']}" if f["told_to_wait"] else ""
    text = (
        f"{f['answers'].get('200', 0):,} answers, {f['answers'].get('429', 0):,} refusals (half within {ms(f['refused_in_s']['0.5'])}, 99 % within "
        f"{ms(f['refused_in_s']['0.99'])}, all within {ms(f['refused_in_s']['1'])}), {bad} errors or broken streams, {f['recomputed_tokens']} tokens computed twice; {told}{noise(f)}"
    )
    if "llama-server" in r:
        text += ". " + overload_peer(r)
    return [f"{f['clients']} clients on {r['parallel']} + {r['queue']} places and {r['context']} tokens, {f['seconds']:.0f} s", text]


def once(r):
    return [
        f"{r['clients']} requests at once on one prefix of {r['prefix_tokens']} tokens",
        f"{r['computed_tokens']:,} tokens computed, of which {r['questions_tokens']:,} of the questions; {r['page_waits']} waited for pages",
    ]


def stalls(r):
    gaps = r["gap_ms"]
    return [
        f"gaps between tokens while {r['prompt_tokens']} tokens are prefilled, `--step-ms {r['step_ms']:.0f}`",
        f"p50 {gaps['0.5']:.0f} ms, p99 {gaps['0.99']:.0f} ms, most {gaps['1']:.0f} ms of {r['gaps']}; alone {r['gap_alone_ms']:.1f} ms{noise(r)}",
    ]


def codecs(r):
    rows = {(row["clients"], row["who"].split()[1]): row for row in r["rows"]}
    names = sorted({name for _, name in rows})
    seen = (f"{n} clients: " + ", ".join(f"{name} {ms(rows[n, name]['first_s'])} and {rows[n, name]['tokens_per_s']:.0f} tokens a second" for name in names)
            for n in sorted({n for n, _ in rows}))
    return [f"first token behind a shared prefix of {r['prefix_tokens']} tokens, and rate, by codec", "; ".join(seen) + noise(max(r["rows"], key=lambda row: row["others"]))]


def cancel(r):
    steps, phases = r["steps_most"], " and ".join(", ".join(r["steps_most"]).rsplit(", ", 1))
    return [
        "steps that ended from the notice that a client left to the return of its pages",
        f"at most {max(steps.values())} in any phase ({phases}, {r['rounds']} times each)",
    ]


def fair(r):
    return ["two tenants, one with ten times the clients", f"it gets {100 * r['greedy_share']:.1f} % of the tokens"]


def warm(r):
    median, times = r["median_ms"], r["first_token_ms"]
    return [
        f"first token of a prefix of {r['tokens']} tokens and a question",
        f"cold {times['cold']:,.0f} ms, from memory {median['memory']:.0f} ms, from disk after a restart {median['cold_files']:.0f} ms, with the files in the "
        f"system's cache {median['cached_files']:.0f} ms (medians); pages come back verified at {100 * r['restore_of_raw']:.0f} % of the plain read rate",
    ]


def kill(r):
    return [
        f"{r['kills']} servers killed while they compute and write",
        f"{r['answers']:,} answers, {r['wrong']} wrong; {r['read_pages']:,.0f} pages read back, {r['damaged_pages']:.0f} damaged",
    ]


LINES = {"mixed": mixed, "overload": overload, "once": once, "warm": warm, "kill": kill, "stalls": stalls, "cancel": cancel, "fair": fair, "codecs": codecs}


def section(machine, table, made_by):
    records = machine.of("serve")
    if not records:
        return []
    lines = []
    turns = [r for r in records if r["case"] == "turns"]
    if turns:
        head = ["clients", "flatkv, tokens a second", "llama-server", "first token", "its first token", "between tokens", "others"]
        lines += [
            "`flatkv serve` with SmolLM2 at K8/V4. Clients that ask at once, tokens written a second over all of them, medians of the rounds; the last column is the "
            "share of the machine that other processes took. "
            f"{', '.join(sorted({r['result'].get('peer', 'llama-server') for r in turns}))} has the same file (Q4_1, the output matrix Q8_0) and threads, a slot for each client, flash "
            f"attention and {peer_caches([r['result'] for r in turns])}; built natively (gcc 12, with a barrier before the tile configuration, without which it ends with an "
            "illegal instruction), and measured by turns in the same minutes. f16 is its default; flatkv's default has drafts, llama-server's none.",
            table(head, [row for r in turns for row in turns_rows(r["result"])]),
        ]
    rest = [(LINES[r["case"]], r) for case in LINES for r in records if r["case"] == case]
    lines.append(table(["load", "seen"], [[*line(r["result"])[:1], line(r["result"])[1] + f" ({model_of(r)}{r['when'][:10]}, {r['revision']})"] for line, r in rest]))
    return [*lines, made_by(records)]


def model_of(record):
    words = record["command"].split()
    return f"{words[words.index('-m') + 1].removesuffix('.gguf')}, " if "-m" in words else "needle, "
