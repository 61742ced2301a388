/* Writes the kernel sources of each case. "host" writes C++ sources that run the kernels on the host. "cuda" and "metal" write
 * exactly the sources that are compiled for the device, with a function signature like the one that MLX generates.
 *
 * usage: make_kernel_sources host|cuda|metal <folder>
 */
#include "kernel_cases.h"
#include "product_cases.h"
#include "recurrent_cases.h"

#include "../src/attn/gpu/kernel_source.h"
#include <kernel_files.h>

#include <stdio.h>
#include <stdlib.h>

static const char *const kernel_names[FKV_N_KERNELS] = {"write",        "copy_pages", "put_numbers",  "decode", "merge",
                                                        "decode_merge", "prefill",    "copy_decoded", "seal"};

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

/* Writes the header of a kernel source. In host sources, the soft cap is a variable of the test program, so that one compiled
 * kernel can be tested with every soft cap. An unnamed namespace begins after the prelude, because the sources of several cases
 * are linked into one program and define different classes with the same names. */
static void put_header(FILE *file, fkv_kernel_device device, fkv_kernel kernel, const fkv_attn_layer *layer, uint32_t rows) {
    static const char cap[] = "#define FKV_SOFTCAP_BITS ";
    size_t size = fkv_kernel_header(device, kernel, layer, rows, NULL, 0) + 1;
    char *text = malloc(size);
    if (text == NULL || fkv_kernel_header(device, kernel, layer, rows, text, size) != size - 1) abort();
    char *at = strstr(text, cap);
    if (at == NULL) abort();
    if (device == FKV_KERNEL_HOST) {
        fprintf(file, "extern \"C\" unsigned kernel_softcap_bits;\n%.*s%skernel_softcap_bits\n", (int)(at - text), text, cap);
        char *after_prelude = strstr(at, fkv_kernel_file_step_words);
        if (after_prelude == NULL) abort();
        at = strchr(at, '\n');
        fprintf(file, "%.*snamespace {\n%s", (int)(after_prelude - at), at, after_prelude);
    } else {
        fputs(text, file);
    }
    free(text);
}

static void put_number(FILE *file, const char *name, uint32_t number) {
    fprintf(file, "#undef FKV_%s\n#define FKV_%s %u\n", name, name, number);
}

static void put_prefill_shape(FILE *file, fkv_kernel_device device, const fkv_attn_layer *layer) {
    put_number(file, "PREFILL_ROWS", fkv_prefill_rows(device, layer));
    put_number(file, "PREFILL_THREADS", fkv_kernel_threads(device, FKV_KERNEL_PREFILL, layer));
}

static void put_warpgroup_prefill(FILE *file, const fkv_attn_layer *layer) {
    fputs(fkv_kernel_file_warpgroup_host, file);
    if (layer->rope_dim != 0) {
        fputs(fkv_kernel_file_prefill_latent, file);
        return;
    }
    fputs(fkv_kernel_file_prefill_shape, file);
    fputs(layer->sealed ? fkv_kernel_file_prefill_sealed : fkv_kernel_file_prefill_unpack, file);
    if (layer->sealed) fputs(fkv_kernel_file_prefill_share, file);
    fputs(fkv_kernel_file_prefill_feed, file);
    fputs(fkv_kernel_file_prefill_wgmma, file);
}

/* Writes the Hopper prefill kernel for pairs of blocks that share work. The source states a number of multiprocessors that is
 * large enough for the kernel to assume that both blocks of a pair run at the same time. */
static void put_lone_prefill(FILE *file, const fkv_attn_layer *layer) {
    put_number(file, "PREFILL_SHARERS", 2);
    put_number(file, "HOST_PROCESSORS", 132);
    fputs("namespace lone {\n", file);
    put_warpgroup_prefill(file, layer);
    fputs("}\n", file);
}

/* Writes the Hopper prefill kernel for groups of blocks that run at the same time. The rings have as few slots as possible, so
 * that blocks wait for each other more often. */
static void put_group_prefill(FILE *file, const fkv_attn_layer *layer) {
    put_number(file, "PREFILL_SHARERS", GROUP_BLOCKS);
    put_number(file, "PREFILL_SLOTS", GROUP_BLOCKS);
    put_number(file, "PREFILL_RING_BYTES", GROUP_RING_BYTES);
    put_number(file, "PREFILL_PATIENCE", 1 << 20);
    put_number(file, "HOST_PROCESSORS", 132);
    fputs("namespace group {\n", file);
    put_warpgroup_prefill(file, layer);
    fputs("}\n", file);
}

/* Writes the Hopper prefill kernel, or the prefill kernel with plain loops for layers that use it on CUDA. The tile code that the
 * kernel needs is part of the decode source. */
static void put_hopper_prefill(FILE *file, uint32_t i, const fkv_attn_layer *layer) {
    put_prefill_shape(file, FKV_KERNEL_HOST, layer);
    if (i == UNSHARED_PREFILL_CASE) put_number(file, "HOST_PROCESSORS", 0);
    if (fkv_prefill_has_warpgroups(layer)) {
        put_warpgroup_prefill(file, layer);
    } else {
        fputs(fkv_kernel_file_prefill_plain, file);
        fputs(
            "#undef FKV_WARP_ROWS\n#undef FKV_PREFILL_WARPS\n#undef FKV_OPEN_QUERIES\n#undef FKV_WARP_WORDS\n#undef FKV_PREFILL_SHARED\n",
            file);
    }
    fputs(fkv_kernel_file_copy_decoded, file);
}

/* Writes the Metal kernels for decode and prefill in a separate namespace. */
static void put_simdgroups(FILE *file, uint32_t i, const fkv_attn_layer *layer) {
    put_prefill_shape(file, FKV_KERNEL_METAL, layer);
    fprintf(file, "namespace simdgroup {\n%s%s#undef FKV_PREFILL_SHARED\n%s", fkv_kernel_file_simdgroup_host,
            fkv_kernel_file_simdgroup_walk, fkv_kernel_file_prefill_simdgroup);
    if (kernel_case_has(i, KERNEL_SIMDGROUP_DECODE)) {
        put_number(file, "ITEM_ROWS", fkv_decode_rows(FKV_KERNEL_METAL, layer, 1));
        fprintf(file, "#undef FKV_DECODE_SHARED\n%s", fkv_kernel_file_decode_simdgroup);
    }
    fputs("}\n#undef FKV_PREFILL_SHARED\n", file);
}

/* Writes the kernels that follow the decode source: Hopper prefill, Metal decode and prefill, and prefill in plain loops with
 * Metal's launch shape. For a sealed layer, the decode source already contains plain_rows and plain_tile, so they are not written
 * again. */
static void put_variants(FILE *file, uint32_t i, const fkv_attn_layer *layer) {
    put_hopper_prefill(file, i, layer);
    if (kernel_case_has(i, KERNEL_LONE_PREFILL)) put_lone_prefill(file, layer);
    if (kernel_case_has(i, KERNEL_GROUP_PREFILL)) put_group_prefill(file, layer);
    if (layer->sealed) fputs(fkv_kernel_file_seal, file);
    const bool latent = layer->rope_dim != 0;
    if (latent)
        put_prefill_shape(file, FKV_KERNEL_METAL, layer);
    else
        put_simdgroups(file, i, layer);
    if (!kernel_case_has(i, KERNEL_PLAIN_PREFILL)) return;
    fputs("namespace plain {\n", file);
    if (!layer->sealed) fprintf(file, "%s%s", fkv_kernel_file_plain_rows, latent ? "" : fkv_kernel_file_plain_tile);
    fprintf(file, "%s}\n", latent ? fkv_kernel_file_prefill_plain_latent : fkv_kernel_file_prefill_plain);
}

static const char *host_type_of(const char *name) {
    static const char *const words[] = {"orders", "table", "pairs", "where", "done", "counters"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strcmp(name, words[i]) == 0) return "fkv_u32";
    if (strcmp(name, "parts") == 0 || strcmp(name, "sink_logits") == 0) return "float";
    return strcmp(name, "numbers") == 0 ? "fkv_u16" : "void";
}

/* Returns true if the kernel does not read the input. MLX uses such an input only to order kernels, and it is always the last
 * input. */
static bool is_ordering_input(const char *name) {
    return strcmp(name, "after") == 0 || strcmp(name, "after_open") == 0 || strcmp(name, "after_ring") == 0;
}

/* Writes the part of the entry function that runs one kernel. number: a value of fkv_kernel, or the number of an additional
 * kernel in kernel_cases.h. */
static void put_entry(FILE *file, int number, const fkv_attn_layer *layer) {
    static const char *const metal[N_KERNEL_ENTRIES] = {
        [KERNEL_SIMDGROUP_DECODE] = "auto fkv_attend_decode = simdgroup::fkv_attend_decode;\n",
        [KERNEL_SIMDGROUP_PREFILL] = "auto fkv_attend_prefill = simdgroup::fkv_attend_prefill;\n",
        [KERNEL_PLAIN_PREFILL] = "auto fkv_attend_prefill = plain::fkv_attend_prefill;\n",
        [KERNEL_LONE_PREFILL] = "auto fkv_attend_prefill = lone::fkv_attend_prefill;\n",
        [KERNEL_GROUP_PREFILL] = "auto fkv_attend_prefill = group::fkv_attend_prefill;\n"};
    fkv_kernel kernel = number < FKV_N_KERNELS              ? (fkv_kernel)number
                        : number == KERNEL_SIMDGROUP_DECODE ? FKV_KERNEL_DECODE
                                                            : FKV_KERNEL_PREFILL;
    const char *const *inputs = fkv_kernel_inputs(kernel, layer);
    fprintf(file, "if (kernel == %d) fkv_host_run_together(grid, n_threads, %d, [=](fkv_place place) {\n", number,
            number == KERNEL_GROUP_PREFILL ? GROUP_BLOCKS : 1);
    if (metal[number] != NULL) fputs(metal[number], file);
    if (number == KERNEL_SIMDGROUP_DECODE && layer->sealed)
        fputs("namespace opened = simdgroup::opened;\nauto fkv_split_at = ::fkv_split_at<FKV_ITEM_ROWS>;\n", file);
    int n_inputs = 0;
    for (int k = 0; inputs[k] != NULL && !is_ordering_input(inputs[k]); k++, n_inputs++) {
        const char *type = host_type_of(inputs[k]);
        fprintf(file, "const %s *%s = (const %s *)in[%d];\n", type, inputs[k], type, k);
    }
    if (kernel == FKV_KERNEL_DECODE_MERGE) fprintf(file, "float *parts = (float *)in[%d];\n", n_inputs);
    const char *output = fkv_kernel_outputs(kernel)[0];
    const char *type = host_type_of(output);
    fprintf(file, "%s *%s = (%s *)result;\n%s});\n", type, output, type,
            fkv_kernel_source(FKV_KERNEL_HOST, kernel, layer->sealed));
}

static bool is_decode(int kernel) {
    return kernel == FKV_KERNEL_DECODE || kernel == FKV_KERNEL_MERGE || kernel == FKV_KERNEL_DECODE_MERGE;
}

/* Writes all kernels of a case into one source file, after the prelude. alone: if true, writes only the decode and merge kernels,
 * compiled for a single query. */
static void write_host(const char *folder, uint32_t i, const fkv_attn_layer *layer, uint32_t rows, bool alone) {
    FILE *file = open_text(folder, i, alone ? "_alone.cpp" : ".cpp");
    put_header(file, FKV_KERNEL_HOST, FKV_KERNEL_DECODE, layer, rows);
    fputs(fkv_kernel_file_attend_merge, file);
    fputs(fkv_kernel_file_lane_rows, file);
    fputs(fkv_kernel_file_decode_merge, file);
    if (!alone) {
        fputs(fkv_kernel_file_write_rows, file);
        if (!layer->sealed) fputs(fkv_kernel_file_write, file);
        if (kernel_case_has(i, FKV_KERNEL_PREFILL)) put_variants(file, i, layer);
    }
    fprintf(file,
            "}\nextern \"C\" void kernel_case_%u%s(int kernel, const fkv_u32 grid[3], fkv_u32 n_threads, const void *const *in, "
            "void *result) {\n",
            i, alone ? "_alone" : "");
    for (int number = 0; number < N_KERNEL_ENTRIES; number++)
        if (alone ? is_decode(number) : kernel_case_has(i, number)) put_entry(file, number, layer);
    fputs("}\n", file);
    fclose(file);
}

/* Returns the element type that MLX would declare for an input or output: 32-bit words for page pools, the row type for rows. */
static const char *type_of(const char *name, fkv_type rows, fkv_kernel_device device) {
    static const char *const types[2][3] = {{"float", "__half", "__nv_bfloat16"}, {"float", "float16_t", "bfloat16_t"}};
    if (strcmp(name, "parts") == 0 || strcmp(name, "sink_logits") == 0) return "float";
    if (strcmp(name, "numbers") == 0) return "uint16_t";
    bool is_row = strlen(name) == 1 || strcmp(name, "out") == 0;
    return is_row ? types[device == FKV_KERNEL_METAL][rows] : "uint32_t";
}

/* Writes each kernel of a case to its own file, with a function signature like MLX's. */
static void write_device(const char *folder, uint32_t i, fkv_kernel_device device, const fkv_attn_layer *layer, uint32_t rows) {
    bool metal = device == FKV_KERNEL_METAL;
    for (int kernel = 0; kernel < FKV_N_KERNELS; kernel++) {
        if (!kernel_case_has(i, kernel) || !fkv_kernels_support(device, layer)) continue;
        if (metal && kernel == FKV_KERNEL_DECODE_MERGE) continue;
        char ending[32];
        snprintf(ending, sizeof ending, "_%s%s", kernel_names[kernel], metal ? ".metal" : ".cu");
        FILE *file = open_text(folder, i, ending);
        fputs(metal ? "#include <metal_stdlib>\n" : "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <stdint.h>\n",
              file);
        put_header(file, device, (fkv_kernel)kernel, layer, is_decode(kernel) && kernel != FKV_KERNEL_MERGE ? rows : 0);
        if (metal) /* clang rejects automatic variables in an address space but allows static ones */
            fputs("#undef FKV_SHARED_ARRAY\n#define FKV_SHARED_ARRAY(type, name, n) static threadgroup type name[n]\n", file);
        fprintf(file, "%s void custom_kernel(\n", metal ? "kernel" : "__global__");
        const char *space = metal ? "device " : "";
        for (const char *const *name = fkv_kernel_inputs((fkv_kernel)kernel, layer); *name != NULL; name++)
            fprintf(file, "    const %s%s *%s,\n", space, type_of(*name, layer->row_type, device), *name);
        const char *const *output = fkv_kernel_outputs((fkv_kernel)kernel);
        if (output[1] != NULL) fprintf(file, "    %s%s *%s,\n", space, type_of(output[1], layer->row_type, device), output[1]);
        fprintf(file, "    %s%s *%s%s) {\n%s}\n", space, type_of(output[0], layer->row_type, device), output[0],
                metal ? ",\n    uint3 thread_position_in_threadgroup,\n    uint3 threadgroup_position_in_grid" : "",
                fkv_kernel_source(device, (fkv_kernel)kernel, layer->sealed));
        fclose(file);
    }
}

/* Writes one parameter of the kernel for recurrent layers. In host sources, the parameter is a variable; in device sources, it is
 * part of the function signature. */
static void put_recurrent_input(FILE *file, fkv_kernel_device device, int k) {
    const char *name = fkv_recurrent_inputs[k];
    const char *type = strcmp(name, "n_tokens") == 0 ? "uint32_t" : "float";
    if (device == FKV_KERNEL_HOST)
        fprintf(file, "const %s *%s = (const %s *)in[%d];\n", type, name, type, k);
    else
        fprintf(file, "    const %s%s *%s,\n", device == FKV_KERNEL_METAL ? "device " : "", type, name);
}

/* Writes the source of the kernel for recurrent layers, for one shape. */
static void write_recurrent(const char *folder, uint32_t i, fkv_kernel_device device) {
    static const char *const endings[] = {[FKV_KERNEL_CUDA] = ".cu", [FKV_KERNEL_METAL] = ".metal", [FKV_KERNEL_HOST] = ".cpp"};
    static const fkv_recurrent_device devices[] = {
        [FKV_KERNEL_CUDA] = FKV_RECURRENT_CUDA, [FKV_KERNEL_METAL] = FKV_RECURRENT_METAL, [FKV_KERNEL_HOST] = FKV_RECURRENT_HOST};
    const recurrent_case *c = &recurrent_cases[i];
    const char *body = fkv_recurrent_body(devices[device]);
    char header[2048];
    char path[512];
    snprintf(path, sizeof path, "%s/kernel_case_recurrent_%u%s", folder, i, endings[device]);
    FILE *file = fopen(path, "w");
    if (file == NULL || fkv_recurrent_header(devices[device], c->kind, &c->shape, header, sizeof header) >= sizeof header)
        abort();
    if (device == FKV_KERNEL_HOST) {
        fprintf(file, "#include \"base/float16.h\"\n%s%s%s", fkv_kernel_file_lanes_host, fkv_kernel_file_prelude_host, header);
        fprintf(file,
                "extern \"C\" void recurrent_case_%u(fkv_u32 n_blocks, fkv_u32 n_threads, const void *const *in, float *out) {\n",
                i);
    } else {
        fprintf(file, "#include %s\n%s%s void custom_kernel(\n", device == FKV_KERNEL_METAL ? "<metal_stdlib>" : "<stdint.h>",
                header, device == FKV_KERNEL_METAL ? "kernel" : "__global__");
    }
    for (int k = 0; fkv_recurrent_inputs[k] != NULL; k++) put_recurrent_input(file, device, k);
    if (device == FKV_KERNEL_HOST)
        fprintf(file,
                "const fkv_u32 grid[] = {n_blocks, 1, 1};\nfkv_host_run(grid, n_threads, [=](fkv_place place) {\n%s});\n}\n",
                body);
    else if (device == FKV_KERNEL_METAL)
        fprintf(
            file,
            "    device float *out,\n    uint3 thread_position_in_threadgroup,\n    uint3 threadgroup_position_in_grid) {\n%s}\n",
            body);
    else
        fprintf(file, "    float *out) {\n%s}\n", body);
    fclose(file);
}

/* Writes the source of the kernel for products with quantized weights, for one matrix. Metal has no such kernel. */
static void write_product(const char *folder, uint32_t i, fkv_kernel_device device) {
    const product_case *c = &product_cases[i];
    const bool host = device == FKV_KERNEL_HOST;
    char path[512];
    fkv_affine_product product;
    if (!fkv_affine_product_describe(c->bits, c->group, c->rows, c->scales, c->n_columns, c->n_outputs, &product)) abort();
    const size_t size = fkv_affine_product_header(device, &product, NULL, 0) + 1;
    char *header = malloc(size);
    snprintf(path, sizeof path, "%s/kernel_case_product_%u%s", folder, i, host ? ".cpp" : ".cu");
    FILE *file = fopen(path, "w");
    if (file == NULL || header == NULL || fkv_affine_product_header(device, &product, header, size) != size - 1) abort();
    if (host)
        fprintf(
            file,
            "%sextern \"C\" void product_case_%u(fkv_u32 n_blocks, fkv_u32 n_threads, const void *const *in, const fkv_u32 *sizes, "
            "void *out) {\nconst void *x = in[0], *codes = in[1], *scales = in[2], *biases = in[3];\n"
            "const fkv_u32 n_rows = sizes[0], n_columns = sizes[1], n_outputs = sizes[2];\n"
            "const fkv_u32 grid[] = {n_blocks, 1, 1};\nfkv_host_run(grid, n_threads, [=](fkv_place place) {\n%s});\n}\n",
            header, i, fkv_affine_product_body(device));
    else
        fprintf(
            file,
            "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <stdint.h>\n%sstruct Shape {\n    int at[8];\n"
            "    __device__ int operator[](int i) const { return at[i]; }\n};\n__global__ void custom_kernel(\n    const %s *x,\n"
            "    const __grid_constant__ Shape x_shape,\n    const __grid_constant__ int x_ndim,\n    const uint32_t *codes,\n"
            "    const __grid_constant__ Shape codes_shape,\n    const %s *scales,\n    const %s *biases,\n    %s *out) {\n%s}\n",
            header, type_of("x", c->rows, device), type_of("x", c->scales, device), type_of("x", c->scales, device),
            type_of("out", c->rows, device), fkv_affine_product_body(device));
    free(header);
    fclose(file);
}

int main(int argc, char **argv) {
    static const char *const devices[] = {[FKV_KERNEL_CUDA] = "cuda", [FKV_KERNEL_METAL] = "metal", [FKV_KERNEL_HOST] = "host"};
    uint32_t device = 0;
    while (device < 3 && (argc != 3 || strcmp(argv[1], devices[device]) != 0)) device++;
    if (device == 3) {
        fprintf(stderr, "usage: make_kernel_sources cuda|metal|host <folder>\n");
        return EXIT_FAILURE;
    }
    for (uint32_t i = 0; i < N_KERNEL_CASES; i++) {
        attn_fixture fixture;
        if (!attn_fixture_describe(&fixture, &kernel_cases[i])) return EXIT_FAILURE;
        uint32_t rows = fkv_decode_rows((fkv_kernel_device)device, &fixture.layer, kernel_case_queries(&kernel_cases[i]));
        if (device == FKV_KERNEL_HOST)
            write_host(argv[2], i, &fixture.layer, rows, false);
        else
            write_device(argv[2], i, (fkv_kernel_device)device, &fixture.layer, rows);
        if (device == FKV_KERNEL_HOST && i < N_KERNEL_CASES_ALONE)
            write_host(argv[2], i, &fixture.layer, fkv_decode_rows(FKV_KERNEL_HOST, &fixture.layer, 1), true);
    }
    for (uint32_t i = 0; i < N_RECURRENT_CASES; i++) write_recurrent(argv[2], i, (fkv_kernel_device)device);
    for (uint32_t i = 0; i < N_PRODUCT_CASES && device != FKV_KERNEL_METAL; i++)
        write_product(argv[2], i, (fkv_kernel_device)device);
    return EXIT_SUCCESS;
}
