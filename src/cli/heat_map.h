/* Draws recall as an SVG heat map with one column per context length and one row per depth. Colors range from red (missed) to
 * green (found). */
#ifndef FKV_CLI_HEAT_MAP_H
#define FKV_CLI_HEAT_MAP_H

#include <stdbool.h>
#include <stdint.h>

typedef struct heat_map {
    const char *title;
    const char *subtitle;
    const char *note;
    const uint32_t *lengths; /* [n_lengths] tokens */
    uint32_t n_lengths;
    const double *depths; /* [n_depths] depth of each row, from 0 to 1 */
    uint32_t n_depths;
    const double *shares; /* [n_depths, n_lengths] recall of each cell, from 0 to 1 */
} heat_map;

/* Returns false and sets errno if the file cannot be written. */
bool heat_map_write(const heat_map *map, const char *path);

#endif
