/* A sequence on disk: header, layers, tokens, index of pages with CRC32C, pages. docs/page_format.md is the bit-exact truth.
 *
 * Save writes to `path`.part (locked, not followed if a link, readable by its owner only), syncs, renames, syncs the folder: the
 * name holds the old file, the new one, or nothing. The header is written last, so nothing half-written ever verifies. The same
 * tokens and rows give the same bytes; slots and gaps that no token wrote are 0 in the file.
 *
 * Load reads the file twice: once to verify all of it, touching nothing that lives; once into the pages, checking again. Files
 * are hostile: every count, offset and size is recomputed and compared, never followed; nothing is allocated for what a file
 * claims.
 *
 * The pages of a file are those a query at n_tokens sees: all in the full group; in a window group the sink pages and those from
 * fkv_pager_first_page(n_tokens) on. Of sealed layers that is every page, sealed where it is full, and open the first
 * and those of the span that token n_tokens is in.
 */
#ifndef FKV_PAGE_FILE_H
#define FKV_PAGE_FILE_H

#include "../pager/pager.h"
#include "slab.h"

/* K or V of a layer, exactly as it stands in a file of versions 2 and 8. In one of version 1 there is no kind: it follows from
 * the bits, as FKV_CODEC_AUTO has it. */
typedef struct fkv_file_side {
    uint32_t bits;
    uint32_t group; /* 0 in a file where the codec has no groups */
    uint32_t kind;  /* fkv_codec_kind, not FKV_CODEC_AUTO in a file */
} fkv_file_side;

/* One layer's shape, exactly as it stands in a file of versions 2 and 8. */
typedef struct fkv_file_layer {
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window;
    uint32_t n_sinks;
    fkv_file_side k;
    fkv_file_side v;
    uint32_t zero[2];
} fkv_file_layer;

fkv_file_side fkv_file_side_of(fkv_codec_config config);
fkv_codec_config fkv_file_codec(fkv_file_side side);

/* What a file must agree with to be ours: every field is compared. Layer groups are numbered by first appearance of their
 * (window, n_sinks) among the layers, in slab and pager too; the group of the open pages of sealed layers is the last. */
typedef struct fkv_file_identity {
    uint32_t page_tokens;
    uint32_t n_layers;
    const fkv_file_layer *layers; /* [n_layers] */
    fkv_type page_type;
    fkv_rotate rotate;
    uint64_t rotation_seed; /* compared only where rotate is not NONE */
    uint8_t weights_id[32];
    char rope_id[64];
    uint8_t calibration[32]; /* SHA-256 of the bits of channels of calibrated layers; 0 where there is none */
} fkv_file_identity;

enum { FKV_FILE_BUFFER_BYTES = 256 * 1024 }; /* of scratch that save and load work in, aligned to 8 */

/* The first n_tokens tokens of the sequence in `slot`; the pager covers them (fkv_pager_covers). buffer: FKV_FILE_BUFFER_BYTES.
 * FKV_IO with the system's words, or if another save to this path is under way; an older file at path is then untouched. */
fkv_status fkv_page_file_save(const fkv_file_identity *identity, const fkv_slab *slab, const fkv_pager *pager, uint32_t slot,
                              const uint32_t *tokens, uint32_t n_tokens, const char *path, uint8_t *buffer);

/* Verifies, opens a sequence, fills it. A failure leaves the pager as it was, except that cached prefixes may have been given up
 * for a sequence that then could not be filled. FKV_SEQ_FULL if config->max_tokens is less than the file has; the prompt, where
 * given, is only compared (FKV_BAD_ARGUMENT). */
fkv_status fkv_page_file_load(const fkv_file_identity *identity, const fkv_slab *slab, fkv_pager *pager,
                              const fkv_seq_config *config, const char *path, uint8_t *buffer, fkv_seq *seq);

#endif
