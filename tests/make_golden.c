/* Writes the golden page files: good.fkv, small.fkv, and one damaged copy of small.fkv for each committed case in golden_cases.c.
 * Run this program only when the format version changes, because the golden files exist to detect unintended changes to the
 * format. With a second folder as an argument, also writes the seeds of fuzz/fuzz_page_file.c, each consisting of a flag byte and
 * a page file.
 *
 * usage: make_golden tests/golden [fuzz/corpus/page_file]
 */
#include "golden_cases.h"
#include "page_file_fixture.h"

#include <stdio.h>
#include <stdlib.h>

static uint8_t bytes[GOLDEN_BYTES];

static const char *in_folder(const char *folder, const char *name, const char *suffix) {
    static char path[FILE_FIXTURE_PATH];
    (void)snprintf(path, sizeof path, "%s/%s%s", folder, name, suffix);
    return path;
}

static void save_good(const file_fixture_spec *spec, uint32_t n_tokens, const char *path) {
    file_fixture w;
    file_fixture_open(&w, spec, 0);
    if (file_fixture_save(&w, file_fixture_fill(&w, FILE_FIXTURE_GOLDEN_SEED, n_tokens, n_tokens), FILE_FIXTURE_GOLDEN_SEED,
                          n_tokens, path) != FKV_OK) {
        (void)fprintf(stderr, "%s\n", fkv_message());
        exit(EXIT_FAILURE);
    }
    file_fixture_close(&w);
}

static void make_seeds(const char *golden, const char *corpus) {
    const struct {
        const char *seed;
        const char *file;
        uint8_t fixes; /* bitwise OR of FIX_ flags, which the fuzz target defines */
        size_t length; /* length to which the file is truncated; 0 if it is not truncated */
    } seeds[] = {{"good", "good", 0, 0},           {"good_rehashed", "good", 24, 0}, {"good_fixed", "good", 31, 0},
                 {"small", "small", 0, 0},         {"small_fixed", "small", 29, 0},  {"small_adopted", "small", 31, 0},
                 {"header_only", "good", 31, 288}, {"short", "good", 0, 5}};
    for (size_t i = 0; i < sizeof seeds / sizeof seeds[0]; i++) {
        const size_t n = file_fixture_read_file(in_folder(golden, seeds[i].file, ".fkv"), bytes + 1, sizeof bytes - 1);
        bytes[0] = seeds[i].fixes;
        file_fixture_write_file(in_folder(corpus, seeds[i].seed, ""), bytes, 1 + (seeds[i].length == 0 ? n : seeds[i].length));
    }
}

int main(int argc, char **argv) {
    if (argc < 2 || argc > 3) {
        (void)fprintf(stderr, "usage: %s golden-folder [corpus-folder]\n", argv[0]);
        return EXIT_FAILURE;
    }
    save_good(&FILE_FIXTURE_GOOD, FILE_FIXTURE_GOOD_TOKENS, in_folder(argv[1], "good", ".fkv"));
    save_good(&FILE_FIXTURE_SMALL, FILE_FIXTURE_SMALL_TOKENS, in_folder(argv[1], "small", ".fkv"));
    for (size_t i = 0; i < N_GOLDEN_CASES; i++) {
        if (!GOLDEN_CASES[i].committed) continue;
        size_t n = file_fixture_read_file(in_folder(argv[1], "small", ".fkv"), bytes, sizeof bytes);
        n = golden_damage(&GOLDEN_CASES[i], bytes, n);
        file_fixture_write_file(in_folder(argv[1], GOLDEN_CASES[i].name, ".fkv"), bytes, n);
    }
    if (argc == 3) make_seeds(argv[1], argv[2]);
    return EXIT_SUCCESS;
}
