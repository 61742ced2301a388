/* Reference of the stress test. It has the tokens, their K, V and Q rows and the stored form of the rows, and computes attention
 * over the stored rows in double precision.
 *
 * A token's rows and queries depend on its whole history (the tenant and every token before it), as they do in a model. Sequences
 * with the same history must therefore have the same rows and bit-identical outputs. Rows of another history or tenant have
 * different values.
 */
#ifndef FKV_STRESS_REFERENCE_H
#define FKV_STRESS_REFERENCE_H

#include "stress_config.h"

/* A token with its history. Created once and kept until the fixture is closed. */
typedef struct stress_token {
    uint64_t chain; /* hash of the token and its history */
    uint32_t id;
    uint32_t position;
    float *stored;   /* decoded K and V of every layer: [layer][K or V][G, D or R] */
    uint8_t *bytes;  /* stored bytes of the same rows: [layer][K or V][G, row bytes] */
    float *sealed;   /* decoded rows of the sealed page that ends with this token: [layer][K or V][T, G, D]; NULL until needed */
    uint8_t *blocks; /* stored bytes of the same page: [layer][G, block bytes] */
    uint64_t *answers; /* for each layer, hash of the first output that was computed for this token; 0 if none was computed yet */
    struct stress_token *next;
} stress_token;

typedef struct stress_fixture {
    const stress_config *config;
    uint32_t n_layers;
    size_t stored_at[STRESS_MAX_LAYERS][STRESS_N_SIDES];
    size_t bytes_at[STRESS_MAX_LAYERS][STRESS_N_SIDES];
    size_t sealed_at[STRESS_MAX_LAYERS][STRESS_N_SIDES];
    size_t blocks_at[STRESS_MAX_LAYERS];
    size_t sealed_floats;
    size_t blocks_bytes;
    size_t stored_floats;
    size_t stored_bytes;
    stress_token **buckets;
    double *weights; /* [longest history] */
    uint64_t memory;
    uint64_t n_answers;       /* number of query-head rows compared with the reference */
    uint64_t n_sealed;        /* number of query-head rows that read a sealed page */
    uint64_t n_calibrated;    /* number of query-head rows that read a sealed page with calibrated keys */
    uint64_t n_latent;        /* number of query-head rows of latent layers */
    uint64_t n_sealed_latent; /* number of query-head rows of latent layers that read a sealed page */
    uint64_t n_turbo;         /* number of query-head rows that read TurboQuant codes */
    uint64_t n_same;          /* number of outputs that were bit-identical to an earlier output of the same token */
    uint64_t n_slack;  /* number of query-head rows that matched only with the additional tolerance for ill-conditioned sums */
    uint64_t n_beyond; /* number of query-head rows that were not compared, because their scores overflow a float */
    double worst;      /* largest relative L2 error of a row that matched without the additional tolerance */
} stress_fixture;

void stress_fixture_open(stress_fixture *fixture, const stress_config *config, uint32_t most_tokens);
void stress_fixture_close(stress_fixture *fixture);

/* Returns the initial chain hash of a tenant. */
uint64_t stress_chain_begin(const stress_fixture *fixture, uint64_t tenant);

/* Returns the token `id` that follows the history `before`. */
stress_token *stress_token_after(stress_fixture *fixture, uint64_t before, uint32_t position, uint32_t id);

/* Returns the same token with a NaN in one stored row. Only a page file can contain such a row. */
stress_token *stress_token_with_nan(stress_fixture *fixture, uint64_t before, uint32_t position, uint32_t id);

/* Generates rows in the row type. what: STRESS_K, STRESS_V ([G, D]) or STRESS_Q ([H, D]). In a latent layer, STRESS_K is a whole
 * row ([1, D + R]), STRESS_V is empty, and STRESS_Q is [H, D + R]. */
void stress_rows(const stress_fixture *fixture, const stress_token *token, uint32_t layer, uint32_t what, uint8_t *rows);
size_t stress_rows_bytes(const stress_fixture *fixture, uint32_t layer, uint32_t what);

/* Returns the size of the output of one token: [H, D] in the row type. */
size_t stress_answer_bytes(const stress_fixture *fixture, uint32_t layer);

const uint8_t *stress_stored_row(const stress_fixture *fixture, const stress_token *token, uint32_t layer, uint32_t side,
                                 uint32_t head);

/* Returns the sealed block of a full page of a sealed layer. */
const uint8_t *stress_sealed_block(stress_fixture *fixture, stress_token *const *history, uint32_t page, uint32_t layer,
                                   uint32_t head);
size_t stress_sealed_block_bytes(const stress_config *config, uint32_t layer);

/* Checks one layer's output for the last of `n` tokens against the reference. The output must also be bit-identical to earlier
 * outputs of the same token. answer: [H, D] in the row type */
void stress_check_answer(stress_fixture *fixture, stress_token *const *history, uint32_t n, uint32_t layer,
                         const uint8_t *answer);

#endif
