/* The small operations that one instruction set brings to attention. The walk over pages, masks and splits is written once, above
 * them (src/attn/attend.c); what is here sees one tile: up to FKV_TILE_TOKENS consecutive tokens of one KV head, and the rows of
 * queries that look at it.
 *
 * For every row the result is a function of that row and the tile alone, to the last bit: not of the rows beside it, nor of
 * tokens that are masked for it.
 */
#ifndef FKV_KERNELS_H
#define FKV_KERNELS_H

#include "../../base/page_view.h"
#include "../../codec/block.h"

enum {
    FKV_TILE_TOKENS = 64, /* scores of a row in a tile lie this far apart */
    FKV_TILE_ROWS = 128,  /* rows of a tile, unless one KV head serves more query heads than that */
    FKV_MAX_TILE_ROWS = FKV_MAX_HEADS_PER_KV
};

/* Which tokens of a tile a row sees: t < end and (t >= begin or t < sinks). */
typedef struct fkv_row_mask {
    uint32_t sinks;
    uint32_t begin;
    uint32_t end;
} fkv_row_mask;

/* Online softmax of up to FKV_MAX_TILE_ROWS rows: out = sum of p * v, with p relative to exp(max); sum = sum of p. A row that has
 * seen no token has max = -inf, sum = 0, out = 0. */
typedef struct fkv_softmax {
    float *max; /* [rows] */
    float *sum; /* [rows] */
    float *out; /* [rows, D] */
} fkv_softmax;

/* The next tile, prefetched into L2 while one is worked on: its parts, or the whole block where a tile is a page. Kernels
 * prefetch a little with every step, so that memory is always busy. A step is four lines of 64 bytes; the last of a range may go
 * behind its end. */
enum { FKV_FETCH_RANGES = (int)FKV_N_SIDES * (int)FKV_N_PARTS, FKV_FETCH_SHARES = 128, FKV_FETCH_STEP = 256 };
typedef struct fkv_fetch {
    const uint8_t *at; /* of the range at hand */
    uint32_t n_left;   /* steps of it */
    uint32_t due;      /* steps, in shares of one */
    uint32_t n_steps;  /* of all ranges */
    uint32_t n_begun;  /* ranges */
    uint32_t n_ranges;
    struct {
        const uint8_t *at;
        uint32_t n_steps;
    } ranges[FKV_FETCH_RANGES];
} fkv_fetch;

FKV_INLINE void fkv_fetch_add(fkv_fetch *next, const uint8_t *at, uint64_t bytes) {
    uint32_t n_steps = (uint32_t)(fkv_align_up(bytes, FKV_FETCH_STEP) / FKV_FETCH_STEP);
    if (n_steps == 0) return;
    next->ranges[next->n_ranges].at = at;
    next->ranges[next->n_ranges++].n_steps = n_steps;
    next->n_steps += n_steps;
}

FKV_INLINE void fkv_fetch_step(const uint8_t *at) {
    FKV_PREFETCH_FAR(at);
    FKV_PREFETCH_FAR(at + 64);
    FKV_PREFETCH_FAR(at + 128);
    FKV_PREFETCH_FAR(at + 192);
}

/* Of FKV_FETCH_SHARES shares that are all of it: scores() asks for one half, values() for the other. */
FKV_INLINE void fkv_fetch_some(fkv_fetch *next, uint32_t n_shares) {
    const uint8_t *at = next->at;
    uint32_t n_left = next->n_left;
    uint32_t due = next->due + n_shares * next->n_steps;
    for (; due >= FKV_FETCH_SHARES; due -= FKV_FETCH_SHARES) {
        if (n_left == 0) {
            if (next->n_begun == next->n_ranges) break;
            at = next->ranges[next->n_begun].at;
            n_left = next->ranges[next->n_begun++].n_steps;
        }
        fkv_fetch_step(at);
        at += FKV_FETCH_STEP;
        n_left--;
    }
    next->at = at;
    next->n_left = n_left;
    next->due = due;
}

/* Fills the TLB for a block, by one line of each of its system pages: a later prefetch would wait for a page walk from memory. */
FKV_INLINE void fkv_fetch_entries(const uint8_t *block, uint64_t bytes) {
    enum { OS_PAGE_BYTES = 4096 }; /* the smallest that a TLB entry covers */
    for (uint64_t byte = 0; byte < bytes; byte += OS_PAGE_BYTES) FKV_PREFETCH_FAR(block + byte);
}

/* Three bytes for each number, a float for each 32 of them, a float and a row number for the row, in six arrays. Behind it, room
 * to read the last rows as a block of 16, or to have four bytes for each number of up to 11 rows, rounded up to blocks of 4: the
 * most that any kernels prepare. */
FKV_INLINE uint64_t fkv_prepared_bytes(uint64_t n_rows, uint64_t dim) {
    return n_rows * (3 * dim + dim / 8 + 8) + 6 * 64 + 21 * dim;
}

/* What an instruction set does with one width of one codec. A codec of one side has no functions for the other. */
typedef struct fkv_codec_kernels {
    fkv_codec_kind kind;
    uint32_t bits;

    /* What scores() wants to have of the queries beside their floats, made once for all tiles that they meet. q: [rows, D];
     * prepared: fkv_prepared_bytes(), 64-byte aligned. */
    void (*prepare)(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared);

    /* scores[r][t] = q[r] . k[t] for t < n_tokens; what is behind n_tokens is not defined. q: [rows, D], 64-byte aligned; of a
     * codec with channels (channel_order.h) in their order, here and in prepare(). part: the parts of the tile's first token. */
    void (*scores)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                   const float *q, const void *prepared, uint32_t n_rows, float *scores);

    /* out[r] += sum over t < n_tokens of p[r][t] * v[t]. p is as softmax() left it: 0 behind n_tokens. */
    void (*values)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                   const float *p, uint32_t n_rows, float *out);

    /* fkv_codec_encode(), bit for bit. NULL: the codec's blocks are sealed, not written. */
    void (*encode)(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]);
} fkv_codec_kernels;

/* Pages [first, end) of one KV head: full tiles of sealed blocks that every row sees in full. */
typedef struct fkv_run {
    const fkv_block *block;
    const uint8_t *pages; /* the head's block in page 0 of the slab */
    uint64_t page_bytes;
    fkv_page_view view;
    uint32_t first;
    uint32_t end;
    uint32_t split_pages; /* a piece ends before every multiple of it */
    const uint8_t *after; /* what comes behind the last, to prefetch */
    uint64_t after_bytes;
    const float *q;
    const void *prepared;
    uint32_t n_rows;
    fkv_softmax piece; /* the last one stays open */
    fkv_softmax total; /* those that end go in here, as fold() does it */
} fkv_run;

struct fkv_cpu_kernels {
    const char *name;
    const fkv_codec_kernels *codecs; /* every width of every codec, ended by FKV_CODEC_AUTO */

    /* Before the first tile of a walk with these rows and after its last, on the thread that walks: set-up that lasts for the
     * walk. The same thread may not start another walk between them. */
    void (*enter)(const fkv_codec *k_codec, uint32_t n_rows);
    void (*leave)(void);

    /* Caps and masks the scores, moves the running maximum, rescales state, and leaves p in scores (0 where masked). width:
     * tokens of a full tile, a multiple of 16. */
    void (*softmax)(float *scores, uint32_t width, const fkv_row_mask *masks, uint32_t n_rows, uint32_t dim, float softcap,
                    fkv_softmax state);

    /* Of n 16-bit numbers the largest, without signs, as bits: in the order of their sizes, infinity behind all finite ones, NaN
     * behind it. */
    uint16_t (*largest)(const uint8_t *halves, size_t n);

    /* into = into + piece, for rows where piece has seen a token. */
    void (*fold)(fkv_softmax into, fkv_softmax piece, uint32_t n_rows, uint32_t dim);

    /* fkv_seal_block(), bit for bit. */
    void (*seal)(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to);

    /* All of scores(), softmax() and values() for the tiles of a run, to the bits that they have one after the other: a step of a
     * tile waits for the one before most of the time, so that several tiles are under way at once. NULL: none. */
    bool (*runs)(const fkv_block *block, uint32_t n_rows);
    void (*run)(const fkv_run *in);
};

/* Looked up once for all tiles of a layer in a step. */
FKV_INLINE const fkv_codec_kernels *fkv_codec_kernels_of(const struct fkv_cpu_kernels *kernels, const fkv_codec *codec) {
    const fkv_codec_kernels *of = kernels->codecs;
    for (; of->kind != codec->kind || of->bits != codec->bits; of++) FKV_ASSERT(of->kind != FKV_CODEC_AUTO);
    return of;
}

extern const struct fkv_cpu_kernels fkv_kernels_scalar;
extern const struct fkv_cpu_kernels fkv_kernels_avx2;
extern const struct fkv_cpu_kernels fkv_kernels_avx512;
extern const struct fkv_cpu_kernels fkv_kernels_avx512vnni;
extern const struct fkv_cpu_kernels fkv_kernels_amx;
extern const struct fkv_cpu_kernels fkv_kernels_neon;

#endif
