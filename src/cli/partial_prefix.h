/* Saves and loads partial prefixes for flatkv run --save-prefix FILE. If the prefill of the prefix is interrupted or fails, the
 * pages computed so far are saved in FILE.partial, and the same command continues from them. FILE itself contains only complete
 * prefixes, so a partial prefix is never mistaken for a complete one. */
#ifndef FKV_CLI_PARTIAL_PREFIX_H
#define FKV_CLI_PARTIAL_PREFIX_H

#include "session.h"
#include "token_list.h"

/* Opens the session's sequence with the pages in FILE.partial. Returns the number of loaded tokens. Returns 0 without opening a
 * sequence if the file does not exist, or if it does not belong to this prompt, model and codec. In the second case, a notice
 * is printed. n_prefix: number of tokens in the complete prefix, which limits the number of loaded tokens. */
uint32_t partial_prefix_load(const char *file, model_session *s, const token_list *prompt, size_t n_prefix);

/* Saves the session's sequence in FILE.partial and prints a notice. n_prefix: number of tokens in the complete prefix. */
void partial_prefix_save(const char *file, const model_session *s, const token_list *prompt, size_t n_prefix);

/* Removes FILE.partial, if it exists. */
void partial_prefix_remove(const char *file);

#endif
