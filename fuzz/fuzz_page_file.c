/* Fuzzes the page-file readers. The first input byte selects which parts of the file are repaired before it is read (FIX_ flags),
 * so that the fuzzer gets past checks whose expected values it cannot guess.
 *
 * For any input the readers must not crash and must return a status listed in docs/page_format.md. The live sequence of the
 * fixture must keep its rows, the pager must stay consistent, and after a failure or after closing the loaded sequence, the
 * number of free pages must be unchanged.
 */
#include "../src/store/page_file_format.h"
#include "../tests/page_file_fixture.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    FIX_MAGIC = 1,    /* repair the magic, version and record sizes */
    FIX_IDENTITY = 2, /* repair all fields that must match the fixture */
    FIX_OFFSETS = 4,  /* repair the offsets derived from the counts, and the file length */
    FIX_CRCS = 8,
    FIX_DIGEST = 16,
    MAX_FILE_BYTES = 64 * 1024,
    LIVE_SEED = 3,
    LIVE_TOKENS = 20,
    LOAD_TOKENS = 100
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool good, const char *what) {
    if (good) return;
    (void)fprintf(stderr, "%s: %s\n", what, fkv_message());
    abort();
}

static void fix(const file_fixture *w, uint8_t flags, uint8_t *bytes, size_t n) {
    fkv_file_header header;
    fkv_file_header ours;
    fkv_file_layer layers[FILE_FIXTURE_LAYERS];
    if (n < sizeof header) return;
    memcpy(&header, bytes, sizeof header);
    fkv_file_identity_write(&w->identity, &ours, layers);
    if (flags & FIX_MAGIC) memcpy(&header, &ours, offsetof(fkv_file_header, file_bytes));
    if (flags & FIX_IDENTITY) {
        const size_t first = offsetof(fkv_file_header, page_tokens);
        memcpy((uint8_t *)&header + first, (uint8_t *)&ours + first, offsetof(fkv_file_header, calibration) - first);
        header.n_layers = ours.n_layers;
        header.n_groups = w->slab.n_groups;
        const size_t layers_bytes = (size_t)ours.n_layers * ours.layer_bytes;
        if (n >= sizeof header + layers_bytes) memcpy(bytes + sizeof header, layers, layers_bytes);
    }
    if (flags & FIX_OFFSETS) {
        fkv_file_plan plan;
        header.file_bytes = n;
        if (fkv_file_plan_offsets(&header, header.n_pages, &plan)) {
            header.tokens_offset = plan.tokens_offset;
            header.index_offset = plan.index_offset;
            header.data_offset = plan.data_offset;
        }
    }
    memcpy(bytes, &header, sizeof header);
    if (flags & FIX_CRCS) file_fixture_fix_crcs(bytes, n);
    if (flags & FIX_DIGEST) file_fixture_fix_digest(bytes, n);
}

static bool listed(fkv_status status) {
    return status == FKV_OK || status == FKV_FILE_FORMAT || status == FKV_FILE_VERSION || status == FKV_FILE_DAMAGED;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static file_fixture w;
    static fkv_seq live;
    static int fd = -1;
    static uint8_t bytes[MAX_FILE_BYTES];
    const char *path = file_fixture_path("fuzzed.fkv");
    if (fd < 0) {
        file_fixture_open(&w, &FILE_FIXTURE_GOOD, 0);
        live = file_fixture_fill(&w, LIVE_SEED, LIVE_TOKENS, LIVE_TOKENS);
        fd = open(path, O_RDWR | O_CREAT, 0600);
        must(fd >= 0 && atexit(file_fixture_remove_folder) == 0, "cannot open the file to fuzz");
    }
    const size_t n = size == 0 ? 0 : fkv_min_u32((uint32_t)(size - 1), MAX_FILE_BYTES);
    if (n > 0) {
        memcpy(bytes, data + 1, n);
        fix(&w, data[0], bytes, n);
    }
    must(ftruncate(fd, 0) == 0 && pwrite(fd, bytes, n, 0) == (ssize_t)n, "cannot write the file");

    const uint32_t free_before = file_fixture_free_pages(&w);
    fkv_file_info info;
    uint32_t tokens[16];
    uint32_t n_tokens = 0;
    const fkv_status look = fkv_file_inspect(path, false, &info);
    const fkv_status verify = fkv_file_inspect(path, true, &info);
    must(listed(look) && listed(verify) && (look == FKV_OK || verify == look), "inspect");
    must(fkv_file_tokens(path, tokens, 16, &n_tokens) == look, "tokens");

    fkv_seq seq = 0;
    const fkv_status load = file_fixture_load(&w, LOAD_TOKENS, path, &seq);
    if (load == FKV_OK) {
        uint32_t length = 0;
        must(verify == FKV_OK && fkv_pager_length(w.pager, seq, &length) == FKV_OK && length == n_tokens, "length");
        must(fkv_pager_close(w.pager, seq) == FKV_OK, "close");
    } else {
        must(load == FKV_FILE_FOREIGN || load == FKV_SEQ_FULL ? look == FKV_OK : load == verify, "load");
    }
    must(file_fixture_free_pages(&w) == free_before, "pages leaked");
    must(file_fixture_holds(&w, live, LIVE_SEED, LIVE_TOKENS), "the live sequence changed");
    return 0;
}
