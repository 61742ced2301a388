/* The frame that our pictures share: a white ground, so that they read the same on light and dark pages, one set of fonts and
 * colours, title and subtitle above, a note below.
 *
 * Classes for text: title, subtitle, tick, label, legend, note, value; with middle or end for where it is held. For lines: grid,
 * axis.
 */
#ifndef FKV_KIT_SVG_H
#define FKV_KIT_SVG_H

#include <stdio.h>

void svg_begin(FILE *file, double width, double height, const char *title, const char *subtitle, const char *note);
void svg_end(FILE *file);

/* With the escapes that text needs. */
void svg_put(FILE *file, const char *text);

void svg_text(FILE *file, double x, double y, const char *style, const char *text);

#endif
