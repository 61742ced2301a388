/* See generation.h. */
#include "generation.h"

#include "../kit/numbers.h"
#include "cli.h"

#include <string.h>

static const char DIM[] = "\x1b[2m";
static const char NORMAL[] = "\x1b[0m";

const char *stop_reason_name(stop_reason reason) {
    static const char *const names[] = {"end", "length", "context", "interrupted", "stop"};
    return names[reason];
}

bool generation_is_end(const fkv_model_info *about, uint32_t token) {
    for (uint32_t i = 0; i < about->n_end; i++)
        if (about->end[i] == token) return true;
    return false;
}

/* ---- output ---- */

/* Prints a fragment of an answer. Reasoning and tool calls are printed only on a terminal, and dimmed. */
static void print_reply_part(generation *g, fkv_reply_kind kind, const char *bytes, size_t n) {
    bool dim = kind != FKV_REPLY_TEXT;
    bool was_dim = g->shown != FKV_REPLY_TEXT;
    if (dim && (!g->out.terminal || g->hide_reasoning)) return;
    if (dim != was_dim && g->out.file != NULL) {
        if (was_dim) (void)fputs("\n\n", g->out.file);
        if (g->out.terminal) (void)fputs(dim ? DIM : NORMAL, g->out.file);
    }
    g->shown = (int)kind;
    text_stream_put(&g->out, bytes, n);
}

static void end_reply_output(generation *g) {
    text_stream_end(&g->out);
    if (g->shown != FKV_REPLY_TEXT && g->out.terminal) (void)fputs(NORMAL, g->out.file);
    g->shown = FKV_REPLY_TEXT;
    if (g->out.file != NULL) (void)fflush(g->out.file);
}

static void handle_reply_event(void *user, const fkv_reply_event *event) {
    generation *g = user;
    switch (event->kind) {
    case FKV_REPLY_TEXT: text_add(&g->text, event->bytes, event->n_bytes); break;
    case FKV_REPLY_REASONING: text_add(&g->reasoning, event->bytes, event->n_bytes); break;
    case FKV_REPLY_CALL:
        text_add(&g->calls, event->bytes, event->n_bytes);
        text_add(&g->calls, " ", 1);
        print_reply_part(g, FKV_REPLY_CALL, "\n", g->text.n > 0 ? 1 : 0);
        print_reply_part(g, FKV_REPLY_CALL, event->bytes, event->n_bytes);
        print_reply_part(g, FKV_REPLY_CALL, " ", 1);
        return;
    case FKV_REPLY_ARGUMENTS: text_add(&g->calls, event->bytes, event->n_bytes); break;
    case FKV_REPLY_CALL_END:
        text_add(&g->calls, "\n", 1);
        print_reply_part(g, FKV_REPLY_CALL, "\n", 1);
        return;
    }
    print_reply_part(g, event->kind, event->bytes, event->n_bytes);
}

/* ---- sampling loop ---- */

static int open_reply(generation *g, const uint32_t *prompt, size_t n_prompt, fkv_reply **reply) {
    fkv_reply_config config = fkv_reply_config_default();
    if (g->plain) config.syntax = (fkv_reply_syntax){FKV_REASONING_NONE, FKV_TOOLS_NONE};
    config.prompt = prompt;
    config.n_prompt = n_prompt;
    config.stop = g->stop;
    config.n_stop = g->n_stop;
    config.on_event = handle_reply_event;
    config.user = g;
    fkv_status status = fkv_reply_open(g->session->model, &config, reply);
    fkv_sampler_forget(g->sampler);
    if (status == FKV_OK) status = fkv_sampler_note(g->sampler, prompt, n_prompt);
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}

static int sample_tokens(generation *g, fkv_reply *reply, const float *logits) {
    const fkv_model_info *about = fkv_model_about(g->session->model);
    while (g->tokens.n < g->max_new) {
        uint32_t token = 0;
        fkv_status status = fkv_sample(g->sampler, logits, &token);
        if (status != FKV_OK) return cli_fail_status(status);
        if (!g->ignore_end && generation_is_end(about, token)) {
            g->stopped = STOP_END;
            break;
        }
        token_list_add(&g->tokens, &token, 1);
        (void)fkv_reply_token(reply, token);
        g->last_is_fed = false;
        if (fkv_reply_stopped(reply)) {
            g->stopped = STOP_TEXT;
            break;
        }
        if (g->tokens.n == g->max_new) break;
        if (g->session->length == g->session->max_tokens) {
            g->stopped = STOP_CONTEXT;
            break;
        }
        double start = kit_seconds();
        int code = session_feed(g->session, &token, 1, &logits, NULL);
        if (code == EXIT_INTERRUPTED) {
            g->stopped = STOP_INTERRUPTED;
            break;
        }
        if (code != EXIT_GOOD) return code;
        g->seconds += kit_seconds() - start;
        g->n_steps++;
        g->last_is_fed = true;
    }
    return EXIT_GOOD;
}

int generation_run(generation *g, const uint32_t *prompt, size_t n_prompt, const float *logits) {
    fkv_reply *reply = NULL;
    g->stopped = STOP_LENGTH;
    g->last_is_fed = true;
    g->shown = FKV_REPLY_TEXT;
    int code = open_reply(g, prompt, n_prompt, &reply);
    if (code == EXIT_GOOD) code = sample_tokens(g, reply, logits);
    if (reply != NULL) (void)fkv_reply_end(reply);
    fkv_reply_close(reply);
    end_reply_output(g);
    return code;
}

void generation_clear(generation *g) {
    g->tokens.n = 0;
    g->text.n = 0;
    g->reasoning.n = 0;
    g->calls.n = 0;
    g->seconds = 0;
    g->n_steps = 0;
}

void generation_free(generation *g) {
    token_list_free(&g->tokens);
    text_free(&g->text);
    text_free(&g->reasoning);
    text_free(&g->calls);
    fkv_sampler_close(g->sampler);
    g->sampler = NULL;
}
