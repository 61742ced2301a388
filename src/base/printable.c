/* Escaping of untrusted text. See printable.h. */
#include "printable.h"

#include "base.h"

/* Decodes the UTF-8 character at p. n > 0 is the number of remaining bytes. Returns the length of the character, or 0 if the
 * bytes are not valid UTF-8. */
static size_t decode_utf8(const unsigned char *p, size_t n, uint32_t *code) {
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

/* Returns whether the character is a C0 or C1 control, a line or paragraph separator, or a bidirectional formatting character. */
static bool needs_escape(uint32_t code) {
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x61c || code == 0x200e || code == 0x200f ||
           (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

/* Writes the character or invalid byte at p to `text`, escaped if necessary. Returns the number of input bytes consumed; *written
 * is the number of output bytes. */
static size_t escape_one(const unsigned char *p, size_t n, char text[16], size_t *written) {
    static const char digits[] = "0123456789abcdef";
    uint32_t code = 0;
    const size_t length = decode_utf8(p, n, &code);
    const size_t taken = length == 0 ? 1 : length;
    if (length > 0 && !needs_escape(code)) {
        memcpy(text, p, length);
        *written = length;
        return taken;
    }
    for (size_t i = 0; i < taken; i++) memcpy(text + 4 * i, (char[]){'\\', 'x', digits[p[i] >> 4], digits[p[i] & 15]}, 4);
    *written = 4 * taken;
    return taken;
}

void fkv_show_into(fkv_bytes bytes, char *out, size_t capacity) {
    static const char ellipsis[] = "...";
    FKV_ASSERT(capacity >= 8);
    size_t n = 0;
    size_t ellipsis_at = 0; /* last position at which "..." still fits */
    for (size_t at = 0; at < bytes.size;) {
        char text[16];
        size_t written = 0;
        if (n + sizeof ellipsis <= capacity) ellipsis_at = n;
        at += escape_one((const unsigned char *)bytes.data + at, bytes.size - at, text, &written);
        if (n + written + 1 > capacity) {
            memcpy(out + ellipsis_at, ellipsis, sizeof ellipsis);
            return;
        }
        memcpy(out + n, text, written);
        n += written;
    }
    out[n] = 0;
}

fkv_printable fkv_show(fkv_bytes bytes) {
    fkv_printable shown;
    fkv_show_into(bytes, shown.text, sizeof shown.text);
    return shown;
}

fkv_printable fkv_show_text(const char *text) { return fkv_show((fkv_bytes){.data = text, .size = strlen(text)}); }

bool fkv_is_plain(fkv_bytes text) {
    for (size_t i = 0; i < text.size; i++)
        if (text.data[i] < 0x21 || text.data[i] > 0x7e) return false;
    return text.size > 0;
}
