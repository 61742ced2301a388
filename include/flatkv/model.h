/* flatkv/model.h: models on top of flatkv.h. Load weights, tokenize, run a forward pass over packed pages, sample.
 *
 * Who owns what
 *   A fkv_model is the weights and the vocabulary of one file: read-only after fkv_model_load(), used by any number of runners,
 *   closed after the last of them. A fkv_runner is a cache, worker threads and the activations of one step: everything it will
 *   ever take is taken by fkv_runner_open() and was known from fkv_runner_plan(). Its sequences, prefixes and page files are
 *   those of its cache (fkv_runner_cache()) and are handled with flatkv.h. One thread drives a runner; on MLX the one that
 *   opened it, because MLX's streams belong to threads.
 *
 * Files are not trusted: every count, offset, shape and string is checked before it is used, and a file that is not right is
 * refused with FKV_FILE_FORMAT, FKV_FILE_DAMAGED or FKV_UNSUPPORTED and a message that says where and why.
 */
#ifndef FLATKV_MODEL_H
#define FLATKV_MODEL_H

#include "flatkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- backends ------------------------------------------------------------------------------------------------- */

/* Where a model runs. MLX: on its default device, Metal or CUDA where there is one, else its own CPU code. Models, tokens,
 * plans, sequences and page files are the same on both, and pages saved on one load on the other. */
typedef enum fkv_backend { FKV_BACKEND_CPU = 0, FKV_BACKEND_MLX = 1 } fkv_backend;

/* What the allocator of a backend holds for this process, by its own counters. */
typedef struct fkv_backend_memory {
    uint64_t active_bytes; /* in use */
    uint64_t cached_bytes; /* not in use, kept for the next step */
    uint64_t peak_bytes;   /* the most that was in use at once since a runner was last opened */
} fkv_backend_memory;

/* FKV_UNSUPPORTED for the CPU, which has no counters of its own: what it holds is the memory of the process. */
FKV_API fkv_status fkv_backend_memory_now(fkv_backend backend, fkv_backend_memory *now);

/* As fkv_memory_available(), of the memory that models of this backend live in: what MLX's own limit leaves, on a machine whose
 * GPU has memory of its own. 0 for a backend that is not there. */
FKV_API uint64_t fkv_backend_available(fkv_backend backend, const char **source);

/* ---- models -------------------------------------------------------------------------------------------------- */

typedef struct fkv_model fkv_model;

typedef struct fkv_model_config {
    fkv_backend backend; /* weights are loaded for it, every runner runs there; MLX is FKV_UNSUPPORTED until fkv_mlx_register() */
    uint32_t n_threads;  /* that repack weights; 0: one for each core the process may use */
    fkv_isa isa;         /* kernels the weights are laid out for and that will run; AUTO: the best of this machine */
    bool plan_only;      /* weights stay in the file: tokens and plans only, no runner can be opened */
    fkv_log_fn log;      /* NULL, or called with a line of text for events */
    void *log_user;
} fkv_model_config;

FKV_API fkv_model_config fkv_model_config_default(void);

/* path: a .gguf file, any part of one that was split (the others lie beside it), or a folder with config.json and .safetensors
 * files. A GGUF file without tensors loads as a vocabulary: it tokenizes, and no runner opens. */
FKV_API fkv_status fkv_model_load(const char *path, const fkv_model_config *config, fkv_model **model);
FKV_API void fkv_model_close(fkv_model *model); /* NULL is allowed */

enum { FKV_NO_TOKEN = UINT32_MAX, FKV_MAX_END_TOKENS = 16 };

typedef struct fkv_model_info {
    const char *architecture; /* "llama", "qwen2", "qwen3", "gemma3" */
    const char *name;         /* as the file calls itself, or "" */
    const char *tokenizer;    /* "byte", "bpe", "spm" */
    uint32_t n_layers;
    uint32_t dim;
    uint32_t ffn_dim;
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window;  /* of the windowed layers; 0: none */
    uint32_t context; /* tokens the model was trained for */
    uint32_t n_vocab;
    uint32_t bos;   /* or FKV_NO_TOKEN */
    bool add_bos;   /* prompts begin with it */
    bool has_chat;  /* it has a chat template (fkv_chat_tokenize()); others complete text */
    uint32_t n_end; /* tokens that end a text */
    uint32_t end[FKV_MAX_END_TOKENS];
    uint64_t n_parameters;
    uint64_t file_bytes;    /* mapped */
    uint64_t packed_bytes;  /* of weights repacked at load: anonymous memory, or MLX's */
    uint8_t weights_id[32]; /* SHA-256 over the files' headers and samples of their tensors */
    char rope_id[64];
} fkv_model_info;

FKV_API const fkv_model_info *fkv_model_about(const fkv_model *model);

/* ---- tokens -------------------------------------------------------------------------------------------------- */

typedef enum fkv_tokenize_flags {
    FKV_TOKENIZE_PLAIN = 0,
    FKV_TOKENIZE_BOS = 1,     /* begin with bos where the model wants it (add_bos) */
    FKV_TOKENIZE_SPECIAL = 2, /* "<|im_end|>" and the like become their tokens; else they are text: for what users type */
} fkv_tokenize_flags;

/* Any bytes are taken; what is not UTF-8 is tokenized byte by byte as the reference does. tokens: [capacity] or NULL where
 * capacity is 0; *n_tokens is how many there are, also when that is more than capacity (only the first capacity are written). */
FKV_API fkv_status fkv_tokenize(const fkv_model *model, const char *text, size_t n_bytes, unsigned flags, uint32_t *tokens,
                                size_t capacity, size_t *n_tokens);

/* The bytes a token stands for in a text, possibly a part of a character; "" for a token out of range, and for special tokens
 * unless `special`. The pointer lives as long as the model. */
FKV_API const char *fkv_token_text(const fkv_model *model, uint32_t token, bool special, size_t *n_bytes);

/* ---- chat ---------------------------------------------------------------------------------------------------- */

/* A conversation as the model's own template writes it. `conversation` is a JSON object with an array "messages" (role, content,
 * tool_calls, ...) and whatever else the template looks at: "tools", "add_generation_prompt", "enable_thinking". now: seconds
 * since 1970 in the caller's own time zone, for templates that write the date; NULL: such templates are refused.
 *
 * Nothing of the conversation ever becomes a special token, whatever it says. FKV_UNSUPPORTED for a model without a chat template
 * (has_chat), FKV_BAD_ARGUMENT for a conversation that the template refuses, with its words.
 *
 * tokens, text: [capacity] or NULL where capacity is 0; the number there is comes back, also when that is more than capacity. No
 * bos is added: templates write their own. */
FKV_API fkv_status fkv_chat_tokenize(const fkv_model *model, const char *conversation, size_t n_bytes, const int64_t *now,
                                     uint32_t *tokens, size_t capacity, size_t *n_tokens);

/* The same as text. given: [capacity] or NULL; 1 where a byte came from the conversation, 0 where the template wrote it. */
FKV_API fkv_status fkv_chat_render(const fkv_model *model, const char *conversation, size_t n_bytes, const int64_t *now,
                                   char *text, uint8_t *given, size_t capacity, size_t *n_text);

/* fkv_tokenize() with FKV_TOKENIZE_SPECIAL, where special tokens are found only in bytes that are not given. given: [n_bytes] */
FKV_API fkv_status fkv_tokenize_given(const fkv_model *model, const char *text, const uint8_t *given, size_t n_bytes,
                                      uint32_t *tokens, size_t capacity, size_t *n_tokens);

/* ---- replies ------------------------------------------------------------------------------------------------- */

/* A reply while it streams: text, reasoning and tool calls, told apart as the model's family writes them. */
typedef enum fkv_reasoning_syntax {
    FKV_REASONING_AUTO = 0, /* as the template and the vocabulary of the model say */
    FKV_REASONING_NONE,
    FKV_REASONING_THINK,    /* <think> ... </think>: Qwen3, DeepSeek R1, GLM, SmolLM3 */
    FKV_REASONING_BRACKETS, /* [THINK] ... [/THINK]: Magistral, Ministral 3 */
    FKV_REASONING_HARMONY,  /* channels of gpt-oss */
    FKV_REASONING_CHANNEL,  /* <|channel>thought ... <channel|>: Gemma 4 */
} fkv_reasoning_syntax;

typedef enum fkv_tool_syntax {
    FKV_TOOLS_AUTO = 0,
    FKV_TOOLS_NONE,
    FKV_TOOLS_JSON,       /* <tool_call>{"name": ..., "arguments": ...}</tool_call>, or that JSON alone where it names one of the
                             tools and nothing was said before: Qwen2.5, Qwen3, Hermes */
    FKV_TOOLS_PARAMETERS, /* <function=NAME><parameter=KEY>: Qwen3-Coder */
    FKV_TOOLS_MISTRAL,    /* [TOOL_CALLS] */
    FKV_TOOLS_LLAMA,      /* <|python_tag|>, or JSON alone that names one of the tools: Llama 3.x */
    FKV_TOOLS_HARMONY,    /* gpt-oss */
    FKV_TOOLS_GEMMA,      /* <|tool_call>call:NAME{...}<tool_call|>: Gemma 4 */
    FKV_TOOLS_ARG_KEYS,   /* <tool_call>NAME<arg_key>KEY</arg_key><arg_value>: GLM */
    FKV_TOOLS_KIMI,       /* <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}: Kimi K2 */
    FKV_TOOLS_PYTHONIC,   /* <|tool_call_start|>[NAME(key="text", key=1)]<|tool_call_end|>: LFM2 */
    FKV_TOOLS_INVOKE,     /* <minimax:tool_call><invoke name="NAME"><parameter name="KEY">: MiniMax M2 */
} fkv_tool_syntax;

typedef struct fkv_reply_syntax {
    fkv_reasoning_syntax reasoning;
    fkv_tool_syntax tools;
} fkv_reply_syntax;

FKV_API fkv_reply_syntax fkv_reply_syntax_of(const fkv_model *model); /* never AUTO */

typedef enum fkv_reply_kind {
    FKV_REPLY_TEXT = 0,
    FKV_REPLY_REASONING,
    FKV_REPLY_CALL,      /* a tool call begins; bytes are its name */
    FKV_REPLY_ARGUMENTS, /* a piece of its arguments, which are JSON as far as the model wrote JSON */
    FKV_REPLY_CALL_END,
} fkv_reply_kind;

/* bytes: whole UTF-8 characters, good during the call only; a byte that is none came out as U+FFFD. */
typedef struct fkv_reply_event {
    fkv_reply_kind kind;
    uint32_t call; /* the number of the call, from 0 */
    const char *bytes;
    size_t n_bytes;
    bool complete; /* FKV_REPLY_CALL_END: brackets and tags were closed */
} fkv_reply_event;

typedef void (*fkv_reply_fn)(void *user, const fkv_reply_event *event);

typedef struct fkv_reply_config {
    fkv_reply_syntax syntax;
    const char *tools; /* NULL, or the JSON array "tools" of the conversation: names and types of arguments */
    size_t n_tools;
    const uint32_t *prompt; /* its last tokens say whether the template has opened the reasoning already */
    size_t n_prompt;
    const char *const *stop; /* [n_stop] texts that end the reply, and do not come out themselves; copied */
    uint32_t n_stop;         /* at most FKV_MAX_STOPS, each of 1 to FKV_MAX_STOP_BYTES bytes */
    fkv_reply_fn on_event;
    void *user;
} fkv_reply_config;

enum { FKV_MAX_STOPS = 16, FKV_MAX_STOP_BYTES = 256 };

typedef struct fkv_reply fkv_reply;

FKV_API fkv_reply_config fkv_reply_config_default(void);
FKV_API fkv_status fkv_reply_open(const fkv_model *model, const fkv_reply_config *config, fkv_reply **reply);
FKV_API void fkv_reply_close(fkv_reply *reply); /* NULL is allowed */

/* What the model wrote next, in pieces of any size: joined, the events are the same however it is cut. fkv_reply_token() feeds
 * the text of a token, special tokens where they mean something here. All memory is taken at open (64 KB): until a call's name is
 * known at most 32 KB of it are held; what turns out to be no call, or is longer, comes out as text. */
FKV_API fkv_status fkv_reply_token(fkv_reply *reply, uint32_t token);
FKV_API fkv_status fkv_reply_feed(fkv_reply *reply, const char *bytes, size_t n_bytes);

/* Whether a stop text was met: what follows it is not looked at. */
FKV_API bool fkv_reply_stopped(const fkv_reply *reply);

/* Whatever was held comes out; a call that is still open ends incomplete. Nothing can be fed from then on. */
FKV_API fkv_status fkv_reply_end(fkv_reply *reply);

/* ---- runners ------------------------------------------------------------------------------------------------- */

typedef struct fkv_runner fkv_runner;

typedef struct fkv_runner_config {
    uint32_t max_tokens; /* 0: the context of the model */
    uint32_t max_seqs;
    uint32_t max_step_tokens; /* the prefill chunk and the decode rows beside it */
    uint32_t max_logit_rows;  /* rows of one step whose logits are asked for; at most max_step_tokens */
    fkv_codec_config k;       /* a group that does not divide the head dimension pads the heads inside pages */
    fkv_codec_config v;
    const char *calibration; /* file for K of FKV_CODEC_CALIBRATED; NULL: the one beside the model. Read by plan and open */
    fkv_rotate rotate;       /* a side of 16 bits is not rotated */
    uint64_t rotation_seed;
    uint32_t max_kv;  /* bounded context: every full layer gets a window of this many tokens; 0: no bound */
    uint32_t n_sinks; /* with it */
    uint32_t page_tokens;
    uint32_t n_threads;    /* 0: one for each core */
    fkv_isa isa;           /* of the CPU */
    bool lazy;             /* on the CPU */
    uint64_t memory_limit; /* of the plan without the weights; 0: none */
    fkv_log_fn log;
    void *log_user;
} fkv_runner_config;

/* Sealed 4/4, rotated where the codecs want it (some models need it even at 8 bits: docs/results.md), the model's context,
 * one sequence, steps of 512, one row of logits. */
FKV_API fkv_runner_config fkv_runner_config_default(void);

/* Everything a running model takes. total = cache.total + activations; weights are their own lines. On the CPU all of it is taken
 * by fkv_runner_open(). On MLX that holds for the cache; activations come and go with every step, and are the most that MLX may
 * hold at once beside weights and pages, with what it keeps in its buffer cache for the next step. */
typedef struct fkv_runner_plan {
    uint64_t total_bytes;       /* CPU: anonymous, resident (pages: unless lazy) */
    uint64_t activations_bytes; /* of one step, logits included; does not depend on max_tokens. Threads are the cache's */
    uint64_t packed_bytes;      /* weights repacked at load */
    uint64_t mapped_bytes;      /* weights used where the file is mapped: experts, and an embedding that is only looked up */
    uint64_t touched_bytes;     /* of the mapped ones, what one token reads */
    fkv_plan cache;
} fkv_runner_plan;

FKV_API fkv_status fkv_runner_plan_make(const fkv_model *model, const fkv_runner_config *config, fkv_runner_plan *plan);
FKV_API fkv_status fkv_runner_open(const fkv_model *model, const fkv_runner_config *config, fkv_runner **runner);
FKV_API void fkv_runner_close(fkv_runner *runner); /* NULL is allowed */

/* The runner's cache: sequences are opened, forked, truncated, saved, loaded and closed on it. Its steps are the runner's. */
FKV_API fkv_cache *fkv_runner_cache(fkv_runner *runner);

typedef enum fkv_logits { FKV_LOGITS_NONE = 0, FKV_LOGITS_LAST = 1, FKV_LOGITS_ALL = 2 } fkv_logits;

typedef struct fkv_tokens {
    fkv_seq seq; /* each sequence at most once in a step */
    const uint32_t *tokens;
    uint32_t n_tokens;
    fkv_logits logits; /* of which of these tokens */
} fkv_tokens;

/* One step over any mix of prefill chunks and decode rows. *logits (may be NULL where none is asked for): [rows asked for,
 * n_vocab] in the order of `rows`, good until the next call. A failure leaves every sequence as it was. The logits of a token
 * depend on its own sequence alone: on the CPU to the last bit; MLX chooses its products by the number of rows, and they round
 * differently (docs/mlx.md). On MLX a step is one evaluation. */
FKV_API fkv_status fkv_runner_forward(fkv_runner *runner, const fkv_tokens *rows, uint32_t n_rows, const float **logits);

/* ---- calibration --------------------------------------------------------------------------------------------- */

/* Bits shared out over the channels of keys (FKV_CODEC_CALIBRATED): a text goes through the model once, and a small file says how
 * many bits each channel of each layer and KV head gets, for 4 and for 3 on average. */
typedef struct fkv_calibrate_config {
    const uint32_t *tokens; /* [n_tokens] of any text: whole windows of 2048 are used, at least one; 16384 tokens are enough */
    size_t n_tokens;
    uint32_t n_threads; /* 0: one for each core */

    /* NULL, or called after every window; false stops: FKV_BAD_STATE, nothing is written. */
    bool (*progress)(void *user, size_t n_done, size_t n_tokens);
    void *user;
} fkv_calibrate_config;

/* Writes the file: under its name whole or not at all. On the CPU alone (FKV_UNSUPPORTED); the file is good on every backend. */
FKV_API fkv_status fkv_calibrate(const fkv_model *model, const fkv_calibrate_config *config, const char *path);

/* Where runners look for it where none is named: FILE.fkc beside a model of one file, calibration.fkc in a folder. path: [room]
 */
FKV_API fkv_status fkv_calibration_path(const fkv_model *model, char *path, size_t room);

typedef struct fkv_calibration_info {
    uint32_t n_layers;
    uint64_t n_tokens;      /* of the text */
    uint64_t n_channels;    /* of all layers and KV heads */
    uint64_t n_4[3];        /* of them with 2, 4 and 6 bits, where they have 4 on average */
    uint64_t n_3[3];        /* and where 3 */
    uint8_t weights_id[32]; /* of the model it is for */
} fkv_calibration_info;

/* Reads and checks all of a file: FKV_FILE_FORMAT, FKV_FILE_VERSION or FKV_FILE_DAMAGED, with the field and the reason. */
FKV_API fkv_status fkv_calibration_inspect(const char *path, fkv_calibration_info *info);

/* ---- sampling ------------------------------------------------------------------------------------------------ */

typedef struct fkv_logit_bias {
    uint32_t token;
    float bias; /* added to its logit; -INFINITY: never */
} fkv_logit_bias;

typedef struct fkv_sampler_config {
    float temperature; /* 0: greedy */
    uint32_t top_k;    /* 0: off */
    float top_p;       /* 1: off */
    float min_p;       /* 0: off */
    uint64_t seed;
    float repetition_penalty;   /* of tokens that were there; above 1 makes them less likely; 0 or 1: off */
    float presence_penalty;     /* taken off their logits once; 0: off */
    float frequency_penalty;    /* taken off for each time they were there; 0: off */
    uint32_t penalty_tokens;    /* how many of the last tokens count as there; 0: all */
    const fkv_logit_bias *bias; /* [n_bias], copied */
    uint32_t n_bias;
} fkv_sampler_config;

typedef struct fkv_sampler fkv_sampler;

FKV_API fkv_sampler_config fkv_sampler_config_default(void); /* greedy */
FKV_API fkv_status fkv_sampler_open(const fkv_sampler_config *config, uint32_t n_vocab, fkv_sampler **sampler);
FKV_API void fkv_sampler_close(fkv_sampler *sampler); /* NULL is allowed */

/* How the model's files say it should be sampled (generation_config.json, general.sampling of GGUF), over temperature 0.7, top_k
 * 40, top_p 0.95 and min_p 0.05. *said (may be NULL): they say anything. */
FKV_API fkv_sampler_config fkv_model_sampling(const fkv_model *model, bool *said);

/* Tokens that count as there for the penalties: a prompt, say. Those that fkv_sample() draws count by themselves. */
FKV_API fkv_status fkv_sampler_note(fkv_sampler *sampler, const uint32_t *tokens, size_t n_tokens);
FKV_API void fkv_sampler_forget(fkv_sampler *sampler); /* none was there; NULL is allowed */

/* The next token. Bias and penalties first, then filters in the order top_k, top_p, min_p, temperature, as llama.cpp. Same seed
 * and logits, same token. Of equal logits the lower token wins greedily. FKV_BAD_ARGUMENT where a logit is NaN. Takes no memory.
 */
FKV_API fkv_status fkv_sample(fkv_sampler *sampler, const float *logits, uint32_t *token);

#ifdef __cplusplus
}
#endif

#endif
