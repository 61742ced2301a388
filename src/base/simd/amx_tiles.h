/* The shapes of the eight tile registers of AMX, which a thread sets before it uses them and gives back after: tiles in use
 * add 8 KiB to every context switch.
 *
 * gcc's intrinsics do not say that they read memory: what a tile is to hold must be stored before fkv_tiles_see_stores().
 */
#ifndef FKV_AMX_TILES_H
#define FKV_AMX_TILES_H

#include "../base.h"

#include <immintrin.h>

enum { FKV_TILE_HEIGHT = 16, FKV_TILE_BYTES = 64 /* of a row */ };

/* As ldtilecfg reads it. */
typedef struct fkv_tile_shapes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} fkv_tile_shapes;
_Static_assert(sizeof(fkv_tile_shapes) == 64, "the processor's layout");

FKV_INLINE void fkv_tiles_see_stores(void) { __asm__ volatile("" ::: "memory"); }

FKV_INLINE void fkv_tile_shape(fkv_tile_shapes *shapes, int tile, uint32_t n_rows, uint32_t row_bytes) {
    FKV_ASSERT(n_rows <= FKV_TILE_HEIGHT && row_bytes <= FKV_TILE_BYTES);
    shapes->palette = 1;
    shapes->n_rows[tile] = (uint8_t)n_rows;
    shapes->row_bytes[tile] = (uint16_t)row_bytes;
}

FKV_INLINE void fkv_tiles_open(const fkv_tile_shapes *shapes) {
    fkv_tiles_see_stores();
    _tile_loadconfig(shapes);
}

FKV_INLINE void fkv_tiles_close(void) { _tile_release(); }

#endif
