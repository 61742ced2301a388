/* Line chart as an SVG file, written without external tools: axes with ticks in human-readable units, a legend, and the last
 * value at the right end of each line.
 */
#ifndef FKV_KIT_PLOT_H
#define FKV_KIT_PLOT_H

#include <stdbool.h>
#include <stddef.h>

typedef struct plot_line {
    const char *name; /* in the legend */
    const double *x;  /* ascending */
    const double *y;
    size_t n;
    const char *color; /* "#rrggbb" */
    double width;
    const char *dash; /* SVG dash pattern; NULL for a solid line */
    const char *ink;  /* text color of the value printed at the end of the line; NULL: same as `color`; "": no value is printed */
    bool dots;        /* draws a dot at each point */
    const char *const *names; /* [n] labels printed above the points; NULL if there are no labels */
} plot_line;

/* Axis whose labels use powers of 1024: suffixes[i] is the unit printed after multiples of 1024^i. */
typedef struct plot_axis {
    const char *label;
    const char *const *suffixes;
    size_t n_suffixes;
    bool is_log; /* true for a logarithmic axis, which needs positive values; a linear axis starts at 0 */
} plot_axis;

typedef struct plot {
    const char *title;
    const char *subtitle;
    const char *footnote;
    plot_axis x;
    plot_axis y;
    const plot_line *lines; /* lines are drawn in this order; later lines cover earlier ones */
    size_t n_lines;
} plot;

extern const plot_axis PLOT_TOKENS;
extern const plot_axis PLOT_BYTES;
extern const plot_axis PLOT_NUMBER;
extern const plot_axis PLOT_MILLISECONDS;

/* Returns false and sets errno if the file cannot be written. */
bool plot_write_svg(const plot *p, const char *path);

#endif
