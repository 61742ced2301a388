"""Generates the section of docs/results.md about several servers from bench/results/fleet_*.json. Imported by report_page.py."""
import math
import statistics

from report_tables import table_of_text

# Assumptions of the capacity table. The bytes per token are those of a model with 32 layers and 8 KV heads of dimension 128 with codec 8/4.
TOKEN_BYTES = 53248
PREFIX_TOKENS = 4096
REQUESTS_PER_SECOND = 0.5  # per server
MISS_SHARE = 0.1  # requests whose prefix is not in the memory of their server
REDIS_BYTES = 32e9
MAX_REDIS_SERVERS = 16


def quantiles(row, name):
    return " / ".join(f"{value:,.1f}" for value in row[name].values())


def first_tokens(test):
    rows = [[row["server"], f"{row['first_token_ms']:,.0f} ms", f"{row['cached_tokens']} of {row['prompt_tokens']}"] for row in test["rows"]]
    return table_of_text(["server", "time to the first token", "prompt tokens cached"], rows)


def stopped(test):
    rows = [[name.replace("_", " "), str(test[name]["requests"]), str(test[name]["errors"]), quantiles(test[name], "first_token_ms"), quantiles(test[name], "between_tokens_ms")]
            for name in ("with_the_store", "without_a_store")]
    return table_of_text(["server", "requests", "errors", "first token, p50 / p90 / p99 in ms", "between tokens, p50 / p99 in ms"], rows)


def networks(*tests):
    """Each row is a network of one of the tests."""
    rows = [[name + (f", {row['times']} times" if row.get("times", 1) > 1 else ""), str(row["requests"]), *(f"{value:.1f}" for value in row["first_token_ms"].values()),
             f"{row['resident_growth'] / 1e6:.1f}"] for test in tests for name, row in test.items() if isinstance(row, dict)]
    return table_of_text(["network", "requests", "first token with the store, median in ms", "without a store", "cost", "growth of resident memory in MB"], rows)


def reads(test):
    rows = [[row["where"], f"{row['page_bytes'] / 1e6:.2f} MB", f"{row['get_mb_per_s']:,}", f"{row['verified_mb_per_s']:,}", f"{100 * row['share']:.0f} %"] for row in test["rows"]]
    return table_of_text(["network", "page", "GET in MB/s", "verified reads in MB/s", "share"], rows)


def valkey(tests):
    killed, shares = tests["redis_is_killed"], [row["share"] for row in tests["verified_reads"]["rows"] if row["where"] == "loopback"]
    lines = [row["log_lines"] for row in tests["errors_of_redis_are_logged_once"].values() if isinstance(row, dict)]
    return (f"{killed['redis']} was killed and restarted {killed['kills']} times while 4 servers used it. The servers answered {sum(row['requests'] for row in killed['servers'])} requests, with "
            f"{sum(row['errors'] for row in killed['servers'])} errors and {sum(row['wrong_texts'] for row in killed['servers'])} wrong answers. After a restart, the servers used the store again within "
            f"{killed['used_again_ms']['p50']} ms (median) and {killed['used_again_ms']['max']} ms (maximum). Each of {len(lines)} kinds of errors caused {max(lines)} log line. "
            f"Verified reads on loopback reached {' and '.join(', '.join(f'{100 * share:.0f} %' for share in shares).rsplit(', ', 1))} of the rate of GET for the three page sizes.")


def capacity(test):
    """Works out fleets of 10, 100 and 1,000 servers from the measured read rates."""
    slow = max(row["verified_mb_per_s"] for row in test["rows"] if row["where"] == "1 Gbit/s") * 1e6
    fast = max(row["get_mb_per_s"] for row in test["rows"] if row["where"] == "loopback") * 1e6
    client = max(row["verified_mb_per_s"] for row in test["rows"] if row["where"] == "loopback") * 1e6
    fetch = PREFIX_TOKENS * TOKEN_BYTES
    rows = []
    for n in (10, 100, 1000):
        traffic = n * REQUESTS_PER_SECOND * MISS_SHARE * fetch
        shards = [max(1, math.ceil(traffic / rate)) for rate in (slow, fast)]
        rows.append([f"{n:,}", f"{traffic / 1e6:,.0f} MB/s", *(f"{s}{' (too many)' if s > MAX_REDIS_SERVERS else ''}" for s in shards),
                     f"{REDIS_BYTES / (PREFIX_TOKENS * TOKEN_BYTES) * shards[1]:,.0f}", f"{3 * n:,}"])
    text = (f"The table assumes {REQUESTS_PER_SECOND} requests per second for each flatkv server and {REDIS_BYTES / 1e9:.0f} GB for each Redis server. A shared prefix has {PREFIX_TOKENS} tokens of "
            f"{TOKEN_BYTES:,} bytes each ({fetch / 1e6:.0f} MB). For {100 * MISS_SHARE:.0f} % of the requests, the flatkv server does not have the prefix in memory and fetches it from Redis. "
            f"A Redis server delivers {slow / 1e6:.0f} MB/s over 1 Gbit/s and {fast / 1e6:,.0f} MB/s without a network limit; one client can verify up to {client / 1e6:,.0f} MB/s. "
            f"A fetch takes {fetch / slow:.1f} s over 1 Gbit/s and {fetch / client:.2f} s without a network limit, and the flatkv server need not compute these {PREFIX_TOKENS} tokens. A store has at most {MAX_REDIS_SERVERS} Redis servers.")
    head = ["flatkv servers", "traffic of fetches", "Redis servers at 1 Gbit/s", "without a network limit", "prefixes they hold", "connections per Redis server"]
    return [text, table_of_text(head, rows)]


def section(results):
    """Returns the paragraphs. `results` is a report_readme.Results."""
    found = results.file("fleet_proofs")
    tests = found["tests"]
    killed, writers, errors = tests["redis_is_killed"], tests["servers_are_killed"], tests["errors_of_redis_are_logged_once"]
    loads = ", ".join(f"{test['load_average']:.0f}" for test in tests.values() if "load_average" in test)
    ahead = tests["pages_are_read_ahead"]
    before = results.file("fleet_one_by_one")["tests"]["pages_are_read_ahead"]  # the same test with a program that requested pages one by one
    return [
        "## Several servers",
        f"`bench/fleet_proofs` ran on a machine with {found['cores']} cores. Some tests ran while other programs were running on the machine. The load averages after each test were {loads}; they include the load of the servers and clients of the test. "
        "In each comparison, a server with a store and a server without a store ran at the same time. Most tests used the needle model.",
        f"### A prefix that another server has computed ({tests['first_token_on_other_servers']['model']}, 1 Gbit/s)",
        "Each server is on its own simulated host. Host 1 computes the prefix and writes it to Redis; the other hosts read it from there. All servers generated the same text.",
        first_tokens(tests["first_token_on_other_servers"]),
        "### Pages are read ahead",
        f"Reading {ahead['pages']} pages of {ahead['model']} takes {statistics.median(ahead['read_seconds']):.2f} s through a relay that adds a delay of {ahead['delay_ms']} ms in each direction. "
        f"An earlier version, which requested each page only after the previous page had arrived, took {statistics.median(before['read_seconds']):.2f} s. "
        f"Both times are medians of {len(ahead['read_seconds'])} runs.",
        f"### Redis is stopped for {tests['redis_is_stopped']['stopped_seconds']:.0f} s under 8 clients",
        stopped(tests["redis_is_stopped"]),
        "### Kills",
        f"Redis was killed and restarted {killed['kills']} times while 4 servers used it. The servers answered {sum(row['requests'] for row in killed['servers'])} requests, with "
        f"{sum(row['errors'] for row in killed['servers'])} errors and {sum(row['wrong_texts'] for row in killed['servers'])} wrong answers. "
        f"After a restart, the servers used Redis again within {killed['used_again_ms']['p50']} ms (median) and {killed['used_again_ms']['max']} ms (maximum).",
        f"flatkv was killed {writers['kills']} times while it wrote pages to Redis, each time for a different prompt. Redis then had {writers['pages_written']} complete values. "
        f"Another server read {writers['pages_read']} of these values to answer the same prompts. This server rejected {writers['refused_or_damaged']} values, and {writers['wrong_texts']} answers were wrong.",
        "### Slow and partitioned networks",
        "Requests are sent in pairs, one to a server with the store and one to a server without a store. The cost of the store is the median of the differences within the pairs.",
        networks(tests["slow_networks_cost_nothing"], tests["partitions_cost_nothing"]),
        "### Errors of Redis",
        table_of_text(["error", "requests", "failed", "log lines"],
                      [[name, str(row["requests"]), str(row["failed"]), str(row["log_lines"])] for name, row in errors.items() if isinstance(row, dict)]),
        "### Verified reads",
        "The store decrypts and authenticates pages on the thread that receives them. For comparison, plain GET commands were measured with the same number of commands in flight." +
        (" Redis and the client ran with real-time priority, because other programs used the machine." if tests["verified_reads"]["real_time"] else ""),
        reads(tests["verified_reads"]),
        "### Valkey",
        valkey(results.file("fleet_valkey")["tests"]),
        "### Capacity",
        *capacity(tests["verified_reads"]),
    ]
