/* vocabulary.h: tokens by id, and ids by text.
 *
 * Tokens are never removed. Ids may have gaps. */
#ifndef MOONSHARD_TEXT_VOCABULARY_H
#define MOONSHARD_TEXT_VOCABULARY_H

#include "moonshard/tokenizer.h"
#include "text/buffer.h"

/* What a token is; bits. MS_TOKEN_HERE is set in all that exist. */
enum {
    MS_TOKEN_HERE = 1,
    MS_TOKEN_SPECIAL = 2, /* has no text of its own */
    MS_TOKEN_BYTE = 4,    /* represents one byte that has no character: <0x0A> */
    MS_TOKEN_MERGED = 8,  /* pairs of other tokens are merged to it */
    MS_TOKEN_UNUSED = 16  /* is never given */
};

typedef struct ms_token {
    size_t offset;   /* of its text in `text` */
    uint32_t length; /* bytes */
    uint32_t flags;
} ms_token;

typedef struct ms_vocabulary {
    ms_buffer text;
    ms_token *tokens; /* by id, `count` of them */
    size_t count, token_capacity;
    uint32_t *slots; /* a hash table of ids plus 1; 0: free. slot_count is a power of two, or 0 */
    size_t slot_count, used;
} ms_vocabulary;

/* Adds a token, whose id must be free and at most MS_TOKEN_ID_MAX. named: it is found by its text,
 * which no other named token may have. */
ms_status ms_vocabulary_add(ms_context *context, ms_vocabulary *vocabulary, uint32_t id,
                            ms_span text, uint32_t flags, bool named);
/* The id of the named token with this text, or MS_NO_TOKEN. */
uint32_t ms_vocabulary_find(const ms_vocabulary *vocabulary, const void *text, size_t bytes);
/* Whether there is a token of that id. */
static inline bool ms_vocabulary_has(const ms_vocabulary *vocabulary, uint32_t id)
{
    return id < vocabulary->count && vocabulary->tokens[id].flags;
}
/* The token's text. The id must exist. */
static inline ms_span ms_vocabulary_text(const ms_vocabulary *vocabulary, uint32_t id)
{
    const ms_token *token = &vocabulary->tokens[id];
    if (token->length == 0) return (ms_span){ 0 };
    const uint8_t *at = vocabulary->text.data + token->offset;
    return (ms_span){ .at = at, .end = at + token->length };
}
void ms_vocabulary_free(ms_context *context, ms_vocabulary *vocabulary);

#endif
