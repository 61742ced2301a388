/* See hub_cache.h. */
#include "hub_cache.h"

#include "../kit/program.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { LONGEST_NAME = 1400 }; /* maximum length of a path in the repository's folder, including commit, file name and suffixes */

static int fail_path(const char *what, const char *path) {
    return kit_fail(EXIT_FAILED, "%s %s: %s", what, path, strerror(errno));
}

/* Creates a folder and its parents. */
static int make_folder(const char *folder) {
    char path[HUB_PATH];
    (void)snprintf(path, sizeof path, "%s", folder);
    for (char *p = path + 1;; p++) {
        if (*p != '/' && *p != 0) continue;
        char end = *p;
        *p = 0;
        if (mkdir(path, 0777) != 0 && errno != EEXIST) return fail_path("cannot create the folder", path);
        if (end == 0) return EXIT_GOOD;
        *p = end;
    }
}

/* Writes the path of `name` in a folder. The path fits, because hub_cache_open() limits the length of the folder's path. */
static const char *join(const char *folder, const char *name, char path[HUB_PATH]) {
    const size_t n = strlen(folder);
    if (path != folder) (void)snprintf(path, HUB_PATH, "%s", folder);
    (void)snprintf(path + n, HUB_PATH - n, "/%s", name);
    return path;
}

bool hub_cache_snapshot(const char *repo, char folder[HUB_PATH]) {
    char hub[HUB_PATH];
    char path[HUB_PATH];
    char name[HUB_REPO + 16];
    char commit[HUB_COMMIT] = "";
    if (!hub_cache_folder(hub) || strlen(hub) + LONGEST_NAME > HUB_PATH) return false;
    hub_folder_name(repo, name);
    (void)join(hub, name, folder);
    FILE *ref = fopen(join(folder, "refs/main", path), "r");
    if (ref != NULL) {
        commit[fread(commit, 1, sizeof commit - 1, ref)] = 0;
        (void)fclose(ref);
    }
    commit[strspn(commit, "0123456789abcdef")] = 0;
    (void)join(folder, "snapshots", folder);
    if (commit[0] != 0) (void)join(folder, commit, folder);
    return access(folder, R_OK) == 0;
}

void hub_cache_each(void (*visit)(const char *repo, void *user), void *user) {
    static const char start[] = "models--";
    char folder[HUB_PATH];
    DIR *entries = hub_cache_folder(folder) ? opendir(folder) : NULL;
    for (const struct dirent *entry = NULL; entries != NULL && (entry = readdir(entries)) != NULL;) {
        hub_name name;
        char word[HUB_REPO];
        const char *org = entry->d_name + strlen(start);
        if (strncmp(entry->d_name, start, strlen(start)) != 0) continue;
        const char *split = strstr(org, "--");
        if (split == NULL) continue;
        int n = snprintf(word, sizeof word, "%.*s/%s", (int)(split - org), org, split + 2);
        if (n < (int)sizeof word && hub_name_parse(word, &name) && hub_cache_snapshot(name.repo, folder)) visit(name.repo, user);
    }
    if (entries != NULL) (void)closedir(entries);
}

/* Opens and locks a file without waiting. Returns a descriptor, -1 if another process holds the lock, or -2 if any other error
 * occurs. */
static int try_lock(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return -2;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    int reason = errno;
    (void)close(fd);
    return reason == EWOULDBLOCK || reason == EINTR ? -1 : -2;
}

static int wait_for_lock(hub_cache *cache, const char *repo, bool (*stop)(void)) {
    const struct timespec pause = {.tv_nsec = 200 * 1000 * 1000};
    char path[HUB_PATH];
    bool told = false;
    (void)join(cache->locks, "flatkv-pull.lock", path);
    while ((cache->lock = try_lock(path)) == -1) {
        if (!told) (void)fprintf(stderr, "[another flatkv pull of %s is running; waiting for it]\n", repo);
        told = true;
        if (stop()) return EXIT_INTERRUPTED;
        (void)nanosleep(&pause, NULL);
    }
    return EXIT_GOOD; /* if the file system does not support locks, the cache is used without locking */
}

int hub_cache_open(const char *repo, bool (*stop)(void), hub_cache *cache) {
    char hub[HUB_PATH];
    char path[HUB_PATH];
    char name[HUB_REPO + 16];
    cache->lock = -1;
    if (!hub_cache_folder(hub))
        return kit_fail(EXIT_FAILED, "the cache folder is unknown because HOME is not set: set HF_HOME or HF_HUB_CACHE");
    if (strlen(hub) + LONGEST_NAME > HUB_PATH)
        return kit_fail(EXIT_FAILED, "the path of the cache folder is too long (%zu bytes): set HF_HOME to a shorter path",
                        strlen(hub));
    hub_folder_name(repo, name);
    (void)join(hub, name, cache->folder);
    (void)join(join(hub, ".locks", path), name, cache->locks);
    int code = make_folder(cache->locks);
    if (code == EXIT_GOOD) code = make_folder(join(cache->folder, "blobs", path));
    if (code == EXIT_GOOD) code = make_folder(join(cache->folder, "refs", path));
    if (code == EXIT_GOOD) code = make_folder(join(cache->folder, "snapshots", path));
    return code == EXIT_GOOD ? wait_for_lock(cache, repo, stop) : code;
}

void hub_cache_close(hub_cache *cache) {
    if (cache->lock >= 0) (void)close(cache->lock);
    cache->lock = -1;
}

int hub_cache_lock_blob(const hub_cache *cache, const hub_file *file) {
    char path[HUB_PATH];
    char name[HUB_DIGEST + 8];
    (void)snprintf(name, sizeof name, "%s.lock", file->id);
    return try_lock(join(cache->locks, name, path));
}

const char *hub_cache_blob(const hub_cache *cache, const hub_file *file, const char *suffix, char path[HUB_PATH]) {
    char name[HUB_DIGEST + 64];
    (void)snprintf(name, sizeof name, "blobs/%s%s", file->id, suffix);
    return join(cache->folder, name, path);
}

bool hub_cache_has(const hub_cache *cache, const hub_file *file) {
    char path[HUB_PATH];
    struct stat about;
    return stat(hub_cache_blob(cache, file, "", path), &about) == 0 && S_ISREG(about.st_mode) &&
           (uint64_t)about.st_size == file->bytes;
}

int hub_cache_check_space(const hub_cache *cache, uint64_t bytes) {
    const uint64_t MARGIN = 16 << 20; /* additional free space, in bytes, for links, folders and file-system metadata */
    char needs[32];
    char has[32];
    struct statvfs about;
    if (bytes == 0) return EXIT_GOOD;
    if (statvfs(cache->folder, &about) != 0) return fail_path("cannot determine the free space of", cache->folder);
    uint64_t unit = about.f_frsize;
    uint64_t free_bytes = unit != 0 && about.f_bavail > UINT64_MAX / unit ? UINT64_MAX : (uint64_t)about.f_bavail * unit;
    if (bytes <= free_bytes && MARGIN <= free_bytes - bytes) return EXIT_GOOD;
    return kit_fail(
        EXIT_FAILED,
        "not enough disk space: the download needs %s, but %s has %s free; free some space, or set HF_HOME to a folder "
        "on another disk",
        kit_bytes(bytes, needs), cache->folder, kit_bytes(free_bytes, has));
}

const char *hub_cache_file(const hub_cache *cache, const hub_listing *listing, const hub_file *file, char path[HUB_PATH]) {
    (void)join(cache->folder, "snapshots", path);
    (void)join(path, listing->commit, path);
    return join(path, file->path, path);
}

/* Creates the parent folders of a file in a snapshot. */
static int make_parents(const char *path) {
    char folder[HUB_PATH];
    (void)snprintf(folder, sizeof folder, "%s", path);
    *strrchr(folder, '/') = 0;
    return make_folder(folder);
}

/* Replaces the link to a file atomically: creates a link with a temporary name, then renames it. */
static int link_file(const hub_cache *cache, const hub_listing *listing, const hub_file *file) {
    char path[HUB_PATH];
    char made[HUB_PATH];
    char target[HUB_PATH] = "../../";
    size_t n = strlen(target);
    (void)hub_cache_file(cache, listing, file, path);
    for (const char *p = strchr(file->path, '/'); p != NULL; p = strchr(p + 1, '/'))
        n += (size_t)snprintf(target + n, sizeof target - n, "../");
    (void)snprintf(target + n, sizeof target - n, "blobs/%s", file->id);
    int code = make_parents(path);
    if (code != EXIT_GOOD) return code;
    (void)hub_cache_blob(cache, file, ".flatkv-link", made);
    (void)unlink(made);
    if (symlink(target, made) != 0) return fail_path("cannot create the symbolic link", made);
    if (rename(made, path) == 0) return EXIT_GOOD;
    code = fail_path("cannot create the symbolic link", path);
    (void)unlink(made);
    return code;
}

static int write_ref(const hub_cache *cache, const char *revision, const char *commit) {
    char path[HUB_PATH];
    char made[HUB_PATH];
    (void)join(cache->folder, "refs", path);
    (void)join(path, revision, path);
    (void)join(cache->folder, "refs/.main.flatkv-part", made);
    char *slash = strrchr(path, '/');
    *slash = 0; /* the revision may contain slashes */
    int code = make_folder(path);
    *slash = '/';
    if (code != EXIT_GOOD) return code;
    FILE *file = fopen(made, "w");
    bool good = file != NULL && fputs(commit, file) >= 0;
    good = file != NULL && fclose(file) == 0 && good;
    return good && rename(made, path) == 0 ? EXIT_GOOD : fail_path("cannot write", path);
}

int hub_cache_publish(const hub_cache *cache, const hub_listing *listing, const char *revision, const uint32_t *files,
                      uint32_t n_files) {
    for (uint32_t i = 0; i < n_files; i++) {
        int code = link_file(cache, listing, &listing->files[files[i]]);
        if (code != EXIT_GOOD) return code;
    }
    return hub_revision_is_commit(revision) ? EXIT_GOOD : write_ref(cache, revision, listing->commit);
}
