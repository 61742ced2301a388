/* flatkv: a KV cache whose memory is a flat line. The whole library API on host memory.
 *
 * Who owns what
 *   The cache owns every page, table and byte of scratch. All of it is taken by fkv_cache_open() and given back by
 *   fkv_cache_close(); nothing in between takes or gives back memory. Arrays passed in are read or written during the
 *   call only. Sequences are numbers, not pointers: a number that was closed is recognised and refused.
 *
 * Threads
 *   One thread at a time drives a cache. fkv_cache_stats() may be called from any thread at any time between open and
 *   close. Different caches are independent. The library starts its own workers (fkv_config.n_threads - 1 for each cache).
 *
 * Errors
 *   Every call that can fail returns fkv_status: 0 is good, everything else is negative and has changed nothing.
 *   fkv_message() says, for the calling thread, what was wrong with the last call that failed and what to do about it.
 *   FKV_POOL_FULL and the other "does not fit" statuses are ordinary results. The library never exits, prints or reads the
 *   environment.
 *
 * Shapes
 *   T tokens of the step, H query heads, G KV heads, D head dimension. Row arrays are dense and row-major, of
 *   fkv_config.row_type: k, v: [T, G, D]; q, out: [T, H, D].
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
    FKV_MAX_GROUPS = 8, /* layer groups: distinct (window, sinks) pairs */
    FKV_MAX_HEAD_DIM = 512,
    FKV_MAX_HEADS_PER_KV = 128 /* query heads served by one KV head */
};

/* ---- status -------------------------------------------------------------------------------------------------- */

typedef enum fkv_status {
    FKV_OK = 0,

    /* the call was wrong */
    FKV_BAD_ARGUMENT = -1, /* a null pointer, a number out of range, tokens that contradict the sequence */
    FKV_BAD_CONFIG = -2,   /* a shape, codec or size that cannot be */
    FKV_BAD_SEQ = -3,      /* not a sequence of this cache, or closed */
    FKV_BAD_STATE = -4,    /* right call, wrong moment: no step open, a step open, layer not written, committed twice */

    /* it does not fit; nothing was admitted */
    FKV_POOL_FULL = -20, /* not enough pages for the whole life of this sequence */
    FKV_SEQ_FULL = -21,  /* rows beyond the tokens this sequence reserved; see fkv_seq_reserve() */
    FKV_SEQS_FULL = -22, /* max_seqs sequences are open */
    FKV_STEP_FULL = -23, /* more rows than max_step_tokens in one step */
    FKV_NO_MEMORY = -24, /* the machine or its cgroup cannot give what the plan needs */
    FKV_GONE = -25,      /* these tokens have left the window and cannot be brought back */
    FKV_BUSY = -26,      /* an engine's queue is full, or the wait would be too long: come back later */

    /* files */
    FKV_IO = -40,           /* the operating system refused; the message has its text */
    FKV_FILE_FORMAT = -41,  /* not a page file */
    FKV_FILE_VERSION = -42, /* a page file of a version this library does not read */
    FKV_FILE_DAMAGED = -43, /* truncated, or a checksum does not agree */
    FKV_FILE_FOREIGN = -44, /* sound, but of another model, shape, codec, rotation or RoPE */

    /* the machine */
    FKV_UNSUPPORTED = -60, /* this machine or this build cannot do it */
    FKV_DEVICE = -61       /* the library of a device failed; the message has its text */
} fkv_status;

/* The name of a status, as written above. Never NULL. */
FKV_API const char *fkv_status_name(fkv_status status);

/* Why the last failing call of this thread failed, with the values and what to do. "" if nothing failed yet. */
FKV_API const char *fkv_message(void);

FKV_API const char *fkv_version(void);

/* ---- configuration ------------------------------------------------------------------------------------------- */

typedef enum fkv_type { FKV_F32 = 0, FKV_F16 = 1, FKV_BF16 = 2 } fkv_type;

typedef enum fkv_rotate {
    FKV_ROTATE_NONE = 0,
    FKV_ROTATE_K = 1, /* keys, and queries at attention time */
    FKV_ROTATE_V = 2, /* values, undone on the output */
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
    FKV_CODEC_AUTO = 0,      /* bits decide: 16 are FKV_CODEC_HALF, fewer FKV_CODEC_AFFINE */
    FKV_CODEC_HALF = 1,      /* 16 bits: the numbers themselves; group is ignored */
    FKV_CODEC_AFFINE = 2,    /* 8, 4 or 2 bits, a scale and a bias for each group of 32, 64 or 128 along the head dimension */
    FKV_CODEC_SEALED = 3,    /* K, 4, 3 or 2 bits: full pages packed again, a scale and a bias for each channel of a page */
    FKV_CODEC_SEALED_V = 4,  /* V beside it, 4, 3 or 2 bits: a norm for each row and a codebook; rotate V */
    FKV_CODEC_TURBO = 5,     /* TurboQuant, 4, 3 or 2 bits: one scale for each row and a codebook; its side must be rotated */
    FKV_CODEC_CALIBRATED = 6 /* K, 4 or 3 bits on average: sealed, with 2, 4 or 6 bits for each channel (channel_bits) */
} fkv_codec_kind;

/* How one side (K or V) is stored. {8, 64} is affine codes of 8 bits in groups of 64. */
typedef struct fkv_codec_config {
    uint32_t bits;
    uint32_t group;
    fkv_codec_kind kind;
} fkv_codec_config;

/* The codecs of both sides by their names, K first: "8/4", "16/16", "4/4g32", "8/tq4", "s4/s4", "tq4" for both, "sealed",
 * which is "s4/s4", or "calibrated", which is "c4/s4". Without g the groups stay those of *k and *v. FKV_BAD_CONFIG, with the
 * names there are; *k and *v are then unchanged. */
FKV_API fkv_status fkv_codec_parse(const char *text, fkv_codec_config *k, fkv_codec_config *v);

/* What a model and a program need to know of one side. */
typedef struct fkv_codec_info {
    const char *name;      /* as fkv_codec_parse() reads it: "8" */
    uint32_t group;        /* numbers that share a scale; 0: this codec has no groups */
    uint32_t dim_multiple; /* the head dimension must be a multiple of it */
    bool rotates;          /* rotation makes it better */
    bool needs_rotation;   /* fkv_config.rotate without its side is FKV_BAD_CONFIG */
} fkv_codec_info;

/* FKV_BAD_CONFIG for a kind, width or group that does not exist. */
FKV_API fkv_status fkv_codec_about(fkv_codec_config config, fkv_codec_info *info);

typedef struct fkv_layer_config {
    uint32_t n_q_heads;
    uint32_t n_kv_heads; /* divides n_q_heads */
    uint32_t head_dim;   /* a multiple of 16, 16 to FKV_MAX_HEAD_DIM; a multiple of the group of a quantized side */
    uint32_t window;     /* a query sees itself and the window - 1 tokens before it; 0: all tokens */
    uint32_t n_sinks;    /* tokens at the front that a windowed layer keeps seeing; 0 where window is 0 */
    float scale;         /* of the scores, 1e-6 to 1e6 in size; 0: 1/sqrt(head_dim) */
    float softcap;       /* c * tanh(score / c); 0: none */
    fkv_codec_config k;
    fkv_codec_config v;
    const float *sink_logits; /* [n_q_heads] or NULL; copied. Learned sinks: one more score for each query head, natural, behind
                                 scale and soft cap, that counts in the denominator of the softmax and has no value. Part of the
                                 weights: page files know it by weights_id alone */
    const uint8_t *channel_bits; /* [n_kv_heads, head_dim] of 2, 4 and 6, for K of FKV_CODEC_CALIBRATED, else NULL; copied. Every
                                    head has k.bits on average, and a multiple of 4 channels of 4 bits, and of 6. Page files have
                                    a hash of it */
} fkv_layer_config;

typedef void (*fkv_log_fn)(void *user, const char *line);

typedef struct fkv_config {
    uint32_t n_layers;
    fkv_layer_config layer;         /* every layer, unless layers says otherwise */
    const fkv_layer_config *layers; /* [n_layers] or NULL; read by plan and open, not kept */

    fkv_type row_type;  /* of k, v, q and out */
    fkv_type page_type; /* FKV_F16 or FKV_BF16: scales, biases and 16-bit rows inside pages */
    fkv_rotate rotate;
    uint64_t rotation_seed;

    uint32_t page_tokens;     /* a power of two, 16 to 256 */
    uint32_t max_tokens;      /* of all sequences and cached prefixes together; max_seqs sequences that add up to it always fit */
    uint32_t max_seqs;        /* sequences open at once */
    uint32_t max_step_tokens; /* rows in one step: the prefill chunk and the decode rows beside it */

    uint32_t n_threads;    /* that work on a step, the caller's included; 0: one for each core the process may use */
    fkv_isa isa;           /* vector kernels; AUTO: the best this machine runs */
    bool lazy;             /* pages are committed on first touch instead of at open; still capped by the plan */
    uint64_t memory_limit; /* bytes this cache may plan for; 0: no limit but what fkv_memory_available() says */

    uint8_t weights_id[32]; /* identity of the weights, for page files: any 32 bytes, the same for the same weights */
    char rope_id[64];       /* RoPE as text, for page files: "neox base=1000000", 0-terminated */

    fkv_log_fn log; /* NULL, or called with a line of text for events at open and close */
    void *log_user;
} fkv_config;

/* K8/V4 in groups of 64, fp16 scales, f32 rows, pages of 64 tokens, one sequence, steps of 512. Shapes and max_tokens
 * are zero and must be filled in. */
FKV_API fkv_config fkv_config_default(void);

/* ---- plan ---------------------------------------------------------------------------------------------------- */

/* Exact bytes, before anything is taken. total = slab + tables + scratch + stacks; scratch does not depend on
 * max_tokens. */
typedef struct fkv_plan {
    uint64_t total_bytes;
    uint64_t slab_bytes;    /* the pages, and what a device takes beside them */
    uint64_t tables_bytes;  /* page tables, pool, prefix tree */
    uint64_t scratch_bytes; /* tiles and partial results of the workers */
    uint64_t stacks_bytes;  /* of the workers */
    uint64_t token_bytes;   /* one token over all layers, both sides, scales included */
    uint32_t n_groups;
    uint32_t group_pages[FKV_MAX_GROUPS];
    uint64_t group_page_bytes[FKV_MAX_GROUPS];
    uint32_t n_threads;
} fkv_plan;

FKV_API fkv_status fkv_plan_make(const fkv_config *config, fkv_plan *plan);

/* Bytes this process could still take: the least of the machine's available memory, the room under every cgroup limit above the
 * process, and the room under its address space limit; on Apple the free and inactive memory. *source (may be NULL) names what
 * bound it. UINT64_MAX if the system does not say. fkv_cache_open() refuses a plan above it. */
FKV_API uint64_t fkv_memory_available(const char **source);

/* ---- cache --------------------------------------------------------------------------------------------------- */

typedef struct fkv_cache fkv_cache;

/* Takes all of the plan, or says what did not fit (FKV_NO_MEMORY, with the numbers in fkv_message()). */
FKV_API fkv_status fkv_cache_open(const fkv_config *config, fkv_cache **cache);

/* Gives everything back, open sequences and an open step included, with closes that wait for its end. NULL is allowed. */
FKV_API void fkv_cache_close(fkv_cache *cache);

typedef struct fkv_group_stats {
    uint32_t pages;    /* total = free + held + cached */
    uint32_t free;     /* in no table and no tree */
    uint32_t held;     /* in the table of a sequence, or on the way to such a page in the prefix tree: cannot be given up */
    uint32_t shared;   /* of the held: by two holders or more, the prefix tree counts as one */
    uint32_t cached;   /* by the prefix tree alone: given up, oldest leaf first, when a promise needs them */
    uint32_t pinned;   /* of the held: in the prefix tree */
    uint32_t promised; /* not yet taken, but sure to be there for the open sequences */
} fkv_group_stats;

typedef struct fkv_stats {
    uint64_t planned_bytes; /* taken at open; constant */
    uint32_t n_groups;
    fkv_group_stats groups[FKV_MAX_GROUPS];
    uint32_t seqs;              /* open */
    uint64_t steps;             /* committed */
    uint64_t aborts;            /* steps */
    uint64_t tokens;            /* rows committed */
    uint64_t page_copies;       /* copy-on-write */
    uint64_t hit_tokens;        /* tokens that fkv_seq_open() found in the prefix tree */
    uint64_t hits;              /* sequences opened with at least one such token */
    uint64_t evictions;         /* pages the prefix tree gave up */
    uint64_t packed_bytes_read; /* by attention, from pages: shows that it read them packed */
    const char *isa;            /* kernels in use */
} fkv_stats;

/* Any thread. Each figure is exact for some moment during the call. */
FKV_API fkv_status fkv_cache_stats(const fkv_cache *cache, fkv_stats *stats);

typedef enum fkv_page_state {
    FKV_PAGE_FREE,    /* or promised: a promise is a number, not a page */
    FKV_PAGE_PRIVATE, /* one sequence's own */
    FKV_PAGE_SHARED,  /* two sequences or more have it */
    FKV_PAGE_CACHED,  /* the prefix tree's alone: can be given up */
    FKV_PAGE_PINNED   /* the prefix tree's, and one sequence has it, or one that goes on behind it */
} fkv_page_state;

typedef struct fkv_page_info {
    fkv_page_state state;
    uint64_t tenant; /* whose it is; 0 for free ones */
} fkv_page_info;

/* The pages of a group in their order, for a picture of them: all of them, or `capacity` at even distances where there are more.
 * Returns how many were written; 0 for a group that is none. Driving thread only. */
FKV_API uint32_t fkv_cache_pages(const fkv_cache *cache, uint32_t group, fkv_page_info *list, uint32_t capacity);

/* Walks every structure and checks its invariants: for tests and debugging. Driving thread only. */
FKV_API bool fkv_cache_consistent(const fkv_cache *cache);

/* ---- sequences ----------------------------------------------------------------------------------------------- */

/* 0 is never a sequence. No two of the 2^48 - 1 sequences that a process opens one after the other have the same number, in one
 * cache or in several: a closed number and one of another cache are refused. */
typedef uint64_t fkv_seq;

typedef struct fkv_seq_config {
    uint32_t max_tokens;    /* prompt and everything that may follow: pages are promised for all of it */
    uint64_t tenant;        /* prefixes are shared within one tenant only */
    const uint32_t *prompt; /* [n_prompt] or NULL: what the prefix tree holds of it is shared */
    uint32_t n_prompt;
} fkv_seq_config;

/* Opens a sequence; *n_shared (may be NULL) tokens of the prompt are already there and need no compute: whole pages,
 * possibly all n_prompt tokens (pass one token less to be left with one to compute). FKV_POOL_FULL if its whole life does
 * not fit beside what was promised to others; pages found in the tree count. A prefix is pinned by keeping a sequence open
 * on it with max_tokens = n_prompt. */
FKV_API fkv_status fkv_seq_open(fkv_cache *cache, const fkv_seq_config *config, fkv_seq *seq, uint32_t *n_shared);

/* A second sequence with the same tokens, sharing every page until one of the two writes. Same tenant. */
FKV_API fkv_status fkv_seq_fork(fkv_cache *cache, fkv_seq seq, uint32_t max_tokens, fkv_seq *child);

/* Changes the promise of a sequence to max_tokens, more or less than before. FKV_POOL_FULL, with the numbers, if the pages for it
 * are promised to others; FKV_BAD_ARGUMENT if the sequence is longer than that already. Less always fits, and what is no longer
 * promised is there for others at once. */
FKV_API fkv_status fkv_seq_reserve(fkv_cache *cache, fkv_seq seq, uint32_t max_tokens);

/* Forgets the tokens from n_tokens on. The promise of max_tokens stays: FKV_POOL_FULL if pages let go are kept by others
 * and the promise can no longer be made. FKV_GONE if a windowed layer has dropped what token n_tokens would have to see, or if
 * token n_tokens of sealed layers would have to see pages open that no longer are: going back by a page is exact, further back
 * mostly starts of spans of 4 pages can be reached alone (the message says which). */
FKV_API fkv_status fkv_seq_truncate(fkv_cache *cache, fkv_seq seq, uint32_t n_tokens);

/* Lets go of the sequence; its number is refused from now on (FKV_BAD_SEQ), a second close included. Allowed while a step is
 * open, whether the sequence has rows in it or not. Its pages, its promise and its place among max_seqs then stay until the step
 * ends, by commit or abort alike. Its rows are written and attended like the others (every layer must still be written) and
 * thrown away: they do not count in fkv_stats.tokens, and nothing of them enters the prefix tree (offer a prefix before the
 * step). fkv_stats.seqs is lower at once. Calls that no step allows still answer FKV_BAD_STATE. */
FKV_API fkv_status fkv_seq_close(fkv_cache *cache, fkv_seq seq);

FKV_API fkv_status fkv_seq_length(const fkv_cache *cache, fkv_seq seq, uint32_t *n_tokens);

/* Offers the full pages of the first n_tokens tokens of seq to the prefix tree, under their exact tokens. The caller
 * guarantees that the rows were computed from these tokens; FKV_BAD_ARGUMENT if they contradict the prefix seq was opened on. */
FKV_API fkv_status fkv_prefix_insert(fkv_cache *cache, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens);

/* How many tokens fkv_seq_open() with this config would share now. Opens nothing, promises nothing and leaves the age of cached
 * prefixes as it is; does not ask whether the sequence would fit. Allowed while a step is open. */
FKV_API fkv_status fkv_prefix_match(const fkv_cache *cache, const fkv_seq_config *config, uint32_t *n_shared);

/* Gives up every cached page that no sequence uses. */
FKV_API fkv_status fkv_prefix_clear(fkv_cache *cache);

/* ---- steps --------------------------------------------------------------------------------------------------- */

/* One forward pass over any mix of prefill chunks and decode rows. A cache has one step at a time; the handle belongs to the
 * cache and is good until commit or abort. While a step is open, sequences and prefixes cannot be changed (FKV_BAD_STATE), but
 * sequences can be closed. */
typedef struct fkv_step fkv_step;

typedef struct fkv_row {
    fkv_seq seq;       /* each sequence at most once in a step */
    uint32_t n_tokens; /* new tokens appended to it: 1 for decode, a chunk for prefill */
} fkv_row;

/* Slots are assigned, shared pages about to be written are copied. The T rows of the step are the tokens of rows[0], then those
 * of rows[1], and so on. */
FKV_API fkv_status fkv_step_begin(fkv_cache *cache, const fkv_row *rows, uint32_t n_rows, fkv_step **step);

/* Quantizes the K and V rows of one layer straight into their pages. k, v: [T, G, D]. */
FKV_API fkv_status fkv_write(fkv_step *step, uint32_t layer, const void *k, const void *v);

/* softmax(scale * q.K + mask).V over packed pages, each query over the tokens of its own sequence up to and with itself.
 * The layer must have been written in this step. q, out: [T, H, D]; out may be q. */
FKV_API fkv_status fkv_attend(fkv_step *step, uint32_t layer, const void *q, void *out);

/* Makes the step's tokens part of their sequences. Every layer must have been written. */
FKV_API fkv_status fkv_step_commit(fkv_step *step);

/* Undoes the step: every sequence is as it was before fkv_step_begin(). Sequences closed meanwhile are closed. */
FKV_API fkv_status fkv_step_abort(fkv_step *step);

/* ---- page files ---------------------------------------------------------------------------------------------- */

/* Saves the first n_tokens tokens of seq (0: all of them) with their pages. tokens: [n_tokens], what the rows were computed
 * from. The file appears under its name complete or not at all (it is made as path.part, a name that no finished file may have).
 * A regular file at path is replaced; anything else there (a link, device, pipe, socket or folder) is left alone: FKV_IO. FKV_IO
 * can also mean that the file is there but the folder could not be synced. FKV_GONE if a windowed layer has dropped what is
 * needed, or if it is sealed by now. */
FKV_API fkv_status fkv_seq_save(fkv_cache *cache, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens, const char *path);

/* Opens a sequence and fills it from a file that was verified in full first. config as for fkv_seq_open(); a prompt, where
 * given, must begin with the saved tokens (else FKV_BAD_ARGUMENT). A file that changes while it is read is refused too, but
 * unused prefixes may have been given up for it by then. */
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
    fkv_layer_config first_layer; /* shape, window and codecs of layer 0; n_q_heads, scale, softcap and sink_logits are not stored
                                     and read 0 */
    uint8_t weights_id[32];
    char rope_id[64];
} fkv_file_info;

/* Reads the header; with verify, also every page against its checksum. Needs no cache. */
FKV_API fkv_status fkv_file_inspect(const char *path, bool verify, fkv_file_info *info);

/* The first `capacity` tokens the file was saved with; *n_tokens is how many it has. tokens may be NULL if capacity is 0. */
FKV_API fkv_status fkv_file_tokens(const char *path, uint32_t *tokens, uint32_t capacity, uint32_t *n_tokens);

#ifdef __cplusplus
}
#endif

#endif
