/* vector_ops_body.h compiled for AVX-512. */
#define VECTOR_OPS fkv_vector_ops_avx512
#include "vector_ops_body.h"
