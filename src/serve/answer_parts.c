/* Helpers for the responses of all supported APIs: collect the parts of an answer, send server-sent events and create tool-call
 * IDs. See exchange.h. */
#include "exchange.h"

#include <stdlib.h>
#include <string.h>

void reply_send_event(exchange *x, const char *name, json_t *data) {
    char *text = data != NULL ? json_dumps(data, JSON_COMPACT) : NULL;
    json_decref(data);
    if (text != NULL && x->req != NULL) {
        struct evbuffer *out = evbuffer_new();
        if (name != NULL) (void)evbuffer_add_printf(out, "event: %s\n", name);
        (void)evbuffer_add_printf(out, "data: %s\n\n", text);
        evhttp_send_reply_chunk(x->req, out);
        evbuffer_free(out);
    }
    free(text);
}

json_t *reply_call_id(const exchange *x, uint32_t answer, uint32_t call) {
    return json_sprintf("%s_%s_%u_%u", x->api.kind == API_MESSAGES ? "toolu" : "call", strchr(x->id, '-') + 1, answer, call);
}

static answer_part *part_for(answer_out *a, part_kind kind) {
    answer_part *last = a->n_parts > 0 ? &a->parts[a->n_parts - 1] : NULL;
    bool goes_on = last != NULL && (kind == PART_ARGUMENTS ? last->kind == PART_CALL : last->kind == kind && kind != PART_CALL);
    if (goes_on || a->n_parts == MAX_PARTS) return goes_on ? last : NULL;
    last = &a->parts[a->n_parts++];
    *last = (answer_part){.kind = kind, .bytes = evbuffer_new()};
    return last;
}

answer_part *reply_keep(answer_out *a, part_kind kind, const char *bytes, size_t n) {
    answer_part *part = part_for(a, kind);
    if (part == NULL || part->bytes == NULL) return NULL;
    if (kind == PART_CALL)
        part->name = strndup(bytes, n);
    else
        (void)evbuffer_add(part->bytes, bytes, n);
    return part;
}

json_t *reply_part_text(const answer_part *part) {
    size_t n = evbuffer_get_length(part->bytes);
    return reply_utf8_text(n > 0 ? (const char *)evbuffer_pullup(part->bytes, -1) : "", n);
}

json_t *reply_join_parts(const answer_out *a, part_kind kind) {
    json_t *text = NULL;
    for (uint32_t i = 0; i < a->n_parts; i++) {
        if (a->parts[i].kind != kind) continue;
        json_t *more = reply_part_text(&a->parts[i]);
        json_t *both = text != NULL ? json_sprintf("%s%s", json_string_value(text), json_string_value(more)) : json_incref(more);
        json_decref(text);
        json_decref(more);
        text = both;
    }
    return text;
}

json_t *reply_call_input(const answer_part *part) {
    json_t *text = reply_part_text(part);
    json_t *object = json_loads(json_string_value(text), 0, NULL);
    json_decref(text);
    if (json_is_object(object)) return object;
    json_decref(object);
    return json_object();
}
