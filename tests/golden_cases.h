/* Table of damaged page files, each with the exact error that is expected. Used by make_golden and by the tests.
 *
 * Each case patches a few bytes of tests/golden/small.fkv. The committed cases are also stored as files, so that a change to the
 * format or to the order of checks changes the stored bytes.
 */
#ifndef FKV_GOLDEN_CASES_H
#define FKV_GOLDEN_CASES_H

#include <flatkv/flatkv.h>

/* Folder of the golden files, relative to the working directory of the tests. */
#ifndef FKV_GOLDEN_DIR
#define FKV_GOLDEN_DIR "tests/golden"
#endif

enum { GOLDEN_PATCHES = 4, GOLDEN_BYTES = 32 * 1024 };

typedef struct golden_patch {
    uint32_t offset;
    uint32_t n_bytes; /* patch length in bytes; 0 if there is no patch */
    bool flip;        /* true to XOR the bytes with `value`, false to overwrite them */
    uint64_t value;   /* value to write or XOR, little-endian; only its lowest n_bytes bytes are used */
} golden_patch;

/* Readers that can detect damage: fkv_file_inspect() without verification, fkv_file_inspect() with verification, and the loader.
 */
typedef enum golden_reader { GOLDEN_LOOK, GOLDEN_VERIFY, GOLDEN_LOAD } golden_reader;

typedef struct golden_case {
    const char *name;
    bool committed;
    golden_reader noticed_by; /* first reader that detects the damage */
    fkv_status status;
    const char *says; /* part of the expected error message; NULL if the message is not checked */
    golden_patch patches[GOLDEN_PATCHES];
    bool resize; /* true if the file is resized to `length` after the patches */
    uint32_t length;
    bool fix_crcs; /* true if the page checksums are recomputed after the patches */
    bool fix_digest;
} golden_case;

extern const golden_case GOLDEN_CASES[];
extern const size_t N_GOLDEN_CASES;

/* Damages the n bytes of small.fkv in place and returns the new length. bytes: buffer of GOLDEN_BYTES bytes. */
size_t golden_damage(const golden_case *c, uint8_t *bytes, size_t n);

#endif
