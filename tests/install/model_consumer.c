/* Minimal program that uses the installed model runtime: loads a missing model and prints the error. */
#include <flatkv/engine.h>
#include <flatkv/model.h>

#include <stdio.h>

int main(void) {
    fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    if (fkv_model_load("no such folder", &config, &model) == FKV_OK) return 1;
    printf("%s\n", fkv_message());
    return 0;
}
