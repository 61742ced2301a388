/* Fuzzes reply parsing in every syntax: the events must be in order and must not depend on how the reply is split into chunks. */
#include "../tests/reply_events.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static size_t random_part(void *state) {
    uint32_t *seed = state;
    *seed = *seed * 1664525u + 1013904223u;
    return 1 + (*seed >> 16) % 7;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static json_t *tools = NULL;
    if (tools == NULL)
        tools = json_loads(
            "[{\"function\": {\"name\": \"f\", \"parameters\": {\"properties\": {\"a\": {\"type\": \"string\"}, \"b\": "
            "{\"type\": \"integer\"}}}}}]",
            0, NULL);
    if (size < 2) return 0;
    reply_setup setup = {.reasoning = (fkv_reasoning_syntax)(1 + (data[0] & 15) % FKV_REASONING_CHANNEL),
                         .syntax = (fkv_tool_syntax)(1 + (data[0] >> 4) % FKV_TOOLS_INVOKE),
                         .tools = (data[1] & 1) != 0 ? tools : NULL,
                         .prompt = (data[1] & 2) != 0 ? "<think>" : "<|start|>assistant",
                         .n_prompt = (data[1] & 2) != 0 ? 7 : 18};
    uint32_t seed = data[1];
    const char *text = (const char *)data + 2;
    char *whole = events_of(setup, text, size - 2, NULL, NULL);
    char *parts = events_of(setup, text, size - 2, random_part, &seed);
    if (strcmp(whole, parts) != 0) abort();
    free(whole);
    free(parts);
    return 0;
}
