/* A chat template: the model's own text around messages, in Jinja as chat templates use it. Files are not trusted: parsing
 * and rendering are bounded in steps, depth and memory, call nothing outside, and read no clock.
 *
 * What is rendered tells for each byte whether the caller gave it (messages, tools, options) or the template wrote it. Only what
 * the template wrote may become a special token.
 */
#ifndef FKV_TEMPLATE_H
#define FKV_TEMPLATE_H

#include "../../base/base.h"

#include <jansson.h>

typedef struct fkv_template fkv_template;

/* FKV_UNSUPPORTED, with the line, for a text that is not understood. The text is copied. */
fkv_status fkv_template_open(const char *text, size_t n_bytes, fkv_template **chat);
void fkv_template_close(fkv_template *chat); /* NULL is allowed */

/* Strings of the model that a template may write as special tokens: "bos_token" and the like. */
typedef struct fkv_template_word {
    const char *name;
    const char *text;
} fkv_template_word;

typedef struct fkv_template_input {
    const json_t *variables; /* an object: messages, tools, add_generation_prompt, enable_thinking, ... */
    const fkv_template_word *words;
    size_t n_words;
    const int64_t *now; /* seconds since 1970 in the caller's own zone, for templates that write a date; NULL: they are refused */
} fkv_template_input;

typedef struct fkv_rendered {
    char *text;     /* n_bytes and a 0 */
    uint8_t *given; /* [n_bytes] 1 where the caller's */
    size_t n_bytes;
} fkv_rendered;

/* FKV_BAD_ARGUMENT, with the template's own words, for a conversation that it refuses or cannot render. */
fkv_status fkv_template_render(const fkv_template *chat, const fkv_template_input *input, fkv_rendered *out);
void fkv_rendered_close(fkv_rendered *rendered);

#endif
