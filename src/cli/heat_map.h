/* A grid of shares as an SVG picture: columns are lengths, rows are depths, colours go from missed to found.
 */
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
    const double *depths; /* [n_depths] 0 to 1 */
    uint32_t n_depths;
    const double *shares; /* [n_depths, n_lengths] 0 to 1 */
} heat_map;

/* False, with errno set, where the file cannot be written. */
bool heat_map_write(const heat_map *map, const char *path);

#endif
