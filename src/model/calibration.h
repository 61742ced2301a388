/* A calibration: how many bits each channel of the keys has in sealed pages (FKV_CODEC_CALIBRATED), for every layer and KV head
 * of one model, once for 4 bits on average and once for 3. A small file beside the weights; docs/page_format.md section 8 is the
 * bit-exact truth of it.
 *
 * Files are not trusted: every number is held against the length of the file and against what can be before it is used.
 */
#ifndef FKV_CALIBRATION_H
#define FKV_CALIBRATION_H

#include "../base/base.h"

#include <flatkv/model.h>

enum { FKV_PATH_BYTES = 4096 };

typedef struct fkv_calibration_layer {
    uint32_t n_kv_heads;
    uint32_t head_dim; /* as pages hold it: a multiple of 16 */
} fkv_calibration_layer;

typedef struct fkv_calibration {
    uint8_t *file; /* what the rest lies in; the calibration owns it */
    size_t n_bytes;
    uint32_t n_layers;
    uint64_t n_tokens; /* of the text that it was made from */
    uint64_t n_channels;
    const fkv_calibration_layer *layers; /* [n_layers] */
    uint8_t *both;                       /* [n_channels], layer by layer: the bits for 4 on average, and 16 times those for 3 */
    uint8_t weights_id[32];
} fkv_calibration;

/* The file's name in messages is `path`. bytes: [n_bytes] from malloc(), taken over, also by a failure. FKV_FILE_FORMAT,
 * FKV_FILE_VERSION or FKV_FILE_DAMAGED, with the field and the reason. */
fkv_status fkv_calibration_read(uint8_t *bytes, size_t n_bytes, const char *path, fkv_calibration *calibration);

/* The same from a file; FKV_IO where there is none. */
fkv_status fkv_calibration_open(const char *path, fkv_calibration *calibration);
void fkv_calibration_close(fkv_calibration *calibration); /* zeros are allowed */

/* Room for the bits of these layers, to be filled in and written; n_tokens and `both` are the caller's. FKV_NO_MEMORY. */
fkv_status fkv_calibration_new(const fkv_calibration_layer *layers, uint32_t n_layers, const uint8_t weights_id[32],
                               fkv_calibration *calibration);

/* Under its name whole or not at all: made as path.part. FKV_IO. */
fkv_status fkv_calibration_write(fkv_calibration *calibration, const char *path);

/* From now on `both` are plain bits, 4 or 3 on average. */
void fkv_calibration_choose(fkv_calibration *calibration, uint32_t average);

/* Shares bits out over the channels of a head: what an error of each costs times 4^-bits, summed over all, is least, with as many
 * channels of 4 and of 6 bits as the format allows. cost: [dim], no NaN; bits: [dim]. */
void fkv_channels_share(const double *cost, uint32_t dim, uint32_t average, uint8_t *bits);

/* Where the calibration of the model at `model_path` lies. FKV_BAD_ARGUMENT where that is longer than `room`. */
fkv_status fkv_calibration_beside(const char *model_path, char *path, size_t room);

#endif
