/* See page_state.h. */
#include "page_state.h"

enum { MAX_LISTED = 64 };

static json_t *requests_json(const served_model *m) {
    fkv_request_info list[MAX_LISTED];
    uint32_t n = fkv_engine_requests(m->engine, list, MAX_LISTED);
    json_t *out = json_array();
    for (uint32_t i = 0; i < n; i++) {
        const fkv_request_info *r = &list[i];
        (void)json_array_append_new(out, json_pack("{s:I, s:I, s:i, s:I, s:I, s:I, s:I, s:I, s:f}", "id", (json_int_t)r->id,
                                                   "tenant", (json_int_t)r->tenant, "phase", (int)r->phase, "n_prompt",
                                                   (json_int_t)r->n_prompt, "n_cached", (json_int_t)r->n_cached, "n_computed",
                                                   (json_int_t)r->n_computed, "n_new", (json_int_t)r->n_new, "max_new",
                                                   (json_int_t)r->max_new, "age_s", r->age_s));
    }
    return out;
}

static json_t *groups_json(const fkv_stats *stats, const fkv_plan *plan) {
    json_t *out = json_array();
    for (uint32_t i = 0; i < stats->n_groups; i++) {
        const fkv_group_stats *g = &stats->groups[i];
        (void)json_array_append_new(out, json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "pages", (json_int_t)g->pages, "free",
                                                   (json_int_t)g->free, "held", (json_int_t)g->held, "shared",
                                                   (json_int_t)g->shared, "cached", (json_int_t)g->cached, "promised",
                                                   (json_int_t)g->promised, "page_bytes", (json_int_t)plan->group_page_bytes[i]));
    }
    return out;
}

/* Encodes each page of a layer group as two characters: its state as a digit and its tenant as a letter (modulo 26). */
static json_t *map_json(const served_model *m, uint32_t group) {
    static fkv_page_info pages[FKV_MAX_LISTED_PAGES];
    char states[FKV_MAX_LISTED_PAGES + 1] = {0};
    char tenants[FKV_MAX_LISTED_PAGES + 1] = {0};
    uint32_t n = fkv_engine_pages(m->engine, pages, FKV_MAX_LISTED_PAGES);
    for (uint32_t i = 0; i < n; i++) {
        states[i] = (char)('0' + (int)pages[i].state);
        tenants[i] = (char)('a' + (int)(pages[i].tenant % 26));
    }
    return json_pack("{s:I, s:s, s:s}", "group", (json_int_t)group, "states", states, "tenants", tenants);
}

/* Returns the planned memory of a model, in bytes. The memory of the prefix store, which all models share, is part of base_bytes.
 */
static double planned_bytes(const served_model *m) {
    fkv_engine_stats e;
    fkv_engine_stats_now(m->engine, &e);
    return (double)(e.plan.total_bytes + e.store.buffer_bytes);
}

/* Returns the planned memory of all models except m, in bytes. */
static double other_planned_bytes(const server *s, const served_model *m) {
    double sum = 0.0;
    for (uint32_t i = 0; i < s->n_models; i++)
        if (&s->models[i] != m) sum += planned_bytes(&s->models[i]);
    return sum;
}

json_t *page_state(const server *s, const served_model *m, uint64_t resident_bytes) {
    const fkv_model_info *about = fkv_model_about(m->model);
    fkv_engine_stats e;
    fkv_engine_stats_now(m->engine, &e);
    const struct {
        const char *name;
        double value;
    } values[] = {
        {"now", exchange_now()},
        {"resident_bytes", (double)resident_bytes},
        {"planned_bytes", planned_bytes(m)},
        {"store_bytes", (double)e.store.usage.bytes},
        {"store_max_bytes", (double)e.store.usage.max_bytes},
        {"store_pages", (double)e.store.usage.pages},
        {"store_read_pages", (double)e.store.read_pages},
        {"store_written_pages", (double)e.store.written_pages},
        {"base_bytes", (double)s->base_bytes + other_planned_bytes(s, m)},
        {"n_models", s->n_models},
        {"running", e.running},
        {"waiting", e.waiting},
        {"predicted_wait_s", e.predicted_wait_s},
        {"new_tokens", (double)e.new_tokens},
        {"prompt_tokens", (double)e.prompt_tokens},
        {"computed_tokens", (double)e.computed_tokens},
        {"cached_tokens", (double)e.cached_tokens},
        {"finished", (double)(e.finished[FKV_FINISH_END] + e.finished[FKV_FINISH_STOP] + e.finished[FKV_FINISH_LENGTH])},
        {"stopped", (double)(e.finished[FKV_FINISH_CANCELLED] + e.finished[FKV_FINISH_DEADLINE])},
        {"refused", (double)(e.refused_busy + e.refused_size)},
        {"disconnects", (double)s->metrics.disconnects},
        {"page_copies", (double)e.cache.page_copies},
        {"evictions", (double)e.cache.evictions},
        {"max_tokens", (double)e.max_tokens},
        {"first_token_sum", m->latencies.first_token.sum},
        {"first_token_n", (double)m->latencies.first_token.n},
        {"between_sum", m->latencies.between_tokens.sum},
        {"between_n", (double)m->latencies.between_tokens.n},
    };
    json_t *out = json_pack("{s:s, s:s, s:s, s:o, s:o, s:o}", "model", m->name, "architecture", about->architecture, "isa",
                            e.cache.isa != NULL ? e.cache.isa : "", "groups", groups_json(&e.cache, &e.plan.cache), "requests",
                            requests_json(m), "map", map_json(m, e.page_group));
    for (size_t i = 0; out != NULL && i < sizeof values / sizeof values[0]; i++)
        (void)json_object_set_new(out, values[i].name, json_real(values[i].value));
    return out;
}

/* ---- llama.cpp ---- */

json_t *props_state(const served_model *m) {
    const fkv_sampler_config sampler = fkv_model_sampling(m->model, NULL);
    fkv_engine_stats e;
    fkv_engine_stats_now(m->engine, &e);
    json_t *params = json_pack("{s:I, s:f, s:I, s:f, s:f, s:f}", "n_predict", (json_int_t)e.default_new, "temperature",
                               (double)sampler.temperature, "top_k", (json_int_t)sampler.top_k, "top_p", (double)sampler.top_p,
                               "min_p", (double)sampler.min_p, "repeat_penalty", (double)sampler.repetition_penalty);
    return json_pack("{s:{s:I, s:o}, s:I, s:s, s:s, s:{s:b, s:b}, s:o}", "default_generation_settings", "n_ctx",
                     (json_int_t)e.max_request_tokens, "params", params, "total_slots", (json_int_t)m->parallel, "model_alias",
                     m->name, "model_path", m->name, "modalities", "vision", 0, "audio", 0, "build_info",
                     json_sprintf("flatkv %d.%d.%d", FKV_VERSION_MAJOR, FKV_VERSION_MINOR, FKV_VERSION_PATCH));
}

json_t *slots_state(const served_model *m) {
    fkv_request_info list[MAX_LISTED];
    const uint32_t n = fkv_engine_requests(m->engine, list, MAX_LISTED);
    json_t *out = json_array();
    for (uint32_t i = 0; i < m->parallel; i++) {
        const bool busy = i < n && list[i].phase != FKV_PHASE_WAITING; /* the list starts with the running requests */
        (void)json_array_append_new(
            out, json_pack("{s:I, s:I, s:I, s:b, s:I, s:I}", "id", (json_int_t)i, "id_task", busy ? (json_int_t)list[i].id : -1,
                           "n_ctx", (json_int_t)m->max_request_tokens, "is_processing", (int)busy, "n_prompt_tokens",
                           busy ? (json_int_t)list[i].n_prompt : 0, "n_decoded", busy ? (json_int_t)list[i].n_new : 0));
    }
    return out;
}
