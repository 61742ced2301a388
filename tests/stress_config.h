/* Draws random configurations from the whole range that the library accepts, at sizes small enough for the reference. */
#ifndef FKV_STRESS_CONFIG_H
#define FKV_STRESS_CONFIG_H

#include "stress_format.h"
#include "stress_random.h"

enum {
    STRESS_SPLITS_DOUBLE = 8192,
    STRESS_MAX_LAYERS = 6, /* attention layers */
    STRESS_MAX_STATES = 3, /* state layers */
    STRESS_MAX_ALL_LAYERS = STRESS_MAX_LAYERS + STRESS_MAX_STATES,
    STRESS_MAX_HEADS_KV = 4,
    STRESS_MAX_KEY_DIM = 2 * FKV_MAX_HEAD_DIM, /* latent channels and RoPE channels */
    STRESS_MAX_SEQS = 10,
    STRESS_MAX_ISAS = 8
};

/* Ranges of the random values: the whole range that the library accepts, except for known limitations. */
typedef struct stress_domain {
    float softcap_least, softcap_most;
    float scale_least, scale_most;
    float key_outlier_most, query_outlier_most; /* largest scale of outlier channels, relative to the other channels */
    float query_most;                           /* largest magnitude in query rows with extreme values */
    float bf16_most;                            /* largest magnitude in extreme K and V rows, if pages are bf16 */
    bool bias_apart; /* true if the tolerance allows for the rounding of key-bias terms, which kernels with integer dot products
                        round before the terms cancel */
    bool zero_rows;  /* true if rows of zeros are generated; now false, because AVX2 negates their biases at 4 bits or fewer */
    bool nan_outside_windows; /* true if NaN rows are loaded into layers with windows, where a masked NaN must not affect the
                                 output */
    bool pins_are_harmless; /* true if the test assumes that pinned pages never cause a rejection; now false, because they can */
} stress_domain;

extern const stress_domain STRESS_DOMAIN;

/* Distribution of the row values. Each kind also includes the rows of all earlier kinds. */
typedef enum stress_numbers {
    STRESS_GAUSSIAN, /* Gaussian rows */
    STRESS_OUTLIERS, /* adds rows with a few larger channels, as in real keys, and rows of zeros, constants and tiny values */
    STRESS_EXTREME   /* adds rows with the largest representable values, infinities and NaNs */
} stress_numbers;

/* Layers are numbered in two ways. In the test, attention layers come first, followed by state layers. In the cache, state layers
 * may be anywhere: layer i of the test is layer at[i] of the cache. */
typedef struct stress_config {
    fkv_config base; /* n_layers counts attention layers; layers are filled in by stress_config_of() */
    fkv_layer_config layers[STRESS_MAX_LAYERS];
    uint32_t n_states; /* number of state layers */
    uint32_t state_bytes[STRESS_MAX_STATES];
    uint32_t at[STRESS_MAX_ALL_LAYERS];
    fkv_layer_config all_layers[STRESS_MAX_ALL_LAYERS];     /* layers of the cache */
    bool one_layer;                                         /* true if all layers use base.layer */
    stress_codec codec[STRESS_MAX_LAYERS][STRESS_N_SIDES];  /* codecs with which rows are first written */
    stress_codec sealed[STRESS_MAX_LAYERS][STRESS_N_SIDES]; /* codecs of sealed pages, for sealed layers */
    stress_numbers numbers;
    uint64_t seed;               /* seed of the rows */
    float outlier[3];            /* scale of the outlier channels of K, V and Q */
    uint32_t outlier_channel[3]; /* index of the outlier channel of K, V and Q, modulo the head dimension */
    float query_size;            /* scale of the queries; larger values give a sharper softmax */
    uint64_t step_work;          /* largest number of multiplications that the reference may need for one step */
    bool long_history;    /* true if the config has one small layer and sequences long enough for attention to double its split
                             length */
    uint32_t n_documents; /* number of documents that prompts are taken from */
} stress_config;

/* Lists the instruction sets that this machine supports and returns their number. */
uint32_t stress_isas(fkv_isa isas[STRESS_MAX_ISAS]);

void stress_config_draw(stress_random *r, const fkv_isa *isas, uint32_t n_isas, stress_config *config);

/* Returns the config in the library's format. The result contains pointers into `config`. */
fkv_config stress_config_of(const stress_config *config);

/* Draws a config with the same identity but different sizes, so that caches of the two configs can exchange page files. */
void stress_config_sibling(stress_random *r, const stress_config *config, stress_config *sibling);

/* Draws a config whose identity differs in one field. */
void stress_config_foreign(stress_random *r, const stress_config *config, stress_config *other);

/* Returns the number of multiplications for one pair of a query token and a cached token, over all layers. */
uint64_t stress_token_work(const stress_config *config);

/* A latent layer has one stored row per token. STRESS_K stands for its latent channels, which are also the values, and STRESS_V
 * stands for its RoPE channels. */
bool stress_layer_is_latent(const stress_config *config, uint32_t layer);
bool stress_layer_is_sealed(const stress_config *config, uint32_t layer);
bool stress_has_sealed_layer(const stress_config *config);
bool stress_has_window(const stress_config *config);
bool stress_has_full_layer(const stress_config *config);

/* Describes the config in one line for the report. */
const char *stress_config_text(const stress_config *config);

#endif
