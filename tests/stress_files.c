/* Page files of the stress test. Every byte of a saved file must be as docs/page_format.md specifies, and each of the two caches
 * must be able to load the file. Files with a flipped bit must be rejected. A cache with another identity (model, shape or codec)
 * must reject all files. */
#include "stress_operations.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- expected file (sections 2 and 4) ---- */

enum { HEADER = 288, CALIBRATION_AT = 192, LAYER = 48, ENTRY = 24, DIGEST_AT = 256, DATA_ALIGN = 4096, PART_ALIGN = 64 };

typedef struct image {
    stress_fixture *fixture;
    stress_token *const *tokens;
    uint32_t n_tokens;
    uint32_t open_group; /* index of the page group for the open blocks of sealed layers; n_groups if no layer is sealed */
    uint32_t group_of[STRESS_MAX_LAYERS];
    uint32_t n_groups;
    uint8_t *bytes;
    size_t n;
} image;

static size_t up_to(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static void put(uint8_t *at, uint64_t value, int n_bytes) {
    for (int i = 0; i < n_bytes; i++) at[i] = (uint8_t)(value >> 8 * i);
}

static const fkv_layer_config *layer_of(const image *m, uint32_t i) { return &m->fixture->config->layers[i]; }

static uint32_t page_tokens(const image *m) { return m->fixture->config->base.page_tokens; }

static size_t part_bytes(const image *m, uint32_t layer, uint32_t side, uint32_t part) {
    return up_to((size_t)page_tokens(m) * stress_part_bytes(&m->fixture->config->codec[layer][side], part), PART_ALIGN);
}

static bool is_sealed(const image *m, uint32_t layer) { return stress_layer_is_sealed(m->fixture->config, layer); }

static bool is_in(const image *m, uint32_t layer, uint32_t group) {
    return group == m->open_group ? is_sealed(m, layer) : m->group_of[layer] == group;
}

static size_t block_bytes(const image *m, uint32_t layer, uint32_t group) {
    size_t n = 0;
    if (is_sealed(m, layer) && group != m->open_group) return stress_sealed_block_bytes(m->fixture->config, layer);
    for (uint32_t i = 0; i < STRESS_N_SIDES * STRESS_PARTS; i++) n += part_bytes(m, layer, i / STRESS_PARTS, i % STRESS_PARTS);
    return n;
}

static size_t page_bytes(const image *m, uint32_t group) {
    size_t n = 0;
    for (uint32_t i = 0; i < m->fixture->n_layers; i++)
        if (is_in(m, i, group)) n += layer_of(m, i)->n_kv_heads * block_bytes(m, i, group);
    return n;
}

static void find_groups(image *m) {
    for (uint32_t i = 0; i < m->fixture->n_layers; i++) {
        uint32_t same = 0;
        while (layer_of(m, same)->window != layer_of(m, i)->window || layer_of(m, same)->n_sinks != layer_of(m, i)->n_sinks)
            same++;
        m->group_of[i] = same == i ? m->n_groups++ : m->group_of[same];
    }
    m->open_group = m->n_groups;
    m->n_groups += stress_has_sealed_layer(m->fixture->config) ? 1 : 0;
}

static bool has_page(const image *m, uint32_t group, uint32_t page) {
    static const fkv_layer_config open = {.window = 1, .n_sinks = 1};
    uint32_t i = 0;
    while (group != m->open_group && m->group_of[i] != group) i++;
    const fkv_layer_config *l = group == m->open_group ? &open : layer_of(m, i);
    if (l->window == 0 || page * page_tokens(m) < l->n_sinks) return true;
    uint32_t window_start = m->n_tokens + 1 > l->window ? m->n_tokens + 1 - l->window : 0;
    uint32_t first = window_start / page_tokens(m);
    return page >= (group == m->open_group ? first / STRESS_SPAN * STRESS_SPAN : first);
}

static void write_block(const image *m, uint32_t layer, uint32_t head, uint32_t page, uint8_t *at) {
    for (uint32_t side = 0; side < STRESS_N_SIDES; side++) {
        const stress_codec *codec = &m->fixture->config->codec[layer][side];
        size_t row_at = 0;
        for (uint32_t part = 0; part < STRESS_PARTS; part++) {
            size_t row = stress_part_bytes(codec, part);
            for (uint32_t t = page * page_tokens(m); t < (page + 1) * page_tokens(m) && t < m->n_tokens; t++) {
                const uint8_t *stored = stress_stored_row(m->fixture, m->tokens[t], layer, side, head) + row_at;
                memcpy(at + (t % page_tokens(m)) * row, stored, row);
            }
            row_at += row;
            at += part_bytes(m, layer, side, part);
        }
    }
}

static void write_page(const image *m, uint32_t group, uint32_t page, uint8_t *at) {
    for (uint32_t i = 0; i < m->fixture->n_layers; i++) {
        if (!is_in(m, i, group)) continue;
        for (uint32_t head = 0; head < layer_of(m, i)->n_kv_heads; head++, at += block_bytes(m, i, group)) {
            if (!is_sealed(m, i) || group == m->open_group)
                write_block(m, i, head, page, at);
            else if (page != 0 && (page + 1) * page_tokens(m) <= m->n_tokens)
                memcpy(at, stress_sealed_block(m->fixture, m->tokens, page, i, head), block_bytes(m, i, group));
        }
    }
}

static void write_layers(const image *m, uint8_t *at) {
    for (uint32_t i = 0; i < m->fixture->n_layers; i++) {
        const fkv_layer_config *l = layer_of(m, i);
        const uint32_t shape[] = {l->n_kv_heads, l->head_dim, l->window, l->n_sinks};
        uint8_t *to = at + (size_t)LAYER * i;
        for (uint32_t f = 0; f < 4; f++, to += 4) put(to, shape[f], 4);
        for (uint32_t side = 0; side < STRESS_N_SIDES; side++) {
            const stress_codec *codec = &m->fixture->config->sealed[i][side];
            const bool sealed_latent = side == STRESS_K && l->rope_dim != 0 && is_sealed(m, i);
            const fkv_codec_kind kind = sealed_latent ? FKV_CODEC_SEALED : codec->kind;
            const uint32_t fields[] = {codec->bits, kind == FKV_CODEC_AFFINE ? codec->group : 0, (uint32_t)kind};
            for (uint32_t f = 0; f < 3; f++, to += 4) put(to, fields[f], 4);
        }
        put(to, l->rope_dim, 4);
    }
}

/* Writes the hash of the channel bits of all calibrated layers, in layer order. */
static void write_calibration(const image *m, uint8_t *at) {
    static uint8_t bits[STRESS_MAX_LAYERS * STRESS_MAX_HEADS_KV * FKV_MAX_HEAD_DIM];
    size_t n = 0;
    for (uint32_t i = 0; i < m->fixture->n_layers; i++) {
        const fkv_layer_config *l = layer_of(m, i);
        if (l->channel_bits == NULL) continue;
        memcpy(bits + n, l->channel_bits, (size_t)l->n_kv_heads * l->head_dim);
        n += (size_t)l->n_kv_heads * l->head_dim;
    }
    if (n > 0) stress_sha256(bits, n, NULL, 0, at);
}

static void write_header(const image *m, size_t tokens_at, size_t index_at, size_t data_at, uint64_t n_pages) {
    const fkv_config *c = &m->fixture->config->base;
    static const uint8_t magic[8] = {0x89, 0x46, 0x4b, 0x56, 0x0d, 0x0a, 0x1a, 0x0a};
    uint8_t *b = m->bytes;
    memcpy(b, magic, sizeof magic);
    put(b + 8, 1, 4);
    put(b + 12, HEADER, 4);
    put(b + 16, LAYER, 4);
    put(b + 20, ENTRY, 4);
    put(b + 24, m->n, 8);
    put(b + 32, tokens_at, 8);
    put(b + 40, index_at, 8);
    put(b + 48, data_at, 8);
    put(b + 56, n_pages, 8);
    put(b + 64, m->n_tokens, 4);
    put(b + 68, m->fixture->n_layers, 4);
    put(b + 72, m->n_groups, 4);
    put(b + 76, c->page_tokens, 4);
    put(b + 80, (uint64_t)c->page_type, 4);
    put(b + 84, (uint64_t)c->rotate, 4);
    put(b + 88, c->rotate == FKV_ROTATE_NONE ? 0 : c->rotation_seed, 8);
    memcpy(b + 96, c->weights_id, sizeof c->weights_id);
    memcpy(b + 128, c->rope_id, strlen(c->rope_id));
    write_calibration(m, b + CALIBRATION_AT);
    memcpy(b + 224, c->numerics, strlen(c->numerics));
    stress_sha256(b, DIGEST_AT, b + HEADER, data_at - HEADER, b + DIGEST_AT);
}

/* Builds the expected contents of a page file. The caller frees `bytes`. */
static image image_of(stress_fixture *fixture, stress_token *const *tokens, uint32_t n_tokens) {
    image m = {.fixture = fixture, .tokens = tokens, .n_tokens = n_tokens};
    find_groups(&m);
    uint32_t end = (n_tokens + page_tokens(&m) - 1) / page_tokens(&m);
    uint64_t n_pages = 0;
    size_t pages_bytes = 0;
    for (uint32_t g = 0; g < m.n_groups; g++) {
        for (uint32_t p = 0; p < end; p++) {
            if (!has_page(&m, g, p)) continue;
            n_pages++;
            pages_bytes += page_bytes(&m, g);
        }
    }
    size_t tokens_at = HEADER + (size_t)LAYER * fixture->n_layers;
    size_t index_at = up_to(tokens_at + 4 * (size_t)n_tokens, 8);
    size_t data_at = up_to(index_at + ENTRY * n_pages, DATA_ALIGN);
    m.n = data_at + pages_bytes;
    m.bytes = calloc(1, m.n);
    if (m.bytes == NULL) stress_fail("out of memory allocating a file");

    write_layers(&m, m.bytes + HEADER);
    for (uint32_t t = 0; t < n_tokens; t++) put(m.bytes + tokens_at + 4 * (size_t)t, tokens[t]->id, 4);
    uint8_t *entry = m.bytes + index_at;
    size_t at = data_at;
    for (uint32_t g = 0; g < m.n_groups; g++) {
        for (uint32_t p = 0; p < end; p++) {
            if (!has_page(&m, g, p)) continue;
            write_page(&m, g, p, m.bytes + at);
            put(entry, g, 4);
            put(entry + 4, p, 4);
            put(entry + 8, at, 8);
            put(entry + 16, stress_crc32c(m.bytes + at, page_bytes(&m, g)), 4);
            entry += ENTRY;
            at += page_bytes(&m, g);
        }
    }
    write_header(&m, tokens_at, index_at, data_at, n_pages);
    return m;
}

/* ---- save ---- */

static uint8_t *read_all(const char *path, size_t *n) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) stress_fail("cannot read %s", path);
    *n = (size_t)ftell(file);
    uint8_t *bytes = malloc(*n + 1);
    rewind(file);
    if (bytes == NULL || fread(bytes, 1, *n, file) != *n) stress_fail("cannot read %s", path);
    (void)fclose(file);
    return bytes;
}

static void write_all(const char *path, const uint8_t *bytes, size_t n) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(bytes, 1, n, file) != n || fclose(file) != 0) stress_fail("cannot write %s", path);
}

static void check_file(stress_run *l, const stress_file *file) {
    image expected = image_of(&l->fixture, file->tokens, file->n);
    size_t n = 0;
    uint8_t *bytes = read_all(file->path, &n);
    if (n != expected.n) stress_fail("the file has %zu bytes, expected %zu", n, expected.n);
    for (size_t i = n; i-- > 0;) /* runs backwards, so that a wrong page is reported before the checksums that cover it */
        if (bytes[i] != expected.bytes[i])
            stress_fail("byte %zu of %zu in the file is %02x, expected %02x", i, n, bytes[i], expected.bytes[i]);
    free(bytes);
    free(expected.bytes);

    fkv_file_info info;
    stress_expect(fkv_file_inspect(file->path, true, &info), FKV_OK, "inspect");
    const fkv_layer_config *first = &l->config.layers[0];
    if (info.n_tokens != file->n || info.n_layers != l->fixture.n_layers || info.file_bytes != n ||
        info.first_layer.head_dim != first->head_dim || info.first_layer.rope_dim != first->rope_dim ||
        info.first_layer.k.bits != first->k.bits || info.page_type != l->config.base.page_type ||
        info.rotate != l->config.base.rotate)
        stress_fail("the result of fkv_file_inspect() does not match the saved sequence");
    uint32_t n_tokens = 0;
    uint32_t some = file->n < 100 ? file->n : 100;
    stress_expect(fkv_file_tokens(file->path, l->ids, some, &n_tokens), FKV_OK, "file tokens");
    for (uint32_t i = 0; i < some; i++)
        if (l->ids[i] != file->tokens[i]->id || n_tokens != file->n)
            stress_fail("the tokens in the file do not match the saved sequence");
}

void stress_save(stress_run *l, stress_cache *c) {
    stress_random *r = &l->random;
    uint32_t slot = stress_below(r, STRESS_FILES);
    stress_file *file = &l->files[slot];
    const stress_seq *seq = &c->seqs[stress_below(r, c->n_seqs)];
    char path[STRESS_PATH];
    (void)snprintf(path, sizeof path, "%s/%u.fkv", l->folder, slot);
    uint32_t n = stress_chance(r, 60) ? seq->n : stress_between(r, 0, seq->n);
    uint32_t asked = n == seq->n && stress_chance(r, 50) ? 0 : n;
    if (asked == 0) n = seq->n;
    for (uint32_t i = 0; i < n; i++) l->ids[i] = seq->tokens[i]->id;
    fkv_status status = fkv_seq_save(c->cache, seq->number, l->ids, asked, path);
    if (n == 0) {
        stress_expect(status, FKV_BAD_ARGUMENT, "save of no tokens");
        return;
    }
    if (stress_is_gone(c, seq, n) || (c->config.n_states > 0 && n < seq->n)) {
        stress_expect(status, FKV_GONE, "save of dropped tokens");
        l->counts->gone++;
        return;
    }
    stress_expect(status, FKV_OK, "save");
    free((void *)file->tokens);
    file->tokens = (stress_token **)calloc(n, sizeof *file->tokens);
    if (file->tokens == NULL) stress_fail("out of memory allocating the tokens of a file");
    memcpy((void *)file->tokens, (const void *)seq->tokens, n * sizeof *file->tokens);
    memcpy(file->path, path, sizeof path);
    file->n = n;
    file->origin = seq->origin;
    if (c->config.n_states == 0) check_file(l, file);
    l->counts->saves++;
    l->counts->state_saves += c->config.n_states > 0;
}

void stress_files_forget(stress_run *l) {
    for (uint32_t i = 0; i < STRESS_FILES; i++) {
        if (l->files[i].n != 0) (void)remove(l->files[i].path);
        free((void *)l->files[i].tokens);
        l->files[i] = (stress_file){.n = 0};
    }
}

/* ---- load ---- */

static void load_damaged(stress_run *l, stress_cache *c, const stress_file *file) {
    size_t n = 0;
    char path[STRESS_PATH];
    uint8_t *bytes = read_all(file->path, &n);
    size_t at = (size_t)(stress_uniform(&l->random) * (double)n);
    if (stress_chance(&l->random, 30)) at = stress_below(&l->random, HEADER);
    bytes[at] ^= (uint8_t)(1u << stress_below(&l->random, 8));
    (void)snprintf(path, sizeof path, "%s/damaged.fkv", l->folder);
    write_all(path, bytes, n);
    free(bytes);
    fkv_seq number = 0;
    fkv_seq_config config = {.max_tokens = c->config.base.max_tokens};
    fkv_status expected = at < 8 ? FKV_FILE_FORMAT : at < 12 ? FKV_FILE_VERSION : FKV_FILE_DAMAGED;
    if (file->n <= config.max_tokens)
        stress_expect(fkv_seq_load(c->cache, &config, path, &number), expected, "load of a file with a flipped bit");
    (void)remove(path);
    l->counts->damaged++;
}

static void load_foreign(stress_run *l, const stress_file *file) {
    stress_config other;
    stress_config_foreign(&l->random, &l->config, &other);
    fkv_config config = stress_config_of(&other);
    fkv_cache *cache = NULL;
    fkv_seq number = 0;
    stress_expect(fkv_cache_open(&config, &cache), FKV_OK, "open of another identity");
    stress_expect(fkv_seq_load(cache, &(fkv_seq_config){.max_tokens = file->n}, file->path, &number), FKV_FILE_FOREIGN,
                  "load by another identity");
    fkv_cache_close(cache);
    l->counts->foreign++;
}

/* Writes and loads a file that has valid checksums but a NaN in one row, because the cache must handle any bit pattern in a file.
 */
static void load_with_nan(stress_run *l, stress_cache *c, const stress_file *file) {
    fkv_seq_config config = {.max_tokens = c->config.base.max_tokens, .tenant = file->origin};
    uint32_t nan_at = stress_below(&l->random, file->n);
    if (file->n > config.max_tokens || (stress_has_window(&c->config) && !STRESS_DOMAIN.nan_outside_windows)) return;
    if (config.max_tokens > file->n + 50) config.max_tokens = file->n + 50;
    stress_token **tokens = (stress_token **)calloc(file->n, sizeof *tokens);
    if (tokens == NULL) stress_fail("out of memory allocating the tokens of a file");
    uint64_t chain = stress_chain_begin(&l->fixture, file->origin);
    for (uint32_t i = 0; i < file->n; i++) {
        uint32_t id = file->tokens[i]->id;
        tokens[i] =
            i == nan_at ? stress_token_with_nan(&l->fixture, chain, i, id) : stress_token_after(&l->fixture, chain, i, id);
        chain = tokens[i]->chain;
    }
    image made = image_of(&l->fixture, tokens, file->n);
    char path[STRESS_PATH];
    (void)snprintf(path, sizeof path, "%s/damaged.fkv", l->folder);
    write_all(path, made.bytes, made.n);
    fkv_seq number = 0;
    fkv_status status = fkv_seq_load(c->cache, &config, path, &number);
    if (stress_admitted(l, c, config.max_tokens, status, "load of a NaN")) {
        stress_seq *seq = stress_seq_add(c, number, config.tenant, file->origin, config.max_tokens);
        memcpy((void *)seq->tokens, (const void *)tokens, file->n * sizeof *tokens);
        seq->n = file->n;
        stress_seq_without_spare(c, seq);
        l->counts->nan_files++;
        stress_tree_settle(c);
    }
    (void)remove(path);
    free((void *)tokens);
    free(made.bytes);
}

void stress_load(stress_run *l, stress_cache *c) {
    stress_random *r = &l->random;
    const stress_file *file = &l->files[stress_below(r, STRESS_FILES)];
    if (file->n == 0) return;
    if (stress_chance(r, 10)) load_damaged(l, c, file);
    if (stress_chance(r, 5)) load_foreign(l, file);
    if (stress_chance(r, 15) && c->config.n_states == 0) {
        load_with_nan(l, c, file);
        return;
    }
    fkv_seq_config config = {.max_tokens = stress_between(r, 1, c->config.base.max_tokens), .tenant = file->origin};
    if (config.max_tokens < file->n && stress_chance(r, 80)) config.max_tokens = file->n;
    if (stress_chance(r, 15)) config.tenant = 77;
    bool contradicts = false;
    if (stress_chance(r, 50)) {
        config.prompt = l->ids;
        config.n_prompt = file->n;
        for (uint32_t i = 0; i < file->n; i++) l->ids[i] = file->tokens[i]->id;
        contradicts = stress_chance(r, 15);
        if (contradicts && file->n > 1 && stress_chance(r, 50))
            config.n_prompt--;
        else if (contradicts)
            l->ids[stress_below(r, file->n)] ^= 1;
    }
    fkv_seq number = 0;
    fkv_status status = fkv_seq_load(c->cache, &config, file->path, &number);
    if (config.max_tokens < file->n || contradicts) {
        fkv_status expected = config.max_tokens < file->n ? FKV_SEQ_FULL : FKV_BAD_ARGUMENT;
        stress_expect(status, expected, "load of a sequence that does not fit");
        l->counts->refusals++;
        return;
    }
    if (!stress_admitted(l, c, config.max_tokens, status, "load")) return;
    stress_seq *seq = stress_seq_add(c, number, config.tenant, file->origin, config.max_tokens);
    memcpy((void *)seq->tokens, (const void *)file->tokens, file->n * sizeof *seq->tokens);
    seq->n = file->n;
    stress_seq_without_spare(c, seq);
    seq->document = stress_below(r, c->config.n_documents);
    l->counts->loads++;
    l->counts->state_loads += c->config.n_states > 0;
    stress_tree_settle(c);
}
