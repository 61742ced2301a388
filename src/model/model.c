/* From a weight file to a model in memory. See model.h.
 *
 * One walk over everything an architecture needs is done twice: first it finds each tensor, checks its shape and counts the
 * bytes; then, in a map of exactly that size, it repacks. Rows are set by worker threads, a panel each; what was repacked is
 * released from the mapped file at once, so that a model is never in memory twice.
 *
 * Owns the checks of a model against itself: sizes that cannot be, tensors that are missing, misshapen, or not known. A tensor
 * that nobody asked for would mean a model that is not computed as it was trained, so it is refused.
 */
#include "model.h"

#include "../base/carve.h"
#include "../base/memory.h"
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
    FKV_REQUIRE(isfinite(h->rms_eps) && h->rms_eps >= 0.0f, FKV_UNSUPPORTED, "an epsilon of %g in norms", (double)h->rms_eps);
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

/* ---- the walk ---- */

typedef struct load {
    fkv_model *model;
    fkv_carve carve; /* base NULL: the walk that counts */
    fkv_workers *workers;
    uint8_t *scratch; /* [n_threads, scratch_bytes], of the walk that repacks */
    uint64_t scratch_bytes;
    const fkv_tensor **found; /* [n_found] */
    uint32_t n_found;
} load;

/* The tensor of a name, of exactly that shape; *tensor is NULL where it is not there and need not be. */
static fkv_status find(load *l, const char *name, uint32_t n_rows, uint32_t n_cols, bool needed, const fkv_tensor **tensor) {
    const fkv_tensor *found = fkv_weights_find(l->model->weights, name);
    *tensor = found;
    if (found == NULL) {
        FKV_REQUIRE(!needed, FKV_FILE_DAMAGED, "the file has no tensor %s, which a %s model needs", name,
                    l->model->architecture->name);
        return FKV_OK;
    }
    l->found[l->n_found++] = found;
    FKV_REQUIRE(found->n_rows == n_rows && found->n_cols == n_cols, FKV_FILE_DAMAGED,
                "tensor %s is %u x %u and the sizes the file states make it %u x %u", name, found->n_rows, found->n_cols, n_rows,
                n_cols);
    return FKV_OK;
}

static const char *layer_name(char text[FKV_MAX_TENSOR_NAME], uint32_t layer, const char *name) {
    (void)snprintf(text, FKV_MAX_TENSOR_NAME, "blk.%" PRIu32 ".%s", layer, name);
    return text;
}

static fkv_status take_vector(load *l, const char *name, uint32_t n, bool needed, float plus, float **out) {
    const fkv_tensor *tensor = NULL;
    FKV_TRY(find(l, name, 1, n, needed, &tensor));
    *out = NULL;
    if (tensor == NULL) return FKV_OK;
    *out = FKV_CARVE(&l->carve, n, float);
    if (l->carve.base == NULL) return FKV_OK;
    fkv_tensor_row_floats(tensor, 0, *out);
    for (uint32_t i = 0; i < n; i++) (*out)[i] += plus;
    return FKV_OK;
}

/* ---- matrices ---- */

typedef struct repack_job {
    const fkv_tensor *tensor;
    fkv_matrix *matrix;
    uint8_t *scratch;
    uint64_t scratch_bytes;
} repack_job;

/* One row of either form, for the widest columns. Zeroed before each matrix: padded columns are zeros of any float type. */
static uint64_t row_scratch_bytes(uint32_t n_cols) {
    return fkv_align_up((uint64_t)n_cols * (sizeof(float) + 1), FKV_CARVE_ALIGN);
}

static void repack_panel(void *context, uint32_t item, uint32_t thread) {
    const repack_job *j = context;
    const fkv_tensor *tensor = j->tensor;
    fkv_matrix *matrix = j->matrix;
    uint8_t *scratch = j->scratch + thread * j->scratch_bytes;
    uint32_t end = fkv_min_u32((item + 1) * FKV_PANEL_ROWS, tensor->n_rows);
    for (uint32_t row = item * FKV_PANEL_ROWS; row < end; row++) {
        if (matrix->group == 0) {
            memcpy(scratch, tensor->data + row * tensor->row_bytes, tensor->row_bytes);
            fkv_matrix_set_floats(matrix, row, scratch);
            continue;
        }
        float *scales = (float *)(void *)scratch;
        float *biases = scales + matrix->n_cols / matrix->group;
        uint8_t *codes = (uint8_t *)(biases + matrix->n_cols / matrix->group);
        fkv_tensor_row_codes(tensor, row, codes, scales, biases);
        fkv_matrix_set_codes(matrix, row, codes, scales, biases);
    }
}

static void repack(load *l, const fkv_tensor *tensor, fkv_matrix *matrix) {
    memset(l->scratch, 0, fkv_workers_count(l->workers) * l->scratch_bytes);
    repack_job job = {tensor, matrix, l->scratch, l->scratch_bytes};
    fkv_workers_run(l->workers, repack_panel, &job, fkv_ceil_div(tensor->n_rows, FKV_PANEL_ROWS));
    fkv_weights_release(l->model->weights, tensor);
}

static fkv_status take_found(load *l, const fkv_tensor *tensor, fkv_matrix *matrix) {
    uint32_t group = 0;
    fkv_matrix_kind kind = fkv_tensor_matrix_kind(tensor, &group);
    FKV_TRY(fkv_matrix_make(kind, group, tensor->n_rows, fkv_model_pad(tensor->n_cols), matrix));
    matrix->panels = fkv_carve_take(&l->carve, 1, fkv_matrix_bytes(matrix));
    uint64_t row = row_scratch_bytes(matrix->n_cols);
    if (row > l->scratch_bytes) l->scratch_bytes = row;
    if (l->carve.base != NULL) repack(l, tensor, matrix);
    return FKV_OK;
}

static fkv_status take_matrix(load *l, uint32_t layer, const char *name, uint32_t n_rows, uint32_t n_cols, fkv_matrix *matrix) {
    const fkv_tensor *tensor = NULL;
    char text[FKV_MAX_TENSOR_NAME];
    FKV_TRY(find(l, layer_name(text, layer, name), n_rows, n_cols, true, &tensor));
    return take_found(l, tensor, matrix);
}

/* ---- what a model is made of ---- */

static fkv_status take_layer_matrices(load *l, uint32_t i, fkv_model_layer *layer) {
    const fkv_hparams *h = l->model->hparams;
    uint32_t q_dim = h->n_q_heads * h->head_dim;
    uint32_t kv_dim = h->n_kv_heads * h->head_dim;
    FKV_TRY(take_matrix(l, i, "attn_q.weight", q_dim, h->dim, &layer->q));
    FKV_TRY(take_matrix(l, i, "attn_k.weight", kv_dim, h->dim, &layer->k));
    FKV_TRY(take_matrix(l, i, "attn_v.weight", kv_dim, h->dim, &layer->v));
    FKV_TRY(take_matrix(l, i, "attn_output.weight", h->dim, q_dim, &layer->o));
    FKV_TRY(take_matrix(l, i, "ffn_gate.weight", h->ffn_dim, h->dim, &layer->gate));
    FKV_TRY(take_matrix(l, i, "ffn_up.weight", h->ffn_dim, h->dim, &layer->up));
    return take_matrix(l, i, "ffn_down.weight", h->dim, h->ffn_dim, &layer->down);
}

static fkv_status take_layer_vectors(load *l, uint32_t i, fkv_model_layer *layer) {
    const fkv_hparams *h = l->model->hparams;
    const fkv_architecture *a = l->model->architecture;
    uint32_t kv_dim = h->n_kv_heads * h->head_dim;
    float one = h->norm_plus_one ? 1.0f : 0.0f;
    const struct {
        const char *name;
        uint32_t n;
        bool known; /* to the architecture */
        bool needed;
        float plus;
        float **out;
    } vectors[] = {
        {"attn_norm.weight", h->dim, true, true, one, &layer->attn_norm},
        {"ffn_norm.weight", h->dim, true, true, one, &layer->ffn_norm},
        {"attn_q.bias", h->n_q_heads * h->head_dim, true, a->qkv_bias, 0.0f, &layer->q_bias},
        {"attn_k.bias", kv_dim, true, a->qkv_bias, 0.0f, &layer->k_bias},
        {"attn_v.bias", kv_dim, true, a->qkv_bias, 0.0f, &layer->v_bias},
        {"attn_q_norm.weight", h->head_dim, a->qk_norm, true, one, &layer->q_norm},
        {"attn_k_norm.weight", h->head_dim, a->qk_norm, true, one, &layer->k_norm},
        {"post_attention_norm.weight", h->dim, a->post_norms, true, one, &layer->post_attn_norm},
        {"post_ffw_norm.weight", h->dim, a->post_norms, true, one, &layer->post_ffn_norm},
    };
    char text[FKV_MAX_TENSOR_NAME];
    for (size_t v = 0; v < sizeof vectors / sizeof vectors[0]; v++) {
        if (!vectors[v].known) continue;
        FKV_TRY(take_vector(l, layer_name(text, i, vectors[v].name), vectors[v].n, vectors[v].needed, vectors[v].plus,
                            vectors[v].out));
    }
    return FKV_OK;
}

static fkv_status take_all(load *l) {
    fkv_model *m = l->model;
    const fkv_hparams *h = m->hparams;
    const fkv_tensor *embedding = NULL;
    const fkv_tensor *output = NULL;
    l->n_found = 0;
    FKV_TRY(find(l, "token_embd.weight", h->n_vocab, h->dim, true, &embedding));
    FKV_TRY(find(l, "output.weight", h->n_vocab, h->dim, false, &output));
    m->embedding = output != NULL ? embedding : NULL;
    m->mapped_bytes = output != NULL ? embedding->n_rows * embedding->row_bytes : 0;
    FKV_TRY(take_found(l, output != NULL ? output : embedding, &m->output));
    FKV_TRY(take_vector(l, "output_norm.weight", h->dim, true, h->norm_plus_one ? 1.0f : 0.0f, &m->final_norm));
    for (uint32_t i = 0; i < h->n_layers; i++) {
        FKV_TRY(take_layer_matrices(l, i, &m->layers[i]));
        FKV_TRY(take_layer_vectors(l, i, &m->layers[i]));
    }
    return FKV_OK;
}

/* ---- load ---- */

/* Every tensor of the file was asked for: else a message with the first that was not. */
static fkv_status check_all_known(const load *l) {
    const fkv_model *m = l->model;
    uint32_t n_tensors = fkv_weights_n_tensors(m->weights);
    if (l->n_found == n_tensors) return FKV_OK;
    for (uint32_t i = 0; i < n_tensors; i++) {
        const fkv_tensor *tensor = fkv_weights_tensor(m->weights, i);
        uint32_t at = 0;
        while (at < l->n_found && l->found[at] != tensor) at++;
        FKV_REQUIRE(at < l->n_found, FKV_UNSUPPORTED,
                    "the file has a tensor %s, which a %s model as it is known here does not use: it would not run as trained",
                    tensor->name, m->architecture->name);
    }
    return FKV_OK;
}

static fkv_status check_fits(uint64_t bytes) {
    const char *source = NULL;
    uint64_t available = fkv_memory_available(&source);
    FKV_REQUIRE(bytes <= available, FKV_NO_MEMORY, "the weights take %" PRIu64 " bytes of memory and %s allows %" PRIu64, bytes,
                source, available);
    return FKV_OK;
}

/* The walk that repacks, with threads and scratch of its own for as long as it takes. */
static fkv_status repack_all(load *l, uint32_t n_threads) {
    void *place = aligned_alloc(FKV_CARVE_ALIGN, (size_t)fkv_align_up(fkv_workers_bytes(n_threads), FKV_CARVE_ALIGN));
    l->scratch = aligned_alloc(FKV_CARVE_ALIGN, (size_t)(n_threads * l->scratch_bytes));
    fkv_status status = FKV_OK;
    if (place == NULL || l->scratch == NULL) {
        status = fkv_fail(FKV_NO_MEMORY, "no memory to repack weights with %u threads", n_threads);
    } else {
        memset(place, 0, (size_t)fkv_workers_bytes(n_threads));
        status = fkv_workers_open(place, n_threads, &l->workers);
    }
    if (status == FKV_OK) {
        status = take_all(l);
        fkv_workers_close(l->workers);
    }
    free(l->scratch);
    free(place);
    return status;
}

static fkv_status load_weights(load *l) {
    fkv_model *m = l->model;
    FKV_TRY(take_all(l));
    FKV_TRY(check_all_known(l));
    FKV_REQUIRE(!l->carve.overflow, FKV_UNSUPPORTED, "the weights of this model do not fit 64 bits");
    uint64_t bytes = fkv_align_up(l->carve.used, fkv_os_page_bytes());
    m->info.packed_bytes = bytes;
    if (m->config.plan_only) return FKV_OK;
    FKV_TRY(check_fits(bytes));
    FKV_TRY(fkv_map_open(bytes, true, &m->packed));
    l->carve = (fkv_carve){.base = m->packed, .size = bytes};
    return repack_all(l, m->config.n_threads != 0 ? m->config.n_threads : fkv_cpu_count());
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
    info->has_chat = fkv_tokenizer_has_chat(m->tokenizer);
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
    FKV_TRY(fill_info(m));
    m->layers = calloc(h->n_layers, sizeof *m->layers);
    load l = {.model = m, .found = calloc((size_t)h->n_layers * MAX_LAYER_TENSORS + MAX_MODEL_TENSORS, sizeof *l.found)};
    fkv_status status = m->layers != NULL && l.found != NULL
                            ? load_weights(&l)
                            : fkv_fail(FKV_NO_MEMORY, "no memory for the tables of %u layers", h->n_layers);
    free(l.found);
    return status;
}

fkv_model_config fkv_model_config_default(void) { return (fkv_model_config){0}; }

fkv_status fkv_model_load(const char *path, const fkv_model_config *config, fkv_model **model) {
    FKV_REQUIRE(path != NULL && config != NULL && model != NULL, FKV_BAD_ARGUMENT,
                "fkv_model_load: path, config or model is NULL");
    FKV_REQUIRE(config->n_threads <= FKV_MAX_THREADS, FKV_BAD_CONFIG, "%u threads: at most %d", config->n_threads,
                FKV_MAX_THREADS);
    fkv_model *m = calloc(1, sizeof *m);
    FKV_REQUIRE(m != NULL, FKV_NO_MEMORY, "no memory for a model");
    m->config = *config;
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
    fkv_map_close(model->packed, model->info.packed_bytes);
    fkv_tokenizer_close(model->tokenizer);
    fkv_weights_close(model->weights);
    free(model->layers);
    free(model);
}

const fkv_model_info *fkv_model_about(const fkv_model *model) { return model != NULL ? &model->info : NULL; }

void fkv_model_embed(const fkv_model *model, uint32_t token, float *out) {
    if (model->embedding != NULL)
        fkv_tensor_row_floats(model->embedding, token, out);
    else
        fkv_matrix_get_row(&model->output, token, out);
    float scale = model->embedding_scale;
    for (uint32_t i = 0; scale != 1.0f && i < model->hparams->dim; i++) out[i] *= scale;
}

/* ---- tokens: the tokenizer's answers, behind a check for NULL ---- */

fkv_status fkv_tokenize(const fkv_model *model, const char *text, size_t n_bytes, unsigned flags, uint32_t *tokens,
                        size_t capacity, size_t *n_tokens) {
    FKV_REQUIRE(model != NULL && (text != NULL || n_bytes == 0) && (tokens != NULL || capacity == 0) && n_tokens != NULL,
                FKV_BAD_ARGUMENT, "fkv_tokenize: model, text, tokens or n_tokens is NULL");
    return fkv_tokenizer_encode(model->tokenizer, text != NULL ? text : "", n_bytes, flags, tokens, capacity, n_tokens);
}

const char *fkv_token_text(const fkv_model *model, uint32_t token, bool special, size_t *n_bytes) {
    size_t unasked = 0;
    size_t *n = n_bytes != NULL ? n_bytes : &unasked;
    *n = 0;
    return model != NULL ? fkv_tokenizer_text(model->tokenizer, token, special, n) : "";
}

fkv_status fkv_chat_frame_of(const fkv_model *model, const char *role, bool answer, fkv_chat_frame *frame) {
    FKV_REQUIRE(model != NULL && role != NULL && frame != NULL, FKV_BAD_ARGUMENT,
                "fkv_chat_frame_of: model, role or frame is NULL");
    return fkv_tokenizer_chat_frame(model->tokenizer, role, answer, frame);
}
