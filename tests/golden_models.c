/* See golden_models.h. */
#include "golden_models.h"

#include "../src/base/float16.h"
#include "model_fixture.h"
#include "relative_l2.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODELS_FOLDER "tests/data/models"

static void must(bool good, const char *what) {
    if (good) return;
    (void)fprintf(stderr, "golden_models: %s failed: %s (%s)\n", what, fkv_message(), strerror(errno));
    abort();
}

static int compare(const void *a, const void *b) { return strcmp(a, b); }

uint32_t golden_model_names(char names[GOLDEN_MAX_MODELS][GOLDEN_NAME]) {
    DIR *folder = opendir(MODELS_FOLDER);
    must(folder != NULL, MODELS_FOLDER);
    uint32_t n = 0;
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        size_t length = strlen(entry->d_name);
        if (length < 6 || length >= GOLDEN_NAME || strcmp(entry->d_name + length - 5, ".json") != 0) continue;
        must(n < GOLDEN_MAX_MODELS, "too many models");
        memcpy(names[n], entry->d_name, length - 5);
        names[n++][length - 5] = 0;
    }
    (void)closedir(folder);
    qsort(names, n, GOLDEN_NAME, compare);
    return n;
}

/* ---- random tensors ---- */

static uint64_t state_of(const char *model, const char *tensor) {
    char name[256];
    (void)snprintf(name, sizeof name, "%s/%s", model, tensor);
    uint64_t state = 14695981039346656037u;
    for (const char *c = name; *c != 0; c++) state = (state ^ (uint8_t)*c) * 1099511628211u;
    return state;
}

static uint64_t next_of(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

void golden_model_numbers(const char *model, const char *tensor, float middle, float spread, float *out, size_t n) {
    uint64_t state = state_of(model, tensor);
    for (size_t i = 0; i < n; i++) {
        float unit = (float)((int64_t)(next_of(&state) >> 40) - (1 << 23)) / (float)(1 << 23);
        out[i] = fkv_f16_to_f32(fkv_f32_to_f16(unit * spread + middle));
    }
}

/* Generates random 32-bit words. Clears the bits that are not in `mask`, then sets the bits in `more`. */
static void raw_words(const char *model, const char *tensor, uint32_t mask, uint32_t more, uint32_t *out, size_t n) {
    uint64_t state = state_of(model, tensor);
    for (size_t i = 0; i < n; i++) out[i] = ((uint32_t)(next_of(&state) >> 32) & mask) | more;
}

static uint32_t digit_of(char c) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *found = c != 0 ? strchr(digits, c) : NULL;
    return found != NULL ? (uint32_t)(found - digits) : 0;
}

static void read_base64(const char *text, void *out, size_t n_bytes) {
    uint8_t *to = out;
    must((strlen(text) + 3) / 4 * 3 >= n_bytes, "logits too short");
    for (size_t i = 0; i < n_bytes; i++) {
        size_t bit = i * 8;
        uint32_t two = digit_of(text[bit / 6]) << 6 | digit_of(text[bit / 6 + 1]);
        to[i] = (uint8_t)(two >> (4 - bit % 6));
    }
}

static uint32_t read_list(const json_t *json, const char *key, uint32_t *out, uint32_t max) {
    const json_t *list = json_object_get(json, key);
    uint32_t n = (uint32_t)json_array_size(list);
    must(n > 0 && n <= max, key);
    for (uint32_t i = 0; i < n; i++) out[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    return n;
}

/* ---- files ---- */

static const char *path_of(const golden_model *g, const char *file, char path[1024]) {
    (void)snprintf(path, 1024, "%s/%s", g->folder, file);
    return path;
}

static size_t count_of(const json_t *shape) {
    size_t n = 1;
    for (size_t i = 0; i < json_array_size(shape); i++) n *= (size_t)json_integer_value(json_array_get(shape, i));
    return n;
}

/* Tensor entry: [name, shape, mean, spread] for floats, with an optional fifth item "F16"; or [name, shape, mask, more, dtype]
 * for raw bits. */
static const char *dtype_of(const json_t *tensor) {
    const char *dtype = json_string_value(json_array_get(tensor, 4));
    return dtype != NULL ? dtype : "F32";
}

static size_t bytes_of(const json_t *tensor) {
    const char *dtype = dtype_of(tensor);
    const size_t n = count_of(json_array_get(tensor, 1));
    if (strcmp(dtype, "F16") == 0) return 2 * n;
    return strcmp(dtype + 1, "32") == 0 ? 4 * n : n;
}

/* Builds the header of a safetensors file, padded to a multiple of 8 bytes. */
static char *make_header(const json_t *tensors) {
    json_t *header = json_object();
    size_t at = 0;
    size_t i = 0;
    json_t *tensor = NULL;
    json_array_foreach(tensors, i, tensor) {
        json_t *shape = json_array_get(tensor, 1);
        size_t bytes = bytes_of(tensor);
        json_t *about = json_pack("{s:s, s:O, s:[I, I]}", "dtype", dtype_of(tensor), "shape", shape, "data_offsets",
                                  (json_int_t)at, (json_int_t)at + (json_int_t)bytes);
        must(json_object_set_new(header, json_string_value(json_array_get(tensor, 0)), about) == 0, "building the header");
        at += bytes;
    }
    char *text = json_dumps(header, JSON_COMPACT);
    must(text != NULL, "building the header");
    json_decref(header);
    size_t n = strlen(text);
    char *padded = malloc(n + 9);
    must(padded != NULL, "malloc");
    memcpy(padded, text, n);
    free(text);
    while (n % 8 != 0) padded[n++] = ' ';
    padded[n] = 0;
    return padded;
}

/* Generates the bytes of a tensor. out: [bytes_of()] */
static void make_tensor(const golden_model *g, const json_t *tensor, uint8_t *out) {
    const char *name = json_string_value(json_array_get(tensor, 0));
    const json_t *first = json_array_get(tensor, 2);
    const json_t *second = json_array_get(tensor, 3);
    const size_t n = count_of(json_array_get(tensor, 1));
    if (dtype_of(tensor)[0] != 'F' || strcmp(dtype_of(tensor), "F8_E4M3") == 0) {
        const size_t n_bytes = bytes_of(tensor);
        uint32_t *words = malloc(n_bytes + sizeof *words);
        must(words != NULL, "malloc");
        raw_words(g->name, name, (uint32_t)json_integer_value(first), (uint32_t)json_integer_value(second), words,
                  (n_bytes + 3) / 4);
        memcpy(out, words, n_bytes);
        free(words);
        return;
    }
    float *numbers = malloc(n * sizeof *numbers);
    must(numbers != NULL, "malloc");
    golden_model_numbers(g->name, name, (float)json_number_value(first), (float)json_number_value(second), numbers, n);
    if (bytes_of(tensor) == 2 * n)
        for (size_t i = 0; i < n; i++) fkv_store_half(out, (uint32_t)i, fkv_f32_to_f16(numbers[i]));
    else
        memcpy(out, numbers, n * sizeof *numbers);
    free(numbers);
}

/* Returns the number of safetensors files. If there is more than one, an index file is written too, as for large published
 * models. */
static uint32_t n_shards_of(const golden_model *g) {
    const json_int_t n = json_integer_value(json_object_get(g->json, "shards"));
    return n > 1 ? (uint32_t)n : 1;
}

static const char *shard_name(const golden_model *g, uint32_t shard, char name[64]) {
    const uint32_t n = n_shards_of(g);
    (void)snprintf(name, 64, n > 1 ? "model-%05u-of-%05u.safetensors" : "model.safetensors", shard + 1, n);
    return name;
}

static void write_shard(const golden_model *g, uint32_t shard, const json_t *tensors) {
    char path[1024];
    char name[64];
    char *header = make_header(tensors);
    uint64_t n_header = strlen(header);
    FILE *file = fopen(path_of(g, shard_name(g, shard, name), path), "wb");
    must(file != NULL && fwrite(&n_header, 8, 1, file) == 1 && fwrite(header, 1, n_header, file) == n_header,
         "writing the header");
    free(header);
    size_t i = 0;
    json_t *tensor = NULL;
    json_array_foreach(tensors, i, tensor) {
        size_t n = bytes_of(tensor);
        uint8_t *bytes = malloc(n);
        must(bytes != NULL, "malloc");
        make_tensor(g, tensor, bytes);
        must(fwrite(bytes, 1, n, file) == n, "writing a tensor");
        free(bytes);
    }
    must(fclose(file) == 0, path);
}

/* Distributes the tensors over the files round-robin, so that the parts of a quantized weight are in different files. */
static void write_tensors(const golden_model *g) {
    const json_t *tensors = json_object_get(g->json, "tensors");
    const uint32_t n = n_shards_of(g);
    json_t *map = json_object();
    char path[1024];
    char name[64];
    for (uint32_t shard = 0; shard < n; shard++) {
        json_t *own = json_array();
        for (size_t i = shard; i < json_array_size(tensors); i += n) {
            json_t *tensor = json_array_get(tensors, i);
            must(json_array_append(own, tensor) == 0, "building the tensor list");
            must(json_object_set_new(map, json_string_value(json_array_get(tensor, 0)),
                                     json_string(shard_name(g, shard, name))) == 0,
                 "building the index");
        }
        write_shard(g, shard, own);
        json_decref(own);
    }
    json_t *index = json_pack("{s:o}", "weight_map", map);
    must(n == 1 || json_dump_file(index, path_of(g, "model.safetensors.index.json", path), 0) == 0, "writing the index");
    json_decref(index);
}

void golden_model_open(golden_model *g, const char *name) {
    char path[1024];
    memset(g, 0, sizeof *g);
    (void)snprintf(g->name, sizeof g->name, "%s", name);
    (void)snprintf(path, sizeof path, MODELS_FOLDER "/%s.json", name);
    g->json = json_load_file(path, 0, NULL);
    must(g->json != NULL, path);
    g->n_tokens = read_list(g->json, "tokens", g->tokens, GOLDEN_MAX_TOKENS);
    g->n_rows = read_list(g->json, "rows", g->rows, GOLDEN_MAX_ROWS);
    g->max_tokens = (uint32_t)json_integer_value(json_object_get(g->json, "max_tokens"));
    const char *logits = json_string_value(json_object_get(g->json, "logits"));
    must(logits != NULL, "logits");
    read_base64(logits, g->logits, g->n_rows * GOLDEN_VOCAB * sizeof(float));
    const char *parent = getenv("TMPDIR");
    (void)snprintf(g->folder, sizeof g->folder, "%s/flatkv-golden-XXXXXX", parent != NULL && parent[0] != 0 ? parent : "/tmp");
    must(mkdtemp(g->folder) != NULL, "creating the model folder");
    must(json_dump_file(json_object_get(g->json, "config"), path_of(g, "config.json", path), 0) == 0, "config.json");
    write_tensors(g);
}

void golden_model_close(golden_model *g) {
    char path[1024];
    char name[64];
    for (uint32_t shard = 0; shard < n_shards_of(g); shard++) (void)unlink(path_of(g, shard_name(g, shard, name), path));
    (void)unlink(path_of(g, "model.safetensors.index.json", path));
    (void)unlink(path_of(g, "config.json", path));
    json_decref(g->json);
    (void)rmdir(g->folder);
}

fkv_model *golden_model_load(golden_model *g, const char *name) {
    const fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    golden_model_open(g, name);
    must(fkv_model_load(g->folder, &config, &model) == FKV_OK, fkv_message());
    return model;
}

/* ---- model runs ---- */

double golden_model_embedding_distance(const golden_model *g, const fkv_model *model, uint32_t chunk) {
    const char *text = json_string_value(json_object_get(g->json, "embedding"));
    const uint32_t dim = fkv_model_about(model)->dim;
    if (text == NULL) return 0.0;
    float *expected = malloc(dim * sizeof *expected);
    float *got = malloc(dim * sizeof *got);
    must(expected != NULL && got != NULL, "malloc");
    read_base64(text, expected, dim * sizeof *expected);
    fkv_runner_config config = model_runner_config(16, g->n_tokens, chunk);
    config.embeddings = true;
    fkv_runner *runner = model_runner(model, config);
    must(fkv_embed(runner, g->tokens, g->n_tokens, dim, got) == FKV_OK, "fkv_embed");
    const double distance = relative_l2(got, expected, dim);
    /* an embedding with half of the dimensions consists of the first half of the values, rescaled to a norm of 1 */
    double squares = 0.0;
    must(fkv_embed(runner, g->tokens, g->n_tokens, dim / 2, got) == FKV_OK, "fkv_embed");
    for (uint32_t i = 0; i < dim / 2; i++) squares += (double)expected[i] * (double)expected[i];
    for (uint32_t i = 0; i < dim / 2; i++) expected[i] = (float)((double)expected[i] / sqrt(squares));
    const double shortened = relative_l2(got, expected, dim / 2);
    fkv_runner_close(runner);
    free(expected);
    free(got);
    return distance > shortened ? distance : shortened;
}

double golden_model_distance(const golden_model *g, const fkv_model *model, uint32_t chunk, uint32_t n_single) {
    float *logits = malloc((size_t)g->n_tokens * GOLDEN_VOCAB * sizeof *logits);
    float *kept = malloc((size_t)g->n_rows * GOLDEN_VOCAB * sizeof *kept);
    must(logits != NULL && kept != NULL && n_single <= g->n_tokens, "malloc");
    fkv_runner *runner = model_runner(model, model_runner_config(16, g->max_tokens, chunk));
    fkv_seq seq = model_seq(runner, g->n_tokens);
    uint32_t n_chunked = g->n_tokens - n_single;
    model_run(runner, seq, g->tokens, n_chunked, chunk, GOLDEN_VOCAB, logits);
    model_run(runner, seq, g->tokens + n_chunked, n_single, 1, GOLDEN_VOCAB, logits + (size_t)n_chunked * GOLDEN_VOCAB);
    for (uint32_t i = 0; i < g->n_rows; i++)
        memcpy(kept + (size_t)i * GOLDEN_VOCAB, logits + (size_t)g->rows[i] * GOLDEN_VOCAB, GOLDEN_VOCAB * sizeof *kept);
    double distance = relative_l2(kept, g->logits, (size_t)g->n_rows * GOLDEN_VOCAB);
    fkv_runner_close(runner);
    free(kept);
    free(logits);
    return distance;
}
