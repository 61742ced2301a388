/* See vocab_map.h. The hash maps use open addressing with linear probing and are at most half full.
 *
 * Invariant: every key is within FKV_MAP_MAX_PROBES slots of its home slot, with no free slot in between. Real vocabularies need
 * up to about 40 probes. A vocabulary that needs more than FKV_MAP_MAX_PROBES probes was probably constructed to be slow.
 */
#include "vocab_map.h"

#include <stdlib.h>

/* FNV-1a hash with a final mixing step. Both the low and the high bits must be well mixed, because the low bits select the slot
 * and the high bits are stored in the slot as a tag. */
static uint64_t hash_string(const char *data, size_t size) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < size; i++) hash = (hash ^ (uint8_t)data[i]) * UINT64_C(0x00000100000001b3);
    return fkv_mix_u64(hash);
}

static uint16_t hash_tag(uint64_t hash) { return (uint16_t)(hash >> 48); }

static fkv_status slots_alloc(uint32_t n_keys, size_t slot_bytes, void **slots, uint64_t *mask) {
    uint64_t n_slots = 8;
    while (n_slots < 2 * (uint64_t)n_keys) n_slots *= 2;
    *slots = calloc((size_t)n_slots, slot_bytes);
    FKV_REQUIRE(*slots != NULL, FKV_NO_MEMORY, "out of memory allocating a vocabulary map (%llu bytes)",
                (unsigned long long)(n_slots * slot_bytes));
    *mask = n_slots - 1;
    return FKV_OK;
}

static fkv_status fail_collisions(void) {
    return fkv_fail(FKV_FILE_DAMAGED,
                    "more than %d strings of the vocabulary collide in its hash map; the file is damaged or malicious",
                    FKV_MAP_MAX_PROBES);
}

/* ---- string map -------------------------------------------------------------------------------------- */

fkv_status fkv_vocab_map_open(fkv_vocab_map *map, uint32_t n_strings) {
    void *slots = NULL;
    *map = (fkv_vocab_map){0};
    FKV_TRY(slots_alloc(n_strings, sizeof *map->slots, &slots, &map->mask));
    map->slots = slots;
    return FKV_OK;
}

void fkv_vocab_map_close(fkv_vocab_map *map) {
    free(map->slots);
    *map = (fkv_vocab_map){0};
}

fkv_status fkv_vocab_map_add(fkv_vocab_map *map, fkv_bytes string, uint32_t id, uint32_t *kept) {
    FKV_REQUIRE(string.size <= FKV_MAX_TOKEN_BYTES, FKV_UNSUPPORTED,
                "a string of the vocabulary is %zu bytes long; at most %d are supported", string.size, FKV_MAX_TOKEN_BYTES);
    FKV_ASSERT(string.size > 0);
    uint64_t hash = hash_string(string.data, string.size);
    uint64_t at = hash & map->mask;
    for (int probe = 0; probe < FKV_MAP_MAX_PROBES; probe++, at = (at + 1) & map->mask) {
        fkv_vocab_slot *slot = &map->slots[at];
        if (slot->data == NULL) {
            FKV_ASSERT(map->n_used <= map->mask / 2);
            *slot = (fkv_vocab_slot){.data = string.data, .size = (uint16_t)string.size, .tag = hash_tag(hash), .id = id};
            map->n_used++;
            *kept = id;
            return FKV_OK;
        }
        if (slot->tag == hash_tag(hash) && slot->size == string.size && memcmp(slot->data, string.data, string.size) == 0) {
            *kept = slot->id;
            return FKV_OK;
        }
    }
    return fail_collisions();
}

uint32_t fkv_vocab_map_find(const fkv_vocab_map *map, const char *data, size_t size) {
    if (size > FKV_MAX_TOKEN_BYTES) return FKV_NO_TOKEN;
    uint64_t hash = hash_string(data, size);
    for (uint64_t at = hash & map->mask;; at = (at + 1) & map->mask) {
        const fkv_vocab_slot *slot = &map->slots[at];
        if (slot->data == NULL) return FKV_NO_TOKEN;
        if (slot->tag == hash_tag(hash) && slot->size == size && memcmp(slot->data, data, size) == 0) return slot->id;
    }
}

uint32_t fkv_vocab_map_find_joined(const fkv_vocab_map *map, fkv_bytes left, fkv_bytes right) {
    char joined[2 * FKV_MAX_TOKEN_BYTES];
    if (left.size > FKV_MAX_TOKEN_BYTES || right.size > FKV_MAX_TOKEN_BYTES) return FKV_NO_TOKEN;
    memcpy(joined, left.data, left.size);
    memcpy(joined + left.size, right.data, right.size);
    return fkv_vocab_map_find(map, joined, left.size + right.size);
}

/* ---- pair map ----------------------------------------------------------------------------------------- */

fkv_status fkv_pair_map_open(fkv_pair_map *map, uint32_t n_pairs) {
    void *slots = NULL;
    *map = (fkv_pair_map){0};
    FKV_TRY(slots_alloc(n_pairs, sizeof *map->slots, &slots, &map->mask));
    map->slots = slots;
    for (uint64_t i = 0; i <= map->mask; i++) map->slots[i].value = FKV_NO_PAIR;
    return FKV_OK;
}

void fkv_pair_map_close(fkv_pair_map *map) {
    free(map->slots);
    *map = (fkv_pair_map){0};
}

fkv_status fkv_pair_map_add(fkv_pair_map *map, uint64_t key, uint64_t value) {
    FKV_ASSERT(value != FKV_NO_PAIR);
    uint64_t at = fkv_mix_u64(key) & map->mask;
    for (int probe = 0; probe < FKV_MAP_MAX_PROBES; probe++, at = (at + 1) & map->mask) {
        fkv_pair_slot *slot = &map->slots[at];
        if (slot->value == FKV_NO_PAIR) {
            FKV_ASSERT(map->n_used <= map->mask / 2);
            *slot = (fkv_pair_slot){.key = key, .value = value};
            map->n_used++;
            return FKV_OK;
        }
        if (slot->key == key) return FKV_OK;
    }
    return fail_collisions();
}
