/* The other side of run -i: what is typed, and the commands that begin with a slash. */
#ifndef FKV_CLI_TALK_H
#define FKV_CLI_TALK_H

#include "conversation.h"
#include "sampling_options.h"

/* What /set changes. */
typedef struct talk_settings {
    fkv_sampler_config sampling;
    const fkv_runner_config *runner; /* what was opened */
} talk_settings;

/* Until the input ends, or /bye. Ctrl-C stops an answer; between answers it ends a conversation that nobody types. Exit code. */
int talk_hold(conversation *c, talk_settings *settings);

#endif
