/* Calls the optional functions of a prefix store. If a store does not provide a function, returns the default that prefix_store.h
 * specifies. */
#ifndef FKV_STORE_QUERIES_H
#define FKV_STORE_QUERIES_H

#include "base.h"

#include <flatkv/prefix_store.h>

FKV_INLINE bool fkv_store_pending(const fkv_prefix_store *store, const fkv_page_key *key) {
    return store->pending != NULL && store->pending(store->self, key);
}

FKV_INLINE bool fkv_store_wants(const fkv_prefix_store *store, const fkv_page_key *key) {
    return store->wants != NULL ? store->wants(store->self, key) : !store->contains(store->self, key);
}

#endif
