/* Part of the prefill kernel in prefill_wgmma.h: thread blocks that need the same pages share the work of unpacking them.
 *
 * Blocks that process neighbouring queries of a sequence for the same KV head need the same sealed pages. Up to
 * FKV_PREFILL_SHARERS of these blocks form a group. They are called its members. In a group of n blocks, each block unpacks every
 * n-th sealed page into a ring buffer in device memory, and all blocks load the unpacked pages from this ring by bulk copy. The
 * queries of a group may be in several spans. The members in the last span need the most sealed pages; all members take part in
 * unpacking these pages. Open pages except the first page of the sequence are also unpacked only once, each into a separate
 * buffer in device memory (an open image). The first page, which is the first tile, is unpacked by every block for itself. The
 * ring and the open images are small enough to stay in the L2 cache. The channel offsets of PF_FOUR sealed pages are stored
 * together, so sealed pages become available four at a time.
 *
 * The blocks of a group wait for each other, so all of them must be running. When a block starts, it obtains its place in the
 * grid from a counter, so all blocks with lower places have already started. On a busy device, the last blocks of a group may be
 * unable to start before the first blocks end. A group therefore shares pages only if all its blocks start within
 * FKV_PREFILL_PATIENCE polls (pf_agree_to_share()). Results are bit-identical whether or not pages are shared. Launches with the
 * same ring memory must not overlap. Blocks of wide heads (PF_WIDE) do not share pages, and FKV_PREFILL_SHARERS is 0.
 */

#if FKV_PREFILL_SHARERS > 0
/* Layout of the device memory. It starts with three counters: the number of blocks that have started, the number of blocks that
 * have finished with the ring, and the number of launches, including the current one, in which blocks must not begin to wait. The
 * counters are followed by PF_RING_WORDS words for each ring (see pf_share), by the decision of each group, by the slots of all
 * rings, and by the open images of all rings. Groups g and g + PF_RINGS use the same ring and the same open images, one after the
 * other. The words of a ring contain a tag that identifies the group. The last block of a launch decrements the third counter if
 * it is not 0. It resets the other counters, the words of the rings and the decisions to 0, but not the slots and the open
 * images. */
constexpr bool PF_SHARES = FKV_WINDOW == 0 && FKV_R <= PF_ROWS;
constexpr fkv_u32 PF_SHARERS = FKV_PREFILL_SHARERS, PF_RINGS = FKV_PREFILL_RINGS, PF_SLOTS = FKV_PREFILL_SLOTS;
constexpr fkv_u32 PF_RING_WORDS = 128, PF_THROUGH_AT = 16, PF_OPEN_K_READY_AT = 32, PF_OPEN_V_READY_AT = 64;
constexpr fkv_u32 PF_STARTED_AT = 0, PF_ENDED_AT = 1, PF_BACKOFF_AT = 2;
constexpr fkv_u32 PF_DECISIONS_AT = (1 + PF_RINGS) * PF_RING_WORDS, PF_DECISIONS = FKV_PREFILL_DECISIONS;
constexpr fkv_u32 PF_TAG = 1u << 20, PF_TAGS = 4096; /* a ring word is a tag, which is a multiple of PF_TAG, plus a number */
constexpr fkv_u32 PF_ENDED = PF_TAG - 1, PF_ALL_RELEASED = PF_TAG - 2; /* special numbers of released pages; see pf_share */
constexpr fkv_u32 PF_IMAGE_UNIT = PF_K_BYTES + PF_TILE_BYTES;          /* byte offset of pf_page_unit in a slot of the ring */
constexpr fkv_u32 PF_IMAGE_THIRD =
    (PF_IMAGE_UNIT + (int)sizeof(pf_page_unit) + 127) / 128 * 128; /* third digits of calibrated keys */
constexpr fkv_u32 PF_IMAGE_BYTES = PF_IMAGE_THIRD + PF_THIRD_BYTES;
constexpr fkv_u32 PF_IMAGES_AT = (PF_DECISIONS_AT + PF_DECISIONS) * 4;
/* An open image is a buffer for an unpacked open page. PF_OPEN_BAD is the offset of an array of 64 one-byte flags, one per token.
 * A flag is 1 if any V value of the token is beyond the range of fp16. PF_OPEN_PAGES is the largest number of pages from the
 * start of a group's first span to its last query. */
constexpr fkv_u32 PF_TILE_QUERIES = PF_ROWS / FKV_R < FKV_PAGE_TOKENS ? PF_ROWS / FKV_R : FKV_PAGE_TOKENS;
constexpr fkv_u32 PF_OPEN_PAGES =
    (PF_SHARERS * PF_TILE_QUERIES + FKV_PAGE_TOKENS - 1) / FKV_PAGE_TOKENS + 1 + (FKV_OPEN_SPAN - 1);
constexpr fkv_u32 PF_OPEN_LOW = PF_TILE_BYTES, PF_OPEN_V = 2 * PF_TILE_BYTES, PF_OPEN_UNIT = 3 * PF_TILE_BYTES;
constexpr fkv_u32 PF_OPEN_BAD = PF_OPEN_UNIT + (fkv_u32)sizeof(pf_page_unit), PF_OPEN_BYTES = PF_OPEN_UNIT + 256;
constexpr fkv_u32 PF_OPEN_IMAGES_AT = PF_IMAGES_AT + PF_RINGS * PF_SLOTS * PF_IMAGE_BYTES;
static_assert(!PF_SHARES || PF_OPEN_IMAGES_AT + PF_RINGS * PF_OPEN_PAGES * PF_OPEN_BYTES <= FKV_PREFILL_RING_BYTES,
              "fkv_prefill_ring_bytes() is too small");
static_assert(PF_OPEN_PAGES / FKV_OPEN_SPAN < 8, "pf_decide_shared_pages() stores numbers of spans in three bits");
static_assert(PF_OUT_BYTES <= PF_AT_PACKED,
              "the output rows must not overwrite a page that is being unpacked for other members of the group");
static_assert(!PF_SHARES || PF_PACKED >= 2, "open pages are unpacked from the second buffer for packed tiles");
static_assert(PF_THROUGH_AT + PF_SHARERS <= PF_OPEN_K_READY_AT && PF_OPEN_K_READY_AT + PF_OPEN_PAGES <= PF_OPEN_V_READY_AT &&
                  PF_OPEN_V_READY_AT + PF_OPEN_PAGES <= PF_RING_WORDS,
              "the words of a ring overlap");
static_assert(PF_SHARERS <= PF_SLOTS && PF_SLOTS <= PF_THROUGH_AT,
              "there must be at least one slot per member, and PF_THROUGH_AT words must hold one word per slot");
static_assert(PF_SLOTS % PF_FOUR == 0 && PF_SLOTS >= PF_FOUR + PF_STAGES,
              "a ring needs slots for all pages whose offsets are stored together");
static_assert(PF_DECISIONS / PF_RINGS + 2 < PF_TAGS, "there must be a tag for every group that uses a ring");

/* The group to which a thread block belongs, and the ring that this group uses. */
struct pf_share {
    /* Tagged words of the ring. ready: j + 1 for the shared page j in each slot, which is page j + 1 of the sequence. through:
     * the number of pages that each member has released, PF_ALL_RELEASED if it needs no more sealed pages, or PF_ENDED if its
     * block has finished with the ring and the open images. open_ready: for each open page, 1 once its keys (open_ready[0]) or
     * its values (open_ready[1]) are in its image. */
    fkv_u32 *ready, *through, *open_ready[2];
    fkv_u8 *images, *open_images;
    fkv_u32 member, n_members;
    fkv_u32 n_before; /* number of members of the previous group on this ring, or 0 */
    fkv_u32 tag;
};

FKV_FN fkv_u32 pf_members(fkv_u32 n_tiles, fkv_u32 first) { return n_tiles - first < PF_SHARERS ? n_tiles - first : PF_SHARERS; }

FKV_FN fkv_u32 pf_groups(fkv_u32 n_tiles) { return (n_tiles + PF_SHARERS - 1) / PF_SHARERS; } /* number of groups per KV head */

/* Returns true if the groups of this launch may share pages. The device must be able to run all blocks of a group at the same
 * time, and there must be a decision word for each group. */
FKV_FN bool pf_may_share(const fkv_u32 *table) {
    return PF_SHARES && fkv_processors() >= PF_SHARERS && pf_groups(table[FKV_STEP_N_TILES]) <= PF_DECISIONS / FKV_G;
}

FKV_FN fkv_u32 pf_group_of(const pf_item &x) { return x.head * pf_groups(x.table[FKV_STEP_N_TILES]) + x.number / PF_SHARERS; }

FKV_FN pf_share pf_share_of(const pf_item &x) {
    fkv_u32 n_tiles = x.table[FKV_STEP_N_TILES], groups = pf_groups(n_tiles);
    fkv_u32 group = pf_group_of(x), ring = group % PF_RINGS;
    fkv_u32 *words = (fkv_u32 *)x.ring + (1 + ring) * PF_RING_WORDS;
    pf_share share;
    share.ready = words;
    share.through = words + PF_THROUGH_AT;
    share.open_ready[0] = words + PF_OPEN_K_READY_AT;
    share.open_ready[1] = words + PF_OPEN_V_READY_AT;
    share.images = x.ring + PF_IMAGES_AT + (fkv_u64)ring * (PF_SLOTS * PF_IMAGE_BYTES);
    share.open_images = x.ring + PF_OPEN_IMAGES_AT + (fkv_u64)ring * (PF_OPEN_PAGES * PF_OPEN_BYTES);
    share.member = x.number % PF_SHARERS;
    share.n_members = pf_members(n_tiles, x.number - share.member);
    share.n_before = group < PF_RINGS ? 0 : pf_members(n_tiles, (group - PF_RINGS) % groups * PF_SHARERS);
    share.tag = (group / PF_RINGS + 1) * PF_TAG;
    return share;
}

/* Returns the block's place in the grid. If the layer shares pages (PF_SHARES), places are assigned in the order in which blocks
 * start. Called by all threads. */
FKV_FN fkv_place pf_take_number(fkv_shared s, fkv_place place, const void *ring, const fkv_u32 *table) {
    if (!PF_SHARES) return place;
    fkv_u32 *number = (fkv_u32 *)(s.base + PF_AT_NUMBER);
    if (s.index == 0) number[0] = fkv_fetch_increment((fkv_u32 *)ring + PF_STARTED_AT), number[1] = 0, number[2] = 0;
    fkv_u32 n_tiles = table[FKV_STEP_N_TILES];
    fkv_sync();
    place.x = *number % n_tiles;
    place.y = *number / n_tiles;
    return place;
}

/* Returns true if the group shares its pages, which requires that all members have started. Called by one thread of the block.
 * n_started is a value of the counter of started blocks, which the caller has read. The first member that stops waiting, or finds
 * that all members have started, stores the group's decision. All members follow this decision, so no member relies on another
 * member that has stopped waiting. After a timeout, no block begins to wait in the rest of the launch and in the next PF_BACKOFF
 * - 1 launches, because the process may be limited to a part of the device (MPS). In these launches, a group shares pages only if
 * the first member to decide finds that all members have started. */
constexpr fkv_u32 PF_DECIDED_SHARE = 1, PF_DECIDED_ALONE = 2, PF_BACKOFF = 256;
FKV_FN bool pf_agree_to_share(const pf_item &x, fkv_u32 n_started) {
    fkv_u32 *words = (fkv_u32 *)x.ring, *decision = words + PF_DECISIONS_AT + pf_group_of(x);
    fkv_u32 n_tiles = x.table[FKV_STEP_N_TILES], first = x.number - x.number % PF_SHARERS;
    fkv_u32 end = x.head * n_tiles + first +
                  pf_members(n_tiles, first); /* once this many blocks have started, all members of the group have started */
    bool all = n_started >= end;
    bool waits = !all && fkv_load_acquire(words + PF_BACKOFF_AT) == 0;
    fkv_u32 polls = waits ? FKV_PREFILL_PATIENCE : 0;
    while (!all && polls > 0 && fkv_load_acquire(decision) == 0) {
        fkv_pause();
        polls--;
        all = fkv_load_relaxed(words + PF_STARTED_AT) >= end;
    }
    fkv_u32 own = all ? PF_DECIDED_SHARE : PF_DECIDED_ALONE, before = fkv_exchange_zero(decision, own);
    if (before == 0 && waits && !all) fkv_store_release(words + PF_BACKOFF_AT, PF_BACKOFF);
    return (before == 0 ? own : before) == PF_DECIDED_SHARE;
}

/* Returns the end of the range of sealed pages that the queries at `position` read. The range starts at page 1 and is empty if
 * the end is 1. */
FKV_FN fkv_u32 pf_sealed_end(fkv_u32 position) {
    fkv_u32 page = position / FKV_PAGE_TOKENS;
    return page < FKV_OPEN_SPAN ? 1 : page - page % FKV_OPEN_SPAN;
}

/* Pages that the members of a group read: sealed pages [1, end), and open pages [begin, open_end). end is 1 if the group cannot
 * share pages. */
struct pf_group_pages {
    fkv_u32 begin, end, open_end;
};
FKV_FN pf_group_pages pf_pages_of_group(const pf_item &x) {
    fkv_u32 first = x.number - x.number % PF_SHARERS, n = pf_members(x.table[FKV_STEP_N_TILES], first);
    const fkv_u32 *tile = x.table + x.table[FKV_STEP_TILES] + first * FKV_TILE_WORDS, *last = tile + (n - 1) * FKV_TILE_WORDS;
    /* these loads are independent of each other, so the block waits for them only once */
    fkv_u32 row = tile[FKV_TILE_ROW], last_row = last[FKV_TILE_ROW];
    fkv_u32 begin = tile[FKV_TILE_POSITION], end = last[FKV_TILE_POSITION];
    pf_group_pages pages = {pf_sealed_end(begin), pf_sealed_end(end), end / FKV_PAGE_TOKENS + 1};
    /* sharing the few pages of a sequence's first queries would take longer than unpacking them in every block */
    if (!pf_may_share(x.table) || row != last_row || (n == 1 && PF_SHARERS > 1) || pages.begin == 1 ||
        pages.end > PF_TAG - PF_SLOTS)
        pages.end = 1;
    return pages;
}

/* Determines which pages the block shares with its group, and stores them as one word in shared memory. The word is 1 if the
 * group does not share pages. Otherwise, it is the end of the sealed pages that this block reads + PF_TAG * (number of spans from
 * the block's span to the group's last span + 8 * number of spans from the group's first span to the block's span + 64 * number
 * of open pages of the last span). Called by one thread. */
FKV_FN void pf_decide_shared_pages(fkv_shared s, const pf_item &x) {
    fkv_u32 n_started = PF_SHARES ? fkv_load_relaxed((fkv_u32 *)x.ring + PF_STARTED_AT) : 0;
    pf_group_pages pages = pf_pages_of_group(x);
    fkv_u32 own = pf_sealed_end(x.position), word = 1;
    if (pages.end > 1 && pf_agree_to_share(x, n_started))
        word = own + PF_TAG * ((pages.end - own) / FKV_OPEN_SPAN + 8 * ((own - pages.begin) / FKV_OPEN_SPAN) +
                               64 * (pages.open_end - pages.end));
    *(fkv_u32 *)(s.base + PF_AT_SHARED_PAGES) = word;
}
FKV_FN void pf_take_shared_pages(fkv_shared s, pf_item &x) {
    fkv_u32 word = fkv_get4(s, PF_AT_SHARED_PAGES), more = word / PF_TAG;
    x.shared_end = word % PF_TAG;
    x.group_end = x.shared_end + more % 8 * FKV_OPEN_SPAN;
    x.open_begin = x.shared_end - more / 8 % 8 * FKV_OPEN_SPAN;
    x.open_end = x.group_end + more / 64;
}

FKV_FN fkv_image pf_image(const pf_share &share, fkv_u32 j) { return {share.images + j % PF_SLOTS * PF_IMAGE_BYTES}; }

/* Starts the bulk copy of shared page j (tile j + 1 of the sequence), which this block unpacks for the group, to the buffer after
 * the packed tiles. Called by one thread. */
FKV_FN void pf_load_page_to_share(fkv_shared s, const pf_item &x, fkv_u32 j) {
    fkv_u32 mbarrier = pf_mbarrier(PF_TO_SHARE_FULL, 0);
    fkv_bulk_copy_begin(s, mbarrier, FKV_BLOCK_BYTES);
    fkv_bulk_copy(s, mbarrier, (fkv_u32)(PF_AT_PACKED + PF_PACKED * PF_PACKED_BYTES),
                  x.pool + (fkv_u64)pf_sealed_page_at(x, j + 1) * (FKV_G * (fkv_u64)FKV_BLOCK_BYTES), FKV_BLOCK_BYTES);
    fkv_bulk_copy_end(s, mbarrier);
}

/* Waits until no block needs the previous contents of the ring slot for page j. Called by a warpgroup, whose first warp polls. */
FKV_FN void pf_wait_for_slot(fkv_shared s, const pf_share &share, fkv_u32 j, fkv_u32 team) {
    fkv_u32 n = j < PF_SLOTS ? share.n_before : share.n_members;
    fkv_u32 least = j < PF_SLOTS ? share.tag - 1 : share.tag + j - PF_SLOTS + 1;
    if (s.index % 128 < 32) fkv_wait_for_words(s.index % 32 < n, share.through + s.index % 32, least);
    fkv_sync_team(team, 128);
}

/* Starts copying the first page that this block unpacks for the group. Called by one thread. */
FKV_FN void pf_load_first_page_to_share(fkv_shared s, const pf_item &x) {
    fkv_u32 member = x.number % PF_SHARERS;
    if (member + 1 < x.group_end) pf_load_page_to_share(s, x, member);
}

/* Unpacks the keys (or the values, respectively) of page j from the buffer of pf_load_page_to_share() into the ring. Called by a
 * warpgroup. */
FKV_FN void pf_share_keys(fkv_shared s, const pf_share &share, fkv_u32 j, const pf_key_share &own) {
    fkv_image to = pf_image(share, j), first = pf_image(share, j / PF_FOUR * PF_FOUR);
    pf_taken_keys k;
    pf_take_keys(s, own, PF_PACKED, k);
    pf_put_sealed_keys(s, to, 0, PF_IMAGE_THIRD, PF_IMAGE_UNIT, pf_offsets_at<fkv_image>{first, 0, j % PF_FOUR}, 0, own, k);
}
FKV_FN void pf_share_values(fkv_shared s, const pf_share &share, fkv_u32 j, const pf_value_share &own) {
    pf_taken_values v;
    pf_take_values(s, own, PF_PACKED, v);
    pf_put_sealed_values(pf_image(share, j), PF_K_BYTES, own, v);
}

/* Marks page j as available, after all threads of the team have unpacked their parts, and starts copying the next page that this
 * block unpacks. */
FKV_FN void pf_offer_page(fkv_shared s, const pf_item &x, const pf_share &share, fkv_u32 j, fkv_u32 team, fkv_u32 n_threads) {
    fkv_publish_image();
    fkv_sync_warp();
    fkv_sync_team(team, n_threads);
    if (s.index != 0) return;
    fkv_store_release(share.ready + j % PF_SLOTS, share.tag + j + 1);
    if (j + share.n_members + 1 < x.group_end) pf_load_page_to_share(s, x, j + share.n_members);
}

/* Waits until the first page that this block unpacks for the group has arrived and its slot is free. Returns false if there is no
 * such page. Called by a warpgroup. */
FKV_FN bool pf_begin_first_page(fkv_shared s, const pf_item &x, const pf_share &share, fkv_u32 team) {
    if (share.member + 1 >= x.group_end) return false;
    fkv_mbarrier_wait(s, pf_mbarrier(PF_TO_SHARE_FULL, 0), 0);
    pf_wait_for_slot(s, share, share.member, team);
    return true;
}

/* The next two functions unpack this page, one function for each unpacking warpgroup. Both warpgroups take part, because other
 * blocks wait for the page. */
FKV_FN void pf_share_first_keys(fkv_shared s, const pf_item &x, const pf_key_share &own) {
    pf_share share = pf_share_of(x);
    if (!pf_begin_first_page(s, x, share, 2)) return;
    pf_share_keys(s, share, share.member, own);
    pf_offer_page(s, x, share, share.member, 4, 256);
}
FKV_FN void pf_share_first_values(fkv_shared s, const pf_item &x, const pf_value_share &own) {
    pf_share share = pf_share_of(x);
    if (!pf_begin_first_page(s, x, share, 3)) return;
    pf_share_values(s, share, share.member, own);
    pf_offer_page(s, x, share, share.member, 4, 256);
}

/* Unpacks this block's other pages for the group: page i * n_members + member in the i-th turn. Called by the
 * warpgroup that unpacks keys. */
FKV_FN void pf_share_later_pages(fkv_shared s, const pf_item &x, const pf_key_share &keys) {
    pf_share share = pf_share_of(x);
    pf_value_share values = pf_values_of(s);
    fkv_u32 turn = 1;
    for (fkv_u32 j = share.member + share.n_members; j + 1 < x.group_end; j += share.n_members, turn++) {
        fkv_mbarrier_wait(s, pf_mbarrier(PF_TO_SHARE_FULL, 0), turn % 2);
        pf_wait_for_slot(s, share, j, 2);
        pf_share_keys(s, share, j, keys);
        pf_share_values(s, share, j, values);
        pf_offer_page(s, x, share, j, 2, 128);
    }
}

FKV_FN fkv_image pf_open_image(const pf_share &share, fkv_u32 o) { return {share.open_images + o * PF_OPEN_BYTES}; }

/* Starts the bulk copy of an open page to the buffer of a packed tile. Called by one thread. */
FKV_FN void pf_load_open_page(fkv_shared s, const pf_item &x, fkv_u32 page, int packed) {
    fkv_u32 mbarrier = pf_mbarrier(PF_PACKED_FULL, packed);
    fkv_bulk_copy_begin(s, mbarrier, FKV_OPEN_BLOCK_BYTES);
    fkv_bulk_copy(s, mbarrier, (fkv_u32)(PF_AT_PACKED + packed * PF_PACKED_BYTES),
                  x.open + (fkv_u64)pf_open_page_at(x, page) * (FKV_G * (fkv_u64)FKV_OPEN_BLOCK_BYTES), FKV_OPEN_BLOCK_BYTES);
    fkv_bulk_copy_end(s, mbarrier);
}

/* Unpacks open pages for the group into their images. Each packed page is first copied to the buffer of the second packed tile.
 * The keys of the group's o-th open page are unpacked by member 2 * o % n_members, and the values by the next member. Called by
 * the warpgroup that unpacks keys. */
FKV_FN void pf_share_open_pages(fkv_shared s, const pf_item &x) {
    pf_share share = pf_share_of(x);
    fkv_u32 n = 2 * (x.open_end - x.open_begin), phase = 0;
    for (fkv_u32 i = share.member; i < n; i += share.n_members, phase ^= 1) {
        fkv_image to = pf_open_image(share, i / 2);
        if (s.index == 0) pf_load_open_page(s, x, x.open_begin + i / 2, 1);
        fkv_sync_warp();
        pf_wait_for_slot(s, share, 0, 2);
        if (i % 2 != 0) {
            pf_put_open_unit(s, to, PF_OPEN_UNIT);
            if (s.index < PF_KEYS / 4) fkv_put4(to, PF_OPEN_BAD + s.index * 4, 0);
            fkv_sync_team(2, 128); /* PF_OPEN_BAD must be cleared before tokens are marked */
        }
        fkv_mbarrier_wait(s, pf_mbarrier(PF_PACKED_FULL, 1), phase);
        if (i % 2 == 0)
            pf_put_open_keys<PF_KEYS>(s, to, 0, PF_OPEN_LOW, 1);
        else
            pf_put_open_values(s, to, PF_OPEN_V, 1, [=](fkv_u32 token) { fkv_mark(to.base + PF_OPEN_BAD + token); });
        fkv_publish_image();
        fkv_sync_warp();
        fkv_sync_team(2, 128);
        if (s.index == 0) fkv_store_release((i % 2 == 0 ? share.open_ready[0] : share.open_ready[1]) + i / 2, share.tag + 1);
    }
}

/* The next four functions move shared pages from the ring and the open images in device memory to the stages in shared memory.
 * One warp polls for pages, and three threads of other warps load keys, load values and release pages, so that only the polling
 * warp waits for loads from device memory. */
FKV_FN void pf_watch_shared_pages(fkv_shared s, const pf_item &x) {
    pf_share share = pf_share_of(x);
    fkv_u32 lane = s.index % 32;
    /* Even if the block does not need all of the last four sealed pages, it waits for all of them, so that their offsets, which
     * are stored together, are not copied while they are written. */
    for (fkv_u32 first = 0; first + 1 < x.shared_end; first += PF_FOUR) {
        fkv_u32 j = first + lane, end = first + PF_FOUR < x.group_end - 1 ? first + PF_FOUR : x.group_end - 1;
        fkv_wait_for_words(j < end, share.ready + j % PF_SLOTS, share.tag + j + 1);
        if (lane != 0) continue;
        fkv_acquire_image();
        fkv_store_release_shared(s, PF_AT_READY, end < x.shared_end ? end : x.shared_end - 1);
    }
    fkv_u32 open = x.shared_end - x.open_begin, n_open = x.n_tiles - x.shared_end;
    fkv_wait_for_words(lane < 2 * n_open, (lane % 2 == 0 ? share.open_ready[0] : share.open_ready[1]) + open + lane / 2,
                       share.tag + 1);
    if (lane == 0) {
        fkv_acquire_image();
        fkv_store_release_shared(s, PF_AT_READY, x.n_tiles - 1);
    }
    for (fkv_u32 i = lane; i < n_open * (PF_KEYS / 4); i += 32) {
        fkv_u8 *bad = pf_open_image(share, open + i / (PF_KEYS / 4)).base + PF_OPEN_BAD + i % (PF_KEYS / 4) * 4;
        fkv_u32 word = fkv_load_relaxed((fkv_u32 *)bad);
        for (fkv_u32 n = 0; n < 4; n++)
            if ((word >> 8 * n & 1u) != 0) pf_mark_rows(s, x.shared_end * FKV_PAGE_TOKENS + i * 4 + n);
    }
}

/* The last value stored also releases the pages that this block does not read, so that no other member has to wait until this
 * block ends. */
FKV_FN void pf_release_shared_pages(fkv_shared s, const pf_item &x) {
    pf_share share = pf_share_of(x);
    for (fkv_u32 j = 1; j < x.shared_end; j++) {
        fkv_wait_at_least_shared<400>(s, PF_AT_THROUGH, j);
        fkv_store_release(share.through + share.member, share.tag + (j + 1 < x.shared_end ? j : PF_ALL_RELEASED));
    }
}

/* Copies the keys of all tiles except the first to the stages. Called by one thread. For each tile, this thread arrives at the
 * mbarrier on behalf of the four warps that would otherwise unpack the tile; fkv_bulk_copy_begin() is one of the four arrivals.
 */
FKV_FN void pf_load_shared_keys(fkv_shared s, const pf_item &x) {
    pf_share share = pf_share_of(x);
    for (fkv_u32 tile = 1; tile < x.n_tiles; tile++) {
        fkv_u32 stage = tile % PF_STAGES, mbarrier = pf_mbarrier(PF_FULL, (int)stage), at = PF_AT_K + stage * PF_K_BYTES;
        bool open = tile >= x.shared_end, offsets = !open && tile % PF_FOUR == 1;
        const fkv_u8 *image = open ? pf_open_image(share, tile - x.open_begin).base : pf_image(share, tile - 1).base;
        fkv_wait_at_least_shared<50>(s, PF_AT_READY, tile);
        fkv_mbarrier_wait(s, pf_mbarrier(PF_K_EMPTY, (int)stage), tile / PF_STAGES % 2 ^ 1);
        const fkv_u32 more_bytes = open ? PF_TILE_BYTES : PF_THIRD_BYTES; /* low-order parts or third digits */
        if (more_bytes != 0 && tile >= PF_LOWS) pf_wait_for_low_parts(s, tile);
        fkv_bulk_copy_begin(s, mbarrier, (offsets ? PF_K_BYTES : PF_TILE_BYTES) + more_bytes + sizeof(pf_page_unit));
        for (fkv_u32 half = 0; half < PF_DP / 64; half++)
            fkv_bulk_copy(s, mbarrier, at + half * (PF_K_ROWS * 128), image + half * ((open ? PF_KEYS : PF_K_ROWS) * 128),
                          (offsets ? PF_K_ROWS : PF_KEYS) * 128);
        if (more_bytes != 0)
            fkv_bulk_copy(s, mbarrier, pf_low_at(tile), image + (open ? PF_OPEN_LOW : PF_IMAGE_THIRD), more_bytes);
        fkv_bulk_copy(s, mbarrier, pf_unit_at(tile), image + (open ? PF_OPEN_UNIT : PF_IMAGE_UNIT), sizeof(pf_page_unit));
        fkv_bulk_copy_end(s, mbarrier);
        fkv_mbarrier_arrive_n(s, mbarrier, 3);
    }
    int stage = (int)(x.n_tiles % PF_STAGES);
    fkv_mbarrier_wait(s, pf_mbarrier(PF_K_EMPTY, stage), x.n_tiles / PF_STAGES % 2 ^ 1);
    fkv_mbarrier_arrive_n(s, pf_mbarrier(PF_FULL, stage),
                          4); /* on behalf of the warps that would publish the values of the last tile */
}

FKV_FN void pf_load_shared_values(fkv_shared s, const pf_item &x) {
    pf_share share = pf_share_of(x);
    for (fkv_u32 tile = 1; tile < x.n_tiles; tile++) {
        fkv_u32 stage = tile % PF_STAGES, next = pf_mbarrier(PF_FULL, (int)((tile + 1) % PF_STAGES));
        const fkv_u8 *values = tile >= x.shared_end ? pf_open_image(share, tile - x.open_begin).base + PF_OPEN_V
                                                    : pf_image(share, tile - 1).base + PF_K_BYTES;
        fkv_wait_at_least_shared<50>(s, PF_AT_READY, tile);
        fkv_mbarrier_wait(s, pf_mbarrier(PF_V_EMPTY, (int)stage), tile / PF_STAGES % 2 ^ 1);
        /* wait for the keys of the first tile: the next arrival is on the same mbarrier, and must not be counted in its first
         * phase */
        if (tile + 1 == PF_STAGES) fkv_mbarrier_wait(s, next, 0);
        fkv_bulk_copy_begin(s, next, PF_TILE_BYTES);
        fkv_bulk_copy(s, next, (fkv_u32)PF_AT_V + stage * PF_TILE_BYTES, values, PF_TILE_BYTES);
        fkv_bulk_copy_end(s, next);
        fkv_mbarrier_arrive_n(s, next, 3);
        if (tile > PF_STAGES)
            fkv_store_release_shared(s, PF_AT_THROUGH,
                                     tile - PF_STAGES); /* the matrix products of the stage's previous tile are complete */
    }
    for (fkv_u32 tile = x.n_tiles; tile < x.shared_end + PF_STAGES; tile++) { /* wait for the last shared tiles */
        fkv_mbarrier_wait(s, pf_mbarrier(PF_V_EMPTY, (int)(tile % PF_STAGES)), tile / PF_STAGES % 2 ^ 1);
        fkv_store_release_shared(s, PF_AT_THROUGH, tile - PF_STAGES);
    }
}

/* Waits for the previous group on the ring, marks this block as finished with the ring, and increments the number of such blocks.
 * Called by both unpacking warpgroups after their last tile. The matrix products of the last tiles are then still running, which
 * hides the latency of this function. */
FKV_FN void pf_release_ring(fkv_shared s, const pf_item &x) {
    if (!PF_SHARES) return;
    fkv_sync_warp();
    fkv_sync_team(4, 256);
    if (s.index != 0) return;
    if (pf_may_share(x.table)) {
        /* The bulk copies of the last tiles may still be reading the open images. All earlier copies are complete. */
        for (fkv_u32 i = 0; i < PF_STAGES && x.shared_end > 1; i++) {
            fkv_u32 tile = x.n_tiles - i;
            fkv_mbarrier_wait(s, pf_mbarrier(PF_FULL, (int)(tile % PF_STAGES)), tile / PF_STAGES % 2);
        }
        pf_share share = pf_share_of(x);
        for (fkv_u32 i = 0; i < share.n_before; i++) fkv_wait_at_least(share.through + i, share.tag - 1);
        fkv_store_release(share.through + share.member, share.tag + PF_ENDED);
    }
    fkv_u32 n_blocks = x.table[FKV_STEP_N_TILES] * FKV_G;
    *(fkv_u32 *)(s.base + PF_AT_NUMBER) = fkv_fetch_increment((fkv_u32 *)x.ring + PF_ENDED_AT) + 1 == n_blocks;
}

/* Resets the control words in device memory if this block is the last one to release the ring. Called by all threads when the
 * block ends. */
FKV_FN void pf_reset_ring(fkv_shared s, const pf_item &x) {
    if (!PF_SHARES) return;
    fkv_u32 *words = (fkv_u32 *)x.ring;
    fkv_sync();
    if (fkv_get4(s, PF_AT_NUMBER) == 0) return;
    fkv_u32 backoff = fkv_load_acquire(words + PF_BACKOFF_AT);
    fkv_sync();
    fkv_u32 end = pf_may_share(x.table) ? PF_DECISIONS_AT + pf_groups(x.table[FKV_STEP_N_TILES]) * FKV_G : PF_BACKOFF_AT + 1;
    for (fkv_u32 i = s.index; i < end; i += PF_THREADS) words[i] = i == PF_BACKOFF_AT && backoff > 0 ? backoff - 1 : 0;
}
#endif
