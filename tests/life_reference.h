/* What every answer must be: the tokens of a life, the rows they were computed from, the rows as the format stores them, and
 * plain attention over those in double.
 *
 * A token's rows and queries are a function of its whole history (tenant, then every token up to itself), as they are in a model.
 * So whoever comes to the same history must find the same rows and, to the bit, the same answers, whatever happened on the way;
 * and rows that belong to another history or another tenant are other numbers.
 */
#ifndef FKV_LIFE_REFERENCE_H
#define FKV_LIFE_REFERENCE_H

#include "life_config.h"

/* One token with one history. Made once, kept until the world ends. */
typedef struct life_token {
    uint64_t chain; /* of its history */
    uint32_t id;
    uint32_t position;
    float *stored;     /* K and V of every layer as a reader decodes them: [layer][side][G, D] */
    uint8_t *bytes;    /* the same as stored: [layer][side][G, row bytes] */
    float *sealed;     /* of the page that it ends, in sealed layers: [layer][side][T, G, D]; NULL: not asked for yet */
    uint8_t *blocks;   /* the same as stored: [layer][G, block bytes] */
    uint64_t *answers; /* [layers]: what the first answer's bits were, 0: none yet */
    struct life_token *next;
} life_token;

typedef struct life_world {
    const life_config *config;
    uint32_t n_layers;
    size_t stored_at[LIFE_MAX_LAYERS][LIFE_N_SIDES];
    size_t bytes_at[LIFE_MAX_LAYERS][LIFE_N_SIDES];
    size_t sealed_at[LIFE_MAX_LAYERS][LIFE_N_SIDES];
    size_t blocks_at[LIFE_MAX_LAYERS];
    size_t sealed_floats;
    size_t blocks_bytes;
    size_t stored_floats;
    size_t stored_bytes;
    life_token **buckets;
    double *weights; /* [longest history] */
    uint64_t memory;
    uint64_t n_answers;    /* rows of one query head that were compared with the reference */
    uint64_t n_sealed;     /* of them over a sealed page */
    uint64_t n_calibrated; /* and of calibrated keys */
    uint64_t n_turbo;      /* over rows of TurboQuant */
    uint64_t n_same;       /* answers of a token that were there before, to the bit */
    uint64_t n_slack;      /* that needed the slack of ill-conditioned sums */
    uint64_t n_beyond;     /* whose scores no float holds: not compared */
    double worst;          /* relative L2 error without slack */
} life_world;

void life_world_open(life_world *world, const life_config *config, uint32_t most_tokens);
void life_world_close(life_world *world);

/* Where a history of this tenant begins. */
uint64_t life_chain_begin(const life_world *world, uint64_t tenant);

/* The token `id` behind the history `before`. */
life_token *life_token_after(life_world *world, uint64_t before, uint32_t position, uint32_t id);

/* The same token with a NaN in one of its stored rows, as no writer leaves it: only a file can bring it. */
life_token *life_token_with_nan(life_world *world, uint64_t before, uint32_t position, uint32_t id);

/* Rows as the model gives them, of the row type. what: LIFE_K, LIFE_V ([G, D]) or LIFE_Q ([H, D]). */
void life_rows(const life_world *world, const life_token *token, uint32_t layer, uint32_t what, uint8_t *rows);
size_t life_rows_bytes(const life_world *world, uint32_t layer, uint32_t what);

const uint8_t *life_stored_row(const life_world *world, const life_token *token, uint32_t layer, uint32_t side, uint32_t head);

/* The sealed block of a full page of a sealed layer, and its size. */
const uint8_t *life_sealed_block(life_world *world, life_token *const *history, uint32_t page, uint32_t layer, uint32_t head);
size_t life_sealed_block_bytes(const life_config *config, uint32_t layer);

/* The answer of the last of `n` tokens in one layer, [H, D] of the row type, against the reference and against the bits that an
 * earlier answer of the same token had. */
void life_check_answer(life_world *world, life_token *const *history, uint32_t n, uint32_t layer, const uint8_t *answer);

#endif
