/* Compares the speed of reads from a prefix store on a Redis server with the speed of plain GET commands over the same type of
 * connection.
 *
 * usage: bench_redis unix:PATH|HOST:PORT [PAGE_BYTES [N_PAGES]]
 *
 * Writes N_PAGES pages, reads them repeatedly with both methods in turn, and prints JSON with the medians. The store decrypts and
 * authenticates each page; GET only receives the bytes. Both methods keep the same number of commands in flight, because the
 * throughput of Redis depends on this number. The first bytes of every page from the store are compared with the bytes that were
 * written.
 */
#include <flatkv/prefix_store.h>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 9, READ_AHEAD = 16 };

static double seconds_now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int fail_with(const char *text) {
    (void)fprintf(stderr, "bench_redis: %s\n", text);
    return EXIT_FAILURE;
}

/* ---- plain GET ---- */

static int connect_plain(const char *address) {
    if (strncmp(address, "unix:", 5) == 0) {
        struct sockaddr_un u = {.sun_family = AF_UNIX};
        (void)snprintf(u.sun_path, sizeof u.sun_path, "%s", address + 5);
        const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        return fd >= 0 && connect(fd, (const struct sockaddr *)(const void *)&u, sizeof u) == 0 ? fd : -1;
    }
    char host[200];
    const char *port = strrchr(address, ':');
    struct addrinfo *found = NULL;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    const int one = 1;
    if (port == NULL) return -1;
    (void)snprintf(host, sizeof host, "%.*s", (int)(port - address), address);
    if (getaddrinfo(host, port + 1, &hints, &found) != 0) return -1;
    const int fd = socket(found->ai_family, SOCK_STREAM, 0);
    const bool connected = fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0;
    freeaddrinfo(found);
    if (connected) (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return connected ? fd : -1;
}

static bool receive_all(int fd, char *bytes, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t got = recv(fd, bytes + done, n - done, 0);
        if (got <= 0) return false;
        done += (size_t)got;
    }
    return true;
}

static bool send_text(int fd, const char *text, size_t n) { return send(fd, text, n, 0) == (ssize_t)n; }

/* Reads n_pages values with up to n_in_flight commands in flight. Uses the buffers of `pages` in rotation, as the store does.
 * Returns the duration in seconds, or 0 on failure. */
static double read_plain(int fd, uint64_t n_bytes, uint32_t n_pages, uint32_t n_in_flight, const fkv_page_read *pages) {
    char head[64];
    const double start = seconds_now();
    uint32_t n_sent = 0;
    for (uint32_t i = 0; i < n_pages; i++) {
        for (; n_sent < n_pages && n_sent < i + n_in_flight; n_sent++) {
            const int n = snprintf(head, sizeof head, "*2\r\n$3\r\nGET\r\n$11\r\nbench:%05u\r\n", n_sent);
            if (!send_text(fd, head, (size_t)n)) return 0.0;
        }
        const size_t n_head = (size_t)snprintf(head, sizeof head, "$%llu\r\n", (unsigned long long)n_bytes);
        char got[64];
        if (!receive_all(fd, got, n_head) || memcmp(got, head, n_head) != 0) return 0.0;
        if (!receive_all(fd, (char *)pages[i % READ_AHEAD].packed, n_bytes) || !receive_all(fd, got, 2)) return 0.0;
    }
    return seconds_now() - start;
}

static bool write_plain(int fd, uint32_t number, uint64_t n_bytes, char *buffer) {
    char head[80];
    const size_t n = (size_t)snprintf(head, sizeof head, "*3\r\n$3\r\nSET\r\n$11\r\nbench:%05u\r\n$%llu\r\n", number,
                                      (unsigned long long)n_bytes);
    if (!send_text(fd, head, n)) return false;
    memset(buffer, 'x', n_bytes);
    for (size_t done = 0; done < n_bytes;) {
        const ssize_t sent = send(fd, buffer + done, n_bytes - done, 0);
        if (sent <= 0) return false;
        done += (size_t)sent;
    }
    return send_text(fd, "\r\n", 2) && receive_all(fd, buffer, 5) && memcmp(buffer, "+OK\r\n", 5) == 0;
}

/* ---- the store ---- */

typedef struct page_sequence {
    fkv_page_read *pages; /* [READ_AHEAD] buffers, used in rotation */
    const uint8_t *expected;
    uint32_t n_pages;
    uint32_t n_next;
    uint32_t n_done;
    uint32_t n_wrong;
    uint32_t n_in_flight; /* largest number of pages that were requested but not yet received at any time */
} page_sequence;

static fkv_page_key key_of(uint32_t i) {
    fkv_page_key key = {{0}};
    memcpy(key.bytes, &i, sizeof i);
    memcpy(key.bytes + 16, &i, sizeof i);
    return key;
}

static fkv_page_read *next_page(void *user) {
    page_sequence *s = user;
    if (s->n_next == s->n_pages || s->n_next == s->n_done + READ_AHEAD) return NULL;
    fkv_page_read *page = &s->pages[s->n_next % READ_AHEAD];
    page->key = key_of(s->n_next++);
    if (s->n_next - s->n_done > s->n_in_flight) s->n_in_flight = s->n_next - s->n_done;
    return page;
}

static void page_done(void *user) {
    page_sequence *s = user;
    const fkv_page_read *page = &s->pages[s->n_done++ % READ_AHEAD];
    /* Compares only the first 4096 bytes, because the store has authenticated the whole page. */
    const bool equal = page->status == FKV_OK && page->n_bytes == page->capacity && memcmp(page->packed, s->expected, 4096) == 0;
    s->n_wrong += !equal;
}

static double read_store(const fkv_prefix_store *store, page_sequence *s) {
    const double start = seconds_now();
    s->n_next = s->n_done = s->n_in_flight = 0;
    while (s->n_done < s->n_pages)
        store->read_pages(store->self, &(fkv_page_reads){.user = s, .next = next_page, .done = page_done});
    return seconds_now() - start;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    static const uint8_t secret[32] = {1, 2, 3};
    if (argc < 2) return fail_with("usage: bench_redis unix:PATH|HOST:PORT [PAGE_BYTES [N_PAGES]]");
    const uint64_t n_bytes = argc > 2 ? strtoull(argv[2], NULL, 10) : 3 << 20;
    const uint32_t n_pages = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 32;
    if (n_bytes < 4096 || n_bytes > (uint64_t)256 << 20 || n_pages == 0 || n_pages > 99999)
        return fail_with("expected 4096 to 268435456 bytes per page and 1 to 99999 pages");
    char url[300];
    (void)snprintf(url, sizeof url, "redis://%s", argv[1]);
    uint8_t *page = malloc(n_bytes);
    char *buffer = malloc(n_bytes + 64);
    fkv_page_read pages[READ_AHEAD] = {{.capacity = 0}};
    for (size_t i = 0; i < READ_AHEAD; i++) pages[i] = (fkv_page_read){.packed = malloc(n_bytes), .capacity = n_bytes};
    fkv_prefix_store store;
    const fkv_prefix_redis_config config = {.url = url, .secret = secret, .n_secret = sizeof secret, .timeout_s = 30.0};
    if (page == NULL || buffer == NULL || fkv_prefix_redis_open(&config, &store) != FKV_OK) return fail_with(fkv_message());
    for (uint64_t i = 0; i < n_bytes; i++) page[i] = (uint8_t)(i * 2654435761U >> 13);
    for (uint32_t i = 0; i < n_pages; i++) {
        const fkv_page_key key = key_of(i);
        if (store.write(store.self, &key, page, n_bytes) != FKV_OK) return fail_with(fkv_message());
    }
    const int fd = connect_plain(argv[1]);
    for (uint32_t i = 0; i < n_pages; i++)
        if (fd < 0 || !write_plain(fd, i, n_bytes, buffer)) return fail_with("cannot write the pages with plain Redis commands");
    page_sequence sequence = {.pages = pages, .expected = page, .n_pages = n_pages};
    double plain[ROUNDS];
    double verified[ROUNDS];
    double share[ROUNDS];
    for (int i = -2; i < ROUNDS; i++) { /* the two rounds with negative numbers are a warm-up */
        const double b = read_store(&store, &sequence);
        const double a = read_plain(fd, n_bytes, n_pages, sequence.n_in_flight, pages);
        if (a == 0.0 || sequence.n_wrong > 0) return fail_with("a read failed");
        if (i < 0) continue;
        plain[i] = (double)n_bytes * n_pages / a;
        verified[i] = (double)n_bytes * n_pages / b;
        share[i] = a / b;
    }
    qsort(plain, ROUNDS, sizeof plain[0], compare_doubles);
    qsort(verified, ROUNDS, sizeof verified[0], compare_doubles);
    qsort(share, ROUNDS, sizeof share[0], compare_doubles);
    (void)printf("{\"page_bytes\": %llu, \"pages\": %u, \"rounds\": %d, \"in_flight\": %u, \"get_mb_per_s\": %.0f, "
                 "\"verified_mb_per_s\": %.0f, \"share\": %.3f, \"share_of_best\": %.3f}\n",
                 (unsigned long long)n_bytes, n_pages, ROUNDS, sequence.n_in_flight, plain[ROUNDS / 2] / 1e6,
                 verified[ROUNDS / 2] / 1e6, share[ROUNDS / 2], verified[ROUNDS - 1] / plain[ROUNDS - 1]);
    store.close(store.self);
    return EXIT_SUCCESS;
}
