/* See numbers.h. */
#include "numbers.h"

#include <stdlib.h>
#include <time.h>

double kit_seconds(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left;
    double b = *(const double *)right;
    return (a > b) - (a < b);
}

void kit_sort(double *values, size_t n) { qsort(values, n, sizeof *values, ascending); }

double kit_quantile(const double *sorted, size_t n, double q) {
    double at = q * (double)(n - 1);
    size_t below = (size_t)at;
    size_t above = below + 1 < n ? below + 1 : below;
    return sorted[below] + (sorted[above] - sorted[below]) * (at - (double)below);
}

kit_spread kit_spread_of(double *values, size_t n) {
    kit_sort(values, n);
    return (kit_spread){kit_quantile(values, n, 0.1), kit_quantile(values, n, 0.5), kit_quantile(values, n, 0.9)};
}

uint64_t kit_random(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

void kit_gaussian(uint64_t *state, size_t n, float *values) {
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = kit_random(state);
        float sum = 0; /* sum of four uniform values in [-0.5, 0.5), which has variance 1/3 */
        for (int part = 0; part < 4; part++) sum += (float)(bits >> 16 * part & 0xffff) / 65536.0f - 0.5f;
        values[i] = sum * 1.7320508f;
    }
}
