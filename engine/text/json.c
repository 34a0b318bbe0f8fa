/* json.c: what the readers of tokenizer.json share. */
#include "text/json.h"

#include "moonshard/io.h"

/* A hostile file may nest sequences in sequences. */
enum { SEQUENCES_DEEP = 8 };

ms_status ms_json_parse(ms_context *context, const void *data, size_t bytes, json_t **out)
{
    json_error_t error;
    *out = json_loadb(data, bytes, JSON_ALLOW_NUL, &error);
    /* Once more, with reals for integers beyond 64 bits. */
    if (!*out && json_error_code(&error) == json_error_numeric_overflow) {
        size_t more = ms_json_big_integers(data, bytes, NULL);
        void *text = NULL;
        ms_status status = ms_allocate(context, more, "its JSON", &text);
        if (status) return status;
        ms_json_big_integers(data, bytes, text);
        *out = json_loadb(text, more, JSON_ALLOW_NUL, &error);
        ms_release(context, text);
    }
    if (*out) return MS_OK;
    if (json_error_code(&error) == json_error_out_of_memory)
        return ms_fail(context, MS_ERROR_MEMORY, "no memory for its JSON");
    return ms_fail(context, MS_ERROR_CORRUPT, "line %d is no JSON: %s", error.line, error.text);
}

const char *ms_json_type(const json_t *component)
{
    const char *type = json_string_value(json_object_get(component, "type"));
    return type ? type : "";
}

ms_span ms_json_text(const json_t *value)
{
    const uint8_t *at = (const uint8_t *)json_string_value(value);
    return (ms_span){ .at = at, .end = at ? at + json_string_length(value) : at };
}

bool ms_json_boolean(const json_t *object, const char *name, bool otherwise)
{
    const json_t *value = json_object_get(object, name);
    return json_is_boolean(value) ? json_is_true(value) : otherwise;
}

ms_status ms_json_refuse(ms_context *context, const char *part, const char *type, const char *known)
{
    return ms_fail(context, MS_ERROR_UNSUPPORTED,
                   "its %s is \"%.100s\", which is not supported (supported: %s)", part, type,
                   known);
}

ms_status ms_json_pattern(ms_context *context, const json_t *value, const char *part,
                          ms_pattern **out)
{
    const json_t *literal = json_object_get(value, "String"),
                 *regex = json_object_get(value, "Regex");
    const json_t *given = literal ? literal : regex;
    if (!json_is_string(given))
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "the pattern of its %s is neither { \"String\" } nor { \"Regex\" }", part);
    ms_status status = ms_pattern_new(context, json_string_value(given), json_string_length(given),
                                      literal ? MS_DIALECT_LITERAL : MS_DIALECT_ONIGURUMA, out);
    /* A mistake in a file is not the caller's. */
    if (status != MS_ERROR_ARGUMENT) return status;
    context->error.status = MS_ERROR_CORRUPT;
    return MS_ERROR_CORRUPT;
}

static ms_status each(ms_context *context, const json_t *component, const char *list,
                      ms_component_function one, void *to, int depth)
{
    if (component == NULL || json_is_null(component)) return MS_OK;
    if (strcmp(ms_json_type(component), "Sequence") != 0) return one(context, component, to);
    const json_t *items = json_object_get(component, list);
    if (!json_is_array(items) || depth == 0)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "a \"Sequence\" has no list \"%s\", or they are nested deeper than %d", list,
                       SEQUENCES_DEEP);
    ms_status status = MS_OK;
    for (size_t i = 0; !status && i < json_array_size(items); i++)
        status = each(context, json_array_get(items, i), list, one, to, depth - 1);
    return status;
}

ms_status ms_json_each(ms_context *context, const json_t *component, const char *list,
                       ms_component_function one, void *to)
{
    return each(context, component, list, one, to, SEQUENCES_DEEP);
}
