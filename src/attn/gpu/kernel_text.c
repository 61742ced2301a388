/* Puts a kernel's text together from its files, which the build embeds as strings (cmake/kernel_files.cmake). */
#include "kernel_text.h"

#include "../../base/float16.h"
#include "../../codec/sealed.h"
#include "../../codec/turbo.h"
#include <kernel_files.h>

#include <stdarg.h>
#include <stdio.h>

/* Text that grows while it fits, and is counted when it does not. */
typedef struct writer {
    char *text;
    size_t size;
    size_t length;
} writer;

static void put(writer *w, const char *text) {
    size_t n = strlen(text);
    if (w->length < w->size) {
        size_t room = w->size - w->length - 1;
        memcpy(w->text + w->length, text, n < room ? n : room);
        w->text[w->length + (n < room ? n : room)] = 0;
    }
    w->length += n;
}

__attribute__((format(printf, 2, 3))) static void put_line(writer *w, const char *format, ...) {
    char line[96];
    va_list values;
    va_start(values, format);
    int n = vsnprintf(line, sizeof line, format, values);
    va_end(values);
    FKV_ASSERT(n >= 0 && (size_t)n < sizeof line);
    (void)n;
    put(w, line);
}

static void put_number(writer *w, const char *name, uint32_t number) { put_line(w, "#define FKV_%s %u\n", name, number); }

static void put_bits(writer *w, const char *name, float number) {
    put_line(w, "#define FKV_%s 0x%08xu\n", name, fkv_bits_of(number));
}

static void put_signs(writer *w, const char *name, const fkv_rotation *rotation) {
    put_line(w, "#define FKV_%s_SIGNS ", name);
    for (uint32_t i = 0; rotation != NULL && i < fkv_ceil_div(rotation->dim, 32); i++)
        put_line(w, "0x%08xu, ", rotation->signs[i]);
    put(w, "0u\n");
}

/* 16-bit rows are codes of 16 bits here, and have neither scales nor biases. */
static void put_codes(writer *w, const fkv_block *block, fkv_side side) {
    const fkv_codec *codec = &block->codec[side];
    char s = side == FKV_SIDE_K ? 'K' : 'V';
    put_line(w, "#define FKV_%c_BITS %u\n", s, codec->bits);
    put_line(w, "#define FKV_%c_GROUP %u\n", s, codec->group);
    put_line(w, "#define FKV_%c_CODES %u\n", s, block->offset[side][FKV_PART_CODES]);
    put_line(w, "#define FKV_%c_SCALES %u\n", s, block->offset[side][FKV_PART_SCALES]);
    put_line(w, "#define FKV_%c_BIASES %u\n", s, block->offset[side][FKV_PART_BIASES]);
    put_line(w, "#define FKV_%c_ROW_BYTES %u\n", s, codec->row_bytes[FKV_PART_CODES]);
    put_line(w, "#define FKV_%c_SEALED %d\n", s, fkv_codec_is_sealed(codec));
}

static void put_book(writer *w, char s, uint32_t is_book, const fkv_turbo_book *book) {
    put_line(w, "#define FKV_%c_BOOK %u\n", s, is_book);
    put_line(w, "#define FKV_%c_BOOK_UNIT 0x%08xu\n", s, fkv_bits_of(book->unit));
    put_line(w, "#define FKV_%c_BOOK_VALUES ", s);
    for (int i = 0; i < 16; i++) put_line(w, "%d%s", book->value[i], i < 15 ? ", " : "\n");
}

static void put_plain_codes(writer *w, const fkv_block *block, fkv_side side) {
    put_codes(w, block, side);
    put_book(w, side == FKV_SIDE_K ? 'K' : 'V', 0, &(fkv_turbo_book){0});
}

static void put_book_codes(writer *w, const fkv_block *block, fkv_side side) {
    put_codes(w, block, side);
    put_book(w, side == FKV_SIDE_K ? 'K' : 'V', 1, &fkv_turbo_books[block->codec[side].bits]);
}

/* Sizes of a sealed V: their levels, and what a number must be above. */
static void put_levels(writer *w, const fkv_codec *codec) {
    bool sealed = codec->kind == FKV_CODEC_SEALED_V;
    const fkv_sealed_book *book = sealed ? fkv_sealed_book_of(codec->bits) : &(const fkv_sealed_book){{0}, {0}, 0};
    put(w, "#define FKV_V_LEVELS ");
    for (int i = 0; i < FKV_SEALED_LEVELS; i++) put_line(w, "%u%s", book->level[i], i + 1 < FKV_SEALED_LEVELS ? ", " : "\n");
    put(w, "#define FKV_V_ABOVE ");
    for (int i = 0; i + 1 < FKV_SEALED_LEVELS; i++) put_line(w, "%u%s", book->above[i], i + 2 < FKV_SEALED_LEVELS ? ", " : "\n");
    put_bits(w, "V_START_BITS", book->start);
}

/* What a text is told of a side, by the kind of its codec: what rows.h and the files of the devices unpack it by. */
static void (*const put_side_of[])(writer *w, const fkv_block *block, fkv_side side) = {
    [FKV_CODEC_HALF] = put_plain_codes,     [FKV_CODEC_AFFINE] = put_plain_codes, [FKV_CODEC_SEALED] = put_plain_codes,
    [FKV_CODEC_SEALED_V] = put_plain_codes, [FKV_CODEC_TURBO] = put_book_codes,
};

static void put_side(writer *w, const fkv_block *block, fkv_side side) { put_side_of[block->codec[side].kind](w, block, side); }

/* What differs between the two forms of a sealed layer's pages. ring: pages of the form may lie in a ring. */
static void put_block(writer *w, const fkv_block *block, bool ring) {
    put_number(w, "BLOCK_BYTES", block->bytes);
    put_number(w, "RING", ring);
    put_side(w, block, FKV_SIDE_K);
    put_side(w, block, FKV_SIDE_V);
    put_levels(w, &block->codec[FKV_SIDE_V]);
}

static void put_end_of_block(writer *w) {
    static const char *const of_side[] = {"BITS",      "GROUP",  "CODES", "SCALES",    "BIASES",
                                          "ROW_BYTES", "SEALED", "BOOK",  "BOOK_UNIT", "BOOK_VALUES"};
    put(w, "#undef FKV_BLOCK_BYTES\n#undef FKV_RING\n#undef FKV_V_LEVELS\n#undef FKV_V_ABOVE\n#undef FKV_V_START_BITS\n");
    for (size_t i = 0; i < sizeof of_side / sizeof of_side[0]; i++)
        put_line(w, "#undef FKV_K_%s\n#undef FKV_V_%s\n", of_side[i], of_side[i]);
}

static void put_layer(writer *w, const fkv_attn_layer *layer) {
    put_number(w, "D", layer->head_dim);
    put_number(w, "G", layer->n_kv_heads);
    put_number(w, "H", layer->n_q_heads);
    put_number(w, "PAGE_TOKENS", layer->block.page_tokens);
    put_number(w, "SEALED", layer->sealed);
    put_number(w, "OPEN_BLOCK_BYTES", layer->open.bytes);
    put_number(w, "OPEN_SPAN", FKV_OPEN_SPAN);
    put(w, layer->sealed ? "#define FKV_OPEN_POOL , FKV_DEVICE const void *open, FKV_DEVICE const void *ring\n"
                           "#define FKV_OPEN_GIVEN , open, ring\n"
                         : "#define FKV_OPEN_POOL\n#define FKV_OPEN_GIVEN\n");
    put_number(w, "WINDOW", layer->window);
    put_number(w, "SINKS", layer->window != 0 ? layer->n_sinks : 0);
    put_bits(w, "SCALE_BITS", layer->scale);
    put_bits(w, "SOFTCAP_BITS", layer->softcap > 0 ? layer->softcap : 0.0f);
    put_number(w, "SINK_LOGITS", layer->sink_logits != NULL);
    put_number(w, "ROW_TYPE", (uint32_t)layer->row_type);
    put_number(w, "PAGE_BF16", layer->block.codec[FKV_SIDE_K].type == FKV_BF16);
    put_number(w, "ROTATE_K", layer->rotate_k != NULL);
    put_number(w, "ROTATE_V", layer->rotate_v != NULL);
    put_signs(w, "K", layer->rotate_k);
    put_signs(w, "V", layer->rotate_v);
}

_Static_assert(FKV_F32 == 0 && FKV_F16 == 1 && FKV_BF16 == 2, "FKV_ROW_TYPE");

/* ---- decode's shape ---- */

enum { PREFILL_KEYS = 64, STREAMS = 4, WARP = 32, SLAB = 128, SMALL_SLAB = 64, MOST_SLABS = 4, SIMDGROUP_ROWS = 8 };

static uint32_t heads_per_kv(const fkv_attn_layer *layer) { return layer->n_q_heads / layer->n_kv_heads; }

static uint32_t slab_of(const fkv_attn_layer *layer) { return layer->head_dim % SLAB == 0 ? SLAB : SMALL_SLAB; }

static bool is_kind(const fkv_attn_layer *layer, fkv_codec_kind kind) {
    return layer->block.codec[FKV_SIDE_K].kind == kind || layer->block.codec[FKV_SIDE_V].kind == kind;
}

/* Matrix units have decode of sealed pages of 4 bits, two blocks of tokens and more. */
static bool has_sealed_mma(const fkv_attn_layer *layer) {
    const fkv_codec *codec = layer->block.codec;
    return layer->sealed && codec[FKV_SIDE_V].kind == FKV_CODEC_SEALED_V && codec[FKV_SIDE_K].bits == 4 &&
           codec[FKV_SIDE_V].bits == 4 && layer->block.page_tokens >= 2 * FKV_SEALED_TOKENS;
}

/* The walk of sealed pages also has rows of a book: of heads that are a slab, with up to four query heads of a KV head. */
static bool has_book_walk(const fkv_attn_layer *layer) {
    const fkv_codec *codec = layer->block.codec;
    return codec[FKV_SIDE_K].kind == FKV_CODEC_TURBO && codec[FKV_SIDE_V].kind == FKV_CODEC_TURBO && layer->head_dim == SLAB &&
           heads_per_kv(layer) <= 4 && layer->block.page_tokens >= 2 * FKV_SEALED_TOKENS;
}

/* And prefill of them, in pages that are a tile of keys; of codes of a book they have decode alone. */
bool fkv_prefill_has_warpgroups(const fkv_attn_layer *layer) {
    if (!layer->sealed) return !is_kind(layer, FKV_CODEC_TURBO);
    return has_sealed_mma(layer) && layer->head_dim <= SLAB && layer->block.page_tokens == PREFILL_KEYS;
}

/* Whether decode_mma.h has this head. */
static bool has_mma(fkv_kernel_device device, const fkv_attn_layer *layer) {
    return device != FKV_KERNEL_METAL && (!layer->sealed || has_sealed_mma(layer)) && layer->head_dim % SMALL_SLAB == 0 &&
           layer->head_dim / slab_of(layer) <= MOST_SLABS;
}

/* Whether decode_simdgroup.h is used: of its eight rows more than half must be there with a single query. */
static bool has_simdgroup_decode(fkv_kernel_device device, const fkv_attn_layer *layer) {
    return device == FKV_KERNEL_METAL && heads_per_kv(layer) > SIMDGROUP_ROWS / 2;
}

uint32_t fkv_decode_rows(fkv_kernel_device device, const fkv_attn_layer *layer, uint32_t item_queries) {
    uint32_t rows = heads_per_kv(layer) * item_queries;
    if (has_simdgroup_decode(device, layer)) return SIMDGROUP_ROWS;
    uint32_t most = 4;
    if (has_mma(device, layer)) most = layer->head_dim <= 2 * SLAB ? 16 : 8;
    if ((layer->sealed && heads_per_kv(layer) <= 4) || has_book_walk(layer))
        most = fkv_max_u32(4, most / 2); /* more warps are worth more */
    return rows <= 4 || most == 4 ? 4 : rows <= 8 || most == 8 ? 8 : 16;
}

static uint32_t decode_threads(fkv_kernel_device device, const fkv_attn_layer *layer) {
    return STREAMS * WARP * (has_mma(device, layer) ? layer->head_dim / slab_of(layer) : 1);
}

/* ---- prefill's shape ---- */

enum {
    PREFILL_THREADS = 384, /* three warpgroups */
    PREFILL_SEALED_THREADS = 512,
    PREFILL_ROWS = 128,
    PREFILL_WIDE_ROWS = 64, /* of heads whose sums take two warpgroups */
    WIDE_HEAD = 256,
    ALL_SHARED_BYTES = 228 * 1024, /* of a Hopper's multiprocessor; of each block the system has some */
    SYSTEM_SHARED_BYTES = 1024,
    PREFILL_SHARED_BYTES = ALL_SHARED_BYTES - SYSTEM_SHARED_BYTES, /* all that a block can have */
    METAL_THREADS = 128                                            /* four simdgroups */
};

/* Metal has simdgroups, whose rows are what fits its threadgroup memory; a CUDA device that is no Hopper has plain loops, under
 * the same launch as one that is. */
uint32_t fkv_prefill_rows(fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (device == FKV_KERNEL_METAL) return layer->head_dim <= 128 ? 32 : layer->head_dim <= 256 ? 16 : 8;
    return layer->head_dim > WIDE_HEAD ? PREFILL_WIDE_ROWS : PREFILL_ROWS;
}

uint32_t fkv_prefill_queries(fkv_kernel_device device, const fkv_attn_layer *layer) {
    return fkv_max_u32(1, fkv_prefill_rows(device, layer) / heads_per_kv(layer));
}

static uint32_t prefill_threads(fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (device == FKV_KERNEL_METAL) return METAL_THREADS;
    return layer->sealed && fkv_prefill_has_warpgroups(layer) ? PREFILL_SEALED_THREADS : PREFILL_THREADS;
}

/* Of pages that blocks unpack for each other (prefill_share.h). An H200 has eight groups and a bit at a time. The host runs one
 * block after the other: each is a group of its own. */
enum { SHARERS = 16, RINGS = 12, HOST_RINGS = 2, SLOTS = 16, RING_WORDS = 64 };

static uint32_t rings_of(fkv_kernel_device device) { return device == FKV_KERNEL_HOST ? HOST_RINGS : RINGS; }

uint32_t fkv_prefill_ring_words(fkv_kernel_device device) { return (1 + rings_of(device)) * RING_WORDS; }

uint64_t fkv_prefill_ring_bytes(fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (device == FKV_KERNEL_METAL || !layer->sealed || !fkv_prefill_has_warpgroups(layer) || layer->window != 0) return 0;
    const uint64_t row = fkv_ceil_div(layer->head_dim, 64) * 128; /* bytes, of a key or of 64 values */
    const uint32_t unit = 144;                                    /* pf_page_unit; the text asserts that all of it fits */
    const uint64_t image = fkv_ceil_div((uint32_t)((PREFILL_KEYS + 8 + PREFILL_KEYS) * row + unit), 128) * 128;
    return fkv_prefill_ring_words(device) * sizeof(uint32_t) + (uint64_t)rings_of(device) * SLOTS * image;
}

static void put_ring(writer *w, fkv_kernel_device device, const fkv_attn_layer *layer) {
    put_number(w, "PREFILL_SHARERS", device == FKV_KERNEL_HOST ? 1 : SHARERS);
    put_number(w, "PREFILL_RINGS", rings_of(device));
    put_number(w, "PREFILL_SLOTS", SLOTS);
    put_number(w, "PREFILL_RING_BYTES", (uint32_t)fkv_prefill_ring_bytes(device, layer));
}

static bool is_prefill(fkv_kernel kernel) { return kernel == FKV_KERNEL_PREFILL || kernel == FKV_KERNEL_PREFILL_BESIDE; }

uint32_t fkv_kernel_shared_bytes(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer, uint32_t decode_rows) {
    if (device != FKV_KERNEL_CUDA) return 0;
    if (layer->sealed && kernel == FKV_KERNEL_DECODE)
        return ALL_SHARED_BYTES / fkv_decode_blocks(layer, decode_rows) - SYSTEM_SHARED_BYTES;
    return is_prefill(kernel) ? PREFILL_SHARED_BYTES : 0;
}

static void put_mma(writer *w) {
    put(w, fkv_kernel_file_decode_piece);
    put(w, fkv_kernel_file_decode_shape);
    put(w, fkv_kernel_file_decode_queries);
    put(w, fkv_kernel_file_book_levels);
    put(w, fkv_kernel_file_decode_book);
    put(w, fkv_kernel_file_decode_scores);
    put(w, fkv_kernel_file_decode_values);
    put(w, fkv_kernel_file_decode_softmax);
    put(w, fkv_kernel_file_decode_mma);
}

static void put_sealed_mma(writer *w, const fkv_attn_layer *layer) {
    put(w, fkv_kernel_file_decode_piece);
    put(w, fkv_kernel_file_sealed_shape);
    if (!layer->sealed) put(w, fkv_kernel_file_book_levels);
    put(w, layer->sealed ? fkv_kernel_file_sealed_page : fkv_kernel_file_book_page);
    put(w, heads_per_kv(layer) <= 4 ? fkv_kernel_file_sealed_rows4 : fkv_kernel_file_sealed_rows8);
    put(w, fkv_kernel_file_decode_sealed);
}

static void put_plain_tile(writer *w) {
    put(w, fkv_kernel_file_plain_rows);
    put(w, fkv_kernel_file_plain_tile);
}

static void put_simdgroups(writer *w, const char *kernel) {
    put(w, fkv_kernel_file_simdgroup_metal);
    put(w, fkv_kernel_file_simdgroup_walk);
    put(w, kernel);
}

static void put_decode(writer *w, fkv_kernel_device device, const fkv_attn_layer *layer) {
    if (has_mma(device, layer)) {
        if (has_book_walk(layer))
            put_sealed_mma(w, layer);
        else
            put_mma(w);
        if (device == FKV_KERNEL_HOST && !fkv_prefill_has_warpgroups(layer)) put_plain_tile(w); /* prefill stands behind it */
    } else if (has_simdgroup_decode(device, layer)) {
        put_simdgroups(w, fkv_kernel_file_decode_simdgroup);
    } else {
        put_plain_tile(w);
        put(w, fkv_kernel_file_decode_plain);
    }
}

static void put_warpgroup_prefill(writer *w, const char *warpgroup, bool sealed) {
    put(w, warpgroup);
    put(w, fkv_kernel_file_prefill_shape);
    put(w, sealed ? fkv_kernel_file_prefill_sealed : fkv_kernel_file_prefill_unpack);
    if (sealed) put(w, fkv_kernel_file_prefill_share);
    put(w, fkv_kernel_file_prefill_feed);
    put(w, fkv_kernel_file_prefill_wgmma);
}

static void put_plain_prefill(writer *w) {
    put_plain_tile(w);
    put(w, fkv_kernel_file_prefill_plain);
}

static void put_prefill(writer *w, fkv_kernel_device device, const fkv_attn_layer *layer) {
    switch (device) {
    case FKV_KERNEL_CUDA:
        if (!fkv_prefill_has_warpgroups(layer)) {
            put_plain_prefill(w);
            break;
        }
        put(w, "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n");
        put_warpgroup_prefill(w, fkv_kernel_file_warpgroup_cuda, false);
        put(w, "#else\n");
        put_plain_prefill(w);
        put(w, "#endif\n");
        break;
    case FKV_KERNEL_METAL: put_simdgroups(w, fkv_kernel_file_prefill_simdgroup); break;
    default: put_warpgroup_prefill(w, fkv_kernel_file_warpgroup_host, false);
    }
    put(w, fkv_kernel_file_prefill_beside);
}

uint32_t fkv_kernel_threads(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer) {
    switch (kernel) {
    case FKV_KERNEL_PREFILL:
    case FKV_KERNEL_PREFILL_BESIDE: return prefill_threads(device, layer);
    case FKV_KERNEL_WRITE: return WARP;
    case FKV_KERNEL_COPY_PAGES:
    case FKV_KERNEL_PUT_NUMBERS:
    case FKV_KERNEL_SEAL: return 128;
    case FKV_KERNEL_DECODE: return decode_threads(device, layer);
    default: return layer->head_dim < 128 ? 256 : layer->head_dim < 256 ? 512 : 1024; /* as attend_merge.h has it */
    }
}

/* Registers are given out for so many blocks: enough warps that their loads fill the memory's pipe, few enough that nothing is
 * spilled. Up to 12 bits of a key and a value have larger tiles. */
uint32_t fkv_decode_blocks(const fkv_attn_layer *layer, uint32_t decode_rows) {
    const fkv_codec *codec = layer->block.codec;
    uint32_t bytes = codec[FKV_SIDE_K].row_bytes[FKV_PART_CODES] + codec[FKV_SIDE_V].row_bytes[FKV_PART_CODES];
    uint32_t warps = decode_rows > 8 ? 8 : decode_rows > 4 || 8 * bytes <= 12 * layer->head_dim ? 12 : 16;
    if (layer->sealed || has_book_walk(layer)) warps = layer->head_dim <= SLAB ? 12 : decode_rows > 8 ? 8 : 16;
    return fkv_max_u32(1, warps * WARP / decode_threads(FKV_KERNEL_CUDA, layer));
}

/* How rows of numbers and, where attention is asked for, numbers of pages are read. */
static void put_rows(writer *w, fkv_kernel kernel) {
    put(w, fkv_kernel_file_rows);
    if (kernel == FKV_KERNEL_DECODE || is_prefill(kernel)) put(w, fkv_kernel_file_chunks);
}

/* Whether one walk in simdgroups has both forms of a sealed layer's pages. */
static bool in_simdgroups(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer) {
    return kernel == FKV_KERNEL_DECODE ? has_simdgroup_decode(device, layer) : device == FKV_KERNEL_METAL && is_prefill(kernel);
}

/* One form of a sealed layer's pages, as decode or prefill meet it. */
static void put_form(writer *w, fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer, bool open) {
    if (kernel == FKV_KERNEL_SEAL || in_simdgroups(device, kernel, layer)) return;
    bool mma = kernel == FKV_KERNEL_DECODE && has_mma(device, layer);
    if (mma && open) put_mma(w);
    if (mma && !open) put_sealed_mma(w, layer);
    if (!mma || device == FKV_KERNEL_HOST) put(w, fkv_kernel_file_plain_tile); /* there prefill stands behind decode */
    if (kernel == FKV_KERNEL_DECODE && !mma) put(w, fkv_kernel_file_decode_plain);
}

/* The text of a sealed layer's kernel behind the prelude: what is for its open pages in a namespace, then the sealed ones'. */
static void put_sealed(writer *w, fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer) {
    put_block(w, &layer->open, true);
    put(w, "namespace opened {\n");
    put_rows(w, kernel);
    put(w, "}\n");
    put(w, fkv_kernel_file_plain_rows);
    put(w, "namespace opened {\n");
    put_form(w, device, kernel, layer, true);
    put(w, "}\n");
    put_end_of_block(w);
    put_block(w, &layer->block, layer->window != 0);
    put_rows(w, kernel);
    put_form(w, device, kernel, layer, false);
    if (in_simdgroups(device, kernel, layer)) {
        put_simdgroups(w, is_prefill(kernel) ? fkv_kernel_file_prefill_simdgroup : fkv_kernel_file_decode_simdgroup);
        if (is_prefill(kernel)) put(w, fkv_kernel_file_prefill_beside);
    } else if (kernel == FKV_KERNEL_DECODE) {
        if (has_mma(device, layer))
            put(w, "#undef FKV_DECODE_SHARED\n#define FKV_DECODE_SHARED (DC_SHARED_WORDS > opened::DC_SHARED_WORDS ? "
                   "DC_SHARED_WORDS : opened::DC_SHARED_WORDS)\n");
        if (device == FKV_KERNEL_CUDA) put(w, "static_assert(FKV_DECODE_SHARED * 4 <= FKV_SHARED_BYTES);\n");
    } else if (is_prefill(kernel)) {
        bool warpgroups = device == FKV_KERNEL_CUDA && fkv_prefill_has_warpgroups(layer);
        if (warpgroups) {
            put(w, "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n");
            put_warpgroup_prefill(w, fkv_kernel_file_warpgroup_cuda, true);
            put(w, "#else\n");
        }
        put(w, fkv_kernel_file_prefill_plain);
        if (warpgroups) put(w, "#endif\n");
        put(w, fkv_kernel_file_prefill_beside);
    } else {
        put(w, fkv_kernel_file_write_rows);
        put(w, fkv_kernel_file_seal);
    }
}

static void put_kernel(writer *w, fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer) {
    put_block(w, &layer->block, layer->window != 0);
    put_rows(w, kernel);
    switch (kernel) {
    case FKV_KERNEL_WRITE:
    case FKV_KERNEL_COPY_PAGES:
    case FKV_KERNEL_PUT_NUMBERS:
        put(w, fkv_kernel_file_write_rows);
        put(w, fkv_kernel_file_write);
        break;
    case FKV_KERNEL_MERGE: put(w, fkv_kernel_file_attend_merge); break;
    case FKV_KERNEL_DECODE: put_decode(w, device, layer); break;
    default: put_prefill(w, device, layer);
    }
}

size_t fkv_kernel_header(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer, uint32_t decode_rows,
                         char *text, size_t size) {
    static const char *const preludes[] = {[FKV_KERNEL_CUDA] = fkv_kernel_file_prelude_cuda,
                                           [FKV_KERNEL_METAL] = fkv_kernel_file_prelude_metal,
                                           [FKV_KERNEL_HOST] = fkv_kernel_file_prelude_host};
    writer w = {.text = text, .size = size};
    put_layer(&w, layer);
    put_number(&w, "LAUNCH_THREADS", fkv_kernel_threads(device, kernel, layer));
    put_number(&w, "LAUNCH_BLOCKS", kernel == FKV_KERNEL_DECODE ? fkv_decode_blocks(layer, decode_rows) : 1);
    if (kernel == FKV_KERNEL_DECODE) put_number(&w, "ITEM_ROWS", decode_rows);
    if (layer->sealed) put_ring(&w, device, layer);
    if (layer->sealed) put_number(&w, "SHARED_BYTES", fkv_kernel_shared_bytes(device, kernel, layer, decode_rows));
    if (is_prefill(kernel)) {
        put_number(&w, "PREFILL_ROWS", fkv_prefill_rows(device, layer));
        put_number(&w, "PREFILL_THREADS", prefill_threads(device, layer));
    }
    if (device == FKV_KERNEL_HOST) put(&w, fkv_kernel_file_lanes_host);
    put(&w, preludes[device]);
    put(&w, fkv_kernel_file_step_words);
    if (kernel == FKV_KERNEL_DECODE) put(&w, fkv_kernel_file_pieces);
    if (layer->sealed && (kernel == FKV_KERNEL_DECODE || kernel == FKV_KERNEL_SEAL || is_prefill(kernel)))
        put_sealed(&w, device, kernel, layer);
    else
        put_kernel(&w, device, kernel, layer);
    return w.length;
}

/* ---- bodies ---- */

#define CUDA_PLACE "fkv_place place = {threadIdx.x, blockIdx.x, blockIdx.y, blockIdx.z};\n"
#define METAL_PLACE                                                                                                              \
    "fkv_place place = {thread_position_in_threadgroup.x, threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, "      \
    "threadgroup_position_in_grid.z};\n"
#define HOST_PLACE ""

#define WRITE "fkv_write(place, k, v, pool, table, ticket);\n"
#define COPY_PAGES "fkv_copy_pages(place, pairs, pool, ticket);\n"
#define PUT_NUMBERS "fkv_put_numbers(place, numbers, where, pool, ticket);\n"
#define DECODE                                                                                                                   \
    "FKV_SHARED_ARRAY(fkv_u32, shared, FKV_DECODE_SHARED);\n"                                                                    \
    "fkv_attend_decode(place, shared, q, pool, table, parts);\n"
#define SEAL                                                                                                                     \
    "FKV_SHARED_ARRAY(float, shared, FKV_SEAL_SHARED);\n"                                                                        \
    "fkv_seal(place, shared, open, pool, table, ticket);\n"
#define SEALED_DECODE                                                                                                            \
    "if (fkv_piece_at(place, table).words[FKV_PIECE_OPEN] != 0)\n"                                                               \
    "    opened::fkv_attend_decode(place, shared, q, open, table, parts);\n"                                                     \
    "else\n"                                                                                                                     \
    "    fkv_attend_decode(place, shared, q, pool, table, parts);\n"
#define MERGE                                                                                                                    \
    "FKV_SHARED_ARRAY(float, shared, FKV_MERGE_SHARED);\n"                                                                       \
    "fkv_attend_merge(place, shared, parts, table, sink_logits, out);\n"

#define CUDA_SHARED "extern __shared__ __align__(16) fkv_u32 shared[];\n"
#define OTHER_SHARED "FKV_SHARED_ARRAY(fkv_u32, shared, FKV_PREFILL_SHARED);\n"
#define OTHER_DECODE_SHARED "FKV_SHARED_ARRAY(fkv_u32, shared, FKV_DECODE_SHARED);\n"
#define PREFILL(pools) "fkv_attend_prefill(place, shared, q, " pools ", table, sink_logits, out);\n"
#define PREFILL_BESIDE(pools)                                                                                                    \
    "if (fkv_carries(place, table))\n"                                                                                           \
    "    fkv_carry_decoded(place, table, decoded, out);\n"                                                                       \
    "else\n"                                                                                                                     \
    "    fkv_attend_prefill(place, shared, q, " pools ", table, sink_logits, out);\n"

#define SOURCES(place, shared, decode, pools)                                                                                    \
    {[FKV_KERNEL_WRITE] = place WRITE,                                                                                           \
     [FKV_KERNEL_COPY_PAGES] = place COPY_PAGES,                                                                                 \
     [FKV_KERNEL_PUT_NUMBERS] = place PUT_NUMBERS,                                                                               \
     [FKV_KERNEL_DECODE] = place decode,                                                                                         \
     [FKV_KERNEL_MERGE] = place MERGE,                                                                                           \
     [FKV_KERNEL_PREFILL] = place shared PREFILL(pools),                                                                         \
     [FKV_KERNEL_PREFILL_BESIDE] = place shared PREFILL_BESIDE(pools),                                                           \
     [FKV_KERNEL_SEAL] = place SEAL}
#define BOTH_SOURCES(place, shared, decode_shared)                                                                               \
    {SOURCES(place, shared, DECODE, "pool"), SOURCES(place, shared, decode_shared SEALED_DECODE, "pool, open, ring")}

const char *fkv_kernel_source(fkv_kernel_device device, fkv_kernel kernel, bool sealed) {
    /* NOLINTBEGIN(bugprone-suspicious-missing-comma): they are meant to be one string */
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
    [FKV_KERNEL_MERGE] = {"parts", "table", "sink_logits", NULL}, [FKV_KERNEL_SEAL] = {"open",   "pool",  "table",               \
                                                                                       "before", "after", NULL}

const char *const *fkv_kernel_inputs(fkv_kernel kernel, bool sealed) {
    static const char *const names[2][FKV_N_KERNELS][11] = {
        {NAMES_OF_ALL, [FKV_KERNEL_DECODE] = {"q", "pool", "table", "after", NULL},
         [FKV_KERNEL_PREFILL] = {"q", "pool", "table", "sink_logits", "after", NULL},
         [FKV_KERNEL_PREFILL_BESIDE] = {"q", "pool", "table", "sink_logits", "decoded", "after", NULL}},
        {NAMES_OF_ALL, [FKV_KERNEL_DECODE] = {"q", "pool", "open", "table", "before", "after", NULL},
         [FKV_KERNEL_PREFILL] = {"q", "pool", "open", "ring", "table", "sink_logits", "turn", "before", "after", NULL},
         [FKV_KERNEL_PREFILL_BESIDE] = {"q", "pool", "open", "ring", "table", "sink_logits", "decoded", "turn", "before", "after",
                                        NULL}}};
    return names[sealed][kernel];
}

const char *const *fkv_kernel_outputs(fkv_kernel kernel) {
    static const char *const names[FKV_N_KERNELS][2] = {
        [FKV_KERNEL_WRITE] = {"ticket", NULL},       [FKV_KERNEL_COPY_PAGES] = {"ticket", NULL},
        [FKV_KERNEL_PUT_NUMBERS] = {"ticket", NULL}, [FKV_KERNEL_DECODE] = {"parts", NULL},
        [FKV_KERNEL_MERGE] = {"out", NULL},          [FKV_KERNEL_PREFILL] = {"out", NULL},
        [FKV_KERNEL_PREFILL_BESIDE] = {"out", NULL}, [FKV_KERNEL_SEAL] = {"ticket", NULL}};
    return names[kernel];
}
