/* added.c: tokens that are found in a text as they are. */
#include "text/added.h"

#include <stdlib.h>

#include "text/character.h"

ms_status ms_added_add(ms_context *context, ms_added *added, ms_span text, ms_added_token token)
{
    ms_status status = ms_grow(context, (void **)&added->tokens, &added->capacity, added->count + 1,
                               sizeof *added->tokens);
    token.offset = added->text.length;
    token.length = (uint32_t)ms_span_bytes(text);
    if (!status) status = ms_buffer_add(context, &added->text, text.at, token.length);
    if (status) return status;
    added->tokens[added->count++] = token;
    added->firsts[*text.at >> 6] |= UINT64_C(1) << (*text.at & 63);
    return MS_OK;
}

/* By bytes; of equal texts, the one that was added first comes first. */
static int compare(const void *a, const void *b, void *text)
{
    const ms_added_token *x = a, *y = b;
    const uint8_t *data = text;
    uint32_t shorter = x->length < y->length ? x->length : y->length;
    int order = memcmp(data + x->offset, data + y->offset, shorter);
    if (order) return order;
    if (x->length != y->length) return x->length < y->length ? -1 : 1;
    return x->offset < y->offset ? -1 : 1;
}

void ms_added_seal(ms_added *added)
{
    if (added->count > 1)
        qsort_r(added->tokens, added->count, sizeof *added->tokens, compare, added->text.data);
}

/* Among tokens that agree in their first `depth` bytes: the first one, from `low` to `high`, whose
 * next byte is at least `byte`. A token that ends there comes before all. */
static size_t first_at_least(const ms_added *added, size_t low, size_t high, uint32_t depth,
                             uint32_t byte)
{
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const ms_added_token *token = &added->tokens[middle];
        if (token->length <= depth || added->text.data[token->offset + depth] < byte)
            low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Narrows the sorted list down, byte by byte. */
const ms_added_token *ms_added_longest(const ms_added *added, const uint8_t *at, const uint8_t *end)
{
    const ms_added_token *longest = NULL;
    size_t low = 0, high = added->count;
    for (uint32_t depth = 0; at + depth < end; depth++) {
        low = first_at_least(added, low, high, depth, at[depth]);
        high = first_at_least(added, low, high, depth, at[depth] + 1u);
        if (low == high) break;
        /* Those that end here are the first ones. */
        for (size_t i = low; i < high && added->tokens[i].length == depth + 1; i++)
            longest = &added->tokens[i];
    }
    return longest;
}

void ms_added_free(ms_context *context, ms_added *added)
{
    ms_buffer_free(context, &added->text);
    ms_release(context, added->tokens);
    *added = (ms_added){ 0 };
}

/* -------------------------------------------------------------------- search */

static bool touches_word(ms_span text, const uint8_t *begin, const uint8_t *end)
{
    uint32_t code;
    if (ms_character_before(text.at, begin, &code) && ms_is_word(code)) return true;
    return ms_utf8_character(end, text.end, &code) && ms_is_word(code);
}

/* Hands out the token at begin, with the spaces that belong to it. */
static const ms_added_token *found(ms_added_search *search, const ms_added_token *token,
                                   const uint8_t *begin, ms_span *before)
{
    uint32_t code, length;
    const uint8_t *end = begin + token->length;
    while (token->left && begin > search->done
           && (length = ms_character_before(search->done, begin, &code)) && ms_is_space(code))
        begin -= length;
    while (token->right && (length = ms_utf8_character(end, search->text.end, &code))
           && ms_is_space(code))
        end += length;
    /* A token that is in spaces which the last one took has nothing in front of it. */
    *before = (ms_span){ .at = search->done, .end = begin > search->done ? begin : search->done };
    before->first = search->text.first && before->at == search->text.at;
    search->done = end;
    return token;
}

const ms_added_token *ms_added_next(ms_added_search *search, ms_span *before)
{
    const ms_added *added = search->added;
    const uint8_t *end = search->text.end;
    while (search->at < end) {
        const uint8_t *at = search->at;
        if (!(added->firsts[*at >> 6] >> (*at & 63) & 1)) {
            search->at++;
            continue;
        }
        const ms_added_token *token = ms_added_longest(added, at, end);
        search->at += token ? token->length : 1;
        if (token == NULL || (token->special && !search->specials)
            || (token->word && touches_word(search->text, at, at + token->length)))
            continue;
        return found(search, token, at, before);
    }
    /* Spaces that the last token took may be the end. */
    *before = (ms_span){ .at = search->done, .end = end };
    before->first = search->text.first && before->at == search->text.at;
    return NULL;
}
