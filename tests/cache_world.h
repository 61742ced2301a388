/* A cache driven as a model would drive it, for the tests that know only the public header: rows of numbers for every token,
 * steps over any mix of sequences, outputs kept side by side, and what plain attention over the same rows would have given.
 *
 * The rows of a token are a pure function of (seed, token, position, layer, head), so two ways to the same tokens must end in the
 * same outputs, and the truth can be had without asking the code under test. Outputs of a sequence are kept as
 * [position, layer, H, D] of the row type. Every helper aborts the program on a failure that is not its subject, so that any
 * thread may use it.
 */
#ifndef FKV_CACHE_WORLD_H
#define FKV_CACHE_WORLD_H

#include "relative_l2.h"

#include <flatkv/flatkv.h>

/* Sanitizers keep books of their own: resident memory then says nothing about the cache. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CACHE_WORLD_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define CACHE_WORLD_SANITIZED 1
#endif
#endif
#ifndef CACHE_WORLD_SANITIZED
#define CACHE_WORLD_SANITIZED 0
#endif

#define N_OF(array) (sizeof(array) / sizeof((array)[0]))

enum { CACHE_WORLD_LAYERS = 6 };

typedef enum cache_side { CACHE_K = 0, CACHE_V = 1, CACHE_Q = 2 } cache_side;

typedef struct cache_world {
    fkv_config config; /* its layers, where it has any, are those below */
    fkv_layer_config layers[CACHE_WORLD_LAYERS];
    fkv_cache *cache;
    uint64_t seed;       /* of the rows */
    float outliers;      /* two channels of every key are larger by this; 1: none */
    size_t output_bytes; /* of one token over all layers */
    uint8_t *rows[3];    /* k, v, q of one layer of a step */
    uint8_t *out;
} cache_world;

/* The status of fkv_cache_open(); after a failure there is nothing to close. Layers are copied. Seed 1, no outliers. */
fkv_status cache_world_open(cache_world *w, const fkv_config *config);
void cache_world_close(cache_world *w);

const fkv_layer_config *cache_world_layer(const cache_world *w, uint32_t layer);

/* ---- driving ---- */

void cache_tokens(uint64_t seed, uint32_t *tokens, uint32_t n_tokens);

/* The new tokens of one sequence in a step. */
typedef struct cache_chunk {
    fkv_seq seq;
    const uint32_t *tokens; /* of the whole sequence, from position 0 */
    uint32_t first;         /* position of the first new one */
    uint32_t n_tokens;
    uint8_t *outputs; /* of the whole sequence; NULL: not kept */
} cache_chunk;

typedef enum cache_ending { CACHE_COMMIT, CACHE_ABORT } cache_ending;

/* One step over all layers. */
void cache_world_step(cache_world *w, const cache_chunk *chunks, uint32_t n_chunks, cache_ending ending);

/* Tokens [from, to) of one sequence in steps of `chunk`. */
void cache_world_run(cache_world *w, fkv_seq seq, const uint32_t *tokens, uint32_t from, uint32_t to, uint32_t chunk,
                     uint8_t *outputs);

/* Writes the rows of one layer of a step and nothing else. */
fkv_status cache_world_write(cache_world *w, fkv_step *step, const cache_chunk *chunks, uint32_t n_chunks, uint32_t layer);

fkv_seq cache_world_seq(cache_world *w, uint32_t max_tokens);
uint32_t cache_world_length(const cache_world *w, fkv_seq seq);
fkv_stats cache_world_stats(const cache_world *w);

/* ---- the truth ---- */

/* One row, as the row type holds it. row: [D] */
void cache_world_row(const cache_world *w, cache_side side, uint32_t token, uint32_t position, uint32_t layer, uint32_t head,
                     float *row);

/* Attention of the queries at positions [from, to) over the rows as they were before any codec saw them, in double.
 * out: [to - from, H, D] */
void cache_world_truth(const cache_world *w, const uint32_t *tokens, uint32_t from, uint32_t to, uint32_t layer, float *out);

/* Outputs as floats. out: [H, D] */
void cache_world_output(const cache_world *w, const uint8_t *outputs, uint32_t position, uint32_t layer, float *out);

/* ---- the process and its files ---- */

/* Anonymous resident bytes of this process; 0 where the system does not say. Takes no memory. */
uint64_t cache_anonymous_bytes(void);

/* folder/name, in a folder of the process's own under TMPDIR or /tmp that goes when it ends. path: at least 512 bytes, returned.
 */
const char *cache_path(char *path, const char *name);

#endif
