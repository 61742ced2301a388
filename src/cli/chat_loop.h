/* Interactive loop of flatkv run -i: reads messages and slash commands until the input ends. */
#ifndef FKV_CLI_CHAT_LOOP_H
#define FKV_CLI_CHAT_LOOP_H

#include "conversation.h"
#include "sampling_options.h"

typedef struct chat_settings {
    fkv_sampler_config sampling;     /* changed by /set */
    const fkv_runner_config *runner; /* configuration with which the runner was opened */
} chat_settings;

/* Runs until the input ends or the user types /bye. Ctrl-C stops an answer. Between answers, Ctrl-C ends the loop if the input is
 * not a terminal. Returns an exit code. */
int chat_loop_run(conversation *c, chat_settings *settings);

#endif
