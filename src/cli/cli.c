/* See cli.h. */
#include "cli.h"

#include <ctype.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* What the library calls its fields, as options. */
static const char *const OPTION_NAMES[][2] = {{"max_step_tokens", "--chunk"}, {"memory_limit", "--memory"},
                                              {"max_tokens", "-c"},           {"n_threads", "--threads"},
                                              {"n_sinks", "--sinks"},         {"max_kv", "--max-kv"}};

static const char *sequences_option = "max_seqs"; /* the running command's, where it has one */

void cli_name_sequences(const char *option) { sequences_option = option; }

/* NULL: the word is no field of the library. */
static const char *option_of(const char *word, size_t n) {
    for (size_t i = 0; i < sizeof OPTION_NAMES / sizeof OPTION_NAMES[0]; i++)
        if (n == strlen(OPTION_NAMES[i][0]) && memcmp(word, OPTION_NAMES[i][0], n) == 0) return OPTION_NAMES[i][1];
    return n == strlen("max_seqs") && memcmp(word, "max_seqs", n) == 0 ? sequences_option : NULL;
}

static bool is_word_byte(char c) { return isalnum((unsigned char)c) != 0 || c == '_' || c == '.'; }

/* Numbers of bytes stand before "bytes" or behind one of these. */
static bool is_bytes(const char *word, size_t n, const char *before, size_t n_before) {
    static const char *const leads[] = {"cache", "activations", "allows", "needs"};
    bool led = strncmp(word + n, " bytes", strlen(" bytes")) == 0;
    for (size_t i = 0; i < sizeof leads / sizeof leads[0]; i++)
        led = led || (n_before == strlen(leads[i]) && memcmp(before, leads[i], n_before) == 0);
    return led && n > 4 && n < 19 && strspn(word, "0123456789") == n;
}

/* One word of a message, which has n bytes and follows another. *taken: bytes of the message that it stands for. */
static size_t put_word(const char *word, size_t n, const char *before, size_t n_before, char *out, size_t room, size_t *taken) {
    char bytes[32];
    *taken = n;
    const char *option = option_of(word, n);
    if (option != NULL) return (size_t)snprintf(out, room, "%s", option);
    if (!is_bytes(word, n, before, n_before)) return (size_t)snprintf(out, room, "%.*s", (int)n, word);
    if (strncmp(word + n, " bytes", strlen(" bytes")) == 0) *taken += strlen(" bytes");
    return (size_t)snprintf(out, room, "%s", kit_bytes(strtoull(word, NULL, 10), bytes));
}

void cli_in_options(const char *message, char *out, size_t room) {
    size_t at = 0;
    const char *before = message;
    size_t n_before = 0;
    out[0] = 0;
    while (*message != 0 && at + 1 < room) {
        size_t n = 0;
        size_t taken = 1;
        while (is_word_byte(message[n])) n++;
        if (n > 0) {
            at += put_word(message, n, before, n_before, out + at, room - at, &taken);
            before = message;
            n_before = n;
        } else {
            out[at++] = *message;
            out[at] = 0;
        }
        message += taken;
    }
}

int cli_fail_status(fkv_status status) {
    int code = EXIT_FAILED;
    char message[1024];
    if (status == FKV_NO_MEMORY || status == FKV_POOL_FULL) code = EXIT_NO_FIT;
    if (status == FKV_BAD_CONFIG || status == FKV_BAD_ARGUMENT) code = EXIT_USAGE;
    cli_in_options(fkv_message(), message, sizeof message);
    return kit_fail(code, "%s%s", message,
                    status == FKV_FILE_DAMAGED   ? " (damaged or cut short: fetch or make it again)"
                    : status == FKV_FILE_FOREIGN ? " (saved with another model or other --codecs: flatkv pages show says which)"
                                                 : "");
}

/* ---- interrupts ---- */

static volatile sig_atomic_t interrupted;

static void note_interrupt(int number) {
    (void)number;
    interrupted = 1;
}

void cli_catch_interrupts(void) {
    /* A write that a Ctrl-C meets goes on: broken off, it would count as output lost. */
    struct sigaction action = {.sa_handler = note_interrupt, .sa_flags = (int)(SA_RESETHAND | SA_RESTART)};
    (void)sigemptyset(&action.sa_mask);
    (void)sigaction(SIGINT, &action, NULL);
}

bool cli_interrupted(void) { return interrupted != 0; }

void cli_forget_interrupt(void) {
    interrupted = 0;
    cli_catch_interrupts();
}
