/* A prefix store on one or more Redis or Valkey servers, which several flatkv servers share. Each packed page is one value.
 *
 * Keys: "fkv:1:" and 64 hexadecimal digits of HMAC-SHA-256(name key, page key). Values: "FKVR", version (4 bytes), nonce (12),
 * the packed page encrypted with AES-256-GCM, tag (16). The Redis key and the version are authenticated with the page, so a value
 * is accepted only under the key it was written to. The name key and the encryption key are derived from a secret that all flatkv
 * servers share. Read access to a Redis server reveals neither prompts nor tenants. Write access without the secret does not
 * suffice to forge a page.
 *
 * Files: prefix_redis.c opens and closes the store. redis_servers.c manages servers, connections and failures. redis_lookup.c
 * implements the existence queries and the background thread. redis_read.c and redis_write.c transfer pages.
 *
 * Threads: contains(), pending(), expect() and touch() only use tables in memory. A background thread asks the servers which
 * pages exist, refreshes expiry times and probes servers that have failed. read() and write() use the network on the threads of
 * their callers, with deadlines.
 *
 * Reads: GET commands for up to FKV_REDIS_READ_AHEAD pages are in flight, so a prefix costs about one round trip. If pages are
 * large, fewer of them are in flight. Redis copies each value to an output buffer when it receives the command, and its
 * throughput drops if the output buffers exceed the processor's cache. Replies are read in the order of the commands, into the
 * buffers of the caller.
 *
 * Failures: after a failure, a server is not used until a probe of the background thread succeeds. Meanwhile its pages count as
 * missing, and writes to it are dropped. An outage lasts until a page has been read or written. During an outage, failures are
 * logged once, and the time between a failure and the next probe grows. Each page belongs to one server, chosen by rendezvous
 * hashing, so adding or losing one of n servers moves 1/n of the pages.
 *
 * Expiry: a page expires one second earlier for each page that precedes it in its prompt. With the eviction policy
 * volatile-ttl, Redis therefore evicts the ends of prompts first. All memory is allocated at open.
 */
#ifndef FKV_REDIS_STORE_H
#define FKV_REDIS_STORE_H

#include "../base/page_cipher.h"
#include "resp.h"

#include <flatkv/prefix_store.h>

#include <pthread.h>

enum {
    FKV_REDIS_MAX_SERVERS = 16,
    FKV_REDIS_ANSWER_SETS = 16384, /* number of sets in the set-associative table that caches which pages exist; a power of two */
    FKV_REDIS_ANSWER_WAYS = 4,
    FKV_REDIS_ANSWER_KEY_BYTES = 16,
    FKV_REDIS_RING_ENTRIES = 4096, /* capacity of the background thread's queue of existence queries and expiry refreshes */
    FKV_REDIS_BATCH = 128,         /* maximum number of commands in one pipeline */
    FKV_REDIS_CHUNK_BYTES = 64 * 1024,
    FKV_REDIS_NAME_BYTES = 6 + 2 * FKV_PAGE_KEY_BYTES, /* length of a Redis key */
    FKV_REDIS_HEADER_BYTES = 20,
    FKV_REDIS_OVERHEAD = FKV_REDIS_HEADER_BYTES + FKV_CIPHER_TAG_BYTES,
    FKV_REDIS_VERSION = 1,
    FKV_REDIS_LOGIN_BYTES = 512,
    FKV_REDIS_READ_AHEAD = 16,            /* maximum number of pages that are requested before the first of them has arrived */
    FKV_REDIS_READ_AHEAD_BYTES = 12 << 20 /* maximum size of the pages in flight per server; two pages are always allowed */
};

static const uint8_t FKV_REDIS_MAGIC[4] = {'F', 'K', 'V', 'R'}; /* first bytes of a value */

#define FKV_REDIS_PROBE_S 0.5     /* time, in seconds, between a failure and the first probe of an outage */
#define FKV_REDIS_FIRST_RATE 20e6 /* assumed transfer rate, in bytes per second, before the first measurement */

typedef enum fkv_redis_answer_state {
    FKV_REDIS_UNKNOWN,
    FKV_REDIS_PENDING,
    FKV_REDIS_FOUND,
    FKV_REDIS_MISSING
} fkv_redis_answer_state;

typedef struct fkv_redis_answer {
    uint8_t key[FKV_REDIS_ANSWER_KEY_BYTES];
    fkv_redis_answer_state state;
    double at; /* fkv_seconds_now() */
} fkv_redis_answer;

typedef enum fkv_redis_task_kind { FKV_REDIS_ASK, FKV_REDIS_REFRESH } fkv_redis_task_kind;

typedef struct fkv_redis_task {
    fkv_page_key key;
    fkv_redis_task_kind kind;
    uint32_t depth;
} fkv_redis_task;

/* One Redis server. The fields from `is_down` on are protected by the lock of the store. */
typedef struct fkv_redis_server {
    fkv_resp_address address;
    uint64_t hash;
    fkv_resp asker; /* connection used by the background thread */
    fkv_resp reader;
    uint64_t reader_serial; /* number of times that `reader` was connected */
    uint32_t n_in_flight;   /* number of GET commands on `reader` whose replies have not been read */
    fkv_resp writer;
    bool is_down;
    double probe_at;
    double probe_s;    /* delay, in seconds, between the next failure and the first probe */
    double full_until; /* no pages are written to the server before this time */
    bool full_is_logged;
    bool outage_is_logged; /* true if a failure has been logged and no page has been read or written since then */
    double rate;           /* measured transfer rate, in bytes per second */
} fkv_redis_server;

typedef struct fkv_redis_store {
    uint64_t map_bytes;
    uint32_t n_servers;
    fkv_redis_server servers[FKV_REDIS_MAX_SERVERS];
    char login[FKV_REDIS_LOGIN_BYTES]; /* AUTH command; empty if no password is configured */
    size_t n_login;
    uint8_t name_key[FKV_CIPHER_KEY_BYTES];
    uint8_t value_key[FKV_CIPHER_KEY_BYTES];
    uint64_t expiry_s;
    double timeout_s;
    fkv_log_fn log;
    void *log_user;

    pthread_mutex_t read_lock; /* held while a page is read or removed; protects read connections and the next two fields */
    fkv_cipher opener;
    uint64_t value_bytes; /* size of the value that was received last; 0 before the first value */

    pthread_mutex_t write_lock; /* held while a page is written; protects the servers' write connections, `cipher` and `chunk` */
    fkv_cipher cipher;

    pthread_mutex_t lock; /* protects the fields up to n_refused, `tasks` and `answers`; never held during I/O */
    pthread_cond_t changed;
    bool closing;
    uint32_t n_tasks;
    uint32_t first_task;
    uint64_t n_refused; /* number of values that failed authentication or had an unknown format */

    pthread_t thread;
    bool thread_runs;
    fkv_redis_task batch[FKV_REDIS_BATCH]; /* tasks that the background thread is processing */
    char names[FKV_REDIS_BATCH][FKV_REDIS_NAME_BYTES + 1];
    char commands[FKV_REDIS_BATCH * 160];
    uint8_t chunk[FKV_REDIS_CHUNK_BYTES];
    fkv_redis_task tasks[FKV_REDIS_RING_ENTRIES];
    fkv_redis_answer answers[FKV_REDIS_ANSWER_SETS][FKV_REDIS_ANSWER_WAYS];
} fkv_redis_store;

/* ---- redis_servers.c ---- */

/* Computes the Redis key of a page. */
fkv_status fkv_redis_name(const fkv_redis_store *s, const fkv_page_key *key, char name[FKV_REDIS_NAME_BYTES + 1]);

/* Mixes the bits of a hash. */
uint64_t fkv_redis_mix(uint64_t x);

/* Returns the server that stores a page. */
fkv_redis_server *fkv_redis_server_of(fkv_redis_store *s, const fkv_page_key *key);

/* Returns the lifetime to set when a page is written or refreshed, in milliseconds. depth: number of pages that precede the page
 * in its prompt. */
uint64_t fkv_redis_lifetime_ms(const fkv_redis_store *s, uint64_t depth);

/* Writes the additional authenticated data of a value: its Redis key, magic and version. Returns the number of bytes. */
size_t fkv_redis_bound(const char *name, const uint8_t header[FKV_REDIS_HEADER_BYTES], uint8_t bound[FKV_REDIS_NAME_BYTES + 8]);

void fkv_redis_log(const fkv_redis_store *s, const fkv_redis_server *server, const char *text);

/* Returns false while the server is down: from a failure until a probe succeeds. */
bool fkv_redis_is_usable(fkv_redis_store *s, const fkv_redis_server *server);

/* Handles an error reply: the server is not used until it accepts commands again. */
void fkv_redis_error_reply(fkv_redis_store *s, fkv_redis_server *server, const char *text);

/* Ends an outage after a page has been read or written. */
void fkv_redis_note_success(fkv_redis_store *s, fkv_redis_server *server);

/* Connects and logs in, unless the connection is already open and idle. */
bool fkv_redis_connect(fkv_redis_store *s, fkv_redis_server *server, fkv_resp *c);

/* Handles a failed connection: the server is not used until a probe succeeds. Returns FKV_IO. */
fkv_status fkv_redis_connection_failed(fkv_redis_store *s, fkv_redis_server *server, const fkv_resp *c);

/* Returns the time allowed for the transfer of n_bytes, in seconds. */
double fkv_redis_transfer_seconds(fkv_redis_store *s, const fkv_redis_server *server, uint64_t n_bytes);

/* Adds a measurement to the moving average of the transfer rate. */
void fkv_redis_note_rate(fkv_redis_store *s, fkv_redis_server *server, uint64_t n_bytes, double seconds);

/* Like fkv_redis_connection_failed(), but for a failed transfer of a page. After a timeout, the next transfer has a longer
 * deadline. */
fkv_status fkv_redis_transfer_failed(fkv_redis_store *s, fkv_redis_server *server, const fkv_resp *c);

/* ---- redis_lookup.c ---- */

bool fkv_redis_contains(void *self, const fkv_page_key *key);
bool fkv_redis_pending(void *self, const fkv_page_key *key);
bool fkv_redis_wants(void *self, const fkv_page_key *key);
void fkv_redis_expect(void *self, const fkv_page_key *keys, uint32_t n);
void fkv_redis_touch(void *self, const fkv_page_key *keys, uint32_t n);

/* Store the result of an existence query in the table. The caller of fkv_redis_set_answer() must hold the lock;
 * fkv_redis_note_answer() acquires it. */
void fkv_redis_set_answer(fkv_redis_store *s, const fkv_page_key *key, fkv_redis_answer_state state);
void fkv_redis_note_answer(fkv_redis_store *s, const fkv_page_key *key, fkv_redis_answer_state state);

/* Main function of the background thread. Returns when the store is being closed. */
void *fkv_redis_background(void *user);

/* ---- redis_read.c ---- */

fkv_status fkv_redis_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes);
void fkv_redis_read_pages(void *self, const fkv_page_reads *reads);
void fkv_redis_remove(void *self, const fkv_page_key *key);

/* ---- redis_write.c ---- */

fkv_status fkv_redis_write(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes);

#endif
