/* Scalar attention reference for tests and benchmarks; see attn.h for the arguments. Too slow for production use. */
#ifndef FKV_ATTN_REFERENCE_H
#define FKV_ATTN_REFERENCE_H

#include "attn.h"

void fkv_attn_reference(const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows, const void *q, void *out);

#endif
