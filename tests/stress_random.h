/* Seeded random numbers and failure reporting of the stress test. */
#ifndef FKV_STRESS_RANDOM_H
#define FKV_STRESS_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct stress_random {
    uint64_t state;
} stress_random;

/* Combines two numbers into one hash. */
static inline uint64_t stress_mix(uint64_t a, uint64_t b) {
    uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline uint64_t stress_draw(stress_random *r) {
    r->state += 0x9e3779b97f4a7c15u;
    return stress_mix(r->state, 0);
}

/* 0 .. n - 1 */
static inline uint32_t stress_below(stress_random *r, uint32_t n) { return (uint32_t)((stress_draw(r) >> 32) * n >> 32); }

/* low .. high */
static inline uint32_t stress_between(stress_random *r, uint32_t low, uint32_t high) {
    return low + stress_below(r, high - low + 1);
}

static inline bool stress_chance(stress_random *r, uint32_t percent) { return stress_below(r, 100) < percent; }

/* 0 <= u < 1 */
static inline double stress_uniform(stress_random *r) { return (double)(stress_draw(r) >> 11) * 0x1p-53; }

/* Returns a number in low .. high, biased towards small values. */
static inline uint32_t stress_mostly_small(stress_random *r, uint32_t low, uint32_t high) {
    uint32_t top = high;
    while (top > low + 1 && stress_chance(r, 50)) top = low + (top - low) / 2;
    return stress_between(r, low, top);
}

/* Approximates a standard normal variable by the sum of four uniform variables, which is fast and accurate enough. */
static inline float stress_gaussian(stress_random *r) {
    uint64_t bits = stress_draw(r);
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)(bits >> 16 * i & 0xffff) / 65536.0f - 0.5f;
    return sum * 1.7320508f;
}

/* Prints the failure with the seed, the configuration and the operation, and exits. */
_Noreturn void stress_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
