/* Fuzzes the pager. The first byte selects the pager spec; tests/pager_operations.c chooses its operations from the other bytes.
 * The program aborts on any difference between the pager and its model. */
#include "../tests/pager_model.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    pager_model *model = pager_model_open(&pager_model_specs[data[0] % pager_model_n_specs]);
    pager_choices choices = pager_choices_of(data + 1, size - 1);
    while (pager_choices_left(&choices)) {
        if (pager_model_operate(model, &choices)) continue;
        fprintf(stderr, "%s: %s\n", pager_model_specs[data[0] % pager_model_n_specs].name, pager_model_fault(model));
        abort();
    }
    pager_model_close(model);
    return 0;
}
