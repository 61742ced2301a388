/* Memory and CPU limits of the enclosing cgroups, versions 1 and 2.
 *
 * `root` is prepended to every path ("" for the real system), so that tests can provide their own file tree. A system without
 * cgroups, a disabled controller and a malformed file all mean "no limit".
 */
#ifndef FKV_CGROUP_H
#define FKV_CGROUP_H

#include "base.h"

/* Returns the minimum of (limit - usage + inactive file pages), in bytes, over all cgroups from the process's own up to the root.
 * Inactive file pages count as free because the kernel reclaims them before it fails an allocation. Returns UINT64_MAX if there
 * is no limit. */
uint64_t fkv_cgroup_memory_room(const char *root);

/* Returns the minimum CPU quota, in cores and rounded up, over all cgroups from the process's own up to the root. Returns
 * UINT32_MAX if there is no limit. */
uint32_t fkv_cgroup_cpu_quota(const char *root);

/* Reads up to size - 1 bytes of the file root/name and null-terminates them. Returns false if the file is empty or unreadable. */
bool fkv_text_read(const char *root, const char *name, char *text, size_t size);

/* Finds the first line of `text` that starts with `key` and a space, and parses the number after the space. Returns false if
 * there is no such line or no number. */
bool fkv_text_number(const char *text, const char *key, uint64_t *value);

#endif
