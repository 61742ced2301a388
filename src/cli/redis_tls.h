/* TLS for connections to Redis servers (rediss://), with OpenSSL. */
#ifndef FKV_CLI_REDIS_TLS_H
#define FKV_CLI_REDIS_TLS_H

#include <flatkv/prefix_store.h>

/* Prepares TLS 1.2 or later with verification of the server's certificate and name. ca_file: file with trusted certificates in
 * PEM format, or NULL for the certificates that the system trusts. Returns an exit code. */
int redis_tls_open(const char *ca_file, fkv_tls_client *tls);

/* Releases the memory of redis_tls_open(). All sessions must be closed. A zeroed client is allowed. */
void redis_tls_close(fkv_tls_client *tls);

#endif
