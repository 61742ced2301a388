/* Differences between the config.json of a model type and the common fields that hf_config.c reads. */
#ifndef FKV_HF_TRAITS_H
#define FKV_HF_TRAITS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct fkv_hf_traits {
    const char *type;
    const char *defaults;   /* JSON object with default values for omitted fields, or NULL */
    const char *renames;    /* JSON object that maps fields of this model type to their common names, or NULL */
    const char *fields;     /* fields that are supported for this model type but rejected for others, separated by spaces */
    bool rotates_partly;    /* partial_rotary_factor is supported */
    bool has_list_values;   /* renamed fields may be lists whose elements are all equal */
    bool has_shared_expert; /* layers with experts have one shared expert, with the same dimension as a routed expert */
} fkv_hf_traits;

/* An option for which only one value is implemented. */
typedef struct fkv_hf_option {
    const char *types; /* model types that have the option, separated by spaces */
    const char *key;
    const char *value; /* JSON text of the only supported value other than null */
} fkv_hf_option;

/* Returns the traits of a model type. If it has no entry in the table, all fields of the result are empty. */
const fkv_hf_traits *fkv_hf_traits_of(const char *type);

/* Returns all options; *n receives their number. */
const fkv_hf_option *fkv_hf_options(size_t *n);

/* Returns whether a word is part of a list of words separated by spaces; the list may be NULL. */
bool fkv_hf_has_word(const char *words, const char *word);

#endif
