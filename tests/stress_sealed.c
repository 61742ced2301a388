/* Independent implementation of sealed blocks, written from sections 1.5 and 1.6 of docs/page_format.md. */
#include "stress_format.h"

#include <math.h>
#include <string.h>

enum { BLOCK_TOKENS = 16, LINE = 64, LANES = 16, DIGITS = 3 };

static const float SMALLEST = 0x1p-100f;

static const struct {
    uint32_t n_levels;
    int level[8];
    int above[7];
    float start;
} BOOK[] = {
    [2] = {2, {38, 127}, {82}, 1.9079f},
    [3] = {4, {14, 45, 79, 127}, {29, 62, 103}, 2.7184f},
    [4] = {8, {6, 18, 31, 44, 58, 75, 96, 127}, {12, 24, 37, 51, 66, 85, 111}, 3.4518f},
};

static bool is_calibrated(const stress_codec *c) { return c->kind == FKV_CODEC_CALIBRATED; }

bool stress_is_sealed(const stress_codec *c) {
    return c->kind == FKV_CODEC_SEALED || c->kind == FKV_CODEC_SEALED_V || is_calibrated(c);
}

static size_t block_lines(const stress_codec *c) {
    size_t units = c->dim / 16;
    if (is_calibrated(c)) return (c->dim * c->bits + 31) / 32;
    return c->bits == 4 ? 2 * units : c->bits == 2 ? units : units + (units + 1) / 2;
}

size_t stress_page_part_bytes(const stress_codec *c, uint32_t part, uint32_t page_tokens) {
    if (!stress_is_sealed(c)) return (size_t)page_tokens * stress_part_bytes(c, part);
    if (part == 0) return page_tokens / BLOCK_TOKENS * block_lines(c) * LINE;
    if (c->kind == FKV_CODEC_SEALED_V) return part == 1 ? 2 * (size_t)page_tokens : 0;
    return 2 * (size_t)c->dim;
}

/* ---- code positions ---- */

typedef struct place {
    size_t at; /* byte offset within the codes of the page */
    uint32_t shift;
} place;

/* Returns the position of a code. For a 3-bit code, returns the position of its two lower bits and sets *upper to the position of
 * its upper bit. */
static place place_of(const stress_codec *c, uint32_t token, uint32_t channel, place *upper) {
    uint32_t t = token % BLOCK_TOKENS;
    uint32_t u = channel / 16;
    bool keys = c->kind == FKV_CODEC_SEALED;
    uint32_t dword = keys ? t : channel % 16;
    uint32_t byte = keys ? channel % 4 : t % 4;
    uint32_t quad = keys ? channel % 16 / 4 : t / 4;
    size_t base = token / BLOCK_TOKENS * block_lines(c) * LINE + (size_t)4 * dword + byte;
    *upper = (place){base + (size_t)(c->dim / 16 + u / 2) * LINE, 4 * (u % 2) + quad};
    if (c->bits == 4) return (place){base + (size_t)(2 * u + quad / 2) * LINE, 4 * (quad % 2)};
    return (place){base + (size_t)u * LINE, 2 * quad};
}

static void put_code(const stress_codec *c, uint8_t *codes, uint32_t token, uint32_t channel, uint32_t code) {
    place upper;
    place lower = place_of(c, token, channel, &upper);
    uint32_t mask = c->bits == 4 ? 15 : 3;
    codes[lower.at] |= (uint8_t)((code & mask) << lower.shift);
    if (c->bits == 3) codes[upper.at] |= (uint8_t)(code >> 2 << upper.shift);
}

static uint32_t get_code(const stress_codec *c, const uint8_t *codes, uint32_t token, uint32_t channel) {
    place upper;
    place lower = place_of(c, token, channel, &upper);
    uint32_t code = codes[lower.at] >> lower.shift & (c->bits == 4 ? 15u : 3u);
    return c->bits == 3 ? code | (codes[upper.at] >> upper.shift & 1u) << 2 : code;
}

/* ---- calibrated channels ---- */

typedef struct channel_order {
    uint32_t before[DIGITS]; /* number of 2-bit digits stored before plane i, which contains digit i of every channel with more
                                than i digits */
    uint16_t place[FKV_MAX_HEAD_DIM]; /* rank of each channel when sorted by descending bit width */
} channel_order;

static uint32_t bits_of_channel(const stress_codec *c, uint32_t channel) {
    return is_calibrated(c) ? c->channel_bits[channel] : c->bits;
}

/* Sorts the channels by descending bit width, and channels of equal width by index. */
static channel_order order_of(const stress_codec *c) {
    channel_order order = {.before = {0, c->dim}};
    uint16_t at = 0;
    for (uint32_t bits = 6; bits > 1; bits--) {
        for (uint32_t channel = 0; channel < c->dim; channel++)
            if (bits_of_channel(c, channel) == bits) order.place[channel] = at++;
        if (bits == 4) order.before[2] = c->dim + at;
    }
    return order;
}

static place place_of_digit(const stress_codec *c, const channel_order *order, uint32_t token, uint32_t channel, uint32_t digit) {
    uint32_t g = order->place[channel] + order->before[digit];
    size_t line = token / BLOCK_TOKENS * block_lines(c) + g / 16;
    return (place){line * LINE + (size_t)4 * (token % BLOCK_TOKENS) + g % 4, 2 * (g % 16 / 4)};
}

static void put_digits(const stress_codec *c, const channel_order *order, uint8_t *codes, uint32_t token, uint32_t channel,
                       uint32_t code) {
    for (uint32_t digit = 0; 2 * digit < bits_of_channel(c, channel); digit++, code >>= 2) {
        place at = place_of_digit(c, order, token, channel, digit);
        codes[at.at] |= (uint8_t)((code & 3) << at.shift);
    }
}

static uint32_t get_digits(const stress_codec *c, const channel_order *order, const uint8_t *codes, uint32_t token,
                           uint32_t channel) {
    uint32_t code = 0;
    for (uint32_t digit = 0; 2 * digit < bits_of_channel(c, channel); digit++) {
        place at = place_of_digit(c, order, token, channel, digit);
        code |= (codes[at.at] >> at.shift & 3u) << 2 * digit;
    }
    return code;
}

/* ---- 16-bit values ---- */

static void put_number(const stress_codec *c, uint8_t *bytes, uint32_t i, float x) {
    uint16_t half = stress_to_half(c->type, x);
    bytes[2 * i] = (uint8_t)half;
    bytes[2 * i + 1] = (uint8_t)(half >> 8);
}

static float get_number(const stress_codec *c, const uint8_t *bytes, uint32_t i) {
    return stress_from_half(c->type, (uint16_t)(bytes[2 * i] | bytes[2 * i + 1] << 8));
}

/* ---- keys ---- */

/* Rounds a scale to the page type and then to seven significant bits. float16 scales are rounded to multiples of 2^-20 or of a
 * larger power of two. */
static float seven_bits(const stress_codec *c, float scale) {
    float x = stress_from_half(c->type, stress_to_half(c->type, scale));
    if (x < SMALLEST) return 0;
    int exponent = 0;
    (void)frexpf(x, &exponent); /* x is at least 2^(exponent - 1) and less than 2^exponent */
    float step = ldexpf(1, exponent - 7);
    if (c->type == FKV_F16 && step < 0x1p-20f) step = 0x1p-20f;
    return floorf(x / step + 0.5f) * step;
}

/* Returns true if a row is excluded from the channel ranges, because its largest magnitude exceeds 1024 and is more than 64 times
 * the largest magnitude of at least half of the rows. */
static bool is_outlier_row(const stress_codec *c, const float *x, uint32_t n, uint32_t row) {
    uint32_t n_smaller = 0;
    float largest = 0;
    for (uint32_t d = 0; d < c->dim; d++) largest = fmaxf(largest, fabsf(x[(size_t)row * c->dim + d]));
    for (uint32_t t = 0; t < n; t++) {
        float other = 0;
        for (uint32_t d = 0; d < c->dim; d++) other = fmaxf(other, fabsf(x[(size_t)t * c->dim + d]));
        n_smaller += 64 * other < largest;
    }
    return largest > 1024 && n_smaller >= n - n_smaller;
}

static void seal_channel(const stress_codec *c, const channel_order *order, const float *x, uint32_t n, const bool *outlier,
                         uint32_t channel, uint8_t *const part[STRESS_PARTS]) {
    float bins = (float)((1u << bits_of_channel(c, channel)) - 1);
    uint32_t at = order->place[channel];
    float lo = INFINITY;
    float hi = -INFINITY;
    for (uint32_t t = 0; t < n; t++) {
        if (outlier[t]) continue;
        float value = x[(size_t)t * c->dim + channel];
        lo = value < lo ? value : lo;
        hi = value > hi ? value : hi;
    }
    put_number(c, part[1], at, seven_bits(c, (hi - lo) / bins));
    put_number(c, part[2], at, lo == 0 ? 0 : lo);
    float scale = get_number(c, part[1], at);
    float bias = get_number(c, part[2], at);
    if (scale == 0) return;
    for (uint32_t t = 0; t < n; t++) {
        float code = rintf((x[(size_t)t * c->dim + channel] - bias) * (1.0f / scale));
        code = code > 0 ? code : 0;
        uint32_t held = (uint32_t)(code < bins ? code : bins);
        if (is_calibrated(c))
            put_digits(c, order, part[0], t, channel, held);
        else
            put_code(c, part[0], t, channel, held);
    }
}

/* ---- values ---- */

static float lanes_sum(const float *lane) {
    float sum = lane[0];
    for (int i = 1; i < LANES; i++) sum += lane[i];
    return sum;
}

static uint32_t size_of(const stress_codec *c, float y, float norm) {
    uint32_t size = 0;
    if (norm < SMALLEST) return 0;
    int m = (int)rintf(fminf(fabsf(y) * (128.0f / norm), 127.0f));
    for (uint32_t i = 0; i + 1 < BOOK[c->bits].n_levels; i++) size += m > BOOK[c->bits].above[i];
    return size;
}

static float refit(const stress_codec *c, const float *y, float norm) {
    float products[LANES] = {0};
    float squares[LANES] = {0};
    for (uint32_t d = 0; d < c->dim; d++) {
        float level = (float)BOOK[c->bits].level[size_of(c, y[d], norm)];
        products[d % LANES] += fabsf(y[d]) * level;
        squares[d % LANES] += level * level;
    }
    return 128.0f * lanes_sum(products) / lanes_sum(squares);
}

static void seal_row(const stress_codec *c, const float *y, uint32_t token, uint8_t *const part[STRESS_PARTS]) {
    float sizes[LANES] = {0};
    float limit = c->type == FKV_F16 ? 65504.0f : 0x1p96f;
    for (uint32_t d = 0; d < c->dim; d++) sizes[d % LANES] += fabsf(y[d]);
    float norm = lanes_sum(sizes) / (float)c->dim * BOOK[c->bits].start;
    for (int i = 0; i < 2; i++) norm = refit(c, y, norm);
    put_number(c, part[1], token, fminf(norm, limit));
    if (get_number(c, part[1], token) < SMALLEST) put_number(c, part[1], token, 0);
    norm = get_number(c, part[1], token);
    for (uint32_t d = 0; d < c->dim; d++)
        put_code(c, part[0], token, d, size_of(c, y[d], norm) | (y[d] < 0 ? 1u << (c->bits - 1) : 0));
}

/* ---- pages ---- */

static void make_storable(const stress_codec *c, float *x) {
    float limit = c->type == FKV_F16 ? 65504.0f : 0x1p96f;
    if (isnan(*x)) *x = 0;
    *x = fmaxf(fminf(*x, limit), -limit);
}

static void encode_rows(const stress_codec *c, const float *x, uint32_t n, uint8_t *const part[STRESS_PARTS]) {
    uint8_t row[4 * FKV_MAX_HEAD_DIM];
    for (uint32_t t = 0; t < n; t++) {
        const uint8_t *from = row;
        stress_encode_rotated(c, x + (size_t)t * c->dim, row);
        for (uint32_t p = 0; p < STRESS_PARTS; p++) {
            size_t bytes = stress_part_bytes(c, p);
            memcpy(part[p] + t * bytes, from, bytes);
            from += bytes;
        }
    }
}

void stress_seal(const stress_codec *c, const float *given, uint32_t n, uint8_t *const part[STRESS_PARTS]) {
    static float x[256 * FKV_MAX_HEAD_DIM];
    memcpy(x, given, (size_t)n * c->dim * sizeof *x);
    for (size_t i = 0; i < (size_t)n * c->dim; i++) make_storable(c, &x[i]);
    if (!stress_is_sealed(c)) {
        encode_rows(c, x, n, part);
        return;
    }
    channel_order order = order_of(c);
    bool outlier[256];
    for (uint32_t t = 0; t < n; t++) outlier[t] = is_outlier_row(c, x, n, t);
    for (uint32_t d = 0; d < c->dim && c->kind != FKV_CODEC_SEALED_V; d++) seal_channel(c, &order, x, n, outlier, d, part);
    for (uint32_t t = 0; t < n && c->kind == FKV_CODEC_SEALED_V; t++) seal_row(c, x + (size_t)t * c->dim, t, part);
}

void stress_decode_at(const stress_codec *c, uint8_t *const part[STRESS_PARTS], uint32_t token, float *x) {
    if (!stress_is_sealed(c)) {
        uint8_t row[4 * FKV_MAX_HEAD_DIM];
        uint8_t *to = row;
        for (uint32_t p = 0; p < STRESS_PARTS; p++, to += stress_part_bytes(c, p - 1))
            memcpy(to, part[p] + (size_t)token * stress_part_bytes(c, p), stress_part_bytes(c, p));
        stress_decode(c, row, x);
        return;
    }
    channel_order order = order_of(c);
    uint32_t sign = 1u << (c->bits - 1);
    for (uint32_t d = 0; d < c->dim; d++) {
        uint32_t code = is_calibrated(c) ? get_digits(c, &order, part[0], token, d) : get_code(c, part[0], token, d);
        if (c->kind != FKV_CODEC_SEALED_V) {
            uint32_t at = order.place[d];
            x[d] = get_number(c, part[1], at) * (float)code + get_number(c, part[2], at);
            continue;
        }
        float value = fabsf(get_number(c, part[1], token)) / 128.0f * (float)BOOK[c->bits].level[code & (sign - 1)];
        x[d] = (code & sign) != 0 ? -value : value;
    }
}
