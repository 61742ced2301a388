/* Prefill on warpgroups, third part: the role of the first warpgroup, of sealed pages of the first two. Packed tiles come by the
 * copy engine, PF_PACKED ahead; they are unpacked one after the other through the stages (prefill_unpack.h, or prefill_sealed.h).
 * Of sealed pages those that several blocks meet are unpacked for all of them (prefill_share.h).
 * One fence for each tile shows the keys of this tile and the values of the tile before to the products.
 */
/* What this warp stored is visible to the products of those whom the gate lets pass. */
FKV_FN void pf_publish(fkv_shared s, fkv_u32 gate) {
    fkv_publish();
    fkv_sync_warp();
    if (s.index % 32 == 0) fkv_gate_arrive(s, gate);
}

/* Tiles that the block unpacks for itself: all, or the first and those behind the shared ones. */
#if FKV_SEALED
FKV_FN fkv_u32 pf_n_own(const pf_item &x) { return x.n_tiles - (x.shared_end - 1); }
FKV_FN fkv_u32 pf_own_tile(const pf_item &x, fkv_u32 i) { return i == 0 ? 0 : i + x.shared_end - 1; }
#else
FKV_FN fkv_u32 pf_n_own(const pf_item &x) { return x.n_tiles; }
FKV_FN fkv_u32 pf_own_tile(const pf_item &, fkv_u32 i) { return i; }
#endif

/* By one thread, once the gates are made: as many tiles as there is room for. */
FKV_FN void pf_bring_first(fkv_shared s, const pf_item &x) {
    for (fkv_u32 i = 0; i < PF_PACKED && i < pf_n_own(x); i++) {
        fkv_u32 key = pf_first_key(x, pf_own_tile(x, i));
        pf_bring_tile(s, x, key, pf_page_at(x, key / FKV_PAGE_TOKENS), (int)i);
    }
}

/* Page of the first key of own tile i; behind the last one there is nothing to ask for. */
FKV_FN fkv_u32 pf_tile_page(const pf_item &x, fkv_u32 i) {
    return pf_page_at(x, pf_first_key(x, pf_own_tile(x, i < pf_n_own(x) ? i : pf_n_own(x) - 1)) / FKV_PAGE_TOKENS);
}

#if FKV_SEALED
/* The first warpgroup: keys. */
FKV_FN void pf_feed_keys(fkv_shared s, const pf_item &x) {
    pf_key_share own = pf_keys_of(s);
    int packed = 0;
    fkv_u32 packed_phase = 0;
    for (fkv_u32 i = 0; i < pf_n_own(x); i++) {
        if (i == 1 && x.shared_end > 1) {
            pf_lend_pages(s, x, own);
            fkv_sync_warp();
            fkv_sync_team(3, 256); /* gates tell two phases apart, no more: until those of the last tiles are on */
        }
        fkv_u32 tile = pf_own_tile(x, i), phase = tile / PF_STAGES % 2;
        int stage = (int)(tile % PF_STAGES);
        fkv_gate_wait(s, pf_gate(PF_PACKED_FULL, packed), packed_phase);
        pf_taken_keys k;
        pf_take_keys(s, own, packed, k);
        fkv_gate_wait(s, pf_gate(PF_K_EMPTY, stage), phase ^ 1);
        pf_put_keys(s, x, tile, stage, packed, own, k);
        pf_publish(s, pf_gate(PF_FULL, stage));
        if (s.index % 32 == 0) fkv_gate_arrive(s, pf_gate(PF_PACKED_EMPTY, packed));
        if (++packed == PF_PACKED) packed = 0, packed_phase ^= 1;
    }
    int stage = (int)(x.n_tiles % PF_STAGES);
    fkv_gate_wait(s, pf_gate(PF_K_EMPTY, stage), x.n_tiles / PF_STAGES % 2 ^ 1);
    pf_publish(s, pf_gate(PF_FULL, stage)); /* with the last values */
}

/* The second one: values, those of a tile for the gate of the next one's keys. Its first thread brings packed tiles. */
FKV_FN void pf_feed_values(fkv_shared s, const pf_item &x) {
    pf_value_share own = pf_values_of(s);
    int packed = 0;
    fkv_u32 packed_phase = 0;
    fkv_u32 page = pf_tile_page(x, PF_PACKED); /* of the tile that will take the room of this one */
    pf_publish(s, pf_gate(PF_FULL, 0));        /* there are none before the first keys */
    for (fkv_u32 i = 0; i < pf_n_own(x); i++) {
        if (i == 1 && x.shared_end > 1) {
            if (s.index == 128) pf_borrow_keys(s, x);
            if (s.index == 224) pf_borrow_values(s, x);
            if (s.index == 160) pf_watch_pages(s, x);
            if (s.index == 192) pf_return_pages(s, x);
            fkv_sync_warp();
            fkv_sync_team(3, 256);
        }
        fkv_u32 tile = pf_own_tile(x, i), phase = tile / PF_STAGES % 2;
        int stage = (int)(tile % PF_STAGES);
        fkv_gate_wait(s, pf_gate(PF_PACKED_FULL, packed), packed_phase);
        pf_taken_values v;
        pf_take_values(s, own, packed, v);
        fkv_gate_wait(s, pf_gate(PF_V_EMPTY, stage), phase ^ 1);
        pf_put_values(s, x, tile, stage, packed, own, v);
        pf_publish(s, pf_gate(PF_FULL, (int)((tile + 1) % PF_STAGES)));
        fkv_u32 next_page = 0;
        if (s.index < 160) next_page = pf_tile_page(x, i + 1 + PF_PACKED);
        if (s.index % 32 == 0) fkv_gate_arrive(s, pf_gate(PF_PACKED_EMPTY, packed));
        if (s.index == 128 && i + PF_PACKED < pf_n_own(x)) {
            fkv_gate_wait(s, pf_gate(PF_PACKED_EMPTY, packed), packed_phase);
            pf_bring_tile(s, x, pf_first_key(x, pf_own_tile(x, i + PF_PACKED)), page, packed);
        }
        fkv_sync_warp(); /* the first warp goes on as one */
        page = next_page;
        if (++packed == PF_PACKED) packed = 0, packed_phase ^= 1;
    }
}

FKV_FN void pf_unpack(fkv_shared s, const pf_item &x) {
    if (s.index < 128)
        pf_feed_keys(s, x);
    else
        pf_feed_values(s, x);
}
#else
FKV_FN void pf_unpack(fkv_shared s, const pf_item &x) {
    int stage = 0, packed = 0;
    fkv_u32 phase = 0, packed_phase = 0;
    fkv_u32 page = pf_tile_page(x, PF_PACKED); /* of the tile that will take the room of this one */
    for (fkv_u32 tile = 0; tile < x.n_tiles; tile++) {
        fkv_gate_wait(s, pf_gate(PF_PACKED_FULL, packed), packed_phase);

        pf_taken_keys k;
        pf_take_keys(s, x, tile, packed, k);
        fkv_gate_wait(s, pf_gate(PF_K_EMPTY, stage), phase ^ 1);
        pf_put_keys(s, x, tile, stage, packed, k);
        pf_publish(s, pf_gate(PF_FULL, stage));
        fkv_u32 next_page = pf_tile_page(x, tile + 1 + PF_PACKED); /* here: the next fence, far ahead, waits for it */

        pf_taken_values v;
        pf_take_values(s, x, tile, packed, v);
        fkv_gate_wait(s, pf_gate(PF_V_EMPTY, stage), phase ^ 1);
        pf_put_values(s, x, tile, stage, packed, v);

        fkv_sync_warp();
        if (s.index % 32 == 0) fkv_gate_arrive(s, pf_gate(PF_PACKED_EMPTY, packed));
        if (s.index == 0 && tile + PF_PACKED < x.n_tiles) {
            fkv_gate_wait(s, pf_gate(PF_PACKED_EMPTY, packed), packed_phase);
            pf_bring_tile(s, x, pf_first_key(x, tile + PF_PACKED), page, packed);
        }
        fkv_sync_warp(); /* the first warp goes on as one */
        page = next_page;
        if (++stage == PF_STAGES) stage = 0, phase ^= 1;
        if (++packed == PF_PACKED) packed = 0, packed_phase ^= 1;
    }
    fkv_gate_wait(s, pf_gate(PF_K_EMPTY, stage), phase ^ 1);
    pf_publish(s, pf_gate(PF_FULL, stage)); /* the last values */
}
#endif
