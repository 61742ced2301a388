/* Opens and closes the prefix store on Redis servers. redis_store.h describes the store. */
#include "page_file_format.h"
#include "redis_store.h"

#include "../base/memory.h"

#include <stdio.h>

enum { MIN_SECRET_BYTES = 16, DEFAULT_EXPIRY_SECONDS = 24 * 3600 };
static const double DEFAULT_TIMEOUT_S = 0.1; /* for connecting, existence queries and the first line of a reply */

static void redis_stats(void *self, fkv_prefix_store_stats *stats) {
    fkv_redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    *stats = (fkv_prefix_store_stats){.memory = s->map_bytes, .refused = s->n_refused};
    for (uint32_t i = 0; i < s->n_servers; i++) stats->n_unavailable += s->servers[i].is_down;
    (void)pthread_mutex_unlock(&s->lock);
}

static void redis_close(void *self) {
    fkv_redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    s->closing = true;
    (void)pthread_cond_signal(&s->changed);
    (void)pthread_mutex_unlock(&s->lock);
    if (s->thread_runs) (void)pthread_join(s->thread, NULL);
    for (uint32_t i = 0; i < s->n_servers; i++) {
        fkv_resp_close(&s->servers[i].asker);
        fkv_resp_close(&s->servers[i].reader);
        fkv_resp_close(&s->servers[i].writer);
    }
    fkv_cipher_close(&s->opener);
    fkv_cipher_close(&s->cipher);
    (void)pthread_cond_destroy(&s->changed);
    (void)pthread_mutex_destroy(&s->lock);
    (void)pthread_mutex_destroy(&s->read_lock);
    (void)pthread_mutex_destroy(&s->write_lock);
    fkv_map_close(s, s->map_bytes);
}

/* Derives the name key and the encryption key from the secret. */
static fkv_status derive_keys(fkv_redis_store *s, const uint8_t *secret, size_t n_secret) {
    uint8_t master[FKV_SHA256_BYTES];
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    if (n_secret > 0) fkv_sha256_add(&sha, secret, n_secret);
    FKV_TRY(fkv_sha256_close(&sha, master));
    FKV_TRY(fkv_keyed_hash(master, "flatkv redis name 1", 19, s->name_key));
    return fkv_keyed_hash(master, "flatkv redis value 1", 20, s->value_key);
}

/* Parses redis[s]://[USER@]ADDRESS[,ADDRESS...] and resolves the addresses. */
static fkv_status parse_url(fkv_redis_store *s, const char *url, const char *password, const fkv_tls_client *tls) {
    char user[128] = "";
    char address[300];
    const bool is_secure = strncmp(url, "rediss://", 9) == 0;
    FKV_REQUIRE(is_secure || strncmp(url, "redis://", 8) == 0, FKV_BAD_ARGUMENT,
                "invalid URL of a prefix store: expected redis://[USER@]HOST:PORT[,HOST:PORT...] or rediss:// for TLS (got %s)",
                url);
    FKV_REQUIRE(!is_secure || tls != NULL, FKV_BAD_ARGUMENT, "%s: rediss:// requires TLS, which this program does not provide",
                url);
    if (!is_secure) tls = NULL;
    const char *at = url + 8 + is_secure;
    const char *name_end = strchr(at, '@');
    if (name_end != NULL) {
        FKV_REQUIRE((size_t)(name_end - at) < sizeof user && memchr(at, ':', (size_t)(name_end - at)) == NULL, FKV_BAD_ARGUMENT,
                    "the URL of a prefix store must not contain a password, because other users can see command lines: use a "
                    "password file");
        (void)snprintf(user, sizeof user, "%.*s", (int)(name_end - at), at);
        at = name_end + 1;
    }
    while (*at != 0) {
        const size_t n = strcspn(at, ",");
        FKV_REQUIRE(s->n_servers < FKV_REDIS_MAX_SERVERS, FKV_BAD_ARGUMENT, "too many Redis servers: at most %d are supported",
                    FKV_REDIS_MAX_SERVERS);
        FKV_REQUIRE(n < sizeof address, FKV_BAD_ARGUMENT, "the address of a Redis server is too long");
        (void)snprintf(address, sizeof address, "%.*s", (int)n, at);
        fkv_redis_server *server = &s->servers[s->n_servers++];
        *server = (fkv_redis_server){.asker = {.fd = -1, .tls = tls},
                                     .reader = {.fd = -1, .tls = tls},
                                     .writer = {.fd = -1, .tls = tls},
                                     .probe_s = FKV_REDIS_PROBE_S,
                                     .rate = FKV_REDIS_FIRST_RATE};
        FKV_TRY(fkv_resp_resolve(address, &server->address));
        FKV_REQUIRE(!is_secure || server->address.host[0] != 0, FKV_BAD_ARGUMENT,
                    "TLS is not available on Unix sockets: use redis://%s", address);
        for (const char *c = address; *c != 0; c++) server->hash = fkv_redis_mix(server->hash * 257 + (unsigned char)*c);
        at += n + (at[n] == ',');
    }
    FKV_REQUIRE(s->n_servers > 0, FKV_BAD_ARGUMENT, "%s: the URL of a prefix store has no address", url);
    FKV_REQUIRE(user[0] == 0 || password != NULL, FKV_BAD_ARGUMENT, "the Redis user %s requires a password file", user);
    if (password == NULL) return FKV_OK;
    FKV_REQUIRE(strlen(password) + strlen(user) + 64 < sizeof s->login, FKV_BAD_ARGUMENT, "the Redis password is too long");
    int n = 0;
    if (user[0] != 0)
        n = snprintf(s->login, sizeof s->login, "*3\r\n$4\r\nAUTH\r\n$%zu\r\n%s\r\n$%zu\r\n%s\r\n", strlen(user), user,
                     strlen(password), password);
    else
        n = snprintf(s->login, sizeof s->login, "*2\r\n$4\r\nAUTH\r\n$%zu\r\n%s\r\n", strlen(password), password);
    s->n_login = (size_t)n;
    return FKV_OK;
}

static fkv_status open_redis(fkv_redis_store *s, const fkv_prefix_redis_config *config) {
    FKV_TRY(parse_url(s, config->url, config->password, config->tls));
    for (uint32_t i = 0; i < s->n_servers && config->n_secret == 0; i++)
        FKV_REQUIRE(
            s->servers[i].address.is_loopback, FKV_BAD_ARGUMENT,
            "the Redis server %s is on another machine, so its pages must be encrypted: add a secret file with at least %d "
            "random bytes, and use the same file on all servers",
            s->servers[i].address.name, MIN_SECRET_BYTES);
    FKV_TRY(derive_keys(s, config->secret, config->n_secret));
    FKV_TRY(fkv_cipher_open(&s->cipher, s->value_key, true));
    FKV_TRY(fkv_cipher_open(&s->opener, s->value_key, false));
    const int code = pthread_create(&s->thread, NULL, fkv_redis_background, s);
    FKV_REQUIRE(code == 0, FKV_NO_MEMORY, "cannot start a thread for the prefix store: %s", strerror(code));
    s->thread_runs = true;
    return FKV_OK;
}

fkv_status fkv_prefix_redis_open(const fkv_prefix_redis_config *config, fkv_prefix_store *store) {
    FKV_REQUIRE(config != NULL && config->url != NULL && store != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_redis_open: config, url or store is NULL");
    FKV_REQUIRE(config->n_secret == 0 || (config->secret != NULL && config->n_secret >= MIN_SECRET_BYTES), FKV_BAD_ARGUMENT,
                "the secret of a prefix store is %zu bytes long (expected at least %d)", config->n_secret, MIN_SECRET_BYTES);
    void *map = NULL;
    FKV_TRY(fkv_map_open(sizeof(fkv_redis_store), true, &map));
    fkv_redis_store *s = map;
    s->map_bytes = sizeof *s;
    s->expiry_s = config->expiry_s > 0 ? config->expiry_s : DEFAULT_EXPIRY_SECONDS;
    s->timeout_s = config->timeout_s > 0.0 ? config->timeout_s : DEFAULT_TIMEOUT_S;
    s->log = config->log;
    s->log_user = config->log_user;
    fkv_cond_init(&s->changed);
    (void)pthread_mutex_init(&s->lock, NULL);
    (void)pthread_mutex_init(&s->read_lock, NULL);
    (void)pthread_mutex_init(&s->write_lock, NULL);
    const fkv_status status = open_redis(s, config);
    if (status != FKV_OK) {
        redis_close(s);
        return status;
    }
    *store = (fkv_prefix_store){.self = s,
                                .contains = fkv_redis_contains,
                                .pending = fkv_redis_pending,
                                .expect = fkv_redis_expect,
                                .wants = fkv_redis_wants,
                                .read = fkv_redis_read,
                                .read_pages = fkv_redis_read_pages,
                                .write = fkv_redis_write,
                                .remove = fkv_redis_remove,
                                .touch = fkv_redis_touch,
                                .stats = redis_stats,
                                .close = redis_close};
    return FKV_OK;
}
