/* See svg.h. */
#include "svg.h"

void svg_put(FILE *file, const char *text) {
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '&': (void)fputs("&amp;", file); break;
        case '<': (void)fputs("&lt;", file); break;
        case '>': (void)fputs("&gt;", file); break;
        default: (void)fputc(*text, file);
        }
    }
}

void svg_text(FILE *file, double x, double y, const char *style, const char *text) {
    (void)fprintf(file, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">", x, y, style);
    svg_put(file, text);
    (void)fputs("</text>\n", file);
}

void svg_begin(FILE *file, double width, double height, const char *title, const char *subtitle, const char *note) {
    (void)fprintf(
        file,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" role=\"img\">\n",
        width, height, width, height);
    (void)fputs("<style>text{font-family:system-ui,'Helvetica Neue',Arial,sans-serif;fill:#24292f}"
                ".title{font-size:20px;font-weight:600}.subtitle{font-size:13px;fill:#57606a}.tick{font-size:12px;fill:#57606a}"
                ".label{font-size:13px}.legend{font-size:13px}.note{font-size:11.5px;fill:#6e7781}"
                ".middle{text-anchor:middle}.end{text-anchor:end}.grid{stroke:#e3e7eb}.axis{stroke:#57606a;fill:none}"
                ".value{font-size:12.5px;font-weight:600}</style>\n",
                file);
    (void)fprintf(file, "<rect width=\"%.0f\" height=\"%.0f\" rx=\"8\" fill=\"#ffffff\"/>\n", width, height);
    svg_text(file, 24, 36, "title", title);
    svg_text(file, 24, 58, "subtitle", subtitle);
    svg_text(file, 24, height - 16, "note", note);
}

void svg_end(FILE *file) { (void)fputs("</svg>\n", file); }
