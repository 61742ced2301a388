// Uses the public headers from C++17: they compile with pedantic warnings, have C linkage, and declare plain C types.
#include <flatkv/flatkv.h>
#include <flatkv/prefix_store.h>

#include <cstdio>
#include <cstring>
#include <type_traits>
#include <vector>

static_assert(std::is_standard_layout<fkv_config>::value && std::is_trivial<fkv_config>::value, "must be a plain C struct");
static_assert(std::is_same<fkv_seq, uint64_t>::value, "sequence IDs must be 64-bit integers");
static_assert(sizeof(fkv_status) == sizeof(int), "a status must be an int");

static int failed(const char *what) {
    std::printf("%s: %s\n", what, fkv_message());
    return 1;
}

int main() {
    const fkv_codec_config usual = {4, 64, FKV_CODEC_SEALED};
    fkv_config config = fkv_config_default();
    if (config.layer.k.bits != usual.bits || config.layer.k.group != usual.group || config.layer.k.kind != usual.kind)
        return failed("fkv_config_default");
    if (fkv_codec_parse("8/4", &config.layer.k, &config.layer.v) != FKV_OK || config.layer.v.kind != FKV_CODEC_AFFINE)
        return failed("fkv_codec_parse");
    config.rotate = FKV_ROTATE_NONE;
    config.n_layers = 1;
    config.layer.n_q_heads = 2;
    config.layer.n_kv_heads = 1;
    config.layer.head_dim = 64;
    config.max_tokens = 128;
    config.n_threads = 1;

    fkv_cache *cache = nullptr;
    fkv_seq seq = 0;
    fkv_step *step = nullptr;
    fkv_seq_config seq_config = {};
    seq_config.max_tokens = 3;
    if (fkv_cache_open(&config, &cache) != FKV_OK) return failed("open");
    if (fkv_seq_open(cache, &seq_config, &seq, nullptr) != FKV_OK) return failed("seq_open");

    std::vector<float> k(3 * 64, 0.5f), v(3 * 64, 0.25f), q(3 * 2 * 64, 1.0f), out(3 * 2 * 64, 0.0f);
    const fkv_row row = {seq, 3};
    if (fkv_step_begin(cache, &row, 1, &step) != FKV_OK) return failed("step_begin");
    if (fkv_write(step, 0, k.data(), v.data()) != FKV_OK) return failed("write");
    if (fkv_attend(step, 0, q.data(), out.data()) != FKV_OK) return failed("attend");
    if (fkv_step_commit(step) != FKV_OK) return failed("commit");
    for (float x : out)
        if (!(x > 0.249f && x < 0.251f)) return failed("every value is 0.25 and so is every average of them");

    if (fkv_seq_close(cache, seq) != FKV_OK) return failed("seq_close");
    if (fkv_seq_close(cache, seq) != FKV_BAD_SEQ || std::strlen(fkv_message()) == 0) return failed("closed twice");
    fkv_cache_close(cache);
    std::printf("1 passed, 0 failed\n");
    return 0;
}
