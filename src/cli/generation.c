/* See generation.h. */
#include "generation.h"

#include "../kit/numbers.h"
#include "cli.h"

const char *stop_reason_name(stop_reason reason) {
    static const char *const names[] = {"end", "length", "context", "interrupted"};
    return names[reason];
}

bool generation_is_end(const fkv_model_info *about, uint32_t token) {
    for (uint32_t i = 0; i < about->n_end; i++)
        if (about->end[i] == token) return true;
    return false;
}

static void emit(generation *g, uint32_t token) {
    size_t n = 0;
    const char *bytes = fkv_token_text(g->session->model, token, false, &n);
    token_list_add(&g->tokens, &token, 1);
    text_add(&g->text, bytes, n);
    text_stream_put(&g->out, bytes, n);
}

int generation_run(generation *g, const float *logits) {
    const fkv_model_info *about = fkv_model_about(g->session->model);
    g->stop = STOP_LENGTH;
    g->last_is_fed = true;
    while (g->tokens.n < g->max_new) {
        uint32_t token = 0;
        fkv_status status = fkv_sample(g->sampler, logits, &token);
        if (status != FKV_OK) return cli_fail_status(status);
        if (!g->ignore_end && generation_is_end(about, token)) {
            g->stop = STOP_END;
            break;
        }
        emit(g, token);
        g->last_is_fed = false;
        if (g->tokens.n == g->max_new) break;
        if (g->session->length == g->session->max_tokens) {
            g->stop = STOP_CONTEXT;
            break;
        }
        double start = kit_seconds();
        int code = session_feed(g->session, &token, 1, &logits, NULL);
        if (code == EXIT_INTERRUPTED) {
            g->stop = STOP_INTERRUPTED;
            break;
        }
        if (code != EXIT_GOOD) return code;
        g->seconds += kit_seconds() - start;
        g->n_steps++;
        g->last_is_fed = true;
    }
    text_stream_end(&g->out);
    return EXIT_GOOD;
}

void generation_clear(generation *g) {
    g->tokens.n = 0;
    g->text.n = 0;
}

void generation_free(generation *g) {
    token_list_free(&g->tokens);
    text_free(&g->text);
    fkv_sampler_close(g->sampler);
    g->sampler = NULL;
}
