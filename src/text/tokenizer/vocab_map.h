/* Two hash maps that are filled once from an untrusted vocabulary and read-only afterwards. One maps byte strings to ids, the
 * other maps pairs of ids to values.
 *
 * Both reject a vocabulary with too many hash collisions (FKV_FILE_DAMAGED), so no choice of strings can make lookups slow: a
 * lookup compares at most FKV_MAP_MAX_PROBES slots. Strings are not copied and must outlive the map.
 */
#ifndef FKV_VOCAB_MAP_H
#define FKV_VOCAB_MAP_H

#include "../vocab/vocab_source.h"

enum {
    FKV_MAX_TOKEN_BYTES = 1024, /* maximum length of a vocabulary string */
    FKV_MAP_MAX_PROBES = 128,
};

/* ---- string map -------------------------------------------------------------------------------------- */

typedef struct fkv_vocab_slot {
    const char *data; /* NULL: free */
    uint16_t size;
    uint16_t tag; /* upper bits of the hash, which are not used to select the slot */
    uint32_t id;
} fkv_vocab_slot;

typedef struct fkv_vocab_map {
    fkv_vocab_slot *slots; /* [mask + 1] slots; mask + 1 is a power of two, and at most half of the slots are in use */
    uint64_t mask;
    uint32_t n_used;
} fkv_vocab_map;

/* Allocates a map for n_strings strings. fkv_vocab_map_close() accepts a zeroed map. */
fkv_status fkv_vocab_map_open(fkv_vocab_map *map, uint32_t n_strings);
void fkv_vocab_map_close(fkv_vocab_map *map);

/* Adds a non-empty string, unless the map already contains it. Sets *kept to the id of the string in the map. */
fkv_status fkv_vocab_map_add(fkv_vocab_map *map, fkv_bytes string, uint32_t id, uint32_t *kept);

/* Return the id of the string `data`, or of the concatenation of `left` and `right`. Return FKV_NO_TOKEN if the map does not
 * contain the string. */
uint32_t fkv_vocab_map_find(const fkv_vocab_map *map, const char *data, size_t size);
uint32_t fkv_vocab_map_find_joined(const fkv_vocab_map *map, fkv_bytes left, fkv_bytes right);

/* ---- pair map ----------------------------------------------------------------------------------------- */

#define FKV_NO_PAIR UINT64_MAX

typedef struct fkv_pair_slot {
    uint64_t key;
    uint64_t value; /* FKV_NO_PAIR: free */
} fkv_pair_slot;

typedef struct fkv_pair_map {
    fkv_pair_slot *slots;
    uint64_t mask;
    uint32_t n_used;
} fkv_pair_map;

fkv_status fkv_pair_map_open(fkv_pair_map *map, uint32_t n_pairs);
void fkv_pair_map_close(fkv_pair_map *map);

/* Adds a key with its value, unless the map already contains the key. value must be less than FKV_NO_PAIR. */
fkv_status fkv_pair_map_add(fkv_pair_map *map, uint64_t key, uint64_t value);

FKV_INLINE uint64_t fkv_mix_u64(uint64_t x) {
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

/* Returns the value of a key, or FKV_NO_PAIR if the map does not contain it. */
FKV_INLINE uint64_t fkv_pair_map_find(const fkv_pair_map *map, uint64_t key) {
    for (uint64_t at = fkv_mix_u64(key) & map->mask;; at = (at + 1) & map->mask) {
        const fkv_pair_slot *slot = &map->slots[at];
        if (slot->value == FKV_NO_PAIR || slot->key == key) return slot->value;
    }
}

#endif
