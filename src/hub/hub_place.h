/* Determines the hub and the cache folder from the environment variables of huggingface_hub: HF_ENDPOINT, HF_TOKEN,
 * HF_TOKEN_PATH, HF_HOME, HF_HUB_CACHE, XDG_CACHE_HOME, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT.
 */
#ifndef FKV_HUB_PLACE_H
#define FKV_HUB_PLACE_H

#include <stdbool.h>

enum { HUB_PATH = 4096, HUB_ENDPOINT = 512, HUB_TOKEN = 512 };

/* Writes the cache folder: HF_HUB_CACHE, otherwise "hub" in HF_HOME, otherwise ~/.cache/huggingface/hub. Returns false if it is
 * unknown because HOME is not set, or if the path is too long. */
bool hub_cache_folder(char folder[HUB_PATH]);

/* Writes the address of the hub without a trailing slash (default https://huggingface.co). Returns an exit code, because
 * HF_ENDPOINT may be invalid. */
int hub_endpoint(char endpoint[HUB_ENDPOINT]);

/* Writes the access token, or "" if there is none: HF_TOKEN, otherwise the file that `hf auth login` writes. *source receives a
 * description of its origin. Returns an exit code, because the token may contain invalid characters. */
int hub_token(char token[HUB_TOKEN], char source[HUB_PATH]);

/* Returns whether HF_HUB_OFFLINE forbids connections. */
bool hub_is_offline(void);

/* Returns the number of seconds after which a transfer without data has stalled: HF_HUB_DOWNLOAD_TIMEOUT, default 30. */
long hub_stall_seconds(void);

#endif
