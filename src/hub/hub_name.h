/* Names of models on a Hugging Face hub (org/name or org/name:quant), and safe file names.
 *
 * Model names come from the command line, and file names come from the hub. Both become parts of local paths, so they are checked
 * here before any other module uses them.
 */
#ifndef FKV_HUB_NAME_H
#define FKV_HUB_NAME_H

#include <stdbool.h>
#include <stddef.h>

enum { HUB_WORD = 97, HUB_REPO = 2 * HUB_WORD, HUB_QUANT = 129 };

typedef struct hub_name {
    char repo[HUB_REPO];   /* "org/name" */
    char quant[HUB_QUANT]; /* quantization of a GGUF repository, such as "Q4_K_M"; "" if the name has none */
} hub_name;

/* Parses org/name[:quant]. The organization and the name consist of letters, digits, '-', '_' and '.', neither start nor end with
 * '-' or '.', and contain neither "--" nor "..", as the hub requires. Returns false if the word violates these rules. */
bool hub_name_parse(const char *word, hub_name *name);

/* Returns whether a file name from a hub is safe to use as a path inside a local folder. The name must be a relative path of at
 * most 1024 bytes and 16 components, without empty, "." and ".." components. It must be valid UTF-8 without backslashes, control
 * characters and bidirectional characters. */
bool hub_file_name_is_safe(const char *name);

/* Writes the name of the repository's folder in the cache, models--org--name. */
void hub_folder_name(const char *repo, char folder[HUB_REPO + 16]);

enum { HUB_REVISION = 128 };

/* Returns whether the text may be the name of a branch, tag or commit. It must have fewer than HUB_REVISION characters and
 * consist of components separated by slashes. Components contain only letters, digits, ".", "_" and "-", and do not start with a
 * dot. */
bool hub_revision_is_valid(const char *text);

/* Returns whether the revision is a full commit hash. */
bool hub_revision_is_commit(const char *revision);

#endif
