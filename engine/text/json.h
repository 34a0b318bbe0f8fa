/* json.h: reading tokenizer.json, part by part, and what its readers share. Messages name no file:
 * ms_tokenizer_load adds it. */
#ifndef MOONSHARD_TEXT_JSON_H
#define MOONSHARD_TEXT_JSON_H

#include <jansson.h>

#include "text/tokenizer.h"

/* A file's JSON; the caller releases it by json_decref. */
ms_status ms_json_parse(ms_context *context, const void *data, size_t bytes, json_t **out);
/* The member "type" of a component; "" if it has none. */
const char *ms_json_type(const json_t *component);
/* A string as bytes; nothing for another value. */
ms_span ms_json_text(const json_t *value);
bool ms_json_boolean(const json_t *object, const char *name, bool otherwise);
/* MS_ERROR_UNSUPPORTED that names the component. */
ms_status ms_json_refuse(ms_context *context, const char *part, const char *type,
                         const char *known);
/* A pattern of the file: { "String": ... } or { "Regex": ... }. What is none is MS_ERROR_CORRUPT.
 */
ms_status ms_json_pattern(ms_context *context, const json_t *value, const char *part,
                          ms_pattern **out);
/* Calls `one` with the component, or with each that a "Sequence" has in its member `list`, in
 * order. null: none. */
typedef ms_status (*ms_component_function)(ms_context *context, const json_t *component, void *to);
ms_status ms_json_each(ms_context *context, const json_t *component, const char *list,
                       ms_component_function one, void *to);

#endif
