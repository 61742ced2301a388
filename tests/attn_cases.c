/* See attn_cases.h. */
#include "attn_cases.h"
#include "channel_bits.h"

#include "../src/attn/cpu/kernels.h"

#include "../src/base/float16.h"

#include <math.h>
#include <stdlib.h>

uint64_t attn_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Approximates a standard normal variable by the sum of four uniform variables, which is fast and accurate enough. */
float attn_gaussian(uint64_t *state) {
    uint64_t r = attn_random(state);
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)(r >> 16 * i & 0xffff) / 65536.0f - 0.5f;
    return sum * 1.7320508f;
}

void attn_random_rows(uint64_t *state, fkv_type type, uint32_t dim, bool outliers, size_t n, void *out) {
    float row[2 * FKV_MAX_HEAD_DIM] = {0};
    for (size_t done = 0; done < n; done += dim) {
        for (uint32_t d = 0; d < dim; d++) row[d] = attn_gaussian(state);
        if (outliers) {
            row[3] *= 20;
            row[17 % dim] *= 20;
            row[dim - 2] *= 20;
        }
        fkv_rows_from_f32(type, row, (uint8_t *)out + done * fkv_type_bytes(type), dim);
    }
}

/* Multiplies all values by the gain. In one of `every` rows, also replaces one channel with its absolute value multiplied by the
 * peak. rows: [n / dim, dim] */
static void resize_rows(attn_sizes sizes, fkv_type type, uint32_t dim, uint32_t every, size_t n, void *rows) {
    float gain = sizes.gain != 0 ? sizes.gain : 1;
    float peak = sizes.peak != 0 ? sizes.peak : 1;
    if (gain == 1 && peak == 1) return;
    float row[2 * FKV_MAX_HEAD_DIM];
    for (size_t done = 0; done < n; done += dim) {
        uint8_t *at = (uint8_t *)rows + done * fkv_type_bytes(type);
        fkv_rows_to_f32(type, at, row, dim);
        for (uint32_t d = 0; d < dim; d++) row[d] *= gain;
        if (done / dim % every == 0) row[dim / 3] = fabsf(row[dim / 3]) * peak;
        fkv_rows_from_f32(type, row, at, dim);
    }
}

static void *allocate(size_t bytes) {
    void *block = aligned_alloc(64, fkv_align_up(bytes + 1, 64));
    if (block == NULL) abort();
    return block;
}

/* Returns a copy of the case with those rotations enabled that its codecs require. */
static attn_case with_required_rotations(attn_case c) {
    fkv_codec_info k = {0};
    fkv_codec_info v = {0};
    (void)fkv_codec_about(attn_codecs[c.codec].k, &k);
    (void)fkv_codec_about(attn_codecs[c.codec].v, &v);
    unsigned needed = (k.needs_rotation ? FKV_ROTATE_K : 0u) | (v.needs_rotation ? FKV_ROTATE_V : 0u);
    c.rotate = (fkv_rotate)((unsigned)c.rotate | needed);
    return c;
}

static void calibrate(attn_fixture *w, uint32_t dim, uint32_t average) {
    uint64_t state = 17;
    for (uint32_t h = 0; h < w->layer.n_kv_heads; h++) {
        uint8_t bits[FKV_MAX_HEAD_DIM];
        if (h == 0)
            channel_bits_random(&state, dim, average, bits);
        else
            channel_bits_extreme(&state, dim, average, bits);
        if (fkv_channel_bits_check(bits, dim, average, h) != FKV_OK) abort();
        fkv_channel_order_make(bits, dim, w->channels[h], &w->orders[h]);
        w->head_blocks[h] = w->layer.block;
        w->head_blocks[h].codec[FKV_SIDE_K].channels = &w->orders[h];
    }
    w->layer.calibrated = true;
    w->layer.head_blocks = w->head_blocks;
}

bool attn_fixture_describe(attn_fixture *w, const attn_case *given) {
    memset(w, 0, sizeof *w);
    w->c = with_required_rotations(*given);
    const attn_case *c = &w->c;
    fkv_layer_config shape = {.k = attn_codecs[c->codec].k, .v = attn_codecs[c->codec].v};
    fkv_codec k;
    fkv_codec v;
    const bool is_latent = c->shape.rope_dim != 0;
    const bool is_sealed_latent = is_latent && c->codec >= FIRST_SEALED_CODEC;
    const uint32_t latent_rotation = is_sealed_latent ? FKV_ROTATE_V : FKV_ROTATE_K; /* rotation of the latent channels */
    if (is_latent) shape = (fkv_layer_config){.k = fkv_block_latent_codec(shape.k, c->shape.head_dim), .v = {16, 0}};
    if (is_sealed_latent && shape.k.kind != FKV_CODEC_AFFINE) return false; /* calibrated */
    if (fkv_codec_make(shape.k, c->shape.head_dim, c->page_type, &k) != FKV_OK) return false;
    if (fkv_codec_make(shape.v, is_latent ? c->shape.rope_dim : c->shape.head_dim, c->page_type, &v) != FKV_OK) return false;
    if (c->rotate & (is_latent ? latent_rotation : FKV_ROTATE_K)) fkv_codec_rotated(&k);
    if ((c->rotate & FKV_ROTATE_V) != 0 && !is_latent) fkv_codec_rotated(&v);
    w->layer = (fkv_attn_layer){.n_q_heads = c->shape.n_q_heads,
                                .n_kv_heads = c->shape.n_kv_heads,
                                .head_dim = c->shape.head_dim,
                                .rope_dim = c->shape.rope_dim,
                                .window = c->window,
                                .n_sinks = c->n_sinks,
                                .scale = c->scale != 0 ? c->scale : 1.0f / sqrtf((float)c->shape.head_dim),
                                .softcap = c->softcap,
                                .row_type = c->row_type};
    fkv_block_make(&k, &v, c->page_tokens, &w->layer.block);
    w->layer.sealed = c->opens && c->codec >= FIRST_SEALED_CODEC;
    if (w->layer.sealed) fkv_block_make_open(c->shape.head_dim, c->shape.rope_dim, c->page_type, c->page_tokens, &w->layer.open);
    if (c->codec >= FIRST_CALIBRATED_CODEC) {
        if (c->shape.n_kv_heads > MAX_CALIBRATED_HEADS) return false;
        calibrate(w, c->shape.head_dim, shape.k.bits);
    }
    fkv_rotation_make(11, 0, c->shape.head_dim, &w->rotate_k);
    fkv_rotation_make(11, 1, c->shape.head_dim, &w->rotate_v);
    if ((c->rotate & FKV_ROTATE_K) != 0 && !w->layer.sealed) w->layer.rotate_k = &w->rotate_k;
    if (c->rotate & FKV_ROTATE_V) w->layer.rotate_v = &w->rotate_v;
    if (is_latent) {
        w->layer.rotate_k = (c->rotate & latent_rotation) == 0 ? NULL : is_sealed_latent ? &w->rotate_v : &w->rotate_k;
        w->layer.rotate_v = w->layer.rotate_k;
    }
    uint64_t state = 13;
    for (uint32_t h = 0; c->sinks != 0 && h < c->shape.n_q_heads; h++) w->sink_logits[h] = c->sinks * attn_gaussian(&state);
    if (c->sinks != 0) w->layer.sink_logits = w->sink_logits;
    return true;
}

/* Writes all pages in open form, with 8-bit codes (16-bit if no group size divides the head dimension), then seals them. */
static void write_sealed(const attn_fixture *w, const fkv_cpu_kernels *kernels, fkv_workers *workers, const fkv_attn_row *whole,
                         const void *k, const void *v) {
    fkv_attn_layer open = w->layer;
    open.calibrated = false;
    open.head_blocks = NULL;
    fkv_block_make_open(w->c.shape.head_dim, w->c.shape.rope_dim, w->c.page_type, w->c.page_tokens, &open.block);
    uint32_t n_kv_heads = w->c.shape.n_kv_heads;
    uint32_t n_pages = whole->n_tokens / w->c.page_tokens;
    open.pages = allocate((size_t)n_pages * n_kv_heads * open.block.bytes);
    uint32_t *table = allocate(n_pages * sizeof *table);
    for (uint32_t page = 0; page < n_pages; page++) table[page] = page;
    fkv_attn_row row = *whole;
    row.view = (fkv_page_view){table, n_pages, 1};
    fkv_attn_write(kernels, &open, &row, 1, k, v, workers);
    for (uint32_t i = 0; i < n_pages * n_kv_heads; i++) {
        size_t page = fkv_page_at(whole->view, i / n_kv_heads);
        kernels->seal(&open.block, open.pages + (size_t)i * open.block.bytes, fkv_attn_head_block(&w->layer, i % n_kv_heads),
                      w->pages + (page * n_kv_heads + i % n_kv_heads) * w->layer.block.bytes);
    }
    free(open.pages);
    free(table);
}

static bool open_fixture(attn_fixture *w, const attn_case *c, const fkv_cpu_kernels *kernels, fkv_workers *workers, uint64_t seed,
                         bool keep) {
    if (!attn_fixture_describe(w, c)) return false;
    uint64_t state = seed;
    uint32_t n_pages = 0;
    for (uint32_t r = 0; r < c->n_rows; r++) n_pages += fkv_ceil_div(c->rows[r].start + c->rows[r].n_tokens, c->page_tokens);

    /* Pages are in random order. Every slot is initialized to NaN, so reading an unwritten slot is detected. */
    size_t slab_bytes = (size_t)n_pages * c->shape.n_kv_heads * w->layer.block.bytes;
    w->pages = allocate(slab_bytes);
    memset(w->pages, 0xff, slab_bytes);
    w->layer.pages = w->pages;
    if (w->layer.sealed) {
        size_t open_bytes = (size_t)n_pages * c->shape.n_kv_heads * w->layer.open.bytes;
        w->layer.open_pages = w->open = allocate(open_bytes);
        memset(w->open, 0xff, open_bytes);
    }
    w->tables = allocate(n_pages * sizeof *w->tables);
    for (uint32_t i = 0; i < n_pages; i++) w->tables[i] = i;
    for (uint32_t i = n_pages; i > 1; i--) {
        uint32_t other = (uint32_t)(attn_random(&state) % i);
        uint32_t kept = w->tables[i - 1];
        w->tables[i - 1] = w->tables[other];
        w->tables[other] = kept;
    }

    uint32_t used = 0;
    for (uint32_t r = 0; r < c->n_rows; r++) {
        uint32_t n_tokens = c->rows[r].start + c->rows[r].n_tokens;
        bool sealed = c->codec >= FIRST_SEALED_CODEC && !w->layer.sealed;
        if (sealed) n_tokens = (uint32_t)fkv_align_up(n_tokens, c->page_tokens); /* only full pages are sealed */
        uint32_t n_table = fkv_ceil_div(n_tokens, c->page_tokens);
        w->rows[r] = (fkv_attn_row){{w->tables + used, n_table, 1}, c->rows[r].start, c->rows[r].n_tokens, w->n_new};
        if (w->layer.sealed) w->rows[r].open = w->rows[r].view;
        used += n_table;
        w->n_new += c->rows[r].n_tokens;
        w->kv_bytes += (uint64_t)n_tokens * c->shape.n_kv_heads * w->layer.block.token_bytes;
        w->kv_bytes += (uint64_t)n_table * c->shape.n_kv_heads * fkv_block_page_bytes(&w->layer.block);

        fkv_attn_row whole = w->rows[r];
        whole.start = 0;
        whole.n_tokens = n_tokens;
        const uint32_t key_dim = fkv_attn_key_dim(&w->layer);
        size_t n = (size_t)n_tokens * c->shape.n_kv_heads * c->shape.head_dim;
        size_t n_keys = (size_t)n_tokens * c->shape.n_kv_heads * key_dim;
        void *k = allocate(n_keys * fkv_type_bytes(c->row_type));
        void *v = allocate(n * fkv_type_bytes(c->row_type));
        attn_random_rows(&state, c->row_type, key_dim, c->outliers, n_keys, k);
        attn_random_rows(&state, c->row_type, c->shape.head_dim, c->outliers, n, v);
        resize_rows(c->k, c->row_type, key_dim, 1, n_keys, k);
        resize_rows(c->v, c->row_type, c->shape.head_dim, 1, n, v);
        if (sealed)
            write_sealed(w, kernels, workers, &whole, k, v);
        else
            fkv_attn_write(kernels, &w->layer, &whole, 1, k, v, workers);
        if (keep) {
            w->k[r] = k;
            w->v[r] = v;
            continue;
        }
        free(k);
        free(v);
    }
    const uint32_t key_dim = fkv_attn_key_dim(&w->layer);
    size_t n = (size_t)w->n_new * c->shape.n_q_heads * key_dim;
    w->q = allocate(n * fkv_type_bytes(c->row_type));
    attn_random_rows(&state, c->row_type, key_dim, c->outliers, n, w->q);
    resize_rows(c->q, c->row_type, key_dim, 2, n, w->q);
    return true;
}

bool attn_fixture_open(attn_fixture *w, const attn_case *c, const fkv_cpu_kernels *kernels, fkv_workers *workers, uint64_t seed) {
    return open_fixture(w, c, kernels, workers, seed, false);
}

bool attn_fixture_open_keeping(attn_fixture *w, const attn_case *c, const fkv_cpu_kernels *kernels, fkv_workers *workers,
                               uint64_t seed) {
    return open_fixture(w, c, kernels, workers, seed, true);
}

void attn_fixture_close(attn_fixture *w) {
    free(w->pages);
    free(w->open);
    free(w->tables);
    free(w->q);
    for (uint32_t r = 0; r < MAX_MIX; r++) {
        free(w->k[r]);
        free(w->v[r]);
    }
}
