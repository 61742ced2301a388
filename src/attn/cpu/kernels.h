/* Interface of the attention kernels of one instruction set. src/attn/attend.c iterates over pages and splits and computes the
 * masks. A kernel processes one tile: up to FKV_TILE_TOKENS consecutive tokens of one KV head, and the query rows that attend to
 * it.
 *
 * The result of a row depends only on that row and the visible tokens of the tile, and not on other rows or on masked tokens.
 */
#ifndef FKV_KERNELS_H
#define FKV_KERNELS_H

#include "../../base/page_view.h"
#include "../../codec/block.h"

enum {
    FKV_TILE_TOKENS = 64, /* maximum tokens per tile; also the row stride of the scores */
    FKV_TILE_ROWS = 128,  /* maximum number of query rows per tile, or the number of query heads per KV head if that is larger */
    FKV_MAX_TILE_ROWS = FKV_MAX_HEADS_PER_KV
};

/* Tokens of a tile that are visible to a row: t < end and (t >= begin or t < sinks). */
typedef struct fkv_row_mask {
    uint32_t sinks;
    uint32_t begin;
    uint32_t end;
} fkv_row_mask;

/* Online softmax state of up to FKV_MAX_TILE_ROWS query rows: out = sum of p * v and sum = sum of p, with p = exp(score - max).
 * Before the first visible token of a row, max = -inf, sum = 0 and out = 0. */
typedef struct fkv_softmax {
    float *max; /* [rows] an earlier maximum of the scores; the current maximum may be slightly larger */
    float *sum; /* [rows] */
    float *out; /* [rows, D] */
} fkv_softmax;

/* State of the software prefetch, which loads the next tile into L2 while the current tile is processed. The prefetched ranges
 * are the codes, scales and biases of the next tile, or its whole block if a tile covers a page. Kernels call fkv_fetch_some()
 * regularly to keep the memory system busy. A fetch step prefetches four 64-byte lines; the last step of a range may extend
 * beyond the range. */
enum { FKV_FETCH_RANGES = (int)FKV_N_SIDES * (int)FKV_N_PARTS, FKV_FETCH_SHARES = 128, FKV_FETCH_STEP = 256 };
typedef struct fkv_fetch {
    const uint8_t *at; /* next address to prefetch in the current range */
    uint32_t n_left;   /* remaining fetch steps in the current range */
    uint32_t due;      /* fetch steps that should have been issued but have not been, in units of 1 / FKV_FETCH_SHARES */
    uint32_t n_steps;  /* number of fetch steps in all ranges */
    uint32_t n_begun;  /* number of ranges started */
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

/* Prefetches the fraction n_shares / FKV_FETCH_SHARES of the next tile. The score kernel requests half of all shares, and the
 * value kernel requests the other half. */
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

/* Loads the TLB entries of a block by prefetching one cache line of each OS page, so that later prefetches do not wait for
 * page-table walks. */
FKV_INLINE void fkv_fetch_entries(const uint8_t *block, uint64_t bytes) {
    enum { OS_PAGE_BYTES = 4096 }; /* size of the smallest OS pages */
    for (uint64_t byte = 0; byte < bytes; byte += OS_PAGE_BYTES) FKV_PREFETCH_FAR(block + byte);
}

/* Returns the size of a buffer, in bytes, that holds the prepared queries of any kernel. Each row has three bytes per value, one
 * float per 32 values, one float and one index, and each of six arrays is padded. The last term is needed by kernels that read
 * the last rows as a full block of 16 rows, and by kernels that store four bytes per value for up to 11 rows, rounded up to a
 * multiple of 4 rows. */
FKV_INLINE uint64_t fkv_prepared_bytes(uint64_t n_rows, uint64_t dim) {
    return n_rows * (3 * dim + dim / 8 + 8) + 6 * 64 + 21 * dim;
}

/* Kernels for one bit width of one codec. If a codec supports only K, the function pointers for V are NULL, and vice versa. */
typedef struct fkv_codec_kernels {
    fkv_codec_kind kind;
    uint32_t bits;

    /* Prepares queries for scores(). Called once per query tile. q: [rows, D]; prepared: fkv_prepared_bytes() bytes, 64-byte
     * aligned. */
    void (*prepare)(const fkv_codec *codec, const float *q, uint32_t n_rows, void *prepared);

    /* Computes scores[r][t] = q[r] . k[t] for t < n_tokens. Scores beyond n_tokens are undefined. q: [rows, D], 64-byte aligned.
     * For calibrated keys, q must be in the channel order of the codec, as in prepare(). `part` holds the addresses of the codes,
     * scales and biases of the tile's first token. */
    void (*scores)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                   const float *q, const void *prepared, uint32_t n_rows, float *scores);

    /* Computes out[r] += sum over t < n_tokens of p[r][t] * v[t]. p holds the softmax weights and is 0 beyond n_tokens. */
    void (*values)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                   const float *p, uint32_t n_rows, float *out);

    /* Encodes one row. The result is bit-identical to that of fkv_codec_encode(). NULL for sealed codecs, which do not encode
     * single rows. */
    void (*encode)(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]);
} fkv_codec_kernels;

/* A run of pages [first, end) of one KV head. Every page is sealed, forms one full tile, and is fully visible to every row. */
typedef struct fkv_run {
    const fkv_block *block;
    const uint8_t *pages; /* address of this head's block in page 0 */
    uint64_t page_bytes;
    fkv_page_view view;
    uint32_t first;
    uint32_t end;
    uint32_t split_pages; /* pages per split; splits start at page numbers that are multiples of split_pages */
    const uint8_t *after; /* block to prefetch after the last page of the run */
    uint64_t after_bytes;
    const float *q;
    const void *prepared;
    uint32_t n_rows;
    fkv_softmax split; /* softmax state of the unfinished last split, which a later call may continue */
    fkv_softmax total; /* softmax state of the finished splits, merged as in fold() */
} fkv_run;

/* A tile of FKV_TILE_TOKENS tokens of one KV head that are visible to every row. */
typedef struct fkv_tile_rows {
    const fkv_block *block;
    const uint8_t *part[FKV_N_SIDES][FKV_N_PARTS]; /* addresses of the codes, scales and biases of the first token */
    fkv_fetch *next;
    const float *q;
    const void *prepared;
    uint32_t n_rows;
    fkv_softmax state;
} fkv_tile_rows;

struct fkv_cpu_kernels {
    const char *name;
    const fkv_codec_kernels *codecs; /* one entry per codec and bit width, terminated by an entry of kind FKV_CODEC_AUTO */

    /* enter() is called before the first tile of a pass over pages, and leave() after the last tile, on the same thread. The two
     * functions set up and release per-thread state such as tile registers. Passes must not be nested within a thread. */
    void (*enter)(const fkv_codec *k_codec, uint32_t n_rows);
    void (*leave)(void);

    /* Applies the soft cap and the masks to the scores, updates the maximum of each row, rescales the softmax state, and replaces
     * the scores with softmax weights (0 where masked). `width` is the number of tokens of a full tile, a multiple of 16. */
    void (*softmax)(float *scores, uint32_t width, const fkv_row_mask *masks, uint32_t n_rows, uint32_t dim, float softcap,
                    fkv_softmax state);

    /* Returns the largest magnitude among n 16-bit floats, as a bit pattern without the sign. Infinity ranks above all finite
     * values, and NaN ranks above infinity. */
    uint16_t (*largest)(const uint8_t *halves, size_t n);

    /* Merges the softmax state `split` into the state `into`, for the rows that have at least one visible token in `split`. */
    void (*fold)(fkv_softmax into, fkv_softmax split, uint32_t n_rows, uint32_t dim);

    /* Seals one block. The result is bit-identical to that of fkv_seal_block(). */
    void (*seal)(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, uint8_t *to);

    /* run() computes scores, softmax and values for all tiles of a run. Results are bit-identical to those of separate calls for
     * each tile. The operations on one tile depend on each other, so run() works on several tiles at once to hide latency. runs()
     * returns whether run() supports a block. Both pointers are NULL if the instruction set has no such kernel. */
    bool (*runs)(const fkv_block *block, uint32_t n_rows);
    void (*run)(const fkv_run *in);

    /* tile() computes scores, softmax (without soft cap) and values of one tile. Results are bit-identical to those of separate
     * calls. Each block of rows passes through all three steps while its data is in L1. fuses() returns whether tile() supports a
     * block. Both pointers are NULL if the instruction set has no such kernel. */
    bool (*fuses)(const fkv_block *block, uint32_t n_rows);
    void (*tile)(const fkv_tile_rows *in);
};

/* Returns the kernels for the kind and bit width of a codec. Called once per layer and step. */
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
