/* See bench_util.h.
 *
 * Holds the one operating system switch of the benches: how a process learns what it occupies. Benches see the public header of
 * flatkv only, so src/base, where such switches live for the library, is out of reach.
 */
#include "bench_util.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef __APPLE__
#include <mach/mach.h>
#endif

/* ---- numbers ---- */

double bench_seconds(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left;
    double b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Between neighbours in proportion, so that p50 of an even count is the mean of the middle two. */
static double quantile(const double *sorted, size_t n, double q) {
    double at = q * (double)(n - 1);
    size_t below = (size_t)at;
    size_t above = below + 1 < n ? below + 1 : below;
    return sorted[below] + (sorted[above] - sorted[below]) * (at - (double)below);
}

bench_spread bench_spread_of(double *values, size_t n) {
    qsort(values, n, sizeof *values, ascending);
    return (bench_spread){quantile(values, n, 0.1), quantile(values, n, 0.5), quantile(values, n, 0.9)};
}

uint64_t bench_random(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

void bench_gaussian(uint64_t *state, size_t n, float *values) {
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = bench_random(state);
        float sum = 0; /* of four uniforms */
        for (int part = 0; part < 4; part++) sum += (float)(bits >> 16 * part & 0xffff) / 65536.0f - 0.5f;
        values[i] = sum * 1.7320508f;
    }
}

/* ---- memory ---- */

void *bench_take(size_t bytes) {
    size_t rounded = (bytes + 64) / 64 * 64;
    void *block = aligned_alloc(64, rounded);
    if (block == NULL) bench_die("bench", BENCH_NO_MEMORY, "the system has no %zu bytes for a buffer", rounded);
    memset(block, 0, rounded);
    return block;
}

#ifdef __APPLE__

bench_memory bench_memory_now(void) {
    task_vm_info_data_t info;
    mach_msg_type_number_t count = TASK_VM_INFO_COUNT;
    if (task_info(mach_task_self(), TASK_VM_INFO, (task_info_t)&info, &count) != KERN_SUCCESS)
        bench_die("bench", BENCH_FAILED, "the system does not say what this process occupies");
    return (bench_memory){.anonymous_bytes = info.phys_footprint};
}

uint64_t bench_memory_peak(void) { return 0; }

#else

/* A file under /proc, whole, through the stack: measuring must not take memory. */
enum { PROC_TEXT = 8192 };

static bool proc_read(const char *path, char text[PROC_TEXT]) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    size_t used = 0;
    ssize_t got = 0;
    while (used < PROC_TEXT - 1 && (got = read(file, text + used, PROC_TEXT - 1 - used)) > 0) used += (size_t)got;
    (void)close(file);
    text[used] = '\0';
    return used > 0;
}

/* The KiB after `key` where key begins a line. */
static bool proc_bytes(const char *text, const char *key, uint64_t *bytes) {
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, strlen(key)) != 0) continue;
        *bytes = strtoull(line + strlen(key), NULL, 10) * 1024;
        return true;
    }
    return false;
}

/* smaps_rollup walks the page tables and is exact; the counters in status lag by some pages for each core, so they are second. */
bench_memory bench_memory_now(void) {
    char text[PROC_TEXT];
    uint64_t anonymous = 0;
    uint64_t other = 0;
    if (proc_read("/proc/self/smaps_rollup", text) && proc_bytes(text, "Anonymous:", &anonymous) &&
        proc_bytes(text, "Rss:", &other))
        return (bench_memory){anonymous, other - anonymous};
    if (proc_read("/proc/self/status", text) && proc_bytes(text, "RssAnon:", &anonymous) && proc_bytes(text, "RssFile:", &other))
        return (bench_memory){anonymous, other};
    bench_die("bench", BENCH_FAILED, "neither smaps_rollup nor status under /proc/self says what this process occupies");
}

uint64_t bench_memory_peak(void) {
    char text[PROC_TEXT];
    uint64_t peak = 0;
    return proc_read("/proc/self/status", text) && proc_bytes(text, "VmHWM:", &peak) ? peak : 0;
}

#endif

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
