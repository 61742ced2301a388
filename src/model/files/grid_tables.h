/* Codebooks of the IQ1, IQ2 and IQ3 formats; see grid_tables.c. */
#ifndef FKV_GRID_TABLES_H
#define FKV_GRID_TABLES_H

#include <stdint.h>

extern const uint16_t FKV_GRID_IQ1[2048];
extern const uint16_t FKV_GRID_IQ2_XXS[256];
extern const uint16_t FKV_GRID_IQ2_XS[512];
extern const uint16_t FKV_GRID_IQ2_S[1024];
extern const uint16_t FKV_GRID_IQ3_XXS[256];
extern const uint16_t FKV_GRID_IQ3_S[512];

#endif
