/* Relative L2 distance, used by every test that compares floats with a reference. */
#ifndef FKV_RELATIVE_L2_H
#define FKV_RELATIVE_L2_H

#include <math.h>
#include <stddef.h>

/* Returns sqrt(sum (a - b)^2 / sum b^2), or infinity if any value is NaN. */
static inline double relative_l2(const float *a, const float *b, size_t n) {
    double error = 0;
    double size = 0;
    for (size_t i = 0; i < n; i++) {
        double difference = (double)a[i] - (double)b[i];
        error += difference * difference;
        size += (double)b[i] * (double)b[i];
    }
    double relative = sqrt(error / (size > 0 ? size : 1));
    return relative == relative ? relative : INFINITY;
}

#endif
