/* encode.c: text to ids: the way of a text through the parts of a tokenizer. */
#include "text/alphabet.h"
#include "text/tokenizer.h"

struct ms_encoder {
    ms_context context;
    ms_tokenizer *tokenizer;
    ms_matcher *matcher;
    ms_normalizing normalizing;
    ms_splitting splitting;
    ms_modelling modelling;
    ms_buffer bytes; /* of a piece that came in the byte alphabet */
    ms_ids ids;
    ms_context *caller; /* of the call that runs */
};

ms_status ms_encoder_new(ms_context *context, ms_tokenizer *tokenizer, ms_encoder **out)
{
    ms_encoder *encoder = NULL;
    ms_status status = ms_allocate(context, sizeof *encoder, "an encoder", (void **)&encoder);
    if (status) return status;
    ms_context_init(&encoder->context, context->os);
    status = ms_matcher_new(context, &encoder->matcher);
    if (status) {
        ms_encoder_free(encoder);
        return status;
    }
    encoder->tokenizer = ms_tokenizer_retain(tokenizer);
    encoder->normalizing.matcher = encoder->splitting.matcher = encoder->matcher;
    *out = encoder;
    return MS_OK;
}

void ms_encoder_free(ms_encoder *encoder)
{
    if (encoder == NULL) return;
    ms_context context = encoder->context;
    ms_normalizing_free(&context, &encoder->normalizing);
    ms_splitting_free(&context, &encoder->splitting);
    ms_modelling_free(&context, &encoder->modelling);
    ms_matcher_free(encoder->matcher);
    ms_buffer_free(&context, &encoder->bytes);
    ms_release(&context, encoder->ids.items);
    ms_tokenizer_release(encoder->tokenizer);
    ms_release(&context, encoder);
}

ms_tokenizer *ms_encoder_tokenizer(const ms_encoder *encoder) { return encoder->tokenizer; }

/* ---------------------------------------------------------------- a text's way */

static ms_status encode_piece(void *to, ms_span piece)
{
    ms_encoder *encoder = to;
    bool known;
    if (encoder->tokenizer->model.alphabet) {
        encoder->bytes.length = 0;
        ms_status status = ms_alphabet_read(encoder->caller, piece, &encoder->bytes, &known);
        if (status) return status;
        piece = ms_buffer_span(&encoder->bytes, piece.first);
    }
    return ms_model_encode(encoder->caller, &encoder->tokenizer->model, &encoder->modelling, piece,
                           &encoder->ids);
}

static ms_status split(ms_encoder *encoder, ms_span text)
{
    return ms_split(encoder->caller, &encoder->tokenizer->splitters, &encoder->splitting, text,
                    encode_piece, encoder);
}

/* What is between two tokens that were found in the text as it is. */
static ms_status encode_between(ms_encoder *encoder, ms_span text, bool specials)
{
    const ms_tokenizer *tokenizer = encoder->tokenizer;
    ms_span before;
    encoder->modelling.after_unknown = false;
    if (text.at == text.end) return MS_OK;
    ms_status status =
        ms_normalize(encoder->caller, &tokenizer->normalizers, &encoder->normalizing, text, &text);
    if (status) return status;
    if (tokenizer->normalized.count == 0) return split(encoder, text);
    ms_added_search search = {
        .added = &tokenizer->normalized,
        .text = text,
        .at = text.at,
        .done = text.at,
        .specials = specials,
    };
    for (;;) {
        const ms_added_token *token = ms_added_next(&search, &before);
        status = split(encoder, before);
        encoder->modelling.after_unknown = false;
        if (!status && token) status = ms_ids_add(encoder->caller, &encoder->ids, token->id);
        if (status || token == NULL) return status;
    }
}

/* The name of a special token is refused by name and place. */
static ms_status refuse_special(ms_encoder *encoder, ms_span text, const ms_added_token *token,
                                ms_span before)
{
    size_t bytes = 0;
    const char *name = ms_tokenizer_token(encoder->tokenizer, token->id, &bytes);
    return ms_fail(encoder->caller, MS_ERROR_ARGUMENT,
                   "the text has the name of a special token at byte %zu: '%.*s'. Pass special = "
                   "\"parse\" to encode it as this token, or \"text\" as text",
                   (size_t)(before.end - text.at), bytes < 100 ? (int)bytes : 100, name);
}

static ms_status encode_text(ms_encoder *encoder, ms_span text, ms_special special)
{
    bool specials = special != MS_SPECIAL_TEXT;
    ms_added_search search = {
        .added = &encoder->tokenizer->raw,
        .text = text,
        .at = text.at,
        .done = text.at,
        .specials = specials,
    };
    for (;;) {
        ms_span before;
        const ms_added_token *token = ms_added_next(&search, &before);
        if (token && token->special && special == MS_SPECIAL_ERROR)
            return refuse_special(encoder, text, token, before);
        ms_status status = encode_between(encoder, before, specials);
        if (!status && token) status = ms_ids_add(encoder->caller, &encoder->ids, token->id);
        if (status || token == NULL) return status;
    }
}

/* The tokens at one end of the text: the file's, none, or the one that begins or ends a text. */
static ms_status add_edge(ms_encoder *encoder, ms_edge edge, const ms_ids *own, uint32_t id,
                          const char *what)
{
    if (edge == MS_EDGE_NO || (edge == MS_EDGE_FILE && own->count == 0)) return MS_OK;
    if (own->count == 0 && id == MS_NO_TOKEN)
        return ms_fail(encoder->caller, MS_ERROR_ARGUMENT,
                       "encode: %s = true, but the tokenizer's files name no such token", what);
    if (own->count == 0) return ms_ids_add(encoder->caller, &encoder->ids, id);
    ms_status status = MS_OK;
    for (size_t i = 0; !status && i < own->count; i++)
        status = ms_ids_add(encoder->caller, &encoder->ids, own->items[i]);
    return status;
}

ms_status ms_encode(ms_context *context, ms_encoder *encoder, const char *text, size_t bytes,
                    const ms_encode_options *options, const uint32_t **ids, size_t *count)
{
    static const ms_encode_options none = { 0 };
    const ms_tokenizer *tokenizer = encoder->tokenizer;
    const uint8_t *at = (const uint8_t *)text;
    ms_span whole = { .at = at, .end = at + bytes, .first = true };
    if (options == NULL) options = &none;
    encoder->caller = context;
    encoder->ids.count = 0;
    ms_status status = add_edge(encoder, options->bos, &tokenizer->prefix, tokenizer->bos, "bos");
    if (!status) status = encode_text(encoder, whole, options->special);
    if (!status)
        status = add_edge(encoder, options->eos, &tokenizer->suffix, tokenizer->eos, "eos");
    if (status) return status;
    *ids = encoder->ids.items;
    *count = encoder->ids.count;
    return MS_OK;
}
