/* The host as a device. The slab is one memory map, a step needs no device-side tables, and the memory limit is the available
 * memory of the system.
 */
#include "device.h"

#include "../base/memory.h"

typedef struct host_state {
    void *map;
    uint64_t bytes;
} host_state;

static uint64_t host_state_bytes(const fkv_shape *shape) {
    (void)shape;
    return sizeof(host_state);
}

static uint64_t host_available(const void *options, const char **source) {
    (void)options;
    return fkv_memory_available(source);
}

static fkv_status host_open(const fkv_device_place *place) {
    host_state *host = place->state;
    FKV_TRY(fkv_map_open(place->slab_bytes, !place->config->lazy, &host->map));
    host->bytes = place->slab_bytes;
    place->slab->base = host->map;
    uint32_t n_layers = place->config->n_layers;
    uint32_t n_open = 0; /* slab entries for open blocks of sealed layers come after the entries of all layers */
    for (uint32_t i = 0; i < n_layers; i++) {
        place->layers[i].pages = fkv_slab_run(place->slab, i, 0);
        if (place->layers[i].sealed) place->layers[i].open_pages = fkv_slab_run(place->slab, n_layers + n_open++, 0);
    }
    return FKV_OK;
}

static void host_close(void *state) {
    const host_state *host = state;
    fkv_map_close(host->map, host->bytes);
}

/* Never called by fkv_cache_stats(), which reports the name of the CPU kernels for host caches. */
static const char *host_name(const void *state) {
    (void)state;
    return "host";
}

/* Does nothing, because attention reads the pager's tables directly. */
static fkv_status host_step_begin(void *state, const fkv_device_step *step) {
    (void)state;
    (void)step;
    return FKV_OK;
}

static void host_step_end(void *state) { (void)state; }

const fkv_device fkv_device_host = {.on_host = true,
                                    .calls = "fkv_write() and fkv_attend()",
                                    .state_bytes = host_state_bytes,
                                    .available = host_available,
                                    .open = host_open,
                                    .close = host_close,
                                    .name = host_name,
                                    .step_begin = host_step_begin,
                                    .step_end = host_step_end};
