/* Seeded random numbers of the random-life test, and how it ends when something is wrong. */
#ifndef FKV_LIFE_RANDOM_H
#define FKV_LIFE_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct life_random {
    uint64_t state;
} life_random;

/* Two numbers to one that looks like neither. */
static inline uint64_t life_mix(uint64_t a, uint64_t b) {
    uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline uint64_t life_draw(life_random *r) {
    r->state += 0x9e3779b97f4a7c15u;
    return life_mix(r->state, 0);
}

/* 0 .. n - 1 */
static inline uint32_t life_below(life_random *r, uint32_t n) { return (uint32_t)((life_draw(r) >> 32) * n >> 32); }

/* low .. high */
static inline uint32_t life_between(life_random *r, uint32_t low, uint32_t high) { return low + life_below(r, high - low + 1); }

static inline bool life_chance(life_random *r, uint32_t percent) { return life_below(r, 100) < percent; }

/* 0 <= u < 1 */
static inline double life_uniform(life_random *r) { return (double)(life_draw(r) >> 11) * 0x1p-53; }

/* low .. high, as many below 2^i as above: mostly small. */
static inline uint32_t life_mostly_small(life_random *r, uint32_t low, uint32_t high) {
    uint32_t top = high;
    while (top > low + 1 && life_chance(r, 50)) top = low + (top - low) / 2;
    return life_between(r, low, top);
}

/* A sum of four uniforms of mean 0 and variance 1: near enough to Gaussian, and quick. */
static inline float life_gaussian(life_random *r) {
    uint64_t bits = life_draw(r);
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)(bits >> 16 * i & 0xffff) / 65536.0f - 0.5f;
    return sum * 1.7320508f;
}

/* Says what was wrong, with the seed, the configuration and the moment, and ends the program. */
_Noreturn void life_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
