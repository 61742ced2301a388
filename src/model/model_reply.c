/* Public reply-parser functions that take a model. The parser in src/text/reply needs only the model's tokenizer and chat
 * template. */
#include "../text/reply/reply_parts.h"
#include "model.h"

fkv_reply_syntax fkv_reply_syntax_of(const fkv_model *model) {
    if (model == NULL || model->tokenizer == NULL) return (fkv_reply_syntax){FKV_REASONING_NONE, FKV_TOOLS_NONE};
    return fkv_reply_detect_syntax(model->tokenizer, fkv_weights_vocab(model->weights)->chat_template);
}

fkv_status fkv_reply_open(const fkv_model *model, const fkv_reply_config *config, fkv_reply **reply) {
    FKV_REQUIRE(model != NULL && config != NULL && reply != NULL && config->on_event != NULL, FKV_BAD_ARGUMENT,
                "fkv_reply_open: model, config, reply or on_event is NULL");
    FKV_REQUIRE(model->tokenizer != NULL, FKV_UNSUPPORTED, "%s: the model was loaded from config.json alone and has no tokenizer",
                model->path);
    return fkv_reply_create(model->tokenizer, fkv_weights_vocab(model->weights)->chat_template, config, reply);
}
