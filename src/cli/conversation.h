/* run -i: turns read from standard input, answered one after another. The pages of all turns stay; a turn costs its own tokens.
 */
#ifndef FKV_CLI_CONVERSATION_H
#define FKV_CLI_CONVERSATION_H

#include "generation.h"

/* chat: turns are messages in frames; else they are text, completed. Ends at the end of the
 * input, at Ctrl-C between answers, or when the context is full. Exit code. */
int conversation_hold(generation *g, bool chat, const char *system);

#endif
