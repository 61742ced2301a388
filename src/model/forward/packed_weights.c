/* Packs weights for the CPU kernels; see packed_weights.h.
 *
 * Experts are not repacked. A token uses only a few experts, so packed copies would double the memory of a large model for little
 * gain. Expert matrices refer to rows of the mapped file (matrix.h), and the page cache of the operating system keeps frequently
 * used experts in memory.
 *
 * The function that visits all tensors of the model runs twice: first to count bytes, then to repack into a mapping of exactly
 * that size. Worker threads pack one panel at a time. Pages of the mapped file are released as soon as they are repacked, so
 * the weights are never in memory twice.
 */
#include "packed_weights.h"

#include "../../base/cpu.h"
#include "../../base/float16.h"
#include "../../base/memory.h"
#include "../../base/workers.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef struct packing {
    const fkv_model *model;
    fkv_carve carve; /* carve.base is NULL in the pass that only counts bytes */
    fkv_workers *workers;
    uint8_t *scratch; /* [n_threads, scratch_bytes], allocated only for repacking */
    uint64_t scratch_bytes;
    fkv_panel_room room; /* buffer sizes for matrices that are read from the mapped file */
    uint64_t mapped_bytes;
    uint64_t touched_bytes;
} packing;

/* ---- matrices ---- */

typedef struct repack_job {
    const fkv_tensor *tensor;
    fkv_matrix *matrix;
    uint8_t *scratch;
    uint64_t scratch_bytes;
    atomic_bool overflowed; /* true if a value overflowed f16 */
} repack_job;

static void repack_panel(void *context, uint32_t item, uint32_t thread) {
    repack_job *j = context;
    uint32_t row = item * FKV_PANEL_ROWS;
    uint32_t n_rows = fkv_min_u32(j->tensor->n_rows - row, FKV_PANEL_ROWS);
    if (!fkv_tensor_set_rows(j->tensor, row, n_rows, j->matrix, row, j->scratch + thread * j->scratch_bytes))
        atomic_store_explicit(&j->overflowed, true, memory_order_relaxed);
}

static fkv_status repack_matrix(packing *p, const fkv_tensor *tensor, fkv_matrix *matrix) {
    FKV_ASSERT(p->scratch != NULL && p->workers != NULL);
    repack_job job = {.tensor = tensor, .matrix = matrix, .scratch = p->scratch, .scratch_bytes = p->scratch_bytes};
    fkv_workers_run(p->workers, repack_panel, &job, fkv_ceil_div(tensor->n_rows, FKV_PANEL_ROWS));
    fkv_weights_release(p->model->weights, tensor);
    FKV_REQUIRE(!job.overflowed, FKV_UNSUPPORTED, "tensor %s has values or scales that overflow 16-bit floats", tensor->name);
    return FKV_OK;
}

static void reserve_scratch(packing *p, uint32_t n_cols) {
    uint64_t bytes = fkv_tensor_scratch_bytes(n_cols);
    if (bytes > p->scratch_bytes) p->scratch_bytes = bytes;
}

static fkv_status pack_matrix(packing *p, const fkv_tensor *tensor, fkv_matrix *matrix) {
    FKV_TRY(fkv_tensor_matrix_shape(tensor, matrix));
    matrix->panels = fkv_carve_take(&p->carve, 1, fkv_matrix_bytes(matrix));
    reserve_scratch(p, matrix->n_cols);
    return p->carve.base != NULL ? repack_matrix(p, tensor, matrix) : FKV_OK;
}

static fkv_status map_matrix(packing *p, const fkv_tensor *tensor, fkv_matrix *matrix) {
    FKV_TRY(fkv_tensor_map_matrix(tensor, matrix));
    fkv_panel_room_grow(&p->room, matrix);
    reserve_scratch(p, matrix->n_cols); /* scratch memory for the biases of the matrix */
    p->mapped_bytes += fkv_tensor_stored_bytes(tensor);
    return FKV_OK;
}

/* ---- vectors ---- */

static float *pack_norm(packing *p, const fkv_tensor *tensor) {
    if (tensor == NULL) return NULL;
    float *out = FKV_CARVE(&p->carve, tensor->n_cols, float);
    if (p->carve.base != NULL) fkv_tensor_norm_floats(tensor, p->model->hparams, out);
    return out;
}

/* Converts a bias vector, or one bias row per expert, to floats. */
static float *pack_bias(packing *p, const fkv_tensor *tensor) {
    if (tensor == NULL) return NULL;
    float *out = FKV_CARVE(&p->carve, (uint64_t)tensor->n_rows * tensor->n_cols, float);
    for (uint32_t row = 0; p->carve.base != NULL && row < tensor->n_rows; row++) {
        fkv_tensor one = *tensor;
        one.data += row * tensor->row_bytes;
        if (tensor->col_step != 0) {
            fkv_tensor_gather_row(tensor, row, p->scratch);
            one.data = p->scratch;
        }
        fkv_tensor_row_floats(&one, 0, out + (size_t)row * tensor->n_cols);
    }
    return out;
}

/* Converts the taps of a convolution to floats and transposes them: [n_taps, C]. In KDA, the channels of queries, keys and values
 * are in three tensors. */
static float *pack_conv(packing *p, const fkv_layer_tensors *t) {
    const fkv_tensor *parts[] = {t->conv, t->conv_k, t->conv_v};
    enum { N_PARTS = sizeof parts / sizeof parts[0] };
    uint32_t n_channels = t->conv->n_rows;
    for (uint32_t i = 1; i < N_PARTS; i++) n_channels += parts[i] != NULL ? parts[i]->n_rows : 0;
    float *out = FKV_CARVE(&p->carve, (uint64_t)n_channels * t->conv->n_cols, float);
    if (out == NULL) return NULL; /* this is the counting pass */
    FKV_ASSERT(t->conv->n_cols <= FKV_MAX_TAPS);
    float *to = out;
    for (uint32_t i = 0; i < N_PARTS && parts[i] != NULL; i++) {
        for (uint32_t c = 0; c < parts[i]->n_rows; c++, to++) {
            float taps[FKV_MAX_TAPS];
            fkv_tensor_row_floats(parts[i], c, taps);
            for (uint32_t j = 0; j < parts[i]->n_cols; j++) to[(size_t)j * n_channels] = taps[j];
        }
    }
    return out;
}

/* Computes the negated decay rates from their logarithms. */
static float *pack_decay(packing *p, const fkv_layer_tensors *t) {
    if (t->decay_log == NULL) return pack_bias(p, t->decay);
    float *out = pack_bias(p, t->decay_log);
    for (uint32_t i = 0; p->carve.base != NULL && i < t->decay_log->n_cols; i++) out[i] = -expf(out[i]);
    return out;
}

static float *pack_ones(packing *p) {
    const fkv_hparams *h = p->model->hparams;
    uint32_t n = 0;
    for (uint32_t i = 0; i < h->n_layers; i++) n = fkv_max_u32(n, h->shapes[i].head_dim);
    float *out = FKV_CARVE(&p->carve, n, float);
    for (uint32_t i = 0; p->carve.base != NULL && i < n; i++) out[i] = 1.0f;
    return out;
}

/* ---- traversal ---- */

static fkv_status pack_experts(packing *p, const fkv_layer_tensors *t, fkv_packed_layer *layer) {
    uint32_t n = p->model->hparams->n_experts;
    const struct {
        const fkv_tensor **tensors;
        fkv_matrix *matrices;
    } parts[] = {
        {t->gate_experts, layer->gate_experts}, {t->up_experts, layer->up_experts}, {t->down_experts, layer->down_experts}};
    FKV_TRY(pack_matrix(p, t->router, &layer->router));
    for (size_t part = 0; part < sizeof parts / sizeof parts[0]; part++) {
        uint64_t largest = 0;
        if (parts[part].tensors == NULL) continue; /* the experts have no gate matrices */
        for (uint32_t e = 0; e < n; e++) {
            fkv_matrix counted;
            uint64_t bytes = fkv_tensor_stored_bytes(parts[part].tensors[e]);
            fkv_matrix *matrix = parts[part].matrices != NULL ? &parts[part].matrices[e] : &counted;
            FKV_TRY(map_matrix(p, parts[part].tensors[e], matrix));
            if (bytes > largest) largest = bytes;
        }
        p->touched_bytes += p->model->hparams->n_experts_used * largest;
    }
    layer->router_bias = pack_bias(p, t->router_bias);
    layer->expert_scales = pack_bias(p, t->expert_scales);
    layer->router_norm = pack_bias(p, t->router_scale);
    for (uint32_t i = 0; p->carve.base != NULL && layer->router_norm != NULL && i < p->model->hparams->dim; i++)
        layer->router_norm[i] /= sqrtf((float)p->model->hparams->dim);
    layer->experts_norm = pack_norm(p, t->experts_norm);
    layer->post_dense_norm = pack_norm(p, t->post_dense_norm);
    layer->post_experts_norm = pack_norm(p, t->post_experts_norm);
    layer->router_correction = pack_bias(p, t->router_correction);
    if (t->shared_gate != NULL) FKV_TRY(pack_matrix(p, t->shared_gate, &layer->shared_gate));
    if (t->latent_down != NULL) {
        FKV_TRY(pack_matrix(p, t->latent_down, &layer->latent_down));
        FKV_TRY(pack_matrix(p, t->latent_up, &layer->latent_up));
    }
    layer->gate_experts_bias = pack_bias(p, t->gate_experts_bias);
    layer->up_experts_bias = pack_bias(p, t->up_experts_bias);
    layer->down_experts_bias = pack_bias(p, t->down_experts_bias);
    return FKV_OK;
}

static fkv_status pack_recurrent(packing *p, const fkv_layer_tensors *t, fkv_packed_layer *layer) {
    const struct {
        const fkv_tensor *tensor;
        fkv_matrix *matrix;
    } matrices[] = {
        {t->mixer_in, &layer->mixer_in},     {t->mixer_gate, &layer->mixer_gate}, {t->mixer_fused, &layer->mixer_fused},
        {t->mixer_out, &layer->mixer_out},   {t->alpha, &layer->alpha},           {t->beta, &layer->beta},
        {t->beta_alpha, &layer->beta_alpha}, {t->alpha_low, &layer->alpha_low},   {t->gate_low, &layer->gate_low}};
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++)
        if (matrices[i].tensor != NULL) FKV_TRY(pack_matrix(p, matrices[i].tensor, matrices[i].matrix));
    layer->mixer_in_bias = pack_bias(p, t->mixer_in_bias);
    layer->mixer_out_bias = pack_bias(p, t->mixer_out_bias);
    layer->conv = pack_conv(p, t);
    layer->conv_bias = pack_bias(p, t->conv_bias);
    layer->decay = t->decay != NULL || t->decay_log != NULL ? pack_decay(p, t) : NULL;
    layer->alpha_bias = pack_bias(p, t->alpha_bias);
    layer->skip = pack_bias(p, t->skip);
    layer->mixer_norm = pack_bias(p, t->mixer_norm); /* unlike other norm weights, these are never stored as weight - 1 */
    return FKV_OK;
}

/* Returns the matrix kind of the per-head projections that are extracted from kv_b. Quantized rows are decoded to f32, because
 * their quantization groups do not fit the transposed matrix. */
static fkv_matrix_kind decoded_kind(const fkv_tensor *tensor) {
    return tensor->type == FKV_TENSOR_F16 ? FKV_MATRIX_F16 : tensor->type == FKV_TENSOR_BF16 ? FKV_MATRIX_BF16 : FKV_MATRIX_F32;
}

/* Sets a row of a float matrix. The conversion is exact, because the type of the matrix can represent all values. numbers: [n],
 * padded with zeros to n_cols; scratch: [n_cols]
 */
static void set_decoded_row(fkv_matrix *matrix, uint32_t row, const float *numbers, uint32_t n, float *scratch) {
    memset(scratch, 0, matrix->n_cols * sizeof *scratch);
    if (matrix->kind == FKV_MATRIX_F32)
        memcpy(scratch, numbers, n * sizeof *numbers);
    else
        fkv_rows_from_f32(matrix->kind == FKV_MATRIX_BF16 ? FKV_BF16 : FKV_F16, numbers, scratch, n);
    fkv_matrix_set_floats(matrix, row, scratch);
}

/* Splits one head's rows of kv_b into the transposed key projection and the value projection. rows: scratch for [nope_dim +
 * v_dim, latent dim] floats, followed by two padded rows */
static void split_head(const packing *p, const fkv_tensor *kv_b, uint32_t head, float *rows, fkv_matrix *k, fkv_matrix *v) {
    const fkv_latent *l = &p->model->hparams->latent;
    const uint32_t n_rows = l->nope_dim + l->v_dim;
    float *column = rows + (size_t)n_rows * l->dim;
    float *scratch = column + fkv_packed_pad(l->nope_dim);
    for (uint32_t i = 0; i < n_rows; i++) fkv_tensor_row_floats(kv_b, head * n_rows + i, rows + (size_t)i * l->dim);
    for (uint32_t c = 0; c < l->dim; c++) {
        for (uint32_t i = 0; i < l->nope_dim; i++) column[i] = rows[(size_t)i * l->dim + c];
        set_decoded_row(k, c, column, l->nope_dim, scratch);
    }
    for (uint32_t i = 0; i < l->v_dim; i++) set_decoded_row(v, i, rows + (size_t)(l->nope_dim + i) * l->dim, l->dim, scratch);
}

/* Packs the per-head key and value projections that kv_b contains. */
static fkv_status pack_kv_b(packing *p, const fkv_tensor *kv_b, fkv_packed_layer *layer) {
    const fkv_hparams *h = p->model->hparams;
    const fkv_latent *l = &h->latent;
    const size_t n_floats = (size_t)(l->nope_dim + l->v_dim) * l->dim + fkv_packed_pad(l->nope_dim) +
                            fkv_packed_pad(fkv_max_u32(l->nope_dim, l->dim));
    float *rows = p->carve.base != NULL ? calloc(n_floats, sizeof *rows) : NULL;
    FKV_REQUIRE(p->carve.base == NULL || rows != NULL, FKV_NO_MEMORY, "out of memory splitting tensor %s", kv_b->name);
    fkv_status status = FKV_OK;
    for (uint32_t head = 0; status == FKV_OK && head < h->n_q_heads; head++) {
        fkv_matrix counted[2];
        fkv_matrix *k = layer->k_up != NULL ? &layer->k_up[head] : &counted[0];
        fkv_matrix *v = layer->v_up != NULL ? &layer->v_up[head] : &counted[1];
        status = fkv_matrix_make(decoded_kind(kv_b), 0, l->dim, fkv_packed_pad(l->nope_dim), k);
        if (status == FKV_OK) status = fkv_matrix_make(decoded_kind(kv_b), 0, l->v_dim, fkv_packed_pad(l->dim), v);
        if (status != FKV_OK) break;
        k->panels = fkv_carve_take(&p->carve, 1, fkv_matrix_bytes(k));
        v->panels = fkv_carve_take(&p->carve, 1, fkv_matrix_bytes(v));
        if (rows != NULL) split_head(p, kv_b, head, rows, k, v);
    }
    if (rows != NULL) fkv_weights_release(p->model->weights, kv_b);
    free(rows);
    return status;
}

static fkv_status pack_latent(packing *p, const fkv_layer_tensors *t, fkv_packed_layer *layer) {
    const fkv_hparams *h = p->model->hparams;
    const fkv_latent *l = &h->latent;
    if (t->q_a != NULL) FKV_TRY(pack_matrix(p, t->q_a, &layer->q_a));
    FKV_TRY(pack_matrix(p, t->kv_a, &layer->kv_a));
    layer->q_a_bias = pack_bias(p, t->q_a_bias);
    layer->kv_a_bias = pack_bias(p, t->kv_a_bias);
    layer->q_a_norm = pack_norm(p, t->q_a_norm);
    layer->kv_a_norm = pack_norm(p, t->kv_a_norm);
    if (t->kv_b != NULL) return pack_kv_b(p, t->kv_b, layer);
    for (uint32_t head = 0; head < h->n_q_heads; head++) {
        fkv_matrix counted[2];
        const fkv_tensor k = fkv_tensor_rows(t->k_b, head * l->dim, l->dim);
        const fkv_tensor v = fkv_tensor_rows(t->v_b, head * l->v_dim, l->v_dim);
        FKV_TRY(pack_matrix(p, &k, layer->k_up != NULL ? &layer->k_up[head] : &counted[0]));
        FKV_TRY(pack_matrix(p, &v, layer->v_up != NULL ? &layer->v_up[head] : &counted[1]));
    }
    return FKV_OK;
}

static fkv_status pack_layer(packing *p, const fkv_layer_tensors *t, fkv_packed_layer *layer) {
    if (t->conv != NULL) FKV_TRY(pack_recurrent(p, t, layer));
    if (t->kv_a != NULL) FKV_TRY(pack_latent(p, t, layer));
    if (t->q != NULL) FKV_TRY(pack_matrix(p, t->q, &layer->q));
    if (t->k != NULL) FKV_TRY(pack_matrix(p, t->k, &layer->k));
    if (t->v != NULL) FKV_TRY(pack_matrix(p, t->v, &layer->v));
    if (t->o != NULL) FKV_TRY(pack_matrix(p, t->o, &layer->o));
    if (t->attn_gate != NULL) FKV_TRY(pack_matrix(p, t->attn_gate, &layer->attn_gate));
    if (t->input_gate != NULL) {
        FKV_TRY(pack_matrix(p, t->input_gate, &layer->input_gate));
        FKV_TRY(pack_matrix(p, t->input_proj, &layer->input_proj));
    }
    if (t->router != NULL) FKV_TRY(pack_experts(p, t, layer));
    if (t->up != NULL) {
        if (t->gate != NULL) FKV_TRY(pack_matrix(p, t->gate, &layer->gate));
        FKV_TRY(pack_matrix(p, t->up, &layer->up));
        FKV_TRY(pack_matrix(p, t->down, &layer->down));
    }
    layer->attn_norm = pack_norm(p, t->attn_norm);
    layer->attn_norm_bias = pack_bias(p, t->attn_norm_bias);
    layer->ffn_norm = pack_norm(p, t->ffn_norm);
    layer->ffn_norm_bias = pack_bias(p, t->ffn_norm_bias);
    layer->q_bias = pack_bias(p, t->q_bias);
    layer->k_bias = pack_bias(p, t->k_bias);
    layer->v_bias = pack_bias(p, t->v_bias);
    layer->o_bias = pack_bias(p, t->o_bias);
    layer->gate_bias = pack_bias(p, t->gate_bias);
    layer->up_bias = pack_bias(p, t->up_bias);
    layer->down_bias = pack_bias(p, t->down_bias);
    layer->q_norm = pack_norm(p, t->q_norm);
    layer->k_norm = pack_norm(p, t->k_norm);
    layer->post_attn_norm = pack_norm(p, t->post_attn_norm);
    layer->post_ffn_norm = pack_norm(p, t->post_ffn_norm);
    layer->input_norm = pack_norm(p, t->input_norm);
    layer->out_scale = pack_bias(p, t->out_scale);
    return FKV_OK;
}

static fkv_status pack_all(packing *p, fkv_packed_weights *packed) {
    const fkv_model *m = p->model;
    FKV_TRY(pack_matrix(p, m->output, &packed->output));
    packed->final_norm = pack_norm(p, m->final_norm);
    packed->final_norm_bias = pack_bias(p, m->final_norm_bias);
    packed->output_bias = pack_bias(p, m->output_bias);
    if (m->inputs_proj != NULL) FKV_TRY(pack_matrix(p, m->inputs_proj, &packed->inputs_proj));
    packed->inputs_norm = pack_norm(p, m->inputs_norm);
    if (m->hparams->features.v_norm || m->hparams->features.qk_norm == FKV_QK_NORM_UNWEIGHTED) packed->ones = pack_ones(p);
    for (uint32_t i = 0; i < m->hparams->n_layers; i++) {
        fkv_packed_layer counted = {0};
        FKV_TRY(pack_layer(p, &m->tensors[i], packed->layers != NULL ? &packed->layers[i] : &counted));
    }
    return FKV_OK;
}

static fkv_status count_bytes(packing *p) {
    fkv_packed_weights counted = {0};
    FKV_TRY(pack_all(p, &counted));
    FKV_REQUIRE(!p->carve.overflow, FKV_UNSUPPORTED, "the size of the weights overflows 64 bits");
    return FKV_OK;
}

fkv_status fkv_packed_weights_count(fkv_model *model) {
    packing p = {.model = model};
    FKV_TRY(count_bytes(&p));
    bool looked_up = model->embedding != model->output;
    uint64_t row = looked_up ? model->embedding->row_bytes : 0;
    model->mapped_bytes = p.mapped_bytes + model->embedding->n_rows * row;
    model->touched_bytes = p.touched_bytes + row;
    if (model->inputs != NULL) {
        model->mapped_bytes += model->inputs->n_rows * model->inputs->row_bytes;
        model->touched_bytes += model->inputs->row_bytes;
    }
    model->panel_bytes = p.room.thread_bytes;
    model->panel_scratch_bytes = p.room.scratch_bytes;
    model->info.packed_bytes = fkv_align_up(p.carve.used, fkv_os_page_bytes());
    return FKV_OK;
}

/* ---- load ---- */

static fkv_status check_weights_fit(uint64_t bytes) {
    const char *source = NULL;
    uint64_t available = fkv_memory_available(&source);
    FKV_REQUIRE(bytes <= available, FKV_NO_MEMORY, "the weights need %llu bytes of memory but %s allows %llu",
                (unsigned long long)bytes, source, (unsigned long long)available);
    return FKV_OK;
}

/* Repacks all weights, using temporary worker threads and scratch memory. */
static fkv_status repack_all(packing *p, fkv_packed_weights *packed) {
    uint32_t n_threads = p->model->config.n_threads != 0 ? p->model->config.n_threads : fkv_cpu_count();
    void *workers_memory = aligned_alloc(FKV_CARVE_ALIGN, (size_t)fkv_align_up(fkv_workers_bytes(n_threads), FKV_CARVE_ALIGN));
    p->scratch = aligned_alloc(FKV_CARVE_ALIGN, (size_t)(n_threads * p->scratch_bytes));
    fkv_status status = FKV_OK;
    if (workers_memory == NULL || p->scratch == NULL) {
        status = fkv_fail(FKV_NO_MEMORY, "out of memory starting %u threads to repack weights", n_threads);
    } else {
        memset(workers_memory, 0, (size_t)fkv_workers_bytes(n_threads));
        status = fkv_workers_open(workers_memory, n_threads, &p->workers);
    }
    if (status == FKV_OK) {
        status = pack_all(p, packed);
        fkv_workers_close(p->workers);
    }
    free(p->scratch);
    free(workers_memory);
    return status;
}

static fkv_status allocate_experts(const fkv_hparams *h, fkv_packed_weights *packed) {
    enum { N_PARTS = 3 };
    size_t n = h->n_experts;
    if (n == 0) return FKV_OK;
    packed->experts = calloc(h->n_layers * N_PARTS * n, sizeof *packed->experts);
    FKV_REQUIRE(packed->experts != NULL, FKV_NO_MEMORY, "out of memory allocating the tables of %zu experts", n);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        packed->layers[i].gate_experts = packed->experts + (i * N_PARTS) * n;
        packed->layers[i].up_experts = packed->experts + (i * N_PARTS + 1) * n;
        packed->layers[i].down_experts = packed->experts + (i * N_PARTS + 2) * n;
    }
    return FKV_OK;
}

static fkv_status allocate_heads(const fkv_hparams *h, fkv_packed_weights *packed) {
    const size_t n = h->n_q_heads;
    if (!fkv_architecture_is_latent(h)) return FKV_OK;
    packed->heads = calloc((size_t)h->n_layers * 2 * n, sizeof *packed->heads);
    FKV_REQUIRE(packed->heads != NULL, FKV_NO_MEMORY, "out of memory allocating the tables of %zu heads", n);
    for (uint32_t i = 0; i < h->n_layers; i++) {
        packed->layers[i].k_up = packed->heads + 2 * i * n;
        packed->layers[i].v_up = packed->heads + (2 * i + 1) * n;
    }
    return FKV_OK;
}

fkv_status fkv_packed_weights_load(fkv_model *model) {
    fkv_packed_weights *packed = calloc(1, sizeof *packed);
    FKV_REQUIRE(packed != NULL, FKV_NO_MEMORY, "out of memory allocating the weight tables");
    model->packed = packed;
    packed->layers = calloc(model->hparams->n_layers, sizeof *packed->layers);
    FKV_REQUIRE(packed->layers != NULL, FKV_NO_MEMORY, "out of memory allocating the tables of %u layers",
                model->hparams->n_layers);
    FKV_TRY(allocate_experts(model->hparams, packed));
    FKV_TRY(allocate_heads(model->hparams, packed));
    packing p = {.model = model};
    FKV_TRY(count_bytes(&p)); /* counting also determines the size of the scratch memory */
    FKV_TRY(check_weights_fit(model->info.packed_bytes));
    FKV_TRY(fkv_map_open(model->info.packed_bytes, true, &packed->map));
    p.carve = (fkv_carve){.base = packed->map, .size = model->info.packed_bytes};
    return repack_all(&p, packed);
}

void fkv_packed_weights_unload(fkv_model *model) {
    fkv_packed_weights *packed = model->packed;
    if (packed == NULL) return;
    fkv_map_close(packed->map, model->info.packed_bytes);
    free(packed->experts);
    free(packed->heads);
    free(packed->layers);
    free(packed);
    model->packed = NULL;
}

void fkv_packed_embed(const fkv_model *model, uint32_t token, float *out) {
    if (model->embedding != model->output)
        fkv_tensor_row_floats(model->embedding, token, out);
    else
        fkv_matrix_get_row(&model->packed->output, token, out);
    float scale = model->embedding_scale;
    for (uint32_t i = 0; scale != 1.0f && i < model->hparams->dim; i++) out[i] *= scale;
}
