/* See hub_name.h. */
#include "hub_name.h"

#include "../kit/utf8.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { MAX_NAME_BYTES = 1024, MAX_COMPONENTS = 16, MAX_COMPONENT_BYTES = 255 };

static bool is_name_byte(char c) { return isalnum((unsigned char)c) != 0 || c == '-' || c == '_' || c == '.'; }

static bool is_edge_byte(char c) { return c == '-' || c == '.'; }

/* Returns whether the n bytes are a valid organization or model name. */
static bool is_word(const char *word, size_t n) {
    if (n == 0 || n >= HUB_WORD || is_edge_byte(word[0]) || is_edge_byte(word[n - 1])) return false;
    for (size_t i = 0; i < n; i++) {
        if (!is_name_byte(word[i])) return false;
        if (i > 0 && is_edge_byte(word[i]) && word[i] == word[i - 1]) return false;
    }
    return true;
}

bool hub_name_parse(const char *word, hub_name *name) {
    const char *slash = strchr(word, '/');
    if (slash == NULL) return false;
    size_t n_org = (size_t)(slash - word);
    size_t n_name = strcspn(slash + 1, ":");
    const char *colon = slash + 1 + n_name;
    const char *quant = *colon == ':' ? colon + 1 : "";
    if (!is_word(word, n_org) || !is_word(slash + 1, n_name)) return false;
    if (*colon == ':' && (quant[0] == 0 || strlen(quant) >= HUB_QUANT)) return false;
    for (const char *p = quant; *p != 0; p++)
        if (!is_name_byte(*p)) return false;
    (void)snprintf(name->repo, sizeof name->repo, "%.*s", (int)(n_org + 1 + n_name), word);
    (void)snprintf(name->quant, sizeof name->quant, "%s", quant);
    return true;
}

/* Returns whether the n bytes are valid UTF-8 without control or bidirectional characters. */
static bool is_printable(const char *text, size_t n) {
    for (size_t i = 0; i < n;) {
        int length = utf8_length(text + i, n - i);
        if (length <= 0 || utf8_is_unsafe(text + i, length)) return false;
        i += (size_t)length;
    }
    return true;
}

bool hub_file_name_is_safe(const char *name) {
    size_t components = 0;
    if (strlen(name) > MAX_NAME_BYTES) return false;
    for (const char *p = name;; p++) {
        size_t n = strcspn(p, "/");
        if (n == 0 || n > MAX_COMPONENT_BYTES || ++components > MAX_COMPONENTS) return false;
        if ((n == 1 && p[0] == '.') || (n == 2 && p[0] == '.' && p[1] == '.')) return false;
        if (memchr(p, '\\', n) != NULL || !is_printable(p, n)) return false;
        p += n;
        if (*p == 0) return true;
    }
}

void hub_folder_name(const char *repo, char folder[HUB_REPO + 16]) {
    const char *slash = strchr(repo, '/');
    (void)snprintf(folder, HUB_REPO + 16, "models--%.*s--%s", (int)(slash - repo), repo, slash + 1);
}

bool hub_revision_is_valid(const char *text) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    if (text[0] == 0 || strlen(text) >= HUB_REVISION) return false;
    for (const char *at = text;; at++) {
        const size_t n = strspn(at, letters);
        if (n == 0 || at[0] == '.') return false;
        at += n;
        if (*at != '/') return *at == 0;
    }
}

bool hub_revision_is_commit(const char *revision) {
    return strlen(revision) == 40 && revision[strspn(revision, "0123456789abcdef")] == 0;
}
