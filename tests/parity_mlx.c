/* Compares the MLX backend with the CPU codec and the scalar attention reference, over the codecs and shapes in attn_cases.h.
 * Pages that the backend has written are saved to a page file and compared byte by byte. Outputs are compared with reference
 * outputs over the same pages.
 *
 * On MLX's CPU backend every byte must be identical. On a GPU, where the order of additions in a rotation and the rounding of a
 * division may differ, codes may differ by one step; the differences are counted.
 *
 * usage: parity_mlx [plain|fused] [all|small|latent]
 * small: runs fewer shapes, because a GPU must first compile the kernels for each shape
 * latent: runs only latent layers
 */
#include "kernel_cases.h"

#include "../src/attn/attn_reference.h"
#include "../src/base/float16.h"
#include "../src/store/page_file_format.h"

#include <flatkv/mlx.h>

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Largest accepted relative error, as for the CPU kernels. The device sums in float, the reference in double. */
static const double DEVICE_TOLERANCE = 1e-3;
/* Upper bounds on the relative error of rounding an output to float16 and to bfloat16. */
static const double F16_ROUNDING = 6e-4;
static const double BF16_ROUNDING = 4e-3;

enum { CHUNK_TOKENS = 300, MAX_STEP_TOKENS = 512 };

static fkv_mlx_config mlx_config;
static fkv_workers *workers;
static char file_path[128];
static double worst_error;
static uint64_t n_bytes_compared;
static uint64_t n_codes_off;
static uint64_t n_halves_off;
static int n_passed;
static int n_failed;

static void must(bool good, const char *what) {
    if (good) return;
    printf("%s: %s\n", what, fkv_message());
    abort();
}

static void report(bool good, const attn_case *c, const char *what, double value) {
    if (good) {
        n_passed++;
        return;
    }
    n_failed++;
    printf("FAILED %uq/%ukv/%u %s page %u window %u sinks %u cap %g rotate %d types %d/%d rows", c->shape.n_q_heads,
           c->shape.n_kv_heads, c->shape.head_dim, attn_codecs[c->codec].name, c->page_tokens, c->window, c->n_sinks,
           (double)c->softcap, (int)c->rotate, (int)c->page_type, (int)c->row_type);
    for (uint32_t r = 0; r < c->n_rows; r++) printf(" %u+%u", c->rows[r].start, c->rows[r].n_tokens);
    printf(": %s (%g)\n", what, value);
}

static mlx_dtype dtype_of(fkv_type type) { return type == FKV_F32 ? MLX_FLOAT32 : type == FKV_F16 ? MLX_FLOAT16 : MLX_BFLOAT16; }

/* Returns rows as an MLX array. rows: [n, heads, D] */
static mlx_array array_of(const void *rows, uint32_t n, uint32_t heads, uint32_t dim, fkv_type type) {
    return mlx_array_new_data(rows, (const int[]){(int)n, (int)heads, (int)dim}, 3, dtype_of(type));
}

/* Returns the channel bits of the fixture, [G, D], or NULL if its keys are not calibrated. The result is valid until the next
 * call. */
static const uint8_t *bits_of(const attn_case *c, const attn_fixture *w) {
    static uint8_t bits[MAX_CALIBRATED_HEADS * FKV_MAX_HEAD_DIM];
    if (!w->layer.calibrated) return NULL;
    for (uint32_t h = 0; h < c->shape.n_kv_heads; h++)
        for (uint32_t p = 0; p < c->shape.head_dim; p++)
            bits[h * c->shape.head_dim + w->channels[h][p]] = (uint8_t)(2 * fkv_channel_digits(&w->orders[h], p));
    return bits;
}

static fkv_config config_of(const attn_case *c, const attn_fixture *w) {
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer = (fkv_layer_config){.n_q_heads = c->shape.n_q_heads,
                                      .n_kv_heads = c->shape.n_kv_heads,
                                      .head_dim = c->shape.head_dim,
                                      .rope_dim = c->shape.rope_dim,
                                      .scale = c->shape.rope_dim != 0 ? w->layer.scale : 0.0f,
                                      .window = c->window,
                                      .n_sinks = c->n_sinks,
                                      .softcap = c->softcap,
                                      .k = attn_codecs[c->codec].k,
                                      .v = attn_codecs[c->codec].v,
                                      .sink_logits = w->layer.sink_logits,
                                      .channel_bits = bits_of(c, w)};
    config.page_type = c->page_type;
    config.rotate = c->rotate;
    config.rotation_seed = 11; /* same seed as in attn_fixture_open() */
    config.page_tokens = c->page_tokens;
    config.max_seqs = c->n_rows;
    config.max_step_tokens = MAX_STEP_TOKENS;
    for (uint32_t r = 0; r < c->n_rows; r++) config.max_tokens += w->rows[r].start + w->rows[r].n_tokens;
    return config;
}

static fkv_cache *open_cache(const attn_case *c, const attn_fixture *w) {
    const fkv_config config = config_of(c, w);
    fkv_mlx_config by = mlx_config;
    if (c->shape.rope_dim != 0 && by.way == FKV_MLX_FUSED) by.way = FKV_MLX_AUTO; /* some latent layers have no fused kernels */
    fkv_cache *cache = NULL;
    must(fkv_mlx_cache_open(&config, &by, &cache) == FKV_OK, "fkv_mlx_cache_open");
    return cache;
}

/* Returns the number of channels of a key. */
static uint32_t key_dim(const attn_case *c) { return c->shape.head_dim + c->shape.rope_dim; }

/* Returns the size of a row of K or V. A latent layer has no rows of V. */
static size_t kv_row_bytes(const attn_case *c) { return (size_t)c->shape.n_kv_heads * key_dim(c) * fkv_type_bytes(c->row_type); }

/* Returns rows of values as an MLX array, or an empty array for a latent layer. */
static mlx_array values_of(const attn_case *c, const void *rows, uint32_t n) {
    return c->shape.rope_dim != 0 ? mlx_array_new() : array_of(rows, n, c->shape.n_kv_heads, c->shape.head_dim, c->row_type);
}

/* Writes tokens [from, from + n) of sequence r. */
static void write_tokens(fkv_step *step, const attn_fixture *w, uint32_t r, uint32_t from, uint32_t n) {
    const attn_case *c = &w->c;
    const size_t at = from * kv_row_bytes(c);
    mlx_array k = array_of((const uint8_t *)w->k[r] + at, n, c->shape.n_kv_heads, key_dim(c), c->row_type);
    mlx_array v = values_of(c, c->shape.rope_dim == 0 ? (const uint8_t *)w->v[r] + at : NULL, n);
    must(fkv_mlx_write(step, 0, k, v) == FKV_OK, "fkv_mlx_write");
    (void)mlx_array_free(k);
    (void)mlx_array_free(v);
}

/* Writes the history of each sequence separately, in chunks. */
static void write_histories(fkv_cache *cache, const attn_fixture *w, fkv_seq *seqs) {
    fkv_step *step = NULL;
    for (uint32_t r = 0; r < w->c.n_rows; r++) {
        const fkv_seq_config seq_config = {.max_tokens = w->rows[r].start + w->rows[r].n_tokens};
        must(fkv_seq_open(cache, &seq_config, &seqs[r], NULL) == FKV_OK, "fkv_seq_open");
        for (uint32_t done = 0; done < w->rows[r].start;) {
            const fkv_row chunk = {seqs[r], fkv_min_u32(CHUNK_TOKENS, w->rows[r].start - done)};
            must(fkv_step_begin(cache, &chunk, 1, &step) == FKV_OK, "fkv_step_begin");
            write_tokens(step, w, r, done, chunk.n_tokens);
            must(fkv_step_commit(step) == FKV_OK, "fkv_step_commit");
            done += chunk.n_tokens;
        }
    }
}

/* Runs the step of the case over all sequences and returns its output. */
static mlx_array run_step(fkv_cache *cache, const attn_fixture *w, const fkv_seq *seqs) {
    const attn_case *c = &w->c;
    fkv_row rows[MAX_MIX];
    fkv_step *step = NULL;
    for (uint32_t r = 0; r < c->n_rows; r++) rows[r] = (fkv_row){seqs[r], w->rows[r].n_tokens};
    /* K and V of the new tokens of all sequences */
    uint8_t *side[FKV_N_SIDES];
    for (int s = 0; s < FKV_N_SIDES; s++) {
        side[s] = malloc(w->n_new * kv_row_bytes(c));
        size_t at = 0;
        for (uint32_t r = 0; r < c->n_rows && (s == FKV_SIDE_K || c->shape.rope_dim == 0); r++) {
            const uint8_t *from = (const uint8_t *)(s == FKV_SIDE_K ? w->k[r] : w->v[r]) + w->rows[r].start * kv_row_bytes(c);
            memcpy(side[s] + at, from, w->rows[r].n_tokens * kv_row_bytes(c));
            at += w->rows[r].n_tokens * kv_row_bytes(c);
        }
    }
    mlx_array k = array_of(side[FKV_SIDE_K], w->n_new, c->shape.n_kv_heads, key_dim(c), c->row_type);
    mlx_array v = values_of(c, side[FKV_SIDE_V], w->n_new);
    mlx_array q = array_of(w->q, w->n_new, c->shape.n_q_heads, key_dim(c), c->row_type);
    mlx_array out = mlx_array_new();
    must(fkv_step_begin(cache, rows, c->n_rows, &step) == FKV_OK, "fkv_step_begin");
    must(fkv_mlx_write(step, 0, k, v) == FKV_OK, "fkv_mlx_write");
    must(fkv_mlx_attend(step, 0, q, &out) == FKV_OK, "fkv_mlx_attend");
    must(fkv_step_commit(step) == FKV_OK, "fkv_step_commit");
    must(mlx_array_eval(out) == 0, fkv_mlx_last_error());
    (void)mlx_array_free(k);
    (void)mlx_array_free(v);
    (void)mlx_array_free(q);
    free(side[FKV_SIDE_K]);
    free(side[FKV_SIDE_V]);
    return out;
}

/* Counts the codes that differ and returns the largest difference. */
static uint32_t compare_codes(const uint8_t *a, const uint8_t *b, uint32_t bytes, uint32_t bits, uint32_t *n_off) {
    uint32_t worst = 0;
    const uint32_t mask = (1u << bits) - 1u;
    for (uint32_t i = 0; i < bytes; i++) {
        for (uint32_t at = 0; at < 8; at += bits) {
            const int off = (int)((uint32_t)a[i] >> at & mask) - (int)((uint32_t)b[i] >> at & mask);
            *n_off += off != 0;
            worst = fkv_max_u32(worst, (uint32_t)abs(off));
        }
    }
    return worst;
}

/* Counts the 16-bit values that differ and returns the largest difference in ulps. */
static uint32_t compare_halves(const uint8_t *a, const uint8_t *b, uint32_t bytes, uint32_t *n_off) {
    uint32_t worst = 0;
    for (uint32_t i = 0; i < bytes; i += 2) {
        uint16_t x;
        uint16_t y;
        memcpy(&x, a + i, 2);
        memcpy(&y, b + i, 2);
        *n_off += x != y;
        worst = fkv_max_u32(worst, (uint32_t)abs((int)x - (int)y));
    }
    return worst;
}

/* Compares the page file of one sequence with the fixture's pages. Only slots of existing tokens are compared. */
static void check_bytes(const attn_fixture *w, uint32_t r, const uint8_t *file) {
    const attn_case *c = &w->c;
    const fkv_block *block = &w->layer.block;
    fkv_file_header header;
    memcpy(&header, file, sizeof header);
    uint32_t worst = 0;
    uint32_t codes_off = 0;
    uint32_t halves_off = 0;
    const uint8_t *got = file + header.data_offset;
    for (uint32_t t = 0; t < header.n_tokens; t++) {
        const uint32_t page = t / c->page_tokens;
        const uint8_t *expected = w->pages + (size_t)fkv_page_at(w->rows[r].view, page) * c->shape.n_kv_heads * block->bytes;
        for (uint32_t head = 0; head < c->shape.n_kv_heads; head++) {
            for (int part = 0; part < (int)FKV_N_SIDES * FKV_N_PARTS; part++) {
                const fkv_codec *codec = &block->codec[part / FKV_N_PARTS];
                const uint32_t bytes = codec->row_bytes[part % FKV_N_PARTS];
                const size_t at = (size_t)head * block->bytes + block->offset[part / FKV_N_PARTS][part % FKV_N_PARTS] +
                                  (size_t)(t % c->page_tokens) * bytes;
                const uint8_t *here = got + (size_t)page * c->shape.n_kv_heads * block->bytes + at;
                const bool is_codes = codec->kind == FKV_CODEC_AFFINE && part % FKV_N_PARTS == FKV_PART_CODES;
                worst = fkv_max_u32(worst, is_codes ? compare_codes(here, expected + at, bytes, codec->bits, &codes_off)
                                                    : compare_halves(here, expected + at, bytes, &halves_off));
                n_bytes_compared += bytes;
            }
        }
    }
    n_codes_off += codes_off;
    n_halves_off += halves_off;
    bool is_gpu = mlx_config.way == FKV_MLX_FUSED;
    report(is_gpu ? worst <= 1 : worst == 0, c, "packed bytes differ from the codec's by", worst);
}

/* Returns the whole page file. */
static uint8_t *file_bytes(void) {
    FILE *file = fopen(file_path, "rb");
    must(file != NULL && fseek(file, 0, SEEK_END) == 0, "reading the page file");
    const long bytes = ftell(file);
    rewind(file);
    uint8_t *all = malloc((size_t)bytes);
    must(fread(all, 1, (size_t)bytes, file) == (size_t)bytes, "reading the page file");
    (void)fclose(file);
    return all;
}

/* Returns the page file that a cache on the host saves for sequence r of the fixture. */
static uint8_t *host_file(const attn_fixture *w, uint32_t r) {
    const fkv_config config = config_of(&w->c, w);
    const uint32_t n_tokens = w->rows[r].start + w->rows[r].n_tokens;
    fkv_cache *cache = NULL;
    fkv_step *step = NULL;
    fkv_seq seq = 0;
    fkv_config of_rows = config;
    of_rows.row_type = w->c.row_type;
    of_rows.n_threads = 1;
    must(fkv_cache_open(&of_rows, &cache) == FKV_OK, "fkv_cache_open");
    must(fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = n_tokens}, &seq, NULL) == FKV_OK, "fkv_seq_open");
    for (uint32_t done = 0; done < n_tokens;) {
        const fkv_row chunk = {seq, fkv_min_u32(MAX_STEP_TOKENS, n_tokens - done)};
        const size_t at = done * kv_row_bytes(&w->c);
        must(fkv_step_begin(cache, &chunk, 1, &step) == FKV_OK, "fkv_step_begin");
        const uint8_t *v = w->c.shape.rope_dim == 0 ? (const uint8_t *)w->v[r] + at : NULL;
        must(fkv_write(step, 0, (const uint8_t *)w->k[r] + at, v) == FKV_OK, "fkv_write");
        must(fkv_step_commit(step) == FKV_OK, "fkv_step_commit");
        done += chunk.n_tokens;
    }
    uint32_t *tokens = calloc(n_tokens, sizeof *tokens);
    must(fkv_seq_save(cache, seq, tokens, 0, file_path) == FKV_OK, "fkv_seq_save");
    free(tokens);
    fkv_cache_close(cache);
    return file_bytes();
}

/* Compares the page file of a sealed layer with the file that a cache on the host saves. On a GPU, the result of a rotation may
 * differ slightly, so a value may round to a different code. The norm of the row then differs too. */
static void check_host_bytes(const attn_fixture *w, uint32_t r, const uint8_t *file) {
    uint8_t *host = host_file(w, r);
    fkv_file_header header;
    memcpy(&header, host, sizeof header);
    uint64_t n_off = 0;
    for (uint64_t i = header.data_offset; i < header.file_bytes; i++) n_off += file[i] != host[i];
    const uint64_t n = header.file_bytes - header.data_offset;
    n_bytes_compared += n;
    report(memcmp(file, host, offsetof(fkv_file_header, sha256)) == 0, &w->c, "the file header differs from the host's", 0);
    report(n_off <= (mlx_config.way == FKV_MLX_FUSED ? n / 1000 : 0), &w->c, "bytes differ from the host's", (double)n_off);
    free(host);
}

static void check_files(fkv_cache *cache, const attn_fixture *w, const fkv_seq *seqs) {
    for (uint32_t r = 0; r < w->c.n_rows; r++) {
        uint32_t n_tokens = w->rows[r].start + w->rows[r].n_tokens;
        uint32_t *tokens = calloc(n_tokens, sizeof *tokens);
        must(fkv_seq_save(cache, seqs[r], tokens, 0, file_path) == FKV_OK, "fkv_seq_save");
        uint8_t *all = file_bytes();
        if (w->layer.sealed)
            check_host_bytes(w, r, all);
        else
            check_bytes(w, r, all);
        free(all);
        free(tokens);
    }
}

/* ---- rows with NaN ---- */

/* Overwrites rows with NaN: K and V of a token before every window, and V of a token that only the first query sees. */
static void spoil_page(const attn_fixture *w, uint32_t r, uint32_t page, uint8_t *bytes) {
    const uint32_t masked = w->rows[r].start - w->layer.window;
    const uint32_t tokens = w->layer.block.page_tokens;
    if (masked / tokens == page) kernel_spoil_row(&w->layer.block, w->layer.n_kv_heads, bytes, masked % tokens, true);
    if ((masked + 1) / tokens == page)
        kernel_spoil_row(&w->layer.block, w->layer.n_kv_heads, bytes, (masked + 1) % tokens, false);
}

/* Overwrites the rows that spoil_page() overwrites, but in the bytes of a page file, and recomputes the checksums. NaN can enter
 * a cache only through a file. */
static void spoil_file(const attn_fixture *w, uint32_t r, uint8_t *file) {
    fkv_file_header header;
    memcpy(&header, file, sizeof header);
    const size_t page_bytes = (size_t)w->layer.n_kv_heads * w->layer.block.bytes;
    for (uint64_t i = 0; i < header.n_pages; i++) {
        fkv_file_entry entry;
        uint8_t *at = file + header.index_offset + i * sizeof entry;
        memcpy(&entry, at, sizeof entry);
        spoil_page(w, r, entry.logical, file + entry.offset);
        entry.crc32c = fkv_crc32c(0, file + entry.offset, page_bytes);
        memcpy(at, &entry, sizeof entry);
    }
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, file, offsetof(fkv_file_header, sha256));
    fkv_sha256_add(&sha, file + sizeof header, header.data_offset - sizeof header);
    must(fkv_sha256_close(&sha, header.sha256) == FKV_OK, "sha256");
    memcpy(file, &header, sizeof header);
}

/* Writes NaN to some rows, both in the fixture's pages and in the cache. The cache is changed through files: each sequence is
 * saved, changed and loaded again. */
static void spoil(fkv_cache *cache, const attn_fixture *w, fkv_seq *seqs) {
    for (uint32_t r = 0; r < w->c.n_rows; r++) {
        for (uint32_t page = 0; page < w->rows[r].view.n_fixed; page++)
            spoil_page(w, r, page,
                       w->pages + (size_t)fkv_page_at(w->rows[r].view, page) * w->layer.n_kv_heads * w->layer.block.bytes);
        uint32_t *tokens = calloc(w->rows[r].start, sizeof *tokens);
        must(fkv_seq_save(cache, seqs[r], tokens, 0, file_path) == FKV_OK, "fkv_seq_save");
        free(tokens);
        uint8_t *all = file_bytes();
        spoil_file(w, r, all);
        FILE *file = fopen(file_path, "r+b");
        fkv_file_header header;
        memcpy(&header, all, sizeof header);
        must(file != NULL && fwrite(all, 1, header.file_bytes, file) == header.file_bytes && fclose(file) == 0,
             "writing the page file");
        free(all);
        fkv_seq_close(cache, seqs[r]);
        const fkv_seq_config seq_config = {.max_tokens = w->rows[r].start + w->rows[r].n_tokens};
        must(fkv_seq_load(cache, &seq_config, file_path, &seqs[r]) == FKV_OK, "fkv_seq_load");
    }
}

/* ---- one case ---- */

/* Compares the output of the step with the reference. Values that are NaN in the reference must be NaN in the output. */
static void check_answer(const attn_fixture *w, mlx_array out) {
    const attn_case *c = &w->c;
    const size_t n = (size_t)w->n_new * c->shape.n_q_heads * c->shape.head_dim;
    float *reference = malloc(n * sizeof *reference);
    const size_t n_query = (size_t)w->n_new * c->shape.n_q_heads * key_dim(c);
    float *queries = malloc(n_query * sizeof *queries);
    fkv_rows_to_f32(c->row_type, w->q, queries, n_query);
    fkv_attn_layer layer = w->layer;
    layer.row_type = FKV_F32;
    fkv_attn_reference(&layer, w->rows, c->n_rows, queries, reference);
    mlx_array floats = mlx_array_new();
    must(mlx_astype(&floats, out, MLX_FLOAT32, mlx_config.stream) == 0 && mlx_array_eval(floats) == 0, fkv_mlx_last_error());
    const float *got = mlx_array_data_float32(floats);
    double worst = 0;
    size_t n_hidden = 0;
    for (size_t row = 0; row < n; row += c->shape.head_dim) {
        double error = relative_l2(got + row, reference + row, c->shape.head_dim);
        if (kernel_has_nan(reference + row, c->shape.head_dim))
            n_hidden += !kernel_has_nan(got + row, c->shape.head_dim);
        else if (!(error <= worst))
            worst = error;
    }
    const double rounding = c->row_type == FKV_F32 ? 0 : c->row_type == FKV_F16 ? F16_ROUNDING : BF16_ROUNDING;
    report(worst <= DEVICE_TOLERANCE + rounding, c, "relative L2 error against the reference", worst);
    report(n_hidden == 0, c, "outputs that should be NaN are not", (double)n_hidden);
    report(mlx_array_dtype(out) == dtype_of(c->row_type), c, "the output type differs from the query type", 0);
    if (c->row_type == FKV_F32 && !(worst <= worst_error)) worst_error = worst;
    (void)mlx_array_free(floats);
    free(reference);
    free(queries);
}

/* Runs one case and checks its pages and outputs. spoilt: true if some rows of the history contain NaN. */
static void check_case_as(const attn_case *given, bool spoilt) {
    attn_fixture w;
    if (!attn_fixture_open_keeping(&w, given, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers, 20261115)) return;
    const attn_case c = w.c;
    fkv_cache *cache = open_cache(&c, &w);
    fkv_seq seqs[MAX_MIX];
    write_histories(cache, &w, seqs);
    if (spoilt) spoil(cache, &w, seqs);
    mlx_array out = run_step(cache, &w, seqs);
    check_answer(&w, out);
    if (c.window == 0 || w.layer.sealed) check_files(cache, &w, seqs);
    report(fkv_cache_consistent(cache), &c, "the cache is not consistent", 0);
    (void)mlx_array_free(out);
    fkv_cache_close(cache);
    attn_fixture_close(&w);
}

static void check_case(const attn_case *given) { check_case_as(given, false); }

static const attn_shape shapes[] = {{4, 4, 64},  {4, 1, 80},  {9, 3, 96},  {8, 2, 128},
                                    {4, 1, 256}, {7, 1, 512}, {40, 1, 64}, {2, 2, 16}};

static void every_codec_and_shape(void) {
    for (uint32_t codec = 0; codec < FIRST_SEALED_CODEC; codec++) {
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            attn_case c = {.shape = shapes[s], .codec = codec, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 2};
            c.rows[0] = (attn_mix){130, 1};
            c.rows[1] = (attn_mix){61, 5};
            c.outliers = (codec + s) % 2 == 1;
            check_case(&c);
            c.page_type = FKV_BF16;
            c.row_type = codec % 3 == 0 ? FKV_F16 : codec % 3 == 1 ? FKV_BF16 : FKV_F32;
            c.rotate = (fkv_rotate)(1 + (codec + s) % 3);
            c.outliers = !c.outliers;
            check_case(&c);
        }
    }
}

/* Tests sealed layers with all combinations of bit width and shape, or with half of them without fused kernels. Queries are in
 * the first pages, at page boundaries and in layers with windows, and some cases have queries in several tiles. */
static void sealed_layers(void) {
    const uint32_t n_codecs = mlx_config.way == FKV_MLX_FUSED ? FIRST_CALIBRATED_CODEC : N_ATTN_CODECS;
    for (uint32_t codec = FIRST_SEALED_CODEC; codec < n_codecs; codec++) {
        for (uint32_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            if (mlx_config.way != FKV_MLX_FUSED && (codec + s) % 2 != 0) continue;
            attn_case c = {.shape = shapes[s], .codec = codec, .page_tokens = 16u << (codec + s) % 5, .n_rows = 3, .opens = true};
            c.page_type = (codec + s) % 2 == 0 ? FKV_F16 : FKV_BF16;
            c.row_type = codec % 3 == 0 ? FKV_F16 : codec % 3 == 1 ? FKV_BF16 : FKV_F32;
            c.rotate = (fkv_rotate)(s % 4);
            c.outliers = s % 2 == 1;
            c.rows[0] = (attn_mix){130, 1};
            c.rows[1] = (attn_mix){61, 5};
            c.rows[2] = (attn_mix){3, 90};
            check_case(&c);
        }
    }
    static const uint32_t starts[] = {0, 15, 16, 31, 64, 257, 1023, 1030};
    for (uint32_t s = 0; s < sizeof starts / sizeof starts[0]; s++) {
        attn_case c = {.shape = {4, 2, 64}, .codec = FIRST_SEALED_CODEC, .page_tokens = 16u << s % 3, .n_rows = 2, .opens = true};
        c.page_type = FKV_F16;
        c.window = s % 2 == 0 ? 0 : 40;
        c.n_sinks = s % 4 == 1 ? 5 : s % 4 == 3 ? 70 : 0;
        c.softcap = s % 3 == 0 ? 5.0f : 0.0f;
        c.rotate = FKV_ROTATE_V;
        c.rows[0] = (attn_mix){starts[s], 1};
        c.rows[1] = (attn_mix){starts[s], 70};
        check_case(&c);
    }
    attn_case c = {
        .shape = {4, 2, 64}, .codec = FIRST_SEALED_CODEC, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 2, .opens = true};
    c.rows[0] = (attn_mix){5000, 1};
    c.rows[1] = (attn_mix){2000, 300};
    check_case(&c);
}

/* Tests numbers of cached tokens around every boundary: one token, a page and a tile. */
static void every_length_and_mask(void) {
    static const uint32_t starts[] = {0, 1, 15, 16, 17, 63, 64, 255, 257, 700, 1023, 1024, 1030};
    static const struct {
        uint32_t window;
        uint32_t n_sinks;
    } masks[] = {{0, 0}, {1, 0}, {7, 0}, {7, 4}, {64, 1}, {65, 70}, {200, 16}};
    for (size_t m = 0; m < sizeof masks / sizeof masks[0]; m++) {
        for (size_t s = 0; s < sizeof starts / sizeof starts[0]; s++) {
            attn_case c = {.shape = {4, 2, 64}, .codec = 2, .page_tokens = 16u << (s + m) % 5, .page_type = FKV_F16, .n_rows = 3};
            c.window = masks[m].window;
            c.n_sinks = masks[m].n_sinks;
            c.softcap = s % 3 == 0 ? 5.0f : 0.0f;
            c.sinks = s % 2 == 0 ? 4.0f : 0.0f;
            c.row_type = (fkv_type)(s % 3);
            c.rows[0] = (attn_mix){starts[s], 1};
            c.rows[1] = (attn_mix){starts[s] / 2, 1 + (uint32_t)(s % 9)};
            c.rows[2] = (attn_mix){starts[sizeof starts / sizeof starts[0] - 1 - s], 19};
            check_case(&c);
        }
    }
}

/* Tests histories with several tiles (on a GPU, also several splits), and a chunk of several query blocks. */
static void long_histories(void) {
    attn_case c = {.shape = {4, 2, 64}, .codec = 2, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 3};
    c.rows[0] = (attn_mix){5000, 1};
    c.rows[1] = (attn_mix){8188, 8};
    c.rows[2] = (attn_mix){300, 3};
    check_case(&c);
    c.window = 600;
    c.n_sinks = 5;
    check_case(&c);
    c.n_rows = 1;
    c.codec = 0;
    check_case(&c);
    c = (attn_case){.shape = {16, 2, 64}, .codec = 3, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 1};
    c.rows[0] = (attn_mix){1000, 300};
    check_case(&c);
    c.window = 100;
    check_case(&c);
}

/* Tests soft caps over the whole float range, in decode and prefill. */
static void every_softcap(void) {
    for (int i = 0; i < N_KERNEL_SOFTCAPS; i++) {
        attn_case c = {.shape = {4, 2, 64}, .codec = 2, .page_tokens = 64, .page_type = FKV_F16, .outliers = true, .n_rows = 2};
        c.softcap = kernel_softcaps[i];
        c.rows[0] = (attn_mix){200, 2};
        c.rows[1] = (attn_mix){90, 19};
        check_case(&c);
    }
}

/* Tests rows with NaN that are visible to some queries and masked for others, in decode and prefill. */
static void spoilt_rows(void) {
    static const uint32_t codecs[] = {2, 3, 0};
    for (size_t i = 0; i < sizeof codecs / sizeof codecs[0]; i++) {
        attn_case c = {.shape = {4, 2, 64}, .codec = codecs[i], .page_tokens = 64, .page_type = FKV_F16, .n_rows = 3};
        c.window = 100;
        c.n_sinks = 3;
        c.rows[0] = (attn_mix){300, 1};
        c.rows[1] = (attn_mix){290, 3};
        c.rows[2] = (attn_mix){310, 19};
        check_case_as(&c, true);
    }
}

/* Tests latent layers with every codec that encodes single rows, with masks, and with histories of several tiles. */
static void latent_layers(void) {
    static const attn_shape latent_shapes[] = {{16, 1, 512, 64}, {5, 1, 256, 32}, {40, 1, 64, 16}, {3, 1, 96, 48}};
    enum { N_SHAPES = sizeof latent_shapes / sizeof latent_shapes[0] };
    for (uint32_t i = 0; i < 2 * FIRST_SEALED_CODEC; i++) {
        attn_case c = {.shape = latent_shapes[i % N_SHAPES], .codec = i / 2, .page_tokens = 16u << i % 3, .n_rows = 2};
        c.page_type = i % 3 == 0 ? FKV_BF16 : FKV_F16;
        c.row_type = (fkv_type)(i % 3);
        c.rotate = (fkv_rotate)(i % 2 == 0 ? FKV_ROTATE_NONE : FKV_ROTATE_K);
        c.window = i % 5 == 4 ? 70 : 0;
        c.n_sinks = i % 5 == 4 ? 3 : 0;
        c.softcap = i % 4 == 3 ? 30.0f : 0.0f;
        c.rows[0] = (attn_mix){i % 6 == 0 ? 1100 : 130, 1};
        c.rows[1] = (attn_mix){61, 9};
        c.outliers = i % 2 == 1;
        check_case(&c);
    }
}

/* Tests sealed latent layers. */
static void sealed_latent_layers(void) {
    static const attn_shape latent_shapes[] = {{16, 1, 512, 64}, {5, 1, 256, 32}, {40, 1, 64, 16}, {3, 1, 96, 48}};
    for (uint32_t i = 0; i < 12; i++) {
        attn_case c = {.shape = latent_shapes[i % 4],
                       .codec = FIRST_SEALED_CODEC + (i < 8 ? 0 : 2), /* s4/s4 or s2/s2 */
                       .page_tokens = 16u << i % 3,
                       .n_rows = 2,
                       .opens = true};
        c.page_type = i % 2 == 0 ? FKV_F16 : FKV_BF16;
        c.row_type = (fkv_type)(i % 3);
        c.rotate = (fkv_rotate)(i / 2 % 4);
        c.window = i % 5 == 4 ? 150 : 0;
        c.n_sinks = i % 5 == 4 ? 3 : 0;
        c.rows[0] = (attn_mix){i % 6 == 0 ? 1100 : 270, 1};
        c.rows[1] = (attn_mix){61, 90};
        c.outliers = i % 2 == 1;
        check_case(&c);
    }
}

int main(int argc, char **argv) {
    const char *way = argc > 1 ? argv[1] : "plain";
    (void)setenv("MLX_ENABLE_TF32", "0", 1); /* by default, MLX rounds the operands of float32 products on CUDA to TF32 */
    mlx_config = fkv_mlx_config_default();
    mlx_config.way = strcmp(way, "fused") == 0 ? FKV_MLX_FUSED : FKV_MLX_PLAIN;
    mlx_config.stream = mlx_config.way == FKV_MLX_FUSED ? mlx_default_gpu_stream_new() : mlx_default_cpu_stream_new();
    (void)snprintf(file_path, sizeof file_path, "%s/flatkv-parity-mlx-%d.fkv", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp",
                   (int)getpid());
    void *place = aligned_alloc(64, fkv_align_up(fkv_workers_bytes(1), 64));
    must(place != NULL, "malloc");
    memset(place, 0, fkv_workers_bytes(1));
    must(fkv_workers_open(place, 1, &workers) == FKV_OK, "fkv_workers_open");

    const char *extent = argc > 2 ? argv[2] : "all";
    const bool only_latent = strcmp(extent, "latent") == 0;
    for (size_t i = 0; i < N_KERNEL_CASES; i++)
        if (!only_latent || kernel_cases[i].shape.rope_dim != 0) check_case(&kernel_cases[i]);
    latent_layers();
    if (mlx_config.way != FKV_MLX_FUSED) sealed_latent_layers(); /* these layers have no fused kernels */
    if (strcmp(extent, "all") == 0) {
        every_codec_and_shape();
        every_length_and_mask();
    }
    if (!only_latent) {
        sealed_layers();
        long_histories();
        every_softcap();
        spoilt_rows();
    }
    (void)unlink(file_path);
    fkv_workers_close(workers);
    free(place);
    (void)mlx_stream_free(mlx_config.stream);
    printf(
        "%s: largest relative L2 error of float32 rows %.1e; of %llu bytes written, %llu codes and %llu 16-bit values differ\n",
        way, worst_error, (unsigned long long)n_bytes_compared, (unsigned long long)n_codes_off,
        (unsigned long long)n_halves_off);
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 && n_passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
