/* pattern.h: regular expressions with Unicode classes, on valid UTF-8. PCRE2 matches them; what
 * the other engines mean in another way is rewritten or refused.
 *
 * Letters, numbers and so on are those of the Unicode version that PCRE2 was built with. */
#ifndef MOONSHARD_TEXT_PATTERN_H
#define MOONSHARD_TEXT_PATTERN_H

#include "text/buffer.h"

/* For which engine a pattern was written. */
typedef enum ms_dialect {
    MS_DIALECT_LITERAL,   /* the text itself */
    MS_DIALECT_RUST,      /* the crates regex and fancy-regex, which tiktoken uses */
    MS_DIALECT_ONIGURUMA, /* which Hugging Face's tokenizers use, with Ruby's syntax */
} ms_dialect;

/* A compiled pattern, for any number of threads. */
typedef struct ms_pattern ms_pattern;
/* MS_ERROR_ARGUMENT for what is no pattern, MS_ERROR_UNSUPPORTED for what PCRE2 would understand in
 * another way; the message has the pattern, not the file. */
ms_status ms_pattern_new(ms_context *context, const char *text, size_t bytes, ms_dialect dialect,
                         ms_pattern **out);
void ms_pattern_free(ms_pattern *pattern); /* NULL is allowed */

/* The memory of one thread. */
typedef struct ms_matcher ms_matcher;
ms_status ms_matcher_new(ms_context *context, ms_matcher **out);
void ms_matcher_free(ms_matcher *matcher); /* NULL is allowed */

/* The first match in `subject` that has a character and begins at `from` or later; found->at is
 * NULL if there is none. */
ms_status ms_pattern_find(ms_context *context, const ms_pattern *pattern, ms_matcher *matcher,
                          ms_span subject, const uint8_t *from, ms_span *found);

#endif
