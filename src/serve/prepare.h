/* Prepares API requests on worker threads: parses the body, renders the chat template, tokenizes the prompt and compiles the
 * grammar. Each function reads x->body and writes a complete response (x->text), an error (x->error), or the fields that
 * exchange.c submits to the engine. After each stage of preparation, a function returns early if the client has disconnected.
 */
#ifndef FKV_SERVE_PREPARE_H
#define FKV_SERVE_PREPARE_H

#include "exchange.h"

/* Parses the body and selects the model that its field `model` names. The caller owns the result. Sets x->error and returns NULL
 * if the body is not a JSON object or the server has no such model. */
json_t *prepare_json(exchange *x);

void prepare_chat(exchange *x);
void prepare_completions(exchange *x);
void prepare_messages(exchange *x);
void prepare_responses(exchange *x);
void prepare_ollama_chat(exchange *x);
void prepare_ollama_generate(exchange *x);
void prepare_infill(exchange *x);
void prepare_ollama_show(exchange *x);
void prepare_token_count(exchange *x);
void prepare_tokens(exchange *x);
void prepare_token_text(exchange *x);
void prepare_template_text(exchange *x);

/* embeddings.c */
void prepare_embeddings(exchange *x);
void prepare_ollama_embed(exchange *x);
void prepare_ollama_embeddings(exchange *x);

#endif
