/* Minimal program that uses an installed flatkv: plans, opens and closes a cache and reads its statistics. */
#include <flatkv/flatkv.h>

#include <stdio.h>

int main(void) {
    fkv_config config = fkv_config_default();
    config.n_layers = 2;
    config.layer.n_q_heads = 4;
    config.layer.n_kv_heads = 2;
    config.layer.head_dim = 64;
    config.max_tokens = 1024;
    config.n_threads = 2;
    fkv_plan plan;
    fkv_cache *cache = NULL;
    fkv_stats stats;
    if (fkv_plan_make(&config, &plan) != FKV_OK || fkv_cache_open(&config, &cache) != FKV_OK ||
        fkv_cache_stats(cache, &stats) != FKV_OK) {
        printf("%s\n", fkv_message());
        return 1;
    }
    printf("flatkv %s: planned %llu bytes, allocated %llu\n", fkv_version(), (unsigned long long)plan.total_bytes,
           (unsigned long long)stats.planned_bytes);
    fkv_cache_close(cache);
    return plan.total_bytes == stats.planned_bytes ? 0 : 1;
}
