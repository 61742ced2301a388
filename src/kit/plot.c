/* See plot.h. Layout: one frame of fixed size, the legend in two columns above it, and the last value of each line at the right.
 * These values are spread apart vertically so that they do not overlap. */
#include "plot.h"

#include "svg.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>

enum { WIDTH = 960, MAX_LINES = 16 };

static const double LEFT = 84;
static const double RIGHT = 862; /* right edge of the frame; the last value of each line is printed to the right of it */
static const double TOP_WITHOUT_LEGEND = 92;
static const double LEGEND_ROW = 22;
static const double LEGEND_COLUMN = 400;
static const double FRAME_HEIGHT = 360;
static const double BELOW_FRAME = 86;
static const double MAX_TICKS = 8;
static const double MAX_LOG_TICKS = 11;
static const double DOT = 3.5;      /* radius */
static const double LABEL_GAP = 17; /* minimum vertical distance between the values printed at line ends */

static const char *const token_suffixes[] = {"", "K", "M", "G"};
static const char *const byte_suffixes[] = {" B", " KiB", " MiB", " GiB", " TiB"};
static const char *const no_suffix[] = {""};
static const char *const millisecond_suffix[] = {" ms"};
const plot_axis PLOT_TOKENS = {"tokens", token_suffixes, sizeof token_suffixes / sizeof token_suffixes[0], false};
const plot_axis PLOT_BYTES = {"memory", byte_suffixes, sizeof byte_suffixes / sizeof byte_suffixes[0], false};
const plot_axis PLOT_NUMBER = {"", no_suffix, 1, false};
const plot_axis PLOT_MILLISECONDS = {"time", millisecond_suffix, 1, false};

/* Mapping from values to pixels on one axis. */
typedef struct scale {
    double bottom; /* value at `from`: 0 on a linear axis, positive on a logarithmic axis */
    double top;    /* value at `to` */
    double step;   /* difference between consecutive ticks on a linear axis, or their ratio on a logarithmic axis */
    double unit;   /* divisor for axis labels, a power of 1024 */
    const char *suffix;
    double from; /* pixels */
    double to;   /* pixels */
} scale;

typedef struct range {
    double least;
    double most;
} range;

static bool is_log(const scale *s) { return s->bottom > 0; }

/* Round a value down or up to a power of two. */
static double power_below(double value) { return exp2(floor(log2(value))); }
static double power_above(double value) { return exp2(ceil(log2(value))); }

static scale make_scale(const plot_axis *axis, range values, double from, double to) {
    scale s = {.top = values.most > 0 ? values.most : 1, .step = 1, .unit = 1, .from = from, .to = to};
    if (axis->is_log && values.least > 0 && values.least < values.most) {
        s.bottom = power_below(values.least);
        s.top = power_above(values.most);
        s.step = 2;
        while (log2(s.top / s.bottom) / log2(s.step) > MAX_LOG_TICKS) s.step *= 2;
    }
    while (!is_log(&s) && s.top / s.step > MAX_TICKS) s.step *= 2;
    size_t i = 0;
    for (; i + 1 < axis->n_suffixes && s.top >= 2 * 1024 * s.unit; i++) s.unit *= 1024;
    s.suffix = axis->suffixes[i];
    return s;
}

static double place(const scale *s, double value) {
    double share = is_log(s) ? log2(value / s->bottom) / log2(s->top / s->bottom) : value / s->top;
    return s->from + (s->to - s->from) * share;
}

static int n_steps(const scale *s) {
    return (int)(is_log(s) ? log2(s->top / s->bottom) / log2(s->step) + 1e-9 : s->top / s->step);
}

static double tick(const scale *s, int i) { return is_log(s) ? s->bottom * pow(s->step, i) : i * s->step; }

static const char *value_text(const scale *s, double value, int decimals, char text[64]) {
    if (decimals < 0)
        (void)snprintf(text, 64, "%g%s", value / s->unit, value == 0 ? "" : s->suffix);
    else
        (void)snprintf(text, 64, "%.*f%s", decimals, value / s->unit, s->suffix);
    return text;
}

static void draw_axes(FILE *file, const plot *p, const scale *x, const scale *y) {
    char text[64];
    for (int i = 0; i <= n_steps(y); i++) {
        double at = tick(y, i);
        (void)fprintf(file, "<line class=\"grid\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", x->from, place(y, at),
                      x->to, place(y, at));
        svg_text(file, x->from - 9, place(y, at) + 4, "tick end", value_text(y, at, -1, text));
    }
    for (int i = 0; i <= n_steps(x); i++) {
        double at = tick(x, i);
        (void)fprintf(file, "<line class=\"axis\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", place(x, at), y->from,
                      place(x, at), y->from + 5);
        svg_text(file, place(x, at), y->from + 20, "tick middle", value_text(x, at, -1, text));
    }
    (void)fprintf(file, "<path class=\"axis\" d=\"M%.1f %.1fV%.1fH%.1f\"/>\n", x->from, y->to, y->from, x->to);
    svg_text(file, (x->from + x->to) / 2, y->from + 42, "label middle", p->x.label);
    (void)fprintf(file, "<text class=\"label middle\" transform=\"translate(20 %.1f) rotate(-90)\">", (y->from + y->to) / 2);
    svg_put(file, p->y.label);
    (void)fputs("</text>\n", file);
}

static void put_stroke(FILE *file, const plot_line *line) {
    (void)fprintf(file, "fill=\"none\" stroke=\"%s\" stroke-width=\"%.1f\" stroke-linejoin=\"round\"", line->color, line->width);
    if (line->dash != NULL) (void)fprintf(file, " stroke-dasharray=\"%s\"", line->dash);
    (void)fputs("/>\n", file);
}

static void draw_line(FILE *file, const plot_line *line, const scale *x, const scale *y) {
    (void)fputs("<path d=\"", file);
    for (size_t i = 0; i < line->n; i++)
        (void)fprintf(file, "%c%.1f %.1f", i == 0 ? 'M' : 'L', place(x, line->x[i]), place(y, line->y[i]));
    (void)fputs("\" ", file);
    put_stroke(file, line);
    for (size_t i = 0; i < line->n; i++) {
        double at_x = place(x, line->x[i]);
        double at_y = place(y, line->y[i]);
        if (line->dots)
            (void)fprintf(file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\" fill=\"%s\"/>\n", at_x, at_y, DOT, line->color);
        if (line->names != NULL) svg_text(file, at_x, at_y - 11, "tick middle", line->names[i]);
    }
}

static void draw_legend(FILE *file, const plot *p) {
    for (size_t i = 0; i < p->n_lines; i++) {
        size_t row = i / 2;
        double left = LEFT + (double)(i % 2) * LEGEND_COLUMN;
        double middle = TOP_WITHOUT_LEGEND - 12 + (double)row * LEGEND_ROW;
        (void)fprintf(file, "<path d=\"M%.1f %.1fh34\" ", left, middle);
        put_stroke(file, &p->lines[i]);
        svg_text(file, left + 42, middle + 4, "legend", p->lines[i].name);
    }
}

/* Prints the last value of each line, from the lowest to the highest, each at least LABEL_GAP above the previous one. */
static void draw_ends(FILE *file, const plot *p, const scale *x, const scale *y) {
    bool done[MAX_LINES] = {false};
    double floor = INFINITY;
    for (size_t count = 0; count < p->n_lines; count++) {
        size_t lowest = p->n_lines;
        for (size_t i = 0; i < p->n_lines; i++) {
            if (done[i] || p->lines[i].n == 0) continue;
            if (lowest == p->n_lines || p->lines[i].y[p->lines[i].n - 1] < p->lines[lowest].y[p->lines[lowest].n - 1]) lowest = i;
        }
        if (lowest == p->n_lines) return;
        const plot_line *line = &p->lines[lowest];
        done[lowest] = true;
        if (line->ink != NULL && line->ink[0] == '\0') continue;
        double value = line->y[line->n - 1];
        double at = fmin(place(y, value) + 4, floor - LABEL_GAP);
        char text[64];
        (void)fprintf(file, "<text class=\"value\" x=\"%.1f\" y=\"%.1f\" style=\"fill:%s\">", x->to + 10, at,
                      line->ink != NULL ? line->ink : line->color);
        svg_put(file, value_text(y, value, 2, text));
        (void)fputs("</text>\n", file);
        floor = at;
    }
}

static void widen(range *r, double value) {
    r->least = fmin(r->least, value);
    r->most = fmax(r->most, value);
}

static void draw(FILE *file, const plot *p) {
    range x_values = {INFINITY, 0};
    range y_values = {INFINITY, 0};
    for (size_t i = 0; i < p->n_lines; i++) {
        for (size_t j = 0; j < p->lines[i].n; j++) {
            widen(&x_values, p->lines[i].x[j]);
            widen(&y_values, p->lines[i].y[j]);
        }
    }
    if (!p->y.is_log) y_values.most *= 1.03;
    size_t legend_rows = (p->n_lines + 1) / 2;
    double top = TOP_WITHOUT_LEGEND + (double)legend_rows * LEGEND_ROW;
    double bottom = top + FRAME_HEIGHT;
    scale x = make_scale(&p->x, x_values, LEFT, RIGHT);
    scale y = make_scale(&p->y, y_values, bottom, top);
    double height = bottom + BELOW_FRAME;

    svg_begin(file, WIDTH, height, p->title, p->subtitle, p->footnote);
    draw_legend(file, p);
    draw_axes(file, p, &x, &y);
    for (size_t i = 0; i < p->n_lines; i++) draw_line(file, &p->lines[i], &x, &y);
    draw_ends(file, p, &x, &y);
    svg_end(file);
}

bool plot_write_svg(const plot *p, const char *path) {
    if (p->n_lines > MAX_LINES) {
        errno = EINVAL;
        return false;
    }
    FILE *file = fopen(path, "w");
    if (file == NULL) return false;
    draw(file, p);
    bool good = ferror(file) == 0;
    return fclose(file) == 0 && good;
}
