/* See partial_prefix.h. */
#include "partial_prefix.h"

#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *partial_path(const char *file) {
    const size_t n = strlen(file) + sizeof ".partial";
    char *path = kit_alloc(n);
    (void)snprintf(path, n, "%s.partial", file);
    return path;
}

/* Loads up to `most` tokens from the file at `path` into the session. Returns NULL on success, otherwise the reason why no
 * sequence was opened. */
static const char *load_partial(const char *path, model_session *s, const token_list *prompt, size_t most) {
    const fkv_seq_config config = {.max_tokens = s->max_tokens, .prompt = prompt->tokens, .n_prompt = (uint32_t)prompt->n};
    fkv_status status = fkv_seq_load(s->cache, &config, path, &s->seq);
    if (status != FKV_OK) return fkv_message();
    status = fkv_seq_length(s->cache, s->seq, &s->length);
    if (status == FKV_OK && s->length > most && session_truncate(s, (uint32_t)most) != EXIT_GOOD) status = FKV_GONE;
    if (status == FKV_OK && s->length > 0) return NULL;
    (void)fkv_seq_close(s->cache, s->seq);
    s->length = 0;
    return "it cannot be truncated to the prefix of this command";
}

uint32_t partial_prefix_load(const char *file, model_session *s, const token_list *prompt, size_t n_prefix) {
    char *path = partial_path(file);
    if (access(path, F_OK) == 0) {
        const size_t most =
            n_prefix < prompt->n ? n_prefix : prompt->n - 1; /* at least the last token must be computed, to obtain its logits */
        const char *reason = load_partial(path, s, prompt, most);
        if (reason == NULL)
            (void)fprintf(stderr, "[continuing after %u tokens saved in %s]\n", s->length, path);
        else
            (void)fprintf(stderr, "[%s is ignored: %s]\n", path, reason);
    }
    free(path);
    return s->length;
}

void partial_prefix_save(const char *file, const model_session *s, const token_list *prompt, size_t n_prefix) {
    char *path = partial_path(file);
    const fkv_status status = fkv_seq_save(s->cache, s->seq, prompt->tokens, s->length, path);
    if (status == FKV_OK)
        (void)fprintf(stderr, "[%u of %zu tokens saved in %s; the same command continues after them]\n", s->length, n_prefix,
                      path);
    else
        (void)cli_fail_status(status);
    free(path);
}

void partial_prefix_remove(const char *file) {
    char *path = partial_path(file);
    (void)unlink(path);
    free(path);
}
