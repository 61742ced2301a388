/* Checks how many rows of a step fkv_attn_write() reads. parity_attn checks the results of attention. */
#include "../src/attn/attn.h"
#include "attn_cases.h"
#include "test.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Maps an array of rows that are all zero, so they have no tokens. A memory page of the array becomes resident when it is first
 * read, which shows which rows were read. */
static fkv_attn_row *unread_rows(size_t bytes) {
    void *rows = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(rows, MAP_FAILED);
    return rows;
}

static size_t resident_pages(void *rows, size_t bytes, size_t page_bytes) {
    size_t n_pages = bytes / page_bytes;
    unsigned char *resident = calloc(n_pages, 1);
    ck_assert_ptr_nonnull(resident);
    ck_assert_int_eq(mincore(rows, bytes, (void *)resident), 0);
    size_t n = 0;
    for (size_t i = 0; i < n_pages; i++) n += resident[i] & 1;
    free(resident);
    return n;
}

/* A step with many rows must find the row of each token without scanning all rows. */
START_TEST(write_reads_only_some_of_many_rows) {
    enum { N_TOKENS = 24, DIM = 32 };
    attn_case c = {.shape = {1, 1, DIM}, .codec = 8, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 1};
    c.rows[0] = (attn_mix){0, N_TOKENS};
    void *place = calloc(1, fkv_workers_bytes(1));
    fkv_workers *workers;
    ck_ok(fkv_workers_open(place, 1, &workers));
    attn_fixture w;
    ck_assert(attn_fixture_open_keeping(&w, &c, fkv_cpu_kernels_for(FKV_ISA_AUTO), workers, 3));
    uint8_t *written = malloc(w.layer.block.bytes);
    memcpy(written, w.pages, w.layer.block.bytes);
    memset(w.pages, 0xff, w.layer.block.bytes);

    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    uint32_t n_rows = 1 << 21;
    size_t bytes = fkv_align_up(n_rows * sizeof(fkv_attn_row), page_bytes);
    fkv_attn_row *rows = unread_rows(bytes);
    rows[n_rows - 1] = w.rows[0];
    fkv_attn_write(fkv_cpu_kernels_for(FKV_ISA_AUTO), &w.layer, rows, n_rows, w.k[0], w.v[0], workers);
    ck_assert_mem_eq(w.pages, written, w.layer.block.bytes);
    size_t n_looked_at = resident_pages(rows, bytes, page_bytes);
    ck_assert_uint_gt(n_looked_at, 0);
    ck_assert_msg(n_looked_at < bytes / page_bytes / 2, "%zu of %zu pages of rows were read", n_looked_at, bytes / page_bytes);

    munmap(rows, bytes);
    free(written);
    attn_fixture_close(&w);
    fkv_workers_close(workers);
    free(place);
}
END_TEST

TEST_MAIN("attn", write_reads_only_some_of_many_rows)
