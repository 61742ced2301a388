/* flatkv/prefix_store.h: content-addressed storage for prefix-tree pages, for example in a folder or on Redis servers.
 *
 * Ownership
 *   A packed page is a self-contained byte string owned by the caller. It contains its own key, tokens and checksums. All
 *   contents are verified before use. A store maps keys to packed pages. A store may lose any page at any time, and it can
 *   treat pages as opaque bytes. fkv_prefix_folder_open() opens a store in a folder on disk; an application can provide its own
 *   store by filling in struct fkv_prefix_store.
 *
 * Threading
 *   The functions on packed pages use the cache and follow its threading rules (flatkv.h). The functions of a store may be called
 *   from several threads at the same time.
 *
 * Integrity
 *   A key is a digest of everything a page depends on: weights, shapes, codecs, rotation, RoPE, arithmetic (numerics), tenant,
 *   and all tokens up to the end of the page. A packed page that does not match its key is rejected with FKV_FILE_DAMAGED or
 *   FKV_FILE_FOREIGN and leaves the cache unchanged. Checksums detect damage, not tampering: anyone who can write to a folder can
 *   forge a page. A store on Redis servers authenticates its pages with a secret.
 */
#ifndef FLATKV_PREFIX_STORE_H
#define FLATKV_PREFIX_STORE_H

#include "flatkv.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FKV_PAGE_KEY_BYTES = 32 };

typedef struct fkv_page_key {
    uint8_t bytes[FKV_PAGE_KEY_BYTES];
} fkv_page_key;

/* ---- packed pages -------------------------------------------------------------------------------------------- */

/* Computes the root key of a tenant, which is a digest of the cache's configuration and the tenant's name. The first page of
 * every prompt of the tenant has the root key as its parent key. name: [n_bytes] arbitrary bytes, which cannot be recovered from
 * the key. */
FKV_API fkv_status fkv_prefix_root(const fkv_cache *cache, const void *name, size_t n_bytes, fkv_page_key *root);

/* Computes the key of a page that contains `tokens`. `above` is the key of the preceding page, or a root key for the first page
 * of a prompt. tokens: [page_tokens] */
FKV_API fkv_status fkv_prefix_key(const fkv_page_key *above, const uint32_t *tokens, uint32_t page_tokens, fkv_page_key *key);

/* Returns an upper bound on the size of a packed page, open page or snapshot of this cache, in bytes. */
FKV_API uint64_t fkv_prefix_packed_bytes(const fkv_cache *cache);

/* Returns the value of fkv_prefix_packed_bytes() for a cache opened with this plan and page_tokens tokens per page. */
FKV_API uint64_t fkv_prefix_plan_bytes(const fkv_plan *plan, uint32_t page_tokens);

/* Packs page n_pages - 1 of the prompt `tokens`. The page must be in the prefix tree. tokens: [n_pages * page_tokens]; packed:
 * [fkv_prefix_packed_bytes()]. *n_bytes receives the number of bytes written. Returns FKV_GONE if the page is not in the
 * tree. */
FKV_API fkv_status fkv_prefix_pack(const fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                   const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes);

/* Verifies a packed page, then inserts it into the prefix tree as the most recently used page. Returns FKV_GONE if the preceding
 * pages are not in the tree, FKV_POOL_FULL if every page is in use, and FKV_BAD_STATE if a step is open. */
FKV_API fkv_status fkv_prefix_unpack(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                     const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes);

/* Derives the store key of a recurrent state from the store key of the page that precedes it. */
FKV_API fkv_status fkv_prefix_state_key(const fkv_page_key *page, fkv_page_key *key);

/* Packs the snapshot of the recurrent state after page n_pages - 1 of the prompt `tokens`. key: the snapshot's key from
 * fkv_prefix_state_key(). Returns FKV_GONE if the prefix tree has no such snapshot. Otherwise works like fkv_prefix_pack(). */
FKV_API fkv_status fkv_prefix_pack_state(const fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                         const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes);

/* Verifies a packed snapshot, then inserts it into the prefix tree, which must contain the pages before it. Otherwise works
 * like fkv_prefix_unpack(). */
FKV_API fkv_status fkv_prefix_unpack_state(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                           const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes);

/* Derives the store key of a page's open form from the store key of the page. */
FKV_API fkv_status fkv_prefix_open_key(const fkv_page_key *page, fkv_page_key *key);

/* Packs the open form of page n_pages - 1 of the prompt `tokens`: the recent rows of sealed layers. These rows are needed to
 * share a prefix that ends within the span of this page. The first page has no separate open form, because fkv_prefix_pack()
 * includes it. key: the key from fkv_prefix_open_key(). Returns FKV_GONE if the prefix tree has no open form of this page.
 * Otherwise works like fkv_prefix_pack(). */
FKV_API fkv_status fkv_prefix_pack_open(const fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                        const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes);

/* Verifies a packed open page, then inserts it into the prefix tree, which must contain the page itself. Otherwise works like
 * fkv_prefix_unpack(). */
FKV_API fkv_status fkv_prefix_unpack_open(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                          const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes);

/* ---- stores -------------------------------------------------------------------------------------------------- */

typedef struct fkv_prefix_store_stats {
    uint64_t pages;
    uint64_t bytes;
    uint64_t max_bytes;
    uint64_t evicted; /* pages evicted since the store was opened */
    uint64_t memory;  /* bytes of memory used by the store itself */
    uint64_t refused; /* number of stored values that failed authentication or had an unknown format; always 0 for a folder */
    uint32_t n_unavailable; /* number of servers that are currently not responding */
} fkv_prefix_store_stats;

/* A page to read. The store reports the result of the read in n_bytes and status, which have the same meaning as in read(). */
typedef struct fkv_page_read {
    fkv_page_key key;
    uint8_t *packed; /* [capacity] */
    uint64_t capacity;
    uint64_t n_bytes;
    fkv_status status;
} fkv_page_read;

/* Callbacks that supply the pages to read. They are called on the thread that called read_pages() and must not block. */
typedef struct fkv_page_reads {
    void *user;
    fkv_page_read *(*next)(void *user); /* returns the next page to read, or NULL if there is none at the moment */
    void (*done)(void *user);           /* called once for each page, in the order in which next() returned the pages */
} fkv_page_reads;

/* Functions of a store. All of them may be called from several threads at the same time. contains(), pending(), expect(),
 * wants() and touch() must not block, because they are called from the thread that runs steps or from threads that submit
 * requests; the other functions may access a disk or a network. */
typedef struct fkv_prefix_store {
    void *self;

    /* Returns whether the store contains a page with this key. */
    bool (*contains)(void *self, const fkv_page_key *key);

    /* Optional, for stores that cannot answer contains() immediately: returns true if contains() returned false because the
     * answer is not known yet. The caller may wait a few milliseconds and call contains() again. */
    bool (*pending)(void *self, const fkv_page_key *key);

    /* Optional: announces that contains() will soon be called for these keys, so that the store can look the keys up in
     * advance. */
    void (*expect)(void *self, const fkv_page_key *keys, uint32_t n);

    /* Optional: returns whether the page should be written. If NULL, a page is written if contains() returns false. */
    bool (*wants)(void *self, const fkv_page_key *key);

    /* Reads a page. packed: [capacity]. Returns FKV_GONE if the store does not contain the page, and FKV_FILE_DAMAGED if the
     * stored bytes cannot be a packed page of at most `capacity` bytes. */
    fkv_status (*read)(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes);

    /* Optional: reads all pages that next() returns, until next() returns NULL and no read is in progress. A store on a network
     * can request pages before earlier pages have arrived. */
    void (*read_pages)(void *self, const fkv_page_reads *reads);

    /* Writes a page durably: after write() has returned FKV_OK, the page remains stored until it is evicted or removed, even if
     * the process exits. If the store already contains a page with this key, that page is kept. */
    fkv_status (*write)(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes);

    /* Removes a page. Does nothing if the store does not contain the page. */
    void (*remove)(void *self, const fkv_page_key *key);

    /* Marks the first n pages of a prompt as recently used. If some of these pages must be evicted, the store should evict the
     * last pages of the prompt first. */
    void (*touch)(void *self, const fkv_page_key *keys, uint32_t n);

    void (*stats)(void *self, fkv_prefix_store_stats *stats);
    void (*close)(void *self);
} fkv_prefix_store;

/* Opens a folder as a store, with one file per page, and creates the folder if it does not exist. Pages persist across
 * processes. When the total size would exceed max_bytes, the least recently used pages are evicted. Returns FKV_BUSY if another
 * process has the folder open, and FKV_BAD_ARGUMENT if other users can write to the folder or own it. Files with unrelated
 * names are ignored. Allocates about 80 bytes of memory for every 256 KiB of max_bytes. */
FKV_API fkv_status fkv_prefix_folder_open(const char *path, uint64_t max_bytes, fkv_prefix_store *store);

/* Results of handshake(), receive() and send() of fkv_tls_client that are not positive. */
typedef enum fkv_tls_result {
    FKV_TLS_CLOSED = 0,
    FKV_TLS_WANTS_READ = -1,
    FKV_TLS_WANTS_WRITE = -2,
    FKV_TLS_FAILED = -3
} fkv_tls_result;

/* TLS implementation for connections to servers. The application provides this implementation, because the library itself does
 * not depend on a TLS library. The functions must not block. open() may be called from several threads at the same time; a
 * session is used by one thread at a time. A write to a closed connection must not raise SIGPIPE. */
typedef struct fkv_tls_client {
    void *self;

    /* Begins a session on a connected, non-blocking socket. Returns NULL on failure. */
    void *(*open)(void *self, int fd, const char *host);

    /* Continues the handshake, which must fail if the certificate of the server is not trusted or not valid for `host`. Returns
     * a positive number when the handshake is complete. If the handshake fails, writes the reason to `reason`: [n_reason]. */
    int64_t (*handshake)(void *session, char *reason, size_t n_reason);

    /* Receives or sends up to n bytes. Returns the number of bytes transferred, or an fkv_tls_result. */
    int64_t (*receive)(void *session, void *bytes, size_t n);
    int64_t (*send)(void *session, const void *bytes, size_t n);

    /* Returns true if the connection is open and no data from the server is waiting to be read. */
    bool (*is_idle)(void *session);

    /* Ends a session. Does not close the socket. */
    void (*close)(void *session);
} fkv_tls_client;

typedef struct fkv_prefix_redis_config {
    const char *url; /* redis://[USER@]ADDRESS[,ADDRESS...]; an address is HOST:PORT, [IPV6]:PORT or unix:PATH. With rediss://,
                        connections use TLS */
    const fkv_tls_client *tls; /* required for rediss://; must remain valid until the store is closed */
    const char *password;      /* NULL: no login */
    const uint8_t *secret;     /* [n_secret] at least 16 random bytes, the same in all processes that share the servers */
    size_t n_secret;           /* 0: no secret. This is allowed only if all addresses are loopback addresses or Unix sockets */
    uint64_t expiry_s;         /* seconds after which an unused page expires; 0: one day */
    double timeout_s; /* seconds after which a server that does not respond counts as failed (0: 0.1 s). A request waits at most
                         a fifth of this time for the servers to report which of its pages exist */
    fkv_log_fn log;   /* called with one line of text when a server fails and when it recovers; NULL: no log */
    void *log_user;
} fkv_prefix_redis_config;

/* Opens a store on up to 16 Redis or Valkey servers, which many processes may use at the same time. Each page is stored on one of
 * the servers. Pages are encrypted with AES-256-GCM, and the servers see only keyed hashes (HMAC) of the page keys. A server that
 * fails is not used until it responds again. Server failures never cause a request to fail. Resolves host names, but does not
 * wait for the servers. The strings are copied. Starts one thread and allocates about 3 MB. */
FKV_API fkv_status fkv_prefix_redis_open(const fkv_prefix_redis_config *config, fkv_prefix_store *store);

/* Combines a near store, for example a folder, and a far store, for example Redis servers. A page is read from the near store if
 * the near store contains it, otherwise from the far store. Pages are written to both stores; a page that was read from the far
 * store is later written to the near store. The pair takes ownership of both stores and closes them; if the pair cannot be
 * opened, the caller keeps ownership. Both stores must use the same keys. */
FKV_API fkv_status fkv_prefix_pair_open(const fkv_prefix_store *near, const fkv_prefix_store *far, fkv_prefix_store *store);

#ifdef __cplusplus
}
#endif

#endif
