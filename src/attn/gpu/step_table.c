/* Plans a step for the device: which queries go together, where each one's history is cut. Pure integers, no memory of its own.
 *
 * Invariant (same answer however it got there): the pages seen, the pages skipped and the pages of a piece are functions of a
 * query's position and the cut alone. Queries share an item only where all three are equal, so an item changes nothing for them.
 */
#include "step_table.h"

#include "kernel_text.h"

enum {
    SMALLEST_PIECE = 256, /* tokens: some tiles for each of the warps that share a piece */
    FULL_DEVICE = 131072, /* tokens from which a history alone fills the device */
    MULTIPROCESSORS = 132
};

fkv_step_cut fkv_step_cut_of(const fkv_attn_layer *layer, uint32_t tile_queries) {
    uint32_t rows = fkv_decode_rows(FKV_KERNEL_CUDA, layer, 1);
    uint32_t blocks = MULTIPROCESSORS * fkv_decode_blocks(layer, rows);
    uint32_t chunks = fkv_ceil_div(layer->n_q_heads / layer->n_kv_heads, rows); /* blocks of a piece */
    uint32_t per_kv = fkv_max_u32(1, blocks / (layer->n_kv_heads * chunks));    /* of which a sealed layer's open pages are two */
    return (fkv_step_cut){.page_tokens = layer->block.page_tokens,
                          .window = layer->window,
                          .n_sinks = layer->window != 0 ? layer->n_sinks : 0,
                          .heads_per_kv = layer->n_q_heads / layer->n_kv_heads,
                          .blocks_per_kv = per_kv > 2 && layer->sealed ? per_kv - 2 : per_kv,
                          .tile_queries = tile_queries,
                          .sealed = layer->sealed};
}

/* The largest n with n * n <= x. */
static uint32_t whole_root(uint64_t x) {
    uint32_t root = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1)
        if ((uint64_t)(root | bit) * (root | bit) <= x) root |= bit;
    return root;
}

/* Pieces grow with the square root of the history: blocks_per_kv of them at FULL_DEVICE tokens and beyond, half of that at a
 * quarter. So one long history fills the device in one wave, and many shorter ones together do not leave more parts behind than
 * they need. */
uint32_t fkv_step_piece_pages(const fkv_step_cut *cut, uint32_t n_seen) {
    uint64_t tokens = (uint64_t)n_seen * cut->page_tokens;
    uint32_t n_pieces = whole_root(tokens * cut->blocks_per_kv * cut->blocks_per_kv / FULL_DEVICE);
    n_pieces = fkv_max_u32(1, fkv_min_u32(n_pieces, cut->blocks_per_kv));
    return fkv_max_u32(fkv_ceil_div(n_seen, n_pieces), fkv_max_u32(1, SMALLEST_PIECE / cut->page_tokens));
}

/* What a query sees, in pages. */
typedef struct sight {
    uint32_t n_seen;
    uint32_t skipped;
} sight;

static sight sight_of(const fkv_step_cut *cut, uint32_t position) {
    uint32_t n_pages = position / cut->page_tokens + 1;
    uint32_t sinks = fkv_ceil_div(cut->n_sinks, cut->page_tokens);
    uint32_t begin = cut->window != 0 && position + 1 > cut->window ? (position + 1 - cut->window) / cut->page_tokens : 0;
    uint32_t skipped = begin > sinks ? begin - sinks : 0;
    return (sight){n_pages - skipped, skipped};
}

static bool is_decode(const fkv_attn_row *row) { return row->n_tokens <= FKV_ITEM_QUERIES; }

/* Queries from `first` on that make one item. */
static uint32_t item_length(const fkv_step_cut *cut, const fkv_attn_row *row, uint32_t first) {
    sight one = sight_of(cut, row->start + first);
    uint32_t n = 1;
    for (; first + n < row->n_tokens; n++) {
        sight other = sight_of(cut, row->start + first + n);
        if (other.n_seen != one.n_seen || other.skipped != one.skipped) break;
    }
    return n;
}

/* Entries of a row's page table that its queries can reach. */
static uint32_t table_pages(const fkv_step_cut *cut, const fkv_attn_row *row, fkv_page_view view) {
    uint32_t n_pages = (row->start + row->n_tokens - 1) / cut->page_tokens + 1;
    return fkv_min_u32(n_pages, view.n_fixed + view.n_ring);
}

/* One walk for counting and filling: words is NULL while the sections are only counted. */
typedef struct sections {
    uint32_t n_tokens;
    uint32_t n_items;
    uint32_t n_pieces;
    uint32_t n_tiles;
    uint32_t n_seals;
    uint32_t n_pages;
    uint32_t item_queries; /* the most of any item */
} sections;

/* Stretches of the pages that a query sees, each walked in one form: the first page open, where it is seen and not of the query's
 * own span; the pages of the layer's own pool; the query's own span open. Of a layer that is not sealed, the second alone. */
typedef struct stretches {
    uint32_t begin[4]; /* in pages seen; stretch i is [begin[i], begin[i + 1]) */
    uint32_t pages[3]; /* of a piece of it */
    uint32_t n_pieces;
} stretches;

/* The pages seen before logical page `logical`. */
static uint32_t seen_before(const fkv_step_cut *cut, sight seen, uint32_t logical) {
    uint32_t sinks = fkv_ceil_div(cut->n_sinks, cut->page_tokens);
    return logical < sinks ? logical : fkv_max_u32(sinks, logical - fkv_min_u32(logical, seen.skipped));
}

static stretches stretches_of(const fkv_step_cut *cut, sight seen) {
    uint32_t from = fkv_attn_first_open(seen.skipped + seen.n_seen - 1);
    bool first = cut->sealed && from > 0 && (seen.skipped == 0 || cut->n_sinks > 0);
    uint32_t own = cut->sealed ? seen_before(cut, seen, from) : seen.n_seen;
    stretches s = {.begin = {0, first ? 1 : 0, own, seen.n_seen}};
    for (int i = 0; i < 3; i++) {
        uint32_t n = s.begin[i + 1] - s.begin[i];
        s.pages[i] = i == 1 ? fkv_step_piece_pages(cut, seen.n_seen) : FKV_OPEN_SPAN;
        s.n_pieces += fkv_ceil_div(n, s.pages[i]);
    }
    return s;
}

/* A row of the table is there already. */
static void put_pieces(const fkv_step_cut *cut, const fkv_attn_row *row, uint32_t r, uint32_t first, uint32_t n,
                       const sections *s, uint32_t *words) {
    sight seen = sight_of(cut, row->start + first);
    stretches parts = stretches_of(cut, seen);
    uint32_t last = (row->start + first + n - 1) % cut->page_tokens; /* slot of the last query */
    uint32_t n_tokens = (seen.n_seen - 1) * cut->page_tokens + last + 1;
    const uint32_t *of_row = words + words[FKV_STEP_ROWS] + (size_t)r * FKV_ROW_WORDS;
    uint32_t *piece = words + words[FKV_STEP_PIECES] + (size_t)s->n_pieces * FKV_PIECE_WORDS;
    for (int i = 0; i < 3; i++) {
        bool open = i != 1;
        for (uint32_t page = parts.begin[i]; page < parts.begin[i + 1]; page += parts.pages[i], piece += FKV_PIECE_WORDS) {
            uint32_t pages = fkv_min_u32(parts.pages[i], parts.begin[i + 1] - page);
            memset(piece, 0, FKV_PIECE_WORDS * sizeof *piece);
            piece[FKV_PIECE_FIRST_TOKEN] = s->n_tokens + first;
            piece[FKV_PIECE_N_QUERIES] = n;
            piece[FKV_PIECE_POSITION] = row->start + first;
            piece[FKV_PIECE_FIRST_SEEN] = page;
            piece[FKV_PIECE_N_TOKENS] = fkv_min_u32(pages * cut->page_tokens, n_tokens - page * cut->page_tokens);
            piece[FKV_PIECE_SKIPPED] = seen.skipped;
            piece[FKV_PIECE_PAGES] = of_row[open ? FKV_ROW_OPEN_PAGES : FKV_ROW_PAGES];
            piece[FKV_PIECE_N_FIXED] = of_row[open ? FKV_ROW_OPEN_FIXED : FKV_ROW_N_FIXED];
            piece[FKV_PIECE_N_RING] = of_row[open ? FKV_ROW_OPEN_RING : FKV_ROW_N_RING];
            piece[FKV_PIECE_OPEN] = open;
        }
    }
}

static void put_item(const fkv_step_cut *cut, const fkv_attn_row *row, uint32_t r, uint32_t first, uint32_t n, sections *s,
                     uint32_t *words) {
    uint32_t n_pieces = stretches_of(cut, sight_of(cut, row->start + first)).n_pieces;
    if (words != NULL) {
        uint32_t *item = words + words[FKV_STEP_ITEMS] + (size_t)s->n_items * FKV_ITEM_WORDS;
        item[FKV_ITEM_FIRST_TOKEN] = s->n_tokens + first;
        item[FKV_ITEM_N_QUERIES] = n;
        item[FKV_ITEM_FIRST_PIECE] = s->n_pieces;
        item[FKV_ITEM_N_PIECES] = n_pieces;
        put_pieces(cut, row, r, first, n, s, words);
    }
    s->n_items++;
    s->n_pieces += n_pieces;
    s->item_queries = fkv_max_u32(s->item_queries, n);
}

static void put_tile(const fkv_attn_row *row, uint32_t r, uint32_t first, uint32_t n, sections *s, uint32_t *words) {
    if (words != NULL) {
        uint32_t *tile = words + words[FKV_STEP_TILES] + (size_t)s->n_tiles * FKV_TILE_WORDS;
        tile[FKV_TILE_ROW] = r;
        tile[FKV_TILE_FIRST_TOKEN] = s->n_tokens + first;
        tile[FKV_TILE_POSITION] = row->start + first;
        tile[FKV_TILE_N_QUERIES] = n;
    }
    s->n_tiles++;
}

/* The pages that a row fills: sealed before they are seen so. */
static void put_seals(const fkv_step_cut *cut, const fkv_attn_row *row, sections *s, uint32_t *words) {
    if (!cut->sealed) return;
    uint32_t first = fkv_attn_first_to_seal(row, cut->page_tokens);
    uint32_t n = fkv_attn_n_to_seal(row, cut->page_tokens);
    for (uint32_t i = 0; words != NULL && i < n; i++) {
        uint32_t *seal = words + words[FKV_STEP_SEALS] + (size_t)(s->n_seals + i) * FKV_SEAL_WORDS;
        seal[FKV_SEAL_FROM] = fkv_page_at(row->open, first + i);
        seal[FKV_SEAL_TO] = fkv_page_at(row->view, first + i);
    }
    s->n_seals += n;
}

/* What the table says of a row itself: its pages, and where its tokens are written. */
static void put_places(const fkv_step_cut *cut, const fkv_attn_row *row, uint32_t r, const sections *s, uint32_t *words) {
    uint32_t pages = table_pages(cut, row, row->view);
    uint32_t *to = words + words[FKV_STEP_ROWS] + (size_t)r * FKV_ROW_WORDS;
    fkv_page_view written = cut->sealed ? row->open : row->view;
    memset(to, 0, FKV_ROW_WORDS * sizeof *to);
    to[FKV_ROW_START] = row->start;
    to[FKV_ROW_N_TOKENS] = row->n_tokens;
    to[FKV_ROW_FIRST_TOKEN] = s->n_tokens;
    to[FKV_ROW_PAGES] = words[FKV_STEP_PAGES] + s->n_pages;
    to[FKV_ROW_N_FIXED] = row->view.n_fixed;
    to[FKV_ROW_N_RING] = row->view.n_ring;
    memcpy(words + to[FKV_ROW_PAGES], row->view.pages, pages * sizeof *words);
    if (cut->sealed) {
        to[FKV_ROW_OPEN_PAGES] = to[FKV_ROW_PAGES] + pages;
        to[FKV_ROW_OPEN_FIXED] = row->open.n_fixed;
        to[FKV_ROW_OPEN_RING] = row->open.n_ring;
        memcpy(words + to[FKV_ROW_OPEN_PAGES], row->open.pages, table_pages(cut, row, row->open) * sizeof *words);
    }
    for (uint32_t i = 0; i < row->n_tokens; i++) {
        uint32_t position = row->start + i;
        uint32_t page = fkv_page_at(written, position / cut->page_tokens);
        words[words[FKV_STEP_SLOTS] + s->n_tokens + i] = page * cut->page_tokens + position % cut->page_tokens;
    }
}

static void put_row(const fkv_step_cut *cut, const fkv_attn_row *row, uint32_t r, sections *s, uint32_t *words) {
    if (words != NULL) put_places(cut, row, r, s, words);
    for (uint32_t first = 0; first < row->n_tokens;) {
        uint32_t n = fkv_min_u32(cut->tile_queries, row->n_tokens - first);
        if (is_decode(row)) {
            n = item_length(cut, row, first);
            put_item(cut, row, r, first, n, s, words);
        } else {
            if (cut->sealed) n = fkv_min_u32(n, cut->page_tokens - (row->start + first) % cut->page_tokens);
            put_tile(row, r, first, n, s, words);
        }
        first += n;
    }
    put_seals(cut, row, s, words);
    s->n_tokens += row->n_tokens;
    s->n_pages += table_pages(cut, row, row->view) + (cut->sealed ? table_pages(cut, row, row->open) : 0);
}

static sections count(const fkv_step_cut *cut, const fkv_attn_row *rows, uint32_t n_rows) {
    sections s = {0};
    for (uint32_t r = 0; r < n_rows; r++) put_row(cut, &rows[r], r, &s, NULL);
    return s;
}

uint32_t fkv_step_table_words(const fkv_step_cut *cut, const fkv_attn_row *rows, uint32_t n_rows) {
    sections s = count(cut, rows, n_rows);
    return FKV_STEP_HEADER + n_rows * FKV_ROW_WORDS + s.n_tokens + s.n_items * FKV_ITEM_WORDS + s.n_pieces * FKV_PIECE_WORDS +
           s.n_tiles * FKV_TILE_WORDS + s.n_seals * FKV_SEAL_WORDS + s.n_pages;
}

void fkv_step_table_fill(const fkv_step_cut *cut, const fkv_attn_row *rows, uint32_t n_rows, uint32_t *words) {
    sections s = count(cut, rows, n_rows);
    memset(words, 0, FKV_STEP_HEADER * sizeof *words);
    words[FKV_STEP_N_ROWS] = n_rows;
    words[FKV_STEP_N_TOKENS] = s.n_tokens;
    words[FKV_STEP_N_ITEMS] = s.n_items;
    words[FKV_STEP_N_PIECES] = s.n_pieces;
    words[FKV_STEP_N_TILES] = s.n_tiles;
    words[FKV_STEP_ITEM_QUERIES] = s.item_queries;
    words[FKV_STEP_PIECES] = FKV_STEP_HEADER;
    words[FKV_STEP_ROWS] = words[FKV_STEP_PIECES] + s.n_pieces * FKV_PIECE_WORDS;
    words[FKV_STEP_SLOTS] = words[FKV_STEP_ROWS] + n_rows * FKV_ROW_WORDS;
    words[FKV_STEP_ITEMS] = words[FKV_STEP_SLOTS] + s.n_tokens;
    words[FKV_STEP_TILES] = words[FKV_STEP_ITEMS] + s.n_items * FKV_ITEM_WORDS;
    words[FKV_STEP_N_SEALS] = s.n_seals;
    words[FKV_STEP_SEALS] = words[FKV_STEP_TILES] + s.n_tiles * FKV_TILE_WORDS;
    words[FKV_STEP_PAGES] = words[FKV_STEP_SEALS] + s.n_seals * FKV_SEAL_WORDS;
    s = (sections){0};
    for (uint32_t r = 0; r < n_rows; r++) put_row(cut, &rows[r], r, &s, words);
}

uint64_t fkv_step_parts_floats(const fkv_attn_layer *layer, const uint32_t *words) {
    return (uint64_t)words[FKV_STEP_N_PIECES] * layer->n_q_heads * words[FKV_STEP_ITEM_QUERIES] * (layer->head_dim + 2u);
}
