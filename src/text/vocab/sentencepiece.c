/* See sentencepiece.h. Only the protobuf fields listed below are read; all other fields are skipped. Field numbers are from
 * sentencepiece_model.proto. */
#include "sentencepiece.h"

enum { MAX_PIECES = 1 << 21 };

enum wire { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 };
enum { MODEL_PIECES = 1, MODEL_TRAINER = 2, MODEL_NORMALIZER = 3 };
enum { PIECE_TEXT = 1, PIECE_SCORE = 2, PIECE_TYPE = 3 };
enum { TRAINER_TYPE = 3, TRAINER_UNK = 40, TRAINER_BOS = 41, TRAINER_EOS = 42 };
enum { NORMALIZER_MAP = 2, NORMALIZER_PREFIX = 3, NORMALIZER_SPACES = 4, NORMALIZER_ESCAPE = 5 };
enum { TYPE_UNIGRAM = 1, TYPE_BPE = 2 };

typedef struct proto {
    const uint8_t *at, *end;
    const uint8_t *start; /* start of the file, for error messages */
    const char *path;
} proto;

typedef struct proto_field {
    uint32_t number;
    enum wire wire;
    uint64_t value;  /* value of a varint field, or bits of a fixed-size field */
    fkv_bytes bytes; /* content of a length-delimited field */
} proto_field;

static fkv_status fail_protobuf(const proto *p, const char *what) {
    return fkv_fail(FKV_FILE_FORMAT, "%s: not a SentencePiece model: %s at byte %zu", p->path, what, (size_t)(p->at - p->start));
}

static fkv_status read_proto_varint(proto *p, uint64_t *value) {
    *value = 0;
    for (uint32_t shift = 0; shift < 64; shift += 7) {
        if (p->at == p->end) return fail_protobuf(p, "truncated number");
        const uint8_t byte = *p->at++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) return FKV_OK;
    }
    return fail_protobuf(p, "number has more than 64 bits");
}

static fkv_status read_proto_field(proto *p, proto_field *field) {
    uint64_t tag = 0;
    FKV_TRY(read_proto_varint(p, &tag));
    *field = (proto_field){.number = (uint32_t)(tag >> 3), .wire = (enum wire)(tag & 7)};
    const size_t left = (size_t)(p->end - p->at);
    switch (field->wire) {
    case VARINT: return read_proto_varint(p, &field->value);
    case FIXED64:
    case FIXED32: {
        const size_t n = field->wire == FIXED64 ? 8 : 4;
        if (left < n) return fail_protobuf(p, "truncated number");
        memcpy(&field->value, p->at, n);
        p->at += n;
        return FKV_OK;
    }
    case LENGTH: FKV_TRY(read_proto_varint(p, &field->value)); break;
    default: return fail_protobuf(p, "unknown wire type");
    }
    if (field->value > (uint64_t)(p->end - p->at)) return fail_protobuf(p, "field extends past the end of the file");
    field->bytes = (fkv_bytes){(const char *)p->at, (size_t)field->value};
    p->at += field->value;
    return FKV_OK;
}

static proto proto_within(const proto *p, fkv_bytes bytes) {
    proto inside = *p;
    inside.at = (const uint8_t *)bytes.data;
    inside.end = inside.at + bytes.size;
    return inside;
}

/* ---- trainer and normalizer ---------------------------------------------------------------------------------- */

static uint32_t token_or_none(uint64_t value) {
    return value < MAX_PIECES ? (uint32_t)value : FKV_NO_TOKEN; /* the file stores -1 if there is no such token */
}

static fkv_status read_trainer(proto p, fkv_vocab_source *vocab) {
    uint64_t type = TYPE_UNIGRAM; /* default value in sentencepiece_model.proto */
    while (p.at < p.end) {
        proto_field field;
        FKV_TRY(read_proto_field(&p, &field));
        if (field.wire != VARINT) continue;
        if (field.number == TRAINER_TYPE) type = field.value;
        if (field.number == TRAINER_UNK) vocab->unk = token_or_none(field.value);
        if (field.number == TRAINER_BOS) vocab->bos = token_or_none(field.value);
        if (field.number == TRAINER_EOS) vocab->eos = token_or_none(field.value);
    }
    FKV_REQUIRE(type == TYPE_BPE, FKV_UNSUPPORTED, "%s: trainer_spec.model_type is %s; only BPE is supported", p.path,
                type == TYPE_UNIGRAM ? "unigram" : "words or characters");
    return FKV_OK;
}

static fkv_status read_normalizer(proto p, fkv_vocab_source *vocab) {
    bool drops_spaces = true; /* default value in sentencepiece_model.proto */
    bool escapes = true;
    while (p.at < p.end) {
        proto_field field;
        FKV_TRY(read_proto_field(&p, &field));
        FKV_REQUIRE(field.number != NORMALIZER_MAP || field.bytes.size == 0, FKV_UNSUPPORTED,
                    "%s: normalizer_spec.precompiled_charsmap is not supported", p.path);
        if (field.wire != VARINT) continue;
        if (field.number == NORMALIZER_PREFIX) vocab->add_space_prefix = field.value != 0;
        if (field.number == NORMALIZER_SPACES) drops_spaces = field.value != 0;
        if (field.number == NORMALIZER_ESCAPE) escapes = field.value != 0;
    }
    FKV_REQUIRE(!drops_spaces && escapes, FKV_UNSUPPORTED, "%s: normalizer_spec.%s is not supported", p.path,
                drops_spaces ? "remove_extra_whitespaces" : "escape_whitespaces = false");
    return FKV_OK;
}

/* ---- pieces -------------------------------------------------------------------------------------------------- */

typedef struct piece_tables {
    fkv_bytes *tokens;
    float *scores;
    int32_t *types;
} piece_tables;

static fkv_status read_piece(proto p, const piece_tables *tables, uint32_t index) {
    tables->types[index] = 1; /* normal */
    while (p.at < p.end) {
        proto_field field;
        FKV_TRY(read_proto_field(&p, &field));
        const uint32_t bits = (uint32_t)field.value;
        if (field.number == PIECE_TEXT && field.wire == LENGTH) tables->tokens[index] = field.bytes;
        if (field.number == PIECE_SCORE && field.wire == FIXED32) memcpy(&tables->scores[index], &bits, sizeof bits);
        if (field.number == PIECE_TYPE && field.wire == VARINT)
            tables->types[index] = (int32_t)(field.value <= 6 ? field.value : 5);
    }
    return FKV_OK;
}

static fkv_status count_pieces(proto p, uint64_t *n, bool *has_trainer) {
    *n = 0;
    *has_trainer = false;
    while (p.at < p.end) {
        proto_field field;
        FKV_TRY(read_proto_field(&p, &field));
        *n += field.number == MODEL_PIECES && field.wire == LENGTH;
        *has_trainer = *has_trainer || (field.number == MODEL_TRAINER && field.wire == LENGTH);
    }
    return FKV_OK;
}

static fkv_status read_model_fields(proto p, fkv_vocab_target target, const piece_tables *tables, uint32_t n) {
    uint32_t index = 0;
    while (p.at < p.end) {
        proto_field field;
        FKV_TRY(read_proto_field(&p, &field));
        if (field.wire != LENGTH) continue;
        if (field.number == MODEL_PIECES && index < n) FKV_TRY(read_piece(proto_within(&p, field.bytes), tables, index++));
        if (field.number == MODEL_TRAINER) FKV_TRY(read_trainer(proto_within(&p, field.bytes), target.vocab));
        if (field.number == MODEL_NORMALIZER) FKV_TRY(read_normalizer(proto_within(&p, field.bytes), target.vocab));
    }
    return FKV_OK;
}

fkv_status fkv_sentencepiece_read(fkv_vocab_target target, const uint8_t *bytes, size_t size, const char *path) {
    fkv_vocab_source *vocab = target.vocab;
    const proto p = {.at = bytes, .end = bytes + size, .start = bytes, .path = path};
    uint64_t n = 0;
    bool has_trainer = false;
    FKV_TRY(count_pieces(p, &n, &has_trainer));
    FKV_REQUIRE(n > 0 && has_trainer, FKV_FILE_FORMAT, "%s: not a SentencePiece model: pieces or trainer_spec are missing", path);
    FKV_REQUIRE(n <= MAX_PIECES, FKV_UNSUPPORTED, "%s: the model has %llu pieces; at most %d are supported", path,
                (unsigned long long)n, MAX_PIECES);
    if (target.n_vocab > 0 && n > target.n_vocab) n = target.n_vocab;
    piece_tables tables = {.tokens = fkv_file_arena_alloc(target.arena, n * sizeof *tables.tokens),
                           .scores = fkv_file_arena_alloc(target.arena, n * sizeof *tables.scores),
                           .types = fkv_file_arena_alloc(target.arena, n * sizeof *tables.types)};
    FKV_REQUIRE(tables.tokens != NULL && tables.scores != NULL && tables.types != NULL, FKV_NO_MEMORY,
                "%s: out of memory allocating %llu pieces", path, (unsigned long long)n);
    vocab->bos = 1;
    vocab->eos = 2;
    vocab->unk = 0; /* default value in sentencepiece_model.proto */
    FKV_TRY(read_model_fields(p, target, &tables, (uint32_t)n));
    vocab->model = (fkv_bytes){.data = "llama", .size = 5};
    vocab->tokens = tables.tokens;
    vocab->scores = tables.scores;
    vocab->types = tables.types;
    vocab->n_tokens = (uint32_t)n;
    vocab->add_bos = true;
    uint32_t *const ids[] = {&vocab->bos, &vocab->eos, &vocab->unk};
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++)
        if (*ids[i] >= n) *ids[i] = FKV_NO_TOKEN;
    return FKV_OK;
}
