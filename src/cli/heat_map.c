/* See heat_map.h. */
#include "heat_map.h"

#include "../kit/svg.h"

static const double LEFT = 110;
static const double TOP = 84;
static const double CELL_WIDTH = 74;
static const double CELL_HEIGHT = 30;
static const double BELOW = 78;
static const double LEAST_WIDTH = 760;

/* Interpolates a color from dull red through sand to deep green. Both ends are dark in grayscale, but the printed percentages
 * distinguish them. */
static void color_of(double share, char color[8]) {
    static const double from[3] = {0xb9, 0x3a, 0x32};
    static const double middle[3] = {0xe9, 0xd8, 0xa6};
    static const double to[3] = {0x1f, 0x7a, 0x4d};
    const double *a = share < 0.5 ? from : middle;
    const double *b = share < 0.5 ? middle : to;
    double t = share < 0.5 ? share * 2 : share * 2 - 1;
    unsigned parts[3];
    for (int i = 0; i < 3; i++) parts[i] = (unsigned)(a[i] + (b[i] - a[i]) * t + 0.5) & 0xff;
    (void)snprintf(color, 8, "#%02x%02x%02x", parts[0], parts[1], parts[2]);
}

static void draw_cell(FILE *file, const heat_map *map, uint32_t row, uint32_t column) {
    double share = map->shares[(size_t)row * map->n_lengths + column];
    double x = LEFT + column * CELL_WIDTH;
    double y = TOP + row * CELL_HEIGHT;
    char color[8];
    char label[16];
    color_of(share, color);
    (void)snprintf(label, sizeof label, "%.0f %%", share * 100);
    (void)fprintf(file, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n", x, y, CELL_WIDTH - 2,
                  CELL_HEIGHT - 2, color);
    (void)fprintf(file, "<text class=\"value middle\" x=\"%.1f\" y=\"%.1f\" style=\"fill:%s\">%s</text>\n", x + CELL_WIDTH / 2,
                  y + CELL_HEIGHT / 2 + 4, share > 0.25 && share < 0.75 ? "#24292f" : "#ffffff", label);
}

bool heat_map_write(const heat_map *map, const char *path) {
    FILE *file = fopen(path, "w");
    if (file == NULL) return false;
    double bottom = TOP + map->n_depths * CELL_HEIGHT;
    double width = LEFT + map->n_lengths * CELL_WIDTH + 24;
    svg_begin(file, width > LEAST_WIDTH ? width : LEAST_WIDTH, bottom + BELOW, map->title, map->subtitle, map->note);
    char label[32];
    for (uint32_t row = 0; row < map->n_depths; row++) {
        (void)snprintf(label, sizeof label, "%.0f %%", map->depths[row] * 100);
        svg_text(file, LEFT - 10, TOP + row * CELL_HEIGHT + CELL_HEIGHT / 2 + 4, "tick end", label);
        for (uint32_t column = 0; column < map->n_lengths; column++) draw_cell(file, map, row, column);
    }
    for (uint32_t column = 0; column < map->n_lengths; column++) {
        (void)snprintf(label, sizeof label, "%u", map->lengths[column]);
        svg_text(file, LEFT + column * CELL_WIDTH + CELL_WIDTH / 2, bottom + 18, "tick middle", label);
    }
    svg_text(file, LEFT, bottom + 40, "label", "tokens");
    (void)fprintf(file, "<text class=\"label middle\" transform=\"translate(24 %.1f) rotate(-90)\">depth of the fact</text>\n",
                  (TOP + bottom) / 2);
    svg_end(file);
    bool good = ferror(file) == 0;
    return fclose(file) == 0 && good;
}
