/* Writes responses of the OpenAI Responses API. A response is a list of output items. It is sent as one object or as a stream
 * of events, which report the start of each item, each addition to it, and its end. See exchange.h.
 *
 * All parts of a streamed answer are kept as well, because the final event of each item repeats its complete content.
 */
#include "exchange.h"

#include <string.h>

static const char *const ID_PREFIXES[] = {"msg", "rs", "fc"};

static json_t *item_id(const exchange *x, uint32_t index) {
    return json_sprintf("%s_%s_%u", ID_PREFIXES[x->answers[0].parts[index].kind], strchr(x->id, '-') + 1, index);
}

/* Returns the number of tool calls before part `index`. */
static uint32_t call_index(const exchange *x, uint32_t index) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < index; i++) n += x->answers[0].parts[i].kind == PART_CALL;
    return n;
}

static json_t *content_of(const answer_part *part, bool begun) {
    json_t *text = begun ? json_string("") : reply_part_text(part);
    if (part->kind == PART_REASONING) return json_pack("{s:s, s:o}", "type", "reasoning_text", "text", text);
    return json_pack("{s:s, s:o, s:[], s:[]}", "type", "output_text", "text", text, "annotations", "logprobs");
}

/* Returns an output item. If `begun` is true, the item has no content yet; otherwise it is complete. */
static json_t *item_of(const exchange *x, uint32_t index, bool begun) {
    const answer_part *part = &x->answers[0].parts[index];
    const char *status = begun ? "in_progress" : "completed";
    json_t *content = begun ? json_array() : json_pack("[o]", content_of(part, false));
    if (part->kind == PART_TEXT)
        return json_pack("{s:s, s:o, s:s, s:s, s:o}", "type", "message", "id", item_id(x, index), "role", "assistant", "status",
                         status, "content", content);
    if (part->kind == PART_REASONING)
        return json_pack("{s:s, s:o, s:[], s:o, s:s}", "type", "reasoning", "id", item_id(x, index), "summary", "content",
                         content, "status", status);
    json_decref(content);
    return json_pack("{s:s, s:o, s:o, s:s, s:o, s:s}", "type", "function_call", "id", item_id(x, index), "call_id",
                     reply_call_id(x, 0, call_index(x, index)), "name", part->name != NULL ? part->name : "", "arguments",
                     begun ? json_string("") : reply_part_text(part), "status", status);
}

static json_t *echo_field(const exchange *x, const char *name, json_t *otherwise) {
    json_t *said = json_object_get(x->api.root, name);
    if (said == NULL || json_is_null(said)) return otherwise;
    json_decref(otherwise);
    return json_incref(said);
}

/* Returns the response object. status: state of an unfinished response, or NULL if it has ended. */
static json_t *response_of(const exchange *x, const char *status) {
    const answer_out *a = &x->answers[0];
    bool ended = status == NULL;
    bool cut = ended && (a->reason == FKV_FINISH_LENGTH || a->reason == FKV_FINISH_DEADLINE);
    json_t *output = json_array();
    for (uint32_t i = 0; i < a->n_parts && ended; i++) (void)json_array_append_new(output, item_of(x, i, false));
    json_t *text = echo_field(x, "text", json_pack("{s:{s:s}}", "format", "type", "text"));
    json_t *usage =
        json_pack("{s:I, s:{s:I}, s:I, s:{s:I}, s:I}", "input_tokens", (json_int_t)x->n_prompt, "input_tokens_details",
                  "cached_tokens", (json_int_t)x->n_cached, "output_tokens", (json_int_t)x->n_new, "output_tokens_details",
                  "reasoning_tokens", (json_int_t)0, "total_tokens", (json_int_t)x->n_prompt + x->n_new);
    json_t *cut_why = cut ? json_pack("{s:s}", "reason", "max_output_tokens") : json_null();
    json_t *response =
        json_pack("{s:s, s:s, s:I, s:s, s:n, s:o, s:s, s:o, s:o, s:b, s:o}", "id", x->id, "object", "response", "created_at",
                  (json_int_t)x->created, "status", ended ? (cut ? "incomplete" : "completed") : status, "error",
                  "incomplete_details", cut_why, "model", x->m->name, "output", output, "usage",
                  ended ? json_incref(usage) : json_null(), "parallel_tool_calls", !x->api.one_call, "text", text);
    json_decref(usage);
    json_t *more = json_pack(
        "{s:o, s:o, s:o, s:o, s:n, s:b, s:f, s:f, s:s}", "instructions", echo_field(x, "instructions", json_null()),
        "max_output_tokens", echo_field(x, "max_output_tokens", json_null()), "tools", echo_field(x, "given_tools", json_array()),
        "tool_choice", echo_field(x, "tool_choice", json_string("auto")), "previous_response_id", "store", 0, "temperature",
        (double)x->api.sampler.temperature, "top_p", (double)x->api.sampler.top_p, "truncation", "disabled");
    (void)json_object_set_new(more, "metadata", echo_field(x, "metadata", json_object()));
    (void)json_object_update(response, more);
    json_decref(more);
    return response;
}

/* ---- events ---- */

static void send_response_event(exchange *x, const char *type, json_t *data) {
    (void)json_object_set_new(data, "type", json_string(type));
    (void)json_object_set_new(data, "sequence_number", json_integer((json_int_t)x->n_events++));
    reply_send_event(x, type, data);
}

static json_t *item_location(const exchange *x, uint32_t index) {
    json_t *at = json_pack("{s:o, s:i}", "item_id", item_id(x, index), "output_index", (int)index);
    if (x->answers[0].parts[index].kind != PART_CALL) (void)json_object_set_new(at, "content_index", json_integer(0));
    return at;
}

static json_t *item_location_with(const exchange *x, uint32_t index, const char *name, json_t *value) {
    json_t *at = item_location(x, index);
    (void)json_object_set_new(at, name, value);
    return at;
}

static void begin_output_item(exchange *x, uint32_t index) {
    const answer_part *part = &x->answers[0].parts[index];
    send_response_event(x, "response.output_item.added",
                        json_pack("{s:i, s:o}", "output_index", (int)index, "item", item_of(x, index, true)));
    if (part->kind != PART_CALL)
        send_response_event(x, "response.content_part.added", item_location_with(x, index, "part", content_of(part, true)));
    x->block = (int)index;
}

static void extend_output_item(exchange *x, const char *bytes, size_t n) {
    static const char *const types[] = {"response.output_text.delta", "response.reasoning_text.delta",
                                        "response.function_call_arguments.delta"};
    uint32_t index = (uint32_t)x->block;
    part_kind kind = x->answers[0].parts[index].kind;
    json_t *data = item_location_with(x, index, "delta", reply_utf8_text(bytes, n));
    if (kind == PART_TEXT) (void)json_object_set_new(data, "logprobs", json_array());
    send_response_event(x, types[kind], data);
}

static void end_output_item(exchange *x) {
    static const char *const types[] = {"response.output_text.done", "response.reasoning_text.done",
                                        "response.function_call_arguments.done"};
    if (x->block < 0) return;
    uint32_t index = (uint32_t)x->block;
    const answer_part *part = &x->answers[0].parts[index];
    json_t *data = item_location_with(x, index, part->kind == PART_CALL ? "arguments" : "text", reply_part_text(part));
    if (part->kind == PART_TEXT) (void)json_object_set_new(data, "logprobs", json_array());
    if (part->kind == PART_CALL) (void)json_object_set_new(data, "name", json_string(part->name != NULL ? part->name : ""));
    send_response_event(x, types[part->kind], data);
    if (part->kind != PART_CALL)
        send_response_event(x, "response.content_part.done", item_location_with(x, index, "part", content_of(part, false)));
    send_response_event(x, "response.output_item.done",
                        json_pack("{s:i, s:o}", "output_index", (int)index, "item", item_of(x, index, false)));
    x->block = -1;
}

/* ---- response operations ---- */

void responses_begin(exchange *x) {
    x->block = -1;
    send_response_event(x, "response.created", json_pack("{s:o}", "response", response_of(x, "in_progress")));
    send_response_event(x, "response.in_progress", json_pack("{s:o}", "response", response_of(x, "in_progress")));
}

void responses_part(exchange *x, part_kind kind, const char *bytes, size_t n) {
    answer_out *a = &x->answers[0];
    uint32_t before = a->n_parts;
    if (kind == PART_CALL_END) {
        if (x->streaming) end_output_item(x);
        return;
    }
    answer_part *part = reply_keep(a, kind, bytes, n);
    if (part == NULL || !x->streaming) return;
    if (a->n_parts > before) {
        end_output_item(x);
        begin_output_item(x, before);
    }
    if (kind != PART_CALL && x->block >= 0) extend_output_item(x, bytes, n);
}

void responses_end(exchange *x) {
    const answer_out *a = &x->answers[0];
    bool cut = a->reason == FKV_FINISH_LENGTH || a->reason == FKV_FINISH_DEADLINE;
    end_output_item(x);
    send_response_event(x, cut ? "response.incomplete" : "response.completed",
                        json_pack("{s:o}", "response", response_of(x, NULL)));
}

void responses_failed(exchange *x, const char *message) {
    json_t *response = response_of(x, "failed");
    json_t *text = reply_utf8_text(message, strlen(message));
    (void)json_object_set_new(response, "error", json_pack("{s:s, s:o}", "code", "server_error", "message", text));
    send_response_event(x, "response.failed", json_pack("{s:o}", "response", response));
}

json_t *responses_answer(const exchange *x) { return response_of(x, NULL); }
