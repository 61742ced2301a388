/* Layer shapes for which the GPU kernels are compiled on the host, and the kernels that are tested on each shape. Shared by
 * make_kernel_sources, which writes the kernel sources, and parity_kernels, which runs them. */
#ifndef FKV_KERNEL_CASES_H
#define FKV_KERNEL_CASES_H

#include "attn_cases.h"

/* The fields of a case are the shape, codec (index into attn_codecs), page_tokens, window, n_sinks, softcap, rotate, page type,
 * row type, outliers, number of sequences, and {stored tokens, new tokens} of each sequence. `.sinks` is the scale of the learned
 * sink logits. */
static const attn_case kernel_cases[] = {
    /* histories that cross page, tile and split boundaries, 16-bit rows, and heads whose channels are processed in several groups
     * (slabs). The decode kernels of the first cases are also compiled for a single query (see N_KERNEL_CASES_ALONE) */
    {{4, 1, 128}, 2, 64, 0, 0, 0, FKV_ROTATE_NONE, FKV_F16, FKV_F32, true, 3, {{130, 1}, {61, 5}, {700, 1}}},
    {{3, 1, 128}, 0, 64, 0, 0, 0, FKV_ROTATE_NONE, FKV_F16, FKV_F16, true, 1, {{40, 2}}},
    {{8, 1, 256}, 2, 32, 0, 0, 0, FKV_ROTATE_K, FKV_BF16, FKV_BF16, true, 2, {{70, 1}, {31, 2}}, .sinks = 4},
    {{4, 1, 128}, 3, 64, 0, 0, 0, FKV_ROTATE_KV, FKV_F16, FKV_F16, false, 2, {{130, 1}, {2600, 1}}, .sinks = 2},
    /* wider heads, whose channels are processed in more groups (slabs), and more query heads per KV head */
    {{7, 1, 512}, 7, 16, 0, 0, 30, FKV_ROTATE_NONE, FKV_F16, FKV_F32, true, 1, {{77, 1}}},
    {{16, 1, 64}, 3, 64, 0, 0, 0, FKV_ROTATE_K, FKV_BF16, FKV_F32, true, 2, {{130, 1}, {5, 2}}},
    /* masks */
    {{6, 2, 64}, 2, 16, 7, 4, 0, FKV_ROTATE_NONE, FKV_F16, FKV_F32, true, 2, {{100, 1}, {14, 8}}, .sinks = 2},
    {{2, 1, 128}, 7, 64, 200, 16, 30, FKV_ROTATE_NONE, FKV_F16, FKV_F32, false, 2, {{700, 1}, {63, 3}}, .sinks = 8},
    {{3, 1, 64}, 8, 32, 65, 70, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{300, 2}}},
    /* codecs with other bit widths and group sizes */
    {{4, 1, 64}, 1, 64, 0, 0, 0, FKV_ROTATE_NONE, FKV_F16, FKV_F32, true, 1, {{130, 1}}},
    {{4, 1, 64}, 0, 64, 0, 0, 0, FKV_ROTATE_KV, FKV_BF16, FKV_BF16, true, 1, {{90, 1}}},
    {{8, 1, 64}, 0, 64, 0, 0, 0, FKV_ROTATE_NONE, FKV_BF16, FKV_F32, false, 1, {{33, 1}}},
    {{4, 1, 128}, 9, 128, 0, 0, 0, FKV_ROTATE_K, FKV_F16, FKV_F32, true, 1, {{140, 1}}},
    {{8, 1, 128}, 10, 256, 0, 0, 0, FKV_ROTATE_NONE, FKV_BF16, FKV_F32, true, 1, {{280, 1}}},
    {{4, 1, 64}, 6, 64, 0, 0, 0, FKV_ROTATE_KV, FKV_F16, FKV_F32, false, 1, {{70, 1}}},
    {{4, 1, 64}, 12, 64, 0, 0, 0, FKV_ROTATE_K, FKV_F16, FKV_F32, false, 1, {{70, 1}}},
    {{8, 1, 192}, 11, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{70, 1}}},
    /* layers with many query heads per KV head */
    {{12, 1, 256}, 2, 64, 0, 0, 0, FKV_ROTATE_K, FKV_F16, FKV_F32, true, 1, {{100, 1}}},
    {{32, 2, 128}, 3, 64, 0, 0, 0, FKV_ROTATE_NONE, FKV_BF16, FKV_F32, false, 1, {{70, 1}}},
    /* head dimensions that only the kernels with plain loops support */
    {{6, 2, 80}, 0, 16, 0, 0, 0, FKV_ROTATE_KV, FKV_F16, FKV_F16, true, 2, {{40, 1}, {9, 3}}},
    {{5, 1, 96}, 7, 64, 40, 3, 20, FKV_ROTATE_K, FKV_BF16, FKV_F32, true, 2, {{90, 2}, {300, 1}}, .sinks = 4},
    {{4, 2, 32}, 8, 32, 0, 0, 0, FKV_ROTATE_KV, FKV_F16, FKV_BF16, false, 1, {{130, 1}}},
    {{2, 2, 16}, 0, 64, 0, 0, 0, FKV_ROTATE_NONE, FKV_BF16, FKV_F32, false, 1, {{300, 1}}},
    {{3, 1, 96}, 12, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{70, 1}}},
    /* codecs with 16-bit values, in layers with a window */
    {{5, 1, 128}, 0, 32, 40, 4, 50, FKV_ROTATE_NONE, FKV_BF16, FKV_F32, true, 2, {{100, 1}, {60, 4}}},
    /* codebook codes (TurboQuant) */
    {{4, 1, 128}, 13, 64, 0, 0, 0, FKV_ROTATE_KV, FKV_F16, FKV_F32, true, 2, {{130, 1}, {61, 5}}},
    {{10, 2, 64}, 14, 32, 40, 4, 30, FKV_ROTATE_KV, FKV_BF16, FKV_F32, false, 2, {{100, 1}, {60, 4}}, .sinks = 2},
    {{5, 1, 96}, 15, 16, 0, 0, 0, FKV_ROTATE_KV, FKV_F16, FKV_F16, true, 2, {{70, 1}, {31, 2}}},
    {{2, 1, 128}, 16, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{90, 2}}},
    {{12, 2, 64}, 17, 64, 0, 0, 0, FKV_ROTATE_K, FKV_F16, FKV_F32, true, 1, {{70, 1}}},
    {{4, 1, 128}, 15, 64, 0, 0, 0, FKV_ROTATE_KV, FKV_F16, FKV_F16, false, 3, {{130, 1}, {300, 1}, {700, 1}}},
    {{3, 1, 128}, 14, 32, 100, 8, 0, FKV_ROTATE_KV, FKV_BF16, FKV_F32, false, 2, {{300, 1}, {63, 2}}},
    {{4, 1, 64}, 13, 64, 0, 0, 0, FKV_ROTATE_KV, FKV_F16, FKV_F32, false, 1, {{300, 1}}},
    {{8, 1, 256}, 13, 32, 0, 0, 0, FKV_ROTATE_KV, FKV_BF16, FKV_BF16, true, 2, {{70, 1}, {31, 2}}, .sinks = 4},
    {{7, 1, 512}, 15, 16, 0, 0, 30, FKV_ROTATE_KV, FKV_F16, FKV_F32, true, 1, {{77, 1}}},
    /* sealed layers with work items that cross a page boundary, several splits, windows, heads that occupy half a cache line, and
     * affine V codecs */
    {{4, 1, 128}, 18, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 3, {{1290, 1}, {61, 5}, {700, 1}}, .opens = true},
    {{16, 1, 256}, 18, 32, 0, 0, 0, FKV_ROTATE_V, FKV_BF16, FKV_BF16, true, 2, {{300, 1}, {31, 2}}, .sinks = 2, .opens = true},
    {{8, 1, 64}, 18, 64, 150, 70, 30, FKV_ROTATE_KV, FKV_F16, FKV_F32, false, 2, {{700, 1}, {63, 3}}, .opens = true},
    {{5, 1, 80}, 19, 16, 40, 3, 0, FKV_ROTATE_V, FKV_F16, FKV_F16, true, 2, {{70, 1}, {31, 2}}, .opens = true},
    {{4, 2, 64}, 20, 32, 0, 0, 0, FKV_ROTATE_NONE, FKV_BF16, FKV_F32, false, 2, {{300, 1}, {60, 4}}, .opens = true},
    {{8, 1, 512}, 18, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F16, true, 1, {{400, 1}}, .opens = true},
    {{2, 1, 64}, 21, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{400, 2}}, .opens = true},
    /* kernels that keep queries in registers, and kernels whose three-stage page buffers fill the shared memory completely */
    {{4, 1, 128}, 18, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F16, true, 1, {{700, 1}}, .opens = true},
    {{4, 1, 128}, 12, 64, 0, 0, 0, FKV_ROTATE_K, FKV_F16, FKV_F32, false, 1, {{70, 1}}},
    /* sealed layers that Metal decodes with simdgroups: several queries, wide heads, pages of 16 to 64 tokens, and all bit widths
     */
    {{8, 1, 128}, 18, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 3, {{700, 1}, {318, 5}, {400, 1}}, .opens = true},
    {{6, 1, 256}, 19, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F16, true, 2, {{400, 3}, {60, 2}}, .opens = true},
    {{5, 1, 512}, 20, 16, 0, 0, 30, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{140, 2}}, .opens = true},
    {{12, 2, 96}, 18, 16, 100, 20, 0, FKV_ROTATE_V, FKV_BF16, FKV_F32, false, 2, {{300, 1}, {126, 8}}, .opens = true},
    {{7, 1, 64}, 21, 32, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{300, 2}}, .opens = true},
    /* latent layers: more splits than ranges of splits in attend_merge.h, windows, all bit widths and group sizes, several RoPE
     * steps per warp, and more query heads than a block has rows */
    {{16, 1, 512, 64}, 1, 64, 0, 0, 0, FKV_ROTATE_NONE, FKV_F16, FKV_F32, true, 3, {{1200, 1}, {61, 8}, {0, 1}}},
    {{5, 1, 256, 32}, 3, 32, 40, 4, 30, FKV_ROTATE_K, FKV_BF16, FKV_F32, true, 2, {{100, 1}, {60, 11}}, .sinks = 2},
    {{20, 1, 64, 32}, 7, 16, 0, 0, 0, FKV_ROTATE_NONE, FKV_F16, FKV_BF16, false, 2, {{300, 1}, {30, 4}}},
    {{16, 1, 192, 48}, 0, 64, 0, 0, 0, FKV_ROTATE_K, FKV_BF16, FKV_F32, true, 2, {{130, 1}, {62, 3}}},
    {{3, 1, 128, 16}, 0, 64, 200, 16, 0, FKV_ROTATE_NONE, FKV_F16, FKV_F16, true, 2, {{300, 1}, {63, 3}}},
    {{4, 1, 128, 64}, 8, 128, 0, 0, 0, FKV_ROTATE_K, FKV_F16, FKV_F32, false, 1, {{140, 2}}},
    {{4, 1, 128, 16}, 6, 256, 0, 0, 0, FKV_ROTATE_K, FKV_F16, FKV_F32, false, 1, {{280, 1}}},
    /* latent layers with a prefill kernel: windows, soft caps, small and large pages, bfloat16 pages, and more query heads than a
     * prefill block has rows */
    {{5, 1, 512, 64}, 1, 16, 100, 20, 30, FKV_ROTATE_K, FKV_BF16, FKV_F32, true, 2, {{150, 1}, {14, 8}}, .sinks = 2},
    {{20, 1, 512, 64}, 1, 128, 0, 0, 0, FKV_ROTATE_K, FKV_F16, FKV_F32, true, 2, {{140, 1}, {60, 4}}},
    {{72, 1, 512, 64}, 1, 32, 0, 0, 0, FKV_ROTATE_NONE, FKV_BF16, FKV_BF16, false, 1, {{40, 1}}},
    /* sealed pages with 2-bit and 3-bit codes that CUDA kernels process with matrix instructions: one and two parts per tile,
     * slabs of 64 and 128 channels, and K wider than V */
    {{4, 1, 128}, 19, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 2, {{700, 1}, {318, 5}}, .opens = true},
    {{3, 1, 128}, 20, 64, 200, 20, 0, FKV_ROTATE_V, FKV_BF16, FKV_BF16, false, 2, {{400, 1}, {300, 4}}, .opens = true},
    {{8, 1, 64}, 19, 64, 0, 0, 0, FKV_ROTATE_NONE, FKV_F16, FKV_F16, true, 1, {{400, 1}}, .opens = true},
    {{2, 1, 64}, 22, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{400, 2}}, .opens = true},
    {{3, 1, 80}, 19, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{400, 1}}, .opens = true},
    /* calibrated keys: averages of 4 and 3 bits, two KV heads with different channel orders, open pages with 8 and 16 bits */
    {{4, 2, 64}, 23, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 2, {{330, 1}, {61, 5}}, .opens = true},
    {{10, 2, 80}, 24, 16, 40, 3, 0, FKV_ROTATE_V, FKV_BF16, FKV_F16, true, 2, {{140, 1}, {126, 4}}, .opens = true},
    /* prefill of sealed pages with wide heads: all row types, a window that starts in the middle of a page, and queries in two
     * spans of open pages */
    {{4, 1, 256}, 18, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{505, 1}}, .opens = true},
    {{8, 1, 256}, 18, 64, 270, 20, 0, FKV_ROTATE_V, FKV_BF16, FKV_BF16, true, 2, {{500, 1}, {63, 3}}, .sinks = 2, .opens = true},
    {{2, 1, 192}, 18, 64, 0, 0, 30, FKV_ROTATE_V, FKV_F16, FKV_F16, true, 1, {{310, 1}}, .opens = true},
    /* calibrated keys whose prefill uses matrix instructions: all row types, windows, open pages with 16 bits, and head
     * dimensions that are not a multiple of 64 */
    {{8, 2, 128}, 23, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F16, true, 2, {{700, 1}, {318, 5}}, .opens = true},
    {{4, 2, 128}, 24, 64, 200, 20, 30, FKV_ROTATE_KV, FKV_BF16, FKV_BF16, true, 2, {{400, 1}, {300, 4}}, .opens = true},
    {{6, 2, 80}, 23, 64, 0, 0, 0, FKV_ROTATE_V, FKV_BF16, FKV_F32, true, 1, {{410, 1}}, .opens = true},
    /* decode of calibrated keys with groups of eight rows, and with two query tokens */
    {{10, 2, 64}, 23, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 2, {{400, 1}, {63, 2}}, .opens = true},
    {{4, 1, 128}, 23, 32, 100, 3, 30, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{300, 2}}, .opens = true},
    {{10, 2, 64}, 24, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F32, true, 1, {{400, 2}}, .opens = true},
    /* prefill of calibrated keys with a window, and with only one buffer for third digits */
    {{4, 2, 112}, 23, 64, 200, 20, 0, FKV_ROTATE_V, FKV_F16, FKV_F16, true, 1, {{330, 1}}, .opens = true},
    /* prefill of calibrated keys with wide heads */
    {{4, 2, 256}, 23, 64, 0, 0, 0, FKV_ROTATE_V, FKV_F16, FKV_F16, true, 1, {{505, 1}}, .opens = true},
    {{4, 1, 192}, 23, 64, 150, 20, 0, FKV_ROTATE_V, FKV_BF16, FKV_F32, true, 2, {{330, 1}, {63, 3}}, .opens = true},
};
enum { N_KERNEL_CASES = sizeof kernel_cases / sizeof kernel_cases[0] };

/* Number of cases, from the start of the table, whose decode kernel is also compiled for work items with a single query. Such
 * kernels have fewer rows per block. */
enum { N_KERNEL_CASES_ALONE = 3 };

/* Soft caps that are tested in addition to the soft cap of a case, in prefill only for heads of up to MAX_SOFTCAPS_DIM channels:
 * emulated prefill of wide heads is slow, and soft caps do not depend on the head dimension. The smallest one makes all scores
 * equal. The largest one has no effect. */
static const float kernel_softcaps[] = {1e-39f, 1e-3f, 30, 50, 1e4f, 3e4f, 3e5f, 3e7f, 1e30f};
enum { N_KERNEL_SOFTCAPS = sizeof kernel_softcaps / sizeof kernel_softcaps[0], MAX_SOFTCAPS_DIM = 128 };

/* Kernels that are tested in addition to the CUDA kernels in fkv_kernel: the Metal variants, prefill with plain loops, prefill
 * with pairs of blocks in which one block never runs, and prefill with groups of blocks that run at the same time. */
enum {
    KERNEL_SIMDGROUP_DECODE = 9,
    KERNEL_SIMDGROUP_PREFILL,
    KERNEL_PLAIN_PREFILL,
    KERNEL_LONE_PREFILL,
    KERNEL_GROUP_PREFILL,
    N_KERNEL_ENTRIES
};

/* Index of the first case with a sealed layer. The prefill of sealed layers uses warpgroups. */
enum { FIRST_SEALED_CASE = 35 };

/* Index of the case whose prefill is also compiled for pairs of blocks that share unpacked pages. The host runs one block at a
 * time, so a block's partner never runs at the same time. The blocks must detect this. */
enum { LONE_PREFILL_CASE = 42 };

/* Indices of the cases whose prefill is also compiled for groups of GROUP_BLOCKS blocks that share unpacked pages and run at the
 * same time: 64 queries per block, 32 queries per block, and calibrated keys. */
enum {
    GROUP_PREFILL_CASE = 62,
    OTHER_GROUP_PREFILL_CASE = 42,
    CALIBRATED_GROUP_PREFILL_CASE = 69,
    GROUP_BLOCKS = 8,
    GROUP_RING_BYTES = 64 << 20
};

/* Index of a sealed case whose prefill is compiled for a device with too few multiprocessors for a group of blocks, so that
 * blocks do not share pages. */
enum { UNSHARED_PREFILL_CASE = 44 };

/* Index of the case with calibrated keys whose prefill is also compiled with plain loops. */
enum { CALIBRATED_PLAIN_CASE = 64 };

/* Index of the only latent case whose prefill is also compiled with plain loops: their emulation is the slowest. */
enum { PLAIN_LATENT_CASE = 56 };

/* Returns true if the kernel is compiled for case i. Metal prefill is compiled for all cases. Metal decode is compiled only for
 * the shapes for which Metal uses it. The plain loops read keys in the same way as Metal prefill and decode_plain.h, so they are
 * compiled for only a few cases. */
static inline bool kernel_case_has(uint32_t i, int kernel) {
    /* values of fkv_kernel */
    enum { WRITE, COPY_PAGES, PUT_NUMBERS, DECODE, MERGE, DECODE_MERGE, SEAL = KERNEL_SIMDGROUP_DECODE - 1 };
    const attn_shape *shape = &kernel_cases[i].shape;
    if (shape->rope_dim != 0) { /* latent layers have no Metal kernels, and only some of them have a prefill kernel */
        const fkv_codec_config *k = &attn_codecs[kernel_cases[i].codec].k;
        const bool prefill = shape->head_dim == 512 && shape->rope_dim == 64 && k->bits == 8 && k->group == 64;
        return kernel <= DECODE_MERGE || (prefill && kernel < SEAL) || (i == PLAIN_LATENT_CASE && kernel == KERNEL_PLAIN_PREFILL);
    }
    if (kernel == SEAL) return kernel_cases[i].opens;
    if (kernel == KERNEL_LONE_PREFILL) return i == LONE_PREFILL_CASE;
    if (kernel == KERNEL_GROUP_PREFILL)
        return i == GROUP_PREFILL_CASE || i == OTHER_GROUP_PREFILL_CASE || i == CALIBRATED_GROUP_PREFILL_CASE;
    if (kernel == KERNEL_SIMDGROUP_DECODE)
        return shape->n_q_heads / shape->n_kv_heads > 4 && (i % 2 == 0 || kernel_cases[i].opens);
    if (kernel_cases[i].opens) /* needs no write kernel: open rows are written as with the 8/8 codec */
        return (kernel > PUT_NUMBERS && kernel < SEAL) || kernel == KERNEL_SIMDGROUP_PREFILL ||
               (kernel == KERNEL_PLAIN_PREFILL && (i == FIRST_SEALED_CASE || i == CALIBRATED_PLAIN_CASE));
    const bool book = attn_codecs[kernel_cases[i].codec].k.kind == FKV_CODEC_TURBO ||
                      attn_codecs[kernel_cases[i].codec].v.kind == FKV_CODEC_TURBO;
    return kernel != KERNEL_PLAIN_PREFILL || (i % 4 == 0 && !book); /* CUDA prefill of codebook codes already uses plain loops */
}

/* Entry point of one compiled case. Inputs and outputs are in the order of fkv_kernel_inputs(), without the input `after`; grid
 * is in blocks. The partial results of FKV_KERNEL_DECODE_MERGE are passed as an additional input. */
typedef void kernel_entry(int kernel, const uint32_t grid[3], uint32_t n_threads, const void *const *in, void *out);

/* Overwrites the rows of one token with NaN in every KV head of a page, either in V only or in both K and V. */
static inline void kernel_spoil_row(const fkv_block *block, uint32_t n_kv_heads, uint8_t *page, uint32_t slot, bool k_too) {
    for (uint32_t head = 0; head < n_kv_heads; head++) {
        for (int side = k_too ? FKV_SIDE_K : FKV_SIDE_V; side < (int)FKV_N_SIDES; side++) {
            uint8_t *part[FKV_N_PARTS];
            fkv_block_row(block, page + (size_t)head * block->bytes, (fkv_side)side, slot, part);
            for (int p = 0; p < FKV_N_PARTS; p++) memset(part[p], 0xff, block->codec[side].row_bytes[p]);
        }
    }
}

/* Returns true if any value is NaN. */
static inline bool kernel_has_nan(const float *x, size_t n) {
    bool any = false;
    for (size_t i = 0; i < n; i++) any = any || x[i] != x[i];
    return any;
}

/* Returns the largest number of queries in any work item of a case. The decode kernel of the case is compiled for this number. */
static inline uint32_t kernel_case_queries(const attn_case *c) {
    uint32_t most = 1;
    for (uint32_t r = 0; r < c->n_rows; r++) most = fkv_max_u32(most, c->rows[r].n_tokens);
    return most;
}

#endif
