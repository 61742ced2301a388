/* See ollama_info.h. */
#include "ollama_info.h"

#include <stdio.h>
#include <string.h>

/* Version of Ollama whose API the server follows. Some clients require a minimum version. */
static const char API_VERSION[] = "0.12.0";

/* Formats a number of parameters, such as "135M" or "1.5B". */
static json_t *parameter_size(uint64_t n) {
    if (n >= 1000000000) return json_sprintf("%.1fB", (double)n / 1e9);
    if (n >= 1000000) return json_sprintf("%.0fM", (double)n / 1e6);
    return json_sprintf("%.0fK", (double)n / 1e3);
}

static json_t *details_json(const served_model *m) {
    const fkv_model_info *about = fkv_model_about(m->model);
    return json_pack("{s:s, s:s, s:s, s:[s], s:o, s:s}", "parent_model", "", "format", "gguf", "family", about->architecture,
                     "families", about->architecture, "parameter_size", parameter_size(about->n_parameters), "quantization_level",
                     "");
}

static json_t *listed_model(const server *s, const served_model *m) {
    const fkv_model_info *about = fkv_model_about(m->model);
    char digest[2 * sizeof about->weights_id + 1];
    for (size_t i = 0; i < sizeof about->weights_id; i++) (void)snprintf(digest + 2 * i, 3, "%02x", about->weights_id[i]);
    return json_pack("{s:s, s:s, s:o, s:I, s:s, s:o}", "name", m->name, "model", m->name, "modified_at",
                     ollama_time(s->started_at), "size", (json_int_t)about->file_bytes, "digest", digest, "details",
                     details_json(m));
}

json_t *ollama_tags(const server *s) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < s->n_models; i++) (void)json_array_append_new(list, listed_model(s, &s->models[i]));
    return json_pack("{s:o}", "models", list);
}

static json_t *running_model(const server *s, const served_model *m) {
    json_t *model = listed_model(s, m);
    fkv_engine_stats stats;
    fkv_engine_stats_now(m->engine, &stats);
    (void)json_object_set_new(model, "size_vram", json_integer((json_int_t)stats.plan.total_bytes));
    (void)json_object_set_new(model, "context_length", json_integer(m->max_request_tokens));
    (void)json_object_set_new(model, "expires_at", json_string("9999-12-31T23:59:59Z")); /* models are never unloaded */
    (void)json_object_del(model, "modified_at");
    return model;
}

json_t *ollama_running(const server *s) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < s->n_models; i++) (void)json_array_append_new(list, running_model(s, &s->models[i]));
    return json_pack("{s:o}", "models", list);
}

json_t *ollama_version(void) {
    char own[32];
    (void)snprintf(own, sizeof own, "%d.%d.%d", FKV_VERSION_MAJOR, FKV_VERSION_MINOR, FKV_VERSION_PATCH);
    return json_pack("{s:s, s:s}", "version", API_VERSION, "flatkv", own);
}

static json_t *capabilities_json(const served_model *m) {
    json_t *list = json_pack("[s]", "completion");
    if (!fkv_model_about(m->model)->has_chat) return list;
    const fkv_reply_syntax syntax = fkv_reply_syntax_of(m->model);
    if (syntax.tools != FKV_TOOLS_NONE) (void)json_array_append_new(list, json_string("tools"));
    if (syntax.reasoning != FKV_REASONING_NONE) (void)json_array_append_new(list, json_string("thinking"));
    return list;
}

/* Adds a number with the key ARCHITECTURE.NAME. */
static void set_number(json_t *info, const char *architecture, const char *name, uint64_t value) {
    char key[96];
    (void)snprintf(key, sizeof key, "%.48s.%s", architecture, name);
    (void)json_object_set_new(info, key, json_integer((json_int_t)value));
}

json_t *ollama_show(const server *s, const served_model *m) {
    const fkv_model_info *about = fkv_model_about(m->model);
    json_t *info = json_pack("{s:s, s:I}", "general.architecture", about->architecture, "general.parameter_count",
                             (json_int_t)about->n_parameters);
    set_number(info, about->architecture, "context_length", about->context);
    set_number(info, about->architecture, "embedding_length", about->dim);
    set_number(info, about->architecture, "block_count", about->n_layers);
    set_number(info, about->architecture, "attention.head_count", about->n_q_heads);
    set_number(info, about->architecture, "attention.head_count_kv", about->n_kv_heads);
    return json_pack("{s:s, s:s, s:s, s:o, s:o, s:o, s:o}", "modelfile", "", "parameters", "", "template", "", "details",
                     details_json(m), "model_info", info, "capabilities", capabilities_json(m), "modified_at",
                     ollama_time(s->started_at));
}
