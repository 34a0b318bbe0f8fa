/* tokenizer_load.h: which files a tokenizer is read from, and what they are. */
#ifndef MOONSHARD_TEXT_TOKENIZER_LOAD_H
#define MOONSHARD_TEXT_TOKENIZER_LOAD_H

#include "text/formats.h"

/* What the content looks like. */
ms_text_format ms_format_of(ms_span data);

#endif
