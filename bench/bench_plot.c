/* bench_plot: draws the plots of docs/performance.md from the output of `bench/compare --sweep`.
 *
 * A sweep is a result of bench_compare whose cases differ in one parameter, which is the x axis. The y axis is the time of one
 * call. Each line shows one implementation (flatkv or a peer) with one pair of cache types. For each flatkv line, a second line
 * shows the time to read the packed bytes at the bandwidth measured in the same run.
 */
#include "bench_util.h"

#include "../src/kit/plot.h"

#include <errno.h>
#include <jansson.h>
#include <string.h>

static const char PROGRAM[] = "bench_plot";

enum { MAX_POINTS = 16, MAX_SUBJECTS = 6, MAX_LINES = 2 * MAX_SUBJECTS, NAME_BYTES = 96 };

typedef double (*case_number)(const json_t *one_case);

typedef struct picture {
    const char *sweep; /* name of the parameter sweep in the input file; the plot is written to cost_SWEEP.svg */
    const char *title;
    const char *x_label;
    const plot_axis *x;
    /* returns the x value of a case; if NULL, x is the number of bits per stored value, and the plot has only one line, for
     * flatkv */
    case_number x_of;
    bool is_log; /* true if the y axis is logarithmic; the x axis is logarithmic if x_of is not NULL */
} picture;

/* One line of the plot and, for flatkv, a second line with the bandwidth limit. */
typedef struct series {
    char name[NAME_BYTES];
    char roof_name[NAME_BYTES];
    double x[MAX_POINTS];
    double ms[MAX_POINTS];
    double roof_ms[MAX_POINTS];
    const char *point_names[MAX_POINTS];
    size_t n;
    bool is_peer;
} series;

/* ---- input file ---- */

static const json_t *member(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (value == NULL) kit_die(EXIT_USAGE, "the file is not a sweep: the field \"%s\" is missing", key);
    return value;
}

static double number(const json_t *object, const char *key) {
    const json_t *value = member(object, key);
    if (!json_is_number(value)) kit_die(EXIT_USAGE, "the field \"%s\" of the sweep file must be a number", key);
    return json_number_value(value);
}

static const char *text(const json_t *object, const char *key) {
    const char *value = json_string_value(member(object, key));
    if (value == NULL) kit_die(EXIT_USAGE, "the field \"%s\" of the sweep file must be a string", key);
    return value;
}

static double cached(const json_t *c) { return number(c, "cached"); }
static double sequences(const json_t *c) { return number(c, "sequences"); }
static double heads_per_kv_head(const json_t *c) { return number(c, "q_heads") / number(c, "kv_heads"); }

static const picture pictures[] = {
    {"context", "Decode time by context length", "tokens in the cache", &PLOT_TOKENS, cached, true},
    {"batch", "Decode time by sequences per step", "sequences", &PLOT_NUMBER, sequences, true},
    {"group", "Decode time by query heads per KV head", "query heads per KV head", &PLOT_NUMBER, heads_per_kv_head, false},
    {"bits", "Decode time by bits", "bits per stored value, including scales and biases", &PLOT_NUMBER, NULL, false},
};

/* Returns the average number of stored bits per K or V value, in the pages that a call reads. */
static double stored_bits(const json_t *c, const json_t *subject) {
    double numbers = 2 * number(c, "kv_heads") * number(c, "head_dim") * number(c, "cached") * number(c, "sequences");
    return 8 * number(subject, "packed_bytes") / numbers;
}

static series *series_named(series *all, size_t *n, const char *name) {
    for (size_t i = 0; i < *n; i++)
        if (strcmp(all[i].name, name) == 0) return &all[i];
    if (*n == MAX_SUBJECTS) kit_die(EXIT_USAGE, "a sweep has more than %d lines", MAX_SUBJECTS);
    series *s = &all[(*n)++];
    *s = (series){.n = 0};
    (void)snprintf(s->name, sizeof s->name, "%s", name);
    return s;
}

static void add_point(const picture *p, series *all, size_t *n, const json_t *c, const json_t *subject) {
    const char *who = text(subject, "who");
    const char *types = text(subject, "types");
    bool is_peer = strcmp(who, "flatkv") != 0;
    char name[NAME_BYTES];
    if (!json_is_true(member(subject, "right")) || (is_peer && p->x_of == NULL)) return;
    (void)snprintf(name, sizeof name, p->x_of == NULL ? "%s" : "%s %s", who, types);
    series *s = series_named(all, n, name);
    if (s->n == MAX_POINTS) kit_die(EXIT_USAGE, "a sweep has more than %d points", MAX_POINTS);
    s->is_peer = is_peer;
    if (!is_peer) {
        s->roof_ms[s->n] = number(subject, "packed_bytes") / (number(c, "read_roof_gb_s") * 1e6);
        (void)snprintf(s->roof_name, sizeof s->roof_name, "limit: reading %s packed bytes", p->x_of == NULL ? "the" : types);
    }
    s->point_names[s->n] = types;
    s->x[s->n] = p->x_of == NULL ? stored_bits(c, subject) : p->x_of(c);
    s->ms[s->n++] = number(subject, "ms_p50");
}

static size_t read_sweep(const picture *p, const json_t *sweep, series *all) {
    size_t n = 0;
    size_t i;
    const json_t *c;
    json_array_foreach(member(sweep, "cases"), i, c) {
        size_t j;
        const json_t *subject;
        json_array_foreach(member(c, "subjects"), j, subject) add_point(p, all, &n, c, subject);
    }
    return n;
}

/* ---- plots ---- */

/* Formats the parameters that all cases of a sweep have in common. */
static void describe(const picture *p, const json_t *sweep, char *words, size_t capacity) {
    const json_t *c = json_array_get(member(sweep, "cases"), 0);
    char heads[64] = "";
    char tokens[64] = "";
    if (strcmp(p->sweep, "group") != 0) (void)snprintf(heads, sizeof heads, "%g query heads, ", number(c, "q_heads"));
    if (strcmp(p->sweep, "context") != 0) (void)snprintf(tokens, sizeof tokens, "; %g tokens per sequence", number(c, "cached"));
    (void)snprintf(words, capacity, "One layer, %s%g KV heads, head dimension %g%s; %.64s kernels, %g threads, pages in memory",
                   heads, number(c, "kv_heads"), number(c, "head_dim"), tokens, text(sweep, "isa"), number(c, "threads"));
}

static void draw(const picture *p, const json_t *sweep, const char *machine, const char *folder) {
    static const char *const colors[MAX_SUBJECTS] = {"#0b4fb3", "#0f766e", "#7c3aed", "#c2410c", "#9d174d", "#854d0e"};
    static series all[MAX_SUBJECTS];
    plot_line lines[MAX_LINES];
    char subtitle[400];
    char footnote[200];
    char path[4096];
    size_t n_lines = 0;
    size_t n = read_sweep(p, sweep, all);
    for (size_t i = 0; i < n; i++) {
        const series *s = &all[i];
        lines[n_lines++] = (plot_line){.name = s->name,
                                       .x = s->x,
                                       .y = s->ms,
                                       .n = s->n,
                                       .color = colors[i],
                                       .width = 2.5,
                                       .dash = s->is_peer ? "9 5" : NULL,
                                       .dots = true,
                                       .names = p->x_of == NULL ? s->point_names : NULL};
        if (s->is_peer) continue;
        lines[n_lines++] = (plot_line){.name = s->roof_name,
                                       .x = s->x,
                                       .y = s->roof_ms,
                                       .n = s->n,
                                       .color = colors[i],
                                       .width = 1.5,
                                       .dash = "2 4",
                                       .ink = ""};
    }
    describe(p, sweep, subtitle, sizeof subtitle);
    (void)snprintf(
        footnote, sizeof footnote,
        "Medians of one attention call on %s. Limit: packed bytes divided by the read bandwidth of the same run, about %.1f GB/s.",
        machine, number(sweep, "read_roof_gb_s"));
    plot picture_plot = {.title = p->title,
                         .subtitle = subtitle,
                         .footnote = footnote,
                         .x = *p->x,
                         .y = PLOT_MILLISECONDS,
                         .lines = lines,
                         .n_lines = n_lines};
    picture_plot.x.label = p->x_label;
    picture_plot.x.is_log = p->x_of != NULL;
    picture_plot.y.label = "time per call";
    picture_plot.y.is_log = p->is_log;
    (void)snprintf(path, sizeof path, "%s/cost_%s.svg", folder, p->sweep);
    if (!plot_write_svg(&picture_plot, path)) kit_die(EXIT_FAILED, "cannot write the plot %s: %s", path, strerror(errno));
    printf("%s\n", path);
}

int main(int argc, char **argv) {
    static const char usage[] = "usage: bench_plot FILE FOLDER\n"
                                "Draws cost_context.svg, cost_batch.svg, cost_group.svg and cost_bits.svg into FOLDER, from the\n"
                                "sweeps in FILE, the output of `bench/compare --sweep context,batch,group,bits --json FILE`.\n";
    kit_texts words = {0};
    const kit_option own[] = {{"words", 0, OPTION_POSITIONAL, &words, 0, "FILE FOLDER", "input file and output folder"}, {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    json_error_t error;
    kit_set_program(PROGRAM);
    if (!kit_options_parse(usage, tables, argc, argv, &code)) return code;
    if (words.n != 2) kit_die(EXIT_USAGE, "expected FILE and FOLDER");
    json_t *file = json_load_file(words.texts[0], 0, &error);
    if (file == NULL) kit_die(EXIT_USAGE, "%s: %s", words.texts[0], error.text);
    const json_t *sweeps = member(file, "sweeps");
    for (size_t i = 0; i < sizeof pictures / sizeof pictures[0]; i++) {
        const json_t *sweep = json_object_get(sweeps, pictures[i].sweep);
        if (sweep != NULL) draw(&pictures[i], sweep, text(file, "machine"), words.texts[1]);
    }
    json_decref(file);
    return EXIT_GOOD;
}
