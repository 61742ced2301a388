/* Every kind of damage to a page file and the exact answer to it: one table for the golden files and the tests.
 *
 * A case is tests/golden/small.fkv with a few bytes changed. The committed ones are files of their own, so that a change of the
 * format or of the judging order shows as a difference to yesterday's bytes, not only to today's code.
 */
#ifndef FKV_GOLDEN_CASES_H
#define FKV_GOLDEN_CASES_H

#include <flatkv/flatkv.h>

/* Where the golden files are, from the folder that the tests run in. */
#ifndef FKV_GOLDEN_DIR
#define FKV_GOLDEN_DIR "tests/golden"
#endif

enum { GOLDEN_PATCHES = 3, GOLDEN_BYTES = 32 * 1024 };

typedef struct golden_patch {
    uint32_t offset;
    uint32_t n_bytes; /* 0: no patch */
    bool flip;        /* xor instead of set */
    uint64_t value;   /* little-endian, n_bytes of it */
} golden_patch;

/* The first reader that notices. */
typedef enum golden_reader { GOLDEN_LOOK, GOLDEN_VERIFY, GOLDEN_LOAD } golden_reader;

typedef struct golden_case {
    const char *name;
    bool committed;
    golden_reader noticed_by; /* fkv_file_inspect() without or with verify, or only a load */
    fkv_status status;
    const char *says; /* part of the message, or NULL */
    golden_patch patches[GOLDEN_PATCHES];
    bool resize; /* to length, after the patches */
    uint32_t length;
    bool fix_crcs; /* the checksums are made right again */
    bool fix_digest;
} golden_case;

extern const golden_case GOLDEN_CASES[];
extern const size_t N_GOLDEN_CASES;

/* Damages the n bytes of small.fkv; bytes has room for GOLDEN_BYTES. Returns the new length. */
size_t golden_damage(const golden_case *c, uint8_t *bytes, size_t n);

#endif
