/* See json_scan.h. The buffer for unescaped strings cannot overflow, because an unescaped string is not longer than its source
 * and each string is read only once. */
#include "json_scan.h"

static fkv_status fail_json_scan(const fkv_json_scan *scan, const char *what) {
    return fkv_fail(FKV_FILE_FORMAT, "%s: not valid JSON: %s at byte %zu", scan->path, what, (size_t)(scan->at - scan->start));
}

char fkv_json_scan_peek(fkv_json_scan *scan) {
    while (scan->at < scan->end && (*scan->at == ' ' || *scan->at == '\n' || *scan->at == '\r' || *scan->at == '\t')) scan->at++;
    return scan->at < scan->end ? *scan->at : 0;
}

fkv_status fkv_json_scan_next(fkv_json_scan *scan, char open, bool is_first, bool *more) {
    char close = open == '{' ? '}' : ']';
    char c = fkv_json_scan_peek(scan);
    if (is_first) {
        if (c != open) return fail_json_scan(scan, open == '{' ? "expected an object" : "expected an array");
        scan->at++;
        *more = fkv_json_scan_peek(scan) != close;
        if (!*more) scan->at++;
        return FKV_OK;
    }
    if (c != close && c != ',') return fail_json_scan(scan, "expected a comma");
    scan->at++;
    *more = c == ',';
    return FKV_OK;
}

/* ---- strings ------------------------------------------------------------------------------------------------- */

static int json_hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Reads the four hexadecimal digits of a \u escape. */
static fkv_status read_unit(fkv_json_scan *scan, uint32_t *unit) {
    *unit = 0;
    if (scan->end - scan->at < 4) return fail_json_scan(scan, "truncated escape sequence");
    for (int i = 0; i < 4; i++) {
        int digit = json_hex_digit(scan->at[i]);
        if (digit < 0) return fail_json_scan(scan, "\\u without four hexadecimal digits");
        *unit = *unit << 4 | (uint32_t)digit;
    }
    scan->at += 4;
    return FKV_OK;
}

static fkv_status read_escaped_character(fkv_json_scan *scan, uint32_t *character) {
    uint32_t low = 0;
    FKV_TRY(read_unit(scan, character));
    if (*character < 0xd800 || *character > 0xdfff) return FKV_OK;
    if (*character > 0xdbff || scan->end - scan->at < 6 || scan->at[0] != '\\' || scan->at[1] != 'u')
        return fail_json_scan(scan, "unpaired surrogate");
    scan->at += 2;
    FKV_TRY(read_unit(scan, &low));
    if (low < 0xdc00 || low > 0xdfff) return fail_json_scan(scan, "unpaired surrogate");
    *character = 0x10000 + ((*character - 0xd800) << 10) + (low - 0xdc00);
    return FKV_OK;
}

static size_t write_utf8(uint32_t character, char *out) {
    if (character < 0x80) {
        out[0] = (char)character;
        return 1;
    }
    size_t n = character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; character >>= 6) out[i] = (char)(0x80 | (character & 0x3f));
    out[0] = (char)((n == 2 ? 0xc0 : n == 3 ? 0xe0 : 0xf0) | character);
    return n;
}

/* Reads the escape sequence after a backslash. out: [4]. */
static fkv_status read_json_escape(fkv_json_scan *scan, char *out, size_t *n) {
    static const char from[] = "\"\\/bfnrt";
    static const char to[] = "\"\\/\b\f\n\r\t";
    if (scan->at == scan->end) return fail_json_scan(scan, "truncated escape sequence");
    char c = *scan->at++;
    uint32_t character = 0;
    *n = 1;
    if (c == 'u') {
        FKV_TRY(read_escaped_character(scan, &character));
        *n = write_utf8(character, out);
        return FKV_OK;
    }
    const char *known = c != 0 ? strchr(from, c) : NULL;
    if (known == NULL) return fail_json_scan(scan, "unknown escape sequence");
    *out = to[known - from];
    return FKV_OK;
}

fkv_status fkv_json_scan_string(fkv_json_scan *scan, fkv_bytes *string) {
    if (fkv_json_scan_peek(scan) != '"') return fail_json_scan(scan, "expected a string");
    const char *first = ++scan->at;
    char *copy = NULL; /* start of the unescaped copy; NULL until the first escape sequence is read */
    size_t n = 0;
    for (; scan->at < scan->end && *scan->at != '"';) {
        if ((unsigned char)*scan->at < 0x20) return fail_json_scan(scan, "control character in a string");
        if (*scan->at != '\\') {
            if (copy != NULL) copy[n++] = *scan->at;
            scan->at++;
            continue;
        }
        char bytes[4];
        size_t n_bytes = 0;
        if (copy == NULL && scan->copies != NULL) {
            copy = scan->copies + scan->n_copies;
            n = (size_t)(scan->at - first);
            memcpy(copy, first, n);
        }
        scan->at++;
        FKV_TRY(read_json_escape(scan, bytes, &n_bytes));
        if (copy != NULL) memcpy(copy + n, bytes, n_bytes);
        n += copy != NULL ? n_bytes : 0;
    }
    if (scan->at == scan->end) return fail_json_scan(scan, "unterminated string");
    *string = copy != NULL ? (fkv_bytes){copy, n} : (fkv_bytes){first, (size_t)(scan->at - first)};
    if (copy != NULL) scan->n_copies += n;
    scan->at++;
    return FKV_OK;
}

fkv_status fkv_json_scan_key(fkv_json_scan *scan, fkv_bytes *key) {
    FKV_TRY(fkv_json_scan_string(scan, key));
    if (fkv_json_scan_peek(scan) != ':') return fail_json_scan(scan, "expected a colon");
    scan->at++;
    return FKV_OK;
}

/* ---- other values -------------------------------------------------------------------------------------------- */

fkv_status fkv_json_scan_number(fkv_json_scan *scan, uint64_t *number) {
    char c = fkv_json_scan_peek(scan);
    int n_digits = 0;
    *number = 0;
    if (c < '0' || c > '9') return fail_json_scan(scan, "expected a non-negative integer");
    for (; scan->at < scan->end && *scan->at >= '0' && *scan->at <= '9'; scan->at++, n_digits++) {
        if (n_digits == 18) return fail_json_scan(scan, "integer too large");
        *number = *number * 10 + (uint64_t)(*scan->at - '0');
    }
    if (scan->at < scan->end && (*scan->at == '.' || *scan->at == 'e' || *scan->at == 'E'))
        return fail_json_scan(scan, "expected an integer");
    return FKV_OK;
}

static fkv_status skip_json_string(fkv_json_scan *scan) {
    for (scan->at++; scan->at < scan->end && *scan->at != '"'; scan->at++)
        if (*scan->at == '\\') scan->at++;
    if (scan->at >= scan->end) {
        scan->at = scan->end;
        return fail_json_scan(scan, "unterminated string");
    }
    scan->at++;
    return FKV_OK;
}

static bool ends_word(char c) { return c == ',' || c == '}' || c == ']' || c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

fkv_status fkv_json_scan_skip(fkv_json_scan *scan, fkv_bytes *span) {
    size_t depth = 0;
    char c = fkv_json_scan_peek(scan);
    const char *first = scan->at;
    if (c == 0 || ends_word(c)) return fail_json_scan(scan, "expected a value");
    do {
        c = fkv_json_scan_peek(scan);
        if (c == 0) return fail_json_scan(scan, "truncated value");
        if (c == '"') {
            FKV_TRY(skip_json_string(scan));
        } else if (c == '{' || c == '[') {
            depth++;
            scan->at++;
        } else if (c == '}' || c == ']') {
            depth--;
            scan->at++;
        } else if (c == ',' || c == ':') {
            scan->at++;
        } else {
            while (scan->at < scan->end && !ends_word(*scan->at)) scan->at++;
        }
    } while (depth > 0);
    *span = (fkv_bytes){first, (size_t)(scan->at - first)};
    return FKV_OK;
}

fkv_status fkv_json_scan_members(fkv_json_scan *scan, const char *const *names, size_t n_names, fkv_bytes *spans) {
    bool more = true;
    for (size_t i = 0; i < n_names; i++) spans[i] = (fkv_bytes){0};
    for (bool is_first = true;; is_first = false) {
        fkv_bytes key = {0};
        fkv_bytes span = {0};
        FKV_TRY(fkv_json_scan_next(scan, '{', is_first, &more));
        if (!more) return FKV_OK;
        FKV_TRY(fkv_json_scan_key(scan, &key));
        FKV_TRY(fkv_json_scan_skip(scan, &span));
        for (size_t i = 0; i < n_names; i++) {
            if (strlen(names[i]) != key.size || memcmp(names[i], key.data, key.size) != 0) continue;
            FKV_REQUIRE(spans[i].data == NULL, FKV_FILE_FORMAT, "%s: duplicate member %s", scan->path, names[i]);
            spans[i] = span;
        }
    }
}

fkv_json_scan fkv_json_scan_within(const fkv_json_scan *scan, fkv_bytes span) {
    fkv_json_scan within = *scan;
    within.at = span.data;
    within.end = span.data + span.size;
    return within;
}
