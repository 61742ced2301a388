/* Interface between a cache and the device that holds its pages. The functions that write rows and compute attention are not part
 * of this interface. They take device-specific arrays, so each device has its own public functions: fkv_write() and fkv_attend()
 * on the host, fkv_mlx_write() and fkv_mlx_attend() on MLX. These public functions access the step through the functions at the
 * end of this file.
 *
 * The host is also a device (device_host.c). Only the host uses the cache's workers, scratch memory and CPU kernels.
 */
#ifndef FKV_DEVICE_H
#define FKV_DEVICE_H

#include "shape.h"

/* Arguments of fkv_device.open(). Unless noted otherwise, the cache owns the objects, their addresses do not change, and they
 * outlive the device. */
typedef struct fkv_device_place {
    void *state;         /* [state_bytes()] zeroed memory for the device's state */
    const void *options; /* options passed by the caller; valid only during the call */
    fkv_slab *slab;      /* slab layout; the device sets either `base`, or `store` and `store_self` */
    fkv_attn_layer *layers;
    const fkv_config *config;
    uint64_t slab_bytes; /* size of the slab according to the plan */
} fkv_device_place;

/* Rows of one step. Each layer group has its own array of rows, which refer to the page tables of that group. */
typedef struct fkv_device_step {
    const fkv_attn_row *rows; /* rows of group g are at rows + g * stride */
    uint32_t stride;
    uint32_t n_rows;
    uint32_t n_tokens;            /* T: total number of tokens in all rows */
    const fkv_state_move *states; /* [n_rows] slots of the recurrent states; NULL if there are no state layers */
} fkv_device_step;

typedef struct fkv_device {
    bool on_host; /* true if the device uses the cache's workers, scratch memory and CPU kernels; fkv_write() and fkv_attend()
                     work only on such a device */
    const char *calls; /* names of the device's public write and attend functions, for error messages */

    /* Returns the size of the device's state. */
    uint64_t (*state_bytes)(const fkv_shape *shape);

    /* Returns the number of bytes that open() allocates in addition to the pages. The plan includes this number in slab_bytes. A
     * NULL function pointer means 0 bytes. options may be NULL. */
    uint64_t (*extra_bytes)(const fkv_shape *shape, const void *options);

    /* Returns the number of bytes available for pages. *source receives the name of the limit that determines this number, for
     * error messages. */
    uint64_t (*available)(const void *options, const char **source);

    /* Allocates the pages. If open() fails, it releases all memory that it allocated. */
    fkv_status (*open)(const fkv_device_place *place);
    void (*close)(void *state);

    /* Returns the name that fkv_stats.isa reports. */
    const char *(*name)(const void *state);

    /* step_begin() is called after the pager has assigned the pages of the step and shared pages have been copied. If
     * step_begin() fails, the step is aborted. The rows and their page tables remain valid until step_end(), which follows every
     * successful step_begin(). Pages are released only after step_end(), including those of sequences closed during the step. */
    fkv_status (*step_begin)(void *state, const fkv_device_step *step);
    void (*step_end)(void *state);
} fkv_device;

extern const fkv_device fkv_device_host;

/* Implement fkv_plan_make() and fkv_cache_open() for the given device. */
FKV_INTERNAL fkv_status fkv_plan_make_on(const fkv_device *device, const void *options, const fkv_config *config, fkv_plan *plan);
FKV_INTERNAL fkv_status fkv_cache_open_on(const fkv_device *device, const void *options, const fkv_config *config,
                                          fkv_cache **cache);

/* State that a layer must be in when a write or attend function is called. */
typedef enum fkv_layer_state { FKV_LAYER_ANY, FKV_LAYER_UNWRITTEN, FKV_LAYER_WRITTEN } fkv_layer_state;

/* Performs the checks that are common to the write and attend functions of all devices: the step is open, its cache is on this
 * device, the layer exists, and the layer is in the required state. call: name of the calling function, for the error message. */
FKV_INTERNAL fkv_status fkv_step_check(const fkv_step *step, const fkv_device *device, uint32_t layer, fkv_layer_state required,
                                       const char *call);

/* Returns the state of the step's device. */
FKV_INTERNAL void *fkv_step_device_state(const fkv_step *step);

/* Record that the write or attend function of a layer has completed. bytes: number of packed-page bytes that attention has
 * read. */
FKV_INTERNAL void fkv_step_wrote(fkv_step *step, uint32_t layer);
FKV_INTERNAL void fkv_step_attended(fkv_step *step, uint64_t bytes);

/* Returns the device state of a cache, or NULL if the cache is on another device. */
FKV_INTERNAL void *fkv_cache_device_state(const fkv_cache *cache, const fkv_device *device);

#endif
