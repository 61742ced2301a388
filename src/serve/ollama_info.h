/* Model descriptions in the format of Ollama's API. The server has one model, which is always loaded. */
#ifndef FKV_SERVE_OLLAMA_INFO_H
#define FKV_SERVE_OLLAMA_INFO_H

#include "exchange.h"

json_t *ollama_tags(const server *s);    /* GET /api/tags: the models */
json_t *ollama_running(const server *s); /* GET /api/ps: the loaded models */
json_t *ollama_version(void);            /* GET /api/version */

/* POST /api/show. Runs on a worker thread. Returns the description of the model, or NULL if the name is unknown. */
json_t *ollama_show(const server *s, const char *name);

#endif
