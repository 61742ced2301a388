/* See bench_util.h. */
#include "bench_util.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

void *bench_take(size_t bytes) {
    size_t rounded = (bytes + 64) / 64 * 64;
    void *block = aligned_alloc(64, rounded);
    if (block == NULL) bench_die("bench", BENCH_NO_MEMORY, "the system has no %zu bytes for a buffer", rounded);
    memset(block, 0, rounded);
    return block;
}

process_memory bench_memory_now(void) {
    process_memory now;
    if (!process_memory_now(&now)) bench_die("bench", BENCH_FAILED, "the system does not say what this process occupies");
    return now;
}

const char *bench_bytes(double bytes, char text[BENCH_TEXT]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;
    while (fabs(bytes) >= 1024 && unit + 1 < sizeof units / sizeof units[0]) {
        bytes /= 1024;
        unit++;
    }
    (void)snprintf(text, BENCH_TEXT, unit == 0 ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
    return text;
}

/* ---- options ---- */

noreturn void bench_die(const char *program, enum bench_exit code, const char *format, ...) {
    va_list values;
    va_start(values, format);
    (void)fprintf(stderr, "%s: ", program);
    (void)vfprintf(stderr, format, values);
    (void)fputc('\n', stderr);
    va_end(values);
    exit((int)code);
}

bool bench_args_next(bench_args *args) {
    args->at++;
    return args->at < args->argc;
}

/* What follows the = of the present option, or NULL. */
static const char *attached(const bench_args *args) {
    const char *text = args->argv[args->at];
    const char *equals = strncmp(text, "--", 2) == 0 ? strchr(text, '=') : NULL;
    return equals != NULL ? equals + 1 : NULL;
}

bool bench_args_is(const bench_args *args, const char *name) {
    const char *text = args->argv[args->at];
    size_t length = strlen(name);
    return strncmp(text, name, length) == 0 && (text[length] == '\0' || text[length] == '=');
}

const char *bench_args_optional(bench_args *args) {
    const char *value = attached(args);
    if (value != NULL) return value;
    if (args->at + 1 >= args->argc || strncmp(args->argv[args->at + 1], "--", 2) == 0) return NULL;
    return args->argv[++args->at];
}

const char *bench_args_value(bench_args *args) {
    const char *option = args->argv[args->at];
    const char *value = bench_args_optional(args);
    if (value == NULL) bench_die(args->program, BENCH_USAGE, "%s needs a value; --help lists the options", option);
    return value;
}

noreturn void bench_args_unknown(const bench_args *args) {
    bench_die(args->program, BENCH_USAGE, "there is no option %s; --help lists them", args->argv[args->at]);
}

uint32_t bench_number(const char *program, const char *what, const char *text, uint32_t min, uint32_t max, const char **end) {
    char *after = NULL;
    errno = 0;
    unsigned long long value = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &after, 10) : 0;
    if (after == NULL) bench_die(program, BENCH_USAGE, "%s: \"%s\" is not a number", what, text);
    if (errno != 0 || value < min || value > max)
        bench_die(program, BENCH_USAGE, "%s: %s is not in %u to %u", what, text, min, max);
    *end = after;
    return (uint32_t)value;
}

uint32_t bench_args_number(bench_args *args, uint32_t min, uint32_t max) {
    const char *option = args->argv[args->at];
    const char *text = bench_args_value(args);
    const char *end = NULL;
    uint32_t value = bench_number(args->program, option, text, min, max, &end);
    if (*end != '\0') bench_die(args->program, BENCH_USAGE, "%s: \"%s\" is not a number", option, text);
    return value;
}

void bench_writable(const char *program, const char *path) {
    if (path == NULL) return;
    FILE *file = fopen(path, "a");
    if (file == NULL || fclose(file) != 0) bench_die(program, BENCH_USAGE, "cannot write %s: %s", path, strerror(errno));
}

/* ---- JSON ---- */

static void put_text(FILE *file, const char *text) {
    (void)fputc('"', file);
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') (void)fputc('\\', file);
        if (c < 0x20)
            (void)fprintf(file, "\\u%04x", c);
        else
            (void)fputc(c, file);
    }
    (void)fputc('"', file);
}

/* The comma, the line and the key before a value. Arrays inside arrays and their numbers stay on one line. */
static void before_value(bench_json *json, const char *key) {
    int depth = json->depth;
    if (depth == 0) return;
    if (!json->first[depth]) (void)fputs(",", json->file);
    bool inner = depth > 1 && json->closer[depth] == ']' && json->closer[depth - 1] == ']';
    if (!inner)
        (void)fprintf(json->file, "\n%*s", 2 * depth, "");
    else if (!json->first[depth])
        (void)fputc(' ', json->file);
    json->first[depth] = false;
    if (key == NULL) return;
    put_text(json->file, key);
    (void)fputs(": ", json->file);
}

static void open_level(bench_json *json, const char *key, char opener, char closer) {
    before_value(json, key);
    (void)fputc(opener, json->file);
    if (++json->depth >= BENCH_JSON_DEPTH) abort();
    json->first[json->depth] = true;
    json->closer[json->depth] = closer;
}

void bench_json_object(bench_json *json, const char *key) { open_level(json, key, '{', '}'); }
void bench_json_array(bench_json *json, const char *key) { open_level(json, key, '[', ']'); }

void bench_json_close(bench_json *json) {
    bool inner = json->depth > 1 && json->closer[json->depth] == ']' && json->closer[json->depth - 1] == ']';
    if (!inner && !json->first[json->depth]) (void)fprintf(json->file, "\n%*s", 2 * (json->depth - 1), "");
    (void)fputc(json->closer[json->depth--], json->file);
}

void bench_json_begin(bench_json *json, const char *program) {
    json->file = json->path != NULL ? fopen(json->path, "w") : stdout;
    if (json->file == NULL) bench_die(program, BENCH_FAILED, "cannot write the JSON file %s: %s", json->path, strerror(errno));
    json->depth = 0;
    bench_json_object(json, NULL);
}

void bench_json_end(bench_json *json, const char *program) {
    while (json->depth > 0) bench_json_close(json);
    (void)fputc('\n', json->file);
    bool bad = fflush(json->file) != 0 || ferror(json->file) != 0;
    if (json->path != NULL) bad = fclose(json->file) != 0 || bad;
    if (bad) bench_die(program, BENCH_FAILED, "cannot write the JSON: %s", strerror(errno));
}

void bench_json_string(bench_json *json, const char *key, const char *value) {
    before_value(json, key);
    put_text(json->file, value);
}

void bench_json_number(bench_json *json, const char *key, double value) {
    before_value(json, key);
    if (isfinite(value))
        (void)fprintf(json->file, "%.6g", value);
    else
        (void)fputs("null", json->file);
}

void bench_json_integer(bench_json *json, const char *key, uint64_t value) {
    before_value(json, key);
    (void)fprintf(json->file, "%llu", (unsigned long long)value);
}

void bench_json_bool(bench_json *json, const char *key, bool value) {
    before_value(json, key);
    (void)fputs(value ? "true" : "false", json->file);
}
