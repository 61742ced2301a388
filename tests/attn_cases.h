/* Table of attention cases, shared by the parity tests and bench_attn. A case has a shape, a codec, a mask and a batch of rows. A
 * small fixture (pages, page tables, random rows) runs one case.
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
    uint32_t rope_dim; /* number of RoPE channels of a latent layer; 0 in other layers */
} attn_shape;

typedef struct attn_codec {
    const char *name;
    fkv_codec_config k;
    fkv_codec_config v;
} attn_codec;

#define SEALED_K(bits) {bits, 0, FKV_CODEC_SEALED}
#define SEALED_V(bits) {bits, 0, FKV_CODEC_SEALED_V}

/* Sealed codecs come last, starting at FIRST_SEALED_CODEC. */
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
    {"s4/s3", SEALED_K(4), SEALED_V(3)},
    {"c4/s4", {4, 0, FKV_CODEC_CALIBRATED}, SEALED_V(4)},
    {"c3/s3", {3, 0, FKV_CODEC_CALIBRATED}, SEALED_V(3)},
};
enum {
    N_ATTN_CODECS = sizeof attn_codecs / sizeof attn_codecs[0],
    FIRST_SEALED_CODEC = N_ATTN_CODECS - 7,
    FIRST_CALIBRATED_CODEC = N_ATTN_CODECS - 2
};

/* One sequence in a step: `start` tokens are already stored in its pages, and n_tokens tokens are new. */
typedef struct attn_mix {
    uint32_t start;
    uint32_t n_tokens;
} attn_mix;

enum { MAX_MIX = 6, MAX_CASE_HEADS = 128, MAX_CALIBRATED_HEADS = 8 };

/* Scale factors for the values of Q, K or V. A factor of 0 means 1. */
typedef struct attn_sizes {
    float gain; /* scale factor for all values */
    float peak; /* in one channel per row, the value is replaced with its absolute value times this factor; in Q, only every
                   second row is changed */
} attn_sizes;

typedef struct attn_case {
    attn_shape shape;
    uint32_t codec; /* index into attn_codecs */
    uint32_t page_tokens;
    uint32_t window;
    uint32_t n_sinks;
    float softcap;
    fkv_rotate rotate;
    fkv_type page_type;
    fkv_type row_type;
    bool outliers; /* true if a few channels are 20 times larger than the others, as in real keys */
    uint32_t n_rows;
    attn_mix rows[MAX_MIX];
    float scale; /* factor by which scores are multiplied; 0 means 1 / sqrt(D) */
    attn_sizes q;
    attn_sizes k;
    attn_sizes v;
    float sinks; /* scale of the random learned sink logits; 0 if there are no sink logits */
    bool opens;  /* sealed codecs only: true if some pages are open, as in a real cache; false if all pages are sealed */
} attn_case;

/* Complete input of one case, built by attn_fixture_open(). Pages are in shuffled order and contain K and V of every token,
 * written by fkv_attn_write(). There are queries for the new tokens. */
typedef struct attn_fixture {
    attn_case c;
    fkv_attn_layer layer;
    fkv_attn_row rows[MAX_MIX];
    fkv_rotation rotate_k;
    fkv_rotation rotate_v;
    float sink_logits[MAX_CASE_HEADS];
    fkv_block head_blocks[MAX_CALIBRATED_HEADS]; /* block layout of each head, used only for calibrated keys; `layer` points to
                                                    this array */
    fkv_channel_order orders[MAX_CALIBRATED_HEADS];
    uint16_t channels[MAX_CALIBRATED_HEADS][FKV_MAX_HEAD_DIM];
    uint32_t n_new;   /* number of new tokens, T */
    uint8_t *pages;   /* the slab */
    uint8_t *open;    /* slab of open pages, with the same page indices as `pages`; NULL if there are no open pages */
    uint32_t *tables; /* page tables of all sequences */
    void *q;          /* [T, H, D + R] */
    void *k[MAX_MIX]; /* K rows of each sequence: [start + n_tokens, G, D + R]; NULL except after attn_fixture_open_keeping() */
    void *v[MAX_MIX];
    uint64_t kv_bytes; /* number of packed bytes read in one pass over all tokens */
} attn_fixture;

/* Builds the input of a case. Returns false if the group size does not divide the head dimension. Rotates K and V if their codecs
 * require a rotation. */
bool attn_fixture_open(attn_fixture *fixture, const attn_case *c, const fkv_cpu_kernels *kernels, fkv_workers *workers,
                       uint64_t seed);

/* Same as attn_fixture_open(), but also stores all K and V rows in k and v, so that a second implementation can write the same
 * rows. */
bool attn_fixture_open_keeping(attn_fixture *fixture, const attn_case *c, const fkv_cpu_kernels *kernels, fkv_workers *workers,
                               uint64_t seed);
void attn_fixture_close(attn_fixture *fixture);

/* Initializes only the layer of the fixture, without pages and rows. The fixture owns the rotations of the layer. */
bool attn_fixture_describe(attn_fixture *fixture, const attn_case *c);

uint64_t attn_random(uint64_t *state);
float attn_gaussian(uint64_t *state);

/* Writes n random values of `type`. With outliers, channels 3, 17 and dim - 2 of each row of `dim` values are 20 times larger. */
void attn_random_rows(uint64_t *state, fkv_type type, uint32_t dim, bool outliers, size_t n, void *out);

#endif
