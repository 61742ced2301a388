/* Model descriptions in the format of Ollama's API. The models of a server are always loaded. */
#ifndef FKV_SERVE_OLLAMA_INFO_H
#define FKV_SERVE_OLLAMA_INFO_H

#include "exchange.h"

json_t *ollama_tags(const server *s);    /* response to GET /api/tags, which lists all models */
json_t *ollama_running(const server *s); /* response to GET /api/ps, which lists the loaded models */
json_t *ollama_version(void);            /* GET /api/version */

json_t *ollama_show(const server *s, const served_model *m); /* response to POST /api/show; called on a worker thread */

#endif
