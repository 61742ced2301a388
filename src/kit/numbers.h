/* Monotonic clock, quantiles and seeded random numbers for benchmarks. Does not depend on the flatkv library.
 */
#ifndef FKV_KIT_NUMBERS_H
#define FKV_KIT_NUMBERS_H

#include <stddef.h>
#include <stdint.h>

double kit_seconds(void); /* returns the time of a monotonic clock, in seconds */

typedef struct kit_spread {
    double p10;
    double p50;
    double p90;
} kit_spread;

/* Returns the 10th, 50th and 90th percentiles. Sorts the values in place. n must be positive. */
kit_spread kit_spread_of(double *values, size_t n);

/* Returns quantile q (0 to 1) of n > 0 sorted values. Interpolates linearly, so the median (q = 0.5) of an even number of values
 * is the mean of the two middle values. */
double kit_quantile(const double *sorted, size_t n, double q);

void kit_sort(double *values, size_t n); /* ascending */

uint64_t kit_random(uint64_t *state);                        /* splitmix64 */
void kit_gaussian(uint64_t *state, size_t n, float *values); /* writes approximately normal values (mean 0, variance 1) */

#endif
