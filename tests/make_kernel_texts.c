/* Writes the kernels of each case as sources: host C++ that runs them, and the very texts that a device would compile, in a
 * signature like the one that is generated around them.
 *
 * usage: make_kernel_texts host|cuda|metal <folder>
 */
#include "kernel_cases.h"

#include "../src/attn/kernels/kernel_text.h"
#include "kernel_files.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const kernel_names[FKV_N_KERNELS] = {"write", "copy_pages", "decode", "merge"};

static FILE *open_text(const char *folder, uint32_t i, const char *ending) {
    char path[512];
    snprintf(path, sizeof path, "%s/kernel_case_%u%s", folder, i, ending);
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        perror(path);
        exit(EXIT_FAILURE);
    }
    return file;
}

static void put_header(FILE *file, fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer, uint32_t rows) {
    size_t size = fkv_kernel_header(device, kernel, layer, rows, NULL, 0) + 1;
    char *text = malloc(size);
    if (text == NULL || fkv_kernel_header(device, kernel, layer, rows, text, size) != size - 1) abort();
    fputs(text, file);
    free(text);
}

/* All kernels of a case in one source: the texts behind the prelude stand side by side. */
static void write_host(const char *folder, uint32_t i, const fkv_attn_layer *layer, uint32_t rows) {
    FILE *file = open_text(folder, i, ".cpp");
    put_header(file, FKV_KERNEL_HOST, FKV_KERNEL_DECODE, layer, rows);
    fputs(fkv_kernel_file_write, file);
    fputs(fkv_kernel_file_attend_merge, file);
    fprintf(file,
            "extern \"C\" void kernel_case_%u(int kernel, const fkv_u32 grid[3], fkv_u32 n_threads, fkv_u32 team, const void *const *in, "
            "void *result) {\n",
            i);
    for (int kernel = 0; kernel < FKV_N_KERNELS; kernel++) {
        const char *const *inputs = fkv_kernel_inputs((fkv_kernel)kernel);
        fprintf(file, "if (kernel == %d) fkv_host_run(grid, n_threads, team, [=](fkv_place place) {\n", kernel);
        for (int k = 0; inputs[k] != NULL && strcmp(inputs[k], "after") != 0; k++) {
            bool words = strcmp(inputs[k], "table") == 0 || strcmp(inputs[k], "pairs") == 0;
            const char *type = words ? "fkv_u32" : strcmp(inputs[k], "parts") == 0 ? "float" : "void";
            fprintf(file, "const %s *%s = (const %s *)in[%d];\n", type, inputs[k], type, k);
        }
        const char *output = fkv_kernel_outputs((fkv_kernel)kernel)[0];
        const char *type = strcmp(output, "parts") == 0 ? "float" : strcmp(output, "ticket") == 0 ? "fkv_u32" : "void";
        fprintf(file, "%s *%s = (%s *)result;\n%s});\n", type, output, type, fkv_kernel_source(FKV_KERNEL_HOST, (fkv_kernel)kernel));
    }
    fputs("}\n", file);
    fclose(file);
}

int main(int argc, char **argv) {
    if (argc != 3) return EXIT_FAILURE;
    for (uint32_t i = 0; i < N_KERNEL_CASES; i++) {
        attn_world world;
        if (!attn_world_describe(&world, &kernel_cases[i])) return EXIT_FAILURE;
        uint32_t rows = fkv_decode_rows(FKV_KERNEL_HOST, &world.layer, kernel_case_queries(&kernel_cases[i]));
        write_host(argv[2], i, &world.layer, rows);
    }
    (void)kernel_names;
    return EXIT_SUCCESS;
}
