/* Shapes of the eight AMX tile registers. A thread configures the tiles before use and releases them afterwards, because a thread
 * with configured tiles has 8 KiB of additional state to save at every context switch.
 *
 * GCC's tile intrinsics do not declare that they read memory. fkv_tiles_see_stores() must be called between stores and a tile
 * load that reads the stored bytes.
 */
#ifndef FKV_AMX_TILES_H
#define FKV_AMX_TILES_H

#include "../base.h"

#include <immintrin.h>

enum { FKV_TILE_HEIGHT = 16, FKV_TILE_BYTES = 64 /* per row */ };

/* Memory operand of the LDTILECFG instruction. */
typedef struct fkv_tile_shapes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} fkv_tile_shapes;
_Static_assert(sizeof(fkv_tile_shapes) == 64, "must match the operand size of ldtilecfg");

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
