/* bench_plot: the pictures of docs/performance.md, drawn from a file that `bench/compare --sweep` wrote.
 *
 * A sweep is a result of bench_compare whose cases differ in one thing, which is the picture's x; y is the time of one call, and
 * a line is one pair of cache types of flatkv or of a peer. Beside each line of flatkv lies its roof, the time that reading its
 * packed bytes takes at the rate that the same run measured. Nothing is measured here.
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
    const char *sweep; /* its name in the file; the picture is cost_SWEEP.svg */
    const char *title;
    const char *x_label;
    const plot_axis *x;
    case_number x_of; /* NULL: by bits of a stored number, one line over all types */
    bool is_log;      /* x and y; otherwise x alone, where there is x_of */
} picture;

/* One line of the picture, and its roof where it has one. */
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

/* ---- the file ---- */

static const json_t *member(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (value == NULL) kit_die(EXIT_USAGE, "the file has no \"%s\" where a sweep has it", key);
    return value;
}

static double number(const json_t *object, const char *key) {
    const json_t *value = member(object, key);
    if (!json_is_number(value)) kit_die(EXIT_USAGE, "\"%s\" is not a number in the file", key);
    return json_number_value(value);
}

static const char *text(const json_t *object, const char *key) {
    const char *value = json_string_value(member(object, key));
    if (value == NULL) kit_die(EXIT_USAGE, "\"%s\" is no text in the file", key);
    return value;
}

static double cached(const json_t *c) { return number(c, "cached"); }
static double sequences(const json_t *c) { return number(c, "sequences"); }
static double heads_per_kv_head(const json_t *c) { return number(c, "q_heads") / number(c, "kv_heads"); }

static const picture pictures[] = {
    {"context", "Decode against context", "tokens in the cache", &PLOT_TOKENS, cached, true},
    {"batch", "Decode against sequences in one step", "sequences", &PLOT_NUMBER, sequences, true},
    {"group", "Decode against query heads for each KV head", "query heads for each KV head", &PLOT_NUMBER, heads_per_kv_head,
     false},
    {"bits", "Decode against bits", "bits a stored number takes, scales and biases included", &PLOT_NUMBER, NULL, false},
};

/* Bits that a number of K or V takes in the pages that a call reads. */
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
        (void)snprintf(s->roof_name, sizeof s->roof_name, "roof: reading %s packed bytes", p->x_of == NULL ? "the" : types);
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

/* ---- the pictures ---- */

/* What all cases share, in words. */
static void describe(const picture *p, const json_t *sweep, char *words, size_t capacity) {
    const json_t *c = json_array_get(member(sweep, "cases"), 0);
    char heads[64] = "";
    char tokens[64] = "";
    if (strcmp(p->sweep, "group") != 0) (void)snprintf(heads, sizeof heads, "%g query heads, ", number(c, "q_heads"));
    if (strcmp(p->sweep, "context") != 0)
        (void)snprintf(tokens, sizeof tokens, "; %g tokens in each sequence", number(c, "cached"));
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
        "Medians of one attention call on %s. Roof: packed bytes by the read bandwidth at the same time, about %.1f GB/s.",
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
    picture_plot.y.label = "time of a call";
    picture_plot.y.is_log = p->is_log;
    (void)snprintf(path, sizeof path, "%s/cost_%s.svg", folder, p->sweep);
    if (!plot_write_svg(&picture_plot, path)) kit_die(EXIT_FAILED, "cannot write the picture %s: %s", path, strerror(errno));
    printf("%s\n", path);
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: bench_plot FILE FOLDER\n"
        "Draws cost_context.svg, cost_batch.svg, cost_group.svg and cost_bits.svg into FOLDER, as far as FILE has their\n"
        "numbers: it is one that `bench/compare --sweep context,batch,group,bits --json FILE` wrote.\n";
    kit_texts words = {0};
    const kit_option own[] = {{"words", 0, OPTION_WORDS, &words, 0, "FILE FOLDER", "what is read, and where pictures go"}, {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    json_error_t error;
    kit_set_program(PROGRAM);
    if (!kit_options_parse(usage, tables, argc, argv, &code)) return code;
    if (words.n != 2) kit_die(EXIT_USAGE, "FILE and FOLDER are needed");
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
