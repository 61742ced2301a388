/* See model_cost.h. */
#include "model_cost.h"

#include "model_options.h"

enum { MAX_CONTEXT = 32768 };

model_cost model_cost_of(const char *path) {
    model_cost cost = {0};
    fkv_model *model = NULL;
    fkv_runner_plan plan;
    fkv_model_config config = fkv_model_config_default();
    model_options defaults = model_options_default();
    config.plan_only = true;
    cost.status = fkv_model_load(path, &config, &model);
    if (cost.status == FKV_OK) {
        const fkv_model_info *about = fkv_model_about(model);
        (void)snprintf(cost.architecture, sizeof cost.architecture, "%s", about->architecture);
        cost.trained = about->context;
        cost.context = about->context < MAX_CONTEXT ? about->context : MAX_CONTEXT;
        model_options_adapt(&defaults, model);
        fkv_runner_config runner = model_options_runner(&defaults, cost.context);
        cost.status = fkv_runner_plan_make(model, &runner, &plan);
    }
    cost.loads = cost.status == FKV_OK;
    if (cost.loads) {
        cost.weights_bytes = plan.packed_bytes + plan.mapped_bytes;
        cost.total_bytes = plan.total_bytes + cost.weights_bytes;
        cost.token_bytes = plan.cache.token_bytes;
    } else {
        (void)snprintf(cost.reason, sizeof cost.reason, "%s", fkv_message());
    }
    fkv_model_close(model);
    return cost;
}
