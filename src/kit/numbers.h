/* A clock, medians and seeded random numbers, for programs that measure. Knows nothing of flatkv.
 */
#ifndef FKV_KIT_NUMBERS_H
#define FKV_KIT_NUMBERS_H

#include <stddef.h>
#include <stdint.h>

double kit_seconds(void); /* monotonic */

typedef struct kit_spread {
    double p10;
    double p50;
    double p90;
} kit_spread;

/* Sorts the values. n > 0. */
kit_spread kit_spread_of(double *values, size_t n);

/* Of sorted values, n > 0, q from 0 to 1: between neighbours in proportion, so that 0.5 of an even count is the mean of the
 * middle two. */
double kit_quantile(const double *sorted, size_t n, double q);

void kit_sort(double *values, size_t n); /* ascending */

uint64_t kit_random(uint64_t *state);                        /* splitmix64 */
void kit_gaussian(uint64_t *state, size_t n, float *values); /* mean 0, deviation 1, near enough */

#endif
