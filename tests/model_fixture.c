/* See model_fixture.h. */
#include "model_fixture.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const double EPS = 1e-6;
static const double ROPE_BASE = 50000.0;
static const double ROPE_BASE_LOCAL = 10000.0;
static const double QUERY_SCALAR = 20.0; /* gemma3 scales scores by 1 / sqrt(QUERY_SCALAR) instead of 1 / sqrt(head_dim) */

static void must(bool good, const char *what) {
    if (good) return;
    (void)fprintf(stderr, "model_fixture: %s failed: %s (%s)\n", what, fkv_message(), strerror(errno));
    abort();
}

static bool is_gemma(const model_fixture *w) { return strcmp(w->spec.type, "gemma3_text") == 0; }
static bool has_qk_norm(const model_fixture *w) { return is_gemma(w) || strcmp(w->spec.type, "qwen3") == 0; }
static bool has_bias(const model_fixture *w) { return strcmp(w->spec.type, "qwen2") == 0; }

/* ---- random tensors ---- */

static double uniform(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-52 - 1.0;
}

static void add(model_fixture *w, uint64_t *state, uint32_t n_rows, uint32_t n_cols, double middle, double spread,
                const char *format, ...) {
    must(w->n_tensors < MODEL_FIXTURE_TENSORS, "too many tensors");
    model_tensor *t = &w->tensors[w->n_tensors++];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(t->name, sizeof t->name, format, args);
    va_end(args);
    t->n_rows = n_rows;
    t->n_cols = n_cols;
    size_t n = (size_t)(n_rows > 0 ? n_rows : 1) * n_cols;
    t->numbers = malloc(n * sizeof *t->numbers);
    must(t->numbers != NULL, "malloc");
    for (size_t i = 0; i < n; i++) t->numbers[i] = (float)(middle + spread * uniform(state));
}

void model_fixture_make(model_fixture *w, const model_spec *spec, uint64_t seed) {
    *w = (model_fixture){.spec = *spec};
    uint64_t s = seed;
    uint32_t d = spec->dim;
    uint32_t q = spec->n_q_heads * spec->head_dim;
    uint32_t kv = spec->n_kv_heads * spec->head_dim;
    double by_dim = 1.7 / sqrt(d);
    double norm = is_gemma(w) ? 0.0 : 1.0; /* gemma adds 1 to its norm weights */
    add(w, &s, MODEL_FIXTURE_VOCAB, d, 0.0, is_gemma(w) ? by_dim : 1.0, "model.embed_tokens.weight");
    add(w, &s, 0, d, norm, 0.3, "model.norm.weight");
    if (!spec->tied) add(w, &s, MODEL_FIXTURE_VOCAB, d, 0.0, by_dim, "lm_head.weight");
    for (uint32_t i = 0; i < spec->n_layers; i++) {
        add(w, &s, q, d, 0.0, 2.0 * by_dim, "model.layers.%u.self_attn.q_proj.weight", i);
        add(w, &s, kv, d, 0.0, 2.0 * by_dim, "model.layers.%u.self_attn.k_proj.weight", i);
        add(w, &s, kv, d, 0.0, by_dim, "model.layers.%u.self_attn.v_proj.weight", i);
        add(w, &s, d, q, 0.0, 1.7 / sqrt(q), "model.layers.%u.self_attn.o_proj.weight", i);
        add(w, &s, spec->ffn_dim, d, 0.0, by_dim, "model.layers.%u.mlp.gate_proj.weight", i);
        add(w, &s, spec->ffn_dim, d, 0.0, by_dim, "model.layers.%u.mlp.up_proj.weight", i);
        add(w, &s, d, spec->ffn_dim, 0.0, 1.7 / sqrt(spec->ffn_dim), "model.layers.%u.mlp.down_proj.weight", i);
        add(w, &s, 0, d, norm, 0.3, "model.layers.%u.input_layernorm.weight", i);
        add(w, &s, 0, d, norm, 0.3, "model.layers.%u.post_attention_layernorm.weight", i);
        if (has_bias(w)) {
            add(w, &s, 0, q, 0.0, 1.0, "model.layers.%u.self_attn.q_proj.bias", i);
            add(w, &s, 0, kv, 0.0, 1.0, "model.layers.%u.self_attn.k_proj.bias", i);
            add(w, &s, 0, kv, 0.0, 1.0, "model.layers.%u.self_attn.v_proj.bias", i);
        }
        if (has_qk_norm(w)) {
            add(w, &s, 0, spec->head_dim, norm, 0.3, "model.layers.%u.self_attn.q_norm.weight", i);
            add(w, &s, 0, spec->head_dim, norm, 0.3, "model.layers.%u.self_attn.k_norm.weight", i);
        }
        if (is_gemma(w)) {
            add(w, &s, 0, d, norm, 0.3, "model.layers.%u.pre_feedforward_layernorm.weight", i);
            add(w, &s, 0, d, norm, 0.3, "model.layers.%u.post_feedforward_layernorm.weight", i);
        }
    }
}

model_tensor *model_fixture_tensor(model_fixture *w, const char *name) {
    for (uint32_t i = 0; i < w->n_tensors; i++)
        if (strcmp(w->tensors[i].name, name) == 0) return &w->tensors[i];
    return NULL;
}

void model_fixture_drop(model_fixture *w, const char *name) {
    model_tensor *t = model_fixture_tensor(w, name);
    must(t != NULL, name);
    free(t->numbers);
    *t = w->tensors[--w->n_tensors];
}

static const char *file_path(const model_fixture *w, const char *name, char path[1024]) {
    (void)snprintf(path, 1024, "%s/%s", w->folder, name);
    return path;
}

void model_fixture_free(model_fixture *w) {
    char path[1024];
    for (uint32_t i = 0; i < w->n_tensors; i++) free(w->tensors[i].numbers);
    if (w->folder[0] == 0) return;
    (void)unlink(file_path(w, "config.json", path));
    (void)unlink(file_path(w, "model.safetensors", path));
    (void)rmdir(w->folder);
}

/* ---- files ---- */

static void write_config(const model_fixture *w) {
    char path[1024];
    FILE *file = fopen(file_path(w, "config.json", path), "w");
    must(file != NULL, "config.json");
    const model_spec *s = &w->spec;
    (void)fprintf(file,
                  "{\"model_type\": \"%s\", \"tie_word_embeddings\": %s, \"max_position_embeddings\": 4096, \"vocab_size\": %d,"
                  " \"hidden_size\": %u, \"num_hidden_layers\": %u, \"num_attention_heads\": %u, \"num_key_value_heads\": %u,"
                  " \"head_dim\": %u, \"intermediate_size\": %u, \"rope_theta\": %.1f, \"rms_norm_eps\": %g",
                  s->type, s->tied ? "true" : "false", MODEL_FIXTURE_VOCAB, s->dim, s->n_layers, s->n_q_heads, s->n_kv_heads,
                  s->head_dim, s->ffn_dim, ROPE_BASE, EPS);
    if (is_gemma(w))
        (void)fprintf(file,
                      ", \"sliding_window\": %u, \"sliding_window_pattern\": %u, \"rope_local_base_freq\": %.1f,"
                      " \"query_pre_attn_scalar\": %.1f",
                      s->window, s->pattern, ROPE_BASE_LOCAL, QUERY_SCALAR);
    (void)fprintf(file, "}\n");
    must(fclose(file) == 0, "config.json");
}

static size_t tensor_bytes(const model_tensor *t) { return (size_t)(t->n_rows > 0 ? t->n_rows : 1) * t->n_cols * sizeof(float); }

static void write_tensors(const model_fixture *w) {
    char path[1024];
    char header[MODEL_FIXTURE_TENSORS * 192];
    size_t n = 0;
    size_t offset = 0;
    for (uint32_t i = 0; i < w->n_tensors; i++) {
        const model_tensor *t = &w->tensors[i];
        char rows[32] = "";
        if (t->n_rows > 0) (void)snprintf(rows, sizeof rows, "%u, ", t->n_rows);
        n += (size_t)snprintf(header + n, sizeof header - n,
                              "%s\"%s\": {\"dtype\": \"F32\", \"shape\": [%s%u], \"data_offsets\": [%zu, %zu]}",
                              i == 0 ? "{" : ", ", t->name, rows, t->n_cols, offset, offset + tensor_bytes(t));
        offset += tensor_bytes(t);
    }
    n += (size_t)snprintf(header + n, sizeof header - n, "}");
    while (n % 8 != 0) header[n++] = ' ';
    FILE *file = fopen(file_path(w, "model.safetensors", path), "wb");
    must(file != NULL, "model.safetensors");
    uint64_t header_bytes = n;
    must(fwrite(&header_bytes, sizeof header_bytes, 1, file) == 1 && fwrite(header, 1, n, file) == n, "writing the header");
    for (uint32_t i = 0; i < w->n_tensors; i++)
        must(fwrite(w->tensors[i].numbers, 1, tensor_bytes(&w->tensors[i]), file) == tensor_bytes(&w->tensors[i]),
             "writing a tensor");
    must(fclose(file) == 0, "model.safetensors");
}

const char *model_fixture_write(model_fixture *w) {
    const char *parent = getenv("TMPDIR");
    (void)snprintf(w->folder, sizeof w->folder, "%s/flatkv-model-XXXXXX", parent != NULL && parent[0] != 0 ? parent : "/tmp");
    must(mkdtemp(w->folder) != NULL, "creating the model folder");
    write_config(w);
    write_tensors(w);
    return w->folder;
}

/* ---- reference forward pass ---- */

static const float *layer_numbers(const model_fixture *w, uint32_t layer, const char *name) {
    char text[128];
    (void)snprintf(text, sizeof text, "model.layers.%u.%s", layer, name);
    for (uint32_t i = 0; i < w->n_tensors; i++)
        if (strcmp(w->tensors[i].name, text) == 0) return w->tensors[i].numbers;
    return NULL;
}

static const float *numbers(const model_fixture *w, const char *name) {
    for (uint32_t i = 0; i < w->n_tensors; i++)
        if (strcmp(w->tensors[i].name, name) == 0) return w->tensors[i].numbers;
    must(false, name);
    return NULL;
}

/* Computes out = matrix * x + bias. A NULL bias means 0. */
static void apply(const float *matrix, const float *bias, const double *x, uint32_t n_rows, uint32_t n_cols, double *out) {
    for (uint32_t r = 0; r < n_rows; r++) {
        double sum = bias != NULL ? (double)bias[r] : 0.0;
        for (uint32_t c = 0; c < n_cols; c++) sum += (double)matrix[(size_t)r * n_cols + c] * x[c];
        out[r] = sum;
    }
}

static void norm(const model_fixture *w, const float *weight, uint32_t n, const double *x, double *out) {
    double squares = 0.0;
    for (uint32_t i = 0; i < n; i++) squares += x[i] * x[i];
    double factor = 1.0 / sqrt(squares / n + EPS);
    for (uint32_t i = 0; i < n; i++) out[i] = x[i] * factor * ((is_gemma(w) ? 1.0 : 0.0) + (double)weight[i]);
}

static bool is_full(const model_fixture *w, uint32_t layer) { return !is_gemma(w) || (layer + 1) % w->spec.pattern == 0; }

static void place_heads(const model_fixture *w, uint32_t layer, double *x, uint32_t n_heads, uint32_t position,
                        const float *weight) {
    uint32_t d = w->spec.head_dim;
    double base = is_full(w, layer) ? ROPE_BASE : ROPE_BASE_LOCAL;
    for (uint32_t h = 0; h < n_heads; h++) {
        double *head = x + (size_t)h * d;
        if (has_qk_norm(w)) norm(w, weight, d, head, head);
        for (uint32_t i = 0; i < d / 2; i++) {
            double angle = position * pow(base, -2.0 * i / d);
            double a = head[i];
            double b = head[i + d / 2];
            head[i] = a * cos(angle) - b * sin(angle);
            head[i + d / 2] = b * cos(angle) + a * sin(angle);
        }
    }
}

static bool is_visible(const model_fixture *w, uint32_t layer, uint32_t position, uint32_t token) {
    if (!is_full(w, layer) && position - token >= w->spec.window) return false;
    return w->spec.bound == 0 || position - token < w->spec.bound || token < w->spec.n_sinks;
}

/* Computes attention for one query head at `position` over the keys and values up to that position. */
static void attend(const model_fixture *w, uint32_t layer, uint32_t position, const double *q, const double *k, const double *v,
                   size_t stride, double *scores, double *out) {
    uint32_t d = w->spec.head_dim;
    double scale = 1.0 / sqrt(is_gemma(w) ? QUERY_SCALAR : d);
    double largest = -INFINITY;
    double total = 0.0;
    for (uint32_t t = 0; t <= position; t++) {
        if (!is_visible(w, layer, position, t)) continue;
        scores[t] = 0.0;
        for (uint32_t i = 0; i < d; i++) scores[t] += q[i] * k[t * stride + i] * scale;
        largest = fmax(largest, scores[t]);
    }
    for (uint32_t i = 0; i < d; i++) out[i] = 0.0;
    for (uint32_t t = 0; t <= position; t++) {
        if (!is_visible(w, layer, position, t)) continue;
        double share = exp(scores[t] - largest);
        total += share;
        for (uint32_t i = 0; i < d; i++) out[i] += share * v[t * stride + i];
    }
    for (uint32_t i = 0; i < d; i++) out[i] /= total;
}

static double activation(const model_fixture *w, double x) {
    if (!is_gemma(w)) return x / (1.0 + exp(-x));
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

typedef struct plain {
    double *x; /* [T, dim] */
    double *k; /* [T, G * D] */
    double *v;
    double *a, *b, *c; /* scratch memory for rows of any layer */
    double *scores;    /* [T] */
} plain;

static double *doubles(size_t n) {
    double *made = calloc(n, sizeof *made);
    must(made != NULL, "calloc");
    return made;
}

static void plain_attention(const model_fixture *w, uint32_t layer, uint32_t n_tokens, const plain *p) {
    const model_spec *s = &w->spec;
    uint32_t q_dim = s->n_q_heads * s->head_dim;
    uint32_t kv_dim = s->n_kv_heads * s->head_dim;
    for (uint32_t t = 0; t < n_tokens; t++) {
        double *x = p->x + (size_t)t * s->dim;
        double *k = p->k + (size_t)t * kv_dim;
        double *v = p->v + (size_t)t * kv_dim;
        norm(w, layer_numbers(w, layer, "input_layernorm.weight"), s->dim, x, p->a);
        apply(layer_numbers(w, layer, "self_attn.q_proj.weight"), layer_numbers(w, layer, "self_attn.q_proj.bias"), p->a, q_dim,
              s->dim, p->b);
        apply(layer_numbers(w, layer, "self_attn.k_proj.weight"), layer_numbers(w, layer, "self_attn.k_proj.bias"), p->a, kv_dim,
              s->dim, k);
        apply(layer_numbers(w, layer, "self_attn.v_proj.weight"), layer_numbers(w, layer, "self_attn.v_proj.bias"), p->a, kv_dim,
              s->dim, v);
        place_heads(w, layer, p->b, s->n_q_heads, t, layer_numbers(w, layer, "self_attn.q_norm.weight"));
        place_heads(w, layer, k, s->n_kv_heads, t, layer_numbers(w, layer, "self_attn.k_norm.weight"));
        for (uint32_t h = 0; h < s->n_q_heads; h++) {
            size_t kv = (size_t)(h / (s->n_q_heads / s->n_kv_heads)) * s->head_dim;
            attend(w, layer, t, p->b + (size_t)h * s->head_dim, p->k + kv, p->v + kv, kv_dim, p->scores,
                   p->c + (size_t)h * s->head_dim);
        }
        apply(layer_numbers(w, layer, "self_attn.o_proj.weight"), NULL, p->c, s->dim, q_dim, p->a);
        if (is_gemma(w)) norm(w, layer_numbers(w, layer, "post_attention_layernorm.weight"), s->dim, p->a, p->a);
        for (uint32_t i = 0; i < s->dim; i++) x[i] += p->a[i];
    }
}

static void plain_ffn(const model_fixture *w, uint32_t layer, uint32_t n_tokens, const plain *p) {
    const model_spec *s = &w->spec;
    const char *before = is_gemma(w) ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight";
    for (uint32_t t = 0; t < n_tokens; t++) {
        double *x = p->x + (size_t)t * s->dim;
        norm(w, layer_numbers(w, layer, before), s->dim, x, p->a);
        apply(layer_numbers(w, layer, "mlp.gate_proj.weight"), NULL, p->a, s->ffn_dim, s->dim, p->b);
        apply(layer_numbers(w, layer, "mlp.up_proj.weight"), NULL, p->a, s->ffn_dim, s->dim, p->c);
        for (uint32_t i = 0; i < s->ffn_dim; i++) p->b[i] = activation(w, p->b[i]) * p->c[i];
        apply(layer_numbers(w, layer, "mlp.down_proj.weight"), NULL, p->b, s->dim, s->ffn_dim, p->a);
        if (is_gemma(w)) norm(w, layer_numbers(w, layer, "post_feedforward_layernorm.weight"), s->dim, p->a, p->a);
        for (uint32_t i = 0; i < s->dim; i++) x[i] += p->a[i];
    }
}

void model_fixture_reference(const model_fixture *w, const uint32_t *tokens, uint32_t n_tokens, float *logits) {
    const model_spec *s = &w->spec;
    size_t kv = (size_t)n_tokens * s->n_kv_heads * s->head_dim;
    size_t widest = (size_t)s->dim + s->ffn_dim + (size_t)s->n_q_heads * s->head_dim + MODEL_FIXTURE_VOCAB;
    plain p = {doubles((size_t)n_tokens * s->dim),
               doubles(kv),
               doubles(kv),
               doubles(widest),
               doubles(widest),
               doubles(widest),
               doubles(n_tokens)};
    const float *embedding = numbers(w, "model.embed_tokens.weight");
    for (uint32_t t = 0; t < n_tokens; t++)
        for (uint32_t i = 0; i < s->dim; i++)
            p.x[(size_t)t * s->dim + i] = (double)embedding[(size_t)tokens[t] * s->dim + i] * (is_gemma(w) ? sqrt(s->dim) : 1.0);
    for (uint32_t layer = 0; layer < s->n_layers; layer++) {
        plain_attention(w, layer, n_tokens, &p);
        plain_ffn(w, layer, n_tokens, &p);
    }
    for (uint32_t t = 0; t < n_tokens; t++) {
        norm(w, numbers(w, "model.norm.weight"), s->dim, p.x + (size_t)t * s->dim, p.a);
        apply(s->tied ? embedding : numbers(w, "lm_head.weight"), NULL, p.a, MODEL_FIXTURE_VOCAB, s->dim, p.b);
        for (uint32_t i = 0; i < MODEL_FIXTURE_VOCAB; i++) logits[(size_t)t * MODEL_FIXTURE_VOCAB + i] = (float)p.b[i];
    }
    double *all[] = {p.x, p.k, p.v, p.a, p.b, p.c, p.scores};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

/* ---- runners ---- */

fkv_runner_config model_runner_config(uint32_t bits, uint32_t max_tokens, uint32_t step_tokens) {
    fkv_runner_config config = fkv_runner_config_default();
    config.k = (fkv_codec_config){bits, 32};
    config.v = (fkv_codec_config){bits, 32};
    config.page_tokens = 16;
    config.max_tokens = max_tokens;
    config.max_step_tokens = step_tokens;
    config.max_logit_rows = step_tokens;
    return config;
}

fkv_runner *model_runner(const fkv_model *model, fkv_runner_config config) {
    fkv_runner *runner = NULL;
    must(fkv_runner_open(model, &config, &runner) == FKV_OK, "fkv_runner_open");
    return runner;
}

fkv_seq model_seq(fkv_runner *runner, uint32_t max_tokens) {
    fkv_seq seq = 0;
    must(fkv_seq_open(fkv_runner_cache(runner), &(fkv_seq_config){.max_tokens = max_tokens}, &seq, NULL) == FKV_OK,
         "fkv_seq_open");
    return seq;
}

void model_run(fkv_runner *runner, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens, uint32_t chunk, uint32_t n_vocab,
               float *logits) {
    for (uint32_t at = 0; at < n_tokens; at += chunk) {
        uint32_t n = chunk < n_tokens - at ? chunk : n_tokens - at;
        const float *given = NULL;
        fkv_tokens row = {seq, tokens + at, n, logits != NULL ? FKV_LOGITS_ALL : FKV_LOGITS_NONE};
        must(fkv_runner_forward(runner, &row, 1, &given) == FKV_OK, "fkv_runner_forward");
        if (logits != NULL) memcpy(logits + (size_t)at * n_vocab, given, (size_t)n * n_vocab * sizeof *logits);
    }
}

/* ---- book text ---- */

uint32_t model_book(uint8_t *text, uint32_t capacity) {
    FILE *file = fopen("models/needle/book.txt", "rb");
    must(file != NULL, "models/needle/book.txt");
    uint32_t n = 0;
    uint32_t n_lines = 0;
    for (int c = fgetc(file); c != EOF && n < capacity; c = fgetc(file)) {
        if (c == '\n') {
            n_lines++;
            continue;
        }
        if (n_lines == 1 && n > 0 && text[n - 1] != ' ') text[n++] = ' ';
        for (uint32_t i = 0; n_lines > 1 && i < 2 && n < capacity; i++) text[n++] = '\n';
        n_lines = 0;
        if ((c == ' ' && n > 0 && text[n - 1] == ' ') || n == capacity) continue;
        text[n++] = (uint8_t)c;
    }
    (void)fclose(file);
    return n;
}

void model_book_tokens(uint32_t from, uint32_t *tokens, uint32_t n) {
    static uint8_t text[1 << 16];
    must(from + n <= model_book(text, sizeof text), "reading the requested number of bytes from the book");
    for (uint32_t i = 0; i < n; i++) tokens[i] = text[from + i];
}
