/* Saving a sequence to a page file and loading it back. docs/page_format.md is the bit-exact specification.
 *
 * Save writes to `path`.part, syncs this file, renames it to `path`, and syncs the folder. Even after a crash, `path` is
 * therefore either unchanged or the complete new file. The part file is locked, readable only by its owner, and never opened
 * through a symbolic link. The header is written last, so a partially written file never passes verification. The same tokens and
 * rows always produce identical files, because unwritten slots and padding are stored as 0.
 *
 * Load reads the file twice. The first pass verifies the whole file without changing the cache. The second pass fills the pages
 * and verifies them again. Files are untrusted input: every offset and size is recomputed and compared with the stored value, and
 * only the recomputed value is used. No memory is allocated based on the contents of a file.
 *
 * A file contains the pages that a query at position n_tokens attends to. In the full group, these are all pages. In a window
 * group, these are the sink pages and all pages from fkv_pager_first_page(n_tokens) on. For sealed layers, the file contains
 * every page in sealed form. It also contains, in open form, page 0 and the pages of the span to which token n_tokens belongs.
 */
#ifndef FKV_PAGE_FILE_H
#define FKV_PAGE_FILE_H

#include "../pager/pager.h"
#include "slab.h"

/* On-disk description of the K or V codec of a layer. */
typedef struct fkv_file_side {
    uint32_t bits;
    uint32_t group; /* values per group; 0 if the codec has no groups */
    uint32_t kind;  /* fkv_codec_kind; never FKV_CODEC_AUTO in a file */
} fkv_file_side;

/* On-disk layer record. */
typedef struct fkv_file_layer {
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window;
    uint32_t n_sinks;
    fkv_file_side k;
    fkv_file_side v;      /* in a latent layer: the codec of the RoPE channels */
    uint32_t rope_dim;    /* latent layer: number of RoPE channels, in addition to head_dim latent channels; otherwise 0 */
    uint32_t state_bytes; /* state layer: size of the recurrent state in bytes (all other fields are 0); otherwise 0 */
} fkv_file_layer;

/* Convert between a codec configuration and its on-disk form. Both results are canonical: FKV_CODEC_AUTO is resolved, and the
 * group size is 0 if the codec does not use groups. */
fkv_file_side fkv_file_side_of(fkv_codec_config config);
fkv_codec_config fkv_file_codec(fkv_file_side side);

/* Properties that a file and a cache must have in common; every field is compared. Layer groups are numbered 0, 1, 2 and so on,
 * in the order in which their (window, n_sinks) pairs first occur among the layers. The slab and the pager use the same group
 * numbers. The group that holds the open pages of sealed layers comes last. */
typedef struct fkv_file_identity {
    uint32_t page_tokens;
    uint32_t n_layers;
    const fkv_file_layer *layers; /* [n_layers] */
    fkv_type page_type;
    fkv_rotate rotate;
    uint64_t rotation_seed; /* compared only if rotate is not FKV_ROTATE_NONE */
    uint8_t weights_id[32];
    char rope_id[64];
    uint8_t calibration[32]; /* SHA-256 of channel_bits of all calibrated layers; 0 if no layer is calibrated */
    char numerics[32];       /* identifies the arithmetic that computed the rows; see fkv_config */
} fkv_file_identity;

enum { FKV_FILE_BUFFER_BYTES = 256 * 1024 }; /* scratch memory for save and load, 8-byte aligned */

/* Saves the first n_tokens tokens of the sequence in `slot`. All pages that a query at position n_tokens attends to must still be
 * allocated (fkv_pager_covers()). buffer: [FKV_FILE_BUFFER_BYTES]. Returns FKV_IO if a system call fails or if another save to
 * this path is in progress. After such a failure, an existing file at `path` is unchanged. */
fkv_status fkv_page_file_save(const fkv_file_identity *identity, const fkv_slab *slab, const fkv_pager *pager, uint32_t slot,
                              const uint32_t *tokens, uint32_t n_tokens, const char *path, uint8_t *buffer);

/* Verifies a page file, opens a sequence and reads the pages of the sequence from the file. A failure leaves the pager unchanged,
 * except that cached prefixes may have been evicted. Returns FKV_SEQ_FULL if config->max_tokens is less than the number of saved
 * tokens, and FKV_BAD_ARGUMENT if the caller passes a prompt that does not begin with the saved tokens. */
fkv_status fkv_page_file_load(const fkv_file_identity *identity, const fkv_slab *slab, fkv_pager *pager,
                              const fkv_seq_config *config, const char *path, uint8_t *buffer, fkv_seq *seq);

#endif
