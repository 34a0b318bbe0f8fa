/* formats.h: the readers of tokenizers' files. Messages name no file: ms_tokenizer_load adds it. */
#ifndef MOONSHARD_TEXT_FORMATS_H
#define MOONSHARD_TEXT_FORMATS_H

#include "text/extra.h"

typedef enum ms_text_format {
    MS_FORMAT_UNKNOWN,
    MS_FORMAT_JSON,          /* tokenizer.json, or vocab.json */
    MS_FORMAT_MERGES,        /* merges.txt */
    MS_FORMAT_RANKS,         /* tiktoken's ranks */
    MS_FORMAT_SENTENCEPIECE, /* tokenizer.model */
} ms_text_format;

/* What the content looks like. */
ms_text_format ms_format_of(ms_span data);
/* GPT-2's files: a vocabulary as JSON, whose values are ids, and a list of merges. Each reads its
 * part, the vocabulary first. extra: the tokens that other files add. */
ms_status ms_format_merges(ms_context *context, ms_span data, ms_tokenizer *tokenizer,
                           const ms_tokenizer_options *options, ms_extra *extra);
ms_status ms_format_ranks(ms_context *context, ms_span data, ms_tokenizer *tokenizer,
                          const ms_tokenizer_options *options, ms_extra *extra);
ms_status ms_format_sentencepiece(ms_context *context, ms_span data, ms_tokenizer *tokenizer,
                                  ms_extra *extra);

#endif
