/* added.h: tokens that are found in a text as they are, before it is cut into pieces: special
 * tokens and others that were added to a vocabulary. */
#ifndef MOONSHARD_TEXT_ADDED_H
#define MOONSHARD_TEXT_ADDED_H

#include "moonshard/tokenizer.h"
#include "text/buffer.h"

typedef struct ms_added_token {
    size_t offset; /* of its text in `text` */
    uint32_t length, id;
    bool special;
    bool left, right; /* takes the spaces before and after it as well */
    bool word;        /* only where no word continues on either side */
} ms_added_token;

/* A set of such tokens, in the order of their texts once it is sealed. */
typedef struct ms_added {
    ms_buffer text;
    ms_added_token *tokens;
    size_t count, capacity;
    uint64_t firsts[4]; /* a bit for each byte with which one begins */
} ms_added;

/* Adds a token with this text, which is not empty; token.offset and token.length are set here. */
ms_status ms_added_add(ms_context *context, ms_added *added, ms_span text, ms_added_token token);
/* Once, after the last token. */
void ms_added_seal(ms_added *added);
/* The longest token that begins at `at`, or NULL. Of two with the same text, the one that was added
 * last. */
const ms_added_token *ms_added_longest(const ms_added *added, const uint8_t *at,
                                       const uint8_t *end);
void ms_added_free(ms_context *context, ms_added *added);

/* A search through a text. at: where it goes on; done: the end of what was handed out. */
typedef struct ms_added_search {
    const ms_added *added;
    ms_span text;
    const uint8_t *at, *done;
    bool specials; /* special tokens are found, too; otherwise they are text */
} ms_added_search;

/* The next token: before gets the text in front of it. NULL at the end, where `before` is what is
 * left. */
const ms_added_token *ms_added_next(ms_added_search *search, ms_span *before);

#endif
