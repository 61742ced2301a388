/* flatkv doctor: checks this machine and the installed program, and prints a summary to include in bug reports.
 *
 * Each printed line is the result of one check. If any check finds a problem, the exit code is EXIT_FAILED. A note describes a
 * limitation that does not prevent flatkv from working.
 */
#include "../hub/hub_place.h"
#include "../kit/numbers.h"
#include "../serve/serve.h"
#include "cli.h"
#include "generation.h"
#include "kernel_check.h"
#include "mlx_library.h"
#include "model_names.h"
#include "model_options.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

static const char usage[] =
    "usage: flatkv doctor [--json]\n"
    "Checks this machine and the program: kernels, memory, huge pages, optional parts, folders and limits.\n"
    "The exit code is 0 if there is no problem.\n";

typedef enum finding { FINDING_GOOD, FINDING_NOTE, FINDING_PROBLEM } finding;

typedef struct doctor {
    kit_json *json; /* NULL: print lines */
    bool has_problem;
} doctor;

static void report(doctor *d, const char *name, finding kind, const char *format, ...) __attribute__((format(printf, 4, 5)));

static void report(doctor *d, const char *name, finding kind, const char *format, ...) {
    static const char *const kinds[] = {"ok", "note", "problem"};
    char text[1024];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    d->has_problem = d->has_problem || kind == FINDING_PROBLEM;
    if (d->json == NULL) {
        printf("%-18s %-8s %s\n", name, kinds[kind], text);
        (void)fflush(stdout);
        return;
    }
    kit_json_object(d->json, NULL);
    kit_json_text(d->json, "name", name);
    kit_json_text(d->json, "state", kinds[kind]);
    kit_json_text(d->json, "text", text);
    kit_json_close(d->json);
}

/* Reads the first line of a system file. Returns false if the file does not exist. */
static bool read_line(const char *path, char *line, int capacity) {
    FILE *file = fopen(path, "r");
    if (file == NULL) return false;
    const bool good = fgets(line, capacity, file) != NULL;
    (void)fclose(file);
    if (good) line[strcspn(line, "\n")] = 0;
    return good;
}

/* ---- machine ---- */

static void check_system(doctor *d) {
    struct utsname system;
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (uname(&system) == 0)
        report(d, "system", FINDING_GOOD, "flatkv %s on %s %s %s, %ld cores", fkv_version(), system.sysname, system.release,
               system.machine, cores);
}

static void check_memory(doctor *d) {
    const uint64_t enough = UINT64_C(1) << 30;
    const char *source = NULL;
    const uint64_t available = fkv_memory_available(&source);
    char bytes[32];
    if (available == UINT64_MAX)
        report(d, "memory", FINDING_NOTE, "the system reports no limit");
    else
        report(d, "memory", available >= enough ? FINDING_GOOD : FINDING_NOTE, "%s available (%s)%s", kit_bytes(available, bytes),
               source != NULL ? source : "unknown limit", available >= enough ? "" : ": only small models fit");
}

static void check_huge_pages(doctor *d) {
    char line[128];
    if (!read_line("/sys/kernel/mm/transparent_hugepage/enabled", line, sizeof line))
        report(d, "huge pages", FINDING_NOTE, "the system does not report transparent huge pages");
    else if (strstr(line, "[never]") != NULL)
        report(
            d, "huge pages", FINDING_NOTE,
            "disabled: decode is slower with large caches; enable with echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
    else
        report(d, "huge pages", FINDING_GOOD, "%s", line);
}

static void check_limits(doctor *d) {
    struct rlimit files;
    struct rlimit space;
    enum { NEEDED_FILES = 8 + 256 + 64 + 32 }; /* number of open files that flatkv serve needs with its default options */
    char line[64];
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        const bool enough = files.rlim_max == RLIM_INFINITY || files.rlim_max >= NEEDED_FILES;
        report(d, "open files", enough ? FINDING_GOOD : FINDING_NOTE, "soft limit %llu, hard limit %llu%s",
               (unsigned long long)files.rlim_cur, (unsigned long long)files.rlim_max,
               enough ? "" : ": flatkv serve accepts fewer connections; raise it with ulimit -n");
    }
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY)
        report(d, "address space", FINDING_NOTE, "limited to %llu bytes (ulimit -v): mapped weights count toward this limit",
               (unsigned long long)space.rlim_cur);
    if (read_line("/proc/sys/vm/overcommit_memory", line, sizeof line) && strcmp(line, "2") == 0)
        report(d, "overcommit", FINDING_NOTE,
               "strict (vm.overcommit_memory = 2): reservations count toward the commit limit at once");
}

/* ---- kernels and model ---- */

static void check_kernels(doctor *d) {
    static const struct {
        const char *codec;
        double limit; /* error limit: about twice the error measured with normally distributed rows */
    } checks[] = {{"16/16", 2e-3}, {"8/8", 2e-2}, {"8/4", 0.15}, {"sealed", 0.25}, {"tq4", 0.25}};
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        char name[32];
        const kernel_result r = kernel_check(checks[i].codec, checks[i].limit);
        (void)snprintf(name, sizeof name, "kernels %s", checks[i].codec);
        if (r.status != FKV_OK)
            report(d, name, FINDING_PROBLEM, "%s", fkv_message());
        else
            report(d, name, r.error <= r.limit ? FINDING_GOOD : FINDING_PROBLEM, "%s, relative error %.1e (limit %.1e)", r.isa,
                   r.error, r.limit);
    }
}

/* Tests whether the bundled needle model can recall a fact from its context. Returns an exit code. *found receives true if the
 * answer was correct. */
static int recall_fact(bool *found) {
    static const char prompt[] = "The pass key of Ostirawex is 2718281. It was raining.\nQuestion: What is the pass key of "
                                 "Ostirawex?\nAnswer: The pass key of Ostirawex is ";
    model_options options = model_options_default();
    fkv_model *model = NULL;
    model_session session = {0};
    token_list tokens = {0};
    generation g = {.session = &session, .max_new = 7, .ignore_end = true, .plain = true, .out = text_stream_open(NULL)};
    const float *logits = NULL;
    int code = model_options_load(&options, false, &model);
    if (code == EXIT_GOOD) code = token_list_add_text(&tokens, model, prompt, strlen(prompt), FKV_TOKENIZE_BOS);
    const fkv_runner_config config = model_options_runner(&options, 512);
    const fkv_sampler_config greedy = fkv_sampler_config_default();
    if (code == EXIT_GOOD) code = session_open(&session, model, &config);
    if (code == EXIT_GOOD && fkv_sampler_open(&greedy, fkv_model_about(model)->n_vocab, &g.sampler) != FKV_OK) code = EXIT_FAILED;
    if (code == EXIT_GOOD) code = session_feed(&session, tokens.tokens, tokens.n, &logits, NULL);
    if (code == EXIT_GOOD) code = generation_run(&g, tokens.tokens, tokens.n, logits);
    *found = code == EXIT_GOOD && g.text.n == 7 && memcmp(g.text.bytes, "2718281", 7) == 0;
    generation_free(&g);
    token_list_free(&tokens);
    session_close(&session);
    fkv_model_close(model);
    return code;
}

static void check_model(doctor *d) {
    bool found = false;
    const double start = kit_seconds();
    const int code = recall_fact(&found);
    if (code == EXIT_GOOD && found)
        report(d, "test model", FINDING_GOOD, "recalls a fact, %.2f s", kit_seconds() - start);
    else
        report(d, "test model", FINDING_PROBLEM, "%s",
               code == EXIT_GOOD ? "gives a wrong answer" : "does not run; see the error above");
}

/* ---- optional parts and folders ---- */

static void check_parts(doctor *d) {
    char why[512];
    if (mlx_library_probe(why, sizeof why))
        report(d, "MLX", FINDING_GOOD, "--device mlx is available: %s", why);
    else
        report(d, "MLX", FINDING_NOTE, "--device mlx is not available (optional): %s", why);
    if (serve_supports_schemas())
        report(d, "llguidance", FINDING_GOOD, "flatkv serve supports JSON schemas and forced tool calls");
    else
        report(d, "llguidance", FINDING_NOTE, "not in this build (optional): flatkv serve supports json_object only");
}

static void check_folder(doctor *d, const char *name, const char *path) {
    struct statvfs disk;
    struct stat about;
    char bytes[32];
    if (stat(path, &about) != 0) {
        report(d, name, FINDING_GOOD, "%s does not exist yet", path);
    } else if (!S_ISDIR(about.st_mode)) {
        report(d, name, FINDING_PROBLEM, "%s is not a folder", path);
    } else if (access(path, R_OK | W_OK | X_OK) != 0) {
        report(d, name, FINDING_PROBLEM, "%s is not writable by this user", path);
    } else if (statvfs(path, &disk) == 0) {
        const uint64_t free_bytes = (uint64_t)disk.f_bavail * disk.f_frsize;
        const bool enough = free_bytes >= UINT64_C(1) << 30;
        report(d, name, enough ? FINDING_GOOD : FINDING_NOTE, "%s, %s free%s", path, kit_bytes(free_bytes, bytes),
               enough ? "" : ": too little for most models");
    }
}

static void check_folders(doctor *d) {
    char folder[HUB_PATH];
    char own[MODEL_PATH];
    if (hub_cache_folder(folder))
        check_folder(d, "Hugging Face cache", folder);
    else
        report(d, "Hugging Face cache", FINDING_NOTE, "unknown, because HOME is not set");
    const char *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    if (cache != NULL && cache[0] == '/')
        (void)snprintf(own, sizeof own, "%s/flatkv/models", cache);
    else
        (void)snprintf(own, sizeof own, "%s/.cache/flatkv/models", home != NULL ? home : "");
    check_folder(d, "model cache", own);
}

int cli_doctor(int argc, char **argv) {
    bool json = false;
    const kit_option own[] = {{"json", 0, OPTION_FLAG, &json, 0, NULL, "print one JSON object to standard output"}, {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) return code;
    doctor d = {.json = json ? kit_json_begin() : NULL};
    if (json) {
        kit_json_text(d.json, "version", fkv_version());
        kit_json_array(d.json, "checks");
    }
    check_system(&d);
    check_memory(&d);
    check_huge_pages(&d);
    check_limits(&d);
    check_kernels(&d);
    check_model(&d);
    check_parts(&d);
    check_folders(&d);
    code = d.has_problem ? EXIT_FAILED : EXIT_GOOD;
    if (!json) return code;
    kit_json_close(d.json);
    kit_json_bool(d.json, "good", !d.has_problem);
    const int written = kit_json_print(d.json);
    return code != EXIT_GOOD ? code : written;
}
