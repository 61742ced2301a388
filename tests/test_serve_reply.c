/* Tests API responses. The test supplies text, reasoning and tool calls in place of a model. */
#include "../src/serve/exchange.h"
#include "test.h"

#include <string.h>

static server host = {.models = {{.name = "m"}}, .n_models = 1};

static void part(exchange *x, part_kind kind, const char *text) { reply_part(x, 0, kind, text, strlen(text)); }

static exchange answer_with_a_call(api_kind kind) {
    exchange x = {.s = &host,
                  .m = &host.models[0],
                  .api = {.kind = kind, .n = 1},
                  .n_jobs = 1,
                  .id = "chatcmpl-01",
                  .n_prompt = 10,
                  .n_cached = 4,
                  .n_new = 7};
    part(&x, PART_REASONING, "hm");
    part(&x, PART_REASONING, "m");
    part(&x, PART_TEXT, "I look");
    part(&x, PART_TEXT, "\xff.");
    part(&x, PART_CALL, "get");
    part(&x, PART_ARGUMENTS, "{\"city\": ");
    part(&x, PART_ARGUMENTS, "\"Paris\"}");
    part(&x, PART_CALL_END, "");
    part(&x, PART_CALL, "put");
    part(&x, PART_ARGUMENTS, "no JSON");
    part(&x, PART_CALL_END, "");
    x.answers[0].reason = FKV_FINISH_END;
    return x;
}

static void check(json_t *got, const char *expected) {
    json_t *wanted = json_loads(expected, 0, NULL);
    ck_assert(wanted != NULL);
    char *text = json_dumps(got, JSON_COMPACT);
    ck_assert_msg(json_equal(got, wanted), "%s", text);
    free(text);
    json_decref(wanted);
    json_decref(got);
}

static void free_parts(exchange *x) {
    for (uint32_t i = 0; i < x->answers[0].n_parts; i++) {
        free(x->answers[0].parts[i].name);
        evbuffer_free(x->answers[0].parts[i].bytes);
    }
}

START_TEST(openai_response_separates_reasoning_text_and_calls) {
    exchange x = answer_with_a_call(API_CHAT);
    check(
        reply_answer(&x),
        "{\"id\":\"chatcmpl-01\",\"object\":\"chat.completion\",\"created\":0,\"model\":\"m\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"I look\xef\xbf\xbd.\",\"reasoning_content\":\"hmm\",\"tool_calls\":["
        "{\"id\":\"call_01_0_0\",\"type\":\"function\",\"function\":{\"name\":\"get\",\"arguments\":\"{\\\"city\\\": \\\"Paris\\\"}\"}},"
        "{\"id\":\"call_01_0_1\",\"type\":\"function\",\"function\":{\"name\":\"put\",\"arguments\":\"no JSON\"}}]},"
        "\"logprobs\":null,\"finish_reason\":\"tool_calls\"}],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":7,"
        "\"total_tokens\":17,\"prompt_tokens_details\":{\"cached_tokens\":4}}}");
    free_parts(&x);
}
END_TEST

START_TEST(ollama_response_has_calls_as_objects) {
    exchange x = answer_with_a_call(API_OLLAMA_CHAT);
    json_t *reply = reply_answer(&x);
    check(
        json_incref(json_object_get(reply, "message")),
        "{\"role\":\"assistant\",\"content\":\"I look\xef\xbf\xbd.\",\"thinking\":\"hmm\",\"tool_calls\":["
        "{\"function\":{\"name\":\"get\",\"arguments\":{\"city\":\"Paris\"}}},{\"function\":{\"name\":\"put\",\"arguments\":{}}}]}");
    ck_assert_str_eq(json_string_value(json_object_get(reply, "done_reason")), "stop");
    ck_assert_int_eq(json_integer_value(json_object_get(reply, "prompt_eval_count")), 10);
    ck_assert_int_eq(json_integer_value(json_object_get(reply, "eval_count")), 7);
    json_decref(reply);
    free_parts(&x);
}
END_TEST

/* Fields of an Ollama request are converted to the fields of a chat request. */
START_TEST(ollama_messages_become_a_template_conversation) {
    static const char body[] =
        "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":\"\",\"thinking\":\"hm\","
        "\"tool_calls\":[{\"function\":{\"name\":\"get\",\"arguments\":{\"a\":1}}}]},{\"role\":\"tool\",\"tool_name\":\"get\","
        "\"content\":\"2\"}],\"options\":{\"num_predict\":5,\"top_k\":3,\"repeat_penalty\":1.5,\"stop\":[\"x\"]},\"format\":\"json\","
        "\"think\":false,\"keep_alive\":\"5m\"}";
    static api_request r;
    fkv_sampler_config defaults = {.top_p = 1.0f};
    ck_assert_msg(api_request_parse(API_OLLAMA_CHAT, body, sizeof body - 1, &defaults, &r), "%s", r.error);
    check(
        json_incref(r.conversation),
        "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":\"\",\"reasoning_content\":\"hm\","
        "\"tool_calls\":[{\"function\":{\"name\":\"get\",\"arguments\":{\"a\":1}}}]},{\"role\":\"tool\",\"name\":\"get\","
        "\"content\":\"2\"}],\"add_generation_prompt\":true,\"enable_thinking\":false}");
    ck_assert(r.stream && r.any_object && r.max_new == 5 && r.sampler.top_k == 3 && r.n_stops == 1);
    ck_assert(r.sampler.repetition_penalty == 1.5f);
    api_request_free(&r);
}
END_TEST

START_TEST(anthropic_response_has_blocks_in_order) {
    exchange x = answer_with_a_call(API_MESSAGES);
    check(reply_answer(&x),
          "{\"id\":\"chatcmpl-01\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"m\",\"content\":["
          "{\"type\":\"thinking\",\"thinking\":\"hmm\",\"signature\":\"\"},{\"type\":\"text\",\"text\":\"I look\xef\xbf\xbd.\"},"
          "{\"type\":\"tool_use\",\"id\":\"toolu_01_0_0\",\"name\":\"get\",\"input\":{\"city\":\"Paris\"}},"
          "{\"type\":\"tool_use\",\"id\":\"toolu_01_0_1\",\"name\":\"put\",\"input\":{}}],\"stop_reason\":\"tool_use\","
          "\"stop_sequence\":null,\"usage\":{\"input_tokens\":6,\"cache_read_input_tokens\":4,\"cache_creation_input_tokens\":0,"
          "\"output_tokens\":7}}");
    free_parts(&x);
}
END_TEST

START_TEST(anthropic_messages_become_a_template_conversation) {
    static const char body[] =
        "\x7b\"system\":\"x-anthropic-billing-header: 1\\nBe kind.\",\"messages\":[{\"role\":\"user\",\"content\":\"a\"},"
        "{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\",\"thinking\":\"t\"},{\"type\":\"text\",\"text\":\"b\"},"
        "{\"type\":\"tool_use\",\"id\":\"i\",\"name\":\"f\",\"input\":{\"x\":1}}]},"
        "{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"i\",\"content\":\"r\"},{\"type\":\"text\",\"text\":\"c\"}]}],"
        "\"tools\":[{\"name\":\"f\",\"description\":\"d\",\"input_schema\":{\"type\":\"object\"}}]}";
    fkv_sampler_config defaults = fkv_sampler_config_default();
    static api_request r;
    ck_assert_msg(api_request_parse(API_MESSAGES, body, sizeof body - 1, &defaults, &r), "%s", r.error);
    check(
        json_incref(r.conversation),
        "{\"add_generation_prompt\":true,\"messages\":[{\"role\":\"system\",\"content\":\"Be kind.\"},{\"role\":\"user\",\"content\":\"a\"},"
        "{\"role\":\"assistant\",\"content\":\"b\",\"reasoning_content\":\"t\",\"tool_calls\":[{\"id\":\"i\",\"type\":\"function\","
        "\"function\":{\"name\":\"f\",\"arguments\":{\"x\":1}}}]},{\"role\":\"tool\",\"tool_call_id\":\"i\",\"content\":\"r\"},"
        "{\"role\":\"user\",\"content\":\"c\"}],\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"d\","
        "\"parameters\":{\"type\":\"object\"}}}]}");
    api_request_free(&r);
}
END_TEST

START_TEST(responses_api_has_items_in_order) {
    exchange x = answer_with_a_call(API_RESPONSES);
    json_t *got = reply_answer(&x);
    check(
        json_incref(json_object_get(got, "output")),
        "[{\"type\":\"reasoning\",\"id\":\"rs_01_0\",\"summary\":[],\"content\":[{\"type\":\"reasoning_text\",\"text\":\"hmm\"}],"
        "\"status\":\"completed\"},"
        "{\"type\":\"message\",\"id\":\"msg_01_1\",\"role\":\"assistant\",\"status\":\"completed\",\"content\":[{\"type\":\"output_text\","
        "\"text\":\"I look\xef\xbf\xbd.\",\"annotations\":[],\"logprobs\":[]}]},"
        "{\"type\":\"function_call\",\"id\":\"fc_01_2\",\"call_id\":\"call_01_0_0\",\"name\":\"get\",\"arguments\":\"{\\\"city\\\": "
        "\\\"Paris\\\"}\",\"status\":\"completed\"},"
        "{\"type\":\"function_call\",\"id\":\"fc_01_3\",\"call_id\":\"call_01_0_1\",\"name\":\"put\",\"arguments\":\"no JSON\",\"status\":"
        "\"completed\"}]");
    check(json_incref(json_object_get(got, "usage")),
          "{\"input_tokens\":10,\"input_tokens_details\":{\"cached_tokens\":4},\"output_tokens\":7,\"output_tokens_details\":{"
          "\"reasoning_tokens\":0},\"total_tokens\":17}");
    ck_assert_str_eq(json_string_value(json_object_get(got, "status")), "completed");
    ck_assert(json_is_false(json_object_get(got, "store")));
    json_decref(got);
    x.answers[0].reason = FKV_FINISH_LENGTH;
    got = reply_answer(&x);
    ck_assert_str_eq(json_string_value(json_object_get(got, "status")), "incomplete");
    json_decref(got);
    free_parts(&x);
}
END_TEST

START_TEST(responses_api_items_become_a_conversation) {
    static const char body[] =
        "{\"instructions\":\"Be kind.\",\"max_output_tokens\":9,\"reasoning\":{\"effort\":\"low\"},\"n\":5,\"input\":["
        "{\"role\":\"user\",\"content\":[{\"type\":\"input_text\",\"text\":\"a\"}]},"
        "{\"type\":\"reasoning\",\"summary\":[],\"content\":[{\"type\":\"reasoning_text\",\"text\":\"t\"}]},"
        "{\"type\":\"message\",\"role\":\"assistant\",\"content\":[{\"type\":\"output_text\",\"text\":\"b\"}]},"
        "{\"type\":\"function_call\",\"call_id\":\"i\",\"name\":\"f\",\"arguments\":\"{\\\"x\\\": 1}\"},"
        "{\"type\":\"function_call_output\",\"call_id\":\"i\",\"output\":\"r\"}],"
        "\"tools\":[{\"type\":\"function\",\"name\":\"f\",\"parameters\":{\"type\":\"object\"},\"strict\":true},{\"type\":\"web_search\"}]}";
    fkv_sampler_config defaults = fkv_sampler_config_default();
    static api_request r;
    ck_assert_msg(api_request_parse(API_RESPONSES, body, sizeof body - 1, &defaults, &r), "%s", r.error);
    ck_assert_uint_eq(r.max_new, 9);
    ck_assert_uint_eq(r.n, 1);
    check(
        json_incref(r.conversation),
        "{\"add_generation_prompt\":true,\"reasoning_effort\":\"low\",\"messages\":[{\"role\":\"system\",\"content\":\"Be kind.\"},"
        "{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\",\"reasoning_content\":\"t\",\"tool_calls\":["
        "{\"id\":\"i\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":{\"x\":1}}}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"i\",\"content\":\"r\"}],\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\","
        "\"parameters\":{\"type\":\"object\"}}}]}");
    api_request_free(&r);
    static const char *const wrong[] = {"{}",
                                        "{\"input\":3}",
                                        "{\"input\":[]}",
                                        "{\"input\":[3]}",
                                        "{\"input\":[{\"type\":\"function_call\",\"name\":3}]}",
                                        "{\"input\":[{\"type\":\"reasoning\",\"content\":[{\"text\":\"x\"}]},{\"role\":7}]}",
                                        "{\"input\":[{\"type\":\"item_reference\"}]}",
                                        "{\"input\":\"x\",\"instructions\":[]}",
                                        "{\"input\":\"x\",\"tools\":3}",
                                        "{\"input\":\"x\",\"max_output_tokens\":-1}",
                                        "{\"input\":\"x\",\"text\":{\"format\":{\"type\":\"xml\"}}}",
                                        "{\"input\":\"x\",\"previous_response_id\":\"resp_1\"}"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        ck_assert_msg(!api_request_parse(API_RESPONSES, wrong[i], strlen(wrong[i]), &defaults, &r) && r.error[0] != 0, "%s",
                      wrong[i]);
        api_request_free(&r);
    }
}
END_TEST

TEST_MAIN("serve_reply", openai_response_separates_reasoning_text_and_calls, anthropic_response_has_blocks_in_order,
          anthropic_messages_become_a_template_conversation, ollama_response_has_calls_as_objects,
          ollama_messages_become_a_template_conversation, responses_api_has_items_in_order,
          responses_api_items_become_a_conversation)
