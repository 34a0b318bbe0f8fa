/* byte_pair.c: byte pair encoding of one piece of a text. */
#include "text/byte_pair.h"

/* A longer piece would have more tokens than a list's positions can count. */
#define PIECE_BYTES_MAX ((size_t)INT32_MAX / 2)

static bool is_meta(const uint8_t *at) { return memcmp(at, "\xe2\x96\x81", 3) == 0; }

/* ------------------------------------------------------------------ to tokens */

/* Bytes for a character that is no token; false if one of them has no token either. */
static bool has_bytes(const ms_model *model, ms_span character)
{
    if (!model->fallback) return false;
    for (const uint8_t *at = character.at; at < character.end; at++)
        if (model->bytes[*at] == MS_NO_TOKEN) return false;
    return true;
}

static ms_status add_character(ms_context *context, const ms_model *model, ms_merging *merging,
                               ms_span character)
{
    uint32_t id = ms_vocabulary_find(&model->vocabulary, character.at, ms_span_bytes(character));
    if (id != MS_NO_TOKEN) return ms_merging_add(context, merging, id);
    if (!has_bytes(model, character)) {
        /* Without an unknown token it is dropped. */
        return model->unknown == MS_NO_TOKEN ? MS_OK
                                             : ms_merging_add(context, merging, model->unknown);
    }
    ms_status status = MS_OK;
    for (const uint8_t *at = character.at; !status && at < character.end; at++)
        status = ms_merging_add(context, merging, model->bytes[*at]);
    return status;
}

/* The tokens with which merging begins. */
static ms_status add_tokens(ms_context *context, const ms_model *model, ms_merging *merging,
                            ms_span piece)
{
    ms_status status = MS_OK;
    ms_merging_begin(merging);
    while (!status && piece.at < piece.end) {
        uint32_t length = model->by_bytes ? 1 : ms_utf8_character(piece.at, piece.end, NULL);
        ms_span character = { .at = piece.at, .end = piece.at + (length ? length : 1) };
        uint32_t id = model->by_bytes ? model->bytes[*piece.at] : MS_NO_TOKEN;
        if (!model->by_bytes) status = add_character(context, model, merging, character);
        else if (id != MS_NO_TOKEN || (id = model->unknown) != MS_NO_TOKEN)
            status = ms_merging_add(context, merging, id);
        piece.at = character.end;
    }
    return status;
}

/* -------------------------------------------------------------------- results */

static ms_status put(ms_context *context, const ms_model *model, ms_modelling *work, uint32_t id,
                     ms_ids *out)
{
    bool unknown = id == model->unknown, again = unknown && model->fuse && work->after_unknown;
    work->after_unknown = unknown;
    return again ? MS_OK : ms_ids_add(context, out, id);
}

/* A token that remains after merging, or what represents it. */
static ms_status put_symbol(ms_context *context, const ms_model *model, ms_modelling *work,
                            uint32_t id, ms_ids *out)
{
    if (id < model->size) return put(context, model, work, id, out);
    ms_span character = ms_vocabulary_text(&model->vocabulary, id);
    if (!has_bytes(model, character))
        return model->unknown == MS_NO_TOKEN ? MS_OK
                                             : put(context, model, work, model->unknown, out);
    ms_status status = MS_OK;
    for (; !status && character.at < character.end; character.at++)
        status = put(context, model, work, model->bytes[*character.at], out);
    return status;
}

static ms_status encode_merged(ms_context *context, const ms_model *model, ms_modelling *work,
                               ms_span piece, ms_ids *out)
{
    ms_merging *merging = &work->merging;
    uint32_t whole = model->whole
                         ? ms_vocabulary_find(&model->vocabulary, piece.at, ms_span_bytes(piece))
                         : MS_NO_TOKEN;
    if (whole < model->size) return put(context, model, work, whole, out);
    if (ms_span_bytes(piece) > PIECE_BYTES_MAX)
        return ms_fail(
            context, MS_ERROR_ARGUMENT,
            "a piece of %zu bytes that the tokenizer's pattern does not cut: it may have "
            "at most %zu",
            ms_span_bytes(piece), PIECE_BYTES_MAX);
    ms_status status = add_tokens(context, model, merging, piece);
    if (!status) status = ms_merging_run(context, merging, &model->merges);
    for (int32_t at = merging->count ? 0 : -1; !status && at >= 0; at = merging->symbols[at].next)
        status = put_symbol(context, model, work, merging->symbols[at].id, out);
    return status;
}

/* ---------------------------------------------------------------------- cache */

/* A piece of at most MS_CACHED_BYTES: from the cache, or by merging, after which the cache has it.
 * What has unknown tokens depends on what came before it, so it is not kept. */
static ms_status encode_cached(ms_context *context, const ms_model *model, ms_modelling *work,
                               ms_span piece, ms_ids *out)
{
    size_t bytes = ms_span_bytes(piece), first = out->count;
    ms_cached *entry = &work->cache[ms_hash(piece.at, bytes, 0) % MS_CACHED_PIECES];
    ms_status status = MS_OK;
    if (entry->length == bytes && memcmp(entry->piece, piece.at, bytes) == 0) {
        for (uint32_t i = 0; !status && i < entry->count; i++)
            status = ms_ids_add(context, out, entry->ids[i]);
        work->after_unknown = false;
        return status;
    }
    status = encode_merged(context, model, work, piece, out);
    size_t count = out->count - first;
    if (status || count > MS_CACHED_IDS || count == 0) return status;
    for (size_t i = 0; i < count; i++)
        if (out->items[first + i] == model->unknown) return MS_OK;
    entry->length = (uint8_t)bytes;
    entry->count = (uint8_t)count;
    memcpy(entry->piece, piece.at, bytes);
    memcpy(entry->ids, out->items + first, count * sizeof *out->items);
    return MS_OK;
}

/* -------------------------------------------------------------------- public */

/* The end of the part of the piece that can be encoded by itself. */
static const uint8_t *cut_end(ms_span piece)
{
    const uint8_t *at = piece.at;
    while (piece.end - at >= 3 && is_meta(at)) at += 3;
    for (; piece.end - at >= 3; at++)
        if (*at == 0xe2 && is_meta(at)) return at > piece.at ? at : piece.end;
    return piece.end;
}

ms_status ms_model_encode(ms_context *context, const ms_model *model, ms_modelling *work,
                          ms_span piece, ms_ids *out)
{
    ms_status status = MS_OK;
    if (work->cache == NULL)
        status = ms_allocate(context, MS_CACHED_PIECES * sizeof *work->cache, "a cache of pieces",
                             (void **)&work->cache);
    if (!model->fuse_pieces) work->after_unknown = false;
    while (!status && piece.at < piece.end) {
        ms_span part = { .at = piece.at, .end = model->cut ? cut_end(piece) : piece.end };
        status = ms_span_bytes(part) <= MS_CACHED_BYTES
                     ? encode_cached(context, model, work, part, out)
                     : encode_merged(context, model, work, part, out);
        piece.at = part.end;
    }
    return status;
}

/* Whether U+2581 follows another character in the text. */
static bool has_inner_meta(ms_span text)
{
    while (ms_span_bytes(text) >= 3 && is_meta(text.at)) text.at += 3;
    return memmem(text.at, ms_span_bytes(text), "\xe2\x96\x81", 3) != NULL;
}

void ms_model_seal(ms_model *model)
{
    model->size = (uint32_t)model->vocabulary.count;
    model->cut = !model->by_bytes && !model->whole;
    for (size_t id = 0; id < model->vocabulary.count && model->cut; id++)
        if (model->vocabulary.tokens[id].flags & MS_TOKEN_MERGED)
            model->cut = !has_inner_meta(ms_vocabulary_text(&model->vocabulary, (uint32_t)id));
}

void ms_model_free(ms_context *context, ms_model *model)
{
    ms_vocabulary_free(context, &model->vocabulary);
    ms_merges_free(context, &model->merges);
}

void ms_modelling_free(ms_context *context, ms_modelling *work)
{
    ms_merging_free(context, &work->merging);
    ms_release(context, work->cache);
}
