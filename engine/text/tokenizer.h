/* tokenizer.h: what a tokenizer consists of. The readers of files fill it in; once it is sealed it
 * never changes.
 *
 * A text goes through these parts in order: `raw` finds added tokens; `normalizers` change what is
 * between them; `normalized` finds further added tokens there; `splitters` cut the rest into
 * pieces, which `model` encodes; `prefix` and `suffix` come around all. */
#ifndef MOONSHARD_TEXT_TOKENIZER_H
#define MOONSHARD_TEXT_TOKENIZER_H

#include <stdatomic.h>

#include "text/added.h"
#include "text/byte_pair.h"
#include "text/normalize.h"
#include "text/split.h"

/* How tokens become text. */
typedef struct ms_decoding {
    ms_vocabulary texts;  /* by id: the bytes that a token represents */
    ms_buffer strip;      /* a text of which ... */
    uint32_t strip_count; /* ... so many are removed from the begin of all */
} ms_decoding;

struct ms_tokenizer {
    ms_context context;
    atomic_uint_fast32_t references;
    ms_added raw, normalized;
    ms_normalizers normalizers;
    ms_splitters splitters;
    ms_model model;
    ms_vocabulary added; /* the tokens of raw and normalized by id, and their ids by text */
    ms_ids prefix, suffix;
    uint32_t bos, eos;
    ms_decoding decoding;
};

/* An empty one. The caller has the reference. */
ms_status ms_tokenizer_new(ms_context *context, ms_tokenizer **out);

/* A token that is found in texts. Where `token.special`, it has no text of its own. An id that has
 * another text, or a text that has another id, is MS_ERROR_CORRUPT; the message names no file. */
ms_status ms_tokenizer_add(ms_context *context, ms_tokenizer *tokenizer, ms_span text,
                           ms_added_token token, bool normalized);
/* Replaces the texts in `normalized` by what the normalizers make of them. */
ms_status ms_tokenizer_normalize_added(ms_context *context, ms_tokenizer *tokenizer);

#endif
