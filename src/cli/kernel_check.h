/* Accuracy check of the attention kernels for flatkv doctor. */
#ifndef FKV_CLI_KERNEL_CHECK_H
#define FKV_CLI_KERNEL_CHECK_H

#include <flatkv/flatkv.h>

typedef struct kernel_result {
    fkv_status status; /* FKV_OK, or an error code if the check could not run; fkv_message() describes the error */
    double error;      /* relative L2 error against attention in double precision over the unquantized rows */
    double limit;      /* largest acceptable error of the codec */
    char isa[32];      /* instruction set of the kernels, such as "avx512" */
} kernel_result;

/* Writes random rows to a small cache with this codec and compares its attention output with a double-precision reference. */
kernel_result kernel_check(const char *codec, double limit);

#endif
