/* Two small hash maps that are filled once from a stranger's vocabulary and then only read: byte strings to numbers, and pairs of
 * numbers to values.
 *
 * Both refuse a vocabulary whose keys pile up in one place (FKV_FILE_DAMAGED), so that no choice of strings makes filling or
 * looking up slow: a look-up never compares more than FKV_MAP_MAX_PROBES slots. Strings are not copied and must outlive the map.
 */
#ifndef FKV_VOCAB_MAP_H
#define FKV_VOCAB_MAP_H

#include "../files/weights.h"

enum {
    FKV_MAX_TOKEN_BYTES = 1024, /* the longest string of a vocabulary; what is longer is FKV_UNSUPPORTED */
    FKV_MAP_MAX_PROBES = 128,
};

/* ---- strings to numbers -------------------------------------------------------------------------------------- */

typedef struct fkv_vocab_slot {
    const char *data; /* NULL: free */
    uint16_t size;
    uint16_t tag; /* bits of the hash that did not choose the slot */
    uint32_t id;
} fkv_vocab_slot;

typedef struct fkv_vocab_map {
    fkv_vocab_slot *slots; /* [mask + 1], a power of two, at most half of it used */
    uint64_t mask;
    uint32_t n_used;
} fkv_vocab_map;

/* Room for n_strings. close takes a zeroed map too. */
fkv_status fkv_vocab_map_open(fkv_vocab_map *map, uint32_t n_strings);
void fkv_vocab_map_close(fkv_vocab_map *map);

/* *kept is the number the string has from now on: the first one it was added with. The string is not empty. */
fkv_status fkv_vocab_map_add(fkv_vocab_map *map, fkv_bytes string, uint32_t id, uint32_t *kept);

/* FKV_NO_TOKEN: not there. The second looks for left and right written one behind the other. */
uint32_t fkv_vocab_map_find(const fkv_vocab_map *map, const char *data, size_t size);
uint32_t fkv_vocab_map_find_joined(const fkv_vocab_map *map, fkv_bytes left, fkv_bytes right);

/* ---- pairs to values ----------------------------------------------------------------------------------------- */

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

/* The first value of a key stays. value < FKV_NO_PAIR. */
fkv_status fkv_pair_map_add(fkv_pair_map *map, uint64_t key, uint64_t value);

FKV_INLINE uint64_t fkv_mix_u64(uint64_t x) {
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

/* FKV_NO_PAIR: not there. */
FKV_INLINE uint64_t fkv_pair_map_find(const fkv_pair_map *map, uint64_t key) {
    for (uint64_t at = fkv_mix_u64(key) & map->mask;; at = (at + 1) & map->mask) {
        const fkv_pair_slot *slot = &map->slots[at];
        if (slot->value == FKV_NO_PAIR || slot->key == key) return slot->value;
    }
}

#endif
