/* Finds the end of a GGUF header (metadata and tensor descriptions) in the first bytes of a file, so that only these bytes need
 * to be downloaded to plan a model. The contents of the header are not interpreted, because the model loader validates them. */
#ifndef FKV_HUB_GGUF_HEADER_H
#define FKV_HUB_GGUF_HEADER_H

#include <stddef.h>
#include <stdint.h>

typedef enum gguf_header {
    GGUF_HEADER_COMPLETE,  /* the given bytes contain the whole header */
    GGUF_HEADER_TRUNCATED, /* the header continues after the given bytes */
    GGUF_HEADER_INVALID,   /* the file is not a GGUF file, or its version or a value type is not supported */
} gguf_header;

/* Examines the first n bytes of a file. The run time is linear in n for any input. Sets *end to the size of the header if it is
 * complete. */
gguf_header gguf_header_end(const uint8_t *bytes, size_t n, size_t *end);

#endif
