/* The words of a step table: what a step's kernels know of its sequences. Filled on the host once per step and layer kind
 * (step_table.c), read by every kernel of the step, one upload. Plain defines: this text is also part of the kernels' text.
 *
 * A table is uint32 words: a header of FKV_STEP_HEADER words, then the sections the header points at (offsets in words).
 *
 * - rows: one sequence's share of the step each, FKV_ROW_WORDS.
 * - slots: one word for each token of the step, in the order of the rows: page * page_tokens + slot, where it is written.
 * - items, for decode: up to FKV_ITEM_QUERIES consecutive queries of one row that cut their history alike, FKV_ITEM_WORDS.
 * - pieces, for decode: the pieces of the items, one after the other, FKV_PIECE_WORDS. They lie directly behind the header and
 *   hold all that a block needs to begin: on a device each load that waits for another costs half a microsecond.
 * - tiles, for prefill: consecutive queries of one row, FKV_TILE_WORDS.
 * - seals: pages of a sealed layer that the step fills, FKV_SEAL_WORDS: sealed before anybody attends.
 * - pages: the page tables of all rows; FKV_ROW_PAGES and FKV_PIECE_PAGES point here.
 *
 * A sealed layer has two pools. Slots are those of the open one; a piece lies in one of them (FKV_PIECE_OPEN) and has the page
 * table of that: the first page, and the pages of the span that the item's queries are in, are pieces of their own. Tiles of
 * queries do not go over the end of a page.
 *
 * A query sees pages [0, sink pages) and [its window's first page, its own page]; the k-th page it sees is k while k is a sink
 * page and FKV_PIECE_SKIPPED + k after them. A piece is a stretch of the pages seen, from FKV_PIECE_FIRST_SEEN on; all pieces of
 * an item but the last have as many (fkv_step_piece_pages). All of it depends on the query's position and the layer's shape, on
 * nothing else.
 */
#ifndef FKV_STEP_WORDS_H
#define FKV_STEP_WORDS_H

/* header */
#define FKV_STEP_N_ROWS 0
#define FKV_STEP_N_TOKENS 1 /* T, of all rows */
#define FKV_STEP_N_ITEMS 2
#define FKV_STEP_N_PIECES 3
#define FKV_STEP_N_TILES 4
#define FKV_STEP_ITEM_QUERIES 5 /* the most queries that one item of this table has */
#define FKV_STEP_ROWS 6         /* offsets of the sections */
#define FKV_STEP_SLOTS 7
#define FKV_STEP_ITEMS 8
#define FKV_STEP_PIECES 9
#define FKV_STEP_TILES 10
#define FKV_STEP_PAGES 11
#define FKV_STEP_N_SEALS 12
#define FKV_STEP_SEALS 13
#define FKV_STEP_HEADER 16

/* a row */
#define FKV_ROW_START 0       /* position of its first new token */
#define FKV_ROW_N_TOKENS 1    /* new */
#define FKV_ROW_FIRST_TOKEN 2 /* of the step's T */
#define FKV_ROW_PAGES 3       /* offset of its page table in words; see src/base/page_view.h */
#define FKV_ROW_N_FIXED 4
#define FKV_ROW_N_RING 5
#define FKV_ROW_OPEN_PAGES 6 /* the same of the open pages of a sealed layer */
#define FKV_ROW_OPEN_FIXED 7
#define FKV_ROW_OPEN_RING 8
#define FKV_ROW_WORDS 12

/* a decode item */
#define FKV_ITEM_FIRST_TOKEN 0 /* of the step's T: its first query */
#define FKV_ITEM_N_QUERIES 1
#define FKV_ITEM_FIRST_PIECE 2
#define FKV_ITEM_N_PIECES 3
#define FKV_ITEM_WORDS 4

/* a piece of a decode item */
#define FKV_PIECE_FIRST_TOKEN 0 /* as the item's */
#define FKV_PIECE_N_QUERIES 1
#define FKV_PIECE_POSITION 2   /* of the first query */
#define FKV_PIECE_FIRST_SEEN 3 /* its first page, counted over the pages seen */
#define FKV_PIECE_N_TOKENS 4   /* from there to its end, or to the last query */
#define FKV_PIECE_SKIPPED 5    /* pages between the sink pages and the window's first */
#define FKV_PIECE_PAGES 6      /* as the row's */
#define FKV_PIECE_N_FIXED 7
#define FKV_PIECE_N_RING 8
#define FKV_PIECE_OPEN 9 /* 1: of a sealed layer, in its open pool */
#define FKV_PIECE_WORDS 12

/* a prefill tile */
#define FKV_TILE_ROW 0
#define FKV_TILE_FIRST_TOKEN 1
#define FKV_TILE_POSITION 2
#define FKV_TILE_N_QUERIES 3
#define FKV_TILE_WORDS 4

/* a page to seal */
#define FKV_SEAL_FROM 0 /* page of the open pool */
#define FKV_SEAL_TO 1   /* page of the layer's own */
#define FKV_SEAL_WORDS 2

/* Rows of at most this many tokens are decode items; longer ones are prefill tiles. */
#define FKV_ITEM_QUERIES 8

#endif
