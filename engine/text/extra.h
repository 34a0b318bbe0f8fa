/* extra.h: the tokens that files beside a tokenizer's add to it: added_tokens_decoder of
 * tokenizer_config.json, or else added_tokens.json; and which tokens are named special there. The
 * rules are those of transformers 5:
 *
 * - added_tokens.json is read only where tokenizer_config.json has no added_tokens_decoder, and so
 *   is special_tokens_map.json. Its tokens are special where one of the two others names them.
 * - What added_tokens_decoder says of a token goes before what tokenizer.json says of it.
 * - A token that is named as the end of a text and the like is found in texts as special tokens
 *   are. A name that is no token's is passed over.
 *
 * Where files do not agree about ids, transformers gives other ids than they say; here this is an
 * error. */
#ifndef MOONSHARD_TEXT_EXTRA_H
#define MOONSHARD_TEXT_EXTRA_H

#include <jansson.h>

#include "text/tokenizer.h"

typedef struct ms_extra_token {
    ms_span text; /* borrowed from the files */
    ms_added_token token;
    bool normalized;
    size_t order; /* in its file */
} ms_extra_token;

typedef struct ms_extra {
    json_t *config, *map, *added; /* the files; NULL: not there */
    json_t *names;                /* of special tokens: text -> what the files say of it */
    ms_extra_token *tokens;       /* by id */
    size_t count, capacity;
    const char *file; /* the name of the file that is being used, for messages */
    bool decoder;     /* they are of tokenizer_config.json */
    bool failed;      /* an error was this file's */
} ms_extra;

/* Once, when the files are set. */
ms_status ms_extra_collect(ms_context *context, ms_extra *extra);
/* Adds the tokens to a tokenizer whose model is complete, and whose own added tokens are there. */
ms_status ms_extra_apply(ms_context *context, ms_extra *extra, ms_tokenizer *tokenizer);
/* Whether of a text only its beginning gets the space that SentencePiece puts in front, unless it
 * has one, and not what follows each added token: "legacy": false. */
bool ms_extra_prefix_once(const ms_extra *extra);
/* The ends of a text, where the files name them by a token's text. */
void ms_extra_name_ends(const ms_extra *extra, ms_tokenizer *tokenizer);
/* Releases the files, too. */
void ms_extra_free(ms_context *context, ms_extra *extra);

#endif
