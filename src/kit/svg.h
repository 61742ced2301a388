/* Common frame of all SVG pictures: a white background, which is readable on light and dark pages, one set of fonts and colors,
 * a title and subtitle at the top, and a note at the bottom.
 *
 * CSS classes for text: title, subtitle, tick, label, legend, note, value; add the class middle or end to set the text anchor.
 * CSS classes for lines: grid, axis.
 */
#ifndef FKV_KIT_SVG_H
#define FKV_KIT_SVG_H

#include <stdio.h>

void svg_begin(FILE *file, double width, double height, const char *title, const char *subtitle, const char *note);
void svg_end(FILE *file);

/* Writes text with XML escapes. */
void svg_put(FILE *file, const char *text);

void svg_text(FILE *file, double x, double y, const char *style, const char *text);

#endif
