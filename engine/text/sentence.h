/* sentence.h: how SentencePiece changes a text before it encodes it: a map of characters, spaces as
 * U+2581, and one of them in front. */
#ifndef MOONSHARD_TEXT_SENTENCE_H
#define MOONSHARD_TEXT_SENTENCE_H

#include "text/added.h"

/* A map from strings to strings. Its text is a double-array trie (Aoe 1989, "An Efficient Digital
 * Search Algorithm by Using a Double-Array Structure"; the units are those of darts-clone 0.32),
 * whose values are offsets into `texts`, where each string ends with 0. */
typedef struct ms_charsmap {
    uint32_t *units;
    size_t unit_count;
    char *texts; /* ends with 0 */
    size_t text_bytes;
} ms_charsmap;

typedef struct ms_sentence {
    ms_charsmap map;
    bool prefix;    /* a space is added in front */
    bool once;      /* only at the begin of all, and not in front of another one */
    bool suffix;    /* it is added at the end instead */
    bool collapse;  /* spaces at the begin and the end are removed, and several become one */
    bool escape;    /* spaces become U+2581 */
    ms_added fixed; /* texts that do not change: those of user-defined tokens */
} ms_sentence;

/* Reads a map as SentencePiece stores it. MS_ERROR_CORRUPT for another form. No bytes: no map. */
ms_status ms_charsmap_read(ms_context *context, ms_span data, ms_charsmap *out);
/* Appends the text as SentencePiece would encode it. Bytes that are no UTF-8 stay as they are. */
ms_status ms_sentence_write(ms_context *context, const ms_sentence *sentence, ms_span text,
                            ms_buffer *out);
void ms_sentence_free(ms_context *context, ms_sentence *sentence);

#endif
