/* Normal forms. See normal_form.h.
 *
 * Most characters of most texts stay as they are. A still character neither changes nor joins with what stands before it, so the
 * text is cut before each of them: a region is a still character and what follows it up to the next. Only regions of more than
 * one character go through decomposition, order by combining class, and composition. An inert character does not even join with
 * what follows it, and is in no region.
 */
#include "normal_form.h"

#include "utf8_text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <utf8proc.h>

/* Beyond U+02FF; for NFC. Checked against the database by a test. */
static const uint32_t STILL[][2] = {{0x400, 0x482},   {0x5d0, 0x5ea},   {0x620, 0x64a},   {0x904, 0x928},     {0xe01, 0xe30},
                                    {0x2010, 0x2027}, {0x2030, 0x205e}, {0x2190, 0x2199}, {0x2500, 0x2775},   {0x3001, 0x3029},
                                    {0x3041, 0x3096}, {0x30a1, 0x30fa}, {0x3400, 0x4dbf}, {0x4e00, 0x9fff},   {0xac00, 0xd7a3},
                                    {0xd800, 0xdfff}, {0xff01, 0xff9d}, {0xfffd, 0xfffd}, {0x1f300, 0x1faff}, {0x20000, 0x2a6dd}};

/* Characters newer than Unicode 9, the tables of Hugging Face's tokenizers: to the models they neither change nor join. */
static const uint32_t INERT[][2] = {
    {0x7fd, 0x7fd},     {0x897, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},     {0xc3c, 0xc3c},     {0xd3b, 0xd3c},
    {0xeba, 0xeba},     {0x1715, 0x1715},   {0x1abf, 0x1ace},   {0x1df6, 0x1dfa},   {0x32ff, 0x32ff},   {0xa7f2, 0xa7f4},
    {0xa82c, 0xa82c},   {0xab69, 0xab69},   {0x105c9, 0x105c9}, {0x105e4, 0x105e4}, {0x10781, 0x107ba}, {0x10d24, 0x10d27},
    {0x10d69, 0x10d6d}, {0x10eab, 0x10eac}, {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070},
    {0x1133b, 0x1133b}, {0x11383, 0x113c8}, {0x113ce, 0x113e2}, {0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11930, 0x11943},
    {0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d45}, {0x11d97, 0x11d97},
    {0x11f41, 0x11f42}, {0x16121, 0x1612f}, {0x16d63, 0x16d6a}, {0x16ff0, 0x16ff1}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136},
    {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1e5ee, 0x1e5ef}, {0x1f16c, 0x1f16c}, {0x1fbf0, 0x1fbf9}};

static bool is_among(const uint32_t (*ranges)[2], size_t n, uint32_t character) {
    for (size_t i = 0; i < n && character >= ranges[i][0]; i++)
        if (character <= ranges[i][1]) return true;
    return false;
}

static bool is_inert(uint32_t character) { return is_among(INERT, sizeof INERT / sizeof INERT[0], character); }

static bool is_still(fkv_text_step_kind form, uint32_t character) {
    if (character < 0x80) return true;
    if (form != FKV_STEP_NFC) return character >= 0xd800 && character <= 0xdfff;
    if (character < 0x300) return true;
    return is_among(STILL, sizeof STILL / sizeof STILL[0], character);
}

typedef struct region {
    int32_t *characters; /* of the scratch */
    size_t n;
    fkv_scratch scratch;
    fkv_scratch order;
} region;

/* The options of utf8proc for a form. */
static utf8proc_option_t options_of(fkv_text_step_kind form) {
    bool composed = form == FKV_STEP_NFC || form == FKV_STEP_NFKC;
    bool compatible = form == FKV_STEP_NFKC || form == FKV_STEP_NFKD;
    int options = UTF8PROC_STABLE | (composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) | (compatible ? UTF8PROC_COMPAT : 0);
    return (utf8proc_option_t)options;
}

static fkv_status decompose(region *r, fkv_text_step_kind form, const char *text, size_t n_bytes) {
    int boundary = 0;
    for (int pass = 0; pass < 2; pass++) { /* how many, then which */
        r->n = 0;
        for (size_t at = 0; at < n_bytes;) {
            uint32_t character = 0;
            at += fkv_character_read(text + at, n_bytes - at, &character);
            int32_t parts[32];
            int32_t n = (int32_t)utf8proc_decompose_char((utf8proc_int32_t)character, parts, 32, options_of(form), &boundary);
            FKV_REQUIRE(n > 0 && n <= 32, FKV_UNSUPPORTED, "utf8proc does not normalize U+%04" PRIX32, character);
            if (pass == 1) memcpy(r->characters + r->n, parts, (size_t)n * sizeof parts[0]);
            r->n += (size_t)n;
        }
        if (pass == 0) FKV_TRY(fkv_scratch_need(&r->scratch, r->n * sizeof(int32_t)));
        r->characters = r->scratch.block;
    }
    return FKV_OK;
}

static uint64_t class_of(int32_t character) { return (uint64_t)utf8proc_get_property(character)->combining_class; }

static int compare_keys(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Marks between two characters of class 0, by class and then as they stood: a key is class, place, character. */
static fkv_status order_marks(region *r, size_t start, size_t end) {
    FKV_ASSERT(end - start < UINT64_C(1) << 32);
    FKV_TRY(fkv_scratch_need(&r->order, (end - start) * sizeof(uint64_t)));
    uint64_t *keys = r->order.block;
    for (size_t i = start; i < end; i++)
        keys[i - start] = class_of(r->characters[i]) << 53 | (uint64_t)(i - start) << 21 | (uint64_t)r->characters[i];
    qsort(keys, end - start, sizeof *keys, compare_keys);
    for (size_t i = start; i < end; i++) r->characters[i] = (int32_t)(keys[i - start] & 0x1fffff);
    return FKV_OK;
}

static fkv_status order_region(region *r) {
    for (size_t at = 0; at < r->n;) {
        size_t start = at;
        bool ordered = true;
        for (uint64_t before = 0; at < r->n; at++) {
            uint64_t class = class_of(r->characters[at]);
            if (class == 0) break;
            ordered = ordered && class >= before;
            before = class;
        }
        if (!ordered) FKV_TRY(order_marks(r, start, at));
        if (at < r->n) at++;
    }
    return FKV_OK;
}

typedef struct writer {
    fkv_scratch *out;
    size_t n_out; /* written */
    size_t taken; /* bytes of the text that are written */
} writer;

static fkv_status write_as_is(writer *w, const char *text, size_t end) {
    size_t n = end - w->taken;
    if (n == 0) return FKV_OK;
    FKV_TRY(fkv_scratch_grow(w->out, w->n_out, n));
    memcpy((char *)w->out->block + w->n_out, text + w->taken, n);
    w->n_out += n;
    w->taken = end;
    return FKV_OK;
}

/* The region from `start` to `end` of the text; nothing is written while all is as it was. */
static fkv_status write_region(writer *w, region *r, fkv_text_step_kind form, const char *text, size_t start, size_t end) {
    if (start == end) return FKV_OK;
    FKV_TRY(decompose(r, form, text + start, end - start));
    FKV_ASSERT(r->characters != NULL);
    FKV_TRY(order_region(r));
    FKV_ASSERT(r->characters != NULL);
    utf8proc_ssize_t n = (utf8proc_ssize_t)r->n;
    if (form == FKV_STEP_NFC || form == FKV_STEP_NFKC) n = utf8proc_normalize_utf32(r->characters, n, options_of(form));
    FKV_REQUIRE(n >= 0, FKV_UNSUPPORTED, "utf8proc does not normalize a text (error %d)", (int)n);
    bool same = true;
    size_t at = start;
    for (utf8proc_ssize_t i = 0; i < n && same; i++) {
        char bytes[4];
        uint32_t n_bytes = fkv_character_write((uint32_t)r->characters[i], bytes);
        same = n_bytes <= end - at && memcmp(text + at, bytes, n_bytes) == 0;
        at += n_bytes;
    }
    if (same && at == end) return FKV_OK;
    FKV_TRY(write_as_is(w, text, start));
    FKV_TRY(fkv_scratch_grow(w->out, w->n_out, 4 * (size_t)n));
    for (utf8proc_ssize_t i = 0; i < n; i++)
        w->n_out += fkv_character_write((uint32_t)r->characters[i], (char *)w->out->block + w->n_out);
    w->taken = end;
    return FKV_OK;
}

static fkv_status normalize(writer *w, region *r, fkv_text_step_kind form, const char *text, size_t n_bytes) {
    size_t start = 0;
    bool is_long = false; /* more than one still character */
    for (size_t at = 0; at < n_bytes;) {
        uint32_t character = 0;
        size_t next = at + fkv_character_read(text + at, n_bytes - at, &character);
        const bool still = is_still(form, character);
        const bool inert = !still && is_inert(character);
        if ((still || inert) && is_long) FKV_TRY(write_region(w, r, form, text, start, at));
        if (still || inert) start = still ? at : next;
        is_long = !still && !inert;
        at = next;
    }
    return is_long ? write_region(w, r, form, text, start, n_bytes) : FKV_OK;
}

fkv_status fkv_normal_form(fkv_text_step_kind form, const char *text, size_t n_bytes, fkv_scratch *out, fkv_bytes *normal) {
    writer w = {.out = out};
    region r = {0};
    fkv_status status = normalize(&w, &r, form, text, n_bytes);
    if (status == FKV_OK && w.n_out + w.taken > 0) status = write_as_is(&w, text, n_bytes);
    fkv_scratch_close(&r.order);
    fkv_scratch_close(&r.scratch);
    FKV_TRY(status);
    *normal = w.n_out + w.taken > 0 ? (fkv_bytes){out->block, w.n_out} : (fkv_bytes){text, n_bytes};
    return FKV_OK;
}
