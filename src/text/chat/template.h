/* Chat templates in the subset of Jinja that models use. Templates are untrusted: parsing and rendering are limited in work,
 * depth and memory, have no side effects, and do not read the clock.
 *
 * The result marks every byte as provided by the caller (messages, tools, options) or written by the template. Only text written
 * by the template may become a special token.
 */
#ifndef FKV_TEMPLATE_H
#define FKV_TEMPLATE_H

#include "../../base/base.h"

#include <jansson.h>

typedef struct fkv_template fkv_template;

/* Parses a template and copies its text. Returns FKV_UNSUPPORTED for unsupported syntax; the message names the line. */
fkv_status fkv_template_open(const char *text, size_t n_bytes, fkv_template **chat);
void fkv_template_close(fkv_template *chat); /* accepts NULL */

/* A template variable, such as bos_token, whose value is the text of a special token. */
typedef struct fkv_template_word {
    const char *name;
    const char *text;
} fkv_template_word;

typedef struct fkv_template_input {
    const json_t *variables; /* JSON object: messages, tools, add_generation_prompt, enable_thinking, ... */
    const fkv_template_word *words;
    size_t n_words;
    uint64_t max_work;  /* work limit, in units of about 1 ns; 0 selects the default: about 1 s, or more if the input is large */
    const int64_t *now; /* local time in seconds since 1970, for templates that write a date; if NULL, such templates fail */
} fkv_template_input;

typedef struct fkv_rendered {
    char *text;     /* [n_bytes], 0-terminated */
    uint8_t *given; /* [n_bytes] 1 for each byte that the caller provided, 0 for each byte that the template wrote */
    size_t n_bytes;
} fkv_rendered;

/* Renders a conversation. Returns FKV_BAD_ARGUMENT if a limit is exceeded or if the template rejects the conversation. In the
 * second case, the error message comes from the template. */
fkv_status fkv_template_render(const fkv_template *chat, const fkv_template_input *input, fkv_rendered *out);
void fkv_rendered_close(fkv_rendered *rendered);

#endif
