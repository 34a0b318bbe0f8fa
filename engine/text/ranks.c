/* ranks.c: tiktoken's rank files: a line for each token, its bytes in base64 and its rank, which is
 * its id. Two tokens are merged to any token that is both in a row. */
#include "text/ranks.h"

#include "text/build.h"
#include "text/decoding.h"

/* The value of a digit of base64 (RFC 4648), or -1. */
static int digit_of(uint8_t c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    if (c == '+') return 62;
    return c == '/' ? 63 : -1;
}

/* Decodes base64 with its padding; false if it is none. */
static bool decode_base64(ms_span text, ms_buffer *out)
{
    uint32_t held = 0, bits = 0, padding = 0;
    out->length = 0;
    if (text.at == text.end || ms_span_bytes(text) % 4 != 0) return false;
    for (; text.at < text.end; text.at++) {
        int digit = digit_of(*text.at);
        if (*text.at == '=' && text.end - text.at <= 2) padding++;
        else if (digit < 0 || padding) return false;
        held = held << 6 | (uint32_t)(digit < 0 ? 0 : digit);
        bits += 6;
        if (bits < 8) continue;
        bits -= 8;
        out->data[out->length++] = (uint8_t)(held >> bits);
    }
    out->length -= padding;
    return true;
}

/* The rank: digits and nothing else. */
static bool read_rank(ms_span text, uint32_t *out)
{
    uint64_t rank = 0;
    if (text.at == text.end) return false;
    for (; text.at < text.end; text.at++) {
        if (*text.at < '0' || *text.at > '9' || rank > MS_TOKEN_ID_MAX) return false;
        rank = 10 * rank + (*text.at - '0');
    }
    *out = (uint32_t)rank;
    return rank <= MS_TOKEN_ID_MAX;
}

/* One line, into the buffer and the rank. */
static bool read_line(ms_span line, ms_buffer *token, uint32_t *rank)
{
    const uint8_t *space = line.at < line.end ? memchr(line.at, ' ', ms_span_bytes(line)) : NULL;
    return space && decode_base64((ms_span){ .at = line.at, .end = space }, token)
           && read_rank((ms_span){ .at = space + 1, .end = line.end }, rank);
}

static ms_status add_line(ms_context *context, ms_model *model, ms_span line, size_t number,
                          ms_buffer *token)
{
    uint32_t rank = 0;
    token->length = 0;
    ms_status status = ms_buffer_reserve(context, token, ms_span_bytes(line));
    if (status) return status;
    if (!read_line(line, token, &rank))
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "line %zu is not a token in base64 and its rank: the file may be truncated",
                       number);
    ms_span text = ms_buffer_span(token, false);
    if (ms_vocabulary_has(&model->vocabulary, rank)
        || ms_vocabulary_find(&model->vocabulary, text.at, ms_span_bytes(text)) != MS_NO_TOKEN)
        return ms_fail(context, MS_ERROR_CORRUPT, "line %zu has a token or a rank a second time",
                       number);
    return ms_vocabulary_add(context, &model->vocabulary, rank, text, MS_TOKEN_MERGED, true);
}

static ms_status add_lines(ms_context *context, ms_model *model, ms_span data)
{
    ms_buffer token = { 0 };
    ms_status status = MS_OK;
    for (size_t number = 1; !status && data.at < data.end; number++) {
        const uint8_t *end = memchr(data.at, '\n', ms_span_bytes(data));
        ms_span line = { .at = data.at, .end = end ? end : data.end };
        data.at = end ? end + 1 : data.end;
        if (line.end > line.at && line.end[-1] == '\r') line.end--;
        if (line.at < line.end) status = add_line(context, model, line, number, &token);
    }
    ms_buffer_free(context, &token);
    return status;
}

ms_status ms_format_ranks(ms_context *context, ms_span data, ms_tokenizer *tokenizer,
                          const ms_tokenizer_options *options, ms_extra *extra)
{
    static const ms_decode_rules none = { .count = 0 };
    ms_model *model = &tokenizer->model;
    if (options->pattern == NULL)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "a file of tiktoken's ranks does not say where text is cut: give pattern = "
                       "\"gpt2\", \"cl100k\", \"o200k\", \"llama3\", or a regular expression");
    model->by_bytes = model->whole = true;
    ms_status status = add_lines(context, model, data);
    if (status) return status;
    ms_build_bytes(model);
    for (uint32_t i = 0; i < 256; i++)
        if (model->bytes[i] == MS_NO_TOKEN)
            return ms_fail(context, MS_ERROR_CORRUPT,
                           "there is no token of the byte 0x%02x: the file may be truncated", i);
    status = ms_build_pairs(context, model, NULL);
    ms_model_seal(model);
    if (!status) status = ms_build_options(context, tokenizer, options, NULL);
    if (!status) status = ms_extra_apply(context, extra, tokenizer);
    return status ? status : ms_decoding_build(context, tokenizer, &none);
}
