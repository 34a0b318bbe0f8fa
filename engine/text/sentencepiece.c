/* sentencepiece.c: SentencePiece's tokenizer.model of type BPE. The numbers of fields are those of
 * its sentencepiece_model.proto. Two texts are merged if both in a row are a piece; the piece with
 * the highest score comes first. */
#include "text/sentencepiece.h"

#include <stdlib.h>

#include "text/build.h"
#include "text/decoding.h"
#include "text/wire.h"

typedef enum piece_type { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE } piece_type;

enum { TYPE_BPE = 2 };

/* A model that is being read. */
typedef struct reading {
    ms_context *context;
    ms_tokenizer *tokenizer;
    ms_sentence *sentence;
    ms_extra *extra;
    float *scores; /* by id */
    size_t score_capacity;
    int32_t type, bos, eos; /* of the trainer */
    bool byte_fallback;
    ms_span unknown_text;
} reading;

static ms_status damaged(const reading *all, const char *what)
{
    return ms_fail(all->context, MS_ERROR_CORRUPT,
                   "%s of the SentencePiece model cannot be read: the file may be truncated", what);
}

/* --------------------------------------------------------------------- pieces */

/* What the piece's type means for it. */
static ms_status add_typed(reading *all, uint32_t id, ms_span text, piece_type type)
{
    ms_tokenizer *tokenizer = all->tokenizer;
    ms_model *model = &tokenizer->model;
    ms_added_token token = { .id = id, .special = type == CONTROL };
    int byte = ms_byte_of_name(text);
    ms_status status = MS_OK;
    if (type == UNKNOWN) model->unknown = id;
    if (type == BYTE && byte >= 0) model->bytes[byte] = id;
    if (type == USER_DEFINED)
        status = ms_added_add(all->context, &all->sentence->fixed, text, token);
    if (!status && (type == USER_DEFINED || type == CONTROL))
        status = ms_tokenizer_add(all->context, tokenizer, text, token, type == USER_DEFINED);
    return status;
}

static ms_status add_piece(reading *all, ms_span text, float score, piece_type type)
{
    ms_vocabulary *vocabulary = &all->tokenizer->model.vocabulary;
    uint32_t id = (uint32_t)vocabulary->count, flags = 0;
    if (type < NORMAL || type > BYTE || type == UNUSED)
        return ms_fail(all->context, MS_ERROR_UNSUPPORTED,
                       "piece %u of the SentencePiece model has type %d, which is not supported",
                       id, (int)type);
    if (text.at == text.end || id > MS_TOKEN_ID_MAX || score != score
        || ms_utf8_valid_end(text.at, text.end) != text.end
        || ms_vocabulary_find(vocabulary, text.at, ms_span_bytes(text)) != MS_NO_TOKEN)
        return ms_fail(all->context, MS_ERROR_CORRUPT,
                       "piece %u of the SentencePiece model has no text or score, or the text of "
                       "another one",
                       id);
    if (type == NORMAL || type == USER_DEFINED) flags = MS_TOKEN_MERGED;
    if (type == CONTROL) flags = MS_TOKEN_SPECIAL;
    ms_status status = ms_grow(all->context, (void **)&all->scores, &all->score_capacity,
                               (size_t)id + 1, sizeof *all->scores);
    if (!status) status = ms_vocabulary_add(all->context, vocabulary, id, text, flags, true);
    if (status) return status;
    all->scores[id] = score;
    return add_typed(all, id, text, type);
}

static ms_status read_piece(reading *all, ms_span message)
{
    ms_wire_field field;
    ms_span text = { 0 };
    float score = 0;
    piece_type type = NORMAL;
    while (ms_wire_next(&message, &field)) {
        if (field.number == 1 && field.kind == MS_WIRE_BYTES) text = field.bytes;
        if (field.number == 2 && field.kind == MS_WIRE_32) score = ms_wire_float(&field);
        if (field.number == 3 && field.kind == MS_WIRE_VARINT)
            type = field.value <= BYTE ? (piece_type)field.value : UNUSED;
    }
    return message.at == message.end ? add_piece(all, text, score, type) : damaged(all, "a piece");
}

/* ----------------------------------------------------------------- other parts */

static ms_status read_trainer(reading *all, ms_span message)
{
    ms_wire_field field;
    while (ms_wire_next(&message, &field)) {
        int32_t value = (int32_t)(uint32_t)field.value;
        switch (field.number) {
        case 3: all->type = value; break;
        case 24: all->sentence->suffix = value != 0; break;
        case 35: all->byte_fallback = value != 0; break;
        case 41: all->bos = value; break;
        case 42: all->eos = value; break;
        case 44: all->unknown_text = field.bytes; break;
        default: break;
        }
    }
    return message.at == message.end ? MS_OK : damaged(all, "the trainer's part");
}

static ms_status read_normalizer(reading *all, ms_span message)
{
    ms_wire_field field;
    ms_status status = MS_OK;
    while (!status && ms_wire_next(&message, &field)) {
        if (field.number == 2 && all->sentence->map.units == NULL)
            status = ms_charsmap_read(all->context, field.bytes, &all->sentence->map);
        if (field.number == 3) all->sentence->prefix = field.value != 0;
        if (field.number == 4) all->sentence->collapse = field.value != 0;
        if (field.number == 5) all->sentence->escape = field.value != 0;
    }
    if (status) return status;
    return message.at == message.end ? MS_OK : damaged(all, "the normalizer's part");
}

/* Decoding with a map of characters is not supported. */
static ms_status read_denormalizer(reading *all, ms_span message)
{
    ms_wire_field field;
    while (ms_wire_next(&message, &field))
        if (field.number == 2 && field.bytes.at < field.bytes.end)
            return ms_fail(all->context, MS_ERROR_UNSUPPORTED,
                           "the SentencePiece model has a denormalizer, which is not supported");
    return message.at == message.end ? MS_OK : damaged(all, "the denormalizer's part");
}

static ms_status read_model(reading *all, ms_span message)
{
    ms_wire_field field;
    ms_status status = MS_OK;
    while (!status && ms_wire_next(&message, &field)) {
        if (field.kind != MS_WIRE_BYTES) continue;
        switch (field.number) {
        case 1: status = read_piece(all, field.bytes); break;
        case 2: status = read_trainer(all, field.bytes); break;
        case 3: status = read_normalizer(all, field.bytes); break;
        case 5: status = read_denormalizer(all, field.bytes); break;
        default: break;
        }
    }
    if (status) return status;
    return message.at == message.end ? MS_OK : damaged(all, "a part");
}

/* ---------------------------------------------------------------------- merges */

static int descending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x > y ? -1 : x < y;
}

/* The rank of a score: how many of the sorted scores are higher. */
static uint32_t rank_of(const float *sorted, size_t count, float score)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (sorted[middle] > score) low = middle + 1;
        else high = middle;
    }
    return (uint32_t)low;
}

/* Characters that pieces have, and that are no pieces, take part in merges under ids from the
 * vocabulary's size on. */
static ms_status add_characters(ms_context *context, ms_model *model)
{
    ms_vocabulary *vocabulary = &model->vocabulary;
    for (uint32_t id = 0; id < model->size; id++) {
        if (!(vocabulary->tokens[id].flags & MS_TOKEN_MERGED)) continue;
        for (uint32_t at = 0, length; at < vocabulary->tokens[id].length; at += length) {
            ms_span text = ms_vocabulary_text(vocabulary, id);
            uint8_t character[4] = { 0 };
            length = ms_utf8_character(text.at + at, text.end, NULL);
            memcpy(character, text.at + at, length);
            if (ms_vocabulary_find(vocabulary, character, length) != MS_NO_TOKEN) continue;
            ms_status status =
                ms_vocabulary_add(context, vocabulary, (uint32_t)vocabulary->count,
                                  (ms_span){ .at = character, .end = character + length }, 0, true);
            if (status) return status;
        }
    }
    return MS_OK;
}

static ms_status build_merges(reading *all)
{
    ms_model *model = &all->tokenizer->model;
    size_t count = model->vocabulary.count;
    float *sorted = NULL;
    uint32_t *ranks = NULL;
    ms_model_seal(model);
    ms_status status =
        ms_allocate(all->context, count * sizeof *sorted, "scores", (void **)&sorted);
    if (!status)
        status = ms_allocate(all->context, count * sizeof *ranks, "ranks", (void **)&ranks);
    if (!status) {
        memcpy(sorted, all->scores, count * sizeof *sorted);
        qsort(sorted, count, sizeof *sorted, descending);
        for (size_t i = 0; i < count; i++) ranks[i] = rank_of(sorted, count, all->scores[i]);
        status = add_characters(all->context, model);
    }
    if (!status) status = ms_build_pairs(all->context, model, ranks);
    ms_release(all->context, sorted);
    ms_release(all->context, ranks);
    return status;
}

/* -------------------------------------------------------------------- decoding */

/* U+2581 is a space, of which the one in front is not part of the text. */
static ms_status build_decoding(reading *all)
{
    ms_tokenizer *tokenizer = all->tokenizer;
    uint32_t unknown = tokenizer->model.unknown;
    ms_decode_rules rules = { .count = 2 };
    rules.items[0].kind = MS_DECODE_REPLACE;
    rules.items[1].kind = MS_DECODE_BYTES;
    ms_status status = ms_pattern_new(all->context, "\xe2\x96\x81", 3, MS_DIALECT_LITERAL,
                                      &rules.items[0].pattern);
    if (!status) status = ms_buffer_add(all->context, &rules.items[0].content, " ", 1);
    if (!status) status = ms_decoding_build(all->context, tokenizer, &rules);
    ms_decode_rules_free(all->context, &rules);
    if (!status && unknown != MS_NO_TOKEN)
        status = ms_vocabulary_add(all->context, &tokenizer->decoding.texts, unknown,
                                   all->unknown_text, 0, false);
    bool strips = all->sentence->collapse || (all->sentence->prefix && !all->sentence->suffix);
    if (status || !strips) return status;
    /* Where several spaces are one, none begins a text. */
    tokenizer->decoding.strip_count = all->sentence->collapse ? UINT32_MAX : 1;
    return ms_buffer_add(all->context, &tokenizer->decoding.strip, " ", 1);
}

/* The ids of the ends of texts, which must be control pieces. */
static uint32_t end_token(const ms_tokenizer *tokenizer, int32_t id)
{
    bool there = id >= 0 && ms_vocabulary_has(&tokenizer->model.vocabulary, (uint32_t)id)
                 && tokenizer->model.vocabulary.tokens[id].flags & MS_TOKEN_SPECIAL;
    return there ? (uint32_t)id : MS_NO_TOKEN;
}

static ms_status finish(reading *all)
{
    ms_tokenizer *tokenizer = all->tokenizer;
    ms_model *model = &tokenizer->model;
    if (all->type != TYPE_BPE)
        return ms_fail(all->context, MS_ERROR_UNSUPPORTED,
                       "the SentencePiece model is of type %s, which is not supported (supported: "
                       "BPE)",
                       all->type == 1   ? "Unigram"
                       : all->type == 3 ? "Word"
                       : all->type == 4 ? "Char"
                                        : "unknown");
    if (model->vocabulary.count == 0 || model->unknown == MS_NO_TOKEN)
        return ms_fail(all->context, MS_ERROR_CORRUPT,
                       "the SentencePiece model has no unknown piece: the file may be truncated");
    model->fallback = all->byte_fallback;
    model->fuse = model->fuse_pieces = true;
    ms_added_seal(&all->sentence->fixed);
    ms_status status = build_merges(all);
    if (!status) status = ms_extra_apply(all->context, all->extra, tokenizer);
    /* With a space in front, the tokens of pieces would get one, too; then all others are found in
     * the text as it is. */
    if (!status && !all->sentence->prefix)
        status = ms_tokenizer_normalize_added(all->context, tokenizer);
    if (!status) status = build_decoding(all);
    tokenizer->bos = end_token(tokenizer, all->bos);
    tokenizer->eos = end_token(tokenizer, all->eos);
    return status;
}

ms_status ms_format_sentencepiece(ms_context *context, ms_span data, ms_tokenizer *tokenizer,
                                  ms_extra *extra)
{
    static const char unknown_text[] = " \xe2\x81\x87 ";
    const uint8_t *unknown = (const uint8_t *)unknown_text;
    ms_normalizers *normalizers = &tokenizer->normalizers;
    ms_status status = ms_grow(context, (void **)&normalizers->items, &normalizers->capacity, 1,
                               sizeof *normalizers->items);
    if (status) return status;
    normalizers->count = 1;
    normalizers->items[0].kind = MS_NORMALIZE_SENTENCE;
    reading all = {
        .context = context,
        .tokenizer = tokenizer,
        .sentence = &normalizers->items[0].sentence,
        .extra = extra,
        .type = 1,
        .bos = 1,
        .eos = 2,
        .unknown_text = { .at = unknown, .end = unknown + sizeof unknown_text - 1 },
    };
    all.sentence->prefix = all.sentence->collapse = all.sentence->escape = true;
    all.sentence->once = ms_extra_prefix_once(extra);
    status = read_model(&all, data);
    if (!status) status = finish(&all);
    ms_release(context, all.scores);
    return status;
}
