/* The case table of attention, shared by the parity test and bench_attn: shapes, codecs, masks and mixes of rows, and the small
 * world (pages, tables, rows of numbers) that a case is run in.
 */
#ifndef FKV_ATTN_CASES_H
#define FKV_ATTN_CASES_H

#include "relative_l2.h"

#include "../src/attn/attn.h"
#include "../src/codec/channel_order.h"

typedef struct attn_shape {
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
} attn_shape;

typedef struct attn_codec {
    const char *name;
    fkv_codec_config k;
    fkv_codec_config v;
} attn_codec;

#define SEALED_K(bits) {bits, 0, FKV_CODEC_SEALED}
#define SEALED_V(bits) {bits, 0, FKV_CODEC_SEALED_V}

/* Those of sealed blocks come last, from FIRST_SEALED_CODEC on. */
static const attn_codec attn_codecs[] = {
    {"16/16", {16, 0}, {16, 0}},
    {"8/8", {8, 64}, {8, 64}},
    {"8/4", {8, 64}, {4, 64}},
    {"4/4", {4, 64}, {4, 64}},
    {"8/2", {8, 64}, {2, 64}},
    {"4/2", {4, 64}, {2, 64}},
    {"2/2", {2, 64}, {2, 64}},
    {"8/4 g32", {8, 32}, {4, 32}},
    {"4/4 g32", {4, 32}, {4, 32}},
    {"4/2 g128", {4, 128}, {2, 128}},
    {"8/8 g128/g32", {8, 128}, {8, 32}},
    {"16/4 g32", {16, 0}, {4, 32}},
    {"2/16 g32", {2, 32}, {16, 0}},
    {"tq4/tq4", {4, 0, FKV_CODEC_TURBO}, {4, 0, FKV_CODEC_TURBO}},
    {"tq3/tq3", {3, 0, FKV_CODEC_TURBO}, {3, 0, FKV_CODEC_TURBO}},
    {"tq2/tq2", {2, 0, FKV_CODEC_TURBO}, {2, 0, FKV_CODEC_TURBO}},
    {"8/tq4", {8, 64}, {4, 0, FKV_CODEC_TURBO}},
    {"tq3/8", {3, 0, FKV_CODEC_TURBO}, {8, 64}},
    {"s4/s4", SEALED_K(4), SEALED_V(4)},
    {"s3/s3", SEALED_K(3), SEALED_V(3)},
    {"s2/s2", SEALED_K(2), SEALED_V(2)},
    {"s4/4", SEALED_K(4), {4, 64}},
    {"c4/s4", {4, 0, FKV_CODEC_CALIBRATED}, SEALED_V(4)},
    {"c3/s3", {3, 0, FKV_CODEC_CALIBRATED}, SEALED_V(3)},
};
enum {
    N_ATTN_CODECS = sizeof attn_codecs / sizeof attn_codecs[0],
    FIRST_SEALED_CODEC = N_ATTN_CODECS - 6,
    FIRST_CALIBRATED_CODEC = N_ATTN_CODECS - 2
};

/* One sequence of a step: `start` tokens are in the pages before it, n_tokens are new. */
typedef struct attn_mix {
    uint32_t start;
    uint32_t n_tokens;
} attn_mix;

enum { MAX_MIX = 6, MAX_CASE_HEADS = 64, MAX_CALIBRATED_HEADS = 8 };

/* How large the numbers of one side are. 0 means 1. */
typedef struct attn_sizes {
    float gain; /* of all numbers */
    float peak; /* of one channel, beside the gain, without its sign; of queries in every other row, so that both kinds meet */
} attn_sizes;

typedef struct attn_case {
    attn_shape shape;
    uint32_t codec; /* into attn_codecs */
    uint32_t page_tokens;
    uint32_t window;
    uint32_t n_sinks;
    float softcap;
    fkv_rotate rotate;
    fkv_type page_type;
    fkv_type row_type;
    bool outliers; /* a few channels 20 times larger, as real keys have */
    uint32_t n_rows;
    attn_mix rows[MAX_MIX];
    float scale; /* 0: 1 / sqrt(D) */
    attn_sizes q;
    attn_sizes k;
    attn_sizes v;
    float sinks; /* learned, Gaussian, times this; 0: none */
    bool opens;  /* of a sealed codec: as a cache has it, with open pages; else all pages are sealed, and that is all there is */
} attn_case;

/* Everything a case needs, taken by attn_world_open(): pages under shuffled numbers, K and V of every token written through
 * fkv_attn_write(), queries for the new ones. */
typedef struct attn_world {
    attn_case c;
    fkv_attn_layer layer;
    fkv_attn_row rows[MAX_MIX];
    fkv_rotation rotate_k;
    fkv_rotation rotate_v;
    float sink_logits[MAX_CASE_HEADS];
    fkv_block head_blocks[MAX_CALIBRATED_HEADS]; /* of calibrated keys, with bits drawn at random; the layer looks at them here */
    fkv_channel_order orders[MAX_CALIBRATED_HEADS];
    uint16_t channels[MAX_CALIBRATED_HEADS][FKV_MAX_HEAD_DIM];
    uint32_t n_new;   /* T */
    uint8_t *pages;   /* the slab */
    uint8_t *open;    /* that of open pages, under the same numbers; NULL: none */
    uint32_t *tables; /* of all rows */
    void *q;          /* [T, H, D] */
    void *k[MAX_MIX]; /* of each row: [start + n_tokens, G, D]; NULL unless kept */
    void *v[MAX_MIX];
    uint64_t kv_bytes; /* packed, of all tokens: what one pass reads */
} attn_world;

/* False where the shape cannot be (the group does not divide the head dimension). A side whose codec needs it is rotated. */
bool attn_world_open(attn_world *world, const attn_case *c, const fkv_cpu_kernels *kernels, fkv_workers *workers, uint64_t seed);

/* The same, and the world keeps k and v of every row, for a second writer. */
bool attn_world_open_keeping(attn_world *world, const attn_case *c, const fkv_cpu_kernels *kernels, fkv_workers *workers,
                             uint64_t seed);
void attn_world_close(attn_world *world);

/* The layer alone, without pages or rows; world holds its rotations. */
bool attn_world_describe(attn_world *world, const attn_case *c);

uint64_t attn_random(uint64_t *state);
float attn_gaussian(uint64_t *state);

/* n numbers of row_type; outliers: channels 3, 17 and dim - 2 of each row of `dim` are 20 times larger. */
void attn_random_rows(uint64_t *state, fkv_type type, uint32_t dim, bool outliers, size_t n, void *out);

#endif
