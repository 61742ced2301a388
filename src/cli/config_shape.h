/* The shape of a model from its config.json alone: enough for a plan before anything is downloaded. Files are not trusted.
 */
#ifndef FKV_CLI_CONFIG_SHAPE_H
#define FKV_CLI_CONFIG_SHAPE_H

#include <stdbool.h>
#include <stdint.h>

enum { CONFIG_MAX_LAYERS = 512 };

typedef struct config_shape {
    char architecture[48];
    uint32_t n_layers; /* that keep keys and values */
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t full_kv_heads; /* of layers without a window, where there are others */
    uint32_t full_head_dim;
    uint32_t dim;
    uint32_t ffn_dim;
    uint32_t n_vocab;
    uint32_t context;
    uint32_t windows[CONFIG_MAX_LAYERS]; /* 0: full */
    uint64_t n_parameters;               /* about */
    uint64_t n_mapped;  /* of them, those that the CPU reads where the file is mapped: experts, tables that are only looked up */
    uint64_t n_touched; /* of those, what one token reads */
    double weight_bits; /* of a parameter, about */
} config_shape;

/* Whether -m names a config.json, or a folder that has one and no weights; path: [size], where it is. */
bool config_shape_is(const char *word, char *path, uint32_t size);

/* Exit code, with a message on failure. */
int config_shape_read(const char *path, config_shape *shape);

#endif
