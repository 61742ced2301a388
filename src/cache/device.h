/* The seam between a cache and the device its pages live on: what a cache needs beside write and attend. Those two take the
 * device's own arrays and are its own calls (fkv_write() and fkv_attend() on the host, flatkv/mlx.h on MLX), which reach the
 * step through the functions at the end of this file.
 *
 * The host is a device like any other (device_host.c); the one thing said of it apart is that the cache's workers, scratch and
 * CPU kernels serve it.
 */
#ifndef FKV_DEVICE_H
#define FKV_DEVICE_H

#include "shape.h"

/* What a device is opened with. Everything is the cache's, stays where it is and outlives the device. */
typedef struct fkv_device_place {
    void *state;         /* state_bytes() of zeroed memory, the device's own */
    const void *options; /* the caller's, good during the call only */
    fkv_slab *slab;      /* layout; the device sets base, or store and store_self */
    fkv_attn_layer *layers;
    const fkv_config *config;
    uint64_t slab_bytes; /* as planned */
} fkv_device_place;

/* The rows of one step in every layer group. */
typedef struct fkv_device_step {
    const fkv_attn_row *rows; /* rows of group g are at rows + g * stride */
    uint32_t stride;
    uint32_t n_rows;
    uint32_t n_tokens; /* of all rows: T */
} fkv_device_step;

typedef struct fkv_device {
    bool on_host;      /* workers, scratch and CPU kernels are taken for it, and fkv_write() and fkv_attend() serve it */
    const char *calls; /* its own write and attend, for the message to who called another device's */

    uint64_t (*state_bytes)(const fkv_shape *shape);

    /* Bytes that it takes at open beside the pages, and plans with them; NULL: none. options may be NULL. */
    uint64_t (*beside_bytes)(const fkv_shape *shape, const void *options);

    /* Bytes of pages it could still give, and what bound it. */
    uint64_t (*available)(const void *options, const char **source);

    /* Takes the pages. A failure has taken nothing. */
    fkv_status (*open)(const fkv_device_place *place);
    void (*close)(void *state);

    /* For fkv_stats.isa. */
    const char *(*name)(const void *state);

    /* After the step's slots are assigned and its pages copied; a failure aborts the step. The rows and the page tables behind
     * them stay as they are until step_end(), which follows every step_begin() that succeeded: pages are let go after it, those
     * of sequences closed during the step included. */
    fkv_status (*step_begin)(void *state, const fkv_device_step *step);
    void (*step_end)(void *state);
} fkv_device;

extern const fkv_device fkv_device_host;

/* fkv_plan_make() and fkv_cache_open() for a device. */
FKV_SEAM fkv_status fkv_plan_make_on(const fkv_device *device, const void *options, const fkv_config *config, fkv_plan *plan);
FKV_SEAM fkv_status fkv_cache_open_on(const fkv_device *device, const void *options, const fkv_config *config, fkv_cache **cache);

/* The public checks of a device's own write and attend: the step is open, its cache is of this device, the layer exists (all of
 * them), was not written yet (write) or was (attend). `call` is the name for the message. */
FKV_SEAM fkv_status fkv_step_check_layer(const fkv_step *step, const fkv_device *device, uint32_t layer, const char *call);
FKV_SEAM fkv_status fkv_step_check_write(const fkv_step *step, const fkv_device *device, uint32_t layer, const char *call);
FKV_SEAM fkv_status fkv_step_check_attend(const fkv_step *step, const fkv_device *device, uint32_t layer, const char *call);

/* The state of the step's device. */
FKV_SEAM void *fkv_step_device_state(const fkv_step *step);

/* What a write, and an attend that reads `bytes` of packed pages, leave in the books. */
FKV_SEAM void fkv_step_wrote(fkv_step *step, uint32_t layer);
FKV_SEAM void fkv_step_attended(fkv_step *step, uint64_t bytes);

/* The device's own state of a cache, NULL if the cache is of another device. */
FKV_SEAM void *fkv_cache_device_state(const fkv_cache *cache, const fkv_device *device);

#endif
