/* json_model.c: the model and the added tokens of tokenizer.json. */
#include "text/json_model.h"

#include "text/build.h"
#include "text/decoding.h"

/* ---------------------------------------------------------------------- model */

/* What other kinds of BPE have, and this one lacks. */
static ms_status check_kind(ms_context *context, const json_t *model)
{
    static const char *const texts[] = { "continuing_subword_prefix", "end_of_word_suffix" };
    const char *type = ms_json_type(model);
    /* Old files do not name the type of a BPE. */
    bool is_bpe =
        *type ? strcmp(type, "BPE") == 0 : json_is_array(json_object_get(model, "merges"));
    if (!is_bpe) return ms_json_refuse(context, "model", *type ? type : "without a type", "BPE");
    if (json_number_value(json_object_get(model, "dropout")) > 0)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "its model has a dropout, which is not supported");
    for (size_t i = 0; i < 2; i++)
        if (json_string_length(json_object_get(model, texts[i])))
            return ms_fail(context, MS_ERROR_UNSUPPORTED,
                           "its model has a \"%s\", which is not supported", texts[i]);
    return MS_OK;
}

static ms_status add_vocabulary(ms_context *context, json_t *vocabulary, ms_model *model)
{
    const char *name;
    size_t bytes;
    json_t *value;
    ms_status status = MS_OK;
    if (!json_is_object(vocabulary))
        return ms_fail(context, MS_ERROR_CORRUPT, "its model has no vocabulary");
    json_object_keylen_foreach(vocabulary, name, bytes, value)
    {
        const uint8_t *at = (const uint8_t *)name;
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id > MS_TOKEN_ID_MAX)
            return ms_fail(context, MS_ERROR_CORRUPT,
                           "the token '%.60s' has no id from 0 to %u in its vocabulary", name,
                           MS_TOKEN_ID_MAX);
        status =
            ms_build_named(context, model, (uint32_t)id, (ms_span){ .at = at, .end = at + bytes });
        if (status) return status;
    }
    return MS_OK;
}

/* A merge is "a b", or ["a", "b"] in newer files, where tokens may have spaces. */
static ms_status add_merge(ms_context *context, const json_t *merge, uint32_t rank, ms_model *model)
{
    ms_span text = ms_json_text(merge), left = ms_json_text(json_array_get(merge, 0)),
            right = ms_json_text(json_array_get(merge, 1));
    if (json_is_string(merge)) {
        const uint8_t *space =
            text.at < text.end ? memchr(text.at, ' ', ms_span_bytes(text)) : NULL;
        left = (ms_span){ .at = text.at, .end = space };
        right = (ms_span){ .at = space ? space + 1 : NULL, .end = text.end };
    }
    if (left.at == NULL || right.at == NULL || left.at >= left.end || right.at >= right.end)
        return ms_fail(context, MS_ERROR_CORRUPT, "merge %u is not two tokens", rank + 1);
    return ms_build_merge(context, model, left, right, rank);
}

/* Tokens for bytes, and the one for what is unknown. */
static ms_status read_rest(ms_context *context, const json_t *value, ms_model *model)
{
    ms_span unknown = ms_json_text(json_object_get(value, "unk_token"));
    model->fuse = ms_json_boolean(value, "fuse_unk", false);
    model->whole = ms_json_boolean(value, "ignore_merges", false);
    model->fallback = !model->by_bytes && ms_json_boolean(value, "byte_fallback", false);
    if (model->by_bytes) ms_build_bytes(model);
    for (uint32_t id = 0; model->fallback && id < model->vocabulary.count; id++) {
        int byte = ms_vocabulary_has(&model->vocabulary, id)
                       ? ms_byte_of_name(ms_vocabulary_text(&model->vocabulary, id))
                       : -1;
        if (byte >= 0) model->bytes[byte] = id;
    }
    if (unknown.at == NULL) return MS_OK;
    model->unknown = ms_vocabulary_find(&model->vocabulary, unknown.at, ms_span_bytes(unknown));
    if (model->unknown == MS_NO_TOKEN)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "its unknown token '%.60s' is not in its vocabulary",
                       (const char *)unknown.at);
    return MS_OK;
}

ms_status ms_json_model(ms_context *context, const json_t *value, ms_tokenizer *tokenizer)
{
    ms_model *model = &tokenizer->model;
    const json_t *merges = json_object_get(value, "merges");
    ms_status status = check_kind(context, value);
    if (!status) status = add_vocabulary(context, json_object_get(value, "vocab"), model);
    if (!status && !json_is_array(merges))
        status = ms_fail(context, MS_ERROR_CORRUPT, "its model has no list of merges");
    for (size_t i = 0; !status && i < json_array_size(merges); i++)
        status = add_merge(context, json_array_get(merges, i), (uint32_t)i, model);
    if (!status) status = read_rest(context, value, model);
    if (!status) ms_model_seal(model);
    return status;
}

/* --------------------------------------------------------------- added tokens */

ms_status ms_json_added_tokens(ms_context *context, const json_t *value, ms_tokenizer *tokenizer)
{
    ms_status status = MS_OK;
    for (size_t i = 0; !status && i < json_array_size(value); i++) {
        const json_t *one = json_array_get(value, i), *id = json_object_get(one, "id");
        ms_span text = ms_json_text(json_object_get(one, "content"));
        bool special = ms_json_boolean(one, "special", false);
        if (!json_is_integer(id) || json_integer_value(id) < 0
            || json_integer_value(id) > MS_TOKEN_ID_MAX || text.at == NULL)
            return ms_fail(context, MS_ERROR_CORRUPT,
                           "added token %zu has no content, or no id from 0 to %u", i + 1,
                           MS_TOKEN_ID_MAX);
        ms_added_token token = {
            .id = (uint32_t)json_integer_value(id),
            .special = special,
            .left = ms_json_boolean(one, "lstrip", false),
            .right = ms_json_boolean(one, "rstrip", false),
            .word = ms_json_boolean(one, "single_word", false),
        };
        status = ms_tokenizer_add(context, tokenizer, text, token,
                                  ms_json_boolean(one, "normalized", !special));
    }
    return status;
}
