/* json_ends.h: post-processors and decoders of tokenizer.json. */
#ifndef MOONSHARD_TEXT_JSON_ENDS_H
#define MOONSHARD_TEXT_JSON_ENDS_H

#include "text/json.h"

ms_status ms_json_post_processor(ms_context *context, const json_t *value, ms_tokenizer *tokenizer);
/* Works out the tokens' texts; all tokens must be there. */
ms_status ms_json_decoder(ms_context *context, const json_t *value, ms_tokenizer *tokenizer);

#endif
