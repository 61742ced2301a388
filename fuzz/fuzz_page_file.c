/* The page file readers against hostile bytes. The first byte of the input says what is made right before the rest is read as a
 * file, so that the fuzzer gets past the checks it cannot guess: see the FIX_ flags.
 *
 * Whatever the bytes are: no crash, no answer other than those that docs/page_format.md lists, the live sequence of the world
 * keeps its rows, the pager stays consistent, and after a failure, or after the loaded sequence is closed, as many pages are free
 * as before.
 */
#include "../src/store/page_file_format.h"
#include "../tests/page_file_world.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    FIX_MAGIC = 1,    /* magic, version, sizes of the records */
    FIX_IDENTITY = 2, /* everything that must agree with the world */
    FIX_OFFSETS = 4,  /* offsets as they follow from the counts, and the file's length */
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

static void fix(const file_world *w, uint8_t flags, uint8_t *bytes, size_t n) {
    fkv_file_header header;
    fkv_file_header ours;
    fkv_file_layer layers[WORLD_LAYERS];
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
        fkv_file_layers_pack(ours.version, layers, ours.n_layers);
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
    if (flags & FIX_CRCS) file_world_fix_crcs(bytes, n);
    if (flags & FIX_DIGEST) file_world_fix_digest(bytes, n);
}

static bool listed(fkv_status status) {
    return status == FKV_OK || status == FKV_FILE_FORMAT || status == FKV_FILE_VERSION || status == FKV_FILE_DAMAGED;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static file_world w;
    static fkv_seq live;
    static int fd = -1;
    static uint8_t bytes[MAX_FILE_BYTES];
    const char *path = file_world_path("fuzzed.fkv");
    if (fd < 0) {
        file_world_open(&w, &WORLD_GOOD, 0);
        live = file_world_fill(&w, LIVE_SEED, LIVE_TOKENS, LIVE_TOKENS);
        fd = open(path, O_RDWR | O_CREAT, 0600);
        must(fd >= 0 && atexit(file_world_remove_folder) == 0, "no file to fuzz with");
    }
    const size_t n = size == 0 ? 0 : fkv_min_u32((uint32_t)(size - 1), MAX_FILE_BYTES);
    if (n > 0) {
        memcpy(bytes, data + 1, n);
        fix(&w, data[0], bytes, n);
    }
    must(ftruncate(fd, 0) == 0 && pwrite(fd, bytes, n, 0) == (ssize_t)n, "the file cannot be written");

    const uint32_t free_before = file_world_free_pages(&w);
    fkv_file_info info;
    uint32_t tokens[16];
    uint32_t n_tokens = 0;
    const fkv_status look = fkv_file_inspect(path, false, &info);
    const fkv_status verify = fkv_file_inspect(path, true, &info);
    must(listed(look) && listed(verify) && (look == FKV_OK || verify == look), "inspect");
    must(fkv_file_tokens(path, tokens, 16, &n_tokens) == look, "tokens");

    fkv_seq seq = 0;
    const fkv_status load = file_world_load(&w, LOAD_TOKENS, path, &seq);
    if (load == FKV_OK) {
        uint32_t length = 0;
        must(verify == FKV_OK && fkv_pager_length(w.pager, seq, &length) == FKV_OK && length == n_tokens, "length");
        must(fkv_pager_close(w.pager, seq) == FKV_OK, "close");
    } else {
        must(load == FKV_FILE_FOREIGN || load == FKV_SEQ_FULL ? look == FKV_OK : load == verify, "load");
    }
    must(file_world_free_pages(&w) == free_before, "pages are lost");
    must(file_world_holds(&w, live, LIVE_SEED, LIVE_TOKENS), "the live sequence changed");
    return 0;
}
