/* See request.h. */
#include "request.h"

#include <math.h>
#include <stdlib.h>

fkv_status fkv_request_check(const fkv_request *r, uint32_t n_vocab) {
    FKV_REQUIRE(r->n_snapshots <= FKV_MAX_MARKS, FKV_BAD_ARGUMENT, "n_snapshots is %u (maximum %d)", r->n_snapshots,
                FKV_MAX_MARKS);
    FKV_REQUIRE(r->event != NULL, FKV_BAD_ARGUMENT, "the request has no event callback");
    FKV_REQUIRE(r->prompt != NULL && r->n_prompt > 0, FKV_BAD_ARGUMENT, "the prompt is empty");
    for (uint32_t i = 0; i < r->n_prompt; i++)
        FKV_REQUIRE(r->prompt[i] < n_vocab, FKV_BAD_ARGUMENT,
                    "the prompt token at index %u is %u, but the vocabulary has only %u tokens", i, r->prompt[i], n_vocab);
    FKV_REQUIRE(r->n <= FKV_MAX_ANSWERS, FKV_BAD_ARGUMENT, "n is %u: at most %d answers are allowed", r->n, FKV_MAX_ANSWERS);
    FKV_REQUIRE(r->n_stops <= FKV_MAX_STOPS, FKV_BAD_ARGUMENT, "the request has %u stop strings; at most %d are allowed",
                r->n_stops, FKV_MAX_STOPS);
    FKV_REQUIRE(r->n_stops == 0 || r->stops != NULL, FKV_BAD_ARGUMENT, "n_stops is %u, but stops is NULL", r->n_stops);
    for (uint32_t i = 0; i < r->n_stops; i++) {
        size_t n = r->stops[i] != NULL ? strlen(r->stops[i]) : 0;
        FKV_REQUIRE(n > 0 && n <= FKV_MAX_STOP_BYTES, FKV_BAD_ARGUMENT,
                    "the stop string at index %u is %zu bytes long: expected 1 to %d", i, n, FKV_MAX_STOP_BYTES);
    }
    FKV_REQUIRE(r->n_top <= FKV_MAX_LOGPROBS, FKV_BAD_ARGUMENT, "n_top is %u: at most %d log probabilities are allowed", r->n_top,
                FKV_MAX_LOGPROBS);
    FKV_REQUIRE(isfinite(r->weight) && r->weight >= 0.0, FKV_BAD_ARGUMENT, "weight is %g: expected 0 or more", r->weight);
    FKV_REQUIRE(isfinite(r->deadline_s) && r->deadline_s >= 0.0, FKV_BAD_ARGUMENT, "deadline_s is %g: expected 0 or more",
                r->deadline_s);
    for (uint32_t i = 0; i < r->sampler.n_bias; i++)
        FKV_REQUIRE(r->sampler.bias[i].token < n_vocab, FKV_BAD_ARGUMENT,
                    "a logit bias is set for token %u, but the vocabulary has only %u tokens", r->sampler.bias[i].token, n_vocab);
    fkv_sampler_config options = r->sampler; /* these options are validated by opening a sampler with them */
    fkv_sampler *probe = NULL;
    options.n_bias = 0;
    FKV_TRY(fkv_sampler_open(&options, 1, &probe));
    fkv_sampler_close(probe);
    return FKV_OK;
}

static size_t longest_stop(const fkv_request *r) {
    size_t most = 4; /* size of the longest UTF-8 character, in bytes */
    for (uint32_t i = 0; i < r->n_stops; i++)
        if (strlen(r->stops[i]) > most) most = strlen(r->stops[i]);
    return most;
}

fkv_job *fkv_job_make(const fkv_request *r, uint32_t max_new, size_t max_token_bytes, uint32_t max_keys) {
    uint32_t n = r->n != 0 ? r->n : 1;
    size_t n_tokens = (size_t)r->n_prompt + max_new;
    size_t held_bytes = longest_stop(r) + max_token_bytes;
    size_t stop_bytes = 0;
    for (uint32_t i = 0; i < r->n_stops; i++) stop_bytes += strlen(r->stops[i]) + 1;
    size_t n_bias = r->sampler.n_bias;
    size_t head = sizeof(fkv_job) + n * sizeof(fkv_answer) + r->n_stops * sizeof(char *) + n_bias * sizeof(fkv_logit_bias);
    fkv_job *job = malloc(head + n * n_tokens * sizeof(uint32_t) + max_keys * sizeof(fkv_page_key) + n * held_bytes + stop_bytes);
    if (job == NULL) return NULL;
    memset(job, 0, sizeof *job + n * sizeof(fkv_answer));
    job->r = *r;
    job->r.n = n;
    job->r.max_new = max_new;
    job->n_unfinished = n;
    const char **stops = (const char **)(void *)(job->answers + n);
    fkv_logit_bias *bias = (fkv_logit_bias *)(void *)(stops + r->n_stops);
    uint32_t *tokens = (uint32_t *)(void *)(bias + n_bias);
    if (n_bias > 0) memcpy(bias, r->sampler.bias, n_bias * sizeof *bias);
    job->r.sampler.bias = bias;
    job->keys = (fkv_page_key *)(void *)(tokens + n * n_tokens);
    job->r.tenant_name = NULL;
    char *bytes = (char *)(job->keys + max_keys);
    for (uint32_t i = 0; i < n; i++) {
        job->answers[i].tokens = tokens + i * n_tokens;
        memcpy(job->answers[i].tokens, r->prompt, r->n_prompt * sizeof(uint32_t));
        job->answers[i].drafts = fkv_draft_record_init();
        job->answers[i].text = (fkv_answer_text){.held = bytes, .capacity = held_bytes};
        bytes += held_bytes;
    }
    for (uint32_t i = 0; i < r->n_stops; i++) {
        size_t length = strlen(r->stops[i]) + 1;
        stops[i] = memcpy(bytes, r->stops[i], length);
        bytes += length;
    }
    job->r.prompt = job->answers[0].tokens;
    job->r.stops = stops;
    job->stops = (fkv_stop_list){stops, r->n_stops};
    return job;
}

void fkv_job_cancel(fkv_job *job, uint64_t n_steps) {
    if (atomic_load_explicit(&job->cancelled, memory_order_relaxed)) return;
    job->cancelled_at_step = n_steps;
    atomic_store_explicit(&job->cancelled, true, memory_order_release);
}

uint64_t fkv_job_hash(const fkv_job *job) {
    uint64_t hash = (uint64_t)job->r.n << 32 | job->r.max_new;
    for (uint32_t i = 0; i < job->r.n_prompt; i++) {
        hash = (hash ^ job->r.prompt[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return hash;
}

void fkv_job_free(fkv_job *job) {
    if (job == NULL) return;
    for (uint32_t i = 0; i < job->r.n; i++) fkv_sampler_close(job->answers[i].sampler);
    free(job);
}
