/* See sampling_options.h. */
#include "sampling_options.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

sampling_options sampling_options_default(void) {
    return (sampling_options){.temperature = -1,
                              .top_p = -1,
                              .min_p = -1,
                              .repetition = -1,
                              .presence = -1,
                              .frequency = -1,
                              .top_k = UINT32_MAX,
                              .last = 64};
}

void sampling_options_list(sampling_options *o, kit_option list[N_SAMPLING_OPTIONS]) {
    const kit_option options[N_SAMPLING_OPTIONS] = {
        {"temperature", 't', OPTION_REAL, &o->temperature, 0, "X",
         "sampling temperature; 0 takes the most likely token. Default of this and the next: what the\nmodel's files say for a chat, else 0.7 with -i and "
         "0 without"},
        {"top-k", 0, OPTION_U32, &o->top_k, INT32_MAX, "N", "sample from the N most likely tokens; 0: all"},
        {"top-p", 0, OPTION_REAL, &o->top_p, 0, "X", "sample from the most likely tokens with total probability X; 1: all"},
        {"min-p", 0, OPTION_REAL, &o->min_p, 0, "X", "drop tokens less likely than X times the most likely; 0: none"},
        {"repeat-penalty", 0, OPTION_REAL, &o->repetition, 0, "X", "makes tokens that were there less likely; 1: off"},
        {"presence-penalty", 0, OPTION_REAL, &o->presence, 0, "X", "taken off the logits of tokens that were there (default 0)"},
        {"frequency-penalty", 0, OPTION_REAL, &o->frequency, 0, "X", "the same for each time they were there (default 0)"},
        {"penalty-last", 0, OPTION_U32, &o->last, INT32_MAX, "N", "penalties look at the last N tokens; 0: all (default 64)"},
        {"logit-bias", 0, OPTION_TEXTS, &o->bias, 0, "TOKEN=X", "added to the logit of a token (flatkv tokenize); -inf: never"},
        {"stop", 0, OPTION_TEXTS, &o->stop, 0, "TEXT", "ends an answer before this text; may be given 16 times"},
        {"reasoning", 0, OPTION_CHOICE, &o->reasoning, 0, "show|hide",
         "what a model thinks before it answers: dim on a terminal, or not at all; a pipe\ngets the answer alone (default show)"},
        {0}};
    memcpy(list, options, sizeof options);
}

static int read_bias(const char *text, uint32_t n_vocab, fkv_logit_bias *bias) {
    char *end = NULL;
    errno = 0;
    unsigned long token = strtoul(text, &end, 10);
    bool good = errno == 0 && end != text && *end == '=' && token < n_vocab;
    if (good) {
        const char *number = end + 1;
        *bias = (fkv_logit_bias){.token = (uint32_t)token, .bias = strtof(number, &end)};
        good = end != number && *end == 0;
    }
    if (good) return EXIT_GOOD;
    return kit_fail(EXIT_USAGE, "--logit-bias %s: the number of a token (0 to %u), = and a number, as 50=-1.5 or 50=-inf", text,
                    n_vocab - 1);
}

static void take_real(double said, float *target) {
    if (said >= 0) *target = (float)said;
}

int sampling_options_config(const sampling_options *o, const fkv_model *model, sampling_use how, uint64_t seed,
                            fkv_logit_bias *biases, fkv_sampler_config *config) {
    bool said = false;
    fkv_sampler_config c = fkv_model_sampling(model, &said);
    if (how == SAMPLE_TEXT || (how == SAMPLE_ANSWER && !said)) c = fkv_sampler_config_default();
    take_real(o->temperature, &c.temperature);
    take_real(o->top_p, &c.top_p);
    take_real(o->min_p, &c.min_p);
    take_real(o->repetition, &c.repetition_penalty);
    take_real(o->presence, &c.presence_penalty);
    take_real(o->frequency, &c.frequency_penalty);
    if (o->top_k != UINT32_MAX) c.top_k = o->top_k;
    c.penalty_tokens = o->last;
    c.seed = seed;
    if (o->bias.n > SAMPLING_BIASES) return kit_fail(EXIT_USAGE, "--logit-bias %u times: at most %d", o->bias.n, SAMPLING_BIASES);
    if (o->stop.n > FKV_MAX_STOPS) return kit_fail(EXIT_USAGE, "--stop %u times: at most %d", o->stop.n, FKV_MAX_STOPS);
    for (uint32_t i = 0; i < o->bias.n; i++) {
        int code = read_bias(o->bias.texts[i], fkv_model_about(model)->n_vocab, &biases[i]);
        if (code != EXIT_GOOD) return code;
    }
    c.bias = biases;
    c.n_bias = o->bias.n;
    *config = c;
    return EXIT_GOOD;
}
