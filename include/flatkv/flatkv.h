/* flatkv: a paged, quantized KV cache for language models. This header is the complete host-memory API.
 *
 * Ownership
 *   The cache owns all pages, tables and scratch memory. fkv_cache_open() allocates everything and fkv_cache_close() releases
 *   it; no call in between allocates or frees memory. Arrays passed to a function are used only during that call. Sequence
 *   handles are integers, so the handle of a closed sequence is detected and rejected instead of being dereferenced.
 *
 * Threading
 *   At most one thread may use a cache at a time. The only exception is fkv_cache_stats(), which any thread may call at any
 *   time between open and close. Different caches are independent. Each cache starts fkv_config.n_threads - 1 worker threads.
 *
 * Errors
 *   Every function that can fail returns an fkv_status: FKV_OK (0) or a negative error code. A call that fails has no effect
 *   unless its comment says otherwise. fkv_message() describes the calling thread's most recent failure and how to fix it.
 *   FKV_POOL_FULL and the other capacity errors are normal results of admission control. The library never exits the process,
 *   never prints, and never reads environment variables.
 *
 * Shapes
 *   T is the number of tokens in the step, H the number of query heads, G the number of KV heads, and D the head dimension. Row
 *   arrays are dense, row-major and of type fkv_config.row_type. k and v are [T, G, D]; q and out are [T, H, D].
 *
 * Latent layers
 *   A layer with multi-head latent attention (MLA) has one KV head. The cache stores one row per token, which consists of D
 *   latent channels and R RoPE channels (fkv_layer_config.rope_dim). All channels are the key, and the latent channels are also
 *   the value, so the layer has no separate values. k is [T, D + R], v is NULL, q is [T, H, D + R], and out is [T, H, D].
 *
 * State layers
 *   A layer with a recurrent state (a convolution, linear attention or a state-space model) has no keys and values. For each
 *   sequence, it has one state of fixed size, which depends on all tokens so far. The cache stores these states in slots, but
 *   does not compute them: fkv_state_rows() returns the addresses of the state that a step reads and of the state that it
 *   writes. A step never writes to the state that it reads, so forks, aborts and snapshots copy nothing. A snapshot is a state
 *   that the prefix tree keeps: fkv_prefix_insert() stores the current state if the length of the sequence is a multiple of
 *   page_tokens.
 */
#ifndef FLATKV_FLATKV_H
#define FLATKV_FLATKV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FKV_VERSION_MAJOR 0
#define FKV_VERSION_MINOR 1
#define FKV_VERSION_PATCH 0

#if defined(__GNUC__) && !defined(FKV_STATIC)
#define FKV_API __attribute__((visibility("default")))
#else
#define FKV_API
#endif

enum {
    FKV_MAX_LAYERS = 512,
    FKV_MAX_GROUPS = 8, /* maximum number of layer groups: one for each (window, n_sinks) pair, and one for all state layers */
    FKV_MAX_HEAD_DIM = 512,
    FKV_MAX_HEADS_PER_KV = 128, /* maximum number of query heads that share one KV head */
    FKV_MAX_STATE_BYTES = 1073741824
};

/* ---- status -------------------------------------------------------------------------------------------------- */

typedef enum fkv_status {
    FKV_OK = 0,

    /* caller errors */
    FKV_BAD_ARGUMENT = -1, /* null pointer, value out of range, or tokens that do not match the sequence */
    FKV_BAD_CONFIG = -2,   /* invalid shape, codec or size */
    FKV_BAD_SEQ = -3,      /* the sequence is closed, or the handle does not belong to this cache */
    FKV_BAD_STATE = -4, /* call not allowed in the current state, for example while a step is open or before a layer is written */

    /* capacity errors: the request was not admitted */
    FKV_POOL_FULL = -20, /* too few unreserved pages for a sequence of max_tokens tokens */
    FKV_SEQ_FULL = -21,  /* the sequence would become longer than its reservation; see fkv_seq_reserve() */
    FKV_SEQS_FULL = -22, /* max_seqs sequences are already open */
    FKV_STEP_FULL = -23, /* more than max_step_tokens tokens in one step */
    FKV_NO_MEMORY = -24, /* the plan exceeds the memory of the machine or of its cgroup */
    FKV_GONE = -25,      /* required pages no longer exist, because they left the window, were sealed, or were evicted */
    FKV_BUSY = -26,      /* the engine's queue is full or the predicted wait is too long; retry later */

    /* file errors */
    FKV_IO = -40,           /* system call failed; the message contains the system's error text */
    FKV_FILE_FORMAT = -41,  /* not a page file */
    FKV_FILE_VERSION = -42, /* page-file version not supported by this library */
    FKV_FILE_DAMAGED = -43, /* the file is truncated or invalid, or a checksum does not match */
    FKV_FILE_FOREIGN = -44, /* valid file, but saved with a different model, shape, codec, rotation, RoPE or arithmetic */

    /* platform errors */
    FKV_UNSUPPORTED = -60, /* not supported by this machine or this build */
    FKV_DEVICE = -61       /* a device library failed; the message contains its error text */
} fkv_status;

/* Returns the name of a status, such as "FKV_POOL_FULL". Never NULL. */
FKV_API const char *fkv_status_name(fkv_status status);

/* Returns a message about the calling thread's most recent failure. The message contains the invalid values and suggests how to
 * fix the problem. Returns "" if no call of this thread has failed. The string is valid until the thread's next failing call. */
FKV_API const char *fkv_message(void);

/* Returns the library version as "major.minor.patch". */
FKV_API const char *fkv_version(void);

/* ---- configuration ------------------------------------------------------------------------------------------- */

typedef enum fkv_type { FKV_F32 = 0, FKV_F16 = 1, FKV_BF16 = 2 } fkv_type;

typedef enum fkv_rotate {
    FKV_ROTATE_NONE = 0,
    FKV_ROTATE_K = 1, /* rotate keys when they are written, and queries before attention */
    FKV_ROTATE_V = 2, /* rotate values when they are written; attention outputs are rotated back */
    FKV_ROTATE_KV = 3
} fkv_rotate;

typedef enum fkv_isa {
    FKV_ISA_AUTO = 0,
    FKV_ISA_SCALAR,
    FKV_ISA_NEON,
    FKV_ISA_AVX2,
    FKV_ISA_AVX512,
    FKV_ISA_AVX512VNNI,
    FKV_ISA_AMX
} fkv_isa;

typedef enum fkv_codec_kind {
    FKV_CODEC_AUTO = 0,      /* selects FKV_CODEC_HALF for 16 bits and FKV_CODEC_AFFINE for fewer bits */
    FKV_CODEC_HALF = 1,      /* 16 bits: unquantized 16-bit floats; the group size is ignored */
    FKV_CODEC_AFFINE = 2,    /* 8, 4 or 2 bits: a scale and a bias per group of 32, 64 or 128 channels */
    FKV_CODEC_SEALED = 3,    /* K only; 4, 3 or 2 bits: full pages are repacked with one scale and one bias per channel */
    FKV_CODEC_SEALED_V = 4,  /* V of sealed layers only; 4, 3 or 2 bits: one norm per row and a fixed codebook; rotation is
                                recommended */
    FKV_CODEC_TURBO = 5,     /* TurboQuant; 4, 3 or 2 bits: one scale per row and a fixed codebook; rotation is required */
    FKV_CODEC_CALIBRATED = 6 /* K only; like FKV_CODEC_SEALED, but each channel has 2, 4 or 6 bits, with an average of 4 or 3
                                bits; see channel_bits */
} fkv_codec_kind;

/* Storage format of the keys or of the values. For example, {8, 64} means 8-bit affine codes in groups of 64. */
typedef struct fkv_codec_config {
    uint32_t bits;
    uint32_t group;
    fkv_codec_kind kind;
} fkv_codec_config;

/* Parses codec names in the form K/V, for example "8/4", "16/16", "4/4g32", "8/tq4" or "s4/s4". A single name applies to both K
 * and V. "sealed" means "s4/s4" and "calibrated" means "c4/s4". A name without a g suffix keeps the group size already in *k or
 * *v. If parsing fails, returns FKV_BAD_CONFIG and leaves *k and *v unchanged; the message lists the valid names. */
FKV_API fkv_status fkv_codec_parse(const char *text, fkv_codec_config *k, fkv_codec_config *v);

/* Properties of a codec. */
typedef struct fkv_codec_info {
    const char *name;      /* name accepted by fkv_codec_parse(), such as "8" */
    uint32_t group;        /* number of channels that share a scale; 0 if the codec has no groups */
    uint32_t dim_multiple; /* the head dimension must be a multiple of this number */
    bool rotates;          /* rotation improves accuracy */
    bool needs_rotation;   /* configurations that use this codec without rotation are rejected */
} fkv_codec_info;

/* Looks up the properties of a codec. Returns FKV_BAD_CONFIG if no codec has this kind, bit width and group size. */
FKV_API fkv_status fkv_codec_about(fkv_codec_config config, fkv_codec_info *info);

typedef struct fkv_layer_config {
    uint32_t n_q_heads;
    uint32_t n_kv_heads; /* must divide n_q_heads */
    uint32_t head_dim;   /* a multiple of 16 and of the group sizes of k and v, at most FKV_MAX_HEAD_DIM */
    uint32_t window;     /* sliding window: a query attends to itself and the window - 1 tokens before it; 0: full attention */
    uint32_t n_sinks;    /* leading tokens that remain visible in a sliding-window layer; must be 0 if window is 0 */
    float scale;         /* score multiplier with a magnitude from 1e-6 to 1e6; 0: 1/sqrt(head_dim) */
    float softcap;       /* soft cap c: score becomes c * tanh(score / c); 0: no soft cap */
    fkv_codec_config k;
    fkv_codec_config v;
    const float *sink_logits; /* [n_q_heads] or NULL; copied. Learned attention sinks: an extra per-head logit, added after
                                 scaling and soft-capping, that contributes to the softmax denominator but has no value row. Page
                                 files do not store the sink logits; weights_id identifies them. */

    /* [n_kv_heads, head_dim] bits of each key channel: 2, 4 or 6; copied. Required if K is FKV_CODEC_CALIBRATED, otherwise
     * NULL. In every head, the average must be k.bits, and the numbers of 4-bit and 6-bit channels must be multiples of 4. Page
     * files store a hash of this array. */
    const uint8_t *channel_bits;

    /* Size in bytes of one sequence's recurrent state: a multiple of 64, at most FKV_MAX_STATE_BYTES. If the layer stores keys
     * and values, the size is 0. In a state layer, all other fields must be 0. */
    uint32_t state_bytes;

    /* Number of RoPE channels R in each row of a latent layer: a multiple of 16, at most FKV_MAX_HEAD_DIM. In all other layers,
     * this field is 0. In a latent layer, head_dim is the number of latent channels, n_kv_heads must be 1, and scale must not be
     * 0. k is the codec of the latent channels: 16, 8, 4 or 2 bits, TurboQuant, or FKV_CODEC_SEALED with 4 or 2 bits. The RoPE
     * channels always have 16 bits, and v is ignored. If k is sealed, FKV_ROTATE_V rotates the latent channels, and head_dim
     * must be a multiple of 32. Otherwise, FKV_ROTATE_K rotates the latent channels. */
    uint32_t rope_dim;
} fkv_layer_config;

typedef void (*fkv_log_fn)(void *user, const char *line);

typedef struct fkv_config {
    uint32_t n_layers;
    fkv_layer_config layer;         /* configuration of every layer if layers is NULL */
    const fkv_layer_config *layers; /* [n_layers] per-layer configurations, or NULL; not retained after the call */

    fkv_type row_type;  /* element type of k, v, q and out */
    fkv_type page_type; /* FKV_F16 or FKV_BF16: type of scales, biases and unquantized rows inside pages */
    fkv_rotate rotate;
    uint64_t rotation_seed;

    uint32_t page_tokens;     /* tokens per page: a power of two, 16 to 256 */
    uint32_t max_tokens;      /* capacity in tokens, shared by sequences and cached prefixes. Up to max_seqs sequences are always
                                 admitted if the sum of their max_tokens does not exceed this capacity. */
    uint32_t max_seqs;        /* maximum number of open sequences */
    uint32_t max_step_tokens; /* maximum number of tokens in one step, prefill and decode together */
    uint32_t max_snapshots;   /* maximum number of recurrent states that the prefix tree keeps, in addition to the states of open
                                 sequences; ignored if there are no state layers */

    uint32_t n_threads; /* threads that work on a step, including the caller; 0: one per available core */
    fkv_isa isa;        /* instruction set of the CPU kernels; FKV_ISA_AUTO: the best one available */
    bool lazy; /* commit the memory of pages and tables on first use instead of at open; the plan is still an upper bound */
    uint64_t memory_limit; /* upper bound on the plan, in bytes; 0: fkv_memory_available() */

    uint8_t weights_id[32]; /* any 32 bytes that identify the model weights; stored in page files */
    char rope_id[64];       /* null-terminated description of RoPE, such as "neox base=1000000"; stored in page files */

    /* Null-terminated identity of the arithmetic that computes the rows, such as "cpu avx2 3"; stored in page files. Programs
     * whose rows for the same tokens are not bit-identical must use different identities, because pages with equal identities
     * are shared. A runner sets this field itself. */
    char numerics[32];

    fkv_log_fn log; /* called with one line of text when the cache is opened, and again when it is closed; NULL: no log */
    void *log_user;
} fkv_config;

/* Returns the default configuration: sealed 4-bit K, sealed and rotated 4-bit V, fp16 scales, f32 rows, 64 tokens per page, one
 * sequence, 512 tokens per step. The layer shapes, n_layers and max_tokens are 0. A latent layer with this codec needs a
 * head_dim that is a multiple of 32. */
FKV_API fkv_config fkv_config_default(void);

/* ---- plan ---------------------------------------------------------------------------------------------------- */

/* Exact memory requirements of a configuration. total_bytes = slab_bytes + tables_bytes + scratch_bytes + stacks_bytes.
 * scratch_bytes does not depend on max_tokens. */
typedef struct fkv_plan {
    uint64_t total_bytes;
    uint64_t slab_bytes;    /* memory for the pages; on MLX, also buffers of the backend (see fkv_mlx_plan_make()) */
    uint64_t tables_bytes;  /* page tables, page pool and prefix tree */
    uint64_t scratch_bytes; /* memory for tiles and partial results of the worker threads */
    uint64_t stacks_bytes;  /* stacks of the worker threads */
    uint64_t token_bytes;   /* bytes per token for K and V in all layers, including scales */
    uint32_t n_groups;
    uint32_t group_pages[FKV_MAX_GROUPS];      /* number of pages in each layer group */
    uint64_t group_page_bytes[FKV_MAX_GROUPS]; /* bytes per page in each layer group */
    uint32_t n_threads;                        /* threads that work on a step, including the caller */
    uint64_t state_bytes; /* size of one sequence's state, summed over all state layers; 0 if there are no state layers */
    uint32_t state_slots; /* number of states in the slab: two per sequence, plus max_snapshots */
    uint32_t state_group; /* layer group of the state layers; n_groups if there are no state layers */
} fkv_plan;

/* Computes the memory plan of a configuration without allocating anything. Returns FKV_BAD_CONFIG for an invalid configuration.
 */
FKV_API fkv_status fkv_plan_make(const fkv_config *config, fkv_plan *plan);

/* Returns the number of bytes that this process can still allocate: the minimum of the machine's available memory, the memory
 * left under each enclosing cgroup limit, and the address space left under RLIMIT_AS. On Apple systems available memory means
 * free plus inactive memory. *source (if not NULL) receives the name of the limit that determines the result. Returns
 * UINT64_MAX if the system reports no limit. fkv_cache_open() rejects a plan above this value. */
FKV_API uint64_t fkv_memory_available(const char **source);

/* ---- cache --------------------------------------------------------------------------------------------------- */

typedef struct fkv_cache fkv_cache;

/* Opens a cache and allocates all memory of its plan. Returns FKV_NO_MEMORY, with the plan and the limit in fkv_message(), if the
 * plan does not fit. Close the cache with fkv_cache_close(). */
FKV_API fkv_status fkv_cache_open(const fkv_config *config, fkv_cache **cache);

/* Closes a cache together with its open sequences and its open step, and releases all its memory. `cache` may be NULL. */
FKV_API void fkv_cache_close(fkv_cache *cache);

typedef struct fkv_group_stats {
    uint32_t pages; /* pages in the group: free + held + cached */
    uint32_t free;  /* pages that are neither in a page table nor in the prefix tree */
    uint32_t held; /* pages in the page table of a sequence, and the ancestors of these pages in the prefix tree; not evictable */
    uint32_t shared;   /* held pages with at least two owners (sequences or the prefix tree) */
    uint32_t cached;   /* pages owned only by the prefix tree; evicted in LRU order, leaves first, when pages are needed */
    uint32_t pinned;   /* held pages that are also in the prefix tree */
    uint32_t promised; /* pages reserved for open sequences but not yet allocated */
} fkv_group_stats;

typedef struct fkv_stats {
    uint64_t planned_bytes; /* fkv_plan.total_bytes of this cache; never changes */
    uint32_t n_groups;
    fkv_group_stats groups[FKV_MAX_GROUPS];
    uint32_t seqs;              /* open sequences */
    uint64_t steps;             /* committed steps */
    uint64_t aborts;            /* aborted steps */
    uint64_t tokens;            /* committed tokens */
    uint64_t page_copies;       /* pages copied on write */
    uint64_t hit_tokens;        /* prompt tokens that fkv_seq_open() found in the prefix tree */
    uint64_t hits;              /* sequences opened with at least one prefix hit */
    uint64_t evictions;         /* pages evicted from the prefix tree */
    uint64_t packed_bytes_read; /* bytes of packed pages read by attention */
    const char *isa;            /* kernels in use, such as "avx512" */
    const char *numerics;       /* fkv_config.numerics; valid until the cache is closed */
} fkv_stats;

/* Reads the cache's counters. May be called from any thread. Each counter is exact, but the counters are not all read at the
 * same instant. */
FKV_API fkv_status fkv_cache_stats(const fkv_cache *cache, fkv_stats *stats);

typedef enum fkv_page_state {
    FKV_PAGE_FREE,    /* unused; a reserved page counts as free until it is allocated */
    FKV_PAGE_PRIVATE, /* owned by one sequence */
    FKV_PAGE_SHARED,  /* owned by at least two sequences */
    FKV_PAGE_CACHED,  /* owned only by the prefix tree; evictable */
    FKV_PAGE_PINNED /* in the prefix tree, and not evictable because one sequence uses this page or one of its descendants in the
                       tree */
} fkv_page_state;

typedef struct fkv_page_info {
    fkv_page_state state;
    uint64_t tenant; /* tenant that owns the page; 0 for free pages */
} fkv_page_info;

/* Lists the pages of a layer group in index order, for display. If the group has more than `capacity` pages, evenly spaced
 * pages are listed. Returns the number of entries written, which is 0 if the group does not exist. */
FKV_API uint32_t fkv_cache_pages(const fkv_cache *cache, uint32_t group, fkv_page_info *list, uint32_t capacity);

/* Checks the invariants of all data structures and returns true if they hold. This check is slow and meant for tests and
 * debugging. */
FKV_API bool fkv_cache_consistent(const fkv_cache *cache);

/* ---- sequences ----------------------------------------------------------------------------------------------- */

/* Sequence handle; 0 is never valid. Within a process, no two of 2^48 - 1 consecutively opened sequences have the same handle,
 * even in different caches. The cache can therefore detect and reject handles of closed sequences and of other caches. */
typedef uint64_t fkv_seq;

typedef struct fkv_seq_config {
    uint32_t max_tokens;    /* maximum length in tokens, including the prompt; pages are reserved for all of these tokens */
    uint64_t tenant;        /* sequences share prefixes only with sequences of the same tenant */
    const uint32_t *prompt; /* [n_prompt] tokens to look up in the prefix tree, or NULL */
    uint32_t n_prompt;
} fkv_seq_config;

/* Opens a sequence and reserves pages for max_tokens tokens. *n_shared (may be NULL) receives the number of leading prompt
 * tokens found in the prefix tree, which need not be computed. This number is a multiple of page_tokens and may equal n_prompt.
 * A caller that needs the logits of the last prompt token therefore passes the prompt without that token. Returns FKV_POOL_FULL
 * if the existing reservations leave too few pages for max_tokens tokens, not counting the shared pages. To pin a prefix, open a
 * sequence with the prefix as its prompt and max_tokens = n_prompt, and keep this sequence open. */
FKV_API fkv_status fkv_seq_open(fkv_cache *cache, const fkv_seq_config *config, fkv_seq *seq, uint32_t *n_shared);

/* Opens a copy of a sequence, with the same tokens and tenant. The two sequences share all pages; a page is copied when either
 * sequence writes to it. */
FKV_API fkv_status fkv_seq_fork(fkv_cache *cache, fkv_seq seq, uint32_t max_tokens, fkv_seq *child);

/* Changes the reservation of a sequence to max_tokens. Returns FKV_POOL_FULL if the additional pages are reserved by other
 * sequences, and FKV_BAD_ARGUMENT if the sequence is already longer than max_tokens. Reducing a reservation always succeeds and
 * makes its pages available to other sequences immediately. */
FKV_API fkv_status fkv_seq_reserve(fkv_cache *cache, fkv_seq seq, uint32_t max_tokens);

/* Truncates a sequence to its first n_tokens tokens. The reservation of max_tokens is kept. Returns FKV_POOL_FULL if released
 * pages are still used by other sequences and cannot be reserved again. Returns FKV_GONE if a sliding-window layer has dropped
 * pages that token n_tokens would attend to. A sequence with sealed layers can be truncated by up to one page, or to any
 * multiple of 4 pages. For any other length, FKV_GONE is returned, and the message states the possible lengths. A sequence with
 * state layers can be truncated to 0 tokens and to lengths with a snapshot, that is, to lengths at which fkv_prefix_insert() has
 * stored the state of this sequence or of the prefix that it shares. For any other length, FKV_GONE is returned, and the message
 * states the nearest possible length. */
FKV_API fkv_status fkv_seq_truncate(fkv_cache *cache, fkv_seq seq, uint32_t n_tokens);

/* Computes the largest length, at most n_tokens, to which fkv_seq_truncate() could truncate the sequence now. *length is 0 if
 * the whole sequence must be recomputed. Does not check whether released pages can be reserved again. */
FKV_API fkv_status fkv_seq_reachable(const fkv_cache *cache, fkv_seq seq, uint32_t n_tokens, uint32_t *length);

/* Closes a sequence. Its handle becomes invalid immediately, so later calls, including a second close, return FKV_BAD_SEQ.
 *
 * A sequence may be closed while a step is open, even if it has rows in that step. Its pages and its reservation are then
 * released when the step is committed or aborted, and until then it counts towards max_seqs. Its rows must still be written in
 * every layer, but they are discarded: they do not count in fkv_stats.tokens and cannot enter the prefix tree. To keep a prefix,
 * call fkv_prefix_insert() before the step. fkv_stats.seqs decreases immediately. */
FKV_API fkv_status fkv_seq_close(fkv_cache *cache, fkv_seq seq);

/* Writes the number of committed tokens of a sequence to *n_tokens. */
FKV_API fkv_status fkv_seq_length(const fkv_cache *cache, fkv_seq seq, uint32_t *n_tokens);

/* Inserts the full pages of a sequence's first n_tokens tokens into the prefix tree, keyed by these tokens. The rows must have
 * been computed from these tokens. If the cache has state layers and n_tokens is both the length of the sequence and a multiple
 * of page_tokens, also stores the state as a snapshot, without copying it. In a cache with state layers, a prefix is shared only
 * up to a snapshot. In a cache with sealed layers, a prefix is shared up to a multiple of 4 pages, or up to a page that the
 * sequence still held in open form when the prefix was inserted. Returns FKV_BAD_ARGUMENT if a page of the sequence is already
 * in the prefix tree with different tokens. Inserts no new pages if that would leave too few evictable pages for the existing
 * reservations. */
FKV_API fkv_status fkv_prefix_insert(fkv_cache *cache, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens);

/* Computes the number of prompt tokens that fkv_seq_open() would find in the prefix tree if it were called now with this
 * config. Does not open or reserve anything, does not update LRU order, and does not check whether the sequence would be
 * admitted. Allowed while a step is open. */
FKV_API fkv_status fkv_prefix_match(const fkv_cache *cache, const fkv_seq_config *config, uint32_t *n_shared);

/* Computes the number of prompt tokens whose pages are in the prefix tree, including pages that fkv_seq_open() cannot share, for
 * example because there is no snapshot after them. An earlier prompt began with these tokens, so a snapshot after them is likely
 * to be used again. Allowed while a step is open. */
FKV_API fkv_status fkv_prefix_overlap(const fkv_cache *cache, const fkv_seq_config *config, uint32_t *n_tokens);

/* Removes a snapshot from the prefix tree, unless a sequence uses it. The snapshot is the state after the first n_tokens tokens
 * of a prompt. n_tokens must be a multiple of page_tokens. Does nothing if there is no such snapshot. */
FKV_API fkv_status fkv_snapshot_drop(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_tokens);

/* Evicts all cached pages that no sequence uses. */
FKV_API fkv_status fkv_prefix_clear(fkv_cache *cache);

/* ---- steps --------------------------------------------------------------------------------------------------- */

/* A step is one forward pass over any mix of prefill chunks and decode tokens. A cache has at most one open step. The handle is
 * owned by the cache and remains valid until commit or abort. While a step is open, sequences may be closed; all other calls that
 * change sequences or prefixes return FKV_BAD_STATE. */
typedef struct fkv_step fkv_step;

typedef struct fkv_row {
    fkv_seq seq;       /* each sequence may occur at most once in a step */
    uint32_t n_tokens; /* tokens to append: 1 for decode, the chunk size for prefill */
} fkv_row;

/* Begins a step: allocates the pages of the new tokens and copies shared pages that will be written. The T tokens of the step are
 * the tokens of rows[0], followed by the tokens of rows[1], and so on. */
FKV_API fkv_status fkv_step_begin(fkv_cache *cache, const fkv_row *rows, uint32_t n_rows, fkv_step **step);

/* Quantizes the K and V rows of one layer into their pages. Each layer must be written exactly once per step. k, v: [T, G, D].
 * Latent layer: k: [T, D + R]; v must be NULL. */
FKV_API fkv_status fkv_write(fkv_step *step, uint32_t layer, const void *k, const void *v);

/* Computes softmax(scale * q.K + mask).V directly on packed pages. Each query attends to the tokens of its own sequence, up to
 * and including itself. The layer must have been written in this step. q, out: [T, H, D]; out may alias q. Latent layer:
 * q: [T, H, D + R], out: [T, H, D]; out must not overlap q. */
FKV_API fkv_status fkv_attend(fkv_step *step, uint32_t layer, const void *q, void *out);

/* Addresses of the recurrent states that one row of a step reads and writes in one state layer. */
typedef struct fkv_state_row {
    const void *in; /* [state_bytes] state before the row's tokens; NULL if the sequence is empty */
    void *out;      /* [state_bytes] receives the state after the row's tokens; its previous contents are undefined */
} fkv_state_row;

/* Writes the state addresses of all rows of the step to rows: [n_rows]. The addresses are aligned to 64 bytes, and valid until
 * commit or abort. Must be called exactly once per step for each state layer, unless fkv_step_keep() requires a second call. The
 * caller must write every state completely before it commits the step. */
FKV_API fkv_status fkv_state_rows(fkv_step *step, uint32_t layer, fkv_state_row *rows);

/* Discards tokens at the ends of rows, for example rejected draft tokens: fkv_step_commit() appends only the first n_tokens[i]
 * tokens of row i. n_tokens: [n_rows], each from 1 to the row's number of tokens. If a row becomes shorter, all state layers
 * count as not written. The caller must then call fkv_state_rows() again for each state layer and write the state of each
 * shortened row i after its first n_tokens[i] tokens. The states of the other rows remain valid. Works with every kind of layer,
 * unlike fkv_seq_truncate(). */
FKV_API fkv_status fkv_step_keep(fkv_step *step, const uint32_t *n_tokens);

/* Commits a step: appends its tokens to their sequences. Returns FKV_BAD_STATE if a layer has not been written. */
FKV_API fkv_status fkv_step_commit(fkv_step *step);

/* Aborts a step: restores every sequence to its state before fkv_step_begin(). Sequences closed during the step stay closed. */
FKV_API fkv_status fkv_step_abort(fkv_step *step);

/* ---- page files ---------------------------------------------------------------------------------------------- */

/* Saves the first n_tokens tokens of a sequence (0: all of them) with their pages. tokens: [n_tokens], the tokens that the rows
 * were computed from. Writes atomically: to path.part, then renames. A path that ends in .part is rejected. An existing regular
 * file at path is replaced. If path is anything else (link, device, pipe, socket or folder), returns FKV_IO. FKV_IO is also
 * returned if the file was saved but its folder could not be synced; the message then says so. Returns FKV_GONE if a required
 * page has been dropped by a sliding-window layer or has already been sealed, or if the cache has state layers and n_tokens is
 * not the length of the sequence. docs/page_format.md specifies the file format. */
FKV_API fkv_status fkv_seq_save(fkv_cache *cache, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens, const char *path);

/* Opens a sequence and loads it from a page file. The whole file is verified before the cache is changed. config is interpreted
 * as in fkv_seq_open(), with one exception: if a prompt is given and does not begin with the saved tokens, returns
 * FKV_BAD_ARGUMENT. A file that changes while it is being read is also rejected, but cached prefixes may already have been
 * evicted to make room. */
FKV_API fkv_status fkv_seq_load(fkv_cache *cache, const fkv_seq_config *config, const char *path, fkv_seq *seq);

typedef struct fkv_file_info {
    uint32_t version;
    uint32_t n_layers;
    uint32_t n_tokens;
    uint32_t page_tokens;
    fkv_type page_type;
    fkv_rotate rotate;
    uint64_t rotation_seed;
    uint64_t n_pages;
    uint64_t file_bytes;
    fkv_layer_config first_layer; /* shape, window and codecs of the first layer with keys; fields that are not stored in the file
                                     (n_q_heads, scale, softcap, sink_logits, channel_bits) are 0 */
    uint8_t weights_id[32];
    char rope_id[64];
    char numerics[32];
} fkv_file_info;

/* Reads a page file and checks everything except its pages. If verify is true, also verifies the checksum of every page. Does
 * not need a cache. */
FKV_API fkv_status fkv_file_inspect(const char *path, bool verify, fkv_file_info *info);

/* Reads the first `capacity` tokens of a page file. *n_tokens receives the number of tokens in the file. tokens may be NULL if
 * capacity is 0. */
FKV_API fkv_status fkv_file_tokens(const char *path, uint32_t *tokens, uint32_t capacity, uint32_t *n_tokens);

#ifdef __cplusplus
}
#endif

#endif
