/* The pieces of each query, folded: a fixed tree over the pieces, the rotation of V undone, rows of the row type. One block for
 * each (item, query head, query); the parts are decode's, see there.
 *
 * Each thread owns four channels of a stretch of the pieces (n_pieces / stretches of them, one after the other); the stretches
 * are added from first to last. How many pieces there are depends on the query's position, so its sums are always the same sums.
 * Every warp finds the largest max and the total for itself: that is cheaper than a barrier. What takes time here is waiting: so
 * there are many threads with few pieces each, and the first pieces are on their way before it is known what they weigh.
 * Merged by the last block of a KV head's pieces instead, a warp for each row, without this kernel, on an H200 by turns: 52.2 to
 * 55.3 us for 50.5 to 53.5 in decode of sealed pages over 131072 tokens, 71.6 to 72.5 for 70.7 to 71.0 in 8/4. That block is
 * alone with all pieces of its rows; this kernel has one of 512 threads for each row.
 */
#if FKV_D < 128
#define FKV_MERGE_THREADS 256
#elif FKV_D < 256
#define FKV_MERGE_THREADS 512
#else
#define FKV_MERGE_THREADS 1024
#endif
#define FKV_MERGE_QUADS (FKV_D / 4)
#define FKV_MERGE_STRETCHES (FKV_MERGE_THREADS / FKV_MERGE_QUADS)
#define FKV_MERGE_EARLY 8 /* pieces of a thread */
#define FKV_MERGE_SHARED (FKV_MERGE_STRETCHES * FKV_D)

/* What a piece with this max weighs beside the largest. */
FKV_FN float fkv_piece_weight(float max, float largest) {
    return max == fkv_float_of(0xff800000u) ? 0.0f : fkv_exp2(max - largest);
}

/* The pieces of one row, and a thread's stretch of them. */
struct fkv_merge_row {
    FKV_DEVICE const float *stats; /* {max, total} of each piece */
    FKV_DEVICE const float *own;   /* the thread's four channels of the first piece */
    fkv_u64 stride;                /* floats from one piece to the next */
    fkv_u32 n_pieces;
    fkv_u32 begin;
    fkv_u32 end;
};

/* Four channels of the first pieces of a stretch, on their way before it is known what they weigh. */
struct fkv_merge_early {
    float x[FKV_MERGE_EARLY][4];
    float max[FKV_MERGE_EARLY];
};

FKV_FN fkv_merge_early fkv_merge_ask(FKV_LOCAL const fkv_merge_row &row) {
    fkv_merge_early early;
    FKV_UNROLL
    for (fkv_u32 i = 0; i < FKV_MERGE_EARLY; i++) {
        bool there = row.begin + i < row.end;
        FKV_DEVICE const fkv_words4 *from = (FKV_DEVICE const fkv_words4 *)(row.own + (there ? row.begin + i : 0) * row.stride);
        FKV_UNROLL
        for (int d = 0; d < 4; d++) early.x[i][d] = fkv_float_of(from->w[d]);
        early.max[i] = there ? row.stats[(row.begin + i) * 2] : fkv_float_of(0xff800000u);
    }
    return early;
}

/* The largest max of all pieces, and the sum of p over it: by each warp. */
struct fkv_merge_total {
    float largest;
    float total;
};

FKV_FN fkv_merge_total fkv_merge_stats(FKV_LOCAL const fkv_merge_row &row, fkv_u32 lane) {
    float largest = fkv_float_of(0xff800000u);
    float total = 0.0f;
    for (fkv_u32 i = lane; i < row.n_pieces; i += 32) {
        FKV_DEVICE const float *piece = row.stats + i * 2;
        float grown = fkv_max(largest, piece[0]);
        total = fkv_fma(fkv_piece_weight(largest, grown), total, fkv_piece_weight(piece[0], grown) * piece[1]);
        largest = grown;
    }
    for (fkv_u32 h = 1; h < 32; h *= 2) {
        float other = fkv_shuffle_xor(largest, h);
        float grown = fkv_max(largest, other);
        total *= fkv_piece_weight(largest, grown);
        total += fkv_shuffle_xor(total, h);
        largest = grown;
    }
    fkv_merge_total all;
    all.largest = largest;
    all.total = total;
    return all;
}

/* A thread's stretch, added up. sums: its four channels. */
FKV_FN void fkv_merge_stretch(FKV_LOCAL const fkv_merge_row &row, FKV_LOCAL const fkv_merge_early &early, float largest,
                              FKV_SHARED float *sums) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    FKV_UNROLL
    for (fkv_u32 i = 0; i < FKV_MERGE_EARLY; i++) {
        if (row.begin + i >= row.end) break;
        float weight = fkv_piece_weight(early.max[i], largest);
        FKV_UNROLL
        for (int d = 0; d < 4; d++) x[d] = fkv_fma(weight, early.x[i][d], x[d]);
    }
    FKV_UNROLL_8
    for (fkv_u32 i = row.begin + FKV_MERGE_EARLY; i < row.end; i++) {
        FKV_DEVICE const fkv_words4 *from = (FKV_DEVICE const fkv_words4 *)(row.own + i * row.stride);
        float weight = fkv_piece_weight(row.stats[i * 2], largest);
        FKV_UNROLL
        for (int d = 0; d < 4; d++) x[d] = fkv_fma(weight, fkv_float_of(from->w[d]), x[d]);
    }
    FKV_UNROLL
    for (int d = 0; d < 4; d++) sums[d] = x[d];
}

/* Number d of the stretches of a row added up, divided, and the rotation of V undone, by all threads: one for each number, and
 * some that have none. */
FKV_FN float fkv_merge_finish(fkv_u32 d, FKV_SHARED float *sums, float total) {
    float x = 0.0f;
    if (d < FKV_D) {
        x = sums[d];
        for (fkv_u32 s = 1; s < FKV_MERGE_STRETCHES; s++) x += sums[s * FKV_D + d];
        x = x / total;
    }
#if FKV_ROTATE_V
    FKV_UNROLL
    for (fkv_u32 h = 1; h < FKV_ROTATION_BLOCK; h *= 2) { /* neighbours are in one warp, others meet in shared memory */
        float other = h < 32 ? fkv_shuffle_xor(x, h) : 0.0f;
        if (h >= 32) {
            fkv_sync();
            if (d < FKV_D) sums[d] = x;
            fkv_sync();
            if (d < FKV_D) other = sums[d ^ h];
        }
        x = (d & h) == 0 ? x + other : other - x;
    }
    x *= fkv_rotation_norm();
#endif
    return x;
}

FKV_FN void fkv_attend_merge(fkv_place place, FKV_SHARED float *sums, FKV_DEVICE const float *parts,
                             FKV_DEVICE const fkv_u32 *table, FKV_DEVICE const float *sink_logits, FKV_DEVICE void *out) {
    FKV_DEVICE const fkv_u32 *item = table + table[FKV_STEP_ITEMS] + place.x * FKV_ITEM_WORDS;
    if (place.z >= item[FKV_ITEM_N_QUERIES]) return;
    fkv_u32 all_rows = FKV_R * table[FKV_STEP_ITEM_QUERIES];
    fkv_u64 stride = (fkv_u64)FKV_G * all_rows; /* rows of a piece */
    fkv_u32 of_piece = place.y / FKV_R * all_rows + place.z * FKV_R + place.y % FKV_R;
    fkv_u64 first = (fkv_u64)item[FKV_ITEM_FIRST_PIECE] * stride + of_piece;
    fkv_u32 quad = place.index % FKV_MERGE_QUADS;
    fkv_u32 stretch = place.index / FKV_MERGE_QUADS; /* threads behind the last have none */
    fkv_merge_row row;
    row.stats = parts + fkv_stats_at(table, of_piece, item[FKV_ITEM_FIRST_PIECE]);
    row.own = parts + first * FKV_D + 4 * quad;
    row.stride = stride * FKV_D;
    row.n_pieces = item[FKV_ITEM_N_PIECES];
    fkv_u32 length = (row.n_pieces + FKV_MERGE_STRETCHES - 1) / FKV_MERGE_STRETCHES;
    row.begin = stretch * length;
    row.end = row.begin + length < row.n_pieces ? row.begin + length : row.n_pieces;
    if (stretch >= FKV_MERGE_STRETCHES) row.end = row.begin;

    fkv_merge_early early = fkv_merge_ask(row);
    fkv_merge_total all = fkv_merge_stats(row, place.index % 32);
    if (stretch < FKV_MERGE_STRETCHES) fkv_merge_stretch(row, early, all.largest, sums + stretch * FKV_D + 4 * quad);
    fkv_sync();
    fkv_u32 d = place.index;
    float x = fkv_merge_finish(d, sums, fkv_denominator(all.total, all.largest, sink_logits, place.y));
    fkv_u64 to = ((fkv_u64)(item[FKV_ITEM_FIRST_TOKEN] + place.z) * FKV_H + place.y) * FKV_D + d;
    if (d < FKV_D) fkv_put_row_number(out, to, fkv_float_of(fkv_bits_of(x) ^ fkv_v_sign(d)));
}
