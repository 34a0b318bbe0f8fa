/* ranks.h: tiktoken's rank files. */
#ifndef MOONSHARD_TEXT_RANKS_H
#define MOONSHARD_TEXT_RANKS_H

#include "text/formats.h"

ms_status ms_format_ranks(ms_context *context, ms_span data, ms_tokenizer *tokenizer,
                          const ms_tokenizer_options *options, ms_extra *extra);

#endif
