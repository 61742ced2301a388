/* Formats the events of a reply as one line: T(text), R(reasoning), C(name of a tool call), A(arguments), and E for the end of a
 * call, or E! if the call is incomplete. Adjacent events of one kind are joined, so that results can be compared for different
 * divisions of a reply into chunks. Shared by test_reply and fuzz_stream.
 */
#ifndef FKV_REPLY_EVENTS_H
#define FKV_REPLY_EVENTS_H

#include "../src/text/reply/reply_parts.h"

#include <stdlib.h>
#include <string.h>

typedef struct reply_events {
    char *bytes;
    size_t n;
    size_t room;
    int last; /* kind of the last event, or -1 if there is none */
    bool in_call;
} reply_events;

static inline void events_add(reply_events *e, const char *bytes, size_t n) {
    if (e->n + n + 1 > e->room) {
        e->room = 2 * (e->n + n + 1);
        char *more = realloc(e->bytes, e->room);
        if (more == NULL) abort();
        e->bytes = more;
    }
    if (n > 0) memcpy(e->bytes + e->n, bytes, n);
    e->n += n;
    e->bytes[e->n] = 0;
}

static inline void events_take(void *user, const fkv_reply_event *event) {
    static const char *const opens[] = {"T(", "R(", "C(", "A(", "E"};
    reply_events *e = user;
    bool is_call = event->kind == FKV_REPLY_CALL;
    bool of_call = event->kind == FKV_REPLY_ARGUMENTS || event->kind == FKV_REPLY_CALL_END;
    if (e->in_call != of_call) abort(); /* events of a tool call must not be interleaved with other events */
    e->in_call = is_call || event->kind == FKV_REPLY_ARGUMENTS;
    bool joins = (int)event->kind == e->last && !is_call && event->kind != FKV_REPLY_CALL_END;
    if (joins)
        e->n--; /* removes the closing parenthesis */
    else
        events_add(e, opens[event->kind], strlen(opens[event->kind]));
    events_add(e, event->bytes, event->n_bytes);
    if (event->kind == FKV_REPLY_CALL_END)
        events_add(e, "!", event->complete ? 0 : 1);
    else
        events_add(e, ")", 1);
    e->last = (int)event->kind;
}

/* Parses a text in chunks whose lengths next(state) returns, or in one chunk if next is NULL. Returns the formatted events, which
 * the caller frees. */
static inline char *events_of(reply_setup setup, const char *text, size_t n, size_t (*next)(void *state), void *state) {
    reply_events e = {.last = -1};
    fkv_reply *reply = NULL;
    setup.on_event = events_take;
    setup.user = &e;
    events_add(&e, "", 0);
    if (fkv_reply_start(&setup, &reply) != FKV_OK) abort();
    for (size_t at = 0; at < n;) {
        size_t part = next != NULL ? next(state) : n;
        if (part > n - at) part = n - at;
        if (fkv_reply_feed(reply, text + at, part) != FKV_OK) abort();
        at += part;
    }
    if (fkv_reply_end(reply) != FKV_OK) abort();
    if (e.in_call) abort();
    fkv_reply_close(reply);
    return e.bytes;
}

#endif
