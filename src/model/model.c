/* Loads a model: checks its hyperparameters (hparams_check.c), finds its tensors (model_tensors.c), opens its vocabulary, and
 * passes the weights to the backend. See model.h. */
#include "model.h"

#include "files/tensor_rows.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Reads the learned sink logits of all layers and converts them to floats for the cache configuration. */
static fkv_status read_sinks(fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    const bool is_config = fkv_weights_is_config(m->weights); /* without weights, the sink logits stay 0 */
    if (!h->features.sinks) return FKV_OK;
    m->sinks = calloc((size_t)h->n_layers * h->n_q_heads, sizeof *m->sinks);
    FKV_REQUIRE(m->sinks != NULL, FKV_NO_MEMORY, "out of memory allocating the sinks of %u layers", h->n_layers);
    for (uint32_t i = 0; !is_config && i < h->n_layers; i++)
        if (m->tensors[i].sinks != NULL) fkv_tensor_row_floats(m->tensors[i].sinks, 0, m->sinks + (size_t)i * h->n_q_heads);
    return FKV_OK;
}

/* Opens the tokenizer and the chat template, unless config.json is the only file, and fills in the properties that do not
 * depend on tensors. */
static fkv_status open_vocabulary(fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    const fkv_vocab_source *vocab = fkv_weights_vocab(m->weights);
    fkv_model_info *info = &m->info;
    info->architecture = h->architecture;
    info->name = h->name != NULL ? h->name : "";
    info->tokenizer = "";
    /* chunked attention is supported only within the first chunk, so the context is limited to the chunk size */
    info->context = h->attention_chunk != 0 ? fkv_min_u32(h->context, h->attention_chunk) : h->context;
    info->n_vocab = h->n_vocab;
    info->bos = vocab->bos;
    if (fkv_weights_is_config(m->weights)) return FKV_OK;
    FKV_TRY(fkv_tokenizer_open(vocab, &m->tokenizer));
    FKV_TRY(fkv_chat_open(vocab, m->tokenizer, &m->chat));
    info->tokenizer = fkv_tokenizer_name(m->tokenizer);
    info->add_bos = vocab->add_bos && vocab->bos != FKV_NO_TOKEN;
    info->has_chat = fkv_chat_refusal(m->chat)[0] == 0;
    info->n_end = fkv_tokenizer_ends(m->tokenizer, info->end);
    info->file_bytes = fkv_weights_file_bytes(m->weights);
    return fkv_weights_id(m->weights, info->weights_id);
}

static fkv_status fill_info(fkv_model *m) {
    const fkv_hparams *h = m->hparams;
    fkv_model_info *info = &m->info;
    info->n_layers = h->n_layers;
    info->dim = h->dim;
    info->ffn_dim = h->ffn_dim;
    info->n_q_heads = h->n_q_heads;
    info->n_kv_heads = h->n_kv_heads;
    info->head_dim = h->head_dim;
    info->latent_dim = h->latent.dim;
    for (uint32_t i = 0; i < h->n_layers; i++) info->window = fkv_max_u32(info->window, fkv_architecture_window(h, i));
    for (uint32_t i = 0; i < h->n_layers; i++)
        if (fkv_architecture_is_recurrent(h, i)) info->state_bytes += fkv_architecture_state_bytes(h);
    for (uint32_t i = 0; i < fkv_weights_n_tensors(m->weights); i++) {
        const fkv_tensor *tensor = fkv_weights_tensor(m->weights, i);
        info->n_parameters += (uint64_t)tensor->n_rows * tensor->n_cols;
    }
    return fkv_architecture_rope_id(h, false, info->rope_id);
}

static fkv_status open_model(const char *path, fkv_model *m) {
    FKV_TRY(fkv_weights_open(path, &m->weights));
    const fkv_hparams *h = fkv_weights_hparams(m->weights);
    m->hparams = h;
    const bool is_config = fkv_weights_is_config(m->weights);
    m->info.config_only = is_config;
    FKV_REQUIRE(
        !is_config || m->config.plan_only, FKV_UNSUPPORTED,
        "%s: a config.json without weights can only be used for planning (plan_only); pass the folder that contains the weights",
        path);
    FKV_REQUIRE(is_config || fkv_weights_n_tensors(m->weights) > 0 || fkv_weights_vocab(m->weights)->model.size > 0,
                FKV_UNSUPPORTED, "%s contains neither tensors nor a tokenizer (architecture %s)", path, h->architecture);
    if (!is_config && fkv_weights_n_tensors(m->weights) == 0)
        return open_vocabulary(m); /* the file has only a vocabulary: no runner can be opened, so hyperparameters need no check */
    m->architecture = fkv_architecture_find(h->architecture);
    const char *why = fkv_architecture_refusal(h->architecture);
    FKV_REQUIRE(m->architecture != NULL || why == NULL, FKV_UNSUPPORTED, "%s has unsupported architecture %s: %s", path,
                h->architecture, why);
    FKV_REQUIRE(m->architecture != NULL, FKV_UNSUPPORTED, "%s has unsupported architecture %s; supported architectures are %s",
                path, h->architecture, fkv_architecture_names());
    FKV_TRY(fkv_hparams_check(h));
    m->embedding_scale = h->features.embedding_sqrt_dim ? sqrtf((float)h->dim) : 1.0f;
    if (h->embedding_scale != 0.0f) m->embedding_scale = h->embedding_scale;
    m->residual_scale = h->residual_scale != 0.0f ? h->residual_scale : 1.0f;
    m->query_scale = h->query_scale != 0.0f ? h->query_scale : 1.0f / sqrtf((float)h->head_dim);
    FKV_TRY(open_vocabulary(m));
    FKV_TRY(fill_info(m));
    FKV_TRY(fkv_model_find_tensors(m));
    FKV_TRY(read_sinks(m));
    FKV_TRY(m->backend->count_weights(m));
    return m->config.plan_only ? FKV_OK : m->backend->load_weights(m);
}

fkv_model_config fkv_model_config_default(void) { return (fkv_model_config){0}; }

fkv_status fkv_model_load(const char *path, const fkv_model_config *config, fkv_model **model) {
    FKV_REQUIRE(path != NULL && config != NULL && model != NULL, FKV_BAD_ARGUMENT,
                "fkv_model_load: path, config or model is NULL");
    FKV_REQUIRE(config->n_threads <= FKV_MAX_THREADS, FKV_BAD_CONFIG, "n_threads is %u: at most %d threads are supported",
                config->n_threads, FKV_MAX_THREADS);
    const fkv_model_backend *backend = NULL;
    FKV_TRY(fkv_model_backend_find(config->backend, &backend));
    fkv_model *m = calloc(1, sizeof *m);
    FKV_REQUIRE(m != NULL, FKV_NO_MEMORY, "out of memory while allocating the model");
    m->config = *config;
    m->backend = backend;
    m->path = strdup(path);
    fkv_status status =
        m->path != NULL ? open_model(path, m) : fkv_fail(FKV_NO_MEMORY, "out of memory while allocating the model");
    if (status != FKV_OK) {
        fkv_model_close(m);
        return status;
    }
    if (config->log != NULL) {
        char line[256];
        (void)snprintf(line, sizeof line,
                       "flatkv %s: %s model with %u layers and %llu parameters, %llu bytes packed and %llu mapped", fkv_version(),
                       m->info.architecture, m->info.n_layers, (unsigned long long)m->info.n_parameters,
                       (unsigned long long)m->info.packed_bytes, (unsigned long long)m->mapped_bytes);
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
    free(model->sinks);
    free(model->xielu);
    free(model->views);
    free(model->experts);
    free(model->path);
    free(model);
}

const fkv_model_info *fkv_model_about(const fkv_model *model) { return model != NULL ? &model->info : NULL; }

fkv_status fkv_model_layer_about(const fkv_model *model, uint32_t layer, fkv_model_layer *info) {
    FKV_REQUIRE(model != NULL && info != NULL, FKV_BAD_ARGUMENT, "fkv_model_layer_about: model or info is NULL");
    FKV_REQUIRE(layer < model->info.n_layers, FKV_BAD_ARGUMENT, "invalid layer %u: the model has %u layers", layer,
                model->info.n_layers);
    const fkv_hparams *h = model->hparams;
    const fkv_layer_shape *s = &h->shapes[layer];
    *info = (fkv_model_layer){.kv_layer = s->kv_layer};
    if (fkv_architecture_has_attention(h, layer)) {
        info->n_kv_heads = s->n_kv_heads;
        info->head_dim = s->head_dim;
        info->rope_dim = h->latent.rope_dim;
        info->window = fkv_architecture_window(h, layer);
    }
    if (fkv_architecture_is_recurrent(h, layer)) info->state_bytes = fkv_architecture_state_bytes(h);
    return FKV_OK;
}

/* ---- tokens ---- */

static fkv_status require_tokenizer(const fkv_model *model) {
    FKV_REQUIRE(model->tokenizer != NULL, FKV_UNSUPPORTED,
                "%s: the model was loaded from a config.json alone and has no tokenizer", model->path);
    return FKV_OK;
}

fkv_status fkv_tokenize(const fkv_model *model, const char *text, size_t n_bytes, unsigned flags, uint32_t *tokens,
                        size_t capacity, size_t *n_tokens) {
    FKV_REQUIRE(model != NULL && (text != NULL || n_bytes == 0) && (tokens != NULL || capacity == 0) && n_tokens != NULL,
                FKV_BAD_ARGUMENT, "fkv_tokenize: model, text, tokens or n_tokens is NULL");
    FKV_TRY(require_tokenizer(model));
    return fkv_tokenizer_encode(model->tokenizer, text != NULL ? text : "", NULL, n_bytes, flags, tokens, capacity, n_tokens);
}

const char *fkv_token_text(const fkv_model *model, uint32_t token, bool special, size_t *n_bytes) {
    size_t ignored = 0;
    size_t *n = n_bytes != NULL ? n_bytes : &ignored;
    *n = 0;
    return model != NULL && model->tokenizer != NULL ? fkv_tokenizer_text(model->tokenizer, token, special, n) : "";
}

/* ---- chat ---- */

fkv_status fkv_chat_tokenize(const fkv_model *model, const char *conversation, size_t n_bytes, const int64_t *now,
                             uint32_t *tokens, size_t capacity, size_t *n_tokens) {
    FKV_REQUIRE(model != NULL && conversation != NULL && (tokens != NULL || capacity == 0) && n_tokens != NULL, FKV_BAD_ARGUMENT,
                "fkv_chat_tokenize: model, conversation, tokens or n_tokens is NULL");
    FKV_TRY(require_tokenizer(model));
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
    FKV_TRY(require_tokenizer(model));
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
                FKV_BAD_ARGUMENT,
                "fkv_tokenize_given: argument \"model\", \"text\", \"given\", \"tokens\" or \"n_tokens\" is NULL");
    FKV_TRY(require_tokenizer(model));
    return fkv_tokenizer_encode(model->tokenizer, text, given, n_bytes, FKV_TOKENIZE_SPECIAL, tokens, capacity, n_tokens);
}
