/* The scalar truth of attention, for tests and benches; see attn.h for the arguments. Slow: never on a step's path. */
#ifndef FKV_TRUTH_H
#define FKV_TRUTH_H

#include "attn.h"

void fkv_attn_truth(const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows, const void *q, void *out);

#endif
