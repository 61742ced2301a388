/* A small cache for page-file tests, which consists of a slab, a pager, codecs and a rotation and does not use the public API.
 * Rows are generated from a seed. Other functions of this header damage a file on purpose.
 *
 * A row depends only on (seed, layer, head, position), not on the fixture or on the page that stores it. The expected content of
 * a file can therefore be computed without the code under test. Helpers abort the test on unexpected failures.
 */
#ifndef FKV_PAGE_FILE_FIXTURE_H
#define FKV_PAGE_FILE_FIXTURE_H

#include "../src/codec/block.h"
#include "../src/codec/rotation.h"
#include "../src/store/page_file.h"

enum {
    FILE_FIXTURE_LAYERS = 8,
    FILE_FIXTURE_PAGES = 24,
    FILE_FIXTURE_SEQS = 4,
    FILE_FIXTURE_STEP_TOKENS = 32,
    FILE_FIXTURE_MAX_TOKENS = 16384,
    FILE_FIXTURE_PATH = 4096
};

/* Parameters of a fixture. */
typedef struct file_fixture_spec {
    uint32_t page_tokens;
    uint32_t n_pages; /* number of pages in each group */
    fkv_type page_type;
    fkv_rotate rotate;
    uint32_t n_layers;
    fkv_file_layer layers[FILE_FIXTURE_LAYERS];
} file_fixture_spec;

typedef struct file_fixture {
    file_fixture_spec spec;
    fkv_file_identity identity; /* weights ID 00 01 02 ... (byte i has the value i), RoPE ID "neox base=10000", numerics "cpu
                                   golden 1", rotation seed 7 */
    fkv_block blocks[FILE_FIXTURE_LAYERS];
    fkv_slab slab;
    fkv_slab_layer slab_layers[FILE_FIXTURE_LAYERS];
    fkv_pager *pager;
    void *pager_memory;
    uint8_t *buffer; /* FKV_FILE_BUFFER_BYTES */
} file_fixture;

/* Specs of tests/golden/good.fkv (layers in three groups, with all bit widths) and small.fkv (one layer, one page). */
extern const file_fixture_spec FILE_FIXTURE_GOOD;
extern const file_fixture_spec FILE_FIXTURE_SMALL;
enum { FILE_FIXTURE_GOOD_TOKENS = 50, FILE_FIXTURE_SMALL_TOKENS = 10, FILE_FIXTURE_GOLDEN_SEED = 1 };

/* Opens a fixture. All bytes of its slab are set to `junk`. */
void file_fixture_open(file_fixture *w, const file_fixture_spec *spec, uint8_t junk);
void file_fixture_close(file_fixture *w);

/* Returns the token ID at a position of the token sequence generated from `seed`. */
uint32_t file_fixture_token(uint64_t seed, uint32_t position);
void file_fixture_tokens(uint64_t seed, uint32_t *tokens, uint32_t n_tokens);

/* Generates one row before rotation and encoding. row: [head_dim] */
void file_fixture_row(const file_fixture *w, uint64_t seed, uint32_t layer, fkv_side side, uint32_t head, uint32_t position,
                      float *row);

/* Appends the next n_tokens tokens generated from `seed` to a sequence, in steps. */
void file_fixture_append(file_fixture *w, fkv_seq seq, uint64_t seed, uint32_t n_tokens);
fkv_seq file_fixture_fill(file_fixture *w, uint64_t seed, uint32_t n_tokens, uint32_t max_tokens);

/* Returns true if every page that is visible to a query at position n_tokens holds exactly the rows generated from `seed`, and
 * zeros in its unused slots. */
bool file_fixture_holds(const file_fixture *w, fkv_seq seq, uint64_t seed, uint32_t n_tokens);

fkv_status file_fixture_save(const file_fixture *w, fkv_seq seq, uint64_t seed, uint32_t n_tokens, const char *path);
fkv_status file_fixture_load(file_fixture *w, uint32_t max_tokens, const char *path, fkv_seq *seq);

/* Returns the number of free pages over all groups. Also checks that the pager is consistent. */
uint32_t file_fixture_free_pages(const file_fixture *w);

/* ---- files ---- */

/* Returns the temporary folder of this process, created once under TMPDIR or /tmp. */
const char *file_fixture_folder(void);
/* Returns the path of `name` in the temporary folder. The string stays valid until the process ends. Supports up to 64 different
 * names. */
const char *file_fixture_path(const char *name);
void file_fixture_remove_folder(void); /* deletes the folder and its files; must be called last */

size_t file_fixture_read_file(const char *path, uint8_t *bytes, size_t capacity);
void file_fixture_write_file(const char *path, const uint8_t *bytes, size_t n);

/* Recomputes the checksums of a modified file if its header and index are still readable. */
void file_fixture_fix_crcs(uint8_t *bytes, size_t n);
void file_fixture_fix_digest(uint8_t *bytes, size_t n);

#endif
