/* See fleet.h. */
#include "fleet.h"

#include <stdio.h>
#include <string.h>

const char *fleet_readiness(const server *s) {
    if (s->n_models == 0) return "loading";
    if (s->draining || s->leaving) return "draining";
    if (s->config.max_wait_s <= 0.0) return "ready";
    for (uint32_t i = 0; i < s->n_models; i++) {
        fkv_engine_stats stats;
        fkv_engine_stats_now(s->models[i].engine, &stats);
        if (stats.predicted_wait_s <= s->config.max_wait_s) return "ready";
    }
    return "busy";
}

json_t *fleet_server_info(const server *s, const served_model *m) {
    fkv_engine_stats stats;
    fkv_engine_stats_now(m->engine, &stats);
    json_t *info = json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:I, s:I, s:I, s:I, s:s, s:s, s:s}", "model_path", m->name,
                             "served_model_name", m->name, "version", fkv_version(), "status", fleet_readiness(s), "tp_size", 1,
                             "dp_size", 1, "max_total_num_tokens", (json_int_t)stats.max_tokens, "max_req_input_len",
                             (json_int_t)stats.max_request_tokens, "max_running_requests", (json_int_t)m->parallel, "page_size",
                             (json_int_t)stats.page_tokens, "kernels", stats.cache.isa, "numerics", stats.cache.numerics,
                             "server_name", s->config.server_name != NULL ? s->config.server_name : "");
    return info;
}

json_t *fleet_model_info(const served_model *m) {
    const fkv_model_info *about = fkv_model_about(m->model);
    return json_pack("{s:s, s:s, s:s, s:b, s:s, s:b, s:I, s:I}", "model_path", m->name, "tokenizer_path", m->name,
                     "served_model_name", m->name, "is_generation", true, "model_type", about->architecture, "has_chat",
                     about->has_chat, "context_length", (json_int_t)about->context, "vocab_size", (json_int_t)about->n_vocab);
}

void fleet_add_headers(const server *s, struct evhttp_request *req) {
    struct evkeyvalq *headers = evhttp_request_get_output_headers(req);
    if (s->config.server_name != NULL) (void)evhttp_add_header(headers, "x-flatkv-server", s->config.server_name);
    if (s->leaving && evhttp_find_header(headers, "Connection") == NULL) (void)evhttp_add_header(headers, "Connection", "close");
}

void fleet_add_answer_headers(const exchange *x) {
    char number[32];
    struct evkeyvalq *headers = evhttp_request_get_output_headers(x->req);
    (void)snprintf(number, sizeof number, "%u", x->n_cached);
    (void)evhttp_add_header(headers, "x-flatkv-cached-tokens", number);
    (void)snprintf(number, sizeof number, "%.0f", x->waited_s * 1e3);
    (void)evhttp_add_header(headers, "x-flatkv-wait-ms", number);
}
