/* Runs the threads of a GPU block on the host.
 *
 * With a sanitizer, each GPU thread is an OS thread, so that ThreadSanitizer reports data races in the kernels. Otherwise, the
 * GPU threads (lanes) are fibers of one OS thread: a lane runs until it waits, and then the next lane runs. Lanes run in
 * ascending order in one block and in descending order in the next block. Therefore, if a read does not wait for the
 * corresponding write, it reads the old value in one of the two orders. Blocks run one after another, except in
 * fkv_host_run_together().
 */
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define FKV_HOST_THREADS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define FKV_HOST_THREADS 1
#endif
#endif
#ifdef FKV_HOST_THREADS
#include <thread>
#else
#include <setjmp.h>
#include <ucontext.h>
#endif

#define FKV_FN [[maybe_unused]] static inline

typedef uint8_t fkv_u8;
typedef uint16_t fkv_u16;
typedef uint32_t fkv_u32;
typedef uint64_t fkv_u64;
typedef std::atomic<fkv_u32> fkv_host_word;

struct fkv_place {
    fkv_u32 index;
    fkv_u32 x;
    fkv_u32 y;
    fkv_u32 z;
};

enum {
    FKV_HOST_MAX_THREADS = 1024, /* per block */
    FKV_HOST_MAX_LANES = 8 * 512,
    FKV_HOST_SHARED_BYTES = 228 * 1024,
    FKV_HOST_TEAMS = 8,
    FKV_HOST_LATE_COPIES = 512, /* per lane */
    FKV_HOST_STACK_BYTES = 256 * 1024,
    FKV_HOST_PATIENCE = 1024
};

/* fkv_host_store_notify() stores a new value in a word and wakes the lanes that wait for a change of this word.
 * fkv_host_wait_change() waits until the word differs from `old`. */
FKV_FN void fkv_host_store_notify(fkv_host_word &word, fkv_u32 value);
FKV_FN void fkv_host_wait_change(fkv_host_word &word, fkv_u32 old);

struct fkv_host_barrier {
    fkv_host_word n_waiting{0};
    fkv_host_word round{0};
};

/* The barrier functions are not members of fkv_host_barrier. The linker would merge the inline member functions of different test
 * cases, although each test case has its own lanes. */
FKV_FN void fkv_host_barrier_wait(fkv_host_barrier &barrier, fkv_u32 n) {
    fkv_u32 own = barrier.round;
    if (barrier.n_waiting.fetch_add(1) + 1 < n) return fkv_host_wait_change(barrier.round, own);
    barrier.n_waiting = 0;
    fkv_host_store_notify(barrier.round, own + 1);
}

/* Asynchronous copies of 16 bytes that a lane has started. A copy takes effect at some time between its start and the end of the
 * wait for its group. The emulation uses both extremes: it executes the copies of some groups immediately, and the copies of the
 * other groups (`late`) during the wait. */
struct fkv_host_copy {
    void *to;
    const void *from;
    fkv_u32 group;
};
struct fkv_host_lane_copies {
    fkv_u32 n_groups = 0;
    fkv_u32 n_late = 0;
    fkv_host_copy late[FKV_HOST_LATE_COPIES];
};

struct fkv_host_warp {
    fkv_host_barrier barrier;
    fkv_u32 given[2][32][8]; /* words exchanged by the lanes; with two buffers, one barrier per exchange suffices */
    fkv_host_lane_copies copies[32];
};

/* Emulated mbarrier. A phase ends after n arrivals, and the phase bit then flips. A wait for a phase returns when that phase has
 * ended. A wait for the phase before the first phase returns immediately. */
struct fkv_host_mbarrier {
    fkv_u32 n = 0;
    fkv_host_word left{0};
    fkv_host_word phase{0};
};

struct fkv_host_block {
    fkv_u32 n_threads;
    fkv_host_mbarrier mbarriers[32];
    fkv_host_barrier barrier;
    fkv_host_barrier teams[FKV_HOST_TEAMS];
    fkv_host_warp warps[FKV_HOST_MAX_THREADS / 32];
    alignas(16) fkv_u8 shared[FKV_HOST_SHARED_BYTES];
};

struct fkv_host_lane {
    fkv_host_block *block;
    fkv_host_warp *warp;
    fkv_u32 lane;
    fkv_u32 turn;
};

struct fkv_host_launch {
    const fkv_u32 *grid; /* number of blocks in the x, y and z dimensions */
    void (*call)(const void *body, fkv_place place);
    const void *body;       /* first argument of call() */
    fkv_host_block *blocks; /* the blocks that run at the same time */
    fkv_u32 n_blocks;
};

/* Runs a lane of every n_blocks-th block, one block after another. `index` is the index of the lane among all lanes of the blocks
 * that run at the same time. */
FKV_FN void fkv_host_blocks(fkv_host_launch *launch, fkv_u32 index);

#ifdef FKV_HOST_THREADS
static thread_local fkv_host_lane fkv_host_thread;

FKV_FN void fkv_host_store_notify(fkv_host_word &word, fkv_u32 value) {
    word = value;
    word.notify_all();
}
FKV_FN void fkv_host_wait_change(fkv_host_word &word, fkv_u32 old) { word.wait(old); }
FKV_FN void fkv_host_yield() { std::this_thread::yield(); }

FKV_FN void fkv_host_lanes_run(fkv_host_launch *launch, fkv_u32 n_threads) {
    std::thread threads[FKV_HOST_MAX_THREADS];
    for (fkv_u32 t = 0; t < n_threads; t++)
        threads[t] = std::thread([=] {
            fkv_host_thread = {launch->blocks, &launch->blocks->warps[t / 32], t % 32, 0};
            fkv_host_blocks(launch, t);
        });
    for (fkv_u32 t = 0; t < n_threads; t++) threads[t].join();
}
FKV_FN void fkv_host_next_block() {}
#else
struct fkv_host_fiber {
    fkv_host_lane lane;
    bool done;
    bool started;
    ucontext_t start; /* starts the fiber */
    jmp_buf resume;   /* resumes a fiber that has started */
    void *stack;      /* allocated once and used by all launches; untouched pages of the stack occupy no memory */
};
static fkv_host_fiber fkv_host_fibers[FKV_HOST_MAX_LANES];
static fkv_u32 fkv_host_n_fibers;
static jmp_buf fkv_host_caller;
static fkv_host_launch *fkv_host_launched;
static fkv_u32 fkv_host_at;          /* index of the running fiber */
static fkv_u64 fkv_host_idle;        /* number of fiber switches since any lane last changed a word that other lanes wait for */
static void (*fkv_host_when_idle)(); /* if not null, called when all lanes have waited once without a change */
static fkv_u32 fkv_host_step;        /* distance to the next of n fibers: 1 (ascending order) or n - 1 (descending order) */
#define fkv_host_thread (fkv_host_fibers[fkv_host_at].lane)

/* Saves the state of the running fiber in `own` and runs the fiber `next`. Uses _longjmp(), because swapcontext() makes a system
 * call, which would take half of a kernel's run time. Returns when `own` is resumed. */
[[gnu::noinline, maybe_unused]] static void fkv_host_switch(jmp_buf own, fkv_host_fiber *next) {
    if (_setjmp(own) != 0) return;
    if (next->started) _longjmp(next->resume, 1);
    next->started = true;
    setcontext(&next->start);
    abort();
}

/* Switches to the next unfinished lane. Returns when this lane is scheduled again. */
FKV_FN void fkv_host_next() {
    fkv_u32 n = fkv_host_n_fibers;
    fkv_u32 own = fkv_host_at;
    if (++fkv_host_idle % (n + 1) == 0 && fkv_host_when_idle != nullptr) fkv_host_when_idle();
    if (fkv_host_idle > FKV_HOST_PATIENCE * (fkv_u64)n) {
        fprintf(stderr, "deadlock: all threads are waiting\n");
        abort();
    }
    for (fkv_u32 i = 1; i <= n; i++) {
        fkv_u32 next = (fkv_u32)((own + (fkv_u64)i * fkv_host_step) % n);
        if (fkv_host_fibers[next].done) continue;
        if (next == own) return;
        fkv_host_at = next;
        fkv_host_switch(fkv_host_fibers[own].resume, &fkv_host_fibers[next]);
        return;
    }
    _longjmp(fkv_host_caller, 1);
}

FKV_FN void fkv_host_store_notify(fkv_host_word &word, fkv_u32 value) {
    word = value;
    fkv_host_idle = 0;
}
FKV_FN void fkv_host_wait_change(fkv_host_word &word, fkv_u32 old) {
    while (word == old) fkv_host_next();
}
FKV_FN void fkv_host_yield() { fkv_host_next(); }

static void fkv_host_fiber_main() {
    fkv_host_blocks(fkv_host_launched, fkv_host_at);
    fkv_host_fibers[fkv_host_at].done = true;
    fkv_host_next();
}

FKV_FN void fkv_host_fiber_prepare(fkv_host_fiber *fiber, fkv_host_block *block, fkv_u32 index) {
    fiber->lane = {block, &block->warps[index / 32], index % 32, 0};
    fiber->done = false;
    fiber->started = false;
    if (fiber->stack == nullptr) fiber->stack = malloc(FKV_HOST_STACK_BYTES);
    if (fiber->stack == nullptr || getcontext(&fiber->start) != 0) abort();
    fiber->start.uc_stack.ss_sp = fiber->stack;
    fiber->start.uc_stack.ss_size = FKV_HOST_STACK_BYTES;
    fiber->start.uc_link = nullptr;
    makecontext(&fiber->start, fkv_host_fiber_main, 0);
}

FKV_FN void fkv_host_lanes_run(fkv_host_launch *launch, fkv_u32 n_threads) {
    fkv_host_launched = launch;
    fkv_host_n_fibers = n_threads * launch->n_blocks;
    for (fkv_u32 t = 0; t < fkv_host_n_fibers; t++)
        fkv_host_fiber_prepare(&fkv_host_fibers[t], &launch->blocks[t / n_threads], t % n_threads);
    fkv_host_at = 0;
    fkv_host_idle = 0;
    fkv_host_step = 1;
    fkv_host_switch(fkv_host_caller, &fkv_host_fibers[0]);
}
FKV_FN void fkv_host_next_block() { fkv_host_step = fkv_host_n_fibers - fkv_host_step; }
#endif

FKV_FN void fkv_host_blocks(fkv_host_launch *launch, fkv_u32 index) {
    const fkv_u32 *grid = launch->grid;
    const fkv_u32 n_threads = launch->blocks->n_threads;
    for (fkv_u32 i = index / n_threads; i < grid[0] * grid[1] * grid[2]; i += launch->n_blocks) {
        launch->call(launch->body, fkv_place{index % n_threads, i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]});
        fkv_host_thread.warp->copies[fkv_host_thread.lane].n_late = 0;
        /* wait for all lanes, because the next block reuses the shared memory */
        fkv_host_barrier_wait(launch->blocks[index / n_threads].barrier, n_threads);
        if (index == 0) fkv_host_next_block();
    }
}

/* Emulates a kernel launch: runs body(place) for each thread of each block. `grid` holds the number of blocks in the x, y and z
 * dimensions. n_together: number of blocks that run at the same time; with a sanitizer, blocks always run one after another. */
template <typename Body>
FKV_FN void fkv_host_run_together(const fkv_u32 grid[3], fkv_u32 n_threads, fkv_u32 n_together, const Body &body) {
#ifdef FKV_HOST_THREADS
    n_together = 1;
#endif
    if (n_threads > FKV_HOST_MAX_THREADS || n_threads * n_together > FKV_HOST_MAX_LANES) abort();
    fkv_host_launch launch;
    launch.grid = grid;
    launch.call = [](const void *own, fkv_place place) { (*static_cast<const Body *>(own))(place); };
    launch.body = &body;
    launch.blocks = new fkv_host_block[n_together];
    launch.n_blocks = n_together;
    for (fkv_u32 i = 0; i < n_together; i++) launch.blocks[i].n_threads = n_threads;
    fkv_host_lanes_run(&launch, n_threads);
    delete[] launch.blocks;
}

template <typename Body> FKV_FN void fkv_host_run(const fkv_u32 grid[3], fkv_u32 n_threads, const Body &body) {
    fkv_host_run_together(grid, n_threads, 1, body);
}
