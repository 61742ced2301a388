/* Reads and writes calibration files and assigns bits to channels; see calibration.h. forward/calibrate.c collects the
 * statistics. */
#include "calibration.h"

#include "../base/checksum.h"
#include "../base/file_sync.h"
#include "../base/printable.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    VERSION = 1,
    QUAD = 4,              /* the number of 4-bit channels and the number of 6-bit channels are multiples of this value */
    MAX_HEADS = 65536,     /* maximum number of KV heads per layer */
    MAX_BYTES = 256 << 20, /* largest file accepted */
    LOWEST = 2,            /* minimum number of bits per channel */
    N_AVERAGES = 2         /* number of bit assignments per file, with averages of 4 and 3 bits per channel */
};

#define MAGIC                                                                                                                    \
    "\x89"                                                                                                                       \
    "FKC\r\n\x1a\n"

typedef struct file_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t header_bytes; /* 128 */
    uint32_t n_layers;
    uint32_t layer_bytes; /* 8 */
    uint64_t file_bytes;
    uint64_t n_tokens;
    uint8_t zero[24];
    uint8_t weights_id[32];
    uint8_t sha256[FKV_SHA256_BYTES]; /* SHA-256 of the whole file except this field */
} file_header;

_Static_assert(sizeof(file_header) == 128 && offsetof(file_header, sha256) == 96, "the header has 128 bytes");
_Static_assert(sizeof(fkv_calibration_layer) == 8, "a layer entry is two 32-bit integers");

static fkv_status calibration_digest(const uint8_t *file, size_t n_bytes, uint8_t out[FKV_SHA256_BYTES]) {
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, file, offsetof(file_header, sha256));
    fkv_sha256_add(&sha, file + sizeof(file_header), n_bytes - sizeof(file_header));
    return fkv_sha256_close(&sha, out);
}

/* Sets the pointers that refer to parts of c->file. c->n_layers must be set. */
static void set_calibration_pointers(fkv_calibration *c) {
    c->layers = (const fkv_calibration_layer *)(c->file + sizeof(file_header));
    c->both = c->file + sizeof(file_header) + (size_t)c->n_layers * sizeof *c->layers;
    memcpy(c->weights_id, c->file + offsetof(file_header, weights_id), sizeof c->weights_id);
}

/* ---- reading ---- */

static fkv_status check_calibration_header(const file_header *h, size_t n_bytes, const char *path) {
    FKV_REQUIRE(h->file_bytes == n_bytes, FKV_FILE_DAMAGED,
                "%s: damaged calibration file: file_bytes is %llu but the file is %zu bytes long", path,
                (unsigned long long)h->file_bytes, n_bytes);
    FKV_REQUIRE(h->header_bytes == sizeof *h && h->layer_bytes == sizeof(fkv_calibration_layer), FKV_FILE_DAMAGED,
                "%s: damaged calibration file: header_bytes is %u and layer_bytes is %u, expected %zu and %zu", path,
                h->header_bytes, h->layer_bytes, sizeof *h, sizeof(fkv_calibration_layer));
    FKV_REQUIRE(h->n_layers > 0 && h->n_layers <= FKV_MAX_LAYERS && (uint64_t)h->n_layers * h->layer_bytes <= n_bytes - sizeof *h,
                FKV_FILE_DAMAGED, "%s: damaged calibration file: n_layers is %u, expected 1 to %d layers that fit in the file",
                path, h->n_layers, FKV_MAX_LAYERS);
    for (size_t i = 0; i < sizeof h->zero; i++)
        FKV_REQUIRE(h->zero[i] == 0, FKV_FILE_DAMAGED, "%s: damaged calibration file: reserved byte %zu is not 0", path,
                    offsetof(file_header, zero) + i);
    return FKV_OK;
}

static fkv_status check_layers(fkv_calibration *c, const char *path) {
    for (uint32_t l = 0; l < c->n_layers; l++) {
        fkv_calibration_layer layer = c->layers[l];
        FKV_REQUIRE(layer.n_kv_heads > 0 && layer.n_kv_heads <= MAX_HEADS && layer.head_dim > 0 && layer.head_dim % 16 == 0 &&
                        layer.head_dim <= FKV_MAX_HEAD_DIM,
                    FKV_FILE_DAMAGED, "%s: damaged calibration file: layer %u has an invalid shape (%u KV heads of dimension %u)",
                    path, l, layer.n_kv_heads, layer.head_dim);
        c->n_channels += (uint64_t)layer.n_kv_heads * layer.head_dim;
    }
    size_t left = c->n_bytes - (size_t)(c->both - c->file);
    FKV_REQUIRE(c->n_channels == left, FKV_FILE_DAMAGED,
                "%s: damaged calibration file: the layers have %llu channels but the file assigns bits to %zu channels", path,
                (unsigned long long)c->n_channels, left);
    return FKV_OK;
}

/* Validates the bit assignment of one head. average: expected average number of bits per channel, 4 or 3. */
static fkv_status check_head(const uint8_t *both, uint32_t dim, uint32_t average, uint32_t layer, uint32_t head,
                             const char *path) {
    uint32_t n[8] = {0}; /* n[b / 2] is the number of channels with b bits */
    for (uint32_t d = 0; d < dim; d++) {
        uint32_t bits = average == 4 ? both[d] & 15u : both[d] >> 4;
        FKV_REQUIRE(
            bits == 2 || bits == 4 || bits == 6, FKV_FILE_DAMAGED,
            "%s: damaged calibration file: channel %u of KV head %u, layer %u, has %u bits in the %u-bit assignment, expected 2, 4 or 6",
            path, d, head, layer, bits, average);
        n[bits / 2]++;
    }
    FKV_REQUIRE(2 * n[1] + 4 * n[2] + 6 * n[3] == average * dim && n[2] % QUAD == 0 && n[3] % QUAD == 0, FKV_FILE_DAMAGED,
                "%s: damaged calibration file: KV head %u of layer %u has %u, %u and %u channels of 2, 4 and 6 bits; "
                "the average must be %u bits, and the numbers of 4-bit and 6-bit channels must be multiples of %d",
                path, head, layer, n[1], n[2], n[3], average, QUAD);
    return FKV_OK;
}

static fkv_status check_bits(const fkv_calibration *c, const char *path) {
    const uint8_t *both = c->both;
    for (uint32_t l = 0; l < c->n_layers; l++) {
        for (uint32_t h = 0; h < c->layers[l].n_kv_heads; h++, both += c->layers[l].head_dim)
            for (uint32_t average = 4; average > 4 - N_AVERAGES; average--)
                FKV_TRY(check_head(both, c->layers[l].head_dim, average, l, h, path));
    }
    return FKV_OK;
}

static fkv_status parse_calibration(fkv_calibration *c, const char *path) {
    file_header h;
    uint8_t wanted[FKV_SHA256_BYTES];
    FKV_REQUIRE(c->n_bytes >= sizeof h.magic && memcmp(c->file, MAGIC, sizeof h.magic) == 0, FKV_FILE_FORMAT,
                "%s: not a calibration file: the first 8 bytes are not the expected signature", path);
    FKV_REQUIRE(c->n_bytes >= sizeof h, FKV_FILE_DAMAGED,
                "%s: damaged calibration file: the file is %zu bytes long, less than its %zu-byte header", path, c->n_bytes,
                sizeof h);
    memcpy(&h, c->file, sizeof h);
    FKV_REQUIRE(h.version == VERSION, FKV_FILE_VERSION,
                "%s: unsupported calibration file version %u: this library reads version %d", path, h.version, VERSION);
    FKV_TRY(check_calibration_header(&h, c->n_bytes, path));
    FKV_TRY(calibration_digest(c->file, c->n_bytes, wanted));
    FKV_REQUIRE(memcmp(wanted, h.sha256, sizeof wanted) == 0, FKV_FILE_DAMAGED,
                "%s: damaged calibration file: SHA-256 mismatch; create the file again with 'flatkv calibrate'", path);
    c->n_layers = h.n_layers;
    c->n_tokens = h.n_tokens;
    set_calibration_pointers(c);
    FKV_TRY(check_layers(c, path));
    return check_bits(c, path);
}

fkv_status fkv_calibration_read(uint8_t *bytes, size_t n_bytes, const char *path, fkv_calibration *calibration) {
    fkv_calibration c = {.file = bytes, .n_bytes = n_bytes};
    fkv_status status = parse_calibration(&c, path);
    if (status == FKV_OK)
        *calibration = c;
    else
        free(bytes);
    return status;
}

static fkv_status os_failed(const char *what, const char *path) {
    return fkv_fail(FKV_IO, "%.300s: %s: %s", path, what, strerror(errno));
}

static bool read_fully(int fd, uint8_t *to, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t got = read(fd, to + at, n - at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += (size_t)got;
    }
    return true;
}

static fkv_status read_fd(int fd, const char *path, fkv_calibration *calibration) {
    struct stat about;
    if (fstat(fd, &about) != 0) return os_failed("cannot read calibration file", path);
    FKV_REQUIRE(S_ISREG(about.st_mode), FKV_FILE_FORMAT, "%s: not a calibration file, because it is not a regular file", path);
    FKV_REQUIRE(about.st_size <= MAX_BYTES, FKV_FILE_FORMAT,
                "%s: not a calibration file: it is %lld bytes long, which is more than the maximum size", path,
                (long long)about.st_size);
    size_t n = (size_t)about.st_size;
    uint8_t *bytes = malloc(n + 1);
    FKV_REQUIRE(bytes != NULL, FKV_NO_MEMORY, "%s: out of memory reading a calibration file of %zu bytes", path, n);
    errno = 0;
    if (read_fully(fd, bytes, n)) return fkv_calibration_read(bytes, n, path, calibration);
    free(bytes);
    return errno != 0
               ? os_failed("cannot read calibration file", path)
               : fkv_fail(FKV_FILE_DAMAGED, "%s: damaged calibration file: the file was truncated while it was read", path);
}

fkv_status fkv_calibration_open(const char *path, fkv_calibration *calibration) {
    /* O_NONBLOCK prevents open() from blocking if the path is a FIFO */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return os_failed("cannot open calibration file", path);
    fkv_status status = read_fd(fd, path, calibration);
    (void)close(fd);
    return status;
}

void fkv_calibration_close(fkv_calibration *calibration) {
    free(calibration->file);
    *calibration = (fkv_calibration){0};
}

/* ---- writing ---- */

fkv_status fkv_calibration_new(const fkv_calibration_layer *layers, uint32_t n_layers, const uint8_t weights_id[32],
                               fkv_calibration *calibration) {
    fkv_calibration c = {.n_layers = n_layers};
    for (uint32_t l = 0; l < n_layers; l++) c.n_channels += (uint64_t)layers[l].n_kv_heads * layers[l].head_dim;
    c.n_bytes = sizeof(file_header) + n_layers * sizeof *layers + (size_t)c.n_channels;
    FKV_REQUIRE(c.n_bytes <= MAX_BYTES, FKV_UNSUPPORTED, "the calibration file would have %zu bytes, more than the limit of %d",
                c.n_bytes, MAX_BYTES);
    c.file = calloc(1, c.n_bytes);
    FKV_REQUIRE(c.file != NULL, FKV_NO_MEMORY, "out of memory allocating a calibration file of %zu bytes", c.n_bytes);
    file_header h = {.version = VERSION,
                     .header_bytes = sizeof h,
                     .n_layers = n_layers,
                     .layer_bytes = sizeof *layers,
                     .file_bytes = c.n_bytes};
    memcpy(h.magic, MAGIC, sizeof h.magic);
    memcpy(h.weights_id, weights_id, sizeof h.weights_id);
    memcpy(c.file, &h, sizeof h);
    memcpy(c.file + sizeof h, layers, n_layers * sizeof *layers);
    set_calibration_pointers(&c);
    *calibration = c;
    return FKV_OK;
}

static bool write_fully(int fd, const uint8_t *from, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t put = write(fd, from + at, n - at);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return false;
        at += (size_t)put;
    }
    return true;
}

fkv_status fkv_calibration_write(fkv_calibration *calibration, const char *path) {
    char part[FKV_PATH_BYTES];
    int length = snprintf(part, sizeof part, "%s.part", path);
    FKV_REQUIRE(length > 0 && (size_t)length < sizeof part, FKV_BAD_ARGUMENT, "the calibration path is too long (%zu bytes): %s",
                strlen(path), path);
    memcpy(calibration->file + offsetof(file_header, n_tokens), &calibration->n_tokens, sizeof calibration->n_tokens);
    FKV_TRY(calibration_digest(calibration->file, calibration->n_bytes, calibration->file + offsetof(file_header, sha256)));
    int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0644);
    if (fd < 0) return os_failed("cannot write calibration file", part);
    bool good = write_fully(fd, calibration->file, calibration->n_bytes) && fkv_file_sync(fd) == 0;
    int write_error = errno;
    good = close(fd) == 0 && good;
    if (good && rename(part, path) == 0) return FKV_OK;
    if (!good) errno = write_error;
    fkv_status status = os_failed("cannot write calibration file", path);
    (void)unlink(part);
    return status;
}

/* ---- bit assignment ---- */

void fkv_calibration_choose(fkv_calibration *calibration, uint32_t average) {
    FKV_ASSERT(average == 4 || average == 3);
    for (uint64_t i = 0; i < calibration->n_channels; i++)
        calibration->both[i] = average == 4 ? calibration->both[i] & 15u : (uint8_t)(calibration->both[i] >> 4);
}

/* Sorts channels by descending cost, and channels of equal cost by index. order: [dim] */
static void order_channels(const double *cost, uint32_t dim, uint16_t *order) {
    for (uint32_t d = 0; d < dim; d++) {
        uint32_t at = d;
        for (; at > 0 && cost[order[at - 1]] < cost[d]; at--) order[at] = order[at - 1];
        order[at] = (uint16_t)d;
    }
}

static uint8_t bits_at(uint32_t rank, uint32_t n6, uint32_t n_more) { return rank < n6 ? 6 : rank < n_more - n6 ? 4 : 2; }

/* Channels are sorted by descending cost. The first channels get 6 bits, the next ones 4 bits, and the rest 2 bits. Because the
 * average is fixed, the number of 6-bit channels determines the number of 4-bit channels, so it is sufficient to try every
 * possible number of 6-bit channels. */
void fkv_channels_share(const double *cost, uint32_t dim, uint32_t average, uint8_t *bits) {
    uint16_t order[FKV_MAX_HEAD_DIM];
    /* number of bit pairs to distribute, in addition to the one pair (2 bits) that every channel has */
    uint32_t n_more = dim * (average - LOWEST) / 2;
    uint32_t best = 0;
    double least = INFINITY;
    order_channels(cost, dim, order);
    for (uint32_t n6 = 0; n6 <= n_more / 2; n6 += QUAD) {
        double sum = 0;
        for (uint32_t p = 0; p < dim; p++) sum += cost[order[p]] * exp2(-2.0 * bits_at(p, n6, n_more));
        if (sum >= least) continue;
        least = sum;
        best = n6;
    }
    for (uint32_t p = 0; p < dim; p++) bits[order[p]] = bits_at(p, best, n_more);
}

/* ---- public functions ---- */

fkv_status fkv_calibration_default_path(const char *model_path, char *path, size_t capacity) {
    struct stat about;
    bool folder = stat(model_path, &about) == 0 && S_ISDIR(about.st_mode);
    int length = snprintf(path, capacity, "%s%s", model_path, folder ? "/calibration.fkc" : ".fkc");
    FKV_REQUIRE(length > 0 && (size_t)length < capacity, FKV_BAD_ARGUMENT,
                "the calibration path is %d bytes long; the buffer holds at most %zu", length, capacity - 1);
    return FKV_OK;
}

fkv_status fkv_calibration_inspect(const char *path, fkv_calibration_info *info) {
    FKV_REQUIRE(path != NULL && info != NULL, FKV_BAD_ARGUMENT, "fkv_calibration_inspect: path or info is NULL");
    fkv_calibration c = {0};
    FKV_TRY(fkv_calibration_open(path, &c));
    *info = (fkv_calibration_info){.n_layers = c.n_layers, .n_tokens = c.n_tokens, .n_channels = c.n_channels};
    memcpy(info->weights_id, c.weights_id, sizeof info->weights_id);
    for (uint64_t i = 0; i < c.n_channels; i++) {
        info->n_4[(c.both[i] & 15u) / 2 - 1]++;
        info->n_3[(c.both[i] >> 4) / 2 - 1]++;
    }
    fkv_calibration_close(&c);
    return FKV_OK;
}
