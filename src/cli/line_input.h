/* Reads lines of input. On a terminal, the user can edit the line and recall earlier lines.
 */
#ifndef FKV_CLI_LINE_INPUT_H
#define FKV_CLI_LINE_INPUT_H

#include "text.h"

typedef struct line_input line_input;

typedef enum line_answer {
    LINE_TURN,        /* a line was read, or several lines between """ and """ */
    LINE_END,         /* end of input */
    LINE_INTERRUPTED, /* the user pressed Ctrl-C, and the typed text was discarded */
} line_answer;

line_input *line_input_open(void);
void line_input_close(line_input *in); /* NULL is allowed */

bool line_input_is_terminal(const line_input *in);

/* Returns whether line_input_prefill() has an effect, which requires a terminal with line editing. */
bool line_input_can_edit(const line_input *in);

/* Starts the next line with this text, which the user can edit. Control characters become spaces. */
void line_input_prefill(line_input *in, const char *text, size_t n);

line_answer line_input_read(line_input *in, text_buffer *turn);

#endif
