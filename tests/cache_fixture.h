/* Operates a cache with the public API, as a model does: generates K, V and Q rows for every token, runs steps over any mix of
 * sequences, and collects the outputs. Also computes reference attention over the same rows.
 *
 * A token's rows are a pure function of (seed, token, position, layer, head). Two sequences with the same tokens must therefore
 * produce the same outputs, and the reference does not depend on the code under test. The outputs of a sequence are stored as
 * [position, layer, H, D] in the row type. Helpers abort the program on unexpected failures, so they may be called from any
 * thread.
 */
#ifndef FKV_CACHE_FIXTURE_H
#define FKV_CACHE_FIXTURE_H

#include "relative_l2.h"
#include "sanitized.h"

#include <flatkv/flatkv.h>

#define N_OF(array) (sizeof(array) / sizeof((array)[0]))

enum { CACHE_FIXTURE_LAYERS = 6 };

typedef enum cache_side { CACHE_K = 0, CACHE_V = 1, CACHE_Q = 2 } cache_side;

typedef struct cache_fixture {
    fkv_config config; /* if config.layers is not NULL, it points to the array layers[] below */
    fkv_layer_config layers[CACHE_FIXTURE_LAYERS];
    fkv_cache *cache;
    uint64_t seed;       /* seed of the generated rows */
    float outliers;      /* scale of the two outlier channels of every key, relative to the other channels; 1 if there are none */
    size_t output_bytes; /* size of one token's outputs over all layers, in bytes */
    uint8_t *rows[3];    /* K, V and Q rows of one layer in a step */
    uint8_t *out;
} cache_fixture;

/* Opens a cache with a copy of the layers. The fixture has seed 1 and no outlier channels. Returns the status of
 * fkv_cache_open(). After a failure, the fixture need not be closed. */
fkv_status cache_fixture_open(cache_fixture *w, const fkv_config *config);
void cache_fixture_close(cache_fixture *w);

const fkv_layer_config *cache_fixture_layer(const cache_fixture *w, uint32_t layer);

/* ---- steps ---- */

void cache_tokens(uint64_t seed, uint32_t *tokens, uint32_t n_tokens);

/* New tokens of one sequence in a step. */
typedef struct cache_chunk {
    fkv_seq seq;
    const uint32_t *tokens; /* all tokens of the sequence, from position 0 */
    uint32_t first;         /* position of the first new token */
    uint32_t n_tokens;
    uint8_t *outputs; /* outputs of the whole sequence; NULL to discard them */
} cache_chunk;

typedef enum cache_ending { CACHE_COMMIT, CACHE_ABORT } cache_ending;

/* Runs one step over all layers. */
void cache_fixture_step(cache_fixture *w, const cache_chunk *chunks, uint32_t n_chunks, cache_ending ending);

/* Appends tokens [from, to) of one sequence in steps of `chunk` tokens. */
void cache_fixture_run(cache_fixture *w, fkv_seq seq, const uint32_t *tokens, uint32_t from, uint32_t to, uint32_t chunk,
                       uint8_t *outputs);

/* Writes the K and V rows of one layer in a step, without computing attention. */
fkv_status cache_fixture_write(cache_fixture *w, fkv_step *step, const cache_chunk *chunks, uint32_t n_chunks, uint32_t layer);

fkv_seq cache_fixture_seq(cache_fixture *w, uint32_t max_tokens);
uint32_t cache_fixture_length(const cache_fixture *w, fkv_seq seq);
fkv_stats cache_fixture_stats(const cache_fixture *w);

/* ---- reference ---- */

/* Generates one row, rounded to the row type. row: [D], or [D + R] for the keys and queries of a latent layer. The value row of a
 * latent layer is the first D values of its key. */
void cache_fixture_row(const cache_fixture *w, cache_side side, uint32_t token, uint32_t position, uint32_t layer, uint32_t head,
                       float *row);

/* Computes attention in double precision for the queries at positions [from, to), over the unquantized rows. out: [to - from, H,
 * D] */
void cache_fixture_reference(const cache_fixture *w, const uint32_t *tokens, uint32_t from, uint32_t to, uint32_t layer,
                             float *out);

/* Converts the outputs of one position and layer to float. out: [H, D] */
void cache_fixture_output(const cache_fixture *w, const uint8_t *outputs, uint32_t position, uint32_t layer, float *out);

/* ---- process and files ---- */

/* Returns the anonymous resident bytes of this process, or 0 if the system does not report them. Does not allocate. */
uint64_t cache_anonymous_bytes(void);

/* Returns the path of `name` in a temporary folder under TMPDIR or /tmp that is deleted at exit. path: at least 512 bytes. */
const char *cache_path(char *path, const char *name);

#endif
