/* Assembles the source code of GPU kernels, which is compiled at run time. There is one source for each pair of layer shape and
 * kernel. The sources are written in the common subset of CUDA, Metal and C++ and use a prelude for each device. README.md lists
 * the inputs, outputs and grids of the kernels.
 */
#ifndef FKV_KERNEL_SOURCE_H
#define FKV_KERNEL_SOURCE_H

#include "../attn.h"

typedef enum fkv_kernel_device { FKV_KERNEL_CUDA, FKV_KERNEL_METAL, FKV_KERNEL_HOST } fkv_kernel_device;

typedef enum fkv_kernel {
    FKV_KERNEL_WRITE,
    FKV_KERNEL_COPY_PAGES,
    FKV_KERNEL_PUT_NUMBERS,
    FKV_KERNEL_DECODE,
    FKV_KERNEL_MERGE,
    FKV_KERNEL_DECODE_MERGE, /* combines FKV_KERNEL_DECODE and FKV_KERNEL_MERGE; not on Metal */
    FKV_KERNEL_PREFILL,
    FKV_KERNEL_COPY_DECODED,
    FKV_KERNEL_SEAL, /* seals pages of sealed layers; a separate write kernel, built for the open block format, writes new rows to
                        the open pool */
    FKV_N_KERNELS
} fkv_kernel;

/* Returns true if there are kernels for this layer. On Metal, there are no kernels for latent layers. On other devices, a latent
 * layer is not supported if its head dimension is not a multiple of 64 or exceeds 512, or if it has codebook codes, sealed pages
 * or many RoPE channels. */
FKV_INTERNAL bool fkv_kernels_support(fkv_kernel_device device, const fkv_attn_layer *layer);

/* Returns the number of rows (queries x query heads per KV head) that a decode block processes. item_queries is the word
 * FKV_STEP_ITEM_QUERIES of the step table. */
FKV_INTERNAL uint32_t fkv_decode_rows(fkv_kernel_device device, const fkv_attn_layer *layer, uint32_t item_queries);

/* Number of 32-bit words in the array `counters` of FKV_KERNEL_DECODE_MERGE. A launch must not have more blocks than the array
 * has words. All words are 0 between launches. Launches that use the same counters must not overlap. */
enum { FKV_MERGE_COUNTERS = 4096 };

/* Returns the number of decode blocks that should be resident on one CUDA multiprocessor at the same time. */
uint32_t fkv_decode_blocks(const fkv_attn_layer *layer, uint32_t decode_rows);

/* fkv_prefill_rows() returns the number of rows (queries x query heads per KV head) that a prefill block processes.
 * fkv_prefill_queries() returns the number of queries per tile of the step table, which is the largest number that fits in one
 * prefill block. If a KV head has more query heads than a block has rows, a tile is a single query, which several blocks
 * process. */
FKV_INTERNAL uint32_t fkv_prefill_rows(fkv_kernel_device device, const fkv_attn_layer *layer);
FKV_INTERNAL uint32_t fkv_prefill_queries(fkv_kernel_device device, const fkv_attn_layer *layer);

/* Returns true if prefill of this layer uses warpgroup matrix instructions on devices that have them. Otherwise, prefill always
 * uses plain loops or, in a latent layer, the decode kernel. */
bool fkv_prefill_has_warpgroups(const fkv_attn_layer *layer);

/* Returns the size, in bytes, of the device memory through which prefill blocks share unpacked pages (prefill_share.h), or 0 if
 * the layer does not share pages. The memory must be initialized with zeros. Launches that use the same memory must not overlap.
 */
FKV_INTERNAL uint64_t fkv_prefill_ring_bytes(fkv_kernel_device device, const fkv_attn_layer *layer);

/* Returns the number of 32-bit control words at the beginning of the memory that prefill blocks share (fkv_prefill_ring_bytes()).
 * Between launches, all control words are 0, except FKV_PREFILL_BACKOFF_WORD. That word is the number of future launches in which
 * blocks will not wait for the other blocks of their group. */
uint32_t fkv_prefill_ring_words(fkv_kernel_device device);
enum { FKV_PREFILL_BACKOFF_WORD = 2 };

/* Returns the number of bytes of dynamic shared memory that a launch must request, in addition to the arrays declared in the
 * source. */
FKV_INTERNAL uint32_t fkv_kernel_shared_bytes(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer,
                                              uint32_t decode_rows);

/* Returns the number of threads per block. */
FKV_INTERNAL uint32_t fkv_kernel_threads(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer);

/* fkv_kernel_order_words() returns the number of words per KV head of the input `orders` of a layer with calibrated keys.
 * fkv_kernel_orders() computes this input for all heads: n[1] and n[2] of the head's fkv_channel_order, followed by the channel
 * at each position. words: [G, fkv_kernel_order_words()] */
FKV_INTERNAL uint32_t fkv_kernel_order_words(const fkv_attn_layer *layer);
FKV_INTERNAL void fkv_kernel_orders(const fkv_attn_layer *layer, uint32_t *words);

/* Writes the part of the source that precedes the kernel: layer defines, prelude and functions. Like snprintf(), truncates the
 * text to the buffer size and returns the full length without the terminating 0. `decode_rows` is the result of fkv_decode_rows()
 * for FKV_KERNEL_DECODE and FKV_KERNEL_DECODE_MERGE, and 0 for other kernels. */
FKV_INTERNAL size_t fkv_kernel_header(fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer,
                                      uint32_t decode_rows, char *text, size_t size);

/* Returns the kernel body. The caller supplies a signature whose parameters have the names listed in README.md. `sealed` is true
 * for a sealed layer. */
FKV_INTERNAL const char *fkv_kernel_source(fkv_kernel_device device, fkv_kernel kernel, bool sealed);

/* The next two functions return the names of the kernel's parameters, as an array terminated by NULL. */
FKV_INTERNAL const char *const *fkv_kernel_inputs(fkv_kernel kernel, const fkv_attn_layer *layer);
FKV_INTERNAL const char *const *fkv_kernel_outputs(fkv_kernel kernel);

#endif
