/* Kills saves at random moments with SIGKILL, and runs concurrent saves to one path. The file at this path must always be
 * complete.
 *
 * A child process saves two states alternately to one path, and the parent kills the child after a random delay. The file must
 * pass verification and load, and its content must be one of the two states. The file may be missing only before the first save
 * has finished. A part file left by the child must not affect the next save.
 */
#include "cache_fixture.h"
#include "page_file_fixture.h"
#include "test.h"

#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    KILLS = 240,
    SEALED_KILLS = 40,
    FRESH_START = 12,
    RACE_SAVES = 60,
    TOKENS_A = 50,
    TOKENS_B = 37,
    SEED_A = 21,
    SEED_B = 22
};

typedef struct two_states {
    file_fixture w;
    fkv_seq a;
    fkv_seq b;
} two_states;

static void open_states(two_states *states) {
    file_fixture_open(&states->w, &FILE_FIXTURE_GOOD, 0x99);
    states->a = file_fixture_fill(&states->w, SEED_A, TOKENS_A, TOKENS_A);
    states->b = file_fixture_fill(&states->w, SEED_B, TOKENS_B, TOKENS_B);
}

static fkv_status save_one(const two_states *states, bool a, const char *path) {
    return a ? file_fixture_save(&states->w, states->a, SEED_A, TOKENS_A, path)
             : file_fixture_save(&states->w, states->b, SEED_B, TOKENS_B, path);
}

static void wait_us(uint32_t us) {
    const struct timespec time = {.tv_nsec = (long)us * 1000};
    (void)nanosleep(&time, NULL);
}

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Checks that the file is complete and holds either the old or the new state. */
static void check_whole(two_states *states, const char *path) {
    fkv_file_info info;
    ck_ok(fkv_file_inspect(path, true, &info));
    ck_assert(info.n_tokens == TOKENS_A || info.n_tokens == TOKENS_B);
    const uint32_t free_before = file_fixture_free_pages(&states->w);
    fkv_seq seq = 0;
    ck_ok(file_fixture_load(&states->w, TOKENS_A, path, &seq));
    uint32_t n_tokens = 0;
    ck_ok(fkv_pager_length(states->w.pager, seq, &n_tokens));
    ck_assert(file_fixture_holds(&states->w, seq, n_tokens == TOKENS_A ? SEED_A : SEED_B, n_tokens));
    ck_ok(fkv_pager_close(states->w.pager, seq));
    ck_assert_uint_eq(file_fixture_free_pages(&states->w), free_before);
}

/* Runs in the child process: saves repeatedly until killed. *n_ended counts the saves that returned FKV_OK. */
static void save_forever(const two_states *states, const char *path, uint32_t seed, volatile uint32_t *n_ended) {
    for (bool a = true;; a = !a) {
        if (save_one(states, a, path) != FKV_OK) _exit(EXIT_FAILURE);
        *n_ended = *n_ended + 1;
        wait_us(next_random(&seed) % 60);
    }
}

START_TEST(killed_save_leaves_a_complete_file_or_the_old_one) {
    const char *path = file_fixture_path("killed.fkv");
    const char *part = file_fixture_path("killed.fkv.part");
    two_states states;
    open_states(&states);
    volatile uint32_t *n_ended = mmap(NULL, sizeof *n_ended, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert(n_ended != MAP_FAILED);
    uint32_t seed = 20250311;
    uint32_t n_parts = 0;
    uint32_t n_missing = 0;
    uint32_t n_saves = 0;
    printf("seed %u\n", seed);
    for (uint32_t kill_number = 0; kill_number < KILLS; kill_number++) {
        bool existed = access(path, F_OK) == 0;
        if (existed && kill_number % FRESH_START == 0) {
            ck_assert_int_eq(unlink(path), 0);
            existed = false;
        }
        *n_ended = 0;
        (void)fflush(stdout);
        const pid_t child = fork();
        ck_assert_int_ge(child, 0);
        if (child == 0) save_forever(&states, path, seed + kill_number, n_ended);
        wait_us(next_random(&seed) % 12000);
        ck_assert_int_eq(kill(child, SIGKILL), 0);
        int how = 0;
        ck_assert_int_eq(waitpid(child, &how, 0), child);
        ck_assert_msg(WIFSIGNALED(how), "the child failed to save");
        n_parts += access(part, F_OK) == 0;
        n_saves += *n_ended;
        if (access(path, F_OK) == 0) {
            check_whole(&states, path);
        } else {
            ck_assert_msg(!existed && *n_ended == 0, "an existing file has disappeared");
            n_missing++;
        }
    }
    printf("%d kills, %u finished saves, %u remaining part files, %u kills before the first save finished\n", KILLS, n_saves,
           n_parts, n_missing);
    ck_assert_uint_gt(n_saves, 0);
    ck_assert_uint_gt(n_parts, 0);
    ck_ok(save_one(&states, true, path));
    check_whole(&states, path);
    ck_assert_int_ne(access(part, F_OK), 0);
    ck_assert_int_eq(munmap((void *)(uintptr_t)n_ended, sizeof *n_ended), 0);
    file_fixture_close(&states.w);
}
END_TEST

/* Opens a cache with the public API. Each of its layers has pages in two groups. */
static void open_sealed(cache_fixture *w, fkv_seq seqs[2], uint32_t tokens[2][TOKENS_A]) {
    static const fkv_layer_config layers[] = {
        {2, 1, 32, 0, 0, 0, 0, {4, 0, FKV_CODEC_SEALED}, {4, 0, FKV_CODEC_SEALED_V}},
        {2, 1, 32, 20, 4, 0, 0, {3, 0, FKV_CODEC_SEALED}, {4, 0, FKV_CODEC_TURBO}},
    };
    fkv_config config = fkv_config_default();
    config.n_layers = N_OF(layers);
    config.layers = layers;
    config.rotate = FKV_ROTATE_V;
    config.page_tokens = 16;
    config.max_tokens = 256;
    config.max_seqs = 3;
    config.max_step_tokens = 32;
    config.n_threads = 1;
    ck_ok(cache_fixture_open(w, &config));
    for (uint64_t i = 0; i < 2; i++) {
        uint32_t n = i == 0 ? TOKENS_A : TOKENS_B;
        cache_tokens(i, tokens[i], TOKENS_A);
        seqs[i] = cache_fixture_seq(w, n);
        cache_fixture_run(w, seqs[i], tokens[i], 0, n, 32, NULL);
    }
}

START_TEST(killed_save_of_sealed_layers_leaves_a_complete_file) {
    const char *path = file_fixture_path("sealed.fkv");
    cache_fixture w;
    fkv_seq seqs[2];
    uint32_t tokens[2][TOKENS_A];
    uint32_t seed = 7;
    open_sealed(&w, seqs, tokens);
    ck_ok(fkv_seq_save(w.cache, seqs[0], tokens[0], 0, path));
    for (uint32_t kill_number = 0; kill_number < SEALED_KILLS; kill_number++) {
        (void)fflush(stdout);
        const pid_t child = fork();
        ck_assert_int_ge(child, 0);
        if (child == 0)
            for (uint32_t i = 0;; i = !i)
                if (fkv_seq_save(w.cache, seqs[i], tokens[i], 0, path) != FKV_OK) _exit(EXIT_FAILURE);
        wait_us(next_random(&seed) % 8000);
        ck_assert_int_eq(kill(child, SIGKILL), 0);
        int how = 0;
        ck_assert_int_eq(waitpid(child, &how, 0), child);
        ck_assert_msg(WIFSIGNALED(how), "the child failed to save");
        fkv_file_info info;
        fkv_seq loaded = 0;
        ck_ok(fkv_file_inspect(path, true, &info));
        ck_assert(info.version == 1 && (info.n_tokens == TOKENS_A || info.n_tokens == TOKENS_B));
        const uint32_t *prompt = tokens[info.n_tokens == TOKENS_A ? 0 : 1];
        fkv_seq_config asked = {.max_tokens = info.n_tokens, .prompt = prompt, .n_prompt = info.n_tokens};
        ck_ok(fkv_seq_load(w.cache, &asked, path, &loaded));
        ck_ok(fkv_seq_close(w.cache, loaded));
    }
    ck_assert(fkv_cache_consistent(w.cache));
    cache_fixture_close(&w);
}
END_TEST

START_TEST(concurrent_saves_to_one_name_leave_a_complete_file) {
    const char *path = file_fixture_path("raced.fkv");
    const char *part = file_fixture_path("raced.fkv.part");
    two_states states;
    open_states(&states);
    ck_ok(save_one(&states, true, path));
    pid_t children[2];
    (void)fflush(stdout);
    for (uint32_t c = 0; c < 2; c++) {
        children[c] = fork();
        ck_assert_int_ge(children[c], 0);
        if (children[c] != 0) continue;
        uint32_t seed = c;
        for (uint32_t n_good = 0; n_good < RACE_SAVES;) {
            const fkv_status status = save_one(&states, c == 0, path);
            if (status != FKV_OK && status != FKV_IO) _exit(EXIT_FAILURE);
            n_good += status == FKV_OK;
            wait_us(next_random(&seed) % 300);
        }
        _exit(EXIT_SUCCESS);
    }
    uint32_t n_looks = 0;
    for (uint32_t c = 0; c < 2; c++) {
        int how = 0;
        while (waitpid(children[c], &how, WNOHANG) == 0) {
            check_whole(&states, path);
            n_looks++;
        }
        ck_assert(WIFEXITED(how) && WEXITSTATUS(how) == EXIT_SUCCESS);
    }
    printf("checked %u times while two processes saved\n", n_looks);
    check_whole(&states, path);
    ck_assert_int_ne(access(part, F_OK), 0);
    file_fixture_close(&states.w);
}
END_TEST

START_TEST(temporary_folder_can_be_removed) { file_fixture_remove_folder(); }
END_TEST

TEST_MAIN("page_file_kill", killed_save_leaves_a_complete_file_or_the_old_one,
          killed_save_of_sealed_layers_leaves_a_complete_file, concurrent_saves_to_one_name_leave_a_complete_file,
          temporary_folder_can_be_removed)
