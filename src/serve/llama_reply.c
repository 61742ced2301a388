/* Writes the responses of llama.cpp's own API (/infill), either complete or as server-sent events. See exchange.h. */
#include "exchange.h"

void llama_part(exchange *x, const char *bytes, size_t n) {
    reply_send_event(x, NULL,
                     json_pack("{s:i, s:o, s:[], s:b, s:i, s:I, s:I}", "index", 0, "content", reply_utf8_text(bytes, n), "tokens",
                               "stop", 0, "id_slot", -1, "tokens_predicted", (json_int_t)x->n_new, "tokens_evaluated",
                               (json_int_t)x->n_prompt));
}

json_t *llama_answer(exchange *x) {
    static const char *const types[] = {"eos", "word", "limit", "none", "limit", "none"};
    const answer_out *a = &x->answers[0];
    const double now = exchange_now();
    const double first_at = x->first_at > 0.0 ? x->first_at : now;
    json_t *text = reply_join_parts(a, PART_TEXT);
    json_t *timings = json_pack("{s:I, s:I, s:f, s:I, s:f}", "cache_n", (json_int_t)x->n_cached, "prompt_n",
                                (json_int_t)(x->n_prompt - x->n_cached), "prompt_ms", (first_at - x->arrived_at) * 1e3,
                                "predicted_n", (json_int_t)x->n_new, "predicted_ms", (now - first_at) * 1e3);
    return json_pack("{s:i, s:o, s:[], s:b, s:i, s:s, s:I, s:I, s:I, s:b, s:s, s:s, s:o}", "index", 0, "content",
                     text != NULL ? text : json_string(""), "tokens", "stop", 1, "id_slot", -1, "model", x->m->name,
                     "tokens_predicted", (json_int_t)x->n_new, "tokens_evaluated", (json_int_t)x->n_prompt, "tokens_cached",
                     (json_int_t)x->n_prompt + (json_int_t)x->n_new, "truncated", 0, "stop_type", types[a->reason],
                     "stopping_word", a->stop != NULL ? a->stop : "", "timings", timings);
}
