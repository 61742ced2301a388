/* Runs a fuzz target over stored inputs without libFuzzer: replay FILE_OR_FOLDER... The test suite uses this program to run the
 * stored corpora. Fails if there is no input to replay, so that a missing corpus is noticed.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned n_replayed;

static int replay_file(const char *path, size_t size) {
    FILE *file = fopen(path, "rb");
    /* the block is exactly as long as the input, so that a sanitizer detects reads past its end */
    uint8_t *data = malloc(size == 0 ? 1 : size);
    int good = file != NULL && data != NULL && fread(data, 1, size, file) == size;
    if (good) {
        (void)LLVMFuzzerTestOneInput(data, size);
        n_replayed++;
    } else {
        fprintf(stderr, "cannot read %s\n", path);
    }
    if (file != NULL) (void)fclose(file);
    free(data);
    return good;
}

static int replay(const char *path) {
    struct stat about;
    if (stat(path, &about) != 0) {
        fprintf(stderr, "%s does not exist\n", path);
        return 0;
    }
    if (!S_ISDIR(about.st_mode)) return replay_file(path, (size_t)about.st_size);
    DIR *folder = opendir(path);
    if (folder == NULL) {
        fprintf(stderr, "cannot open %s\n", path);
        return 0;
    }
    int good = 1;
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        char inside[4096];
        if (entry->d_name[0] == '.') continue;
        int n = snprintf(inside, sizeof inside, "%s/%s", path, entry->d_name);
        good = n > 0 && (size_t)n < sizeof inside && replay(inside) && good;
    }
    (void)closedir(folder);
    return good;
}

int main(int argc, char **argv) {
    int good = 1;
    for (int i = 1; i < argc; i++) good = replay(argv[i]) && good;
    printf("%u inputs replayed\n", n_replayed);
    return good && n_replayed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
