/* Random configurations: all that the library accepts, in sizes that a plain reference can follow. */
#ifndef FKV_LIFE_CONFIG_H
#define FKV_LIFE_CONFIG_H

#include "life_format.h"
#include "life_random.h"

enum { LIFE_PIECES_DOUBLE = 8192, LIFE_MAX_LAYERS = 6, LIFE_MAX_HEADS_KV = 4, LIFE_MAX_SEQS = 10, LIFE_MAX_ISAS = 8 };

/* What is drawn: all that the library accepts, less where a defect is known. */
typedef struct life_domain {
    float softcap_least, softcap_most;
    float scale_least, scale_most;
    float key_outlier_most, query_outlier_most; /* times the other channels */
    float query_most;                           /* saturated queries */
    float bf16_most;                            /* saturated rows of bf16 pages */
    bool bias_apart;         /* integer products: the bias of a key meets the query apart, and large ones cancel */
    bool zero_rows;          /* AVX2 gives the bias of zeros rotated into 4 bits or fewer another sign */
    bool nan_behind_windows; /* a NaN that a window hides reaches the answer */
    bool pins_are_harmless;  /* a sequence whose pages are in the prefix tree can hold more than it was admitted for */
} life_domain;

extern const life_domain LIFE_DOMAIN;

/* What the numbers of a configuration are like. Each adds to those before it. */
typedef enum life_numbers {
    LIFE_GAUSSIAN, /* Gaussian rows */
    LIFE_OUTLIERS, /* a few channels larger, always the same ones, as real keys have; rows of zeros, constants, tiny numbers */
    LIFE_EXTREME   /* saturated rows, infinities, NaN */
} life_numbers;

typedef struct life_config {
    fkv_config base; /* its layers are set by life_config_of() */
    fkv_layer_config layers[LIFE_MAX_LAYERS];
    bool one_layer;                                   /* all layers are base.layer */
    life_codec codec[LIFE_MAX_LAYERS][LIFE_N_SIDES];  /* of rows as they are written */
    life_codec sealed[LIFE_MAX_LAYERS][LIFE_N_SIDES]; /* of the full pages of sealed layers */
    life_numbers numbers;
    uint64_t seed;               /* of the rows */
    float outlier[3];            /* of K, V and Q: how much larger the outliers' channels are */
    uint32_t outlier_channel[3]; /* modulo the head dimension */
    float query_size;            /* larger: sharper softmax */
    uint64_t step_work;          /* products that one step's answers may cost the reference */
    bool long_history;           /* one small layer, sequences beyond the token where pieces of attention double */
    uint32_t n_documents;        /* that prompts are taken from */
} life_config;

/* The instruction sets of this machine. */
uint32_t life_isas(fkv_isa isas[LIFE_MAX_ISAS]);

void life_config_draw(life_random *r, const fkv_isa *isas, uint32_t n_isas, life_config *config);

/* As the library takes it; points into config. */
fkv_config life_config_of(const life_config *config);

/* The same identity, other sizes: its page files are the first's. */
void life_config_sibling(life_random *r, const life_config *config, life_config *sibling);

/* One thing of the identity is another. */
void life_config_foreign(life_random *r, const life_config *config, life_config *other);

/* Products of one query token over one token of history, all layers. */
uint64_t life_token_work(const life_config *config);

bool life_layer_is_sealed(const life_config *config, uint32_t layer);
bool life_has_sealed_layer(const life_config *config);
bool life_has_window(const life_config *config);
bool life_has_full_layer(const life_config *config);

/* One line, for the report. */
const char *life_config_text(const life_config *config);

#endif
