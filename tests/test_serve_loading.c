/* Tests the server while its model is loading: it listens on its address and answers requests with 503. */
#include "../src/serve/serve.h"
#include "test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static struct sockaddr_in local(uint16_t port) {
    return (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

/* Returns the number of a port that was free when it was checked. */
static uint16_t free_port(void) {
    struct sockaddr_in at = local(0);
    socklen_t n = sizeof at;
    int probe = socket(AF_INET, SOCK_STREAM, 0);
    ck_assert_int_eq(bind(probe, (struct sockaddr *)&at, sizeof at), 0);
    ck_assert_int_eq(getsockname(probe, (struct sockaddr *)&at, &n), 0);
    (void)close(probe);
    return ntohs(at.sin_port);
}

static void ask(uint16_t port, const char *request, char *answer, size_t room) {
    struct sockaddr_in at = local(port);
    size_t n = 0;
    ssize_t more = 0;
    int link = socket(AF_INET, SOCK_STREAM, 0);
    ck_assert_int_eq(connect(link, (struct sockaddr *)&at, sizeof at), 0);
    ck_assert_int_eq(send(link, request, strlen(request), 0), (ssize_t)strlen(request));
    while (n + 1 < room && (more = recv(link, answer + n, room - n - 1, 0)) > 0) n += (size_t)more;
    answer[n] = 0;
    (void)close(link);
}

START_TEST(requests_during_loading_get_503) {
    char answer[4096];
    serve_config config = serve_config_default();
    config.port = free_port();
    server *s = serve_open(&config);
    ck_assert_ptr_nonnull(s);
    ask(config.port, "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", answer, sizeof answer);
    ck_assert_msg(strstr(answer, " 503 ") != NULL && strstr(answer, "\"loading\"") != NULL, "%s", answer);
    ask(config.port, "GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", answer, sizeof answer);
    ck_assert_msg(strstr(answer, " 503 ") != NULL && strstr(answer, "\"loading\"") != NULL, "%s", answer);
    ask(config.port, "GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", answer, sizeof answer);
    ck_assert_msg(strstr(answer, " 200 ") != NULL && strstr(answer, "\"alive\"") != NULL, "%s", answer);
    ask(config.port, "GET /server_info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", answer, sizeof answer);
    ck_assert_msg(strstr(answer, " 503 ") != NULL, "%s", answer);
    ask(config.port, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
        answer, sizeof answer);
    ck_assert_msg(strstr(answer, " 503 ") != NULL && strstr(answer, "Retry-After: 1") != NULL, "%s", answer);
    ask(config.port, "GET /page/theme.js HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", answer, sizeof answer);
    ck_assert_msg(strstr(answer, " 200 ") != NULL && strstr(answer, "flatkv-theme") != NULL, "%s", answer);
    ask(config.port, "GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", answer, sizeof answer);
    ck_assert_msg(strstr(answer, " 404 ") != NULL, "%s", answer);
    ck_assert_ptr_null(serve_open(&config)); /* the port is already in use */
    ck_assert_int_eq(errno, EADDRINUSE);
    serve_close(s);
    serve_close(NULL);
}
END_TEST

START_TEST(unavailable_address_is_reported_immediately) {
    serve_config config = serve_config_default();
    config.port = 0;
    config.host = "192.0.2.1"; /* an address that is reserved for documentation, so no machine has it */
    ck_assert_ptr_null(serve_open(&config));
    ck_assert_int_ne(errno, 0);
}
END_TEST

TEST_MAIN("serve_loading", requests_during_loading_get_503, unavailable_address_is_reported_immediately)
