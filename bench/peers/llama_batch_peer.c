/* llama_batch_peer: measures the throughput of the llama.cpp library for several concurrent sequences, without a server.
 *
 *     cc -O2 llama_batch_peer.c -I LLAMA/include -I LLAMA/ggml/include -L BUILD/bin -lllama -lggml-base -Wl,-rpath,BUILD/bin
 *     llama_batch_peer MODEL THREADS ROUNDS PROMPT NEW CACHE CLIENTS...
 *
 * Each sequence has a different prompt of PROMPT tokens. Prompts are prefilled in batches of 512 rows, which may contain rows of
 * several sequences. Each sequence then generates NEW tokens greedily, with one row per sequence in each batch. The measured time
 * covers both phases. CACHE is f16 or q8_0; each sequence has its own stream, as in llama-server -np. For each number of clients,
 * prints one JSON line with the tokens per second of each round.
 */
#include <llama.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCH = 512, MOST_CLIENTS = 64 };

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void add(struct llama_batch *b, llama_token token, llama_pos at, llama_seq_id seq, bool logits) {
    int i = b->n_tokens++;
    b->token[i] = token;
    b->pos[i] = at;
    b->n_seq_id[i] = 1;
    b->seq_id[i][0] = seq;
    b->logits[i] = logits;
}

static void run(struct llama_context *c, struct llama_batch *b) {
    if (llama_decode(c, *b) != 0) exit(1);
}

static llama_token best(const float *logits, int n) {
    int found = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[found]) found = i;
    return found;
}

/* Runs one round. Returns tokens per second. */
static double round_of(struct llama_context *c, struct llama_batch *b, int n_vocab, int n_clients, int n_prompt, int n_new,
                       int seed) {
    llama_token next[MOST_CLIENTS];
    llama_memory_clear(llama_get_memory(c), false);
    double start = now();
    int rows[MOST_CLIENTS];
    b->n_tokens = 0;
    int first = 0;
    for (int s = 0; s < n_clients; s++) {
        for (int i = 0; i < n_prompt; i++) {
            add(b, 1000 + (seed * 7919 + s * 104729 + i * 31) % 40000, i, s, i + 1 == n_prompt);
            if (i + 1 == n_prompt) rows[s] = b->n_tokens - 1;
            if (b->n_tokens < BATCH && (s + 1 < n_clients || i + 1 < n_prompt)) continue;
            run(c, b);
            for (; first <= s && (first < s || i + 1 == n_prompt); first++)
                next[first] = best(llama_get_logits_ith(c, rows[first]), n_vocab);
            b->n_tokens = 0;
        }
    }
    for (int n = 1; n < n_new; n++) {
        b->n_tokens = 0;
        for (int s = 0; s < n_clients; s++) add(b, next[s], n_prompt + n - 1, s, true);
        run(c, b);
        for (int s = 0; s < n_clients; s++) next[s] = best(llama_get_logits_ith(c, s), n_vocab);
    }
    return n_clients * n_new / (now() - start);
}

static void quiet(enum ggml_log_level level, const char *text, void *user) { (void)level, (void)text, (void)user; }

int main(int argc, char **argv) {
    if (argc < 8) return 2;
    int n_threads = atoi(argv[2]);
    int rounds = atoi(argv[3]);
    int n_prompt = atoi(argv[4]);
    int n_new = atoi(argv[5]);
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == NULL) return 1;
    int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int a = 7; a < argc; a++) {
        int n = atoi(argv[a]);
        struct llama_context_params p = llama_context_default_params();
        p.n_ctx = (uint32_t)(n * 1024);
        p.n_seq_max = (uint32_t)n;
        p.n_batch = p.n_ubatch = BATCH;
        p.n_threads = p.n_threads_batch = n_threads;
        p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        p.kv_unified = false;
        p.type_k = p.type_v = strcmp(argv[6], "q8_0") == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
        struct llama_context *c = llama_init_from_model(model, p);
        if (c == NULL) return 1;
        struct llama_batch b = llama_batch_init(BATCH, 0, 1);
        printf("{\"clients\": %d, \"cache\": \"%s\", \"tokens_per_s\": [", n, argv[6]);
        for (int r = -1; r < rounds; r++) {
            double rate = round_of(c, &b, n_vocab, n, n_prompt, n_new, r + 2);
            if (r >= 0) printf("%s%.1f", r > 0 ? ", " : "", rate);
        }
        printf("], \"system\": \"%s\"}\n", llama_print_system_info());
        (void)fflush(stdout);
        llama_batch_free(b);
        llama_free(c);
    }
    return 0;
}
