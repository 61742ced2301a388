/* Calibration files. A calibration file contains two bit assignments for the key channels of every layer and KV head of one
 * model, with averages of 4 and 3 bits per channel. Sealed pages of calibrated keys (FKV_CODEC_CALIBRATED) use one of the two
 * assignments. docs/page_format.md section 8 specifies the format.
 *
 * Calibration files are untrusted: every field is checked against the file size and its valid range before use.
 */
#ifndef FKV_CALIBRATION_H
#define FKV_CALIBRATION_H

#include "../base/base.h"

#include <flatkv/model.h>

enum { FKV_PATH_BYTES = 4096 };

typedef struct fkv_calibration_layer {
    uint32_t n_kv_heads;
    uint32_t head_dim; /* padded head dimension: a multiple of 16 */
} fkv_calibration_layer;

typedef struct fkv_calibration {
    uint8_t *file; /* contents of the file, owned by this struct; `layers` and `both` point into this memory */
    size_t n_bytes;
    uint32_t n_layers;
    uint64_t n_tokens; /* length of the sample text in tokens */
    uint64_t n_channels;
    const fkv_calibration_layer *layers; /* [n_layers] */
    uint8_t *both; /* [n_channels] bits per channel in both assignments: the low nibble belongs to the 4-bit average, the high
                      nibble to the 3-bit average */
    uint8_t weights_id[32];
} fkv_calibration;

/* Parses and validates the contents of a calibration file. bytes: [n_bytes], allocated with malloc(). Takes ownership of the
 * bytes, even on failure. path is used in messages only. Returns FKV_FILE_FORMAT, FKV_FILE_VERSION or FKV_FILE_DAMAGED if the
 * file is invalid. */
fkv_status fkv_calibration_read(uint8_t *bytes, size_t n_bytes, const char *path, fkv_calibration *calibration);

/* Reads and validates a calibration file. Returns FKV_IO if it cannot be read. */
fkv_status fkv_calibration_open(const char *path, fkv_calibration *calibration);
void fkv_calibration_close(fkv_calibration *calibration); /* does nothing if the struct is zeroed */

/* Allocates a calibration for the given layers. The caller then fills in n_tokens and `both`. Returns FKV_NO_MEMORY on
 * failure. */
fkv_status fkv_calibration_new(const fkv_calibration_layer *layers, uint32_t n_layers, const uint8_t weights_id[32],
                               fkv_calibration *calibration);

/* Writes a calibration file atomically: writes path.part, then renames it to path. Returns FKV_IO on failure. */
fkv_status fkv_calibration_write(fkv_calibration *calibration, const char *path);

/* Selects the assignment with the given average, 4 or 3 bits. The two nibbles of each byte in `both` belong to the two
 * assignments. Each byte is replaced with the nibble of the selected assignment. */
void fkv_calibration_choose(fkv_calibration *calibration, uint32_t average);

/* Assigns 2, 4 or 6 bits to each channel of a head so that the sum of cost * 4^-bits is minimal for the given average. The
 * number of 4-bit channels and the number of 6-bit channels are multiples of 4, as the file format requires. cost: [dim], no
 * NaN; bits: [dim]. */
void fkv_channels_share(const double *cost, uint32_t dim, uint32_t average, uint8_t *bits);

/* Writes the default calibration path of the model at `model_path`. Returns FKV_BAD_ARGUMENT if the path does not fit in
 * `capacity` bytes. */
fkv_status fkv_calibration_default_path(const char *model_path, char *path, size_t capacity);

#endif
