/* bench_compare: times attention in flatkv and in other implementations (peers) on the same shapes and values, interleaved in one
 * run.
 *
 * A subject is flatkv with one codec pair, called through its public API, or a peer with one pair of cache types: a build of
 * libggml (ggml_peer.h) or mlx-lm on the MLX CPU backend (peers/mlx_attention_peer.py). Every result is first compared with exact
 * attention over the unquantized values, and wrong results are not timed. Each round then visits all subjects. Before every call,
 * streaming a buffer several times larger than the last-level cache evicts the history, as in a model with many layers, and a
 * call on a small case wakes the subject's worker threads. A ratio is the peer's time divided by flatkv's time in the same round;
 * the median over all rounds is reported.
 *
 * Peers are optional. Without peers, only flatkv is timed.
 */
#include "../src/base/cpu.h"
#include "bench_energy.h"
#include "bench_roof.h"
#include "bench_util.h"
#include "compare_peer.h"
#include "ggml_peer.h"

#include <flatkv/flatkv.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char PROGRAM[] = "bench_compare";

/* Largest accepted relative errors of an output, compared with exact attention over unquantized values. Typical errors are 0.1
 * with 4-bit codes and 0.5 with 2-bit codes. A wrong layout, head or mask gives a relative error near 1. */
static const double FAR_OFF = 0.35;
static const double FAR_OFF_TWO_BITS = 0.7;

/* Name of the only peer that runs in a Python interpreter. All other peers are libggml libraries. */
static const char MLX_LM[] = "mlx-lm";

enum {
    MAX_PEERS = 8,
    MAX_SUBJECTS = 48,
    MAX_CASES = 16,
    MAX_ROUNDS = 200,
    MAX_SEQUENCES = 64,
    WRITE_TOKENS = 512,
    WAKING_WINDOW = 64, /* window, in tokens, of the second layer, which is run only to wake the worker threads */
    NAME_BYTES = 64
};

static const compare_case table[] = {
    {32, 8, 128, 16384, 1, 1, 0}, {32, 8, 128, 65536, 1, 1, 0}, {32, 8, 128, 16384, 512, 1, 0},
    {9, 3, 64, 8192, 1, 1, 0},    {4, 1, 256, 32768, 1, 1, 0},
};

typedef struct peer_option {
    char name[NAME_BYTES];
    char library[4096]; /* path of the library, or of the Python interpreter */
    char types[256];
} peer_option;

typedef struct options {
    compare_case cases[MAX_CASES];
    uint32_t n_cases;
    peer_option peers[MAX_PEERS];
    uint32_t n_peers;
    const char *codecs;
    uint32_t n_threads;
    uint32_t n_rounds;
    uint32_t patience; /* time limit, in seconds, for one implementation and codec in one case */
    bool quick;
    const char *powercap; /* folder with energy counters */
    fkv_isa isa;
    bool json;
} options;

/* A flatkv cache with one codec pair. Layer 0 is the layer under test; layer 1 has a small window and is used only to wake the
 * worker threads. */
typedef struct flatkv_subject {
    fkv_cache *cache;
    fkv_step *step;
    float *q;
    float *out;
    uint64_t packed_bytes; /* number of packed bytes that a call reads */
} flatkv_subject;

typedef struct subject {
    char name[NAME_BYTES]; /* "flatkv" or the name of the compared implementation */
    char types[NAME_BYTES];
    bool is_peer;
    bool good;
    flatkv_subject ours;
    compare_peer theirs;
    double error;
    double memory; /* growth of the process's anonymous memory due to the cache, in bytes (peers: cache, mask and buffers) */
    double first;  /* duration of the first call, in seconds */
    double joules; /* total energy of all calls, or NAN without energy counters */
    uint32_t n_times;
    double times[MAX_ROUNDS]; /* milliseconds per call, one entry for each round */
} subject;

typedef struct bench {
    const options *options;
    FILE *text;
    fkv_workers *workers; /* worker threads that stream a buffer to measure the read bandwidth */
    bench_roof roof;
    bench_energy energy;
    double case_roof; /* read bandwidth in bytes per second, measured during the current case, because the bandwidth of a shared
                         machine varies */
    subject subjects[MAX_SUBJECTS];
    uint32_t n_subjects;
    const char *isa;
} bench;

/* ---- options ---- */

static const char usage[] =
    "usage: bench_compare [options]\n"
    "Times attention of flatkv and of its peers on the same shapes, interleaved, after comparing all results with exact attention.\n"
    "Exit status: 0 success, 1 wrong result, 2 invalid usage, 3 out of memory.\n";

static compare_case case_of(const char *text) {
    static const uint32_t max[6] = {4096, 4096, FKV_MAX_HEAD_DIM, 1u << 24, 1u << 16, MAX_SEQUENCES};
    uint32_t parts[6] = {[5] = 1};
    if (!kit_numbers(text, '/', max, parts, 6) && !kit_numbers(text, '/', max, parts, 5))
        kit_die(EXIT_USAGE, "--case %s: expected H/G/D/CACHED/QUERIES[/SEQUENCES], such as 32/8/128/16384/1", text);
    if (parts[4] > parts[3]) kit_die(EXIT_USAGE, "--case %s: %u queries exceed the %u cached tokens", text, parts[4], parts[3]);
    return (compare_case){parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], 0};
}

static bool is_mlx_lm(const peer_option *p) { return strcmp(p->name, MLX_LM) == 0; }

static void take_peer(options *o, const char *text) {
    peer_option *p = &o->peers[o->n_peers++];
    const char *library = strchr(text, '=');
    if (library == NULL) kit_die(EXIT_USAGE, "--peer %s: expected NAME=LIBRARY[:TYPES]", text);
    const char *types = strrchr(library, ':');
    size_t length = types != NULL ? (size_t)(types - library - 1) : strlen(library + 1);
    (void)snprintf(p->name, sizeof p->name, "%.*s", (int)(library - text), text);
    (void)snprintf(p->library, sizeof p->library, "%.*s", (int)length, library + 1);
    (void)snprintf(p->types, sizeof p->types, "%s", types != NULL ? types + 1 : is_mlx_lm(p) ? "f16,8,4" : "f16,q8_0,q8_0/q4_0");
}

static void complete(options *o, const kit_texts *peers, const kit_texts *cases) {
    if (peers->n > MAX_PEERS) kit_die(EXIT_USAGE, "--peer: given more than %d times", MAX_PEERS);
    if (cases->n > MAX_CASES) kit_die(EXIT_USAGE, "--case: given more than %d times", MAX_CASES);
    for (uint32_t i = 0; i < peers->n; i++) take_peer(o, peers->texts[i]);
    for (uint32_t i = 0; i < cases->n; i++) o->cases[o->n_cases++] = case_of(cases->texts[i]);
    if (o->n_cases == 0) {
        o->n_cases = sizeof table / sizeof table[0];
        memcpy(o->cases, table, sizeof table);
    }
    for (uint32_t i = 0; i < o->n_cases; i++) o->cases[i].n_threads = o->n_threads;
    if (o->quick) o->n_rounds = 1;
}

static void parse(options *o, int argc, char **argv) {
    const char *isa = NULL;
    kit_texts peers = {0};
    kit_texts cases = {0};
    *o = (options){
        .codecs = "8/4,4/4,16/16", .n_rounds = 15, .patience = 20, .n_threads = fkv_cpu_count(), .powercap = BENCH_ENERGY_FOLDER};
    const kit_option own[] = {
        {"peer", 0, OPTION_TEXTS, &peers, 0, "NAME=LIBRARY[:TYPES]",
         "a libggml: a file, or a folder with libggml*.so; may be repeated\n"
         "TYPES: cache types f16, q8_0, q4_0, bf16, and q8_KV for ik_llama.cpp (default f16,q8_0,q8_0/q4_0)\n"
         "mlx-lm=PYTHON[:TYPES]: a Python with mlx and mlx-lm, on the CPU backend; TYPES: f16, f32 or bits (default f16,8,4)"},
        {"case", 0, OPTION_TEXTS, &cases, 0, "H/G/D/CACHED/QUERIES[/SEQUENCES]",
         "may be repeated (default 32/8/128 at 16384 and 65536, 512 queries on 16384,\n"
         "9/3/64 at 8192, 4/1/256 at 32768)"},
        {"codecs", 0, OPTION_TEXT, &o->codecs, 0, "LIST", "codecs of flatkv (default 8/4,4/4,16/16)"},
        {"threads", 0, OPTION_COUNT, &o->n_threads, FKV_MAX_THREADS, "N", "(default: number of cores)"},
        {"isa", 0, OPTION_TEXT, &isa, 0, "NAME", "kernels of flatkv (default FKV_ISA from the environment, or auto)"},
        {"rounds", 0, OPTION_COUNT, &o->n_rounds, MAX_ROUNDS, "N", "calls per subject (default 15)"},
        {"patience", 0, OPTION_COUNT, &o->patience, 3600, "SECONDS",
         "reduce the number of rounds of a subject that would take longer than this per case (default 20)"},
        {"powercap", 0, OPTION_TEXT, &o->powercap, 0, "FOLDER", "energy counters (default " BENCH_ENERGY_FOLDER ")"},
        {"quick", 0, OPTION_FLAG, &o->quick, 0, NULL, "1 round, to test the program; times are not meaningful"},
        {"json", 0, OPTION_FLAG, &o->json, 0, NULL, BENCH_JSON_HELP},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) exit(code);
    o->isa = bench_isa(isa);
    complete(o, &peers, &cases);
}

/* ---- exact attention ---- */

/* Computes the exact attention output of the last query: [H, D]. */
static void exact_answer(const compare_case *c, double *out) {
    uint32_t dim = c->head_dim;
    size_t kv_numbers = (size_t)c->n_kv_heads * dim;
    float *q = bench_take((size_t)c->n_q_heads * dim * sizeof *q);
    float *k = bench_take(kv_numbers * sizeof *k);
    float *v = bench_take(kv_numbers * sizeof *v);
    double *sum = bench_take(c->n_q_heads * sizeof *sum);
    for (uint32_t h = 0; h < c->n_q_heads; h++) sum[h] = 0;
    for (size_t i = 0; i < (size_t)c->n_q_heads * dim; i++) out[i] = 0;
    compare_row(c, COMPARE_Q, c->n_cached - 1, q);
    for (uint32_t token = 0; token < c->n_cached; token++) {
        compare_row(c, COMPARE_K, token, k);
        compare_row(c, COMPARE_V, token, v);
        for (uint32_t h = 0; h < c->n_q_heads; h++) {
            size_t kv = (size_t)(h / (c->n_q_heads / c->n_kv_heads)) * dim;
            double score = 0;
            for (uint32_t d = 0; d < dim; d++) score += (double)q[h * dim + d] * (double)k[kv + d];
            double p = exp(score / sqrt(dim)); /* inputs have a standard deviation of 1, so exp() cannot overflow a double */
            sum[h] += p;
            for (uint32_t d = 0; d < dim; d++) out[h * dim + d] += p * (double)v[kv + d];
        }
    }
    for (uint32_t h = 0; h < c->n_q_heads; h++)
        for (uint32_t d = 0; d < dim; d++) out[h * dim + d] /= sum[h];
    free(q);
    free(k);
    free(v);
    free(sum);
}

static double error_of(const float *got, const double *exact, size_t n) {
    double off = 0;
    double all = 0;
    for (size_t i = 0; i < n; i++) {
        off += ((double)got[i] - exact[i]) * ((double)got[i] - exact[i]);
        all += exact[i] * exact[i];
    }
    return sqrt(off / all);
}

/* ---- flatkv ---- */

static void good(fkv_status status) {
    if (status != FKV_OK) kit_die(status == FKV_NO_MEMORY ? EXIT_NO_FIT : EXIT_FAILED, "flatkv: %s", fkv_message());
}

/* Begins a step with n tokens of each sequence, starting at `token`, and writes their rows. */
static void begin_and_write(flatkv_subject *s, const compare_case *c, const fkv_seq *seqs, uint32_t n_seqs, uint32_t token,
                            uint32_t n, float *k, float *v) {
    size_t row = (size_t)c->n_kv_heads * c->head_dim;
    fkv_row rows[MAX_SEQUENCES];
    for (uint32_t i = 0; i < n_seqs; i++) {
        rows[i] = (fkv_row){seqs[i], n};
        for (uint32_t j = 0; j < n; j++) {
            compare_row(c, COMPARE_K, token + j, k + (i * n + j) * row);
            compare_row(c, COMPARE_V, token + j, v + (i * n + j) * row);
        }
    }
    good(fkv_step_begin(s->cache, rows, n_seqs, &s->step));
    good(fkv_write(s->step, 0, k, v));
    good(fkv_write(s->step, 1, k, v));
}

static uint64_t packed_bytes_read(const flatkv_subject *s) {
    fkv_stats stats;
    good(fkv_cache_stats(s->cache, &stats));
    return stats.packed_bytes_read;
}

static void flatkv_open(bench *b, subject *whole, const compare_case *c, fkv_codec_config k_codec, fkv_codec_config v_codec) {
    flatkv_subject *s = &whole->ours;
    fkv_config config = fkv_config_default();
    fkv_layer_config layers[2] = {config.layer, config.layer};
    for (int i = 0; i < 2; i++) {
        layers[i].n_q_heads = c->n_q_heads;
        layers[i].n_kv_heads = c->n_kv_heads;
        layers[i].head_dim = c->head_dim;
        layers[i].k = k_codec;
        layers[i].v = v_codec;
    }
    layers[1].window = WAKING_WINDOW;
    config.n_layers = 2;
    config.layers = layers;
    config.max_tokens = c->n_cached * c->n_seqs;
    config.max_seqs = c->n_seqs;
    uint32_t n_queries = c->n_queries * c->n_seqs; /* total number of queries over all sequences */
    config.max_step_tokens = n_queries > WRITE_TOKENS ? n_queries : WRITE_TOKENS;
    config.n_threads = c->n_threads;
    config.isa = b->options->isa;
    fkv_codec_info k_info = {0};
    fkv_codec_info v_info = {0};
    good(fkv_codec_about(k_codec, &k_info));
    good(fkv_codec_about(v_codec, &v_info));
    config.rotate = (fkv_rotate)((k_info.needs_rotation ? FKV_ROTATE_K : 0) | (v_info.needs_rotation ? FKV_ROTATE_V : 0));
    process_memory before_open;
    process_memory after_open;
    bool is_reported = process_memory_now(&before_open);
    good(fkv_cache_open(&config, &s->cache));
    is_reported = process_memory_now(&after_open) && is_reported;
    whole->memory = is_reported ? (double)after_open.anonymous_bytes - (double)before_open.anonymous_bytes : NAN;
    fkv_stats stats;
    good(fkv_cache_stats(s->cache, &stats));
    b->isa = stats.isa;

    size_t row = (size_t)c->n_kv_heads * c->head_dim * sizeof(float);
    float *k = bench_take(config.max_step_tokens * row);
    float *v = bench_take(config.max_step_tokens * row);
    fkv_seq seqs[MAX_SEQUENCES];
    uint32_t first = c->n_cached - c->n_queries;
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        good(fkv_seq_open(s->cache, &(fkv_seq_config){.max_tokens = c->n_cached}, &seqs[i], NULL));
        for (uint32_t token = 0; token < first; token += WRITE_TOKENS) {
            begin_and_write(s, c, &seqs[i], 1, token, first - token < WRITE_TOKENS ? first - token : WRITE_TOKENS, k, v);
            good(fkv_step_commit(s->step));
        }
    }
    begin_and_write(s, c, seqs, c->n_seqs, first, c->n_queries, k, v);
    free(k);
    free(v);

    size_t q_row = (size_t)c->n_q_heads * c->head_dim;
    s->q = bench_take(n_queries * q_row * sizeof *s->q);
    s->out = bench_take(n_queries * q_row * sizeof *s->out);
    for (uint32_t i = 0; i < n_queries; i++) compare_row(c, COMPARE_Q, first + i % c->n_queries, s->q + i * q_row);
    uint64_t before = packed_bytes_read(s);
    double start = kit_seconds();
    good(fkv_attend(s->step, 0, s->q, s->out));
    whole->first = kit_seconds() - start;
    s->packed_bytes = packed_bytes_read(s) - before;
}

static double flatkv_call(flatkv_subject *s, float *waking) {
    good(fkv_attend(s->step, 1, s->q, waking));
    double start = kit_seconds();
    good(fkv_attend(s->step, 0, s->q, s->out));
    return kit_seconds() - start;
}

static void flatkv_close(flatkv_subject *s) {
    fkv_cache_close(s->cache);
    free(s->q);
    free(s->out);
}

/* ---- subjects ---- */

static subject *add_subject(bench *b, const char *name, const char *types, bool is_peer) {
    if (b->n_subjects == MAX_SUBJECTS) kit_die(EXIT_USAGE, "more than %d subjects", MAX_SUBJECTS);
    subject *s = &b->subjects[b->n_subjects++];
    memset(s, 0, sizeof *s);
    (void)snprintf(s->name, sizeof s->name, "%s", name);
    (void)snprintf(s->types, sizeof s->types, "%s", types);
    s->is_peer = is_peer;
    return s;
}

/* Starts another implementation (a peer) in a new process. For libggml, the process runs this program with GGML_PEER_OPTION. */
static bool peer_open(compare_peer *peer, const peer_option *from, const char *types, const compare_case *c, float *out,
                      double *memory, double *seconds) {
    char self[4096];
    if (is_mlx_lm(from)) {
        const char *const command[] = {from->library, FKV_BENCH_PEERS "/mlx_attention_peer.py", NULL, NULL};
        return compare_peer_open(peer, command, types, c, out, memory, seconds);
    }
    if (!process_program_path(self, sizeof self)) return false;
    const char *const command[] = {self, GGML_PEER_OPTION, from->library, NULL};
    return compare_peer_open(peer, command, types, c, out, memory, seconds);
}

static void subjects_open(bench *b, const compare_case *c) {
    const options *o = b->options;
    size_t n = (size_t)c->n_q_heads * c->head_dim;
    double *exact = bench_take(n * sizeof *exact);
    float *out = bench_take(n * sizeof *out);
    char name[NAME_BYTES];
    exact_answer(c, exact);
    b->n_subjects = 0;
    for (const char *list = o->codecs; kit_next_word(&list, name);) {
        subject *s = add_subject(b, "flatkv", name, false);
        fkv_codec_config k = fkv_config_default().layer.k;
        fkv_codec_config v = fkv_config_default().layer.v;
        if (fkv_codec_parse(name, &k, &v) != FKV_OK) kit_die(EXIT_USAGE, "--codecs: %s", fkv_message());
        flatkv_open(b, s, c, k, v);
        for (uint32_t i = 1; i <= c->n_seqs; i++)
            s->error = fmax(s->error, error_of(s->ours.out + (i * c->n_queries - 1) * n, exact, n));
        s->good = s->error < (k.bits == 2 || v.bits == 2 ? FAR_OFF_TWO_BITS : FAR_OFF);
    }
    for (uint32_t i = 0; i < o->n_peers; i++) {
        for (const char *list = o->peers[i].types; kit_next_word(&list, name);) {
            subject *s = add_subject(b, o->peers[i].name, name, true);
            s->error = NAN;
            if (!peer_open(&s->theirs, &o->peers[i], name, c, out, &s->memory, &s->first)) continue;
            s->error = error_of(out, exact, n);
            s->good = s->error < FAR_OFF;
            if (!s->good) compare_peer_close(&s->theirs);
        }
    }
    free(exact);
    free(out);
}

static void subjects_close(bench *b) {
    for (uint32_t i = 0; i < b->n_subjects; i++) {
        subject *s = &b->subjects[i];
        if (!s->is_peer)
            flatkv_close(&s->ours);
        else if (s->good)
            compare_peer_close(&s->theirs);
    }
}

/* ---- rounds and tables ---- */

static void run_rounds(bench *b, const compare_case *c) {
    float *waking = bench_take((size_t)c->n_seqs * c->n_queries * c->n_q_heads * c->head_dim * sizeof *waking);
    size_t first_roof = b->roof.n_samples[0];
    for (uint32_t round = 0; round < b->options->n_rounds; round++) {
        for (uint32_t i = 0; i < b->n_subjects; i++) {
            subject *s = &b->subjects[i];
            if (!s->good || (round > 0 && s->first * round > b->options->patience)) continue;
            (void)bench_roof_stream(&b->roof, b->workers, 0);
            double joules = bench_energy_joules(&b->energy);
            double seconds = s->is_peer ? compare_peer_call(&s->theirs) : flatkv_call(&s->ours, waking);
            if (seconds < 0) kit_die(EXIT_FAILED, "peer %s (%s) exited while it was being timed", s->name, s->types);
            s->joules += bench_energy_joules(&b->energy) - joules;
            s->times[s->n_times++] = seconds * 1e3;
        }
    }
    b->case_roof = bench_roof_median(&b->roof, 0, first_roof);
    free(waking);
}

/* Returns the median of (peer's time) / (flatkv's time) over the rounds that both completed. */
static double ratio_of(const subject *theirs, const subject *ours) {
    double ratios[MAX_ROUNDS];
    uint32_t n = theirs->n_times < ours->n_times ? theirs->n_times : ours->n_times;
    for (uint32_t i = 0; i < n; i++) ratios[i] = theirs->times[i] / ours->times[i];
    return n > 0 ? kit_spread_of(ratios, n).p50 : NAN;
}

typedef struct spread {
    double least;
    kit_spread ms;
} spread;

static spread times_of(const subject *s) {
    double sorted[MAX_ROUNDS];
    memcpy(sorted, s->times, s->n_times * sizeof *sorted);
    spread found = {.ms = kit_spread_of(sorted, s->n_times)};
    found.least = sorted[0];
    return found;
}

static void print_case(bench *b, const compare_case *c) {
    const subject *ours = &b->subjects[0];
    (void)fprintf(b->text, "\n%u query heads, %u KV head%s, head dimension %u: %u quer%s on %u tokens", c->n_q_heads,
                  c->n_kv_heads, c->n_kv_heads == 1 ? "" : "s", c->head_dim, c->n_queries, c->n_queries == 1 ? "y" : "ies",
                  c->n_cached);
    if (c->n_seqs > 1) (void)fprintf(b->text, " in each of %u sequences", c->n_seqs);
    (void)fputc('\n', b->text);
    (void)fprintf(b->text, "  %-12s %-12s %6s %10s %10s %10s %10s %10s %9s\n", "who", "K/V", "rounds", "median ms", "least ms",
                  "p90 ms", "to flatkv", "of roof", "error");
    for (uint32_t i = 0; i < b->n_subjects; i++) {
        const subject *s = &b->subjects[i];
        (void)fprintf(b->text, "  %-12s %-12s", s->name, s->types);
        if (!s->good) {
            (void)fprintf(b->text, isnan(s->error) ? "  no result\n" : "  WRONG: error %.2g\n", s->error);
            continue;
        }
        spread t = times_of(s);
        (void)fprintf(b->text, " %6u %10.3f %10.3f %10.3f %9.2fx", s->n_times, t.ms.p50, t.least, t.ms.p90, ratio_of(s, ours));
        if (s->is_peer || c->n_queries > 1)
            (void)fprintf(b->text, " %10s", "-");
        else
            (void)fprintf(b->text, " %8.1f %%", (double)s->ours.packed_bytes / t.ms.p50 * 1e3 / b->case_roof * 100);
        (void)fprintf(b->text, " %9.1e\n", s->error);
    }
    (void)fflush(b->text);
}

static void json_case(bench *b, kit_json *json, const compare_case *c) {
    kit_json_object(json, NULL);
    kit_json_integer(json, "q_heads", c->n_q_heads);
    kit_json_integer(json, "kv_heads", c->n_kv_heads);
    kit_json_integer(json, "head_dim", c->head_dim);
    kit_json_integer(json, "cached", c->n_cached);
    kit_json_integer(json, "queries", c->n_queries);
    kit_json_integer(json, "sequences", c->n_seqs);
    kit_json_integer(json, "threads", c->n_threads);
    kit_json_real(json, "read_roof_gb_s", b->case_roof * 1e-9);
    kit_json_array(json, "subjects");
    for (uint32_t i = 0; i < b->n_subjects; i++) {
        const subject *s = &b->subjects[i];
        spread t = {NAN, {NAN, NAN, NAN}};
        if (s->good) t = times_of(s);
        kit_json_object(json, NULL);
        kit_json_text(json, "who", s->name);
        kit_json_text(json, "types", s->types);
        kit_json_bool(json, "right", s->good);
        kit_json_real(json, "error_l2", s->error);
        kit_json_integer(json, "rounds", s->n_times);
        kit_json_real(json, "ms_p50", t.ms.p50);
        kit_json_real(json, "ms_least", t.least);
        kit_json_real(json, "ms_p10", t.ms.p10);
        kit_json_real(json, "ms_p90", t.ms.p90);
        kit_json_real(json, "time_to_flatkv", s->good ? ratio_of(s, &b->subjects[0]) : NAN);
        kit_json_real(json, "joules", s->good ? s->joules / s->n_times : NAN);
        kit_json_real(json, "memory_bytes", s->good ? s->memory : NAN);
        if (!s->is_peer) kit_json_integer(json, "packed_bytes", s->ours.packed_bytes);
        kit_json_close(json);
    }
    kit_json_close(json);
    kit_json_close(json);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], GGML_PEER_OPTION) == 0) return ggml_peer_main(argc, argv);
    static options o;
    static bench b;
    kit_set_program(PROGRAM);
    parse(&o, argc, argv);
    b.options = &o;
    b.text = o.json ? stderr : stdout;
    b.workers = bench_workers_open(o.n_threads);
    bench_roof_open(&b.roof, o.quick);
    (void)bench_energy_open(&b.energy, o.powercap);
    kit_json *json = kit_json_begin();
    kit_json_text(json, "bench", PROGRAM);
    kit_json_text(json, "version", fkv_version());
    kit_json_array(json, "cases");
    uint32_t n_wrong = 0;
    for (uint32_t i = 0; i < o.n_cases; i++) {
        subjects_open(&b, &o.cases[i]);
        run_rounds(&b, &o.cases[i]);
        print_case(&b, &o.cases[i]);
        json_case(&b, json, &o.cases[i]);
        for (uint32_t s = 0; s < b.n_subjects; s++) n_wrong += !b.subjects[s].good;
        subjects_close(&b);
    }
    kit_spread roof = kit_spread_of(b.roof.samples[0], b.roof.n_samples[0]);
    (void)fprintf(b.text, "\nflatkv %s, %s kernels, %u thread%s; read roof %.1f GB/s (p10 %.1f, p90 %.1f)\n", fkv_version(),
                  b.isa, o.n_threads, o.n_threads == 1 ? "" : "s", roof.p50 * 1e-9, roof.p10 * 1e-9, roof.p90 * 1e-9);
    kit_json_close(json);
    kit_json_text(json, "isa", b.isa);
    kit_json_real(json, "read_roof_gb_s", roof.p50 * 1e-9);
    if (!o.json)
        kit_json_free(json);
    else if (kit_json_print(json) != EXIT_GOOD)
        return EXIT_FAILED;
    return n_wrong == 0 ? EXIT_GOOD : EXIT_FAILED;
}
