/* See utf8.h. */
#include "utf8.h"

#include <string.h>

const char UTF8_REPLACEMENT[] = "\xef\xbf\xbd";

int utf8_length(const char *bytes, size_t n) {
    const unsigned char *p = (const unsigned char *)bytes;
    int length = p[0] < 0x80                   ? 1
                 : p[0] >= 0xc2 && p[0] < 0xe0 ? 2
                 : (p[0] & 0xf0) == 0xe0       ? 3
                 : p[0] >= 0xf0 && p[0] < 0xf5 ? 4
                                               : 0;
    for (int i = 1; i < length; i++) {
        if ((size_t)i == n) return -1;
        unsigned char low = 0x80;
        unsigned char high = 0xbf;
        if (i == 1 && p[0] == 0xe0) low = 0xa0;  /* overlong */
        if (i == 1 && p[0] == 0xed) high = 0x9f; /* surrogates */
        if (i == 1 && p[0] == 0xf0) low = 0x90;
        if (i == 1 && p[0] == 0xf4) high = 0x8f; /* above U+10FFFF */
        if (p[i] < low || p[i] > high) return 0;
    }
    return length;
}

bool utf8_is_control(const char *bytes, int length) {
    unsigned char c = (unsigned char)bytes[0];
    return c < 0x20 || c == 0x7f || (c == 0xc2 && length == 2 && (unsigned char)bytes[1] < 0xa0);
}

uint32_t utf8_code_point(const char *bytes, int length) {
    const unsigned char *p = (const unsigned char *)bytes;
    if (length <= 1) return p[0];
    uint32_t code = p[0] & (0xffu >> (length + 1));
    for (int i = 1; i < length; i++) code = code << 6 | (p[i] & 0x3fu);
    return code;
}

bool utf8_is_unsafe(const char *bytes, int length) {
    uint32_t code = utf8_code_point(bytes, length);
    bool is_bidi = (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
    return utf8_is_control(bytes, length) || is_bidi || code == 0x2028 || code == 0x2029;
}

void utf8_print_escaped(FILE *file, const char *text) {
    for (size_t left = strlen(text); left > 0;) {
        int length = utf8_length(text, left);
        size_t n = length > 0 ? (size_t)length : 1;
        if (length > 0 && !utf8_is_unsafe(text, length))
            (void)fwrite(text, 1, n, file);
        else
            for (size_t i = 0; i < n; i++) (void)fprintf(file, "\\x%02x", (unsigned char)text[i]);
        text += n;
        left -= n;
    }
}
