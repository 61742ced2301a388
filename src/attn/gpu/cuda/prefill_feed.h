/* Part of the prefill kernel in prefill_wgmma.h: code of the warpgroups that unpack tiles. In sealed layers (FKV_SEALED), the
 * first two warpgroups of the thread block unpack all tiles except the first. If the block shares pages, both unpack its first
 * page for the group, and the first warpgroup unpacks its other pages. In other layers, only the first warpgroup unpacks tiles.
 * Packed tiles are loaded with bulk copies, PF_PACKED tiles ahead. prefill_unpack.h or prefill_sealed.h unpacks them one after
 * another into stages (buffers in shared memory). Pages that several blocks need are unpacked only once (prefill_share.h). One
 * fence per tile makes the keys of this tile and the values of the previous tile visible to the matrix products. */
/* Makes this warp's stores visible to the matrix products of threads that wait for the mbarrier, and then arrives at the
 * mbarrier. */
FKV_FN void pf_publish(fkv_shared s, fkv_u32 mbarrier) {
    fkv_publish();
    fkv_sync_warp();
    if (s.index % 32 == 0) fkv_mbarrier_arrive(s, mbarrier);
}

/* Starts copying packed tiles [first, end). Called by one thread, after the mbarriers are initialized. */
FKV_FN void pf_load_first_tiles(fkv_shared s, const pf_item &x, fkv_u32 first, fkv_u32 end) {
    for (fkv_u32 tile = first; tile < end && tile < x.n_tiles; tile++) {
        fkv_u32 key = pf_first_key(x, tile);
        pf_load_packed_tile(s, x, key, pf_page_at(x, key / FKV_PAGE_TOKENS), (int)tile);
    }
}

/* Returns the page that contains the first key of a tile. If `tile` is too large, the last tile is used. */
FKV_FN fkv_u32 pf_tile_page(const pf_item &x, fkv_u32 tile) {
    return pf_page_at(x, pf_first_key(x, tile < x.n_tiles ? tile : x.n_tiles - 1) / FKV_PAGE_TOKENS);
}

#if FKV_SEALED
FKV_FN bool pf_shares(const pf_item &x) { return x.shared_end > 1; } /* true if the block shares pages with its group */

/* Unpacks the first tile. Called by the MMA warpgroups, which would otherwise wait for it: the first one unpacks keys, the second
 * one values. Meanwhile, the other warpgroups unpack the first page that this block contributes to its group or, if the block
 * does not share pages, the second tile. */
FKV_FN void pf_unpack_first_tile(fkv_shared s, const pf_item &x) {
    fkv_shared team = s;
    team.index = s.index % 128;
    fkv_mbarrier_wait(s, pf_mbarrier(PF_PACKED_FULL, 0), 0);
    if (FKV_WINDOW == 0) { /* the first page is open */
        if (s.index / 128 == PF_FEEDERS) {
            pf_put_open_keys<PF_K_ROWS>(team, s, PF_AT_K, pf_low_at(0), 0);
            pf_put_open_unit(team, s, pf_unit_at(0));
        } else {
            pf_put_open_values(team, s, PF_AT_V, 0, [=](fkv_u32 token) { pf_mark_rows(s, token); });
        }
    } else if (s.index / 128 == PF_FEEDERS) {
        pf_key_share own = pf_keys_of(team);
        pf_taken_keys k;
        pf_take_keys(team, own, 0, k);
        pf_put_keys(team, x, 0, 0, 0, own, k);
    } else {
        pf_value_share own = pf_values_of(team);
        pf_taken_values v;
        pf_take_values(team, own, 0, v);
        pf_put_values(team, x, 0, 0, 0, own, v);
    }
    pf_publish(s, pf_mbarrier(PF_FULL, 0));
    if (s.index % 32 == 0) fkv_mbarrier_arrive(s, pf_mbarrier(PF_PACKED_EMPTY, 0));
}

/* Waits until the first tile has been unpacked. An mbarrier distinguishes only two phases. Before a warpgroup waits at
 * PF_PACKED_FULL of buffer 0 for the second tile in this buffer, it must therefore know that the first tile has arrived. This
 * function waits at PF_FULL of stage 0. It is called before the warpgroup's next arrival at PF_FULL, so the next phase cannot end
 * before the wait. */
FKV_FN void pf_wait_for_first_tile(fkv_shared s) { fkv_mbarrier_wait(s, pf_mbarrier(PF_FULL, 0), 0); }

/* Code of the first warpgroup, which unpacks keys. */
FKV_FN void pf_feed_keys(fkv_shared s, const pf_item &x) {
    pf_key_share own = pf_keys_of(s);
    int packed = 1 % PF_PACKED;
    fkv_u32 packed_phase = 1 / PF_PACKED;
#if FKV_PREFILL_SHARERS > 0
    if (pf_shares(x)) {
        pf_share_first_keys(s, x, own);
        pf_share_open_pages(s, x);
        return pf_share_later_pages(s, x, own);
    }
#endif
    for (fkv_u32 tile = 1; tile < x.n_tiles; tile++) {
        fkv_u32 phase = tile / PF_STAGES % 2;
        int stage = (int)(tile % PF_STAGES);
        if (PF_PACKED <= PF_STAGES && tile == PF_PACKED) pf_wait_for_first_tile(s);
        fkv_mbarrier_wait(s, pf_mbarrier(PF_PACKED_FULL, packed), packed_phase);
        pf_taken_keys k;
        pf_take_keys(s, own, packed, k);
        fkv_mbarrier_wait(s, pf_mbarrier(PF_K_EMPTY, stage), phase ^ 1);
        pf_put_keys(s, x, tile, stage, packed, own, k);
        pf_publish(s, pf_mbarrier(PF_FULL, stage));
        if (s.index % 32 == 0) fkv_mbarrier_arrive(s, pf_mbarrier(PF_PACKED_EMPTY, packed));
        if (++packed == PF_PACKED) packed = 0, packed_phase ^= 1;
    }
    int stage = (int)(x.n_tiles % PF_STAGES);
    fkv_mbarrier_wait(s, pf_mbarrier(PF_K_EMPTY, stage), x.n_tiles / PF_STAGES % 2 ^ 1);
    pf_publish(s, pf_mbarrier(PF_FULL, stage)); /* publishes the values of the last tile */
}

/* Starts copying the tile that follows `tile` in the buffer `packed`, once the buffer is empty. Called by one thread. */
FKV_FN void pf_load_next_tile(fkv_shared s, const pf_item &x, fkv_u32 tile, int packed, fkv_u32 packed_phase, fkv_u32 page) {
    if (tile + PF_PACKED >= x.n_tiles) return;
    fkv_mbarrier_wait(s, pf_mbarrier(PF_PACKED_EMPTY, packed), packed_phase);
    pf_load_packed_tile(s, x, pf_first_key(x, tile + PF_PACKED), page, packed);
}

/* Code of the second warpgroup, which unpacks values. The values of a tile are published together with the keys of the next tile,
 * on the same mbarrier. The first thread of the warpgroup starts the copies of all packed tiles except the first or, if the block
 * shares pages, the copy of its first page for the group. */
FKV_FN void pf_feed_values(fkv_shared s, const pf_item &x) {
    pf_value_share own = pf_values_of(s);
    int packed = 1 % PF_PACKED;
    fkv_u32 packed_phase = 1 / PF_PACKED;
    if (s.index == 128) {
#if FKV_PREFILL_SHARERS > 0
        pf_load_first_page_to_share(s, x);
#endif
        if (!pf_shares(x)) pf_load_first_tiles(s, x, 1, PF_PACKED);
    }
    fkv_sync_warp();
    /* The next arrivals at the mbarrier of stage 0 must not be counted in its first phase, which ends when the first tile is
     * published. */
    if (PF_STAGES == 1) pf_wait_for_first_tile(s);
    /* only the arrival is left, because the MMA warpgroups publish the values of the first tile with its keys */
    if (s.index % 32 == 0) fkv_mbarrier_arrive(s, pf_mbarrier(PF_FULL, 1 % PF_STAGES));
#if FKV_PREFILL_SHARERS > 0
    if (pf_shares(x)) {
        pf_share_first_values(s, x, own);
        if (s.index == 128) pf_load_shared_keys(s, x);
        if (s.index == 224) pf_load_shared_values(s, x);
        if (s.index / 32 == 5) pf_watch_shared_pages(s, x);
        if (s.index == 192) pf_release_shared_pages(s, x);
        return;
    }
#endif
    if (s.index == 128) pf_load_next_tile(s, x, 0, 0, 0, pf_tile_page(x, PF_PACKED));
    fkv_sync_warp();
    fkv_u32 page = pf_tile_page(x, 1 + PF_PACKED); /* page of the tile that will be copied to the current tile's buffer */
    for (fkv_u32 tile = 1; tile < x.n_tiles; tile++) {
        fkv_u32 phase = tile / PF_STAGES % 2;
        int stage = (int)(tile % PF_STAGES);
        if (PF_PACKED < PF_STAGES && tile == PF_PACKED) pf_wait_for_first_tile(s);
        fkv_mbarrier_wait(s, pf_mbarrier(PF_PACKED_FULL, packed), packed_phase);
        pf_taken_values v;
        pf_take_values(s, own, packed, v);
        fkv_mbarrier_wait(s, pf_mbarrier(PF_V_EMPTY, stage), phase ^ 1);
        pf_put_values(s, x, tile, stage, packed, own, v);
        if (tile + 1 == PF_STAGES) pf_wait_for_first_tile(s); /* see above */
        pf_publish(s, pf_mbarrier(PF_FULL, (int)((tile + 1) % PF_STAGES)));
        fkv_u32 next_page = 0;
        if (s.index < 160) next_page = pf_tile_page(x, tile + 1 + PF_PACKED);
        if (s.index % 32 == 0) fkv_mbarrier_arrive(s, pf_mbarrier(PF_PACKED_EMPTY, packed));
        if (s.index == 128) pf_load_next_tile(s, x, tile, packed, packed_phase, page);
        fkv_sync_warp(); /* reconverge the lanes of the first warp */
        page = next_page;
        if (++packed == PF_PACKED) packed = 0, packed_phase ^= 1;
    }
}

FKV_FN void pf_unpack(fkv_shared s, const pf_item &x) {
    if (s.index < 128)
        pf_feed_keys(s, x);
    else
        pf_feed_values(s, x);
#if FKV_PREFILL_SHARERS > 0
    pf_release_ring(s, x);
#endif
}
#else
FKV_FN void pf_unpack(fkv_shared s, const pf_item &x) {
    int stage = 0, packed = 0;
    fkv_u32 phase = 0, packed_phase = 0;
    fkv_u32 page = pf_tile_page(x, PF_PACKED); /* page of the tile that will be copied to the current tile's buffer */
    for (fkv_u32 tile = 0; tile < x.n_tiles; tile++) {
        fkv_mbarrier_wait(s, pf_mbarrier(PF_PACKED_FULL, packed), packed_phase);

        pf_taken_keys k;
        pf_take_keys(s, x, tile, packed, k);
        fkv_mbarrier_wait(s, pf_mbarrier(PF_K_EMPTY, stage), phase ^ 1);
        pf_put_keys(s, x, tile, stage, packed, k);
        pf_publish(s, pf_mbarrier(PF_FULL, stage));
        /* this load is issued early, because the next fence waits for it */
        fkv_u32 next_page = pf_tile_page(x, tile + 1 + PF_PACKED);

        pf_taken_values v;
        pf_take_values(s, x, tile, packed, v);
        fkv_mbarrier_wait(s, pf_mbarrier(PF_V_EMPTY, stage), phase ^ 1);
        pf_put_values(s, x, tile, stage, packed, v);

        fkv_sync_warp();
        if (s.index % 32 == 0) fkv_mbarrier_arrive(s, pf_mbarrier(PF_PACKED_EMPTY, packed));
        if (s.index == 0 && tile + PF_PACKED < x.n_tiles) {
            fkv_mbarrier_wait(s, pf_mbarrier(PF_PACKED_EMPTY, packed), packed_phase);
            pf_load_packed_tile(s, x, pf_first_key(x, tile + PF_PACKED), page, packed);
        }
        fkv_sync_warp(); /* reconverge the lanes of the first warp */
        page = next_page;
        if (++stage == PF_STAGES) stage = 0, phase ^= 1;
        if (++packed == PF_PACKED) packed = 0, packed_phase ^= 1;
    }
    fkv_mbarrier_wait(s, pf_mbarrier(PF_K_EMPTY, stage), phase ^ 1);
    pf_publish(s, pf_mbarrier(PF_FULL, stage)); /* publishes the values of the last tile */
}
#endif
