/* Determines the hub and the cache folder from the environment variables of huggingface_hub: HF_ENDPOINT, HF_TOKEN,
 * HF_TOKEN_PATH, HF_HOME, HF_HUB_CACHE, XDG_CACHE_HOME, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT.
 */
#ifndef FKV_HUB_PLACE_H
#define FKV_HUB_PLACE_H

#include <stdbool.h>

enum { HUB_PATH = 4096, HUB_ENDPOINT = 512, HUB_TOKEN = 512 };

/* Writes the path of the cache folder: HF_HUB_CACHE if it is set, otherwise the folder "hub" in HF_HOME, otherwise
 * ~/.cache/huggingface/hub. Returns false if the home folder is required but HOME is not set, or if the path is too long. */
bool hub_cache_folder(char folder[HUB_PATH]);

/* Writes the address of the hub without a trailing slash (default https://huggingface.co). Returns an exit code, because
 * HF_ENDPOINT may be invalid. */
int hub_endpoint(char endpoint[HUB_ENDPOINT]);

/* Writes the access token from HF_TOKEN, or else from the file that `hf auth login` writes. Writes "" if there is no token.
 * `source` receives a description of where the token was found. Returns an exit code, because the token may contain invalid
 * characters. */
int hub_token(char token[HUB_TOKEN], char source[HUB_PATH]);

/* Returns whether HF_HUB_OFFLINE forbids connections. */
bool hub_is_offline(void);

/* Returns the number of seconds that a transfer may go without data before it counts as stalled: HF_HUB_DOWNLOAD_TIMEOUT, or 30
 * by default. */
long hub_stall_seconds(void);

#endif
