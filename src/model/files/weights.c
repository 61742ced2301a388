/* Format-independent part of weight files: mappings, tensor tables, lookup by name, identity, and release of mapped pages.
 *
 * This file performs the checks that apply to all formats: tensor shapes must match the block size of their type, tensor sizes
 * must fit in 64 bits, names must be unique, and tensors must not overlap. Files are mapped, not copied. If a file is truncated
 * while it is open, accesses raise SIGBUS. If its contents change, weights change, but no access is out of bounds.
 */
#include "weights_state.h"

#include "../../base/checksum.h"
#include "../../base/memory.h"
#include "linear_codes.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { SAMPLE_BYTES = 1024 }; /* number of bytes hashed at the start, in the middle and at the end of each tensor */

static const fkv_tensor_format FORMATS[FKV_N_TENSOR_TYPES] = {
    [FKV_TENSOR_F32] = {"F32", 1, 4},
    [FKV_TENSOR_F16] = {"F16", 1, 2},
    [FKV_TENSOR_BF16] = {"BF16", 1, 2},
    [FKV_TENSOR_Q4_0] = {"Q4_0", 32, 18},
    [FKV_TENSOR_Q4_1] = {"Q4_1", 32, 20},
    [FKV_TENSOR_Q5_0] = {"Q5_0", 32, 22},
    [FKV_TENSOR_Q8_0] = {"Q8_0", 32, 34},
    [FKV_TENSOR_Q4_K] = {"Q4_K", 256, 144},
    [FKV_TENSOR_Q6_K] = {"Q6_K", 256, 210},
    [FKV_TENSOR_Q5_1] = {"Q5_1", 32, 24},
    [FKV_TENSOR_Q2_K] = {"Q2_K", 256, 84},
    [FKV_TENSOR_Q3_K] = {"Q3_K", 256, 110},
    [FKV_TENSOR_Q5_K] = {"Q5_K", 256, 176},
    [FKV_TENSOR_IQ4_NL] = {"IQ4_NL", 32, 18},
    [FKV_TENSOR_IQ4_XS] = {"IQ4_XS", 256, 136},
    [FKV_TENSOR_MXFP4] = {"MXFP4", 32, 17},
    [FKV_TENSOR_NVFP4] = {"NVFP4", 64, 36},
    [FKV_TENSOR_IQ1_S] = {"IQ1_S", 256, 50},
    [FKV_TENSOR_IQ1_M] = {"IQ1_M", 256, 56},
    [FKV_TENSOR_IQ2_XXS] = {"IQ2_XXS", 256, 66},
    [FKV_TENSOR_IQ2_XS] = {"IQ2_XS", 256, 74},
    [FKV_TENSOR_IQ2_S] = {"IQ2_S", 256, 82},
    [FKV_TENSOR_IQ3_XXS] = {"IQ3_XXS", 256, 98},
    [FKV_TENSOR_IQ3_S] = {"IQ3_S", 256, 110},
    [FKV_TENSOR_TQ1_0] = {"TQ1_0", 256, 54},
    [FKV_TENSOR_TQ2_0] = {"TQ2_0", 256, 66},
    [FKV_TENSOR_MLX_AFFINE] = {"MLX affine", 1, 1},
    [FKV_TENSOR_MLX_MXFP4] = {"MLX mxfp4", 1, 1},
    [FKV_TENSOR_MLX_NVFP4] = {"MLX nvfp4", 1, 1},
    [FKV_TENSOR_MLX_MXFP8] = {"MLX mxfp8", 1, 1},
    [FKV_TENSOR_AWQ] = {"AWQ", 1, 1},
    [FKV_TENSOR_GPTQ] = {"GPTQ", 1, 1},
    [FKV_TENSOR_FP8] = {"FP8", 1, 1},
    [FKV_TENSOR_U8] = {"U8", 1, 1},
    [FKV_TENSOR_U32] = {"U32", 1, 4},
    [FKV_TENSOR_I32] = {"I32", 1, 4},
    [FKV_TENSOR_E4M3] = {"F8_E4M3", 1, 1},
};

const fkv_tensor_format *fkv_tensor_format_of(fkv_tensor_type type) { return &FORMATS[type]; }
const char *fkv_tensor_type_name(fkv_tensor_type type) { return FORMATS[type].name; }

/* ---- construction ---- */

bool fkv_ends_with(const char *text, const char *end) {
    const size_t n = strlen(text);
    return n >= strlen(end) && strcmp(text + n - strlen(end), end) == 0;
}

fkv_weights *fkv_weights_new(void) {
    fkv_weights *weights = calloc(1, sizeof *weights);
    if (weights == NULL) return NULL;
    weights->hparams =
        (fkv_hparams){.architecture = weights->architecture, .name = weights->name, .swiglu_alpha = 1.702f, .swiglu_limit = 7};
    weights->hparams.rope = (fkv_rope){.factor = 1, .low_freq = 1, .high_freq = 4, .beta_fast = 32, .beta_slow = 1};
    weights->hparams.local_rope = weights->hparams.rope;
    weights->vocab = fkv_vocab_source_default();
    return weights;
}

fkv_vocab_target fkv_weights_vocab_target(fkv_weights *weights) {
    return (fkv_vocab_target){.vocab = &weights->vocab, .arena = &weights->arena, .n_vocab = weights->hparams.n_vocab};
}

fkv_status fkv_weights_map(fkv_weights *weights, const char *path, fkv_mapped *mapped) {
    return fkv_file_arena_map(&weights->arena, path, mapped);
}

void *fkv_weights_keep(fkv_weights *weights, size_t bytes) { return fkv_file_arena_alloc(&weights->arena, bytes); }

fkv_status fkv_weights_reserve(fkv_weights *weights, uint64_t n_more, fkv_tensor **first) {
    FKV_REQUIRE(n_more <= FKV_MAX_TENSORS - weights->n_tensors, FKV_UNSUPPORTED, "the model has more than %d tensors",
                FKV_MAX_TENSORS);
    const size_t n = weights->n_tensors + (size_t)n_more;
    *first = weights->tensors;
    if (n == 0) return FKV_OK;
    fkv_tensor *tensors = realloc(weights->tensors, n * sizeof *tensors);
    FKV_REQUIRE(tensors != NULL, FKV_NO_MEMORY, "out of memory allocating a table of %zu tensors", n);
    weights->tensors = tensors;
    *first = tensors + weights->n_tensors;
    if (n_more > 0) memset(*first, 0, (size_t)n_more * sizeof *tensors);
    return FKV_OK;
}

fkv_status fkv_tensor_describe(fkv_tensor *tensor, fkv_bytes name, fkv_tensor_type type, const uint64_t *dims, uint32_t n_dims,
                               const char *path, uint64_t *bytes) {
    const fkv_tensor_format *format = &FORMATS[type];
    FKV_REQUIRE(name.size < FKV_MAX_TENSOR_NAME && fkv_is_plain(name), FKV_FILE_DAMAGED,
                "%s: invalid tensor name of %zu bytes, expected 1 to %d printable characters: '%s'", path, name.size,
                FKV_MAX_TENSOR_NAME - 1, fkv_show(name).text);
    memcpy(tensor->name, name.data, name.size);
    tensor->name[name.size] = 0;
    tensor->type = type;
    uint64_t n_rows = 1;
    for (uint32_t d = 0; d < n_dims; d++)
        FKV_REQUIRE(dims[d] > 0 && dims[d] <= UINT32_MAX, FKV_FILE_DAMAGED, "%s: tensor %s has an invalid dimension of %llu",
                    path, tensor->name, (unsigned long long)dims[d]);
    for (uint32_t d = 0; d + 1 < n_dims; d++) {
        n_rows *= dims[d]; /* cannot overflow: both factors are below 2^32 */
        FKV_REQUIRE(n_rows <= UINT32_MAX, FKV_FILE_DAMAGED, "%s: tensor %s has more than 2^32 - 1 rows", path, tensor->name);
    }
    const uint64_t n_cols = n_dims == 0 ? 1 : dims[n_dims - 1];
    FKV_REQUIRE(n_cols % format->block_cols == 0, FKV_FILE_DAMAGED,
                "%s: tensor %s has %llu columns, which is not a multiple of the %s block size %u", path, tensor->name,
                (unsigned long long)n_cols, format->name, format->block_cols);
    tensor->n_rows = (uint32_t)n_rows;
    tensor->n_cols = (uint32_t)n_cols;
    tensor->row_bytes = n_cols / format->block_cols * format->block_bytes;
    FKV_REQUIRE(!fkv_mul_overflows(n_rows, tensor->row_bytes, bytes), FKV_FILE_DAMAGED,
                "%s: the size of tensor %s, %llu x %llu, overflows 64 bits", path, tensor->name, (unsigned long long)n_rows,
                (unsigned long long)n_cols);
    return FKV_OK;
}

/* ---- common checks ---- */

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const fkv_tensor *const *)a)->name, (*(const fkv_tensor *const *)b)->name);
}

static int compare_addresses(const void *a, const void *b) {
    const uintptr_t x = (uintptr_t)(*(const fkv_tensor *const *)a)->data;
    const uintptr_t y = (uintptr_t)(*(const fkv_tensor *const *)b)->data;
    return (x > y) - (x < y);
}

static uint64_t tensor_bytes(const fkv_tensor *tensor) { return tensor->n_rows * tensor->row_bytes; }

static fkv_status check_overlap(const fkv_tensor **order, uint32_t n, const char *path) {
    qsort(order, n, sizeof *order, compare_addresses);
    for (uint32_t i = 0; i < n; i++) {
        const fkv_tensor *tensor = order[i];
        FKV_REQUIRE(i == 0 || (uintptr_t)order[i - 1]->data + tensor_bytes(order[i - 1]) <= (uintptr_t)tensor->data,
                    FKV_FILE_DAMAGED, "%s: tensors %s and %s overlap", path, order[i - 1]->name, tensor->name);
    }
    return FKV_OK;
}

static fkv_status index_names(fkv_weights *weights, const fkv_tensor **order, const char *path) {
    qsort(order, weights->n_tensors, sizeof *order, compare_names);
    for (uint32_t i = 0; i < weights->n_tensors; i++) {
        FKV_REQUIRE(i == 0 || compare_names(&order[i - 1], &order[i]) != 0, FKV_FILE_DAMAGED, "%s: duplicate tensor %s", path,
                    order[i]->name);
        weights->by_name[i] = (uint32_t)(order[i] - weights->tensors);
    }
    return FKV_OK;
}

fkv_status fkv_weights_finish(fkv_weights *weights, const char *path) {
    const uint32_t n = weights->n_tensors;
    if (n == 0) return FKV_OK;
    const fkv_tensor **order = malloc(n * sizeof *order);
    free(weights->by_name);
    weights->by_name = malloc(n * sizeof *weights->by_name);
    fkv_status status = FKV_OK;
    if (order == NULL || weights->by_name == NULL) {
        status = fkv_fail(FKV_NO_MEMORY, "%s: out of memory sorting the names of %u tensors", path, n);
    } else {
        for (uint32_t i = 0; i < n; i++) order[i] = &weights->tensors[i];
        status = check_overlap(order, n, path);
        if (status == FKV_OK) status = index_names(weights, order, path);
    }
    free(order);
    return status;
}

/* ---- closing ---- */

void fkv_weights_close(fkv_weights *weights) {
    if (weights == NULL) return;
    free(weights->tensors);
    free(weights->by_name);
    free(weights->tokens);
    free(weights->merges);
    free(weights->scores);
    free(weights->types);
    fkv_file_arena_close(&weights->arena);
    free(weights);
}

/* ---- access ---- */

const fkv_hparams *fkv_weights_hparams(const fkv_weights *weights) { return &weights->hparams; }
const fkv_vocab_source *fkv_weights_vocab(const fkv_weights *weights) { return &weights->vocab; }
uint32_t fkv_weights_n_tensors(const fkv_weights *weights) { return weights->n_tensors; }

const fkv_tensor *fkv_weights_tensor(const fkv_weights *weights, uint32_t index) {
    FKV_ASSERT(index < weights->n_tensors);
    return &weights->tensors[index];
}

const fkv_tensor *fkv_weights_find(const fkv_weights *weights, const char *name) {
    uint32_t low = 0;
    uint32_t high = weights->n_tensors;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const fkv_tensor *tensor = &weights->tensors[weights->by_name[middle]];
        const int order = strcmp(tensor->name, name);
        if (order == 0) return tensor;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

bool fkv_weights_is_config(const fkv_weights *weights) { return weights->is_config; }

uint64_t fkv_weights_file_bytes(const fkv_weights *weights) { return fkv_file_arena_mapped_bytes(&weights->arena); }

fkv_tensor fkv_tensor_rows(const fkv_tensor *tensor, uint32_t first, uint32_t n_rows) {
    fkv_tensor view = *tensor;
    view.n_rows = n_rows;
    if (tensor->linear != NULL) {
        view.first_row += first;
        return view;
    }
    view.data += first * tensor->row_bytes;
    if (tensor->bits == 0) return view;
    view.scales += first * tensor->scale_row_bytes;
    if (view.biases != NULL) view.biases += first * tensor->scale_row_bytes;
    return view;
}

fkv_tensor fkv_tensor_every_second_row(const fkv_tensor *tensor, uint32_t first, uint32_t n_rows) {
    FKV_ASSERT(tensor->bits != 0);
    fkv_tensor view = fkv_tensor_rows(tensor, first, n_rows);
    view.row_bytes *= 2;
    view.scale_row_bytes *= 2;
    return view;
}

uint64_t fkv_tensor_row_size(const fkv_tensor *tensor) {
    return tensor->bits != 0 ? (uint64_t)tensor->n_cols * tensor->bits / 8 : tensor->row_bytes;
}

/* ---- identity ---- */

static void add_u32(fkv_sha256 *sha, uint32_t number) { fkv_sha256_add(sha, &number, sizeof number); }
static void add_f32(fkv_sha256 *sha, float number) { fkv_sha256_add(sha, &number, sizeof number); }
static void add_text(fkv_sha256 *sha, const char *text) { fkv_sha256_add(sha, text, strlen(text) + 1); }

static void add_flag(fkv_sha256 *sha, bool flag) { add_u32(sha, flag); }

static void add_features(fkv_sha256 *sha, const fkv_features *f) {
    add_u32(sha, (uint32_t)f->norm);
    add_u32(sha, (uint32_t)f->qk_norm);
    add_u32(sha, (uint32_t)f->activation);
    add_flag(sha, f->no_pre_norms);
    add_flag(sha, f->post_norms);
    add_flag(sha, f->parallel);
    add_flag(sha, f->sinks);
    add_flag(sha, f->norm_experts);
    add_flag(sha, f->embedding_sqrt_dim);
}

/* Hashes the shapes of layers that differ from the model's default shape. */
static void add_shapes(fkv_sha256 *sha, const fkv_hparams *h) {
    for (uint32_t i = 0; i < h->n_layers && i < FKV_MAX_LAYERS; i++) {
        const fkv_layer_shape *s = &h->shapes[i];
        if (s->n_kv_heads == h->n_kv_heads && s->head_dim == h->head_dim && s->ffn_dim == h->ffn_dim && s->kv_layer == i)
            continue;
        add_u32(sha, i);
        add_u32(sha, s->n_kv_heads);
        add_u32(sha, s->head_dim);
        add_u32(sha, s->ffn_dim);
        add_u32(sha, s->kv_layer);
    }
}

/* Hashes the fields that Nemotron-H and Falcon-H1 use in addition to those of other Mamba-2 models. */
static void add_mamba(fkv_sha256 *sha, const fkv_hparams *h) {
    const fkv_recurrence *r = &h->recurrence;
    if (!h->features.single_blocks && !h->features.parallel_mixers) return;
    add_u32(sha, r->n_norm_groups);
    add_flag(sha, r->norms_before_gate);
    for (size_t i = 0; i < sizeof r->in_scales / sizeof r->in_scales[0]; i++) add_f32(sha, r->in_scales[i]);
    add_f32(sha, r->out_scale);
    add_f32(sha, h->gate_scale);
    add_f32(sha, h->down_scale);
    add_u32(sha, h->latent_dim);
}

/* Hashes the hyperparameters that affect results. RoPE is covered by rope_id. */
static void add_hparams(fkv_sha256 *sha, const fkv_hparams *h) {
    const float numbers[] = {h->norm_eps,       h->softcap,     h->final_softcap, h->query_scale,  h->embedding_scale,
                             h->residual_scale, h->logit_scale, h->temperature,   h->swiglu_alpha, h->swiglu_limit};
    add_text(sha, h->architecture);
    add_u32(sha, h->n_q_heads);
    add_u32(sha, h->n_kv_heads);
    add_u32(sha, h->head_dim);
    add_u32(sha, h->n_experts);
    add_u32(sha, h->n_experts_used);
    add_u32(sha, h->window);
    add_u32(sha, h->temperature_context);
    add_flag(sha, h->norm_plus_one);
    /* these fields are hashed only if the model uses them, so that the hashes of all other models stay the same as in earlier
     * versions */
    const bool has_shared = h->shared_dim != 0 || h->features.sigmoid_router;
    if (has_shared) {
        const uint32_t mixture[] = {h->shared_dim, h->n_dense, h->n_expert_groups, h->n_expert_groups_used,
                                    h->features.sigmoid_router};
        fkv_sha256_add(sha, mixture, sizeof mixture);
    }
    if (has_shared || h->experts_scale != 0.0f) add_f32(sha, h->experts_scale);
    add_features(sha, &h->features);
    const fkv_features *f = &h->features;
    if (f->attn_gate || f->plain_ffn || f->sparse_mixer || f->experts_scale_input || f->qk_norm_after_rope) {
        const uint32_t options[] = {f->attn_gate,          f->plain_ffn,
                                    f->sparse_mixer,       f->experts_scale_input,
                                    f->qk_norm_after_rope, (uint32_t)f->activation,
                                    h->attention_chunk,    h->temperature_of_no_rope};
        fkv_sha256_add(sha, options, sizeof options);
        add_f32(sha, h->mixer_jitter);
    }
    if (h->v_dim != 0 || h->value_scale != 0.0f || f->window_sinks) {
        add_u32(sha, h->v_dim);
        add_f32(sha, h->value_scale);
        add_flag(sha, f->window_sinks);
    }
    for (uint32_t i = 0; h->xielu != NULL && i < 4 * h->n_layers; i++) add_f32(sha, h->xielu[i]);
    fkv_sha256_add(sha, h->layers, h->n_layers < FKV_MAX_LAYERS ? h->n_layers : FKV_MAX_LAYERS);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) add_f32(sha, numbers[i]);
    add_shapes(sha, h);
    if (h->features.recurrence != FKV_RECURRENCE_NONE) {
        const uint32_t recurrence[] = {(uint32_t)h->features.recurrence,
                                       h->recurrence.n_taps,
                                       h->recurrence.n_k_heads,
                                       h->recurrence.n_v_heads,
                                       h->recurrence.k_dim,
                                       h->recurrence.v_dim,
                                       h->recurrence.tiled};
        fkv_sha256_add(sha, recurrence, sizeof recurrence);
        add_f32(sha, h->recurrence.min_step);
        add_f32(sha, h->recurrence.max_step);
        add_mamba(sha, h);
    }
    if (h->latent.dim != 0) {
        const uint32_t latent[] = {h->latent.dim,   h->latent.rope_dim, h->latent.nope_dim,
                                   h->latent.v_dim, h->latent.q_dim,    f->groups_by_max};
        fkv_sha256_add(sha, latent, sizeof latent);
        add_f32(sha, h->latent.norm_eps);
    }
    if (h->expert_dim != h->ffn_dim) add_u32(sha, h->expert_dim);
}

static void add_tensor(fkv_sha256 *sha, const fkv_tensor *tensor) {
    const uint64_t bytes = tensor_bytes(tensor);
    const size_t sample = (size_t)(bytes < SAMPLE_BYTES ? bytes : SAMPLE_BYTES);
    add_text(sha, tensor->name);
    add_u32(sha, (uint32_t)tensor->type);
    add_u32(sha, tensor->n_rows);
    add_u32(sha, tensor->n_cols);
    fkv_sha256_add(sha, tensor->data, sample);
    fkv_sha256_add(sha, tensor->data + (bytes - sample) / 2, sample);
    fkv_sha256_add(sha, tensor->data + (bytes - sample), sample);
    const bool is_linear = tensor->linear != NULL;
    if (tensor->bits == 0 && !is_linear) return;
    add_u32(sha, is_linear ? tensor->linear->group : tensor->group);
    const uint64_t n_scales =
        is_linear ? tensor->linear->scale_bytes : (uint64_t)tensor->n_rows * (tensor->n_cols / tensor->group);
    fkv_sha256_add(sha, is_linear ? tensor->linear->scales : tensor->scales,
                   (size_t)(n_scales < SAMPLE_BYTES ? n_scales : SAMPLE_BYTES));
}

fkv_status fkv_weights_id(const fkv_weights *weights, uint8_t id[32]) {
    _Static_assert(FKV_SHA256_BYTES == 32, "a weights id is a SHA-256 digest");
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    add_hparams(&sha, &weights->hparams);
    for (uint32_t i = 0; i < weights->n_tensors; i++) add_tensor(&sha, &weights->tensors[weights->by_name[i]]);
    return fkv_sha256_close(&sha, id);
}

void fkv_weights_release(const fkv_weights *weights, const fkv_tensor *tensor) {
    (void)weights;
    const uint64_t page = fkv_os_page_bytes();
    const uintptr_t first = (uintptr_t)fkv_align_up((uintptr_t)tensor->data, page);
    const uint64_t before_last = (uint64_t)(tensor->n_rows - 1) * tensor->row_bytes;
    const uintptr_t end = ((uintptr_t)tensor->data + before_last + fkv_tensor_row_size(tensor)) / page * page;
    /* the memory pages are unmodified, so the operating system can read them from the file again */
    if (first < end) (void)madvise((void *)first, end - first, MADV_DONTNEED);
}
