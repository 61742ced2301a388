/* flatkv/model.h: language models on top of flatkv.h. Loads weights, tokenizes text, runs forward passes over a paged KV cache,
 * and samples tokens.
 *
 * Ownership
 *   A fkv_model holds the weights and the vocabulary of one model. It is read-only after fkv_model_load(), may be shared by any
 *   number of runners, and must outlive all of them. A fkv_runner owns a cache, worker threads and the activations of one step.
 *   fkv_runner_open() allocates all memory a runner will ever use; fkv_runner_plan_make() computes its size in advance. A
 *   runner's sequences, prefixes and page files belong to its cache (fkv_runner_cache()) and are managed with flatkv.h.
 *
 * Threads
 *   A model may be used by several threads at once. A runner must be used by one thread at a time. On MLX, it must be used only
 *   by the thread that opened it, because MLX streams are bound to threads.
 *
 * Files
 *   Model files are untrusted input. Every count, offset, shape and string is validated before use. Invalid files are rejected
 *   with FKV_FILE_FORMAT, FKV_FILE_DAMAGED or FKV_UNSUPPORTED, and the error message names the field and the reason.
 */
#ifndef FLATKV_MODEL_H
#define FLATKV_MODEL_H

#include "flatkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- backends ------------------------------------------------------------------------------------------------- */

/* The backend that runs a model. FKV_BACKEND_MLX uses MLX's default device: Metal or CUDA if available, otherwise MLX's CPU
 * backend. Both backends support the same models and use the same page-file format. However, they compute slightly different
 * rows, so a runner cannot load pages that the other backend has saved (see fkv_config.numerics). */
typedef enum fkv_backend { FKV_BACKEND_CPU = 0, FKV_BACKEND_MLX = 1 } fkv_backend;

/* Registers FKV_BACKEND_MLX. Must be called once before a model is loaded with that backend. Defined in libflatkv_model_mlx.
 * Returns FKV_UNSUPPORTED if libflatkv_model and libflatkv_model_mlx have different versions. */
FKV_API fkv_status fkv_mlx_register(void);

/* Memory statistics of a backend's allocator, for this process. */
typedef struct fkv_backend_memory {
    uint64_t active_bytes; /* currently allocated */
    uint64_t cached_bytes; /* freed memory that the allocator keeps for reuse */
    uint64_t peak_bytes;   /* peak of active_bytes since the last fkv_runner_open() */
} fkv_backend_memory;

/* Reads the allocator statistics of a backend. Returns FKV_UNSUPPORTED for the CPU backend, which uses ordinary process memory
 * and keeps no statistics. */
FKV_API fkv_status fkv_backend_memory_now(fkv_backend backend, fkv_backend_memory *now);

/* Returns the number of bytes available to models of this backend: system memory as in fkv_memory_available(), or, on a GPU with
 * dedicated memory, the unused part of MLX's memory limit. *source receives a description of the limit. Returns 0 if the backend
 * is not available. */
FKV_API uint64_t fkv_backend_available(fkv_backend backend, const char **source);

/* ---- models -------------------------------------------------------------------------------------------------- */

typedef struct fkv_model fkv_model;

typedef struct fkv_model_config {
    fkv_backend backend; /* backend of all runners of the model; FKV_BACKEND_MLX requires a prior call to fkv_mlx_register() */
    uint32_t n_threads;  /* number of threads that repack weights; 0: one thread per core available to the process */
    fkv_isa isa;         /* instruction set that weights are packed for; AUTO: the best one this machine supports */
    bool plan_only; /* true to skip loading the weights; the model can then tokenize text and compute plans, but no runner can be
                       opened for it */
    fkv_log_fn log; /* callback that receives log messages, one line of text each, or NULL */
    void *log_user;
} fkv_model_config;

FKV_API fkv_model_config fkv_model_config_default(void);

/* Loads a model. path is a .gguf file, any part of a split GGUF file (all parts must be in the same folder), or a folder that
 * contains config.json and .safetensors files. A GGUF file without tensors can be loaded for its tokenizer only.
 *
 * With plan_only, path may also be a config.json file, for planning before a download. The file is validated in the same way as
 * when its folder is loaded. The model has no tokenizer; n_parameters and the sizes of weights follow from the shapes of its
 * tensors and from the dtype and quantization stated in config.json. If loading fails, *model is unchanged. */
FKV_API fkv_status fkv_model_load(const char *path, const fkv_model_config *config, fkv_model **model);
FKV_API void fkv_model_close(fkv_model *model); /* NULL is a no-op */

#define FKV_NO_TOKEN UINT32_MAX
enum { FKV_MAX_END_TOKENS = 16 };

typedef struct fkv_model_info {
    const char *architecture; /* GGUF architecture name, e.g. "llama", "qwen2" or "gemma3" */
    const char *name;         /* model name stored in the file, or "" */
    const char *tokenizer;    /* "byte", "bpe", "spm" */
    uint32_t n_layers;
    uint32_t dim;
    uint32_t ffn_dim;
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window;      /* window size, in tokens, of layers with sliding-window attention; 0: there are no such layers */
    uint64_t state_bytes; /* size of one sequence's recurrent states, summed over all layers; 0: no layer is recurrent */
    uint32_t latent_dim;  /* number of latent channels, if the model has multi-head latent attention (MLA); otherwise 0 */
    uint32_t context;     /* context length that the model was trained for, in tokens */
    uint32_t n_vocab;
    uint32_t bos;   /* beginning-of-sequence token, or FKV_NO_TOKEN */
    bool add_bos;   /* true if prompts must start with the token `bos` */
    bool has_chat;  /* true if the model has a chat template (see fkv_chat_tokenize()) */
    uint32_t n_end; /* number of end-of-generation tokens */
    uint32_t end[FKV_MAX_END_TOKENS];
    uint64_t n_parameters;
    uint64_t file_bytes;    /* total size of the memory-mapped model files */
    uint64_t packed_bytes;  /* size of the weights repacked at load, in process memory or MLX arrays */
    uint8_t weights_id[32]; /* SHA-256 of the hyperparameters, the tensor shapes and samples of the tensor data */
    char rope_id[64]; /* description of the position encoding, stored in page files; a page file can be loaded only into a cache
                         with an equal rope_id */
    bool config_only; /* true if the model was loaded from a config.json file, without weights and tokenizer */
} fkv_model_info;

/* Returns the properties of a model. The pointer and its strings are valid until fkv_model_close(). */
FKV_API const fkv_model_info *fkv_model_about(const fkv_model *model);

typedef struct fkv_model_layer {
    uint32_t n_kv_heads;
    uint32_t head_dim; /* dimension of a KV head; in a layer with latent attention, the number of latent channels */
    uint32_t rope_dim; /* number of RoPE channels stored with the latent channels; 0 in a layer without latent attention */
    uint32_t window;   /* size of the sliding window, in tokens; 0: full attention */
    uint32_t kv_layer; /* index of the layer whose keys and values this layer attends to: the layer itself, or an earlier layer if
                          this layer stores none */
    uint64_t state_bytes; /* size of the layer's recurrent state per sequence; 0: none. Layers without attention have no KV heads
                             and no window */
} fkv_model_layer;

/* Describes the attention or the recurrent state of one layer. layer: index from 0 to n_layers - 1. */
FKV_API fkv_status fkv_model_layer_about(const fkv_model *model, uint32_t layer, fkv_model_layer *info);

/* ---- tokens -------------------------------------------------------------------------------------------------- */

typedef enum fkv_tokenize_flags {
    FKV_TOKENIZE_PLAIN = 0,
    FKV_TOKENIZE_BOS = 1,     /* prepend bos if the model requires it (add_bos) */
    FKV_TOKENIZE_SPECIAL = 2, /* recognize special tokens such as "<|im_end|>" in the text; leave unset for user input */
    FKV_TOKENIZE_EOS = 4,     /* append the end token specified in the model's files; embedding models require it */
} fkv_tokenize_flags;

/* Tokenizes text of n_bytes bytes. Invalid UTF-8 is accepted and encoded byte by byte, as in the reference tokenizer. Writes at
 * most `capacity` tokens and sets *n_tokens to the full count, which may exceed capacity. tokens may be NULL if capacity is 0. */
FKV_API fkv_status fkv_tokenize(const fkv_model *model, const char *text, size_t n_bytes, unsigned flags, uint32_t *tokens,
                                size_t capacity, size_t *n_tokens);

/* Returns the bytes of a token, which may be an incomplete UTF-8 character. Returns "" if the token is out of range, or if it is
 * special and `special` is false. The pointer is valid until fkv_model_close(). */
FKV_API const char *fkv_token_text(const fkv_model *model, uint32_t token, bool special, size_t *n_bytes);

/* ---- chat ---------------------------------------------------------------------------------------------------- */

/* Renders a conversation with the model's chat template and tokenizes the result. `conversation` is a JSON object with an array
 * "messages" (role, content, tool_calls, ...) and any variables the template uses, such as "tools", "add_generation_prompt" and
 * "enable_thinking". now: seconds since 1970 in the caller's time zone, for templates that print the date; if NULL, such
 * templates fail.
 *
 * Special tokens come from the template only. Text from the conversation is never parsed for special tokens, so it cannot inject
 * them. bos is not added, because templates write it themselves.
 *
 * Writes at most `capacity` tokens and sets *n_tokens to the full count. Returns FKV_UNSUPPORTED if the model has no chat
 * template (has_chat), and FKV_BAD_ARGUMENT with the template's error message if the template rejects the conversation. */
FKV_API fkv_status fkv_chat_tokenize(const fkv_model *model, const char *conversation, size_t n_bytes, const int64_t *now,
                                     uint32_t *tokens, size_t capacity, size_t *n_tokens);

/* Renders a conversation with the model's chat template, without tokenizing the result. Otherwise works in the same way as
 * fkv_chat_tokenize(). given: [capacity] or NULL; given[i] is set to 1 if byte i of the text comes from the conversation, and to
 * 0 if it comes from the template. */
FKV_API fkv_status fkv_chat_render(const fkv_model *model, const char *conversation, size_t n_bytes, const int64_t *now,
                                   char *text, uint8_t *given, size_t capacity, size_t *n_text);

/* Tokenizes text as fkv_tokenize() does with FKV_TOKENIZE_SPECIAL, but recognizes special tokens only in bytes whose given[i] is
 * 0. given: [n_bytes] */
FKV_API fkv_status fkv_tokenize_given(const fkv_model *model, const char *text, const uint8_t *given, size_t n_bytes,
                                      uint32_t *tokens, size_t capacity, size_t *n_tokens);

/* ---- replies ------------------------------------------------------------------------------------------------- */

/* An fkv_reply is a streaming parser that splits generated text into content, reasoning and tool calls. */

/* Reasoning syntax of a model family. */
typedef enum fkv_reasoning_syntax {
    FKV_REASONING_AUTO = 0, /* the syntax is detected from the chat template and the vocabulary */
    FKV_REASONING_NONE,
    FKV_REASONING_THINK,    /* <think> ... </think> (Qwen3, DeepSeek R1, GLM, SmolLM3) */
    FKV_REASONING_BRACKETS, /* [THINK] ... [/THINK] (Magistral, Ministral 3) */
    FKV_REASONING_HARMONY,  /* harmony channels (gpt-oss) */
    FKV_REASONING_CHANNEL,  /* <|channel>thought ... <channel|> (Gemma 4) */
} fkv_reasoning_syntax;

/* Tool-call syntax of a model family. */
typedef enum fkv_tool_syntax {
    FKV_TOOLS_AUTO = 0,
    FKV_TOOLS_NONE,
    FKV_TOOLS_JSON, /* <tool_call>{"name": ..., "arguments": ...}</tool_call>, or a reply that consists of this JSON object and
                       names a known tool (Qwen2.5, Qwen3, Hermes) */
    FKV_TOOLS_PARAMETERS, /* <function=NAME><parameter=KEY> (Qwen3-Coder) */
    FKV_TOOLS_MISTRAL,    /* [TOOL_CALLS] */
    FKV_TOOLS_LLAMA,      /* <|python_tag|>, or a bare JSON object that names a known tool (Llama 3.x) */
    FKV_TOOLS_HARMONY,    /* gpt-oss */
    FKV_TOOLS_GEMMA,      /* <|tool_call>call:NAME{...}<tool_call|> (Gemma 4) */
    FKV_TOOLS_ARG_KEYS,   /* <tool_call>NAME<arg_key>KEY</arg_key><arg_value> (GLM) */
    FKV_TOOLS_KIMI,       /* <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...} (Kimi K2) */
    FKV_TOOLS_PYTHONIC,   /* <|tool_call_start|>[NAME(key="text", key=1)]<|tool_call_end|> (LFM2) */
    FKV_TOOLS_INVOKE,     /* <minimax:tool_call><invoke name="NAME"><parameter name="KEY"> (MiniMax M2) */
} fkv_tool_syntax;

typedef struct fkv_reply_syntax {
    fkv_reasoning_syntax reasoning;
    fkv_tool_syntax tools;
} fkv_reply_syntax;

/* Returns the syntax detected for a model; never AUTO. */
FKV_API fkv_reply_syntax fkv_reply_syntax_of(const fkv_model *model);

typedef enum fkv_reply_kind {
    FKV_REPLY_TEXT = 0,
    FKV_REPLY_REASONING,
    FKV_REPLY_CALL,      /* start of a tool call; bytes contains the name of the tool */
    FKV_REPLY_ARGUMENTS, /* next fragment of the call's JSON arguments; the concatenated fragments are valid JSON if the model
                            wrote valid JSON */
    FKV_REPLY_CALL_END,
} fkv_reply_kind;

/* bytes contains complete UTF-8 characters, with invalid bytes replaced by U+FFFD, and is valid only during the callback. */
typedef struct fkv_reply_event {
    fkv_reply_kind kind;
    uint32_t call; /* index of the tool call, from 0 */
    const char *bytes;
    size_t n_bytes;
    bool complete; /* FKV_REPLY_CALL_END: true if the call is complete, false if it was cut off */
} fkv_reply_event;

typedef void (*fkv_reply_fn)(void *user, const fkv_reply_event *event);

typedef struct fkv_reply_config {
    fkv_reply_syntax syntax;
    const char *tools; /* NULL, or the conversation's "tools" JSON array, which declares tool names and argument types */
    size_t n_tools;
    const uint32_t *prompt; /* prompt tokens, used to detect whether the template has already opened a reasoning block */
    size_t n_prompt;
    const char *const *stop; /* [n_stop] stop strings, copied at open; a stop string ends the reply and is not emitted */
    uint32_t n_stop;         /* at most FKV_MAX_STOPS stop strings, each 1 to FKV_MAX_STOP_BYTES bytes long */
    fkv_reply_fn on_event;
    void *user;
} fkv_reply_config;

enum { FKV_MAX_STOPS = 16, FKV_MAX_STOP_BYTES = 256 };

typedef struct fkv_reply fkv_reply;

FKV_API fkv_reply_config fkv_reply_config_default(void);
FKV_API fkv_status fkv_reply_open(const fkv_model *model, const fkv_reply_config *config, fkv_reply **reply);
FKV_API void fkv_reply_close(fkv_reply *reply); /* NULL is a no-op */

/* These functions pass the model's next output to the parser, as a token or as bytes. The concatenated text of the events does
 * not depend on how the output is divided into calls. fkv_reply_token() passes the token's text, including special tokens that
 * belong to the reasoning or tool-call syntax. The parser allocates 64 KB at open and nothing later. It buffers up to 32 KB
 * while it waits for a tool's name; malformed tool calls, and calls that exceed this buffer, are emitted as text. */
FKV_API fkv_status fkv_reply_token(fkv_reply *reply, uint32_t token);
FKV_API fkv_status fkv_reply_feed(fkv_reply *reply, const char *bytes, size_t n_bytes);

/* Returns true once a stop string has been found. All later input is ignored. */
FKV_API bool fkv_reply_stopped(const fkv_reply *reply);

/* Ends the reply: emits buffered text and ends an open tool call as incomplete. The parser accepts no input afterwards. */
FKV_API fkv_status fkv_reply_end(fkv_reply *reply);

/* ---- runners ------------------------------------------------------------------------------------------------- */

typedef struct fkv_runner fkv_runner;

#define FKV_SNAPSHOTS_AUTO UINT32_MAX

typedef struct fkv_runner_config {
    uint32_t max_tokens; /* maximum length of a sequence, in tokens; 0: the model's context length */
    uint32_t max_seqs;
    uint32_t max_step_tokens; /* maximum number of tokens per step, prefill and decode together */
    uint32_t max_logit_rows;  /* maximum number of logit rows per step; at most max_step_tokens */
    fkv_codec_config k;       /* codec of the keys; head dimensions are padded to a multiple of its group size */
    fkv_codec_config v;
    const char *calibration; /* path of the calibration file for FKV_CODEC_CALIBRATED keys; NULL: see fkv_calibration_path() */
    fkv_rotate rotate;       /* rotation of quantized keys and values; 16-bit keys and values are never rotated */
    uint64_t rotation_seed;
    uint32_t max_kv;  /* size, in tokens, of a sliding window that replaces full attention to limit memory use; 0: no window */
    uint32_t n_sinks; /* number of leading tokens that always remain visible when max_kv is set; must be 0 if max_kv is 0 */
    uint32_t page_tokens;
    uint32_t max_snapshots; /* maximum number of recurrent states in the prefix tree (see fkv_config), ignored for models without
                               recurrent layers. FKV_SNAPSHOTS_AUTO: as many as fit in 512 MiB, but at least 8 and at most 64 */
    uint32_t n_threads;     /* number of threads; 0: one per core */
    fkv_isa isa;            /* instruction set of the CPU kernels */
    bool lazy;              /* CPU only: commit page memory on first use */
    bool drafts;            /* true to reserve memory for models with recurrent layers, so that fkv_runner_accept() can discard
                               tokens without recomputing the kept tokens */
    bool embeddings;        /* true if steps return the final hidden states [rows, dim] instead of logits; see fkv_embed() */
    uint64_t memory_limit;  /* limit on fkv_runner_plan.total_bytes; 0: none */
    fkv_log_fn log;
    void *log_user;
} fkv_runner_config;

/* Returns the default configuration: sealed 4-bit keys and values with the recommended rotation (see docs/results.md), the
 * model's context length, one sequence, 512 tokens per step, logits for one row. */
FKV_API fkv_runner_config fkv_runner_config_default(void);

/* Memory requirements of a runner. total_bytes = cache.total_bytes + activations_bytes; weights are listed separately. The CPU
 * backend allocates total_bytes in fkv_runner_open(). MLX allocates the cache in fkv_runner_open() and the activations in each
 * step. On MLX, activations_bytes is an upper bound that includes MLX's buffer cache. */
typedef struct fkv_runner_plan {
    uint64_t total_bytes; /* on the CPU, this is the resident anonymous memory of the runner; with `lazy`, pages become resident
                             on first use */
    uint64_t activations_bytes; /* size of the buffers of one step, including logits; independent of max_tokens */
    uint64_t packed_bytes;      /* size of the weights repacked at load */
    uint64_t mapped_bytes;  /* size of the weights that are read directly from the mapped file: experts, and the embedding matrix
                               unless it is also the output matrix */
    uint64_t touched_bytes; /* number of bytes of mapped weights that the forward pass of one token reads */
    fkv_plan cache;
} fkv_runner_plan;

/* Computes the memory requirements of a runner without allocating anything. */
FKV_API fkv_status fkv_runner_plan_make(const fkv_model *model, const fkv_runner_config *config, fkv_runner_plan *plan);
FKV_API fkv_status fkv_runner_open(const fkv_model *model, const fkv_runner_config *config, fkv_runner **runner);
FKV_API void fkv_runner_close(fkv_runner *runner); /* NULL is a no-op */

/* Returns the runner's cache, on which the caller opens, forks, truncates, saves, loads and closes sequences. Only the runner
 * itself may call the cache's step functions. */
FKV_API fkv_cache *fkv_runner_cache(fkv_runner *runner);

typedef enum fkv_logits { FKV_LOGITS_NONE = 0, FKV_LOGITS_LAST = 1, FKV_LOGITS_ALL = 2 } fkv_logits;

typedef struct fkv_tokens {
    fkv_seq seq; /* at most one entry per sequence in a step */
    const uint32_t *tokens;
    uint32_t n_tokens;
    fkv_logits logits; /* selects the tokens of this row whose logits are returned */
} fkv_tokens;

/* Runs one step over any mix of prefill chunks and decode tokens. *logits receives an array [number of requested rows,
 * n_vocab], in the order of `rows`. The array is valid until the next call on this runner. `logits` may be NULL if no row
 * requests logits. If the step fails, all sequences are unchanged.
 *
 * The logits of a token depend only on its own sequence. On the CPU they are bit-identical for every batch composition. On MLX,
 * rounding errors make them differ between batches, because MLX selects matrix kernels by the number of rows (docs/mlx.md). On
 * MLX, each step is a single evaluation of one graph. */
FKV_API fkv_status fkv_runner_forward(fkv_runner *runner, const fkv_tokens *rows, uint32_t n_rows, const float **logits);

/* Returns the number of tokens that the next step should append to a sequence of `length` tokens if n_left tokens of its prompt
 * remain. The result is at most max_step_tokens. If max_step_tokens is at least four pages, a chunk that does not reach the end
 * of the prompt ends at a page boundary, so that attention kernels divide it into as few tiles as possible. Returns 0 if runner
 * is NULL. */
FKV_API uint32_t fkv_runner_chunk(const fkv_runner *runner, uint32_t length, uint32_t n_left);

/* Runs a step like fkv_runner_forward(), but leaves it open, so that the caller can discard tokens after it has read the logits
 * (speculative decoding). The caller must end the step with fkv_runner_accept(). Until then, no other step can run, and the
 * caller may close sequences but must not change them in any other way. The logits are valid until the next step. */
FKV_API fkv_status fkv_runner_verify(fkv_runner *runner, const fkv_tokens *rows, uint32_t n_rows, const float **logits);

/* Ends the step of fkv_runner_verify(): appends the first n_kept[i] tokens of row i to its sequence and discards the others.
 * n_kept: [n_rows], each from 1 to the number of tokens of the row. Works for all models and layers. If a row of a model with
 * recurrent layers is shortened, the kept tokens of all rows are computed again, unless the backend is the CPU, `drafts` is set,
 * and each shortened row requested all logits. If the step fails, all sequences are unchanged. Invalid values of n_kept leave
 * the step open. */
FKV_API fkv_status fkv_runner_accept(fkv_runner *runner, const uint32_t *n_kept);

/* Truncates a sequence to any length. Sealed, windowed and recurrent layers can be truncated only to certain lengths. If
 * n_tokens is not such a length, this function truncates the sequence to the nearest shorter one with fkv_seq_truncate() and
 * recomputes the remaining tokens. tokens: the first n_tokens tokens of the sequence. If recomputing fails, the sequence keeps
 * the tokens computed so far (see fkv_seq_length()). */
FKV_API fkv_status fkv_runner_truncate(fkv_runner *runner, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens);

/* Computes the embedding of a text with a decoder model such as Qwen3-Embedding. Runs the tokens as a new sequence, takes the
 * final hidden state of the last token, keeps its first n_dims values and scales them to a Euclidean norm of 1. The runner must
 * have been opened with `embeddings`, and one of its sequences must be free. Tokenize texts with FKV_TOKENIZE_BOS and
 * FKV_TOKENIZE_EOS. out: [n_dims] */
FKV_API fkv_status fkv_embed(fkv_runner *runner, const uint32_t *tokens, uint32_t n_tokens, uint32_t n_dims, float *out);

/* ---- calibration --------------------------------------------------------------------------------------------- */

/* Calibration assigns a bit width to each key channel (FKV_CODEC_CALIBRATED). The model processes a sample text once. A small
 * file then records two bit assignments for the key channels of every layer and KV head: one with an average of 4 bits per
 * channel, one with an average of 3 bits. A sample of 16384 tokens suffices. */
typedef struct fkv_calibrate_config {
    const uint32_t *tokens; /* [n_tokens] sample text, at least 2048 tokens; only full windows of 2048 tokens are used */
    size_t n_tokens;
    uint32_t n_threads; /* number of threads; 0: one per core */

    /* Callback that is called after every window, or NULL. If the callback returns false, fkv_calibrate() writes nothing and
     * returns FKV_BAD_STATE. */
    bool (*progress)(void *user, size_t n_done, size_t n_tokens);
    void *user;
} fkv_calibrate_config;

/* Calibrates a model and writes the file atomically. Returns FKV_UNSUPPORTED unless the model was loaded for the CPU backend. The
 * file is valid for every backend. */
FKV_API fkv_status fkv_calibrate(const fkv_model *model, const fkv_calibrate_config *config, const char *path);

/* Writes the default calibration path of a model: FILE.fkc next to a single-file model, or calibration.fkc in the model's folder.
 * path: [capacity] */
FKV_API fkv_status fkv_calibration_path(const fkv_model *model, char *path, size_t capacity);

typedef struct fkv_calibration_info {
    uint32_t n_layers;
    uint64_t n_tokens;      /* length of the sample text, in tokens */
    uint64_t n_channels;    /* number of key channels in all layers and KV heads */
    uint64_t n_4[3];        /* numbers of 2-bit, 4-bit and 6-bit channels in the assignment with an average of 4 bits */
    uint64_t n_3[3];        /* numbers of 2-bit, 4-bit and 6-bit channels in the assignment with an average of 3 bits */
    uint8_t weights_id[32]; /* fkv_model_info.weights_id of the calibrated model */
} fkv_calibration_info;

/* Reads and validates a calibration file. Returns FKV_FILE_FORMAT, FKV_FILE_VERSION or FKV_FILE_DAMAGED if it is invalid; the
 * error message names the field and the reason. */
FKV_API fkv_status fkv_calibration_inspect(const char *path, fkv_calibration_info *info);

/* ---- sampling ------------------------------------------------------------------------------------------------ */

typedef struct fkv_logit_bias {
    uint32_t token;
    float bias; /* added to the token's logit; -INFINITY bans the token */
} fkv_logit_bias;

typedef struct fkv_sampler_config {
    float temperature; /* 0: greedy */
    uint32_t top_k;    /* 0: off */
    float top_p;       /* 1: off */
    float min_p;       /* 0: off */
    uint64_t seed;
    float repetition_penalty;   /* for tokens that have occurred before, positive logits are divided by this value and negative
                                   logits are multiplied by it; 0 or 1: off */
    float presence_penalty;     /* subtracted once from the logit of each token that has occurred before; 0: off */
    float frequency_penalty;    /* subtracted from a token's logit once per previous occurrence; 0: off */
    uint32_t penalty_tokens;    /* number of most recent tokens that penalties consider; 0: all */
    const fkv_logit_bias *bias; /* [n_bias], copied */
    uint32_t n_bias;
} fkv_sampler_config;

typedef struct fkv_sampler fkv_sampler;

FKV_API fkv_sampler_config fkv_sampler_config_default(void); /* greedy */
FKV_API fkv_status fkv_sampler_open(const fkv_sampler_config *config, uint32_t n_vocab, fkv_sampler **sampler);
FKV_API void fkv_sampler_close(fkv_sampler *sampler); /* NULL is a no-op */

/* Returns the sampling parameters recommended by the model's files (generation_config.json, or general.sampling.* in GGUF).
 * Missing parameters default to temperature 0.7, top_k 40, top_p 0.95 and min_p 0.05. *said (if not NULL) is set to true if the
 * files recommend at least one parameter, and to false otherwise. */
FKV_API fkv_sampler_config fkv_model_sampling(const fkv_model *model, bool *said);

/* Adds tokens, for example a prompt, to the history that penalties consider. fkv_sample() adds the tokens it returns. */
FKV_API fkv_status fkv_sampler_note(fkv_sampler *sampler, const uint32_t *tokens, size_t n_tokens);
FKV_API void fkv_sampler_forget(fkv_sampler *sampler); /* clears the history; NULL is a no-op */

/* Samples the next token. Applies biases and penalties, then top_k, top_p, min_p and temperature, in the same order as
 * llama.cpp. The result is deterministic for a given seed and logits. Greedy sampling prefers the lowest token among equal
 * logits. Returns FKV_BAD_ARGUMENT if a logit is NaN. Allocates no memory. */
FKV_API fkv_status fkv_sample(fkv_sampler *sampler, const float *logits, uint32_t *token);

#ifdef __cplusplus
}
#endif

#endif
