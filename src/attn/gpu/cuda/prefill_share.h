/* Prefill on warpgroups, of sealed pages: pages unpacked once for several blocks.
 *
 * Blocks of the same KV head and neighbouring queries of a sequence meet the same pages, those before the span of the first of
 * them. Up to FKV_PREFILL_SHARERS such blocks, a *group*, take turns: each unpacks every so many-th page into a ring in device
 * memory (it stays in L2), in the form that products want, and all bring it from there by the copy engine. Unpacking beside the
 * products took a fourth of a block's time; this way it takes almost none. The offsets of PF_FOUR pages lie behind the keys of
 * the first of them, put there by those who unpack each, and pages go on four at a time.
 *
 * Blocks of a group wait for each other, so all of them must run. A block's place is the number that it takes when it begins,
 * not that of its launch: blocks before it run already, or are done; a group never waits for one behind it. A ring passes from
 * group to group, PF_RINGS further on, when all blocks of the first are through.
 *
 * The ring's memory: words {blocks begun, blocks ended}; of each ring PF_RING_WORDS, {page + 1 in each slot}, {pages that each
 * block is through with}; the slots of all rings. Words are counted on under a tag, the group's turn at its ring, and are zero
 * again when the last block ends: one launch at a time has this memory.
 */
constexpr bool PF_SHARES = FKV_WINDOW == 0 && FKV_R <= PF_ROWS;
constexpr fkv_u32 PF_SHARERS = FKV_PREFILL_SHARERS, PF_RINGS = FKV_PREFILL_RINGS, PF_SLOTS = FKV_PREFILL_SLOTS;
constexpr fkv_u32 PF_RING_WORDS = 64, PF_THROUGH_AT = 32;
constexpr fkv_u32 PF_TAG = 1u << 20, PF_TAGS = 4096;          /* pages, and turns at a ring, that a word tells apart */
constexpr fkv_u32 PF_IMAGE_UNIT = PF_K_BYTES + PF_TILE_BYTES; /* where pf_page_unit lies in an image: behind keys and values */
constexpr fkv_u32 PF_IMAGE_BYTES = (PF_IMAGE_UNIT + (int)sizeof(pf_page_unit) + 127) / 128 * 128;
constexpr fkv_u32 PF_IMAGES_AT = (1 + PF_RINGS) * PF_RING_WORDS * 4;
static_assert(!PF_SHARES || PF_IMAGES_AT + PF_RINGS * PF_SLOTS * PF_IMAGE_BYTES <= FKV_PREFILL_RING_BYTES,
              "as kernel_text.c has it");
static_assert(PF_SHARERS <= PF_SLOTS && PF_SLOTS <= PF_THROUGH_AT, "a slot for each block at least");
static_assert(PF_SLOTS % PF_FOUR == 0 && PF_SLOTS >= PF_FOUR + PF_STAGES, "pages whose offsets lie together are there together");

/* What a block knows of its group. */
struct pf_share {
    fkv_u32 *ready, *through; /* of the ring */
    fkv_u8 *images;
    fkv_u32 member, n_members;
    fkv_u32 n_before; /* members of the group that had the ring before */
    fkv_u32 tag;
};

FKV_FN fkv_u32 pf_members(fkv_u32 n_tiles, fkv_u32 first) { return n_tiles - first < PF_SHARERS ? n_tiles - first : PF_SHARERS; }

FKV_FN fkv_u32 pf_groups(fkv_u32 n_tiles) { return (n_tiles + PF_SHARERS - 1) / PF_SHARERS; } /* of a head */

/* Whether the launch shares pages: not where a group could not run at once, or there are more groups than tags. */
FKV_FN bool pf_takes_turns(const fkv_u32 *table) {
    return PF_SHARES && fkv_processors() >= PF_SHARERS && pf_groups(table[FKV_STEP_N_TILES]) < PF_RINGS * (PF_TAGS - 2) / FKV_G;
}

FKV_FN pf_share pf_share_of(const pf_item &x) {
    fkv_u32 n_tiles = x.table[FKV_STEP_N_TILES], groups = pf_groups(n_tiles);
    fkv_u32 group = x.head * groups + x.number / PF_SHARERS, ring = group % PF_RINGS;
    fkv_u32 *words = (fkv_u32 *)x.ring + (1 + ring) * PF_RING_WORDS;
    pf_share share;
    share.ready = words;
    share.through = words + PF_THROUGH_AT;
    share.images = x.ring + PF_IMAGES_AT + (fkv_u64)ring * (PF_SLOTS * PF_IMAGE_BYTES);
    share.member = x.number % PF_SHARERS;
    share.n_members = pf_members(n_tiles, x.number - share.member);
    share.n_before = group < PF_RINGS ? 0 : pf_members(n_tiles, (group - PF_RINGS) % groups * PF_SHARERS);
    share.tag = (group / PF_RINGS + 1) * PF_TAG;
    return share;
}

/* The block's place, by the order in which blocks begin. */
FKV_FN fkv_place pf_take_turn(fkv_shared s, fkv_place place, const void *ring, const fkv_u32 *table) {
    if (!pf_takes_turns(table)) return place;
    fkv_u32 *turn = (fkv_u32 *)(s.base + PF_AT_TURN);
    if (s.index == 0) turn[0] = fkv_take_number((fkv_u32 *)ring), turn[1] = 0, turn[2] = 0;
    fkv_sync();
    place.x = *turn % table[FKV_STEP_N_TILES];
    place.y = *turn / table[FKV_STEP_N_TILES];
    return place;
}

/* Tiles from 1 to before it are the same for all blocks of the group, and sealed. */
FKV_FN fkv_u32 pf_shared_end(const pf_item &x) {
    if (!pf_takes_turns(x.table)) return 1;
    fkv_u32 first = x.number - x.number % PF_SHARERS, n = pf_members(x.table[FKV_STEP_N_TILES], first);
    const fkv_u32 *tile = x.table + x.table[FKV_STEP_TILES] + first * FKV_TILE_WORDS;
    if (tile[FKV_TILE_ROW] != tile[(n - 1) * FKV_TILE_WORDS + FKV_TILE_ROW] || (n == 1 && PF_SHARERS > 1)) return 1;
    fkv_u32 page = tile[FKV_TILE_POSITION] / FKV_PAGE_TOKENS;
    return page < FKV_OPEN_SPAN || page > PF_TAG - PF_SLOTS ? 1 : page - page % FKV_OPEN_SPAN;
}

/* Shared page j, tile j + 1, on its way to the room behind the packed tiles. By one thread. */
FKV_FN void pf_bring_lent(fkv_shared s, const pf_item &x, fkv_u32 j) {
    fkv_u32 gate = pf_gate(PF_LENT_FULL, 0);
    fkv_bring_begin(s, gate, FKV_BLOCK_BYTES);
    fkv_bring(s, gate, (fkv_u32)(PF_AT_PACKED + PF_PACKED * PF_PACKED_BYTES),
              x.pool + (fkv_u64)pf_page_at(x, j + 1) * (FKV_G * (fkv_u64)FKV_BLOCK_BYTES), FKV_BLOCK_BYTES);
    fkv_bring_end(s, gate);
}

/* Until nobody reads what page j's slot has. By a warp. */
FKV_FN void pf_await_slot(fkv_shared s, const pf_share &share, fkv_u32 j) {
    fkv_u32 lane = s.index % 32, n = j < PF_SLOTS ? share.n_before : share.n_members;
    fkv_u32 least = j < PF_SLOTS ? share.tag - 1 : share.tag + j - PF_SLOTS + 1;
    if (lane < n) fkv_await_number(share.through + lane, least);
    fkv_sync_warp();
}

/* The block's pages of all, unpacked into the ring. By the warpgroup that unpacks keys. */
FKV_FN void pf_lend_pages(fkv_shared s, const pf_item &x, const pf_key_share &keys) {
    pf_share share = pf_share_of(x);
    pf_value_share values = pf_values_of(s);
    fkv_u32 n = x.shared_end - 1, phase = 0;
    if (s.index == 0 && share.member < n) pf_bring_lent(s, x, share.member);
    for (fkv_u32 j = share.member; j < n; j += share.n_members) {
        fkv_image to = {share.images + j % PF_SLOTS * PF_IMAGE_BYTES};
        fkv_gate_wait(s, pf_gate(PF_LENT_FULL, 0), phase);
        phase ^= 1;
        pf_await_slot(s, share, j);
        pf_taken_keys k;
        pf_take_keys(s, keys, PF_PACKED, k);
        fkv_image first = {share.images + j / PF_FOUR * PF_FOUR % PF_SLOTS * PF_IMAGE_BYTES};
        pf_put_sealed_keys(s, to, 0, PF_IMAGE_UNIT, pf_offsets_at<fkv_image>{first, 0, j % PF_FOUR}, 0, keys, k);
        pf_taken_values v;
        pf_take_values(s, values, PF_PACKED, v);
        pf_put_sealed_values(to, PF_K_BYTES, values, v);
        fkv_publish_image();
        fkv_sync_warp();
        fkv_sync_team(2, 128);
        if (s.index != 0) continue;
        fkv_tell_number(share.ready + j % PF_SLOTS, share.tag + j + 1);
        if (j + share.n_members < n) pf_bring_lent(s, x, j + share.n_members);
    }
}

/* All shared tiles from the ring to the stages. Each of three threads does one thing, so that none waits for device memory but
 * the one that asks it: which pages are there; to bring them; to tell others which are no longer read. */
FKV_FN void pf_watch_pages(fkv_shared s, const pf_item &x) {
    pf_share share = pf_share_of(x);
    for (fkv_u32 j = 0; j + 1 < x.shared_end; j++) {
        fkv_await_number(share.ready + j % PF_SLOTS, share.tag + j + 1);
        if (j % PF_FOUR != PF_FOUR - 1 && j + 2 != x.shared_end) continue;
        fkv_see_image();
        fkv_tell_near(s, PF_AT_READY, j + 1);
    }
}

FKV_FN void pf_return_pages(fkv_shared s, const pf_item &x) {
    pf_share share = pf_share_of(x);
    for (fkv_u32 j = 1; j + PF_STAGES < x.shared_end; j++) {
        fkv_await_near(s, PF_AT_THROUGH, j);
        fkv_tell_number(share.through + share.member, share.tag + j);
    }
}

/* Who brings keys, or values, arrives for the four warps that would unpack them. */
FKV_FN void pf_borrow_keys(fkv_shared s, const pf_item &x) {
    const fkv_u8 *images = pf_share_of(x).images;
    for (fkv_u32 tile = 1; tile < x.shared_end; tile++) {
        fkv_u32 stage = tile % PF_STAGES, gate = pf_gate(PF_FULL, (int)stage);
        const fkv_u8 *image = images + (tile - 1) % PF_SLOTS * PF_IMAGE_BYTES;
        fkv_await_near(s, PF_AT_READY, tile);
        fkv_gate_wait(s, pf_gate(PF_K_EMPTY, (int)stage), tile / PF_STAGES % 2 ^ 1);
        bool offsets = tile % PF_FOUR == 1;
        fkv_bring_begin(s, gate, (offsets ? PF_K_BYTES : PF_TILE_BYTES) + sizeof(pf_page_unit));
        for (fkv_u32 half = 0; half < PF_DP / 64; half++)
            fkv_bring(s, gate, (fkv_u32)PF_AT_K + stage * PF_K_BYTES + half * (PF_K_ROWS * 128), image + half * (PF_K_ROWS * 128),
                      (offsets ? PF_K_ROWS : PF_KEYS) * 128);
        fkv_bring(s, gate, pf_unit_at(tile), image + PF_IMAGE_UNIT, sizeof(pf_page_unit));
        fkv_bring_end(s, gate);
        fkv_gate_arrive_often(s, gate, 3);
    }
}

FKV_FN void pf_borrow_values(fkv_shared s, const pf_item &x) {
    const fkv_u8 *images = pf_share_of(x).images;
    for (fkv_u32 tile = 1; tile < x.shared_end; tile++) {
        fkv_u32 stage = tile % PF_STAGES, next = pf_gate(PF_FULL, (int)((tile + 1) % PF_STAGES));
        const fkv_u8 *image = images + (tile - 1) % PF_SLOTS * PF_IMAGE_BYTES;
        fkv_await_near(s, PF_AT_READY, tile);
        fkv_gate_wait(s, pf_gate(PF_V_EMPTY, (int)stage), tile / PF_STAGES % 2 ^ 1);
        fkv_bring_begin(s, next, PF_TILE_BYTES);
        fkv_bring(s, next, (fkv_u32)PF_AT_V + stage * PF_TILE_BYTES, image + PF_K_BYTES, PF_TILE_BYTES);
        fkv_bring_end(s, next);
        fkv_gate_arrive_often(s, next, 3);
        if (tile > PF_STAGES) fkv_tell_near(s, PF_AT_THROUGH, tile - PF_STAGES); /* what the stage had before was multiplied */
    }
}

/* The last lines of a block, by all threads. */
FKV_FN void pf_end_turn(fkv_shared s, const pf_item &x) {
    if (!pf_takes_turns(x.table)) return;
    fkv_u32 *turn = (fkv_u32 *)(s.base + PF_AT_TURN), *words = (fkv_u32 *)x.ring;
    if (s.index == 0) {
        pf_share share = pf_share_of(x);
        for (fkv_u32 i = 0; i < share.n_before; i++) fkv_await_number(share.through + i, share.tag - 1);
        fkv_tell_number(share.through + share.member, share.tag + PF_TAG - 1);
        *turn = fkv_take_number(words + 1);
    }
    fkv_sync();
    if (*turn + 1 != x.table[FKV_STEP_N_TILES] * FKV_G) return;
    for (fkv_u32 i = s.index; i < (1 + PF_RINGS) * PF_RING_WORDS; i += PF_THREADS) words[i] = 0;
}
