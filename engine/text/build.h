/* build.h: what readers of several formats do to fill a model. */
#ifndef MOONSHARD_TEXT_BUILD_H
#define MOONSHARD_TEXT_BUILD_H

#include "text/tokenizer.h"

/* Adds a token of a file whose tokens are written in the byte alphabet if the model is by bytes.
 * Its name must be new. */
ms_status ms_build_named(ms_context *context, ms_model *model, uint32_t id, ms_span name);
/* The id of such a token, or MS_NO_TOKEN. */
ms_status ms_build_find(ms_context *context, const ms_model *model, ms_span name, uint32_t *id);
/* Adds the next merge: of two tokens of the file to the one that is both texts in a row. */
ms_status ms_build_merge(ms_context *context, ms_model *model, ms_span left, ms_span right,
                         uint32_t rank);
/* Adds all pairs of tokens whose texts make another token that has MS_TOKEN_MERGED. ranks, by id:
 * of the token that is made. NULL: its id. */
ms_status ms_build_pairs(ms_context *context, ms_model *model, const uint32_t *ranks);
/* The tokens of single bytes, in a model by bytes. */
void ms_build_bytes(ms_model *model);

/* The cuts, and the special tokens, that belong to the name of a pattern. */
typedef struct ms_named_pattern {
    const char *name, *pattern;
    const ms_special_token *special;
    uint32_t count;
    uint32_t reserved; /* so many more: <|reserved_special_token_N|>, N from 2 on */
    const char *bos, *eos;
} ms_named_pattern;
/* NULL: the text is no such name. */
const ms_named_pattern *ms_build_pattern(const char *name);
/* What a file does not say: the cuts, the special tokens, and those at the ends of a text, from the
 * options. otherwise: the pattern where they have none. The model must be complete. */
ms_status ms_build_options(ms_context *context, ms_tokenizer *tokenizer,
                           const ms_tokenizer_options *options, const char *otherwise);

#endif
