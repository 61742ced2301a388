/* Writes the responses of Ollama's API, either complete or as a stream of JSON objects, one per line. See exchange.h. */
#include "exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

json_t *ollama_time(int64_t seconds) {
    struct tm utc;
    char text[40] = "1970-01-01T00:00:00Z";
    const time_t at = (time_t)seconds;
    if (gmtime_r(&at, &utc) != NULL) (void)strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
    return json_string(text);
}

static json_t *reply_object(const exchange *x, bool done) {
    return json_pack("{s:s, s:o, s:b}", "model", x->m->name, "created_at", ollama_time((int64_t)time(NULL)), "done", done);
}

/* Adds the text, the reasoning and the tool calls of an answer. Each of the three may be NULL. Releases the
 * references to them. */
static void set_content(const exchange *x, json_t *reply, json_t *text, json_t *thinking, json_t *calls) {
    const bool chat = x->api.kind == API_OLLAMA_CHAT;
    json_t *message = chat ? json_pack("{s:s}", "role", "assistant") : json_incref(reply);
    (void)json_object_set_new(message, chat ? "content" : "response", text != NULL ? text : json_string(""));
    if (thinking != NULL) (void)json_object_set_new(message, "thinking", thinking);
    if (calls != NULL) (void)json_object_set_new(message, "tool_calls", calls);
    if (chat)
        (void)json_object_set_new(reply, "message", message);
    else
        json_decref(message);
}

static json_t *nanoseconds(double seconds) { return json_integer(seconds > 0.0 ? (json_int_t)(seconds * 1e9) : 0); }

/* Adds the finish reason, the token counts and the times. */
static void set_end(const exchange *x, json_t *reply) {
    static const char *const reasons[] = {"stop", "stop", "length", "stop", "length", "error"};
    const double now = exchange_now();
    const double first_at = x->first_at > 0.0 ? x->first_at : now;
    (void)json_object_set_new(reply, "done_reason", json_string(reasons[x->answers[0].reason]));
    (void)json_object_set_new(reply, "total_duration", nanoseconds(now - x->arrived_at));
    (void)json_object_set_new(reply, "load_duration", json_integer(0));
    (void)json_object_set_new(reply, "prompt_eval_count", json_integer(x->n_prompt));
    (void)json_object_set_new(reply, "prompt_eval_duration", nanoseconds(first_at - x->arrived_at));
    (void)json_object_set_new(reply, "eval_count", json_integer(x->n_new));
    (void)json_object_set_new(reply, "eval_duration", nanoseconds(now - first_at));
}

static json_t *call_json(const answer_part *part) {
    return json_pack("{s:{s:s, s:o}}", "function", "name", part->name != NULL ? part->name : "", "arguments",
                     reply_call_input(part));
}

static void send_line(exchange *x, json_t *object) {
    char *text = object != NULL ? json_dumps(object, JSON_COMPACT) : NULL;
    json_decref(object);
    if (text != NULL && x->req != NULL) {
        struct evbuffer *out = evbuffer_new();
        (void)evbuffer_add_printf(out, "%s\n", text);
        evhttp_send_reply_chunk(x->req, out);
        evbuffer_free(out);
    }
    free(text);
}

void ollama_part(exchange *x, part_kind kind, const char *bytes, size_t n) {
    answer_out *a = &x->answers[0];
    const bool text = kind == PART_TEXT || kind == PART_REASONING;
    if (kind != PART_CALL_END && (!text || !x->streaming)) (void)reply_keep(a, kind, bytes, n);
    if (!x->streaming || (!text && kind != PART_CALL_END)) return;
    json_t *reply = reply_object(x, false);
    if (kind == PART_TEXT)
        set_content(x, reply, reply_utf8_text(bytes, n), NULL, NULL);
    else if (kind == PART_REASONING)
        set_content(x, reply, NULL, reply_utf8_text(bytes, n), NULL);
    else if (a->n_parts > 0)
        set_content(x, reply, NULL, NULL, json_pack("[o]", call_json(&a->parts[a->n_parts - 1])));
    send_line(x, reply);
}

json_t *ollama_answer(const exchange *x) {
    const answer_out *a = &x->answers[0];
    json_t *reply = reply_object(x, true);
    json_t *calls = json_array();
    for (uint32_t i = 0; i < a->n_parts; i++)
        if (a->parts[i].kind == PART_CALL) (void)json_array_append_new(calls, call_json(&a->parts[i]));
    const bool called = json_array_size(calls) > 0;
    set_content(x, reply, reply_join_parts(a, PART_TEXT), reply_join_parts(a, PART_REASONING),
                called ? json_incref(calls) : NULL);
    json_decref(calls);
    set_end(x, reply);
    return reply;
}

void ollama_end(exchange *x) {
    json_t *reply = reply_object(x, true);
    set_content(x, reply, NULL, NULL, NULL);
    set_end(x, reply);
    send_line(x, reply);
}

void ollama_failed(exchange *x, const char *message) {
    send_line(x, json_pack("{s:o}", "error", reply_utf8_text(message, strlen(message))));
}

json_t *ollama_loaded(const exchange *x) {
    json_t *reply = reply_object(x, true);
    set_content(x, reply, NULL, NULL, NULL);
    (void)json_object_set_new(reply, "done_reason", json_string(x->api.unloads ? "unload" : "load"));
    return reply;
}
