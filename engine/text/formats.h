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

#endif
