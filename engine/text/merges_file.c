/* merges_file.c: GPT-2's list of merges: a line for each, two tokens with a space between them. The
 * vocabulary was read before. */
#include "text/merges_file.h"

#include "text/build.h"
#include "text/decoding.h"

/* Next line, without its end; false at the end of all. */
static bool next_line(ms_span *data, ms_span *line)
{
    if (data->at == data->end) return false;
    const uint8_t *end = memchr(data->at, '\n', ms_span_bytes(*data));
    *line = (ms_span){ .at = data->at, .end = end ? end : data->end };
    data->at = end ? end + 1 : data->end;
    if (line->end > line->at && line->end[-1] == '\r') line->end--;
    return true;
}

/* The first line may name a version instead. */
static bool is_version(ms_span line)
{
    return ms_span_bytes(line) >= 8 && memcmp(line.at, "#version", 8) == 0;
}

static ms_status add_lines(ms_context *context, ms_model *model, ms_span data, uint32_t *count)
{
    ms_span line;
    ms_status status = MS_OK;
    for (size_t number = 1; !status && next_line(&data, &line); number++) {
        if (line.at == line.end || (number == 1 && is_version(line))) continue;
        const uint8_t *space = memchr(line.at, ' ', ms_span_bytes(line));
        ms_span left = { .at = line.at, .end = space },
                right = { .at = space ? space + 1 : NULL, .end = line.end };
        if (space == NULL || left.at == left.end || right.at == right.end)
            return ms_fail(context, MS_ERROR_CORRUPT,
                           "line %zu is not two tokens: the file may be truncated", number);
        status = ms_build_merge(context, model, left, right, (*count)++);
    }
    return status;
}

/* Names of special tokens are in brackets by custom. */
static bool is_bracketed(ms_span text)
{
    if (ms_span_bytes(text) < 2) return false;
    return (*text.at == '<' && text.end[-1] == '>') || (*text.at == '[' && text.end[-1] == ']');
}

/* Each token is a byte, special, or made by a merge: where one is not, merges are missing. */
static ms_status check_complete(ms_context *context, const ms_tokenizer *tokenizer, uint32_t merges)
{
    const ms_model *model = &tokenizer->model;
    for (uint32_t id = 0; id < model->vocabulary.count; id++) {
        if (!ms_vocabulary_has(&model->vocabulary, id)
            || model->vocabulary.tokens[id].flags & MS_TOKEN_MERGED)
            continue;
        ms_span text = ms_vocabulary_text(&model->vocabulary, id);
        if (ms_span_bytes(text) <= 1 || is_bracketed(text)
            || ms_vocabulary_has(&tokenizer->added, id))
            continue;
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "none of its %u merges makes the token '%.*s' (id %u) of the vocabulary: "
                       "the file may be truncated. If it is a special token, name it in `special`",
                       merges, ms_span_bytes(text) < 60 ? (int)ms_span_bytes(text) : 60,
                       (const char *)text.at, id);
    }
    return MS_OK;
}

ms_status ms_format_merges(ms_context *context, ms_span data, ms_tokenizer *tokenizer,
                           const ms_tokenizer_options *options, ms_extra *extra)
{
    static const ms_decode_rules none = { .count = 0 };
    static const ms_special_token end_of_text = { .text = "<|endoftext|>",
                                                  .bytes = 13,
                                                  .id = MS_NO_TOKEN };
    ms_model *model = &tokenizer->model;
    uint32_t merges = 0;
    ms_tokenizer_options own = *options;
    /* Other names of patterns have special tokens of other files. */
    if (own.special == NULL
        && ms_vocabulary_find(&model->vocabulary, "<|endoftext|>", 13) != MS_NO_TOKEN) {
        own.special = &end_of_text;
        own.special_count = 1;
    } else if (own.special == NULL) {
        own.special = &end_of_text;
        own.special_count = 0;
    }
    ms_status status = add_lines(context, model, data, &merges);
    if (status) return status;
    ms_build_bytes(model);
    ms_model_seal(model);
    status = ms_build_options(context, tokenizer, &own, "gpt2");
    if (!status) status = ms_extra_apply(context, extra, tokenizer);
    if (!status) status = check_complete(context, tokenizer, merges);
    return status ? status : ms_decoding_build(context, tokenizer, &none);
}
