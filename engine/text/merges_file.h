/* merges_file.h: GPT-2's list of merges. */
#ifndef MOONSHARD_TEXT_MERGES_FILE_H
#define MOONSHARD_TEXT_MERGES_FILE_H

#include "text/formats.h"

/* GPT-2's files: a vocabulary as JSON, whose values are ids, and a list of merges. Each reads its
 * part, the vocabulary first. extra: the tokens that other files add. */
ms_status ms_format_merges(ms_context *context, ms_span data, ms_tokenizer *tokenizer,
                           const ms_tokenizer_options *options, ms_extra *extra);

#endif
