/* See hub_place.h. */
#include "hub_place.h"

#include "../kit/program.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Returns the value of an environment variable, or NULL if the variable is not set or empty. */
static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value != NULL && value[0] != 0 ? value : NULL;
}

/* Writes the path folder/rest. A leading "~/" in `folder` is replaced with the home folder. */
static bool join_home(const char *folder, const char *rest, char path[HUB_PATH]) {
    const char *home = variable("HOME");
    bool relative = strncmp(folder, "~/", 2) == 0;
    if (relative && home == NULL) return false;
    int n =
        snprintf(path, HUB_PATH, "%s%s%s%s", relative ? home : "", relative ? folder + 1 : folder, rest[0] != 0 ? "/" : "", rest);
    return n > 0 && n < HUB_PATH;
}

/* Writes the path of a file in the Hugging Face folder (HF_HOME). */
static bool hf_home(const char *rest, char path[HUB_PATH]) {
    char tail[64];
    const char *home = variable("HF_HOME");
    const char *cache = variable("XDG_CACHE_HOME");
    if (home != NULL) return join_home(home, rest, path);
    (void)snprintf(tail, sizeof tail, "huggingface/%s", rest);
    return join_home(cache != NULL ? cache : "~/.cache", tail, path);
}

bool hub_cache_folder(char folder[HUB_PATH]) {
    const char *hub = variable("HF_HUB_CACHE");
    if (hub == NULL) hub = variable("HUGGINGFACE_HUB_CACHE");
    return hub != NULL ? join_home(hub, "", folder) : hf_home("hub", folder);
}

int hub_endpoint(char endpoint[HUB_ENDPOINT]) {
    const char *given = variable("HF_ENDPOINT");
    if (given == NULL) given = "https://huggingface.co";
    bool good = strncmp(given, "https://", 8) == 0 || strncmp(given, "http://", 7) == 0;
    for (const char *p = given; *p != 0; p++) good = good && isgraph((unsigned char)*p) != 0 && strchr("@?#", *p) == NULL;
    if (!good || strlen(given) >= HUB_ENDPOINT)
        return kit_fail(EXIT_USAGE, "HF_ENDPOINT=%s: expected the address of a hub, such as https://huggingface.co", given);
    (void)snprintf(endpoint, HUB_ENDPOINT, "%s", given);
    for (size_t n = strlen(endpoint); n > 0 && endpoint[n - 1] == '/'; n--) endpoint[n - 1] = 0;
    return EXIT_GOOD;
}

/* Reads the first line of the token file. A missing file is not an error. */
static void read_token_file(char token[HUB_TOKEN], char path[HUB_PATH]) {
    const char *given = variable("HF_TOKEN_PATH");
    token[0] = 0;
    if (given != NULL ? !join_home(given, "", path) : !hf_home("token", path)) return;
    FILE *file = fopen(path, "r");
    if (file == NULL) return;
    token[fread(token, 1, HUB_TOKEN - 1, file)] = 0;
    (void)fclose(file);
}

int hub_token(char token[HUB_TOKEN], char source[HUB_PATH]) {
    const char *given = variable("HF_TOKEN");
    if (given == NULL) given = variable("HUGGING_FACE_HUB_TOKEN");
    if (given == NULL) {
        read_token_file(token, source);
    } else {
        (void)snprintf(token, HUB_TOKEN, "%s", given);
        (void)snprintf(source, HUB_PATH, "HF_TOKEN");
    }
    size_t start = strspn(token, " \t\r\n");
    memmove(token, token + start, strlen(token + start) + 1);
    for (size_t n = strlen(token); n > 0 && isspace((unsigned char)token[n - 1]) != 0; n--) token[n - 1] = 0;
    bool good = given == NULL || strlen(given) < HUB_TOKEN;
    for (const char *p = token; *p != 0; p++) good = good && isgraph((unsigned char)*p) != 0;
    if (good) return EXIT_GOOD;
    return kit_fail(EXIT_USAGE, "the token from %s is not valid: expected one word, such as hf_..., without spaces", source);
}

static bool is_true(const char *value) {
    return value != NULL && (strcmp(value, "1") == 0 || strcasecmp(value, "true") == 0 || strcasecmp(value, "yes") == 0 ||
                             strcasecmp(value, "on") == 0);
}

bool hub_is_offline(void) { return is_true(variable("HF_HUB_OFFLINE")); }

long hub_stall_seconds(void) {
    enum { DEFAULT_SECONDS = 30, MAX_SECONDS = 3600 };
    const char *given = variable("HF_HUB_DOWNLOAD_TIMEOUT");
    if (given == NULL) return DEFAULT_SECONDS;
    char *end = NULL;
    errno = 0;
    long seconds = strtol(given, &end, 10);
    bool good = errno == 0 && *end == 0 && seconds >= 1 && seconds <= MAX_SECONDS;
    return good ? seconds : DEFAULT_SECONDS;
}
