/* The kernels as text, for a device that compiles them: one text for each (layer shape, kernel), the same words for every device
 * over its own prelude. See README.md for inputs, outputs and grids.
 */
#ifndef FKV_KERNEL_TEXT_H
#define FKV_KERNEL_TEXT_H

#include "../attn.h"

typedef enum fkv_kernel_device { FKV_KERNEL_CUDA, FKV_KERNEL_METAL, FKV_KERNEL_HOST } fkv_kernel_device;

typedef enum fkv_kernel {
    FKV_KERNEL_WRITE,
    FKV_KERNEL_COPY_PAGES,
    FKV_KERNEL_PUT_NUMBERS,
    FKV_KERNEL_DECODE,
    FKV_KERNEL_MERGE,
    FKV_KERNEL_PREFILL,
    FKV_KERNEL_PREFILL_BESIDE,
    FKV_KERNEL_SEAL, /* of sealed layers, whose rows are written into a pool of open pages: a layer with that block */
    FKV_N_KERNELS
} fkv_kernel;

/* Rows (queries times heads of a KV head) of a decode block: item_queries is the step table's word. */
FKV_SEAM uint32_t fkv_decode_rows(fkv_kernel_device device, const fkv_attn_layer *layer, uint32_t item_queries);

/* Blocks of decode that a CUDA multiprocessor is to have at a time. */
uint32_t fkv_decode_blocks(const fkv_attn_layer *layer, uint32_t decode_rows);

/* Rows (queries times heads of a KV head) of a prefill block. A tile of the step table has fkv_prefill_queries() queries: as many
 * as fill a block, and one where there are more heads; then a tile has several blocks. */
FKV_SEAM uint32_t fkv_prefill_rows(fkv_kernel_device device, const fkv_attn_layer *layer);
FKV_SEAM uint32_t fkv_prefill_queries(fkv_kernel_device device, const fkv_attn_layer *layer);

/* Whether prefill of the layer is on warpgroups, where the device has them; else it is in plain loops. */
bool fkv_prefill_has_warpgroups(const fkv_attn_layer *layer);

/* Bytes of device memory, zeroes at first, that all launches of prefill over such layers have, one after the other; 0: none. */
uint32_t fkv_prefill_ring_words(fkv_kernel_device device); /* the first of them, zeroes between launches */
FKV_SEAM uint64_t fkv_prefill_ring_bytes(fkv_kernel_device device, const fkv_attn_layer *layer);

/* Bytes of shared memory that the launch must ask for, beside what the text itself declares. */
FKV_SEAM uint32_t fkv_kernel_shared_bytes(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer,
                                          uint32_t decode_rows);

/* Threads of a block. */
FKV_SEAM uint32_t fkv_kernel_threads(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer);

/* What stands before the kernel: defines of the layer, prelude, functions. As snprintf(): returns the length without the 0 at the
 * end, and writes what fits. decode_rows: fkv_decode_rows() for FKV_KERNEL_DECODE, else 0. */
FKV_SEAM size_t fkv_kernel_header(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer, uint32_t decode_rows,
                                  char *text, size_t size);

/* The body of the kernel, between the braces of a signature that has the inputs and outputs under the names of README.md. sealed:
 * of the layer. */
FKV_SEAM const char *fkv_kernel_source(fkv_kernel_device device, fkv_kernel kernel, bool sealed);

/* Names of inputs and outputs, ended by NULL. */
FKV_SEAM const char *const *fkv_kernel_inputs(fkv_kernel kernel, bool sealed);
FKV_SEAM const char *const *fkv_kernel_outputs(fkv_kernel kernel);

#endif
