/* See tokenizer_model.h. The reference tokenizer implements only special tokens and merges. BPE results are therefore compared
 * only for texts of letters, which every pre-tokenizer pattern treats as one word.
 */
#include "tokenizer_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- fixture ---- */

typedef struct reader {
    const uint8_t *data;
    size_t left;
} reader;

static uint8_t take(reader *from) {
    if (from->left == 0) return 0;
    from->left--;
    return *from->data++;
}

static fkv_bytes take_string(reader *from) {
    size_t size = take(from) % 32;
    if (size > from->left) size = from->left;
    fkv_bytes string = {(const char *)from->data, size};
    from->data += size;
    from->left -= size;
    return string;
}

void tokenizer_fixture_read(tokenizer_fixture *fixture, const uint8_t *data, size_t size) {
    static const struct {
        const char *model, *pre;
    } kinds[] = {{"gpt2", "gpt-2"}, {"gpt2", "smollm"}, {"gpt2", "qwen2"}, {"gpt2", "llama-bpe"},
                 {"llama", ""},     {"llama", ""},      {"byte", ""},      {"nothing", ""}};
    static const char chat[] = "{{'<|im_start|>' + role}}";
    reader from = {data, size};
    uint8_t kind = take(&from);
    uint8_t options = take(&from);
    *fixture = (tokenizer_fixture){0};
    fkv_vocab_source *source = &fixture->source;
    source->model = (fkv_bytes){kinds[kind % 8].model, strlen(kinds[kind % 8].model)};
    source->pre = (fkv_bytes){kinds[kind % 8].pre, strlen(kinds[kind % 8].pre)};
    source->add_bos = (options & 1) != 0;
    source->add_space_prefix = (options & 2) != 0;
    source->scores = (options & 4) != 0 ? fixture->scores : NULL;
    source->types = (options & 8) != 0 ? fixture->types : NULL;
    if ((options & 16) != 0) source->chat_template = (fkv_bytes){chat, sizeof chat - 1};
    source->bos = take(&from);
    source->eos = take(&from);
    source->eot = take(&from);
    source->unk = take(&from);
    source->n_tokens = take(&from) % (MODEL_MAX_TOKENS + 1);
    source->tokens = fixture->tokens;
    for (uint32_t i = 0; i < source->n_tokens; i++) {
        uint8_t about = take(&from);
        fixture->types[i] = about % 8;
        fixture->scores[i] = about >> 3 == 31 ? NAN : -(float)(about >> 3);
        fixture->tokens[i] = take_string(&from);
    }
    source->n_merges = take(&from) % (MODEL_MAX_MERGES + 1);
    source->merges = fixture->merges;
    for (uint32_t i = 0; i < source->n_merges; i++) fixture->merges[i] = take_string(&from);
    fixture->text = (const char *)from.data;
    fixture->n_text = from.left;
}

/* ---- reference tokenizer ---- */

/* A range of the text: either raw text (token is FKV_NO_TOKEN) or one token. */
typedef struct stretch {
    size_t start, end;
    uint32_t token;
} stretch;

typedef struct stretches {
    stretch items[4 * MODEL_MAX_TEXT + 1];
    size_t n;
} stretches;

typedef struct model_run {
    const tokenizer_fixture *fixture;
    const fkv_tokenizer *tokenizer;
    uint32_t tokens[4 * MODEL_MAX_TEXT + 1];
    size_t n_tokens;
} model_run;

static uint32_t find(const fkv_vocab_source *source, const char *data, size_t size) {
    for (uint32_t i = 0; size > 0 && i < source->n_tokens; i++) {
        if (source->tokens[i].size == size && memcmp(source->tokens[i].data, data, size) == 0) return i;
    }
    return FKV_NO_TOKEN;
}

/* Splits the raw ranges at every occurrence of a token. */
static void cut(stretches *all, const char *text, fkv_bytes what, uint32_t token) {
    static stretches before;
    before.n = all->n;
    memcpy(before.items, all->items, all->n * sizeof all->items[0]);
    all->n = 0;
    for (size_t i = 0; i < before.n; i++) {
        stretch one = before.items[i];
        const char *hit = NULL;
        while (one.token == FKV_NO_TOKEN && one.start < one.end &&
               (hit = memmem(text + one.start, one.end - one.start, what.data, what.size)) != NULL) {
            size_t at = (size_t)(hit - text);
            if (at > one.start) all->items[all->n++] = (stretch){one.start, at, FKV_NO_TOKEN};
            all->items[all->n++] = (stretch){at, at + what.size, token};
            one.start = at + what.size;
        }
        if (one.start < one.end) all->items[all->n++] = one;
    }
}

static bool is_special(const model_run *run, uint32_t token, bool with_hidden) {
    const fkv_vocab_source *source = &run->fixture->source;
    size_t shown = 0;
    if (find(source, source->tokens[token].data, source->tokens[token].size) != token) return false;
    (void)fkv_tokenizer_text(run->tokenizer, token, false, &shown);
    size_t all = 0;
    (void)fkv_tokenizer_text(run->tokenizer, token, true, &all);
    if (all > 0 && shown == 0) return with_hidden;
    return source->types != NULL && source->types[token] == 4;
}

static void cut_specials(const model_run *run, bool with_hidden, stretches *all) {
    const fkv_vocab_source *source = &run->fixture->source;
    for (size_t size = 32; size > 0; size--) {
        for (uint32_t token = 0; token < source->n_tokens; token++) {
            if (source->tokens[token].size != size || !is_special(run, token, with_hidden)) continue;
            cut(all, run->fixture->text, source->tokens[token], token);
        }
    }
}

/* Returns the rank of a pair of adjacent ranges, or INFINITY if the pair cannot be merged. */
typedef double (*rank_fn)(const fkv_vocab_source *source, const char *text, stretch left, stretch right);

/* Merges adjacent ranges until no pair can be merged. Always merges the leftmost pair with the lowest rank. */
static void merge_all(const fkv_vocab_source *source, const char *text, stretches *chain, rank_fn rank) {
    for (;;) {
        size_t best = SIZE_MAX;
        double best_rank = INFINITY;
        for (size_t i = 0; i + 1 < chain->n; i++) {
            double one = rank(source, text, chain->items[i], chain->items[i + 1]);
            if (one >= best_rank) continue;
            best_rank = one;
            best = i;
        }
        if (best == SIZE_MAX) return;
        chain->items[best].end = chain->items[best + 1].end;
        chain->n--;
        memmove(&chain->items[best + 1], &chain->items[best + 2], (chain->n - best - 1) * sizeof chain->items[0]);
    }
}

static double spm_rank(const fkv_vocab_source *source, const char *text, stretch left, stretch right) {
    uint32_t token = find(source, text + left.start, right.end - left.start);
    if (token == FKV_NO_TOKEN) return INFINITY;
    float score = source->scores != NULL ? source->scores[token] : 0;
    return isnan(score) ? 1e9 : -(double)score;
}

static double bpe_rank(const fkv_vocab_source *source, const char *text, stretch left, stretch right) {
    size_t n_left = left.end - left.start;
    size_t n_right = right.end - right.start;
    for (uint32_t i = 0; i < source->n_merges; i++) {
        fkv_bytes merge = source->merges[i];
        if (merge.size == n_left + 1 + n_right && merge.data[n_left] == ' ' &&
            memcmp(merge.data, text + left.start, n_left) == 0 &&
            memcmp(merge.data + n_left + 1, text + right.start, n_right) == 0) {
            return i;
        }
    }
    return INFINITY;
}

static void put_token(model_run *run, uint32_t token) {
    if (token != FKV_NO_TOKEN) run->tokens[run->n_tokens++] = token;
}

static uint32_t byte_fallback(const fkv_vocab_source *source, char byte) {
    char name[8];
    (void)snprintf(name, sizeof name, "<0x%02X>", (unsigned)(uint8_t)byte);
    uint32_t token = find(source, name, 6);
    if (token == FKV_NO_TOKEN) token = find(source, &byte, 1);
    return token == FKV_NO_TOKEN && source->unk < source->n_tokens ? source->unk : token;
}

static void spm_stretch(model_run *run, const char *raw, size_t n_raw) {
    const fkv_vocab_source *source = &run->fixture->source;
    char text[3 * MODEL_MAX_TEXT + 3];
    size_t n = 0;
    static stretches chain_room;
    stretches *chain = &chain_room;
    chain->n = 0;
    for (size_t i = 0; i < n_raw + source->add_space_prefix; i++) {
        char byte = source->add_space_prefix ? (i == 0 ? ' ' : raw[i - 1]) : raw[i];
        memcpy(text + n, byte == ' ' ? "\xe2\x96\x81" : &byte, byte == ' ' ? 3 : 1);
        n += byte == ' ' ? 3 : 1;
    }
    for (size_t at = 0; at < n; at = chain->items[chain->n - 1].end) {
        uint8_t lead = (uint8_t)text[at];
        size_t end = at + (lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1);
        chain->items[chain->n++] = (stretch){at, end < n ? end : n, 0};
    }
    merge_all(source, text, chain, spm_rank);
    for (size_t i = 0; i < chain->n; i++) {
        stretch one = chain->items[i];
        uint32_t token = find(source, text + one.start, one.end - one.start);
        put_token(run, token);
        for (size_t at = one.start; token == FKV_NO_TOKEN && at < one.end; at++) put_token(run, byte_fallback(source, text[at]));
    }
}

static void bpe_stretch(model_run *run, const char *raw, size_t n_raw) {
    const fkv_vocab_source *source = &run->fixture->source;
    static stretches chain_room;
    stretches *chain = &chain_room;
    chain->n = 0;
    bool whole = source->pre.size == strlen("llama-bpe") && find(source, raw, n_raw) != FKV_NO_TOKEN;
    for (size_t at = 0; at < n_raw; at++) chain->items[chain->n++] = (stretch){at, at + 1, 0};
    if (whole) {
        chain->items[0].end = n_raw;
        chain->n = 1;
    }
    merge_all(source, raw, chain, bpe_rank);
    for (size_t i = 0; i < chain->n; i++) {
        stretch one = chain->items[i];
        uint32_t token = find(source, raw + one.start, one.end - one.start);
        put_token(run, token);
        for (size_t at = one.start; token == FKV_NO_TOKEN && at < one.end; at++) put_token(run, find(source, raw + at, 1));
    }
}

static void model_encode(model_run *run, bool special) {
    const tokenizer_fixture *fixture = run->fixture;
    static stretches all_room;
    stretches *all = &all_room;
    all->n = 0;
    if (fixture->n_text > 0) all->items[all->n++] = (stretch){0, fixture->n_text, FKV_NO_TOKEN};
    cut_specials(run, special, all);
    bool spm = strcmp(fkv_tokenizer_name(run->tokenizer), "spm") == 0;
    for (size_t i = 0; i < all->n; i++) {
        stretch one = all->items[i];
        put_token(run, one.token);
        if (one.token != FKV_NO_TOKEN) continue;
        (spm ? spm_stretch : bpe_stretch)(run, fixture->text + one.start, one.end - one.start);
    }
}

/* ---- comparison ---- */

static bool is_modelled(const tokenizer_fixture *fixture, const fkv_tokenizer *tokenizer) {
    if (fixture->n_text > MODEL_MAX_TEXT / 4) return false;
    if (strcmp(fkv_tokenizer_name(tokenizer), "spm") == 0) return true;
    if (strcmp(fkv_tokenizer_name(tokenizer), "bpe") != 0) return false;
    for (size_t i = 0; i < fixture->n_text; i++) {
        if (fixture->text[i] < 'a' || fixture->text[i] > 'z') return false;
    }
    return true;
}

static const char *check_texts(const fkv_vocab_source *source, const fkv_tokenizer *tokenizer) {
    for (uint32_t token = 0; token < source->n_tokens; token++) {
        size_t shown = 0;
        size_t all = 0;
        (void)fkv_tokenizer_text(tokenizer, token, false, &shown);
        const char *text = fkv_tokenizer_text(tokenizer, token, true, &all);
        if (shown > all || text[all] != 0) return "wrong text of a token";
    }
    return NULL;
}

static const char *check_encode(const tokenizer_fixture *fixture, const fkv_tokenizer *tokenizer, unsigned flags) {
    size_t capacity =
        4 * fixture->n_text + 4; /* at most three tokens per byte, and one more after a special token, for a space */
    size_t n_tokens = 0;
    size_t n_again = 0;
    uint32_t n_vocab = strcmp(fkv_tokenizer_name(tokenizer), "byte") == 0 ? 256 : fixture->source.n_tokens;
    uint32_t *tokens = malloc(capacity * sizeof *tokens);
    static model_run run_room;
    model_run *run = &run_room;
    const char *fault = NULL;
    if (tokens == NULL) abort();
    if (fkv_tokenizer_encode(tokenizer, fixture->text, NULL, fixture->n_text, flags, tokens, capacity, &n_tokens) != FKV_OK ||
        fkv_tokenizer_encode(tokenizer, fixture->text, NULL, fixture->n_text, flags, NULL, 0, &n_again) != FKV_OK) {
        fault = "encoding failed";
    } else if (n_tokens != n_again || n_tokens > capacity) {
        fault = "wrong number of tokens";
    }
    for (size_t i = 0; fault == NULL && i < n_tokens; i++) fault = tokens[i] < n_vocab ? NULL : "token out of range";
    if (fault == NULL && is_modelled(fixture, tokenizer)) {
        run->n_tokens = 0;
        run->fixture = fixture;
        run->tokenizer = tokenizer;
        if ((flags & FKV_TOKENIZE_BOS) != 0 && fixture->source.add_bos && fixture->source.bos < n_vocab)
            put_token(run, fixture->source.bos);
        model_encode(run, (flags & FKV_TOKENIZE_SPECIAL) != 0);
        bool equal = run->n_tokens == n_tokens && memcmp(run->tokens, tokens, n_tokens * sizeof *tokens) == 0;
        fault = equal ? NULL : "tokens differ from the reference";
    }
    free(tokens);
    return fault;
}

const char *tokenizer_fixture_check(const tokenizer_fixture *fixture, bool *refused) {
    fkv_tokenizer *tokenizer = NULL;
    *refused = fkv_tokenizer_open(&fixture->source, &tokenizer) != FKV_OK;
    if (*refused) return tokenizer == NULL ? NULL : "a rejected vocabulary returned a tokenizer";
    const char *fault = check_texts(&fixture->source, tokenizer);
    for (unsigned flags = 0; fault == NULL && flags < 4; flags++) fault = check_encode(fixture, tokenizer, flags);
    fkv_tokenizer_close(tokenizer);
    return fault;
}
