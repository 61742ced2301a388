/* See cli.h. */
#include "cli.h"

#include <ctype.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* Library field names, and the command-line options that replace them in messages. */
static const char *const OPTION_NAMES[][2] = {{"max_step_tokens", "--chunk"}, {"memory_limit", "--memory"},
                                              {"max_tokens", "-c"},           {"n_threads", "--threads"},
                                              {"n_sinks", "--sinks"},         {"max_kv", "--max-kv"}};

static const char *sequences_option = "max_seqs"; /* option name that replaces max_seqs in error messages */

void cli_name_sequences(const char *option) { sequences_option = option; }

/* Returns the option for a library field name, or NULL if the word is not a field name. */
static const char *option_for_field(const char *word, size_t n) {
    for (size_t i = 0; i < sizeof OPTION_NAMES / sizeof OPTION_NAMES[0]; i++)
        if (n == strlen(OPTION_NAMES[i][0]) && memcmp(word, OPTION_NAMES[i][0], n) == 0) return OPTION_NAMES[i][1];
    return n == strlen("max_seqs") && memcmp(word, "max_seqs", n) == 0 ? sequences_option : NULL;
}

static bool is_word_byte(char c) { return isalnum((unsigned char)c) != 0 || c == '_' || c == '.'; }

/* Returns whether the word is a byte count: a number of five or more digits that is followed by "bytes" or preceded by a word
 * such as "needs". */
static bool is_byte_count(const char *word, size_t n, const char *before, size_t n_before) {
    static const char *const leads[] = {"cache", "activations", "allows", "needs"};
    bool led = strncmp(word + n, " bytes", strlen(" bytes")) == 0;
    for (size_t i = 0; i < sizeof leads / sizeof leads[0]; i++)
        led = led || (n_before == strlen(leads[i]) && memcmp(before, leads[i], n_before) == 0);
    return led && n > 4 && n < 19 && strspn(word, "0123456789") == n;
}

/* Translates one word of a message and returns the length of the translation. word: [n] bytes of the word; before: [n_before]
 * bytes of the previous word. Sets *consumed to the number of message bytes that the translation replaces. */
static size_t translate_word(const char *word, size_t n, const char *before, size_t n_before, char *out, size_t capacity,
                             size_t *consumed) {
    char bytes[32];
    *consumed = n;
    const char *option = option_for_field(word, n);
    if (option != NULL) return (size_t)snprintf(out, capacity, "%s", option);
    if (!is_byte_count(word, n, before, n_before)) return (size_t)snprintf(out, capacity, "%.*s", (int)n, word);
    if (strncmp(word + n, " bytes", strlen(" bytes")) == 0) *consumed += strlen(" bytes");
    return (size_t)snprintf(out, capacity, "%s", kit_bytes(strtoull(word, NULL, 10), bytes));
}

void cli_translate_message(const char *message, char *out, size_t capacity) {
    size_t at = 0;
    const char *before = message;
    size_t n_before = 0;
    out[0] = 0;
    while (*message != 0 && at + 1 < capacity) {
        size_t n = 0;
        size_t consumed = 1;
        while (is_word_byte(message[n])) n++;
        if (n > 0) {
            at += translate_word(message, n, before, n_before, out + at, capacity - at, &consumed);
            before = message;
            n_before = n;
        } else {
            out[at++] = *message;
            out[at] = 0;
        }
        message += consumed;
    }
}

int cli_fail_status(fkv_status status) {
    int code = EXIT_FAILED;
    char message[1024];
    if (status == FKV_NO_MEMORY || status == FKV_POOL_FULL) code = EXIT_NO_FIT;
    if (status == FKV_BAD_CONFIG || status == FKV_BAD_ARGUMENT) code = EXIT_USAGE;
    cli_translate_message(fkv_message(), message, sizeof message);
    return kit_fail(code, "%s%s", message,
                    status == FKV_FILE_DAMAGED ? " (the file is damaged or truncated: download or create it again)"
                    : status == FKV_FILE_FOREIGN
                        ? " (the file was saved with another model or codec; 'flatkv pages show FILE' prints both)"
                        : "");
}

/* ---- interrupts ---- */

static volatile sig_atomic_t interrupted;

static void record_interrupt(int number) {
    (void)number;
    interrupted = 1;
}

void cli_catch_interrupts(void) {
    /* With SA_RESTART, a write() that is interrupted by Ctrl-C resumes instead of failing, so no output is lost. */
    struct sigaction action = {.sa_handler = record_interrupt, .sa_flags = (int)(SA_RESETHAND | SA_RESTART)};
    (void)sigemptyset(&action.sa_mask);
    (void)sigaction(SIGINT, &action, NULL);
}

bool cli_interrupted(void) { return interrupted != 0; }

void cli_clear_interrupt(void) {
    interrupted = 0;
    cli_catch_interrupts();
}
