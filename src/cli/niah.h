/* Internal declarations of flatkv niah, shared by the single-fact grid (niah_grid.c) and the many-fact test (niah_facts.c). */
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
    uint32_t n_haystacks; /* number of haystacks; 0 selects the default, which is 1 for the grid and 3 for many facts */
    uint32_t n_facts;     /* number of planted facts; 0 selects the grid of single facts */
    uint32_t n_asked;
    bool together; /* true to plant the facts for all depths in one haystack */
} niah_options;

typedef struct niah {
    niah_options *o;
    fkv_model *model;
    const fkv_model_info *about;
    haystack haystack;
    uint32_t lengths[MAX_LENGTHS];
    uint32_t n_lengths;
    double depths[MAX_DEPTHS];
    uint32_t n_haystacks;

    token_list frames[3]; /* chat tokens before the haystack, before each answer, and between an answer and the next question */

    model_session session; /* session that uses the current codec */
    memory_line line;
} niah;

/* Fills `frames` if the model has a chat template. Returns an exit code. */
int niah_frames_open(niah *n);
void niah_frames_close(niah *n);

/* Appends the tokens that precede a haystack: the start of a chat message, or the bos token. */
void niah_begin_tokens(const niah *n, token_list *list);

/* Appends the tokens between an answer and the next question. Returns an exit code. */
int niah_next_tokens(const niah *n, token_list *list);

/* Appends the tokens of the question about a fact and the tokens that start the answer. Returns an exit code. */
int niah_add_question(const niah *n, const fact *f, token_list *list);

/* Runs the test with the session's codec, writes the results to `json`, and prints them unless --json was given. Returns an exit
 * code. */
int niah_grid_run(niah *n, const codec_choice *codec, kit_json *json);
int niah_facts_run(niah *n, const codec_choice *codec, kit_json *json);

#endif
