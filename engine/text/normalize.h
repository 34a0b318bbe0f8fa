/* normalize.h: what is changed in a text before it is cut into pieces. */
#ifndef MOONSHARD_TEXT_NORMALIZE_H
#define MOONSHARD_TEXT_NORMALIZE_H

#include "text/pattern.h"
#include "text/sentence.h"

typedef enum ms_normalizer_kind {
    MS_NORMALIZE_FORM,     /* Unicode's normal forms: composed, compatible */
    MS_NORMALIZE_LOWER,    /* capital letters become small */
    MS_NORMALIZE_STRIP,    /* spaces at the begin (left) and the end (right) are removed */
    MS_NORMALIZE_ACCENTS,  /* marks are removed */
    MS_NORMALIZE_PREPEND,  /* `content` comes first, unless the text is empty */
    MS_NORMALIZE_REPLACE,  /* matches of `pattern` become `content` */
    MS_NORMALIZE_SENTENCE, /* SentencePiece's rules */
} ms_normalizer_kind;

typedef struct ms_normalizer {
    ms_normalizer_kind kind;
    bool composed, compatible, left, right;
    ms_pattern *pattern;
    ms_buffer content;
    ms_sentence sentence;
} ms_normalizer;

/* Some normalizers, applied in order. */
typedef struct ms_normalizers {
    ms_normalizer *items;
    size_t count, capacity;
} ms_normalizers;

/* The memory of one thread; matcher is borrowed. */
typedef struct ms_normalizing {
    ms_matcher *matcher;
    ms_buffer texts[2];
    int32_t *codes;
    size_t code_capacity;
} ms_normalizing;

/* The normalized text: `text` itself if nothing changes, else memory of `work`, until its next
 * use. MS_ERROR_UNSUPPORTED where it would be longer than ms_rewritten_max. */
ms_status ms_normalize(ms_context *context, const ms_normalizers *normalizers, ms_normalizing *work,
                       ms_span text, ms_span *out);
/* Appends `text` with all matches replaced by content. */
ms_status ms_replace_matches(ms_context *context, const ms_pattern *pattern, ms_matcher *matcher,
                             ms_span text, ms_span content, ms_buffer *out);
void ms_normalizers_free(ms_context *context, ms_normalizers *normalizers);
void ms_normalizing_free(ms_context *context, ms_normalizing *work); /* not the matcher */

#endif
