/* Reader of GGUF versions 2 and 3, for single files and split models. */
#ifndef FKV_GGUF_H
#define FKV_GGUF_H

#include "weights.h"

/* Position of a file within a split model. A single-file model is part 0 of 1. */
typedef struct fkv_gguf_part {
    uint32_t number;        /* split.no: zero-based index of the part */
    uint32_t n_parts;       /* split.count */
    uint32_t n_all_tensors; /* split.tensors.count, the number of tensors in all parts; 0 if not specified */
} fkv_gguf_part;

/* Reads part `number` of a model and adds its tensors to the weights; part 0 also supplies hyperparameters and vocabulary. Parts
 * must be read in order, followed by fkv_weights_finish(). The bytes must be aligned to 8 and outlive the weights. path is used
 * in messages only.
 *
 * Returns FKV_FILE_FORMAT if the file is not a GGUF file, is not part `number`, or has a key of the wrong type. Returns
 * FKV_FILE_DAMAGED if its contents are inconsistent, and FKV_UNSUPPORTED if its version, a tensor type or the model is not
 * supported. After a failure, the only valid call on the weights is fkv_weights_close(). */
fkv_status fkv_gguf_read_part(fkv_weights *weights, const uint8_t *bytes, uint64_t size, const char *path, uint32_t number,
                              fkv_gguf_part *part);

/* Opens a single file, or a split model by the path of any part. All parts must be in one folder and have names such as
 * NAME-00001-of-00003.gguf. Returns FKV_IO if a part is missing. */
fkv_status fkv_gguf_open(fkv_weights *weights, const char *path);

#endif
