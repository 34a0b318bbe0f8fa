/* split.h: where a text is cut into pieces, of which each is encoded by itself. */
#ifndef MOONSHARD_TEXT_SPLIT_H
#define MOONSHARD_TEXT_SPLIT_H

#include "text/pattern.h"

#define MS_SPLITTERS_MAX 16

typedef enum ms_splitter_kind {
    MS_SPLIT_PATTERN, /* at the matches of a pattern */
    MS_SPLIT_SPACE,   /* cuts nothing: puts a space in front where none is */
    MS_SPLIT_META,    /* cuts nothing: spaces become `content`, and one may come in front */
    MS_SPLIT_BYTES,   /* cuts nothing: bytes become characters of the byte alphabet */
} ms_splitter_kind;

/* What becomes of a match. The names are those of tokenizer.json. */
typedef enum ms_behavior {
    MS_BEHAVIOR_REMOVED,
    MS_BEHAVIOR_ISOLATED,
    MS_BEHAVIOR_MERGED_WITH_PREVIOUS,
    MS_BEHAVIOR_MERGED_WITH_NEXT,
    MS_BEHAVIOR_CONTIGUOUS,
} ms_behavior;

typedef enum ms_prepend { MS_PREPEND_NEVER, MS_PREPEND_FIRST, MS_PREPEND_ALWAYS } ms_prepend;

typedef struct ms_splitter {
    ms_splitter_kind kind;
    ms_pattern *pattern;
    ms_behavior behavior;
    bool invert; /* what is between matches counts as match */
    ms_prepend prepend;
    ms_buffer content;
} ms_splitter;

/* Some splitters; each gets the pieces of the one before. */
typedef struct ms_splitters {
    ms_splitter items[MS_SPLITTERS_MAX];
    size_t count;
} ms_splitters;

/* The memory of one thread; matcher is borrowed. */
typedef struct ms_splitting {
    ms_matcher *matcher;
    ms_buffer texts[MS_SPLITTERS_MAX];
} ms_splitting;

typedef ms_status (*ms_piece_function)(void *to, ms_span piece);

/* Calls `piece` with each piece of the text, in order; none is empty. A run of bytes that are no
 * UTF-8 is a piece of its own. */
ms_status ms_split(ms_context *context, const ms_splitters *splitters, ms_splitting *work,
                   ms_span text, ms_piece_function piece, void *to);
void ms_splitters_free(ms_context *context, ms_splitters *splitters);
void ms_splitting_free(ms_context *context, ms_splitting *work); /* not the matcher */

#endif
