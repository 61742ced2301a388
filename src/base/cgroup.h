/* What the cgroups above this process allow: memory still to be had, and cores. Versions 1 and 2.
 *
 * `root` goes before every path read ("" for the real machine), so that tests can hand in a tree of their own. A system without
 * cgroups, a controller that is off and a file that makes no sense all mean "no limit".
 */
#ifndef FKV_CGROUP_H
#define FKV_CGROUP_H

#include "base.h"

/* The least room under any memory limit from the process's cgroup up to the root: limit - usage + inactive file pages, which
 * the kernel takes back before it refuses. UINT64_MAX: no limit. */
uint64_t fkv_cgroup_memory_room(const char *root);

/* The least cpu quota on the same way, in cores, rounded up. UINT32_MAX: no limit. */
uint32_t fkv_cgroup_cpu_quota(const char *root);

/* Reads root/name whole, as far as it fits, and ends it with a 0. False when it cannot be read. */
bool fkv_text_read(const char *root, const char *name, char *text, size_t size);

/* The number after `key` where key begins a line of text and a blank follows it. False when there is none. */
bool fkv_text_number(const char *text, const char *key, uint64_t *value);

#endif
