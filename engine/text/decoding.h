/* decoding.h: the text of each token, worked out once when a tokenizer is loaded. */
#ifndef MOONSHARD_TEXT_DECODING_H
#define MOONSHARD_TEXT_DECODING_H

#include "text/tokenizer.h"

#define MS_DECODE_RULES_MAX 16

typedef enum ms_decode_kind {
    MS_DECODE_REPLACE,  /* matches of `pattern` become `content` */
    MS_DECODE_BYTES,    /* <0x0A> becomes the byte */
    MS_DECODE_ALPHABET, /* characters of the byte alphabet become bytes */
    MS_DECODE_STRIP,    /* at most `begin` and `end` times `content` is removed */
} ms_decode_kind;

typedef struct ms_decode_rule {
    ms_decode_kind kind;
    ms_pattern *pattern;
    ms_buffer content;
    size_t begin, end;
} ms_decode_rule;

/* What is done to each token's name, in order. */
typedef struct ms_decode_rules {
    ms_decode_rule items[MS_DECODE_RULES_MAX];
    size_t count;
} ms_decode_rules;

/* Fills in tokenizer->decoding.texts for all tokens. Added tokens are not changed, but for those
 * that are found in the normalized text. In a model by bytes, rules see the names of tokens. */
ms_status ms_decoding_build(ms_context *context, ms_tokenizer *tokenizer,
                            const ms_decode_rules *rules);
void ms_decode_rules_free(ms_context *context, ms_decode_rules *rules);
/* The byte that <0x0A> represents, or -1 for another name. */
int ms_byte_of_name(ms_span name);

#endif
