/* byte_pair.h: byte pair encoding of one piece of a text: its bytes or characters become tokens,
 * which are merged.
 *
 * Tokens from `size` on are characters that are part of other tokens and none themselves; they
 * exist while a piece is merged, and become bytes or the unknown token then. */
#ifndef MOONSHARD_TEXT_BYTE_PAIR_H
#define MOONSHARD_TEXT_BYTE_PAIR_H

#include "text/merges.h"
#include "text/vocabulary.h"

typedef struct ms_model {
    ms_vocabulary vocabulary;
    ms_merges merges;
    uint32_t size; /* the greatest id plus 1 */
    bool by_bytes; /* pieces are bytes; otherwise characters */
    bool alphabet; /* pieces come in characters of the byte alphabet */
    bool whole;    /* a piece that is a token is not cut further */
    bool cut;      /* no token has U+2581 after another character: cutting before it is safe */
    uint32_t bytes[256];    /* the token of a byte, or MS_NO_TOKEN; by_bytes or a fallback */
    bool fallback;          /* characters that are no token become tokens of bytes */
    uint32_t unknown;       /* what else becomes this token; MS_NO_TOKEN: nothing */
    bool fuse, fuse_pieces; /* unknown tokens in a row are one; also over the ends of pieces */
} ms_model;

/* Ids that grow. */
typedef struct ms_ids {
    uint32_t *items;
    size_t count, capacity;
} ms_ids;

/* A short piece and its tokens. Unused entries have no length. */
enum { MS_CACHED_BYTES = 30, MS_CACHED_IDS = 8, MS_CACHED_PIECES = 1 << 15 };
typedef struct ms_cached {
    uint32_t ids[MS_CACHED_IDS];
    uint8_t length, count;
    uint8_t piece[MS_CACHED_BYTES];
} ms_cached;

/* The memory of one thread. */
typedef struct ms_modelling {
    ms_merging merging;
    ms_cached *cache; /* MS_CACHED_PIECES, each at a place that its hash gives */
    bool after_unknown;
} ms_modelling;

/* Appends the ids of a piece. The work begins as zeros. */
ms_status ms_model_encode(ms_context *context, const ms_model *model, ms_modelling *work,
                          ms_span piece, ms_ids *out);
/* Once all tokens are there: the vocabulary's size, and where pieces may be cut. */
void ms_model_seal(ms_model *model);
void ms_model_free(ms_context *context, ms_model *model);
void ms_modelling_free(ms_context *context, ms_modelling *work);

static inline ms_status ms_ids_add(ms_context *context, ms_ids *ids, uint32_t id)
{
    if (ids->count == ids->capacity) {
        ms_status status = ms_grow(context, (void **)&ids->items, &ids->capacity, ids->count + 1,
                                   sizeof *ids->items);
        if (status) return status;
    }
    ids->items[ids->count++] = id;
    return MS_OK;
}

#endif
