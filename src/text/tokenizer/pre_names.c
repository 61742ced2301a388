/* See pre_names.h. The patterns are copied from the tokenizer.json files of the models (Oniguruma syntax); llama.cpp's converter
 * writes the names to GGUF files. */
#include "pre_names.h"

#define ENDINGS "'s|'t|'re|'ve|'m|'ll|'d"
#define SPACES "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define MODERN(digits) "(?i:" ENDINGS ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACES
/* Patterns that match a word of uppercase letters followed by lowercase letters; either part may be missing. */
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define CASED(upper, lower, ending, digits, behind)                                                                              \
    "[^\\r\\n\\p{L}\\p{N}]?" upper "*" lower "+" ending "|[^\\r\\n\\p{L}\\p{N}]?" upper "+" lower "*" ending "|" digits          \
    "| ?[^\\s\\p{L}\\p{N}]+" behind "|" SPACES
#define NOT_HAN(class) "(?:(?!\\p{Han})" class ")"
#define ANY_ENDING "(?i:" ENDINGS ")?"

const char FKV_GPT2_PATTERN[] = ENDINGS "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static const char DIGIT[] = "\\p{N}";
static const char DIGITS[] = "\\p{N}+";
static const char THREE_DIGITS[] = "\\p{N}{1,3}";
static const char QWEN2[] = MODERN("\\p{N}");
static const char QWEN35[] =
    "(?i:" ENDINGS ")|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" SPACES;
static const char LLAMA3[] = MODERN("\\p{N}{1,3}");
static const char TEKKEN[] = CASED(UPPER, LOWER, "", "\\p{N}", "[\\r\\n/]*");
static const char GPT4O[] = CASED(UPPER, LOWER, ANY_ENDING, "\\p{N}{1,3}", "[\\r\\n/]*");
static const char KIMI[] = "\\p{Han}+|" CASED(NOT_HAN(UPPER), NOT_HAN(LOWER), ANY_ENDING, "\\p{N}{1,3}", "[\\r\\n]*");
static const char LINE_ENDS[] = "[\r\n]";
static const char LINE_TAIL[] = "\\s+$";
static const char SOME_CJK[] = "[一-龥ࠀ-一가-퟿]+";
static const char V3_CJK[] = "[一-龥぀-ゟ゠-ヿ]+";
static const char V3_WORDS[] = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
                               "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+";
static const char CASED_LETTERS[] = "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ"
                                    "-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
                                    "ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
static const char SOME_PUNCTUATION[] = "\\s?[!-/:-~！-／：-～‘-‟　-。]+";
static const char CODER_LETTERS[] = "\\s?\\p{L}+";
static const char CODER_PUNCTUATION[] = "\\s?\\p{P}+";
static const char DEFAULT_PUNCTUATION[] = "[\\p{P}\\$\\+<=>\\^~\\|]+";
static const char FALCON_PUNCTUATION[] = "[\\p{P}\\$\\+<=>\\^~\\|`]+";
static const char THREE_ASCII_DIGITS[] = "[0-9][0-9][0-9]";

enum { MAX_PATTERNS = 6, MAX_NAMES = 14 };

typedef struct pre_tokenizer {
    const char *names[MAX_NAMES];
    const char *patterns[MAX_PATTERNS]; /* split patterns, applied in this order; each match becomes a separate piece */
    bool nfc, whole_words;
} pre_tokenizer;

static const pre_tokenizer PRE_TOKENIZERS[] = {
    {.names = {"gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0",
               "mellum"},
     .patterns = {FKV_GPT2_PATTERN}},
    {.names = {"smollm", "starcoder", "refact", "exaone", "codeshell", "minerva-7b", "mellum2"},
     .patterns = {DIGIT, FKV_GPT2_PATTERN}},
    {.names = {"command-r"}, .patterns = {DIGIT, FKV_GPT2_PATTERN}, .nfc = true},
    {.names = {"qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"}, .patterns = {QWEN2}, .nfc = true},
    {.names = {"stablelm2", "hunyuan", "grok-2", "solar-open"}, .patterns = {QWEN2}},
    {.names = {"qwen35"}, .patterns = {QWEN35}, .nfc = true},
    {.names = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"},
     .patterns = {LLAMA3},
     .whole_words = true},
    {.names = {"dbrx", "smaug-bpe", "glm4", "chatglm-bpe"}, .patterns = {LLAMA3}},
    {.names = {"tekken"}, .patterns = {TEKKEN}, .whole_words = true},
    {.names = {"gpt-4o", "llama4", "kanana2", "minimax-m2"}, .patterns = {GPT4O}},
    {.names = {"kimi-k2"}, .patterns = {KIMI}},
    {.names = {"deepseek-llm"}, .patterns = {LINE_ENDS, CASED_LETTERS, SOME_PUNCTUATION, LINE_TAIL, SOME_CJK, DIGITS}},
    {.names = {"deepseek-coder"}, .patterns = {LINE_ENDS, CODER_LETTERS, CODER_PUNCTUATION, SOME_CJK, DIGIT}},
    {.names = {"deepseek-v3", "hunyuan-dense", "joyai-llm"}, .patterns = {THREE_DIGITS, V3_CJK, V3_WORDS}},
    {.names = {"falcon"}, .patterns = {FALCON_PUNCTUATION, FKV_GPT2_PATTERN, THREE_ASCII_DIGITS}},
    {.names = {"default"}, .patterns = {DEFAULT_PUNCTUATION, FKV_GPT2_PATTERN, DIGITS, THREE_ASCII_DIGITS}},
};
enum { N_PRE_TOKENIZERS = sizeof PRE_TOKENIZERS / sizeof PRE_TOKENIZERS[0] };

static fkv_bytes bytes_of_pattern(const char *text) { return (fkv_bytes){text, strlen(text)}; }

static bool same_bytes(fkv_bytes a, fkv_bytes b) { return a.size == b.size && memcmp(a.data, b.data, a.size) == 0; }

static const pre_tokenizer *find_pre_tokenizer(fkv_bytes name) {
    if (name.size == 0) name = bytes_of_pattern("default");
    for (int i = 0; i < N_PRE_TOKENIZERS; i++)
        for (int j = 0; j < MAX_NAMES && PRE_TOKENIZERS[i].names[j] != NULL; j++)
            if (same_bytes(bytes_of_pattern(PRE_TOKENIZERS[i].names[j]), name)) return &PRE_TOKENIZERS[i];
    return NULL;
}

fkv_status fkv_pre_steps(fkv_bytes name, fkv_text_steps *steps, bool *whole_words) {
    const pre_tokenizer *found = find_pre_tokenizer(name);
    FKV_REQUIRE(
        found != NULL, FKV_UNSUPPORTED,
        "unknown pre-tokenizer \"%s\" (tokenizer.ggml.pre): expected gpt-2, llama-bpe, qwen2, tekken, gpt-4o or another known name",
        fkv_show(name).text);
    *steps = (fkv_text_steps){0};
    if (found->nfc) steps->steps[steps->n_steps++] = (fkv_text_step){.kind = FKV_STEP_NFC};
    steps->n_normalizers = steps->n_steps;
    for (int i = 0; i < MAX_PATTERNS && found->patterns[i] != NULL; i++)
        steps->steps[steps->n_steps++] =
            (fkv_text_step){.kind = FKV_STEP_SPLIT, .is_regex = true, .pattern = bytes_of_pattern(found->patterns[i])};
    *whole_words = found->whole_words;
    return FKV_OK;
}

bool fkv_pre_pattern_is_known(fkv_bytes pattern) {
    for (int i = 0; i < N_PRE_TOKENIZERS; i++)
        for (int j = 0; j < MAX_PATTERNS && PRE_TOKENIZERS[i].patterns[j] != NULL; j++)
            if (same_bytes(bytes_of_pattern(PRE_TOKENIZERS[i].patterns[j]), pattern)) return true;
    return false;
}
