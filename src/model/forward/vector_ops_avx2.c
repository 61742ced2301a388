/* vector_ops_body.h compiled for AVX2. */
#define VECTOR_OPS fkv_vector_ops_avx2
#include "vector_ops_body.h"
