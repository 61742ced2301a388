/* Assembles the source code of kernels from files that the build embeds as strings (cmake/kernel_files.cmake). */
#include "kernel_source.h"

#include "../../base/float16.h"
#include "../../codec/sealed.h"
#include "../../codec/turbo.h"
#include "common/step_words.h"
#include <kernel_files.h>

#include <stdarg.h>
#include <stdio.h>

/* Output buffer. `length` is the full length of the text, even if the text does not fit in the buffer. */
typedef struct source_buffer {
    char *text;
    size_t size;
    size_t length;
} source_buffer;

static void emit_text(source_buffer *w, const char *text) {
    size_t n = strlen(text);
    if (w->length < w->size) {
        size_t space = w->size - w->length - 1;
        memcpy(w->text + w->length, text, n < space ? n : space);
        w->text[w->length + (n < space ? n : space)] = 0;
    }
    w->length += n;
}

__attribute__((format(printf, 2, 3))) static void emit_line(source_buffer *w, const char *format, ...) {
    char line[96];
    va_list values;
    va_start(values, format);
    int n = vsnprintf(line, sizeof line, format, values);
    va_end(values);
    FKV_ASSERT(n >= 0 && (size_t)n < sizeof line);
    (void)n;
    emit_text(w, line);
}

static void emit_number(source_buffer *w, const char *name, uint32_t number) {
    emit_line(w, "#define FKV_%s %u\n", name, number);
}

static void emit_bits(source_buffer *w, const char *name, float number) {
    emit_line(w, "#define FKV_%s 0x%08xu\n", name, fkv_bits_of(number));
}

static void emit_signs(source_buffer *w, const char *name, const fkv_rotation *rotation) {
    emit_line(w, "#define FKV_%s_SIGNS ", name);
    for (uint32_t i = 0; rotation != NULL && i < fkv_ceil_div(rotation->dim, 32); i++)
        emit_line(w, "0x%08xu, ", rotation->signs[i]);
    emit_text(w, "0u\n");
}

/* Emits the code layout of K or V. Rows of 16-bit values are described as 16-bit codes without scales and biases. */
static void emit_codes(source_buffer *w, const fkv_block *block, fkv_side side) {
    const fkv_codec *codec = &block->codec[side];
    char s = side == FKV_SIDE_K ? 'K' : 'V';
    emit_line(w, "#define FKV_%c_BITS %u\n", s, codec->bits);
    emit_line(w, "#define FKV_%c_GROUP %u\n", s, codec->group);
    emit_line(w, "#define FKV_%c_CODES %u\n", s, block->offset[side][FKV_PART_CODES]);
    emit_line(w, "#define FKV_%c_SCALES %u\n", s, block->offset[side][FKV_PART_SCALES]);
    emit_line(w, "#define FKV_%c_BIASES %u\n", s, block->offset[side][FKV_PART_BIASES]);
    emit_line(w, "#define FKV_%c_ROW_BYTES %u\n", s, codec->row_bytes[FKV_PART_CODES]);
    emit_line(w, "#define FKV_%c_SEALED %d\n", s, fkv_codec_is_sealed(codec));
}

static void emit_book(source_buffer *w, char s, uint32_t is_book, const fkv_turbo_book *book) {
    emit_line(w, "#define FKV_%c_BOOK %u\n", s, is_book);
    emit_line(w, "#define FKV_%c_BOOK_UNIT 0x%08xu\n", s, fkv_bits_of(book->unit));
    emit_line(w, "#define FKV_%c_BOOK_VALUES ", s);
    for (int i = 0; i < 16; i++) emit_line(w, "%d%s", book->value[i], i < 15 ? ", " : "\n");
}

static void emit_plain_codes(source_buffer *w, const fkv_block *block, fkv_side side) {
    emit_codes(w, block, side);
    emit_book(w, side == FKV_SIDE_K ? 'K' : 'V', 0, &(fkv_turbo_book){0});
}

static void emit_book_codes(source_buffer *w, const fkv_block *block, fkv_side side) {
    emit_codes(w, block, side);
    emit_book(w, side == FKV_SIDE_K ? 'K' : 'V', 1, &fkv_turbo_books[block->codec[side].bits]);
}

/* Emits the levels of a sealed V codec and the thresholds between them. */
static void emit_levels(source_buffer *w, const fkv_codec *codec) {
    bool sealed = codec->kind == FKV_CODEC_SEALED_V;
    const fkv_sealed_book *book = sealed ? fkv_sealed_book_of(codec->bits) : &(const fkv_sealed_book){{0}, {0}, 0};
    emit_text(w, "#define FKV_V_LEVELS ");
    for (int i = 0; i < FKV_SEALED_LEVELS; i++) emit_line(w, "%u%s", book->level[i], i + 1 < FKV_SEALED_LEVELS ? ", " : "\n");
    emit_text(w, "#define FKV_V_ABOVE ");
    for (int i = 0; i + 1 < FKV_SEALED_LEVELS; i++) emit_line(w, "%u%s", book->above[i], i + 2 < FKV_SEALED_LEVELS ? ", " : "\n");
    emit_bits(w, "V_START_BITS", book->start);
}

/* Functions that emit the defines of K or V, indexed by codec kind. rows.h and the device files use these defines to unpack
 * pages.
 */
static void (*const emit_side_of[])(source_buffer *w, const fkv_block *block, fkv_side side) = {
    [FKV_CODEC_HALF] = emit_plain_codes,     [FKV_CODEC_AFFINE] = emit_plain_codes, [FKV_CODEC_SEALED] = emit_plain_codes,
    [FKV_CODEC_SEALED_V] = emit_plain_codes, [FKV_CODEC_TURBO] = emit_book_codes,   [FKV_CODEC_CALIBRATED] = emit_plain_codes,
};

static void emit_side(source_buffer *w, const fkv_block *block, fkv_side side) {
    emit_side_of[block->codec[side].kind](w, block, side);
}

/* Emits the defines that differ between open and sealed pages. `ring` is true if the page table may contain a ring
 * (page_view.h). */
static void emit_block(source_buffer *w, const fkv_block *block, bool ring) {
    emit_number(w, "BLOCK_BYTES", block->bytes);
    emit_number(w, "RING", ring);
    emit_side(w, block, FKV_SIDE_K);
    emit_side(w, block, FKV_SIDE_V);
    emit_levels(w, &block->codec[FKV_SIDE_V]);
}

static void emit_end_of_block(source_buffer *w) {
    static const char *const of_side[] = {"BITS",      "GROUP",  "CODES", "SCALES",    "BIASES",
                                          "ROW_BYTES", "SEALED", "BOOK",  "BOOK_UNIT", "BOOK_VALUES"};
    emit_text(w, "#undef FKV_BLOCK_BYTES\n#undef FKV_RING\n#undef FKV_V_LEVELS\n#undef FKV_V_ABOVE\n#undef FKV_V_START_BITS\n");
    for (size_t i = 0; i < sizeof of_side / sizeof of_side[0]; i++)
        emit_line(w, "#undef FKV_K_%s\n#undef FKV_V_%s\n", of_side[i], of_side[i]);
}

/* Emits the parameter of functions that need the channel order of a KV head with calibrated keys. */
static void emit_order(source_buffer *w, const fkv_attn_layer *layer) {
    emit_number(w, "CALIBRATED", layer->calibrated);
    if (!layer->calibrated) {
        emit_text(w, "#define FKV_ORDER\n#define FKV_ORDER_GIVEN\n#define FKV_HEAD_ORDER\n");
        return;
    }
    emit_text(w, "#define FKV_ORDER , FKV_DEVICE const fkv_u32 *order\n#define FKV_ORDER_GIVEN , order\n");
    emit_number(w, "ORDER_WORDS", fkv_kernel_order_words(layer));
    emit_text(w, "#define FKV_HEAD_ORDER , orders + place.y * FKV_ORDER_WORDS\n");
}

static void emit_layer(source_buffer *w, const fkv_attn_layer *layer) {
    emit_number(w, "D", layer->head_dim);
    emit_number(w, "ROPE", layer->rope_dim);
    emit_number(w, "G", layer->n_kv_heads);
    emit_number(w, "H", layer->n_q_heads);
    emit_number(w, "PAGE_TOKENS", layer->block.page_tokens);
    emit_number(w, "SEALED", layer->sealed);
    emit_number(w, "OPEN_BLOCK_BYTES", layer->open.bytes);
    emit_number(w, "OPEN_SPAN", FKV_OPEN_SPAN);
    emit_text(w, layer->sealed ? "#define FKV_OPEN_POOL , FKV_DEVICE const void *open, FKV_DEVICE const void *ring FKV_ORDER\n"
                                 "#define FKV_OPEN_GIVEN , open, ring FKV_ORDER_GIVEN\n"
                               : "#define FKV_OPEN_POOL\n#define FKV_OPEN_GIVEN\n");
    emit_order(w, layer);
    emit_number(w, "WINDOW", layer->window);
    emit_number(w, "SINKS", layer->window != 0 ? layer->n_sinks : 0);
    emit_bits(w, "SCALE_BITS", layer->scale);
    emit_bits(w, "SOFTCAP_BITS", layer->softcap > 0 ? layer->softcap : 0.0f);
    emit_number(w, "SINK_LOGITS", layer->sink_logits != NULL);
    emit_number(w, "ROW_TYPE", (uint32_t)layer->row_type);
    emit_number(w, "PAGE_BF16", layer->block.codec[FKV_SIDE_K].type == FKV_BF16);
    emit_number(w, "ROTATE_K", layer->rotate_k != NULL);
    emit_number(w, "ROTATE_V", layer->rotate_v != NULL);
    emit_signs(w, "K", layer->rotate_k);
    emit_signs(w, "V", layer->rotate_v);
}

_Static_assert(FKV_F32 == 0 && FKV_F16 == 1 && FKV_BF16 == 2, "FKV_ROW_TYPE");

/* ---- decode shapes ---- */

enum { PREFILL_KEYS = 64, STREAMS = 4, WARP = 32, SLAB = 128, SMALL_SLAB = 64, MOST_SLABS = 4, SIMDGROUP_ROWS = 8 };

static uint32_t heads_per_kv(const fkv_attn_layer *layer) { return layer->n_q_heads / layer->n_kv_heads; }

static uint32_t slab_of(const fkv_attn_layer *layer) { return layer->head_dim % SLAB == 0 ? SLAB : SMALL_SLAB; }

static bool is_kind(const fkv_attn_layer *layer, fkv_codec_kind kind) {
    return layer->block.codec[FKV_SIDE_K].kind == kind || layer->block.codec[FKV_SIDE_V].kind == kind;
}

/* Returns true if the kernels that use matrix instructions can unpack the sealed pages of this layer. V must be sealed. If V has
 * 4 bits, K must also have 4 bits. A page must have at least 32 tokens. */
static bool has_mma_pages(const fkv_attn_layer *layer) {
    const fkv_codec *codec = layer->block.codec;
    return layer->sealed && codec[FKV_SIDE_V].kind == FKV_CODEC_SEALED_V &&
           (codec[FKV_SIDE_K].bits == 4 || codec[FKV_SIDE_V].bits < 4) && layer->block.page_tokens >= 2 * FKV_SEALED_TOKENS;
}

/* Returns true if decode of this layer uses decode_sealed.h for sealed pages. If keys are calibrated, one warp must handle all
 * channels of a head. */
static bool has_sealed_mma(const fkv_attn_layer *layer) {
    return has_mma_pages(layer) && (!layer->calibrated || layer->head_dim <= SLAB);
}

/* Returns true if decode of this layer uses decode_sealed.h for codebook codes. The head dimension must be 128, there must be at
 * most four query heads per KV head, and a page must have at least 32 tokens.
 */
static bool has_book_walk(const fkv_attn_layer *layer) {
    const fkv_codec *codec = layer->block.codec;
    return codec[FKV_SIDE_K].kind == FKV_CODEC_TURBO && codec[FKV_SIDE_V].kind == FKV_CODEC_TURBO && layer->head_dim == SLAB &&
           heads_per_kv(layer) <= 4 && layer->block.page_tokens >= 2 * FKV_SEALED_TOKENS;
}

static bool is_latent(const fkv_attn_layer *layer) { return layer->rope_dim != 0; }

/* Returns true if prefill of a latent layer uses prefill_latent.h. */
static bool has_latent_prefill(const fkv_attn_layer *layer) {
    const fkv_codec *codec = &layer->block.codec[FKV_SIDE_K];
    return codec->kind == FKV_CODEC_AFFINE && codec->bits == 8 && codec->group == 64 && layer->head_dim == 512 &&
           layer->rope_dim == 64 && !layer->sealed;
}

/* Returns true if prefill of a sealed layer with more than 128 channels uses prefill_sealed.h. K and V must both have 4 bits.
 * Float32 queries are split into two fp16 values each. With 512 channels, they do not fit in shared memory, so this function
 * returns false for float32 rows. */
static bool has_wide_sealed_prefill(const fkv_attn_layer *layer) {
    const fkv_codec *codec = layer->block.codec;
    if (codec[FKV_SIDE_K].bits != 4 || codec[FKV_SIDE_V].bits != 4) return false;
    return layer->head_dim <= 2 * SLAB || (layer->head_dim == 4 * SLAB && layer->row_type != FKV_F32 && !layer->calibrated);
}

/* In addition to the conditions of has_mma_pages(), prefill requires that a sealed page have 64 tokens, which are one tile of
 * keys, or two tiles for wide heads. Layers with codebook codes use matrix instructions only in decode. */
bool fkv_prefill_has_warpgroups(const fkv_attn_layer *layer) {
    if (is_latent(layer)) return has_latent_prefill(layer);
    if (!layer->sealed) return !is_kind(layer, FKV_CODEC_TURBO);
    return has_mma_pages(layer) && layer->block.page_tokens == PREFILL_KEYS &&
           (layer->head_dim <= SLAB || has_wide_sealed_prefill(layer));
}

/* Constants of decode_latent.h. A static_assert in the generated source checks the size of the shared memory. */
enum { LATENT_SLAB = 64, LATENT_TILE = 32, LATENT_STAGES = 3, LATENT_ROWS = 16, LATENT_WARPS = 16, ROPE_STEP = 16 };

bool fkv_kernels_support(fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (!is_latent(layer)) return true;
    const uint32_t warps = layer->head_dim / LATENT_SLAB;
    return device != FKV_KERNEL_METAL && !layer->sealed && !is_kind(layer, FKV_CODEC_TURBO) &&
           layer->head_dim % LATENT_SLAB == 0 && warps <= LATENT_WARPS / 2 && layer->rope_dim <= 2 * ROPE_STEP * warps;
}

/* Returns the bytes of shared memory that decode of a latent layer uses. */
static uint32_t latent_shared_bytes(const fkv_attn_layer *layer) {
    const fkv_codec *codec = &layer->block.codec[FKV_SIDE_K];
    const uint32_t warps = layer->head_dim / LATENT_SLAB;
    const uint32_t rope_steps = fkv_ceil_div(layer->rope_dim / ROPE_STEP, warps);
    const uint32_t stage = warps * LATENT_TILE * (LATENT_SLAB * codec->bits / 32 + rope_steps * ROPE_STEP / 2);
    const uint32_t groups = codec->bits != 16 && codec->group < LATENT_SLAB ? LATENT_SLAB / codec->group : 1;
    const uint32_t scores = LATENT_STAGES * stage + warps * LATENT_ROWS * (LATENT_TILE + 8);
    const uint32_t queries = (LATENT_STAGES - 1) * stage + LATENT_ROWS * (layer->head_dim + layer->rope_dim);
    const uint32_t rest = LATENT_ROWS * (LATENT_TILE + 4) + warps * groups * LATENT_TILE * 4 + 2 * LATENT_ROWS;
    return (fkv_max_u32(scores, queries) + rest) * (uint32_t)sizeof(uint32_t);
}

/* Returns true if decode of this layer uses tensor cores (decode_mma.h or decode_sealed.h). */
static bool has_mma(fkv_kernel_device device, const fkv_attn_layer *layer) {
    return !is_latent(layer) && device != FKV_KERNEL_METAL && (!layer->sealed || has_sealed_mma(layer)) &&
           layer->head_dim % SMALL_SLAB == 0 && layer->head_dim / slab_of(layer) <= MOST_SLABS;
}

/* Returns true if decode of this layer uses decode_simdgroup.h. The query heads of a single query must fill more than half of the
 * eight rows of a matrix. */
static bool has_simdgroup_decode(fkv_kernel_device device, const fkv_attn_layer *layer) {
    return device == FKV_KERNEL_METAL && heads_per_kv(layer) > SIMDGROUP_ROWS / 2;
}

/* Returns true if both keys and values have a scale for every 32 channels. */
static bool has_small_groups(const fkv_block *block) {
    const fkv_codec *k = &block->codec[FKV_SIDE_K];
    const fkv_codec *v = &block->codec[FKV_SIDE_V];
    return k->kind == FKV_CODEC_AFFINE && v->kind == FKV_CODEC_AFFINE && k->bits != 16 && v->bits != 16 && k->group == 32 &&
           v->group == 32;
}

uint32_t fkv_decode_rows(fkv_kernel_device device, const fkv_attn_layer *layer, uint32_t item_queries) {
    uint32_t rows = heads_per_kv(layer) * item_queries;
    if (is_latent(layer)) return LATENT_ROWS;
    if (has_simdgroup_decode(device, layer)) return SIMDGROUP_ROWS;
    uint32_t most = 4;
    if (has_mma(device, layer)) most = layer->head_dim <= 2 * SLAB ? 16 : 8;
    /* with eight rows, queries and scales would need more than 48 KB of static shared memory */
    if (layer->head_dim > 3 * SLAB && has_small_groups(&layer->block)) most = 4;
    if ((layer->sealed && heads_per_kv(layer) <= 4) || has_book_walk(layer))
        most = fkv_max_u32(4, most / 2); /* smaller blocks of rows are faster, because more warps are resident */
    return rows <= 4 || most == 4 ? 4 : rows <= 8 || most == 8 ? 8 : 16;
}

static uint32_t decode_threads(fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (is_latent(layer)) return WARP * (layer->head_dim / LATENT_SLAB);
    return STREAMS * WARP * (has_mma(device, layer) ? layer->head_dim / slab_of(layer) : 1);
}

/* ---- prefill shapes ---- */

enum {
    PREFILL_THREADS = 384,      /* three warpgroups */
    PREFILL_MORE_THREADS = 512, /* sealed and latent layers */
    PREFILL_ROWS = 128,
    PREFILL_WIDE_ROWS = 64, /* rows per block if the accumulators of a row are divided between two warpgroups */
    WIDE_HEAD = 256,
    ALL_SHARED_BYTES = 228 * 1024, /* shared memory of a Hopper multiprocessor, in bytes */
    SYSTEM_SHARED_BYTES = 1024,
    PREFILL_SHARED_BYTES = ALL_SHARED_BYTES - SYSTEM_SHARED_BYTES, /* maximum shared memory per block */
    METAL_THREADS = 128,                                           /* four simdgroups */
    SEAL_THREADS = 512 /* sealing is latency-bound, so the work is spread over many threads */
};

/* On Metal, the size of threadgroup memory limits the number of rows. CUDA devices other than Hopper run the plain loops with the
 * same numbers of rows and threads as Hopper. */
uint32_t fkv_prefill_rows(fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (device == FKV_KERNEL_METAL) return layer->head_dim <= 128 ? 32 : layer->head_dim <= 256 ? 16 : 8;
    return layer->head_dim > WIDE_HEAD ? PREFILL_WIDE_ROWS : PREFILL_ROWS;
}

uint32_t fkv_prefill_queries(fkv_kernel_device device, const fkv_attn_layer *layer) {
    return fkv_max_u32(1, fkv_prefill_rows(device, layer) / heads_per_kv(layer));
}

static uint32_t prefill_threads(fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (device == FKV_KERNEL_METAL) return METAL_THREADS;
    return (layer->sealed || is_latent(layer)) && fkv_prefill_has_warpgroups(layer) ? PREFILL_MORE_THREADS : PREFILL_THREADS;
}

/* Parameters of page sharing between prefill blocks (prefill_share.h). An H200 runs slightly more than eight groups of 16 blocks
 * at a time. The host emulation usually runs blocks one after another, so each block is its own group. */
enum { SHARERS = 16, RINGS = 12, HOST_RINGS = 2, SLOTS = 16, RING_WORDS = 128, SHARE_DECISIONS = 4096 };
enum { OPEN_IMAGE_MORE = 256 }; /* bytes that follow the keys and values of an unpacked open page */

/* Number of polls after which a block stops waiting for the other blocks of its group to start. A poll takes about a microsecond.
 * The total waiting time is longer than a block needs to process a million tokens, so that a group whose members start in two
 * waves can still share pages. */
enum { PATIENCE = 32768, HOST_PATIENCE = 16 };

/* Returns true if blocks of a sealed layer never share unpacked pages, because the head is wide. */
static bool is_wide(const fkv_attn_layer *layer) { return layer->head_dim > SLAB; }

static uint32_t sharers_of(fkv_kernel_device device) { return device == FKV_KERNEL_HOST ? 1 : SHARERS; }

static uint32_t rings_of(fkv_kernel_device device) { return device == FKV_KERNEL_HOST ? HOST_RINGS : RINGS; }

uint32_t fkv_prefill_ring_words(fkv_kernel_device device) { return (1 + rings_of(device)) * RING_WORDS + SHARE_DECISIONS; }

uint64_t fkv_prefill_ring_bytes(fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (device == FKV_KERNEL_METAL || !layer->sealed || !fkv_prefill_has_warpgroups(layer) || layer->window != 0 ||
        is_wide(layer))
        return 0;
    const uint64_t row =
        fkv_ceil_div(layer->head_dim, 64) * 128; /* bytes per unpacked key; an unpacked value has the same size */
    const uint32_t unit = 144;                   /* sizeof(pf_page_unit); prefill_share.h checks this size with static_assert */
    const uint32_t third = layer->calibrated ? PREFILL_KEYS * 128 : 0; /* third digits of calibrated keys */
    const uint64_t image = fkv_ceil_div((uint32_t)((PREFILL_KEYS + 8 + PREFILL_KEYS) * row + unit), 128) * 128 + third;
    const uint32_t queries = fkv_min_u32(fkv_prefill_queries(device, layer), PREFILL_KEYS); /* at most, per block */
    const uint32_t open_pages = fkv_ceil_div(sharers_of(device) * queries, PREFILL_KEYS) + FKV_OPEN_SPAN;
    return fkv_prefill_ring_words(device) * sizeof(uint32_t) +
           rings_of(device) * (SLOTS * image + open_pages * (3 * PREFILL_KEYS * row + OPEN_IMAGE_MORE));
}

static void emit_ring(source_buffer *w, fkv_kernel_device device, const fkv_attn_layer *layer) {
    emit_number(w, "PREFILL_SHARERS", is_wide(layer) ? 0 : sharers_of(device));
    emit_number(w, "PREFILL_RINGS", rings_of(device));
    emit_number(w, "PREFILL_SLOTS", SLOTS);
    emit_number(w, "PREFILL_DECISIONS", SHARE_DECISIONS);
    emit_number(w, "PREFILL_PATIENCE", device == FKV_KERNEL_HOST ? HOST_PATIENCE : PATIENCE);
    emit_number(w, "PREFILL_RING_BYTES", (uint32_t)fkv_prefill_ring_bytes(device, layer));
}

static bool is_decode(fkv_kernel kernel) { return kernel == FKV_KERNEL_DECODE || kernel == FKV_KERNEL_DECODE_MERGE; }

static bool is_prefill(fkv_kernel kernel) { return kernel == FKV_KERNEL_PREFILL || kernel == FKV_KERNEL_COPY_DECODED; }

uint32_t fkv_kernel_shared_bytes(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer, uint32_t decode_rows) {
    if (device != FKV_KERNEL_CUDA) return 0;
    if (is_latent(layer) && is_decode(kernel)) return latent_shared_bytes(layer);
    if (layer->sealed && is_decode(kernel)) return ALL_SHARED_BYTES / fkv_decode_blocks(layer, decode_rows) - SYSTEM_SHARED_BYTES;
    return is_prefill(kernel) ? PREFILL_SHARED_BYTES : 0;
}

static void emit_mma(source_buffer *w) {
    emit_text(w, fkv_kernel_file_decode_split);
    emit_text(w, fkv_kernel_file_decode_shape);
    emit_text(w, fkv_kernel_file_decode_queries);
    emit_text(w, fkv_kernel_file_codebook_levels);
    emit_text(w, fkv_kernel_file_decode_codebook);
    emit_text(w, fkv_kernel_file_decode_scores);
    emit_text(w, fkv_kernel_file_decode_values);
    emit_text(w, fkv_kernel_file_decode_softmax);
    emit_text(w, fkv_kernel_file_decode_mma);
}

static void emit_sealed_mma(source_buffer *w, const fkv_attn_layer *layer) {
    emit_text(w, fkv_kernel_file_decode_split);
    emit_text(w, fkv_kernel_file_sealed_shape);
    if (!layer->sealed) emit_text(w, fkv_kernel_file_codebook_levels);
    if (layer->calibrated) emit_text(w, fkv_kernel_file_calibrated_page);
    emit_text(w, !layer->sealed                             ? fkv_kernel_file_codebook_page
                 : layer->block.codec[FKV_SIDE_V].bits == 4 ? fkv_kernel_file_sealed_page
                                                            : fkv_kernel_file_narrow_page);
    if (layer->sealed) emit_text(w, fkv_kernel_file_sealed_operands);
    emit_text(w, heads_per_kv(layer) <= 4 ? fkv_kernel_file_sealed_rows4 : fkv_kernel_file_sealed_rows8);
    emit_text(w, fkv_kernel_file_decode_sealed);
}

static void emit_plain_tile(source_buffer *w) {
    emit_text(w, fkv_kernel_file_plain_rows);
    emit_text(w, fkv_kernel_file_plain_tile);
}

static void emit_simdgroups(source_buffer *w, const char *kernel) {
    emit_text(w, fkv_kernel_file_simdgroup_metal);
    emit_text(w, fkv_kernel_file_simdgroup_walk);
    emit_text(w, kernel);
}

/* On CUDA, the kernel needs more shared memory than can be allocated statically, so it uses dynamic shared memory. */
static void emit_latent_decode(source_buffer *w, fkv_kernel_device device) {
    if (device == FKV_KERNEL_CUDA)
        emit_text(w, "#undef FKV_SHARED_ARRAY\n"
                     "#define FKV_SHARED_ARRAY(type, name, n) extern __shared__ __align__(16) type name[]\n");
    emit_text(w, fkv_kernel_file_decode_split);
    emit_text(w, fkv_kernel_file_decode_latent);
    if (device == FKV_KERNEL_CUDA) emit_text(w, "static_assert(FKV_DECODE_SHARED * 4 == FKV_SHARED_BYTES);\n");
}

static void emit_decode(source_buffer *w, fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (is_latent(layer)) {
        emit_latent_decode(w, device);
    } else if (has_mma(device, layer)) {
        if (has_book_walk(layer))
            emit_sealed_mma(w, layer);
        else
            emit_mma(w);
        if (device == FKV_KERNEL_HOST && !fkv_prefill_has_warpgroups(layer))
            emit_plain_tile(w); /* host sources contain both decode and prefill */
    } else if (has_simdgroup_decode(device, layer)) {
        emit_simdgroups(w, fkv_kernel_file_decode_simdgroup);
    } else {
        emit_plain_tile(w);
        emit_text(w, fkv_kernel_file_decode_plain);
    }
}

static void emit_warpgroup_prefill(source_buffer *w, const char *warpgroup, bool sealed) {
    emit_text(w, warpgroup);
    emit_text(w, fkv_kernel_file_prefill_shape);
    emit_text(w, sealed ? fkv_kernel_file_prefill_sealed : fkv_kernel_file_prefill_unpack);
    if (sealed) emit_text(w, fkv_kernel_file_prefill_share);
    emit_text(w, fkv_kernel_file_prefill_feed);
    emit_text(w, fkv_kernel_file_lane_rows);
    emit_text(w, fkv_kernel_file_prefill_wgmma);
}

static void emit_plain_prefill(source_buffer *w) {
    emit_plain_tile(w);
    emit_text(w, fkv_kernel_file_prefill_plain);
}

static void emit_latent_prefill(source_buffer *w, fkv_kernel_device device) {
    if (device == FKV_KERNEL_CUDA) emit_text(w, "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n");
    emit_text(w, device == FKV_KERNEL_CUDA ? fkv_kernel_file_warpgroup_cuda : fkv_kernel_file_warpgroup_host);
    emit_text(w, fkv_kernel_file_prefill_latent);
    if (device != FKV_KERNEL_CUDA) return;
    emit_text(w, "#else\n");
    emit_text(w, fkv_kernel_file_plain_rows);
    emit_text(w, fkv_kernel_file_prefill_plain_latent);
    emit_text(w, "#endif\n");
}

static void emit_prefill(source_buffer *w, fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (is_latent(layer)) {
        emit_latent_prefill(w, device);
        emit_text(w, fkv_kernel_file_copy_decoded);
        return;
    }
    switch (device) {
    case FKV_KERNEL_CUDA:
        if (!fkv_prefill_has_warpgroups(layer)) {
            emit_plain_prefill(w);
            break;
        }
        emit_text(w, "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n");
        emit_warpgroup_prefill(w, fkv_kernel_file_warpgroup_cuda, false);
        emit_text(w, "#else\n");
        emit_plain_prefill(w);
        emit_text(w, "#endif\n");
        break;
    case FKV_KERNEL_METAL: emit_simdgroups(w, fkv_kernel_file_prefill_simdgroup); break;
    default: emit_warpgroup_prefill(w, fkv_kernel_file_warpgroup_host, false);
    }
    emit_text(w, fkv_kernel_file_copy_decoded);
}

uint32_t fkv_kernel_threads(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer) {
    switch (kernel) {
    case FKV_KERNEL_PREFILL:
    case FKV_KERNEL_COPY_DECODED: return prefill_threads(device, layer);
    case FKV_KERNEL_WRITE: return WARP;
    case FKV_KERNEL_COPY_PAGES:
    case FKV_KERNEL_PUT_NUMBERS: return 128;
    case FKV_KERNEL_SEAL: return device == FKV_KERNEL_METAL ? METAL_THREADS : SEAL_THREADS;
    case FKV_KERNEL_DECODE:
    case FKV_KERNEL_DECODE_MERGE: return decode_threads(device, layer);
    default:
        return layer->head_dim < 128 ? 256 : layer->head_dim < 256 ? 512 : 1024; /* equals FKV_MERGE_THREADS in attend_merge.h */
    }
}

/* Returns the number of blocks that should be resident on a multiprocessor; the compiler limits the registers per thread
 * accordingly. The number is large enough to saturate memory bandwidth, and small enough to avoid register spills. If the K bits
 * and the V bits add up to at most 12, tiles are larger and need more registers. */
uint32_t fkv_decode_blocks(const fkv_attn_layer *layer, uint32_t decode_rows) {
    const fkv_codec *codec = layer->block.codec;
    if (is_latent(layer))
        return fkv_max_u32(1, fkv_min_u32(ALL_SHARED_BYTES / (latent_shared_bytes(layer) + SYSTEM_SHARED_BYTES),
                                          LATENT_WARPS * LATENT_SLAB / layer->head_dim));
    uint32_t bytes = codec[FKV_SIDE_K].row_bytes[FKV_PART_CODES] + codec[FKV_SIDE_V].row_bytes[FKV_PART_CODES];
    uint32_t warps = decode_rows > 8 ? 8 : decode_rows > 4 || 8 * bytes <= 12 * layer->head_dim ? 12 : 16;
    if (layer->sealed || has_book_walk(layer)) warps = layer->head_dim <= SLAB ? 12 : decode_rows > 8 ? 8 : 16;
    return fkv_max_u32(1, warps * WARP / decode_threads(FKV_KERNEL_CUDA, layer));
}

/* Emits rows.h and, for decode and prefill, the files that read chunks of packed pages. */
static void emit_rows(source_buffer *w, fkv_kernel kernel, const fkv_attn_layer *layer) {
    emit_text(w, fkv_kernel_file_rows);
    if (!is_decode(kernel) && !is_prefill(kernel)) return;
    emit_text(w, fkv_kernel_file_chunks);
    if (layer->calibrated) emit_text(w, fkv_kernel_file_calibrated_keys);
}

/* Returns true if the kernel uses simdgroup matrices. Such a kernel reads both the open and the sealed pages of a layer. */
static bool in_simdgroups(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer) {
    return is_decode(kernel) ? has_simdgroup_decode(device, layer) : device == FKV_KERNEL_METAL && is_prefill(kernel);
}

/* Emits the decode or prefill functions that read either the open or the sealed pages of a sealed layer. */
static void emit_form(source_buffer *w, fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer, bool open) {
    if (kernel == FKV_KERNEL_SEAL || in_simdgroups(device, kernel, layer)) return;
    bool mma = is_decode(kernel) && has_mma(device, layer);
    if (mma && open) emit_mma(w);
    if (mma && !open) emit_sealed_mma(w, layer);
    if (!mma || device == FKV_KERNEL_HOST)
        emit_text(w, fkv_kernel_file_plain_tile); /* host sources contain both decode and prefill */
    if (is_decode(kernel) && !mma) emit_text(w, fkv_kernel_file_decode_plain);
}

/* Emits the part of a sealed layer's source that follows the prelude: first the functions for open pages, in namespace `opened`,
 * and then the functions for sealed pages. */
static void emit_sealed(source_buffer *w, fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer) {
    emit_block(w, &layer->open, true);
    emit_text(w, "namespace opened {\n");
    emit_rows(w, kernel, layer);
    emit_text(w, "}\n");
    emit_text(w, fkv_kernel_file_plain_rows);
    emit_text(w, "namespace opened {\n");
    emit_form(w, device, kernel, layer, true);
    emit_text(w, "}\n");
    emit_end_of_block(w);
    emit_block(w, &layer->block, layer->window != 0);
    emit_rows(w, kernel, layer);
    emit_form(w, device, kernel, layer, false);
    if (in_simdgroups(device, kernel, layer)) {
        emit_simdgroups(w, is_prefill(kernel) ? fkv_kernel_file_prefill_simdgroup : fkv_kernel_file_decode_simdgroup);
        if (is_prefill(kernel)) emit_text(w, fkv_kernel_file_copy_decoded);
    } else if (is_decode(kernel)) {
        if (has_mma(device, layer))
            emit_text(w, "#undef FKV_DECODE_SHARED\n#define FKV_DECODE_SHARED (DC_SHARED_WORDS > opened::DC_SHARED_WORDS ? "
                         "DC_SHARED_WORDS : opened::DC_SHARED_WORDS)\n");
        if (device == FKV_KERNEL_CUDA) emit_text(w, "static_assert(FKV_DECODE_SHARED * 4 <= FKV_SHARED_BYTES);\n");
    } else if (is_prefill(kernel)) {
        bool warpgroups = device == FKV_KERNEL_CUDA && fkv_prefill_has_warpgroups(layer);
        if (warpgroups) {
            emit_text(w, "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n");
            emit_warpgroup_prefill(w, fkv_kernel_file_warpgroup_cuda, true);
            emit_text(w, "#else\n");
        }
        emit_text(w, fkv_kernel_file_prefill_plain);
        if (warpgroups) emit_text(w, "#endif\n");
        emit_text(w, fkv_kernel_file_copy_decoded);
    } else {
        emit_text(w, fkv_kernel_file_write_rows);
        emit_text(w, fkv_kernel_file_seal);
    }
}

static void emit_kernel(source_buffer *w, fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer) {
    emit_block(w, &layer->block, layer->window != 0);
    emit_rows(w, kernel, layer);
    switch (kernel) {
    case FKV_KERNEL_WRITE:
    case FKV_KERNEL_COPY_PAGES:
    case FKV_KERNEL_PUT_NUMBERS:
        emit_text(w, fkv_kernel_file_write_rows);
        emit_text(w, fkv_kernel_file_write);
        break;
    case FKV_KERNEL_MERGE: emit_text(w, fkv_kernel_file_attend_merge); break;
    case FKV_KERNEL_DECODE:
    case FKV_KERNEL_DECODE_MERGE: emit_decode(w, device, layer); break;
    default: emit_prefill(w, device, layer);
    }
}

size_t fkv_kernel_header(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer, uint32_t decode_rows,
                         char *text, size_t size) {
    static const char *const preludes[] = {[FKV_KERNEL_CUDA] = fkv_kernel_file_prelude_cuda,
                                           [FKV_KERNEL_METAL] = fkv_kernel_file_prelude_metal,
                                           [FKV_KERNEL_HOST] = fkv_kernel_file_prelude_host};
    source_buffer w = {.text = text, .size = size};
    /* float16.h precedes the defines, because some defines have the same names as enumerators in float16.h */
    if (device == FKV_KERNEL_HOST) emit_text(&w, "#include \"base/float16.h\"\n");
    emit_layer(&w, layer);
    emit_number(&w, "LAUNCH_THREADS", fkv_kernel_threads(device, kernel, layer));
    emit_number(&w, "LAUNCH_BLOCKS", is_decode(kernel) ? fkv_decode_blocks(layer, decode_rows) : 1);
    if (is_decode(kernel)) {
        emit_number(&w, "ITEM_ROWS", decode_rows);
        emit_number(&w, "ONE_CHUNK", decode_rows < fkv_decode_rows(device, layer, FKV_ITEM_QUERIES));
    }
    if (layer->sealed) emit_ring(&w, device, layer);
    if (layer->sealed) emit_number(&w, "SEAL_THREADS", fkv_kernel_threads(device, FKV_KERNEL_SEAL, layer));
    if (layer->sealed || is_latent(layer))
        emit_number(&w, "SHARED_BYTES", fkv_kernel_shared_bytes(device, kernel, layer, decode_rows));
    if (is_prefill(kernel)) {
        emit_number(&w, "PREFILL_ROWS", fkv_prefill_rows(device, layer));
        emit_number(&w, "PREFILL_THREADS", prefill_threads(device, layer));
    }
    if (device == FKV_KERNEL_HOST) emit_text(&w, fkv_kernel_file_lanes_host);
    emit_text(&w, preludes[device]);
    emit_text(&w, fkv_kernel_file_step_words);
    if (is_decode(kernel)) emit_text(&w, fkv_kernel_file_splits);
    if (layer->sealed && (is_decode(kernel) || kernel == FKV_KERNEL_SEAL || is_prefill(kernel)))
        emit_sealed(&w, device, kernel, layer);
    else
        emit_kernel(&w, device, kernel, layer);
    if (kernel == FKV_KERNEL_DECODE_MERGE) {
        emit_text(&w, fkv_kernel_file_attend_merge);
        emit_text(&w, fkv_kernel_file_lane_rows);
        emit_text(&w, fkv_kernel_file_decode_merge);
    }
    return w.length;
}

/* ---- channel orders ---- */

/* Words before the channels of an order: n[1] and n[2] of fkv_channel_order. */
enum { ORDER_HEADER = 2 };

uint32_t fkv_kernel_order_words(const fkv_attn_layer *layer) { return ORDER_HEADER + layer->head_dim; }

void fkv_kernel_orders(const fkv_attn_layer *layer, uint32_t *words) {
    for (uint32_t head = 0; head < layer->n_kv_heads; head++) {
        const fkv_channel_order *order = fkv_attn_head_block(layer, head)->codec[FKV_SIDE_K].channels;
        FKV_ASSERT(order != NULL);
        *words++ = order->n[1];
        *words++ = order->n[2];
        for (uint32_t p = 0; p < layer->head_dim; p++) *words++ = order->channel[p];
    }
}

/* ---- kernel bodies ---- */

#define CUDA_PLACE "fkv_place place = {threadIdx.x, blockIdx.x, blockIdx.y, blockIdx.z};\n"
#define METAL_PLACE                                                                                                              \
    "fkv_place place = {thread_position_in_threadgroup.x, threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, "      \
    "threadgroup_position_in_grid.z};\n"
#define HOST_PLACE ""

#define WRITE "fkv_write(place, k, v, pool, table, done);\n"
#define COPY_PAGES "fkv_copy_pages(place, pairs, pool, done);\n"
#define PUT_NUMBERS "fkv_put_numbers(place, numbers, where, pool, done);\n"
#define DECODE                                                                                                                   \
    "FKV_SHARED_ARRAY(fkv_u32, shared, FKV_DECODE_SHARED);\n"                                                                    \
    "fkv_attend_decode(place, shared, q, pool, table, (FKV_DEVICE float *)parts);\n"
#define SEAL                                                                                                                     \
    "FKV_SHARED_ARRAY(float, shared, FKV_SEAL_SHARED);\n"                                                                        \
    "fkv_seal(place, shared, open, pool, table, done FKV_HEAD_ORDER);\n"
#define SEALED_DECODE                                                                                                            \
    "if (fkv_split_at(place, table).words[FKV_SPLIT_OPEN] != 0)\n"                                                               \
    "    opened::fkv_attend_decode(place, shared, q, open, table, (FKV_DEVICE float *)parts FKV_HEAD_ORDER);\n"                  \
    "else\n"                                                                                                                     \
    "    fkv_attend_decode(place, shared, q, pool, table, (FKV_DEVICE float *)parts FKV_HEAD_ORDER);\n"
#define MERGE_LAST "fkv_merge_last(place, shared, (float *)parts, table, sink_logits, counters, out);\n"
#define MERGE                                                                                                                    \
    "FKV_SHARED_ARRAY(float, shared, FKV_MERGE_SHARED);\n"                                                                       \
    "fkv_attend_merge(place, shared, parts, table, sink_logits, out);\n"

#define CUDA_SHARED "extern __shared__ __align__(16) fkv_u32 shared[];\n"
#define OTHER_SHARED "FKV_SHARED_ARRAY(fkv_u32, shared, FKV_PREFILL_SHARED);\n"
#define OTHER_DECODE_SHARED "FKV_SHARED_ARRAY(fkv_u32, shared, FKV_DECODE_SHARED);\n"
#define PREFILL(pools) "fkv_attend_prefill(place, shared, q, " pools ", table, sink_logits, out);\n"
#define COPY_DECODED(pools)                                                                                                      \
    "if (fkv_copies_decoded(place, table))\n"                                                                                    \
    "    fkv_copy_decoded_rows(place, table, decoded, out);\n"                                                                   \
    "else\n"                                                                                                                     \
    "    fkv_attend_prefill(place, shared, q, " pools ", table, sink_logits, out);\n"

#define SOURCES(place, shared, decode, pools)                                                                                    \
    {[FKV_KERNEL_WRITE] = place WRITE,                                                                                           \
     [FKV_KERNEL_COPY_PAGES] = place COPY_PAGES,                                                                                 \
     [FKV_KERNEL_PUT_NUMBERS] = place PUT_NUMBERS,                                                                               \
     [FKV_KERNEL_DECODE] = place decode,                                                                                         \
     [FKV_KERNEL_MERGE] = place MERGE,                                                                                           \
     [FKV_KERNEL_DECODE_MERGE] = place decode MERGE_LAST,                                                                        \
     [FKV_KERNEL_PREFILL] = place shared PREFILL(pools),                                                                         \
     [FKV_KERNEL_COPY_DECODED] = place shared COPY_DECODED(pools),                                                               \
     [FKV_KERNEL_SEAL] = place SEAL}
#define BOTH_SOURCES(place, shared, decode_shared)                                                                               \
    {SOURCES(place, shared, DECODE, "pool"),                                                                                     \
     SOURCES(place, shared, decode_shared SEALED_DECODE, "pool, open, ring FKV_HEAD_ORDER")}

const char *fkv_kernel_source(fkv_kernel_device device, fkv_kernel kernel, bool sealed) {
    /* NOLINTBEGIN(bugprone-suspicious-missing-comma): the string literals are concatenated on purpose */
    static const char *const sources[][2][FKV_N_KERNELS] = {
        [FKV_KERNEL_CUDA] = BOTH_SOURCES(CUDA_PLACE, CUDA_SHARED, CUDA_SHARED),
        [FKV_KERNEL_METAL] = BOTH_SOURCES(METAL_PLACE, OTHER_SHARED, OTHER_DECODE_SHARED),
        [FKV_KERNEL_HOST] = BOTH_SOURCES(HOST_PLACE, OTHER_SHARED, OTHER_DECODE_SHARED)};
    /* NOLINTEND(bugprone-suspicious-missing-comma) */
    return sources[device][sealed][kernel];
}

#define NAMES_OF_ALL                                                                                                             \
    [FKV_KERNEL_WRITE] = {"k", "v", "pool", "table", "after", NULL}, [FKV_KERNEL_COPY_PAGES] = {"pairs", "pool", "after", NULL}, \
    [FKV_KERNEL_PUT_NUMBERS] = {"numbers", "where", "pool", "after", NULL},                                                      \
    [FKV_KERNEL_MERGE] = {"parts", "table", "sink_logits", NULL}

/* In a sealed layer, the first name in the list of a kernel that reads or seals pages is "orders", which only layers with
 * calibrated keys have. */
const char *const *fkv_kernel_inputs(fkv_kernel kernel, const fkv_attn_layer *layer) {
    static const char *const names[2][FKV_N_KERNELS][12] = {
        {NAMES_OF_ALL, [FKV_KERNEL_DECODE] = {"q", "pool", "table", "after", NULL},
         [FKV_KERNEL_DECODE_MERGE] = {"q", "pool", "table", "sink_logits", "counters", "after", NULL},
         [FKV_KERNEL_PREFILL] = {"q", "pool", "table", "sink_logits", "after", NULL},
         [FKV_KERNEL_COPY_DECODED] = {"q", "pool", "table", "sink_logits", "decoded", "after", NULL}},
        {NAMES_OF_ALL, [FKV_KERNEL_SEAL] = {"orders", "open", "pool", "table", "after_open", "after", NULL},
         [FKV_KERNEL_DECODE] = {"orders", "q", "pool", "open", "table", "after_open", "after", NULL},
         [FKV_KERNEL_DECODE_MERGE] = {"orders", "q", "pool", "open", "table", "sink_logits", "counters", "after_open", "after",
                                      NULL},
         [FKV_KERNEL_PREFILL] = {"orders", "q", "pool", "open", "ring", "table", "sink_logits", "after_ring", "after_open",
                                 "after", NULL},
         [FKV_KERNEL_COPY_DECODED] = {"orders", "q", "pool", "open", "ring", "table", "sink_logits", "decoded", "after_ring",
                                      "after_open", "after", NULL}}};
    const char *const *list = names[layer->sealed][kernel];
    const bool has_orders = list[0] != NULL && strcmp(list[0], "orders") == 0;
    return has_orders && !layer->calibrated ? list + 1 : list;
}

const char *const *fkv_kernel_outputs(fkv_kernel kernel) {
    static const char *const names[FKV_N_KERNELS][3] = {[FKV_KERNEL_WRITE] = {"done", NULL},
                                                        [FKV_KERNEL_COPY_PAGES] = {"done", NULL},
                                                        [FKV_KERNEL_PUT_NUMBERS] = {"done", NULL},
                                                        [FKV_KERNEL_DECODE] = {"parts", NULL},
                                                        [FKV_KERNEL_MERGE] = {"out", NULL},
                                                        [FKV_KERNEL_DECODE_MERGE] = {"out", "parts", NULL},
                                                        [FKV_KERNEL_PREFILL] = {"out", "done", NULL},
                                                        [FKV_KERNEL_SEAL] = {"done", NULL},
                                                        [FKV_KERNEL_COPY_DECODED] = {"out", "done", NULL}};
    return names[kernel];
}
