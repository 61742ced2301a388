/* Writes the responses of the OpenAI and Anthropic APIs, either complete or as server-sent events. See exchange.h. */
#include "exchange.h"

#include <event2/bufferevent.h>
#include <stdlib.h>
#include <string.h>

static const char *const OPENAI_REASONS[] = {"stop", "stop", "length", "stop", "length", "error"};
static const char *const ANTHROPIC_REASONS[] = {"end_turn", "stop_sequence", "max_tokens", "end_turn", "max_tokens", "end_turn"};

static const char *reason_of(const exchange *x, const answer_out *a) {
    bool called = a->n_calls > 0 && (a->reason == FKV_FINISH_END || a->reason == FKV_FINISH_STOP);
    if (x->api.kind == API_MESSAGES) return called ? "tool_use" : ANTHROPIC_REASONS[a->reason];
    return called ? "tool_calls" : OPENAI_REASONS[a->reason];
}

static json_t *usage_of(const exchange *x) {
    if (x->api.kind == API_MESSAGES) /* in the Messages API, input_tokens does not include cached tokens */
        return json_pack("{s:I, s:I, s:I, s:I}", "input_tokens", (json_int_t)(x->n_prompt - x->n_cached),
                         "cache_read_input_tokens", (json_int_t)x->n_cached, "cache_creation_input_tokens", (json_int_t)0,
                         "output_tokens", (json_int_t)x->n_new);
    return json_pack("{s:I, s:I, s:I, s:{s:I}}", "prompt_tokens", (json_int_t)x->n_prompt, "completion_tokens",
                     (json_int_t)x->n_new, "total_tokens", (json_int_t)x->n_prompt + x->n_new, "prompt_tokens_details",
                     "cached_tokens", (json_int_t)x->n_cached);
}

/* ---- streams ---- */

/* Returns a chunk of an OpenAI stream. */
static json_t *stream_chunk(const exchange *x, json_t *choices) {
    return json_pack("{s:s, s:s, s:I, s:s, s:o}", "id", x->id, "object",
                     x->api.kind == API_CHAT ? "chat.completion.chunk" : "text_completion", "created", (json_int_t)x->created,
                     "model", x->m->name, "choices", choices);
}

static json_t *take_logprobs(answer_out *a) {
    json_t *list = a->logprobs;
    a->logprobs = NULL;
    return list;
}

/* Converts log probabilities to the format of the API. The completions API uses parallel lists of tokens, log probabilities and
 * maps of the most likely tokens. */
static json_t *logprobs_of(const exchange *x, json_t *list) {
    if (list == NULL) return json_null();
    if (x->api.kind == API_CHAT) return json_pack("{s:o}", "content", list);
    json_t *out = json_pack("{s:[], s:[], s:[]}", "tokens", "token_logprobs", "top_logprobs");
    size_t i;
    size_t k;
    const json_t *one;
    const json_t *other;
    json_array_foreach(list, i, one) {
        json_t *top = json_object();
        json_array_foreach(json_object_get(one, "top_logprobs"), k, other)(void)
            json_object_set(top, json_string_value(json_object_get(other, "token")), json_object_get(other, "logprob"));
        (void)json_array_append(json_object_get(out, "tokens"), json_object_get(one, "token"));
        (void)json_array_append(json_object_get(out, "token_logprobs"), json_object_get(one, "logprob"));
        (void)json_array_append_new(json_object_get(out, "top_logprobs"), top);
    }
    json_decref(list);
    return out;
}

static void send_delta(exchange *x, uint32_t answer, json_t *delta, const char *reason) {
    json_t *choice = json_pack("{s:i, s:o, s:o, s:s?}", "index", (int)answer, "delta", delta, "logprobs",
                               logprobs_of(x, take_logprobs(&x->answers[answer])), "finish_reason", reason);
    reply_send_event(x, NULL, stream_chunk(x, json_pack("[o]", choice)));
}

static void send_text(exchange *x, uint32_t answer, json_t *text, const char *reason) {
    json_t *choice = json_pack("{s:i, s:o, s:o, s:s?}", "index", (int)answer, "text", text, "logprobs",
                               logprobs_of(x, take_logprobs(&x->answers[answer])), "finish_reason", reason);
    reply_send_event(x, NULL, stream_chunk(x, json_pack("[o]", choice)));
}

static void stream_openai(exchange *x, uint32_t answer, part_kind kind, const char *bytes, size_t n) {
    answer_out *a = &x->answers[answer];
    json_t *text = reply_utf8_text(bytes, n);
    json_t *call = NULL;
    if (kind == PART_TEXT || kind == PART_REASONING) {
        send_delta(x, answer, json_pack("{s:o}", kind == PART_TEXT ? "content" : "reasoning_content", text), NULL);
        return;
    }
    if (kind == PART_CALL)
        call = json_pack("{s:i, s:o, s:s, s:{s:o, s:s}}", "index", (int)a->n_calls - 1, "id",
                         reply_call_id(x, answer, a->n_calls - 1), "type", "function", "function", "name", text, "arguments", "");
    else if (kind == PART_ARGUMENTS)
        call = json_pack("{s:i, s:{s:o}}", "index", (int)a->n_calls - 1, "function", "arguments", text);
    else
        json_decref(text);
    if (call != NULL) send_delta(x, answer, json_pack("{s:[o]}", "tool_calls", call), NULL);
}

static void close_content_block(exchange *x) {
    if (x->block < 0) return;
    reply_send_event(x, "content_block_stop",
                     json_pack("{s:s, s:i}", "type", "content_block_stop", "index", (int)x->n_blocks - 1));
    x->block = -1;
}

static void open_content_block(exchange *x, part_kind kind, const char *bytes, size_t n) {
    json_t *block = NULL;
    close_content_block(x);
    x->block = (int)kind;
    if (kind == PART_TEXT) block = json_pack("{s:s, s:s}", "type", "text", "text", "");
    if (kind == PART_REASONING) block = json_pack("{s:s, s:s, s:s}", "type", "thinking", "thinking", "", "signature", "");
    if (kind == PART_CALL)
        block = json_pack("{s:s, s:o, s:o, s:{}}", "type", "tool_use", "id", reply_call_id(x, 0, x->answers[0].n_calls - 1),
                          "name", reply_utf8_text(bytes, n), "input");
    reply_send_event(
        x, "content_block_start",
        json_pack("{s:s, s:i, s:o}", "type", "content_block_start", "index", (int)x->n_blocks++, "content_block", block));
}

static void stream_anthropic(exchange *x, part_kind kind, const char *bytes, size_t n) {
    static const char *const types[] = {"text_delta", "thinking_delta", "", "input_json_delta", ""};
    static const char *const fields[] = {"text", "thinking", "", "partial_json", ""};
    if (kind == PART_CALL_END) {
        close_content_block(x);
        return;
    }
    if (kind == PART_CALL || (kind != PART_ARGUMENTS && x->block != (int)kind)) open_content_block(x, kind, bytes, n);
    if (kind == PART_CALL) return;
    reply_send_event(x, "content_block_delta",
                     json_pack("{s:s, s:i, s:{s:s, s:o}}", "type", "content_block_delta", "index", (int)x->n_blocks - 1, "delta",
                               "type", types[kind], fields[kind], reply_utf8_text(bytes, n)));
}

bool reply_is_lines(const exchange *x) { return x->api.kind == API_OLLAMA_CHAT || x->api.kind == API_OLLAMA_GENERATE; }

void reply_begin(exchange *x) {
    x->block = -1;
    if (x->api.kind == API_RESPONSES) responses_begin(x);
    if (x->api.kind == API_MESSAGES) {
        json_t *message =
            json_pack("{s:s, s:s, s:s, s:s, s:[], s:n, s:n, s:o}", "id", x->id, "type", "message", "role", "assistant", "model",
                      x->m->name, "content", "stop_reason", "stop_sequence", "usage", usage_of(x));
        reply_send_event(x, "message_start", json_pack("{s:s, s:o}", "type", "message_start", "message", message));
        reply_send_event(x, "ping", json_pack("{s:s}", "type", "ping"));
    }
    if (x->api.kind == API_CHAT)
        for (uint32_t i = 0; i < x->api.n; i++)
            send_delta(x, i, json_pack("{s:s, s:s}", "role", "assistant", "content", ""), NULL);
}

/* ---- answer parts ---- */

void reply_part(exchange *x, uint32_t answer, part_kind kind, const char *bytes, size_t n) {
    answer_out *a = &x->answers[answer];
    if (kind == PART_CALL) a->n_calls++;
    if (x->api.kind == API_RESPONSES) {
        responses_part(x, kind, bytes, n);
    } else if (reply_is_lines(x)) {
        ollama_part(x, kind, bytes, n);
    } else if (x->streaming) {
        if (x->api.kind == API_MESSAGES)
            stream_anthropic(x, kind, bytes, n);
        else if (x->api.kind == API_CHAT)
            stream_openai(x, answer, kind, bytes, n);
        else if (x->api.kind == API_INFILL)
            llama_part(x, bytes, n);
        else
            send_text(x, answer, reply_utf8_text(bytes, n), NULL);
    } else if (kind != PART_CALL_END) {
        (void)reply_keep(a, kind, bytes, n);
    }
}

void reply_answered(exchange *x, uint32_t answer) {
    answer_out *a = &x->answers[answer];
    if (!x->streaming) return;
    if (x->api.kind == API_CHAT) send_delta(x, answer, json_object(), reason_of(x, a));
    if (x->api.kind == API_COMPLETIONS) send_text(x, answer, json_string(""), reason_of(x, a));
}

/* ---- complete responses ---- */

static json_t *message_of(const exchange *x, uint32_t answer) {
    const answer_out *a = &x->answers[answer];
    json_t *text = reply_join_parts(a, PART_TEXT);
    json_t *reasoning = reply_join_parts(a, PART_REASONING);
    json_t *calls = json_array();
    if (text == NULL && a->n_calls == 0) text = json_string("");
    json_t *message = json_pack("{s:s, s:o?}", "role", "assistant", "content", text);
    for (uint32_t i = 0; i < a->n_parts; i++) {
        const answer_part *part = &a->parts[i];
        if (part->kind != PART_CALL) continue;
        (void)json_array_append_new(
            calls, json_pack("{s:o, s:s, s:{s:o, s:o}}", "id", reply_call_id(x, answer, (uint32_t)json_array_size(calls)), "type",
                             "function", "function", "name",
                             reply_utf8_text(part->name != NULL ? part->name : "", part->name != NULL ? strlen(part->name) : 0),
                             "arguments", reply_part_text(part)));
    }
    if (reasoning != NULL) (void)json_object_set_new(message, "reasoning_content", reasoning);
    if (json_array_size(calls) > 0)
        (void)json_object_set_new(message, "tool_calls", calls);
    else
        json_decref(calls);
    return message;
}

static json_t *openai_answer(exchange *x) {
    json_t *choices = json_array();
    const uint32_t n = exchange_choices(x);
    for (uint32_t i = 0; i < n; i++) {
        answer_out *a = &x->answers[i];
        json_t *text = x->api.kind == API_COMPLETIONS ? reply_join_parts(a, PART_TEXT) : NULL;
        if (x->api.kind == API_COMPLETIONS && text == NULL) text = json_string("");
        json_t *what = text != NULL ? text : message_of(x, i);
        (void)json_array_append_new(choices,
                                    json_pack("{s:i, s:o, s:o, s:s}", "index", (int)i, text != NULL ? "text" : "message", what,
                                              "logprobs", logprobs_of(x, take_logprobs(a)), "finish_reason", reason_of(x, a)));
    }
    return json_pack("{s:s, s:s, s:I, s:s, s:o, s:o}", "id", x->id, "object",
                     x->api.kind == API_CHAT ? "chat.completion" : "text_completion", "created", (json_int_t)x->created, "model",
                     x->m->name, "choices", choices, "usage", usage_of(x));
}

static json_t *anthropic_answer(const exchange *x) {
    const answer_out *a = &x->answers[0];
    json_t *content = json_array();
    uint32_t n_calls = 0;
    for (uint32_t i = 0; i < a->n_parts; i++) {
        const answer_part *part = &a->parts[i];
        json_t *block = NULL;
        if (part->kind == PART_TEXT) block = json_pack("{s:s, s:o}", "type", "text", "text", reply_part_text(part));
        if (part->kind == PART_REASONING)
            block = json_pack("{s:s, s:o, s:s}", "type", "thinking", "thinking", reply_part_text(part), "signature", "");
        if (part->kind == PART_CALL)
            block = json_pack("{s:s, s:o, s:s, s:o}", "type", "tool_use", "id", reply_call_id(x, 0, n_calls++), "name",
                              part->name != NULL ? part->name : "", "input", reply_call_input(part));
        (void)json_array_append_new(content, block);
    }
    return json_pack("{s:s, s:s, s:s, s:s, s:o, s:s, s:s?, s:o}", "id", x->id, "type", "message", "role", "assistant", "model",
                     x->m->name, "content", content, "stop_reason", reason_of(x, a), "stop_sequence", a->stop, "usage",
                     usage_of(x));
}

static void end_stream(exchange *x) {
    const answer_out *a = &x->answers[0];
    if (x->api.kind == API_RESPONSES) {
        responses_end(x);
    } else if (reply_is_lines(x)) {
        ollama_end(x);
    } else if (x->api.kind == API_INFILL) {
        reply_send_event(x, NULL, llama_answer(x));
    } else if (x->api.kind == API_MESSAGES) {
        close_content_block(x);
        json_t *delta = json_pack("{s:s, s:s?}", "stop_reason", reason_of(x, a), "stop_sequence", a->stop);
        reply_send_event(x, "message_delta",
                         json_pack("{s:s, s:o, s:o}", "type", "message_delta", "delta", delta, "usage", usage_of(x)));
        reply_send_event(x, "message_stop", json_pack("{s:s}", "type", "message_stop"));
    } else if (x->api.include_usage) {
        json_t *chunk = stream_chunk(x, json_array());
        (void)json_object_set_new(chunk, "usage", usage_of(x));
        reply_send_event(x, NULL, chunk);
    }
    if (x->api.kind == API_CHAT || x->api.kind == API_COMPLETIONS) {
        struct evbuffer *out = evbuffer_new();
        (void)evbuffer_add_printf(out, "data: [DONE]\n\n");
        evhttp_send_reply_chunk(x->req, out);
        evbuffer_free(out);
    }
    evhttp_send_reply_end(x->req);
}

json_t *reply_answer(exchange *x) {
    if (x->api.kind == API_RESPONSES) return responses_answer(x);
    if (reply_is_lines(x)) return ollama_answer(x);
    if (x->api.kind == API_INFILL) return llama_answer(x);
    return x->api.kind == API_MESSAGES ? anthropic_answer(x) : openai_answer(x);
}

void reply_end(exchange *x) {
    if (x->streaming)
        end_stream(x);
    else
        exchange_send_json(x->s, x->req, 200, reply_answer(x));
}

void reply_failed(exchange *x, const char *message) {
    if (x->api.kind == API_RESPONSES || reply_is_lines(x)) {
        (reply_is_lines(x) ? ollama_failed : responses_failed)(x, message);
        evhttp_send_reply_end(x->req);
        return;
    }
    json_t *error =
        json_pack("{s:s, s:s}", "type", x->api.kind == API_MESSAGES ? "api_error" : "server_error", "message", message);
    json_t *data = json_pack("{s:o}", "error", error);
    if (x->api.kind == API_MESSAGES) (void)json_object_set_new(data, "type", json_string("error"));
    reply_send_event(x, x->api.kind == API_MESSAGES ? "error" : NULL, data);
    evhttp_send_reply_end(x->req);
}
