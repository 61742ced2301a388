/* What people type: with line editing and history on a terminal, line by line otherwise.
 */
#ifndef FKV_CLI_LINE_INPUT_H
#define FKV_CLI_LINE_INPUT_H

#include "text.h"

typedef struct line_input line_input;

typedef enum line_answer {
    LINE_TURN,        /* a line, or several between """ */
    LINE_END,         /* of the input */
    LINE_INTERRUPTED, /* Ctrl-C: nothing of what was typed counts */
} line_answer;

line_input *line_input_open(void);
void line_input_close(line_input *in); /* NULL is allowed */

bool line_input_is_terminal(const line_input *in);
line_answer line_input_read(line_input *in, text_buffer *turn);

#endif
