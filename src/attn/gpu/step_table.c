/* Plans one step for the device: groups queries into work items and divides each history into splits. The code uses only integer
 * arithmetic and allocates no memory.
 *
 * The result of a query must not depend on batching. Therefore, the visible pages, the skipped pages and the split size depend
 * only on the query position and the plan. Queries are grouped into one item only if their visible pages, skipped pages and split
 * sizes are equal, so grouping never changes a result.
 */
#include "step_table.h"

#include "kernel_source.h"

enum {
    SMALLEST_SPLIT = 256, /* minimum split size in tokens, so that each warp has several tiles */
    FULL_DEVICE = 131072, /* history length, in tokens, at which a single sequence fills the device */
    MULTIPROCESSORS = 132,
    LATENT_SPLIT = 128,    /* minimum split size of latent layers in decode */
    LATENT_DEVICE = 32768, /* history length at which a single sequence of a latent layer fills the device */
    PREFILL_SPLIT = 4096,  /* minimum split size, in tokens, of latent layers in prefill */
    MERGED_VALUES = 64,    /* maximum number of partial results per thread if the decode kernel merges its splits */
    PREFILL_SPLITS = 4 /* maximum number of splits of latent layers in prefill, which bounds the size of the partial results */
};

fkv_step_plan fkv_step_plan_of(const fkv_attn_layer *layer, uint32_t tile_queries) {
    uint32_t rows = fkv_decode_rows(FKV_KERNEL_CUDA, layer, 1);
    uint32_t blocks = MULTIPROCESSORS * fkv_decode_blocks(layer, rows);
    uint32_t chunks = fkv_ceil_div(layer->n_q_heads / layer->n_kv_heads, rows); /* number of blocks per split and KV head */
    /* number of splits per KV head that run at the same time; in a sealed layer, two of them read open pages */
    uint32_t per_kv = fkv_max_u32(1, blocks / (layer->n_kv_heads * chunks));
    return (fkv_step_plan){.page_tokens = layer->block.page_tokens,
                           .window = layer->window,
                           .n_sinks = layer->window != 0 ? layer->n_sinks : 0,
                           .heads_per_kv = layer->n_q_heads / layer->n_kv_heads,
                           .blocks_per_kv = per_kv > 2 && layer->sealed ? per_kv - 2 : per_kv,
                           .tile_queries = tile_queries,
                           .sealed = layer->sealed,
                           .latent = layer->rope_dim != 0,
                           .items_only = layer->rope_dim != 0 && !fkv_prefill_has_warpgroups(layer)};
}

/* Returns the largest n with n * n <= x. */
static uint32_t integer_sqrt(uint64_t x) {
    uint32_t root = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1)
        if ((uint64_t)(root | bit) * (root | bit) <= x) root |= bit;
    return root;
}

/* The number of splits grows with the square root of the history length. A history of FULL_DEVICE tokens (LATENT_DEVICE tokens in
 * a latent layer) or more has blocks_per_kv splits, and a history of a quarter of this length has half as many. A single long
 * history therefore fills the device in one wave, and a batch of short histories does not produce more partial results than
 * necessary. */
uint32_t fkv_step_split_pages(const fkv_step_plan *plan, uint32_t n_visible, bool decode) {
    uint64_t tokens = (uint64_t)n_visible * plan->page_tokens;
    if (!decode) {
        const uint32_t n_splits = (uint32_t)(tokens / PREFILL_SPLIT);
        return fkv_ceil_div(n_visible, fkv_max_u32(1, fkv_min_u32(n_splits, PREFILL_SPLITS)));
    }
    const uint32_t full = plan->latent ? LATENT_DEVICE : FULL_DEVICE;
    const uint32_t smallest = plan->latent ? LATENT_SPLIT : SMALLEST_SPLIT;
    uint32_t n_splits = integer_sqrt(tokens * plan->blocks_per_kv * plan->blocks_per_kv / full);
    n_splits = fkv_max_u32(1, fkv_min_u32(n_splits, plan->blocks_per_kv));
    return fkv_max_u32(fkv_ceil_div(n_visible, n_splits), fkv_max_u32(1, smallest / plan->page_tokens));
}

/* Pages that a query attends to. */
typedef struct visible_pages {
    uint32_t n_visible;
    uint32_t skipped;
} visible_pages;

static uint32_t sink_pages(const fkv_step_plan *plan) { return fkv_ceil_div(plan->n_sinks, plan->page_tokens); }

static visible_pages visible_pages_of(const fkv_step_plan *plan, uint32_t position) {
    uint32_t n_pages = position / plan->page_tokens + 1;
    uint32_t sinks = sink_pages(plan);
    uint32_t begin = plan->window != 0 && position + 1 > plan->window ? (position + 1 - plan->window) / plan->page_tokens : 0;
    uint32_t skipped = begin > sinks ? begin - sinks : 0;
    return (visible_pages){n_pages - skipped, skipped};
}

static bool is_decode(const fkv_attn_row *row) { return row->n_tokens <= FKV_ITEM_QUERIES; }

/* Returns the number of consecutive queries, starting at `first`, that form one decode item. */
static uint32_t item_length(const fkv_step_plan *plan, const fkv_attn_row *row, uint32_t first) {
    visible_pages one = visible_pages_of(plan, row->start + first);
    uint32_t n = 1;
    for (; n < FKV_ITEM_QUERIES && first + n < row->n_tokens; n++) {
        visible_pages other = visible_pages_of(plan, row->start + first + n);
        if (other.n_visible != one.n_visible || other.skipped != one.skipped) break;
    }
    return n;
}

/* Returns the number of page-table entries that the queries of a row may read. */
static uint32_t table_pages(const fkv_step_plan *plan, const fkv_attn_row *row, fkv_page_view view) {
    uint32_t n_pages = (row->start + row->n_tokens - 1) / plan->page_tokens + 1;
    return fkv_min_u32(n_pages, view.n_fixed + view.n_ring);
}

/* Current number of entries in each section of the step table. The same functions first count the entries (with words == NULL)
 * and then fill the table. */
typedef struct sections {
    uint32_t n_tokens;
    uint32_t n_items;
    uint32_t n_splits;
    uint32_t n_tiles;
    uint32_t n_seals;
    uint32_t n_pages;
    uint32_t item_queries; /* maximum number of queries over all items */
    uint32_t most_splits;  /* maximum number of splits over all items */
} sections;

/* Ranges of visible pages. The pages of a range are read from the same pool. In a sealed layer, the first range contains only the
 * first page and is read from the open pool. This range is empty if the first page is not visible or is in the query's own span.
 * The second range is read from the layer's own pool. The third range contains the visible pages of the query's own span and is
 * read from the open pool. In other layers, the first and the third range are empty. */
typedef struct page_ranges {
    uint32_t begin[4]; /* range i consists of the visible pages [begin[i], begin[i + 1]) */
    uint32_t pages[3]; /* number of pages per split in each range */
    uint32_t n_splits;
} page_ranges;

/* Returns the number of visible pages before logical page `logical`. */
static uint32_t visible_before(const fkv_step_plan *plan, visible_pages visible, uint32_t logical) {
    uint32_t sinks = sink_pages(plan);
    return logical < sinks ? logical : fkv_max_u32(sinks, logical - fkv_min_u32(logical, visible.skipped));
}

static page_ranges page_ranges_of(const fkv_step_plan *plan, visible_pages visible, bool decode) {
    uint32_t from = fkv_attn_first_open(visible.skipped + visible.n_visible - 1);
    bool first = plan->sealed && from > 0 && (visible.skipped == 0 || plan->n_sinks > 0);
    uint32_t own = plan->sealed ? visible_before(plan, visible, from) : visible.n_visible;
    page_ranges s = {.begin = {0, first ? 1 : 0, own, visible.n_visible}};
    for (int i = 0; i < 3; i++) {
        uint32_t n = s.begin[i + 1] - s.begin[i];
        s.pages[i] = i == 1 ? fkv_step_split_pages(plan, visible.n_visible, decode) : FKV_OPEN_SPAN;
        s.n_splits += fkv_ceil_div(n, s.pages[i]);
    }
    return s;
}

/* Writes the table entries of one item's splits. The entry of the item's row must already be filled. */
static void write_splits(const fkv_step_plan *plan, const fkv_attn_row *row, uint32_t r, uint32_t first, uint32_t n,
                         const sections *s, uint32_t *words) {
    visible_pages visible = visible_pages_of(plan, row->start + first);
    page_ranges parts = page_ranges_of(plan, visible, is_decode(row));
    uint32_t last = (row->start + first + n - 1) % plan->page_tokens; /* slot of the last query's token in its page */
    uint32_t n_tokens = (visible.n_visible - 1) * plan->page_tokens + last + 1;
    const uint32_t *of_row = words + words[FKV_STEP_ROWS] + (size_t)r * FKV_ROW_WORDS;
    uint32_t *split = words + words[FKV_STEP_SPLITS] + (size_t)s->n_splits * FKV_SPLIT_WORDS;
    for (int i = 0; i < 3; i++) {
        bool open = i != 1;
        for (uint32_t page = parts.begin[i]; page < parts.begin[i + 1]; page += parts.pages[i], split += FKV_SPLIT_WORDS) {
            uint32_t pages = fkv_min_u32(parts.pages[i], parts.begin[i + 1] - page);
            memset(split, 0, FKV_SPLIT_WORDS * sizeof *split);
            split[FKV_SPLIT_FIRST_TOKEN] = s->n_tokens + first;
            split[FKV_SPLIT_N_QUERIES] = n;
            split[FKV_SPLIT_POSITION] = row->start + first;
            split[FKV_SPLIT_FIRST_VISIBLE] = page;
            split[FKV_SPLIT_N_TOKENS] = fkv_min_u32(pages * plan->page_tokens, n_tokens - page * plan->page_tokens);
            split[FKV_SPLIT_SKIPPED] = visible.skipped;
            split[FKV_SPLIT_PAGES] = of_row[open ? FKV_ROW_OPEN_PAGES : FKV_ROW_PAGES];
            split[FKV_SPLIT_N_FIXED] = of_row[open ? FKV_ROW_OPEN_FIXED : FKV_ROW_N_FIXED];
            split[FKV_SPLIT_N_RING] = of_row[open ? FKV_ROW_OPEN_RING : FKV_ROW_N_RING];
            split[FKV_SPLIT_OPEN] = open;
            split[FKV_SPLIT_FIRST_SPLIT] = s->n_splits;
            split[FKV_SPLIT_N_SPLITS] = parts.n_splits;
            for (uint32_t k = 0; k < fkv_min_u32(pages, FKV_N_FIRST_PAGES); k++) {
                const uint32_t logical = page + k < sink_pages(plan) ? page + k : visible.skipped + page + k;
                split[FKV_SPLIT_FIRST_PAGES + k] = fkv_page_at(open ? row->open : row->view, logical);
            }
        }
    }
}

static void write_item(const fkv_step_plan *plan, const fkv_attn_row *row, uint32_t r, uint32_t first, uint32_t n, sections *s,
                       uint32_t *words) {
    uint32_t n_splits = page_ranges_of(plan, visible_pages_of(plan, row->start + first), is_decode(row)).n_splits;
    if (words != NULL) {
        uint32_t *item = words + words[FKV_STEP_ITEMS] + (size_t)s->n_items * FKV_ITEM_WORDS;
        item[FKV_ITEM_FIRST_TOKEN] = s->n_tokens + first;
        item[FKV_ITEM_N_QUERIES] = n;
        item[FKV_ITEM_FIRST_SPLIT] = s->n_splits;
        item[FKV_ITEM_N_SPLITS] = n_splits;
        write_splits(plan, row, r, first, n, s, words);
    }
    s->n_items++;
    s->n_splits += n_splits;
    s->item_queries = fkv_max_u32(s->item_queries, n);
    s->most_splits = fkv_max_u32(s->most_splits, n_splits);
}

/* Writes the table entry of one tile. The entry of the tile's row must already be filled. */
static void write_tile(const fkv_attn_row *row, uint32_t r, uint32_t first, uint32_t n, sections *s, uint32_t *words) {
    if (words != NULL) {
        const uint32_t *of_row = words + words[FKV_STEP_ROWS] + (size_t)r * FKV_ROW_WORDS;
        uint32_t *tile = words + words[FKV_STEP_TILES] + (size_t)s->n_tiles * FKV_TILE_WORDS;
        tile[FKV_TILE_ROW] = r;
        tile[FKV_TILE_FIRST_TOKEN] = s->n_tokens + first;
        tile[FKV_TILE_POSITION] = row->start + first;
        tile[FKV_TILE_N_QUERIES] = n;
        memcpy(tile + FKV_TILE_PAGES, of_row + FKV_ROW_PAGES, (FKV_ROW_OPEN_RING - FKV_ROW_PAGES + 1) * sizeof *tile);
    }
    s->n_tiles++;
}

/* Adds the pages that the new tokens of this row fill to the list of pages to seal. The pages on this list are sealed before any
 * query reads them in sealed form. */
static void write_seals(const fkv_step_plan *plan, const fkv_attn_row *row, sections *s, uint32_t *words) {
    if (!plan->sealed) return;
    uint32_t first = fkv_attn_first_to_seal(row, plan->page_tokens);
    uint32_t n = fkv_attn_n_to_seal(row, plan->page_tokens);
    for (uint32_t i = 0; words != NULL && i < n; i++) {
        uint32_t *seal = words + words[FKV_STEP_SEALS] + (size_t)(s->n_seals + i) * FKV_SEAL_WORDS;
        seal[FKV_SEAL_FROM] = fkv_page_at(row->open, first + i);
        seal[FKV_SEAL_TO] = fkv_page_at(row->view, first + i);
    }
    s->n_seals += n;
}

/* Writes the page tables of a row, and the slots to which the new tokens of the row are written. */
static void write_row_entry(const fkv_step_plan *plan, const fkv_attn_row *row, uint32_t r, const sections *s, uint32_t *words) {
    uint32_t pages = table_pages(plan, row, row->view);
    uint32_t *to = words + words[FKV_STEP_ROWS] + (size_t)r * FKV_ROW_WORDS;
    fkv_page_view written = plan->sealed ? row->open : row->view;
    memset(to, 0, FKV_ROW_WORDS * sizeof *to);
    to[FKV_ROW_START] = row->start;
    to[FKV_ROW_N_TOKENS] = row->n_tokens;
    to[FKV_ROW_FIRST_TOKEN] = s->n_tokens;
    to[FKV_ROW_PAGES] = words[FKV_STEP_PAGES] + s->n_pages;
    to[FKV_ROW_N_FIXED] = row->view.n_fixed;
    to[FKV_ROW_N_RING] = row->view.n_ring;
    memcpy(words + to[FKV_ROW_PAGES], row->view.pages, pages * sizeof *words);
    if (plan->sealed) {
        to[FKV_ROW_OPEN_PAGES] = to[FKV_ROW_PAGES] + pages;
        to[FKV_ROW_OPEN_FIXED] = row->open.n_fixed;
        to[FKV_ROW_OPEN_RING] = row->open.n_ring;
        memcpy(words + to[FKV_ROW_OPEN_PAGES], row->open.pages, table_pages(plan, row, row->open) * sizeof *words);
    }
    for (uint32_t i = 0; i < row->n_tokens; i++) {
        uint32_t position = row->start + i;
        uint32_t page = fkv_page_at(written, position / plan->page_tokens);
        words[words[FKV_STEP_SLOTS] + s->n_tokens + i] = page * plan->page_tokens + position % plan->page_tokens;
    }
}

static void add_row_sections(const fkv_step_plan *plan, const fkv_attn_row *row, uint32_t r, sections *s, uint32_t *words) {
    if (words != NULL) write_row_entry(plan, row, r, s, words);
    for (uint32_t first = 0; first < row->n_tokens;) {
        uint32_t n = fkv_min_u32(plan->tile_queries, row->n_tokens - first);
        if (is_decode(row) || plan->items_only) {
            n = item_length(plan, row, first);
            write_item(plan, row, r, first, n, s, words);
        } else {
            if (plan->sealed) n = fkv_min_u32(n, plan->page_tokens - (row->start + first) % plan->page_tokens);
            write_tile(row, r, first, n, s, words);
        }
        first += n;
    }
    write_seals(plan, row, s, words);
    s->n_tokens += row->n_tokens;
    s->n_pages += table_pages(plan, row, row->view) + (plan->sealed ? table_pages(plan, row, row->open) : 0);
}

static sections count_sections(const fkv_step_plan *plan, const fkv_attn_row *rows, uint32_t n_rows) {
    sections s = {0};
    for (uint32_t r = 0; r < n_rows; r++) add_row_sections(plan, &rows[r], r, &s, NULL);
    return s;
}

uint32_t fkv_step_table_words(const fkv_step_plan *plan, const fkv_attn_row *rows, uint32_t n_rows) {
    sections s = count_sections(plan, rows, n_rows);
    return FKV_STEP_HEADER + n_rows * FKV_ROW_WORDS + s.n_tokens + s.n_items * FKV_ITEM_WORDS + s.n_splits * FKV_SPLIT_WORDS +
           s.n_tiles * FKV_TILE_WORDS + s.n_seals * FKV_SEAL_WORDS + s.n_pages;
}

void fkv_step_table_fill(const fkv_step_plan *plan, const fkv_attn_row *rows, uint32_t n_rows, uint32_t *words) {
    sections s = count_sections(plan, rows, n_rows);
    memset(words, 0, FKV_STEP_HEADER * sizeof *words);
    words[FKV_STEP_N_ROWS] = n_rows;
    words[FKV_STEP_N_TOKENS] = s.n_tokens;
    words[FKV_STEP_N_ITEMS] = s.n_items;
    words[FKV_STEP_N_SPLITS] = s.n_splits;
    words[FKV_STEP_N_TILES] = s.n_tiles;
    words[FKV_STEP_ITEM_QUERIES] = s.item_queries;
    words[FKV_STEP_MOST_SPLITS] = s.most_splits;
    words[FKV_STEP_SPLITS] = FKV_STEP_HEADER;
    words[FKV_STEP_ROWS] = words[FKV_STEP_SPLITS] + s.n_splits * FKV_SPLIT_WORDS;
    words[FKV_STEP_SLOTS] = words[FKV_STEP_ROWS] + n_rows * FKV_ROW_WORDS;
    words[FKV_STEP_ITEMS] = words[FKV_STEP_SLOTS] + s.n_tokens;
    words[FKV_STEP_TILES] = words[FKV_STEP_ITEMS] + s.n_items * FKV_ITEM_WORDS;
    words[FKV_STEP_N_SEALS] = s.n_seals;
    words[FKV_STEP_SEALS] = words[FKV_STEP_TILES] + s.n_tiles * FKV_TILE_WORDS;
    words[FKV_STEP_PAGES] = words[FKV_STEP_SEALS] + s.n_seals * FKV_SEAL_WORDS;
    s = (sections){0};
    for (uint32_t r = 0; r < n_rows; r++) add_row_sections(plan, &rows[r], r, &s, words);
}

/* Appends word i to the run if `add` equals the number that the run adds, and i continues the run's stride. Otherwise, returns
 * false. */
static bool extend_run(fkv_table_run *run, uint32_t i, uint32_t add) {
    if (run->add != add || (run->count > 1 && i != run->first + run->stride * run->count)) return false;
    if (run->count == 1) run->stride = i - run->first;
    run->count++;
    return true;
}

uint32_t fkv_step_table_changes(const uint32_t *from, const uint32_t *to, uint32_t n, fkv_table_run *runs, uint32_t max_runs) {
    uint32_t n_runs = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t add = to[i] - from[i];
        if (add == 0 || (n_runs > 0 && extend_run(&runs[n_runs - 1], i, add))) continue;
        if (n_runs == max_runs) return max_runs + 1;
        runs[n_runs++] = (fkv_table_run){.first = i, .stride = 1, .count = 1, .add = add};
    }
    return n_runs;
}

uint64_t fkv_step_parts_floats(const fkv_attn_layer *layer, const uint32_t *words) {
    return (uint64_t)words[FKV_STEP_N_SPLITS] * layer->n_q_heads * words[FKV_STEP_ITEM_QUERIES] * (layer->head_dim + 2u);
}

bool fkv_step_merges_in_decode(fkv_kernel_device device, const fkv_attn_layer *layer, const uint32_t *words) {
    if (device == FKV_KERNEL_METAL) return false;
    const uint32_t block_rows = fkv_decode_rows(device, layer, words[FKV_STEP_ITEM_QUERIES]);
    const uint32_t rows = layer->n_q_heads / layer->n_kv_heads * words[FKV_STEP_ITEM_QUERIES];
    const uint64_t n_blocks = (uint64_t)words[FKV_STEP_N_SPLITS] * fkv_ceil_div(rows, block_rows) * layer->n_kv_heads;
    const uint64_t n_values = (uint64_t)words[FKV_STEP_MOST_SPLITS] * fkv_min_u32(rows, block_rows) * layer->head_dim;
    const uint32_t n_threads = fkv_kernel_threads(device, FKV_KERNEL_DECODE_MERGE, layer);
    return n_blocks <= FKV_MERGE_COUNTERS && n_values <= (uint64_t)n_threads * MERGED_VALUES;
}
