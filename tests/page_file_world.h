/* A cache in small for the tests of page files: slab, pager, codecs and rotation put together without the public API, rows made
 * from a seed, and the tools to damage a file on purpose.
 *
 * The row of (seed, layer, head, position) is the same in every world, whatever pages it lies in, so what a file must hold is
 * known without asking the code under test. Every helper aborts the test on a failure that is not its subject.
 */
#ifndef FKV_PAGE_FILE_WORLD_H
#define FKV_PAGE_FILE_WORLD_H

#include "../src/codec/block.h"
#include "../src/codec/rotation.h"
#include "../src/store/page_file.h"

enum { WORLD_LAYERS = 8, WORLD_PAGES = 24, WORLD_SEQS = 4, WORLD_STEP_TOKENS = 32, WORLD_MAX_TOKENS = 16384, WORLD_PATH = 4096 };

/* What a world is made from. */
typedef struct file_world_spec {
    uint32_t page_tokens;
    uint32_t n_pages; /* of each group */
    fkv_type page_type;
    fkv_rotate rotate;
    uint32_t n_layers;
    fkv_file_layer layers[WORLD_LAYERS];
} file_world_spec;

typedef struct file_world {
    file_world_spec spec;
    fkv_file_identity identity; /* weights 00 01 02 ..., RoPE "neox base=10000", rotation seed 7 */
    fkv_block blocks[WORLD_LAYERS];
    fkv_slab slab;
    fkv_slab_layer slab_layers[WORLD_LAYERS];
    fkv_pager *pager;
    void *pager_memory;
    uint8_t *buffer; /* FKV_FILE_BUFFER_BYTES */
} file_world;

/* The specs of tests/golden/good.fkv (layers of three groups and all widths) and small.fkv (one layer, one page). */
extern const file_world_spec WORLD_GOOD;
extern const file_world_spec WORLD_SMALL;
enum { WORLD_GOOD_TOKENS = 50, WORLD_SMALL_TOKENS = 10, WORLD_GOLDEN_SEED = 1 };

/* Every byte of the slab is `junk` until a row is written over it. */
void file_world_open(file_world *w, const file_world_spec *spec, uint8_t junk);
void file_world_close(file_world *w);

/* Token ids of a seed. */
uint32_t file_world_token(uint64_t seed, uint32_t position);
void file_world_tokens(uint64_t seed, uint32_t *tokens, uint32_t n_tokens);

/* The numbers of one row before rotation and coding. row: [head_dim] */
void file_world_row(const file_world *w, uint64_t seed, uint32_t layer, fkv_side side, uint32_t head, uint32_t position,
                    float *row);

/* Appends n_tokens tokens of a seed to a sequence, in steps. */
void file_world_append(file_world *w, fkv_seq seq, uint64_t seed, uint32_t n_tokens);
fkv_seq file_world_fill(file_world *w, uint64_t seed, uint32_t n_tokens, uint32_t max_tokens);

/* Whether every page that a query at n_tokens sees holds exactly the rows of the seed, and 0 where no token is. */
bool file_world_holds(const file_world *w, fkv_seq seq, uint64_t seed, uint32_t n_tokens);

fkv_status file_world_save(const file_world *w, fkv_seq seq, uint64_t seed, uint32_t n_tokens, const char *path);
fkv_status file_world_load(file_world *w, uint32_t max_tokens, const char *path, fkv_seq *seq);

/* Free pages of all groups; the pager is consistent. */
uint32_t file_world_free_pages(const file_world *w);

/* ---- files ---- */

/* A folder of its own under TMPDIR or /tmp, made once for the process. */
const char *file_world_folder(void);
/* folder/name. The text lives as long as the process; a few dozen names. */
const char *file_world_path(const char *name);
void file_world_remove_folder(void); /* with the files in it, at the very end */

size_t file_world_read_file(const char *path, uint8_t *bytes, size_t capacity);
void file_world_write_file(const char *path, const uint8_t *bytes, size_t n);

/* Makes the checksums of a changed file right again, as far as its own numbers allow. */
void file_world_fix_crcs(uint8_t *bytes, size_t n);
void file_world_fix_digest(uint8_t *bytes, size_t n);

#endif
