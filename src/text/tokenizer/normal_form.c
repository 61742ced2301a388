/* See normal_form.h.
 *
 * Normalization leaves most characters of a text unchanged. A stable character neither changes nor composes with the preceding
 * character. The text is therefore divided into regions. A region consists of a stable character and all characters up to the
 * next stable character. Only regions of more than one character are decomposed, reordered by combining class and composed. An
 * inert character neither changes nor composes with the preceding or the following character, and belongs to no region.
 */
#include "normal_form.h"

#include "utf8_text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <utf8proc.h>

/* Ranges above U+02FF in which all characters are stable under NFC. A test checks them against the Unicode database. */
static const uint32_t STABLE[][2] = {{0x400, 0x482},   {0x5d0, 0x5ea},   {0x620, 0x64a},     {0x904, 0x928},
                                     {0xe01, 0xe30},   {0x2010, 0x2027}, {0x2030, 0x205e},   {0x2190, 0x2199},
                                     {0x2500, 0x2775}, {0x3001, 0x3029}, {0x3041, 0x3096},   {0x30a1, 0x30fa},
                                     {0x3400, 0x4dbf}, {0x4e00, 0x9fff}, {0xac00, 0xd7a3},   {0xd800, 0xdfff},
                                     {0xff01, 0xff9d}, {0xfffd, 0xfffd}, {0x1f300, 0x1faff}, {0x20000, 0x2a6dd}};

/* Characters added after Unicode 9. Hugging Face's tokenizers use Unicode 9, so they do not normalize these characters. */
static const uint32_t INERT[][2] = {
    {0x7fd, 0x7fd},     {0x897, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},     {0xc3c, 0xc3c},     {0xd3b, 0xd3c},
    {0xeba, 0xeba},     {0x1715, 0x1715},   {0x1abf, 0x1ace},   {0x1df6, 0x1dfa},   {0x32ff, 0x32ff},   {0xa7f2, 0xa7f4},
    {0xa82c, 0xa82c},   {0xab69, 0xab69},   {0x105c9, 0x105c9}, {0x105e4, 0x105e4}, {0x10781, 0x107ba}, {0x10d24, 0x10d27},
    {0x10d69, 0x10d6d}, {0x10eab, 0x10eac}, {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070},
    {0x1133b, 0x1133b}, {0x11383, 0x113c8}, {0x113ce, 0x113e2}, {0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11930, 0x11943},
    {0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d45}, {0x11d97, 0x11d97},
    {0x11f41, 0x11f42}, {0x16121, 0x1612f}, {0x16d63, 0x16d6a}, {0x16ff0, 0x16ff1}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136},
    {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1e5ee, 0x1e5ef}, {0x1f16c, 0x1f16c}, {0x1fbf0, 0x1fbf9}};

static bool is_in_ranges(const uint32_t (*ranges)[2], size_t n, uint32_t character) {
    for (size_t i = 0; i < n && character >= ranges[i][0]; i++)
        if (character <= ranges[i][1]) return true;
    return false;
}

static bool is_inert(uint32_t character) { return is_in_ranges(INERT, sizeof INERT / sizeof INERT[0], character); }

static bool is_stable(fkv_text_step_kind form, uint32_t character) {
    if (character < 0x80) return true;
    if (form != FKV_STEP_NFC) return character >= 0xd800 && character <= 0xdfff;
    if (character < 0x300) return true;
    return is_in_ranges(STABLE, sizeof STABLE / sizeof STABLE[0], character);
}

typedef struct form_region {
    int32_t *characters; /* in scratch */
    size_t n;
    fkv_scratch scratch;
    fkv_scratch order;
} form_region;

/* Returns the utf8proc options for a normalization form. */
static utf8proc_option_t utf8proc_options(fkv_text_step_kind form) {
    bool composed = form == FKV_STEP_NFC || form == FKV_STEP_NFKC;
    bool compatible = form == FKV_STEP_NFKC || form == FKV_STEP_NFKD;
    int options = UTF8PROC_STABLE | (composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) | (compatible ? UTF8PROC_COMPAT : 0);
    return (utf8proc_option_t)options;
}

static fkv_status decompose(form_region *r, fkv_text_step_kind form, const char *text, size_t n_bytes) {
    int boundary = 0;
    for (int pass = 0; pass < 2; pass++) { /* count, then fill */
        r->n = 0;
        for (size_t at = 0; at < n_bytes;) {
            uint32_t character = 0;
            at += fkv_character_read(text + at, n_bytes - at, &character);
            int32_t parts[32];
            int32_t n =
                (int32_t)utf8proc_decompose_char((utf8proc_int32_t)character, parts, 32, utf8proc_options(form), &boundary);
            FKV_REQUIRE(n > 0 && n <= 32, FKV_UNSUPPORTED, "utf8proc cannot normalize U+%04" PRIX32, character);
            if (pass == 1) memcpy(r->characters + r->n, parts, (size_t)n * sizeof parts[0]);
            r->n += (size_t)n;
        }
        if (pass == 0) FKV_TRY(fkv_scratch_need(&r->scratch, r->n * sizeof(int32_t)));
        r->characters = r->scratch.block;
    }
    return FKV_OK;
}

static uint64_t combining_class_of(int32_t character) { return (uint64_t)utf8proc_get_property(character)->combining_class; }

static int compare_mark_keys(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts combining marks by combining class, without changing the order of marks of the same class. A sort key consists of class,
 * position and character. */
static fkv_status order_marks(form_region *r, size_t start, size_t end) {
    FKV_ASSERT(end - start < UINT64_C(1) << 32);
    FKV_TRY(fkv_scratch_need(&r->order, (end - start) * sizeof(uint64_t)));
    uint64_t *keys = r->order.block;
    for (size_t i = start; i < end; i++)
        keys[i - start] = combining_class_of(r->characters[i]) << 53 | (uint64_t)(i - start) << 21 | (uint64_t)r->characters[i];
    qsort(keys, end - start, sizeof *keys, compare_mark_keys);
    for (size_t i = start; i < end; i++) r->characters[i] = (int32_t)(keys[i - start] & 0x1fffff);
    return FKV_OK;
}

static fkv_status order_region(form_region *r) {
    for (size_t at = 0; at < r->n;) {
        size_t start = at;
        bool ordered = true;
        for (uint64_t before = 0; at < r->n; at++) {
            uint64_t class = combining_class_of(r->characters[at]);
            if (class == 0) break;
            ordered = ordered && class >= before;
            before = class;
        }
        if (!ordered) FKV_TRY(order_marks(r, start, at));
        if (at < r->n) at++;
    }
    return FKV_OK;
}

typedef struct form_writer {
    fkv_scratch *out;
    size_t n_out; /* bytes written */
    size_t taken; /* number of input bytes processed so far */
} form_writer;

static fkv_status copy_unchanged(form_writer *w, const char *text, size_t end) {
    size_t n = end - w->taken;
    if (n == 0) return FKV_OK;
    FKV_TRY(fkv_scratch_grow(w->out, w->n_out, n));
    memcpy((char *)w->out->block + w->n_out, text + w->taken, n);
    w->n_out += n;
    w->taken = end;
    return FKV_OK;
}

/* Normalizes the region [start, end) of the text. If the region is already normalized, nothing is written, and a later
 * copy_unchanged() call copies the region. */
static fkv_status write_region(form_writer *w, form_region *r, fkv_text_step_kind form, const char *text, size_t start,
                               size_t end) {
    if (start == end) return FKV_OK;
    FKV_TRY(decompose(r, form, text + start, end - start));
    FKV_ASSERT(r->characters != NULL);
    FKV_TRY(order_region(r));
    FKV_ASSERT(r->characters != NULL);
    utf8proc_ssize_t n = (utf8proc_ssize_t)r->n;
    if (form == FKV_STEP_NFC || form == FKV_STEP_NFKC) n = utf8proc_normalize_utf32(r->characters, n, utf8proc_options(form));
    FKV_REQUIRE(n >= 0, FKV_UNSUPPORTED, "utf8proc failed to normalize the text (error %d)", (int)n);
    bool same = true;
    size_t at = start;
    for (utf8proc_ssize_t i = 0; i < n && same; i++) {
        char bytes[4];
        uint32_t n_bytes = fkv_character_write((uint32_t)r->characters[i], bytes);
        same = n_bytes <= end - at && memcmp(text + at, bytes, n_bytes) == 0;
        at += n_bytes;
    }
    if (same && at == end) return FKV_OK;
    FKV_TRY(copy_unchanged(w, text, start));
    FKV_TRY(fkv_scratch_grow(w->out, w->n_out, 4 * (size_t)n));
    for (utf8proc_ssize_t i = 0; i < n; i++)
        w->n_out += fkv_character_write((uint32_t)r->characters[i], (char *)w->out->block + w->n_out);
    w->taken = end;
    return FKV_OK;
}

static fkv_status normalize_regions(form_writer *w, form_region *r, fkv_text_step_kind form, const char *text, size_t n_bytes) {
    size_t start = 0;
    bool is_long = false; /* true if the current region has more than one character */
    for (size_t at = 0; at < n_bytes;) {
        uint32_t character = 0;
        size_t next = at + fkv_character_read(text + at, n_bytes - at, &character);
        const bool stable = is_stable(form, character);
        const bool inert = !stable && is_inert(character);
        if ((stable || inert) && is_long) FKV_TRY(write_region(w, r, form, text, start, at));
        if (stable || inert) start = stable ? at : next;
        is_long = !stable && !inert;
        at = next;
    }
    return is_long ? write_region(w, r, form, text, start, n_bytes) : FKV_OK;
}

fkv_status fkv_normal_form(fkv_text_step_kind form, const char *text, size_t n_bytes, fkv_scratch *out, fkv_bytes *normal) {
    form_writer w = {.out = out};
    form_region r = {0};
    fkv_status status = normalize_regions(&w, &r, form, text, n_bytes);
    if (status == FKV_OK && w.n_out + w.taken > 0) status = copy_unchanged(&w, text, n_bytes);
    fkv_scratch_close(&r.order);
    fkv_scratch_close(&r.scratch);
    FKV_TRY(status);
    *normal = w.n_out + w.taken > 0 ? (fkv_bytes){out->block, w.n_out} : (fkv_bytes){text, n_bytes};
    return FKV_OK;
}
