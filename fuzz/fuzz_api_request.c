/* Bodies of requests: whatever the bytes, a request comes out whole or an error that says why, and nothing is left behind. The
 * first byte chooses the API.
 */
#include "../src/serve/api_request.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    api_request r;
    fkv_sampler_config defaults = {.top_p = 1.0f};
    if (size == 0) return 0;
    bool good = api_request_parse((api_kind)(data[0] % 3), (const char *)data + 1, size - 1, &defaults, &r);
    if (!good && r.error[0] == 0) abort();
    if (good && (r.n == 0 || r.n > FKV_MAX_ANSWERS || r.n_stops > FKV_MAX_STOPS || r.n_top > FKV_MAX_LOGPROBS)) abort();
    if (good && r.kind == API_COMPLETIONS && r.prompt == NULL) abort();
    if (good && r.kind != API_COMPLETIONS) {
        const json_t *messages = json_object_get(r.conversation, "messages");
        size_t i;
        const json_t *message;
        json_array_foreach(messages, i, message) if (!json_is_string(json_object_get(message, "role")) ||
                                                     !json_is_string(json_object_get(message, "content"))) abort();
    }
    api_request_free(&r);
    return 0;
}
