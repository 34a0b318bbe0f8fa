/* decode.c: ids to text, as they come. */
#include "text/tokenizer.h"

struct ms_decoder {
    ms_context context;
    ms_tokenizer *tokenizer;
    bool special;   /* special tokens give their names */
    uint32_t strip; /* how many texts may still be removed from the begin */
    ms_buffer text; /* what was handed out, then what waits */
    size_t given;   /* bytes of it that were handed out */
};

ms_status ms_decoder_new(ms_context *context, ms_tokenizer *tokenizer, bool special,
                         ms_decoder **out)
{
    ms_decoder *decoder = NULL;
    ms_status status = ms_allocate(context, sizeof *decoder, "a decoder", (void **)&decoder);
    if (status) return status;
    ms_context_init(&decoder->context, context->os);
    decoder->tokenizer = ms_tokenizer_retain(tokenizer);
    decoder->special = special;
    decoder->strip = tokenizer->decoding.strip_count;
    *out = decoder;
    return MS_OK;
}

void ms_decoder_free(ms_decoder *decoder)
{
    if (decoder == NULL) return;
    ms_context context = decoder->context;
    ms_buffer_free(&context, &decoder->text);
    ms_tokenizer_release(decoder->tokenizer);
    ms_release(&context, decoder);
}

/* Removes what is to be removed from the begin of all text. */
static ms_span strip_begin(ms_decoder *decoder, ms_span text)
{
    const ms_buffer *strip = &decoder->tokenizer->decoding.strip;
    while (decoder->strip && text.at < text.end) {
        bool there = ms_span_bytes(text) >= strip->length
                     && memcmp(text.at, strip->data, strip->length) == 0;
        /* The first other text ends it. */
        decoder->strip = there ? decoder->strip - 1 : 0;
        if (there) text.at += strip->length;
    }
    return text;
}

static ms_status add_token(ms_context *context, ms_decoder *decoder, uint32_t id)
{
    const ms_tokenizer *tokenizer = decoder->tokenizer;
    size_t bytes = 0;
    if (ms_tokenizer_is_special(tokenizer, id)) {
        const char *name = ms_tokenizer_token(tokenizer, id, &bytes);
        if (!decoder->special) return MS_OK;
        decoder->strip = 0;
        return ms_buffer_add(context, &decoder->text, name, bytes);
    }
    /* What represents unknown text begins with a space of its own. */
    if (id == tokenizer->model.unknown) decoder->strip = 0;
    ms_span text = strip_begin(decoder, ms_vocabulary_text(&tokenizer->decoding.texts, id));
    return ms_buffer_add(context, &decoder->text, text.at, ms_span_bytes(text));
}

static ms_status check_ids(ms_context *context, const ms_tokenizer *tokenizer, const uint32_t *ids,
                           size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!ms_vocabulary_has(&tokenizer->decoding.texts, ids[i]))
            return ms_fail(context, MS_ERROR_ARGUMENT,
                           "id %u is no token: the tokenizer has ids from 0 to %u%s", ids[i],
                           ms_tokenizer_size(tokenizer) - 1,
                           ids[i] < ms_tokenizer_size(tokenizer) ? ", with gaps" : "");
    return MS_OK;
}

ms_status ms_decoder_add(ms_context *context, ms_decoder *decoder, const uint32_t *ids,
                         size_t count, const char **text, size_t *bytes)
{
    ms_buffer *buffer = &decoder->text;
    ms_status status = check_ids(context, decoder->tokenizer, ids, count);
    if (status) return status;
    /* What was handed out has served. */
    size_t waiting = buffer->length - decoder->given;
    if (waiting) memmove(buffer->data, buffer->data + decoder->given, waiting);
    buffer->length = waiting;
    decoder->given = 0;
    for (size_t i = 0; !status && i < count; i++) status = add_token(context, decoder, ids[i]);
    if (status) return status;
    ms_span all = ms_buffer_span(buffer, true);
    decoder->given = buffer->length - (buffer->length ? ms_utf8_unfinished(all.at, all.end) : 0);
    *text = (const char *)buffer->data;
    *bytes = decoder->given;
    return MS_OK;
}

void ms_decoder_finish(ms_decoder *decoder, const char **text, size_t *bytes)
{
    ms_buffer *buffer = &decoder->text;
    /* Without data, which may be NULL, nothing is added to it. */
    *text = (const char *)buffer->data;
    if (buffer->length) *text += decoder->given;
    *bytes = buffer->length - decoder->given;
    decoder->given = buffer->length;
    decoder->strip = decoder->tokenizer->decoding.strip_count;
}
