/* A line chart as an SVG file, drawn without any tool: axes with ticks in human units, a legend, the last value beside each line.
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
    const char *dash;         /* SVG dash pattern; NULL: solid */
    const char *ink;          /* of the value at its end, for a line too pale to write in; NULL: color, "": no value */
    bool dots;                /* at its points, for a line of few */
    const char *const *names; /* beside the points, [n]; NULL: none */
} plot_line;

/* Values in powers of two: suffixes[i] names 1024^i. */
typedef struct plot_axis {
    const char *label;
    const char *const *suffixes;
    size_t n_suffixes;
    bool is_log; /* every doubling takes the same way, and all values are above 0; otherwise the axis begins at 0 */
} plot_axis;

typedef struct plot {
    const char *title;
    const char *subtitle;
    const char *footnote;
    plot_axis x;
    plot_axis y;
    const plot_line *lines; /* later ones lie on top */
    size_t n_lines;
} plot;

extern const plot_axis PLOT_TOKENS;
extern const plot_axis PLOT_BYTES;
extern const plot_axis PLOT_NUMBER;
extern const plot_axis PLOT_MILLISECONDS;

/* False, with errno set, where the file cannot be written. */
bool plot_write_svg(const plot *p, const char *path);

#endif
