/* build.c: what readers of several formats do to fill a model. */
#include "text/build.h"

#include "text/alphabet.h"

/* For messages, which show at most 60 bytes. */
#define SHOWN(span) \
    (int)(ms_span_bytes(span) < 60 ? ms_span_bytes(span) : 60), (const char *)(span).at

/* The bytes of a name in `buffer`; *known: it is written in the alphabet. */
static ms_status read_name(ms_context *context, const ms_model *model, ms_span name,
                           ms_buffer *buffer, ms_span *out, bool *known)
{
    *out = name;
    *known = true;
    if (!model->by_bytes) return MS_OK;
    buffer->length = 0;
    ms_status status = ms_alphabet_read(context, name, buffer, known);
    if (*known) *out = ms_buffer_span(buffer, false);
    return status;
}

ms_status ms_build_named(ms_context *context, ms_model *model, uint32_t id, ms_span name)
{
    ms_buffer buffer = { 0 };
    ms_span text;
    bool known;
    ms_status status = read_name(context, model, name, &buffer, &text, &known);
    if (!status && ms_vocabulary_has(&model->vocabulary, id))
        status =
            ms_fail(context, MS_ERROR_CORRUPT, "two tokens of its vocabulary have the id %u", id);
    /* A name that the alphabet cannot write is no piece's; it is found where it is added. */
    if (!status) status = ms_vocabulary_add(context, &model->vocabulary, id, text, 0, known);
    ms_buffer_free(context, &buffer);
    return status;
}

ms_status ms_build_find(ms_context *context, const ms_model *model, ms_span name, uint32_t *id)
{
    ms_buffer buffer = { 0 };
    ms_span text;
    bool known;
    ms_status status = read_name(context, model, name, &buffer, &text, &known);
    *id = MS_NO_TOKEN;
    if (!status && known)
        *id = ms_vocabulary_find(&model->vocabulary, text.at, ms_span_bytes(text));
    ms_buffer_free(context, &buffer);
    return status;
}

ms_status ms_build_merge(ms_context *context, ms_model *model, ms_span left, ms_span right,
                         uint32_t rank)
{
    ms_buffer both = { 0 };
    ms_merge merge = { .rank = rank };
    ms_status status = ms_build_find(context, model, left, &merge.left);
    if (!status) status = ms_build_find(context, model, right, &merge.right);
    if (!status) status = ms_buffer_add(context, &both, left.at, ms_span_bytes(left));
    if (!status) status = ms_buffer_add(context, &both, right.at, ms_span_bytes(right));
    if (!status) status = ms_build_find(context, model, ms_buffer_span(&both, false), &merge.made);
    ms_buffer_free(context, &both);
    if (status) return status;
    if (merge.left == MS_NO_TOKEN || merge.right == MS_NO_TOKEN || merge.made == MS_NO_TOKEN)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "merge %u, of '%.*s' and '%.*s', has a token that is not in the vocabulary",
                       rank + 1, SHOWN(left), SHOWN(right));
    model->vocabulary.tokens[merge.made].flags |= MS_TOKEN_MERGED;
    return ms_merges_add(context, &model->merges, merge);
}

/* The pairs that make one token. */
static ms_status add_pairs_of(ms_context *context, ms_model *model, uint32_t id, uint32_t rank)
{
    ms_span text = ms_vocabulary_text(&model->vocabulary, id);
    ms_status status = MS_OK;
    for (const uint8_t *at = text.at + 1; !status && at < text.end; at++) {
        /* In a model by characters, texts are cut between them only. */
        if (!model->by_bytes && (*at & 0xc0) == 0x80) continue;
        uint32_t left = ms_vocabulary_find(&model->vocabulary, text.at, (size_t)(at - text.at));
        if (left == MS_NO_TOKEN) continue;
        uint32_t right = ms_vocabulary_find(&model->vocabulary, at, (size_t)(text.end - at));
        if (right == MS_NO_TOKEN) continue;
        status =
            ms_merges_add(context, &model->merges,
                          (ms_merge){ .left = left, .right = right, .rank = rank, .made = id });
    }
    return status;
}

ms_status ms_build_pairs(ms_context *context, ms_model *model, const uint32_t *ranks)
{
    ms_status status = MS_OK;
    for (uint32_t id = 0; !status && id < model->vocabulary.count; id++)
        if (model->vocabulary.tokens[id].flags & MS_TOKEN_MERGED
            && model->vocabulary.tokens[id].length > 1)
            status = add_pairs_of(context, model, id, ranks ? ranks[id] : id);
    return status;
}

void ms_build_bytes(ms_model *model)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        model->bytes[i] = ms_vocabulary_find(&model->vocabulary, &byte, 1);
    }
}
