/* Layout of the step table, which specifies the sequences that the kernels of a step process. The host fills and uploads the
 * table once per step and layer kind (step_table.c), and every kernel of the step reads it. This file contains only defines,
 * because the kernel sources include it as well.
 *
 * A table consists of uint32 words: a header of FKV_STEP_HEADER words, then the sections that the header points to (offsets in
 * words).
 *
 * - rows: one entry of FKV_ROW_WORDS words per sequence.
 * - slots: one word per token of the step, in row order. The word is page * page_tokens + slot, where `page` is the pool page and
 *   `slot` the slot in it to which the token's K and V are written.
 * - items, for decode: one entry of FKV_ITEM_WORDS words per item. An item is a group of up to FKV_ITEM_QUERIES consecutive
 *   queries of one row whose histories are split in the same way.
 * - splits, for decode: one entry of FKV_SPLIT_WORDS words per split, in item order. This section follows the header directly. A
 *   split's entry contains everything that a block needs to start, because each dependent load takes about half a microsecond on
 *   a GPU.
 * - tiles, for prefill: one entry of FKV_TILE_WORDS words per tile. A tile consists of consecutive queries of one row. Like a
 *   split's entry, a tile's entry contains a copy of the words that describe the page tables of its row.
 * - seals: one entry of FKV_SEAL_WORDS words per page that this step fills in a sealed layer. These pages are sealed before
 *   attention runs.
 * - pages: the page tables of all rows, referenced by the entries of rows, splits and tiles.
 */
#ifndef FKV_STEP_WORDS_H
#define FKV_STEP_WORDS_H

/* header */
#define FKV_STEP_N_ROWS 0
#define FKV_STEP_N_TOKENS 1 /* T: total number of new tokens in the step */
#define FKV_STEP_N_ITEMS 2
#define FKV_STEP_N_SPLITS 3
#define FKV_STEP_N_TILES 4
#define FKV_STEP_ITEM_QUERIES 5 /* maximum number of queries per decode item in this table */
#define FKV_STEP_ROWS 6         /* this word and the next five are offsets of sections, in words */
#define FKV_STEP_SLOTS 7
#define FKV_STEP_ITEMS 8
#define FKV_STEP_SPLITS 9
#define FKV_STEP_TILES 10
#define FKV_STEP_PAGES 11
#define FKV_STEP_N_SEALS 12
#define FKV_STEP_SEALS 13
#define FKV_STEP_MOST_SPLITS 14 /* maximum number of splits per decode item in this table */
#define FKV_STEP_HEADER 16

/* row */
#define FKV_ROW_START 0       /* position of the first new token */
#define FKV_ROW_N_TOKENS 1    /* number of new tokens */
#define FKV_ROW_FIRST_TOKEN 2 /* index of the first new token among the step's T tokens */
#define FKV_ROW_PAGES 3       /* offset of the sequence's page table, in words; see src/base/page_view.h */
#define FKV_ROW_N_FIXED 4
#define FKV_ROW_N_RING 5
#define FKV_ROW_OPEN_PAGES 6 /* offset of the page table for the open pages of a sealed layer */
#define FKV_ROW_OPEN_FIXED 7
#define FKV_ROW_OPEN_RING 8
#define FKV_ROW_WORDS 12

/* decode item */
#define FKV_ITEM_FIRST_TOKEN 0 /* index of the first query among the step's T tokens */
#define FKV_ITEM_N_QUERIES 1
#define FKV_ITEM_FIRST_SPLIT 2
#define FKV_ITEM_N_SPLITS 3
#define FKV_ITEM_WORDS 4

/* A sealed layer has two pools. The words in the slots section refer to the open pool. Each split reads only one pool
 * (FKV_SPLIT_OPEN) and refers to the page table of that pool. The first page and the pages of the queries' own span, which are
 * read from the open pool, are therefore in separate splits. A prefill tile never crosses a page boundary.
 *
 * A query attends to pages [0, sink pages) and [first page of its window, its own page]. The k-th visible page is logical page k
 * if it is a sink page, and logical page FKV_SPLIT_SKIPPED + k otherwise. A split is a range of visible pages that starts at
 * FKV_SPLIT_FIRST_VISIBLE. It has up to fkv_step_split_pages() pages, or up to FKV_OPEN_SPAN pages if it reads the open pool. The
 * visible pages and their splits depend only on the query position and the layer's shape. */

/* split of a decode item */
#define FKV_SPLIT_FIRST_TOKEN 0 /* copy of the item's FKV_ITEM_FIRST_TOKEN */
#define FKV_SPLIT_N_QUERIES 1
#define FKV_SPLIT_POSITION 2      /* position of the first query */
#define FKV_SPLIT_FIRST_VISIBLE 3 /* index of the split's first page among the pages visible to the query */
#define FKV_SPLIT_N_TOKENS 4      /* number of tokens in the split; the last split ends at the last query */
#define FKV_SPLIT_SKIPPED 5       /* number of pages between the sink pages and the first page of the window */
#define FKV_SPLIT_PAGES 6         /* offset of the page table that the split uses: FKV_ROW_PAGES or FKV_ROW_OPEN_PAGES */
#define FKV_SPLIT_N_FIXED 7
#define FKV_SPLIT_N_RING 8
#define FKV_SPLIT_OPEN 9         /* 1 if the split reads the open pool of a sealed layer */
#define FKV_SPLIT_FIRST_SPLIT 10 /* copy of the item's FKV_ITEM_FIRST_SPLIT */
#define FKV_SPLIT_N_SPLITS 11    /* copy of the item's FKV_ITEM_N_SPLITS */
#define FKV_SPLIT_FIRST_PAGES 12 /* pool page numbers of the first FKV_N_FIRST_PAGES pages; 0 if the split has fewer pages */
#define FKV_SPLIT_WORDS 16
#define FKV_N_FIRST_PAGES 4

/* prefill tile */
#define FKV_TILE_ROW 0
#define FKV_TILE_FIRST_TOKEN 1
#define FKV_TILE_POSITION 2
#define FKV_TILE_N_QUERIES 3
#define FKV_TILE_PAGES 4 /* copies of FKV_ROW_PAGES to FKV_ROW_OPEN_RING */
#define FKV_TILE_N_FIXED 5
#define FKV_TILE_N_RING 6
#define FKV_TILE_OPEN_PAGES 7
#define FKV_TILE_OPEN_FIXED 8
#define FKV_TILE_OPEN_RING 9
#define FKV_TILE_WORDS 10

/* page to seal */
#define FKV_SEAL_FROM 0 /* page in the open pool */
#define FKV_SEAL_TO 1   /* page in the layer's own pool */
#define FKV_SEAL_WORDS 2

/* Rows (sequences) with at most this many new tokens become decode items. Longer rows become prefill tiles or, in a latent layer
 * without a prefill kernel, decode items with larger splits. */
#define FKV_ITEM_QUERIES 8

#endif
