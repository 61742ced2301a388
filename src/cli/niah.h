/* flatkv niah, inside: what the grid of single facts and the test of many facts share.
 */
#ifndef FKV_CLI_NIAH_H
#define FKV_CLI_NIAH_H

#include "haystack.h"
#include "memory_line.h"
#include "model_options.h"
#include "session.h"

enum { MAX_LENGTHS = 16, MAX_DEPTHS = 101, NIAH_LOGIT_ROWS = 32 };

typedef struct niah_options {
    model_options model;
    const char *file;
    const char *lengths;
    const char *svg;
    const char *line;
    uint32_t n_depths;
    uint32_t n_haystacks; /* 0: 1 for the grid, 3 for many facts */
    uint32_t n_facts;     /* 0: the grid */
    uint32_t n_asked;
    bool together; /* the facts of all depths in one haystack */
} niah_options;

typedef struct niah {
    const niah_options *o;
    fkv_model *model;
    const fkv_model_info *about;
    haystack haystack;
    uint32_t lengths[MAX_LENGTHS];
    uint32_t n_lengths;
    double depths[MAX_DEPTHS];
    uint32_t n_haystacks;

    token_list frames[3]; /* of a chat: what opens a question, what answers it, what ends an answer and opens the next question */

    model_session session; /* of the codec at hand */
    memory_line line;
} niah;

/* Fills the frames where the model has a chat. Returns an exit code, with a message on failure. */
int niah_frames_open(niah *n);
void niah_frames_close(niah *n);

/* Where a haystack begins: the opening of a chat message, or bos. */
void niah_begin_tokens(const niah *n, token_list *list);

/* Between an answer and the next question. */
int niah_next_tokens(const niah *n, token_list *list);

/* The question for a fact, up to where the answer begins. */
int niah_add_question(const niah *n, const fact *f, token_list *list);

/* Runs the session's codec, and writes what it found into `json` and, where JSON was not asked for, prints it. Returns an exit
 * code, with a message on failure.
 */
int niah_grid_run(niah *n, const codec_choice *codec, kit_json *json);
int niah_facts_run(niah *n, const codec_choice *codec, kit_json *json);

#endif
