/* Page-file fixture: see page_file_fixture.h. */
#include "page_file_fixture.h"

#include "../src/store/page_file_format.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

const file_fixture_spec FILE_FIXTURE_GOOD = {
    .page_tokens = 16,
    .n_pages = FILE_FIXTURE_PAGES,
    .page_type = FKV_F16,
    .rotate = FKV_ROTATE_K,
    .n_layers = 3,
    .layers = {{1, 32, 0, 0, {8, 32}, {4, 32}}, {1, 32, 8, 4, {16, 0}, {2, 32}}, {2, 16, 20, 0, {16, 0}, {16, 0}}},
};

const file_fixture_spec FILE_FIXTURE_SMALL = {
    .page_tokens = 16,
    .n_pages = FILE_FIXTURE_PAGES,
    .page_type = FKV_F16,
    .rotate = FKV_ROTATE_K,
    .n_layers = 1,
    .layers = {{1, 32, 0, 0, {8, 32}, {4, 32}}},
};

static void must(bool good, const char *what) {
    if (good) return;
    (void)fprintf(stderr, "page_file_fixture: %s: %s\n", what, fkv_message());
    abort();
}

/* ---- cache ---- */

void file_fixture_open(file_fixture *w, const file_fixture_spec *spec, uint8_t junk) {
    *w = (file_fixture){.spec = *spec};
    fkv_file_identity *identity = &w->identity;
    *identity = (fkv_file_identity){.page_tokens = spec->page_tokens,
                                    .n_layers = spec->n_layers,
                                    .layers = w->spec.layers,
                                    .page_type = spec->page_type,
                                    .rotate = spec->rotate,
                                    .rotation_seed = 7,
                                    .rope_id = "neox base=10000",
                                    .numerics = "cpu golden 1"};
    for (uint8_t i = 0; i < 32; i++) identity->weights_id[i] = i;

    fkv_pager_spec pages = {.page_tokens = spec->page_tokens,
                            .max_seqs = FILE_FIXTURE_SEQS,
                            .max_seq_tokens = spec->n_pages * spec->page_tokens,
                            .max_step_tokens = FILE_FIXTURE_STEP_TOKENS};
    w->slab = (fkv_slab){.page_tokens = spec->page_tokens, .n_layers = spec->n_layers, .layers = w->slab_layers};
    for (uint32_t l = 0; l < spec->n_layers; l++) {
        const fkv_file_layer *layer = &spec->layers[l];
        fkv_codec codec[FKV_N_SIDES];
        must(fkv_codec_make(fkv_file_codec(layer->k), layer->head_dim, spec->page_type, &codec[FKV_SIDE_K]) == FKV_OK,
             "fkv_codec_make for K");
        must(fkv_codec_make(fkv_file_codec(layer->v), layer->head_dim, spec->page_type, &codec[FKV_SIDE_V]) == FKV_OK,
             "fkv_codec_make for V");
        fkv_block_make(&codec[FKV_SIDE_K], &codec[FKV_SIDE_V], spec->page_tokens, &w->blocks[l]);
        uint32_t g = 0;
        while (g < pages.n_groups && (pages.groups[g].window != layer->window || pages.groups[g].n_sinks != layer->n_sinks)) g++;
        if (g == pages.n_groups) {
            pages.groups[pages.n_groups++] = (fkv_group_spec){layer->window, layer->n_sinks, spec->n_pages};
            w->slab.group_pages[g] = spec->n_pages;
        }
        w->slab_layers[l] = (fkv_slab_layer){.group = g, .n_heads = layer->n_kv_heads, .block_bytes = w->blocks[l].bytes};
        for (int p = 0; p < FKV_SLAB_PARTS; p++)
            w->slab_layers[l].parts[p] = (fkv_slab_part){w->blocks[l].offset[p / FKV_N_PARTS][p % FKV_N_PARTS],
                                                         codec[p / FKV_N_PARTS].row_bytes[p % FKV_N_PARTS]};
    }
    w->slab.n_groups = pages.n_groups;
    must(fkv_slab_layout(&w->slab) == FKV_OK, "layout");
    w->slab.base = aligned_alloc(64, fkv_align_up(w->slab.bytes, 64));
    must(w->slab.base != NULL, "slab");
    memset(w->slab.base, junk, w->slab.bytes);

    fkv_carve count = {0};
    fkv_pager_layout(&count, &pages, &w->pager);
    const uint64_t bytes = fkv_align_up(count.used, FKV_CARVE_ALIGN);
    w->pager_memory = aligned_alloc(FKV_CARVE_ALIGN, bytes);
    must(w->pager_memory != NULL, "pager");
    memset(w->pager_memory, 0, bytes);
    fkv_carve carve = {.base = w->pager_memory, .size = bytes};
    fkv_pager_layout(&carve, &pages, &w->pager);
    w->buffer = aligned_alloc(64, FKV_FILE_BUFFER_BYTES);
    must(w->buffer != NULL, "buffer");
}

void file_fixture_close(file_fixture *w) {
    free(w->slab.base);
    free(w->pager_memory);
    free(w->buffer);
}

/* ---- rows ---- */

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint32_t file_fixture_token(uint64_t seed, uint32_t position) { return (uint32_t)(mix(seed << 32 ^ position) % 50000); }

void file_fixture_tokens(uint64_t seed, uint32_t *tokens, uint32_t n_tokens) {
    for (uint32_t i = 0; i < n_tokens; i++) tokens[i] = file_fixture_token(seed, i);
}

void file_fixture_row(const file_fixture *w, uint64_t seed, uint32_t layer, fkv_side side, uint32_t head, uint32_t position,
                      float *row) {
    const uint64_t of_row = mix(mix(mix(seed) ^ (uint64_t)position << 20 ^ layer << 10 ^ head << 1 ^ (uint64_t)side));
    for (uint32_t d = 0; d < w->spec.layers[layer].head_dim; d++) {
        const int32_t number = (int32_t)(mix(of_row + d) % 2049) - 1024;
        /* a few channels have much larger values, as in real keys */
        row[d] = (float)number / 256.0f * (d % 17 == 3 ? 20.0f : 1.0f);
    }
}

/* Encodes a row as a step would write it. */
static void encode_row(const file_fixture *w, uint64_t seed, uint32_t layer, fkv_side side, uint32_t head, uint32_t position,
                       uint8_t *const part[FKV_N_PARTS]) {
    float row[FKV_MAX_HEAD_DIM];
    file_fixture_row(w, seed, layer, side, head, position, row);
    if (((uint32_t)w->spec.rotate >> (uint32_t)side & 1u) != 0) {
        fkv_rotation rotation;
        fkv_rotation_make(w->identity.rotation_seed, (uint32_t)side, w->spec.layers[layer].head_dim, &rotation);
        fkv_rotation_apply(&rotation, row);
    }
    fkv_codec_encode(&w->blocks[layer].codec[side], row, part);
}

static void write_token(const file_fixture *w, uint32_t slot, uint64_t seed, uint32_t position) {
    for (uint32_t l = 0; l < w->spec.n_layers; l++) {
        const uint32_t group = w->slab_layers[l].group;
        const uint32_t page = fkv_page_at(fkv_pager_view(w->pager, group, slot), position / w->spec.page_tokens);
        for (uint32_t head = 0; head < w->spec.layers[l].n_kv_heads; head++) {
            uint8_t *block = fkv_slab_run(&w->slab, l, page) + (size_t)head * w->blocks[l].bytes;
            for (int side = 0; side < FKV_N_SIDES; side++) {
                uint8_t *part[FKV_N_PARTS];
                fkv_block_row(&w->blocks[l], block, (fkv_side)side, position % w->spec.page_tokens, part);
                encode_row(w, seed, l, (fkv_side)side, head, position, part);
            }
        }
    }
}

void file_fixture_append(file_fixture *w, fkv_seq seq, uint64_t seed, uint32_t n_tokens) {
    uint32_t slot = 0;
    uint32_t start = 0;
    must(fkv_pager_slot(w->pager, seq, &slot) == FKV_OK && fkv_pager_length(w->pager, seq, &start) == FKV_OK, "slot");
    for (uint32_t done = 0; done < n_tokens;) {
        const uint32_t n = fkv_min_u32(n_tokens - done, FILE_FIXTURE_STEP_TOKENS);
        must(fkv_pager_step_begin(w->pager, &(fkv_row){seq, n}, 1) == FKV_OK, "step");
        uint32_t n_copies = 0;
        const fkv_page_copy *copies = fkv_pager_step_copies(w->pager, &n_copies);
        for (uint32_t i = 0; i < n_copies; i++) fkv_slab_copy_page(&w->slab, copies[i].group, copies[i].from, copies[i].to);
        for (uint32_t i = 0; i < n; i++) write_token(w, slot, seed, start + done + i);
        must(fkv_pager_step_commit(w->pager) == FKV_OK, "commit");
        done += n;
    }
}

fkv_seq file_fixture_fill(file_fixture *w, uint64_t seed, uint32_t n_tokens, uint32_t max_tokens) {
    fkv_seq seq = 0;
    must(fkv_pager_open(w->pager, &(fkv_seq_config){.max_tokens = max_tokens}, &seq, NULL) == FKV_OK, "open");
    file_fixture_append(w, seq, seed, n_tokens);
    return seq;
}

/* Returns true if a block contains exactly the expected rows, and zeros everywhere else. */
static bool block_holds(const file_fixture *w, const uint8_t *block, uint64_t seed, uint32_t layer, uint32_t head, uint32_t first,
                        uint32_t n_live) {
    const fkv_block *layout = &w->blocks[layer];
    uint8_t *expected = calloc(1, layout->bytes);
    must(expected != NULL, "block");
    for (uint32_t t = 0; t < n_live; t++) {
        for (int side = 0; side < FKV_N_SIDES; side++) {
            uint8_t *part[FKV_N_PARTS];
            fkv_block_row(layout, expected, (fkv_side)side, t, part);
            encode_row(w, seed, layer, (fkv_side)side, head, first + t, part);
        }
    }
    const bool same = memcmp(block, expected, layout->bytes) == 0;
    free(expected);
    return same;
}

bool file_fixture_holds(const file_fixture *w, fkv_seq seq, uint64_t seed, uint32_t n_tokens) {
    uint32_t slot = 0;
    uint32_t length = 0;
    if (fkv_pager_slot(w->pager, seq, &slot) != FKV_OK || fkv_pager_length(w->pager, seq, &length) != FKV_OK) return false;
    if (length != n_tokens) return false;
    const uint32_t page_tokens = w->spec.page_tokens;
    for (uint32_t l = 0; l < w->spec.n_layers; l++) {
        const fkv_file_layer *layer = &w->spec.layers[l];
        const uint32_t group = w->slab_layers[l].group;
        const uint32_t first = fkv_pager_first_page(w->pager, group, n_tokens);
        for (uint32_t logical = 0; logical < fkv_ceil_div(n_tokens, page_tokens); logical++) {
            if (logical < first && logical >= fkv_ceil_div(layer->n_sinks, page_tokens)) continue;
            const uint32_t page = fkv_page_at(fkv_pager_view(w->pager, group, slot), logical);
            const uint32_t n_live = fkv_min_u32(page_tokens, n_tokens - logical * page_tokens);
            for (uint32_t head = 0; head < layer->n_kv_heads; head++) {
                const uint8_t *block = fkv_slab_run(&w->slab, l, page) + (size_t)head * w->blocks[l].bytes;
                if (!block_holds(w, block, seed, l, head, logical * page_tokens, n_live)) return false;
            }
        }
    }
    return true;
}

fkv_status file_fixture_save(const file_fixture *w, fkv_seq seq, uint64_t seed, uint32_t n_tokens, const char *path) {
    static uint32_t tokens[FILE_FIXTURE_MAX_TOKENS];
    uint32_t slot = 0;
    must(fkv_pager_slot(w->pager, seq, &slot) == FKV_OK, "slot");
    must(n_tokens <= FILE_FIXTURE_MAX_TOKENS, "too many tokens");
    file_fixture_tokens(seed, tokens, n_tokens);
    return fkv_page_file_save(&w->identity, &w->slab, w->pager, slot, tokens, n_tokens, path, w->buffer);
}

fkv_status file_fixture_load(file_fixture *w, uint32_t max_tokens, const char *path, fkv_seq *seq) {
    const fkv_seq_config config = {.max_tokens = max_tokens};
    return fkv_page_file_load(&w->identity, &w->slab, w->pager, &config, path, w->buffer, seq);
}

uint32_t file_fixture_free_pages(const file_fixture *w) {
    fkv_stats stats = {0};
    uint32_t free_pages = 0;
    must(fkv_pager_consistent(w->pager), "the pager is not consistent");
    fkv_pager_stats(w->pager, &stats);
    for (uint32_t g = 0; g < stats.n_groups; g++) free_pages += stats.groups[g].free;
    return free_pages;
}

/* ---- files ---- */

enum { FILE_FIXTURE_NAMES = 64 };

static char folder_path[FILE_FIXTURE_PATH / 2];

const char *file_fixture_folder(void) {
    if (folder_path[0] == '\0') {
        const char *tmp = getenv("TMPDIR");
        (void)snprintf(folder_path, sizeof folder_path, "%s/flatkv-XXXXXX", tmp != NULL && tmp[0] != '\0' ? tmp : "/tmp");
        must(mkdtemp(folder_path) != NULL, "cannot create the temporary folder");
    }
    return folder_path;
}

const char *file_fixture_path(const char *name) {
    static char paths[FILE_FIXTURE_NAMES][FILE_FIXTURE_PATH];
    const size_t n_folder = strlen(file_fixture_folder());
    size_t i = 0;
    while (i < FILE_FIXTURE_NAMES && paths[i][0] != '\0' && strcmp(paths[i] + n_folder + 1, name) != 0) i++;
    must(i < FILE_FIXTURE_NAMES, "too many names");
    (void)snprintf(paths[i], FILE_FIXTURE_PATH, "%s/%s", file_fixture_folder(), name);
    return paths[i];
}

void file_fixture_remove_folder(void) {
    if (folder_path[0] == '\0') return;
    DIR *folder = opendir(folder_path);
    must(folder != NULL, "cannot open the temporary folder");
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (unlinkat(dirfd(folder), entry->d_name, 0) != 0) (void)unlinkat(dirfd(folder), entry->d_name, AT_REMOVEDIR);
    }
    (void)closedir(folder);
    (void)rmdir(folder_path);
}

size_t file_fixture_read_file(const char *path, uint8_t *bytes, size_t capacity) {
    FILE *file = fopen(path, "rb");
    must(file != NULL, path);
    size_t n = fread(bytes, 1, capacity, file);
    must(n < capacity && ferror(file) == 0, path);
    (void)fclose(file);
    return n;
}

void file_fixture_write_file(const char *path, const uint8_t *bytes, size_t n) {
    FILE *file = fopen(path, "wb");
    must(file != NULL, path);
    must(n == 0 || fwrite(bytes, 1, n, file) == n, path);
    must(fclose(file) == 0, path);
}

void file_fixture_fix_crcs(uint8_t *bytes, size_t n) {
    fkv_file_header header;
    if (n < sizeof header) return;
    memcpy(&header, bytes, sizeof header);
    for (uint64_t i = 0; i < header.n_pages; i++) {
        fkv_file_entry entry[2];
        const uint64_t at = header.index_offset + i * sizeof entry[0];
        if (header.index_offset > n || i > n || at + sizeof entry[0] > n) return;
        memcpy(&entry[0], bytes + at, sizeof entry[0]);
        uint64_t end = n; /* a page ends where the next one begins; the last page ends at the end of the file */
        if (i + 1 < header.n_pages && at + sizeof entry <= n) {
            memcpy(&entry[1], bytes + at + sizeof entry[0], sizeof entry[1]);
            end = entry[1].offset;
        }
        if (entry[0].offset > end || end > n) continue;
        entry[0].crc32c = fkv_crc32c(0, bytes + entry[0].offset, end - entry[0].offset);
        memcpy(bytes + at, &entry[0], sizeof entry[0]);
    }
}

void file_fixture_fix_digest(uint8_t *bytes, size_t n) {
    fkv_file_header header;
    if (n < sizeof header) return;
    memcpy(&header, bytes, sizeof header);
    const uint64_t end = header.data_offset > n ? n : header.data_offset;
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, bytes, offsetof(fkv_file_header, sha256));
    if (end > sizeof header) fkv_sha256_add(&sha, bytes + sizeof header, end - sizeof header);
    must(fkv_sha256_close(&sha, bytes + offsetof(fkv_file_header, sha256)) == FKV_OK, "digest");
}
