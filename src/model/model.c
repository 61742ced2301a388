/* From a weight file to a model in memory: finds every tensor that an architecture needs; the backend then takes them. See
 * model.h.
 *
 * Owns the checks of a model against itself: sizes that cannot be, tensors that are missing, misshapen, or not known. A tensor
 * that nobody asked for would mean a model that is not computed as it was trained, so it is refused.
 */
#include "model.h"

#include "../base/workers.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_DIM = 1 << 20, MAX_VOCAB = 1 << 24, MAX_LAYER_TENSORS = 16, MAX_MODEL_TENSORS = 3 };

/* ---- sizes that can be ---- */

static fkv_status check_shape(const fkv_hparams *h) {
    FKV_REQUIRE(h->n_layers > 0 && h->n_layers <= FKV_MAX_LAYERS, FKV_UNSUPPORTED, "the model has %u layers: 1 to %d",
                h->n_layers, FKV_MAX_LAYERS);
    FKV_REQUIRE(h->dim > 0 && h->dim <= MAX_DIM && h->ffn_dim > 0 && h->ffn_dim <= MAX_DIM, FKV_UNSUPPORTED,
                "the model has a dimension of %u and a feed-forward of %u: 1 to %d", h->dim, h->ffn_dim, MAX_DIM);
    FKV_REQUIRE(h->n_vocab > 0 && h->n_vocab <= MAX_VOCAB, FKV_UNSUPPORTED, "the model has %u tokens: 1 to %d", h->n_vocab,
                MAX_VOCAB);
    FKV_REQUIRE(h->n_q_heads > 0 && h->n_kv_heads > 0 && h->n_q_heads % h->n_kv_heads == 0, FKV_UNSUPPORTED,
                "%u query heads cannot share %u KV heads", h->n_q_heads, h->n_kv_heads);
    FKV_REQUIRE(h->head_dim > 0 && h->head_dim <= FKV_MAX_HEAD_DIM && h->n_q_heads <= MAX_DIM / h->head_dim, FKV_UNSUPPORTED,
                "%u heads of dimension %u: the dimension is 1 to %d, all heads together %d", h->n_q_heads, h->head_dim,
                FKV_MAX_HEAD_DIM, MAX_DIM);
    FKV_REQUIRE(h->context > 0 && h->context <= INT32_MAX, FKV_UNSUPPORTED, "a context of %u tokens", h->context);
    return FKV_OK;
}

static fkv_status check_numbers(const fkv_hparams *h) {
    FKV_REQUIRE(
        isfinite(h->rms_eps) && h->rms_eps > 0.0f, FKV_FILE_FORMAT,
        "the file has no RMS epsilon above 0: %s.attention.layer_norm_rms_epsilon of a GGUF file, rms_norm_eps of a config.json",
        h->architecture);
    FKV_REQUIRE(h->rope_dim % 2 == 0 && h->rope_dim > 0 && h->rope_dim <= h->head_dim, FKV_UNSUPPORTED,
                "RoPE over %u numbers of heads of %u: an even number of them", h->rope_dim, h->head_dim);
    FKV_REQUIRE(isfinite(h->rope_base) && h->rope_base > 0.0f && isfinite(h->rope_base_local) && h->rope_base_local >= 0.0f &&
                    isfinite(h->rope_scale) && h->rope_scale > 0.0f,
                FKV_UNSUPPORTED, "RoPE with bases %g and %g and scale %g", (double)h->rope_base, (double)h->rope_base_local,
                (double)h->rope_scale);
    FKV_REQUIRE(isfinite(h->softcap) && h->softcap >= 0.0f && isfinite(h->query_scale) && h->query_scale >= 0.0f, FKV_UNSUPPORTED,
                "scores with softcap %g and scale %g", (double)h->softcap, (double)h->query_scale);
    FKV_REQUIRE(h->window <= INT32_MAX, FKV_UNSUPPORTED, "a window of %u tokens", h->window);
    return FKV_OK;
}

/* ---- what a model is made of ---- */

typedef struct search {
    const fkv_model *model;
    const fkv_tensor **found; /* [n_found] */
    uint32_t n_found;
} search;

/* The tensor of a name, of exactly that shape; *tensor is NULL where it is not there and need not be. */
static fkv_status find(search *s, const char *name, uint32_t n_rows, uint32_t n_cols, bool needed, const fkv_tensor **tensor) {
    const fkv_tensor *found = fkv_weights_find(s->model->weights, name);
    *tensor = found;
    if (found == NULL) {
        FKV_REQUIRE(!needed, FKV_FILE_DAMAGED, "the file has no tensor %s, which a %s model needs", name,
                    s->model->architecture->name);
        return FKV_OK;
    }
    s->found[s->n_found++] = found;
    FKV_REQUIRE(found->n_rows == n_rows && found->n_cols == n_cols, FKV_FILE_DAMAGED,
                "tensor %s is %u x %u and the sizes the file states make it %u x %u", name, found->n_rows, found->n_cols, n_rows,
                n_cols);
    return FKV_OK;
}

static const char *layer_name(char text[FKV_MAX_TENSOR_NAME], uint32_t layer, const char *name) {
    (void)snprintf(text, FKV_MAX_TENSOR_NAME, "blk.%" PRIu32 ".%s", layer, name);
    return text;
}

static fkv_status find_layer(search *s, uint32_t i, fkv_layer_tensors *t) {
    const fkv_hparams *h = s->model->hparams;
    const fkv_architecture *a = s->model->architecture;
    uint32_t q_dim = h->n_q_heads * h->head_dim;
    uint32_t kv_dim = h->n_kv_heads * h->head_dim;
    const struct {
        const char *name;
        uint32_t n_rows;
        uint32_t n_cols;
        bool known; /* to the architecture */
        bool needed;
        const fkv_tensor **out;
    } parts[] = {
        {"attn_q.weight", q_dim, h->dim, true, true, &t->q},
        {"attn_k.weight", kv_dim, h->dim, true, true, &t->k},
        {"attn_v.weight", kv_dim, h->dim, true, true, &t->v},
        {"attn_output.weight", h->dim, q_dim, true, true, &t->o},
        {"ffn_gate.weight", h->ffn_dim, h->dim, true, true, &t->gate},
        {"ffn_up.weight", h->ffn_dim, h->dim, true, true, &t->up},
        {"ffn_down.weight", h->dim, h->ffn_dim, true, true, &t->down},
        {"attn_norm.weight", 1, h->dim, true, true, &t->attn_norm},
        {"ffn_norm.weight", 1, h->dim, true, true, &t->ffn_norm},
        {"attn_q.bias", 1, q_dim, true, a->qkv_bias, &t->q_bias},
        {"attn_k.bias", 1, kv_dim, true, a->qkv_bias, &t->k_bias},
        {"attn_v.bias", 1, kv_dim, true, a->qkv_bias, &t->v_bias},
        {"attn_q_norm.weight", 1, h->head_dim, a->qk_norm, true, &t->q_norm},
        {"attn_k_norm.weight", 1, h->head_dim, a->qk_norm, true, &t->k_norm},
        {"post_attention_norm.weight", 1, h->dim, a->post_norms, true, &t->post_attn_norm},
        {"post_ffw_norm.weight", 1, h->dim, a->post_norms, true, &t->post_ffn_norm},
    };
    char text[FKV_MAX_TENSOR_NAME];
    for (size_t p = 0; p < sizeof parts / sizeof parts[0]; p++) {
        if (!parts[p].known) continue;
        FKV_TRY(find(s, layer_name(text, i, parts[p].name), parts[p].n_rows, parts[p].n_cols, parts[p].needed, parts[p].out));
    }
    return FKV_OK;
}

static fkv_status find_all(search *s, fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    FKV_TRY(find(s, "token_embd.weight", h->n_vocab, h->dim, true, &m->embedding));
    FKV_TRY(find(s, "output.weight", h->n_vocab, h->dim, false, &m->output));
    if (m->output == NULL) m->output = m->embedding;
    FKV_TRY(find(s, "output_norm.weight", 1, h->dim, true, &m->final_norm));
    for (uint32_t i = 0; i < h->n_layers; i++) FKV_TRY(find_layer(s, i, &m->tensors[i]));
    return FKV_OK;
}

/* ---- load ---- */

/* Every tensor of the file was asked for: else a message with the first that was not. */
static fkv_status check_all_known(const search *s) {
    const fkv_model *m = s->model;
    uint32_t n_tensors = fkv_weights_n_tensors(m->weights);
    if (s->n_found == n_tensors) return FKV_OK;
    for (uint32_t i = 0; i < n_tensors; i++) {
        const fkv_tensor *tensor = fkv_weights_tensor(m->weights, i);
        uint32_t at = 0;
        while (at < s->n_found && s->found[at] != tensor) at++;
        FKV_REQUIRE(at < s->n_found, FKV_UNSUPPORTED,
                    "the file has a tensor %s, which a %s model as it is known here does not use: it would not run as trained",
                    tensor->name, m->architecture->name);
    }
    return FKV_OK;
}

static fkv_status find_tensors(fkv_model *m) {
    uint32_t n_layers = m->hparams->n_layers;
    m->tensors = calloc(n_layers, sizeof *m->tensors);
    search s = {.model = m, .found = calloc((size_t)n_layers * MAX_LAYER_TENSORS + MAX_MODEL_TENSORS, sizeof *s.found)};
    fkv_status status = m->tensors != NULL && s.found != NULL
                            ? find_all(&s, m)
                            : fkv_fail(FKV_NO_MEMORY, "no memory for the tables of %u layers", n_layers);
    if (status == FKV_OK) status = check_all_known(&s);
    free(s.found);
    return status;
}

static fkv_status fill_info(fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    const fkv_vocab_source *vocab = fkv_weights_vocab(m->weights);
    fkv_model_info *info = &m->info;
    info->architecture = m->architecture->name;
    info->name = h->name != NULL ? h->name : "";
    info->tokenizer = fkv_tokenizer_name(m->tokenizer);
    info->n_layers = h->n_layers;
    info->dim = h->dim;
    info->ffn_dim = h->ffn_dim;
    info->n_q_heads = h->n_q_heads;
    info->n_kv_heads = h->n_kv_heads;
    info->head_dim = h->head_dim;
    for (uint32_t i = 0; i < h->n_layers; i++)
        info->window = fkv_max_u32(info->window, fkv_architecture_window(m->architecture, h, i));
    info->context = h->context;
    info->n_vocab = h->n_vocab;
    info->bos = vocab->bos;
    info->add_bos = vocab->add_bos && vocab->bos != FKV_NO_TOKEN;
    info->has_chat = fkv_chat_refusal(m->chat)[0] == 0;
    info->n_end = fkv_tokenizer_ends(m->tokenizer, info->end);
    for (uint32_t i = 0; i < fkv_weights_n_tensors(m->weights); i++) {
        const fkv_tensor *tensor = fkv_weights_tensor(m->weights, i);
        info->n_parameters += (uint64_t)tensor->n_rows * tensor->n_cols;
    }
    info->file_bytes = fkv_weights_file_bytes(m->weights);
    FKV_TRY(fkv_weights_id(m->weights, info->weights_id));
    return fkv_architecture_rope_id(m->architecture, h, info->rope_id);
}

static fkv_status open_model(const char *path, fkv_model *m) {
    FKV_TRY(fkv_weights_open(path, &m->weights));
    const fkv_hparams *h = fkv_weights_hparams(m->weights);
    m->hparams = h;
    m->architecture = fkv_architecture_find(h->architecture);
    FKV_REQUIRE(m->architecture != NULL, FKV_UNSUPPORTED, "%s is of architecture %s; known are %s", path, h->architecture,
                fkv_architecture_names());
    FKV_TRY(check_shape(h));
    FKV_TRY(check_numbers(h));
    m->embedding_scale = m->architecture->embedding_sqrt_dim ? sqrtf((float)h->dim) : 1.0f;
    m->query_scale = h->query_scale != 0.0f ? h->query_scale : 1.0f / sqrtf((float)h->head_dim);
    FKV_TRY(fkv_tokenizer_open(fkv_weights_vocab(m->weights), &m->tokenizer));
    FKV_TRY(fkv_chat_open(fkv_weights_vocab(m->weights), m->tokenizer, &m->chat));
    FKV_TRY(fill_info(m));
    FKV_TRY(find_tensors(m));
    FKV_TRY(m->backend->count_weights(m));
    return m->config.plan_only ? FKV_OK : m->backend->load_weights(m);
}

fkv_model_config fkv_model_config_default(void) { return (fkv_model_config){0}; }

fkv_status fkv_model_load(const char *path, const fkv_model_config *config, fkv_model **model) {
    FKV_REQUIRE(path != NULL && config != NULL && model != NULL, FKV_BAD_ARGUMENT,
                "fkv_model_load: path, config or model is NULL");
    FKV_REQUIRE(config->n_threads <= FKV_MAX_THREADS, FKV_BAD_CONFIG, "%u threads: at most %d", config->n_threads,
                FKV_MAX_THREADS);
    const fkv_model_backend *backend = NULL;
    FKV_TRY(fkv_model_backend_find(config->backend, &backend));
    fkv_model *m = calloc(1, sizeof *m);
    FKV_REQUIRE(m != NULL, FKV_NO_MEMORY, "no memory for a model");
    m->config = *config;
    m->backend = backend;
    fkv_status status = open_model(path, m);
    if (status != FKV_OK) {
        fkv_model_close(m);
        return status;
    }
    if (config->log != NULL) {
        char line[256];
        (void)snprintf(
            line, sizeof line, "flatkv %s: %s of %u layers, %" PRIu64 " parameters: %" PRIu64 " bytes packed, %" PRIu64 " mapped",
            fkv_version(), m->info.architecture, m->info.n_layers, m->info.n_parameters, m->info.packed_bytes, m->mapped_bytes);
        config->log(config->log_user, line);
    }
    *model = m;
    return FKV_OK;
}

void fkv_model_close(fkv_model *model) {
    if (model == NULL) return;
    model->backend->unload_weights(model);
    fkv_chat_close(model->chat);
    fkv_tokenizer_close(model->tokenizer);
    fkv_weights_close(model->weights);
    free(model->tensors);
    free(model);
}

const fkv_model_info *fkv_model_about(const fkv_model *model) { return model != NULL ? &model->info : NULL; }

/* ---- tokens: the tokenizer's answers, behind a check for NULL ---- */

fkv_status fkv_tokenize(const fkv_model *model, const char *text, size_t n_bytes, unsigned flags, uint32_t *tokens,
                        size_t capacity, size_t *n_tokens) {
    FKV_REQUIRE(model != NULL && (text != NULL || n_bytes == 0) && (tokens != NULL || capacity == 0) && n_tokens != NULL,
                FKV_BAD_ARGUMENT, "fkv_tokenize: model, text, tokens or n_tokens is NULL");
    return fkv_tokenizer_encode(model->tokenizer, text != NULL ? text : "", NULL, n_bytes, flags, tokens, capacity, n_tokens);
}

const char *fkv_token_text(const fkv_model *model, uint32_t token, bool special, size_t *n_bytes) {
    size_t unasked = 0;
    size_t *n = n_bytes != NULL ? n_bytes : &unasked;
    *n = 0;
    return model != NULL ? fkv_tokenizer_text(model->tokenizer, token, special, n) : "";
}

/* ---- chat ---- */

fkv_status fkv_chat_tokenize(const fkv_model *model, const char *conversation, size_t n_bytes, const int64_t *now,
                             uint32_t *tokens, size_t capacity, size_t *n_tokens) {
    FKV_REQUIRE(model != NULL && conversation != NULL && (tokens != NULL || capacity == 0) && n_tokens != NULL, FKV_BAD_ARGUMENT,
                "fkv_chat_tokenize: model, conversation, tokens or n_tokens is NULL");
    fkv_rendered text = {0};
    FKV_TRY(fkv_chat_run(model->chat, conversation, n_bytes, now, &text));
    fkv_status status = fkv_tokenizer_encode(model->tokenizer, text.text, text.given, text.n_bytes, FKV_TOKENIZE_SPECIAL, tokens,
                                             capacity, n_tokens);
    fkv_rendered_close(&text);
    return status;
}

fkv_status fkv_chat_render(const fkv_model *model, const char *conversation, size_t n_bytes, const int64_t *now, char *text,
                           uint8_t *given, size_t capacity, size_t *n_text) {
    FKV_REQUIRE(model != NULL && conversation != NULL && (text != NULL || capacity == 0) && n_text != NULL, FKV_BAD_ARGUMENT,
                "fkv_chat_render: model, conversation, text or n_text is NULL");
    fkv_rendered rendered = {0};
    FKV_TRY(fkv_chat_run(model->chat, conversation, n_bytes, now, &rendered));
    size_t n = rendered.n_bytes < capacity ? rendered.n_bytes : capacity;
    *n_text = rendered.n_bytes;
    if (n > 0) memcpy(text, rendered.text, n);
    if (n > 0 && given != NULL) memcpy(given, rendered.given, n);
    fkv_rendered_close(&rendered);
    return FKV_OK;
}

fkv_status fkv_tokenize_given(const fkv_model *model, const char *text, const uint8_t *given, size_t n_bytes, uint32_t *tokens,
                              size_t capacity, size_t *n_tokens) {
    FKV_REQUIRE(model != NULL && text != NULL && given != NULL && (tokens != NULL || capacity == 0) && n_tokens != NULL,
                FKV_BAD_ARGUMENT, "fkv_tokenize_given: model, text, given, tokens or n_tokens is NULL");
    return fkv_tokenizer_encode(model->tokenizer, text, given, n_bytes, FKV_TOKENIZE_SPECIAL, tokens, capacity, n_tokens);
}
