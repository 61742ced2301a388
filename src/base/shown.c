/* See shown.h. */
#include "shown.h"

#include "base.h"

/* Bytes of the UTF-8 character at p, of which n > 0 are left, and its number; 0 where there is none. */
static size_t character(const unsigned char *p, size_t n, uint32_t *code) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    const size_t length = p[0] < 0x80 ? 1 : p[0] < 0xc0 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf8 ? 4 : 0;
    if (length == 0 || length > n) return 0;
    *code = length == 1 ? p[0] : p[0] & (0x7fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
        *code = *code << 6 | (p[i] & 0x3f);
    }
    const bool surrogate = *code >= 0xd800 && *code < 0xe000;
    return *code < least[length] || *code > 0x10ffff || surrogate ? 0 : length;
}

/* Controls of a terminal, line ends, and the marks that turn the direction of what follows. */
static bool is_control(uint32_t code) {
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x61c || code == 0x200e || code == 0x200f ||
           (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

/* How the character or broken byte at p is written: bytes taken and, in *written, bytes of text. */
static size_t show_one(const unsigned char *p, size_t n, char text[16], size_t *written) {
    static const char digits[] = "0123456789abcdef";
    uint32_t code = 0;
    const size_t length = character(p, n, &code);
    const size_t taken = length == 0 ? 1 : length;
    if (length > 0 && !is_control(code)) {
        memcpy(text, p, length);
        *written = length;
        return taken;
    }
    for (size_t i = 0; i < taken; i++) memcpy(text + 4 * i, (char[]){'\\', 'x', digits[p[i] >> 4], digits[p[i] & 15]}, 4);
    *written = 4 * taken;
    return taken;
}

void fkv_show_into(fkv_bytes bytes, char *out, size_t capacity) {
    static const char more[] = "...";
    FKV_ASSERT(capacity >= 8);
    size_t n = 0;
    size_t room_for_more = 0; /* the last place where "..." still fits behind */
    for (size_t at = 0; at < bytes.size;) {
        char text[16];
        size_t written = 0;
        if (n + sizeof more <= capacity) room_for_more = n;
        at += show_one((const unsigned char *)bytes.data + at, bytes.size - at, text, &written);
        if (n + written + 1 > capacity) {
            memcpy(out + room_for_more, more, sizeof more);
            return;
        }
        memcpy(out + n, text, written);
        n += written;
    }
    out[n] = 0;
}

fkv_shown fkv_show(fkv_bytes bytes) {
    fkv_shown shown;
    fkv_show_into(bytes, shown.text, sizeof shown.text);
    return shown;
}

fkv_shown fkv_show_text(const char *text) { return fkv_show((fkv_bytes){.data = text, .size = strlen(text)}); }

bool fkv_is_plain(fkv_bytes text) {
    for (size_t i = 0; i < text.size; i++)
        if (text.data[i] < 0x21 || text.data[i] > 0x7e) return false;
    return text.size > 0;
}
