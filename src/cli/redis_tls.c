/* See redis_tls.h. OpenSSL allocates the memory of a session, about 50 KB, outside of the memory plan. */
#include "redis_tls.h"

#include "cli.h"

#include <limits.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdio.h>

static void *tls_open(void *self, int fd, const char *host) {
    SSL *ssl = SSL_new(self);
    if (ssl == NULL) return NULL;
    SSL_set_mode(ssl, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    X509_VERIFY_PARAM *rules = SSL_get0_param(ssl);
    const bool is_address = X509_VERIFY_PARAM_set1_ip_asc(rules, host) == 1;
    const bool is_set = is_address || (SSL_set1_host(ssl, host) == 1 && SSL_set_tlsext_host_name(ssl, host) == 1);
    ERR_clear_error();
    if (is_set && SSL_set_fd(ssl, fd) == 1) return ssl;
    SSL_free(ssl);
    return NULL;
}

/* Translates the result of an operation. Errors of earlier operations on this thread must have been cleared, because
 * SSL_get_error() would report them. */
static int64_t tls_result(SSL *ssl, int result) {
    if (result > 0) return result;
    const int error = SSL_get_error(ssl, result);
    return error == SSL_ERROR_WANT_READ     ? FKV_TLS_WANTS_READ
           : error == SSL_ERROR_WANT_WRITE  ? FKV_TLS_WANTS_WRITE
           : error == SSL_ERROR_ZERO_RETURN ? FKV_TLS_CLOSED
                                            : FKV_TLS_FAILED;
}

static int64_t tls_handshake(void *session, char *reason, size_t n_reason) {
    SSL *ssl = session;
    ERR_clear_error();
    const int result = SSL_connect(ssl);
    const long verified = SSL_get_verify_result(ssl);
    const unsigned long error = ERR_peek_error();
    const char *text = verified != X509_V_OK ? X509_verify_cert_error_string(verified) : ERR_reason_error_string(error);
    (void)snprintf(reason, n_reason, "%s", text != NULL ? text : "the server closed the connection");
    return tls_result(ssl, result);
}

static int64_t tls_receive(void *session, void *bytes, size_t n) {
    ERR_clear_error();
    return tls_result(session, SSL_read(session, bytes, n < INT_MAX ? (int)n : INT_MAX));
}

static int64_t tls_send(void *session, const void *bytes, size_t n) {
    ERR_clear_error();
    return tls_result(session, SSL_write(session, bytes, n < INT_MAX ? (int)n : INT_MAX));
}

static bool tls_is_idle(void *session) {
    char byte = 0;
    ERR_clear_error();
    return tls_result(session, SSL_peek(session, &byte, 1)) == FKV_TLS_WANTS_READ;
}

static void tls_close(void *session) { SSL_free(session); }

int redis_tls_open(const char *ca_file, fkv_tls_client *tls) {
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    if (context == NULL) return kit_fail(EXIT_FAILED, "cannot initialize TLS");
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    const bool trusts = ca_file != NULL ? SSL_CTX_load_verify_locations(context, ca_file, NULL) == 1
                                        : SSL_CTX_set_default_verify_paths(context) == 1;
    const bool is_set = SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) == 1;
    ERR_clear_error();
    *tls = (fkv_tls_client){.self = context,
                            .open = tls_open,
                            .handshake = tls_handshake,
                            .receive = tls_receive,
                            .send = tls_send,
                            .is_idle = tls_is_idle,
                            .close = tls_close};
    if (trusts && is_set) return EXIT_GOOD;
    redis_tls_close(tls);
    return kit_fail(EXIT_USAGE, "cannot read certificates from %s: expected certificates in PEM format",
                    ca_file != NULL ? ca_file : "the system's store");
}

void redis_tls_close(fkv_tls_client *tls) {
    SSL_CTX_free(tls->self);
    *tls = (fkv_tls_client){0};
}
