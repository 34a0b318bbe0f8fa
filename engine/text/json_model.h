/* json_model.h: the model and the added tokens of tokenizer.json. */
#ifndef MOONSHARD_TEXT_JSON_MODEL_H
#define MOONSHARD_TEXT_JSON_MODEL_H

#include "text/json.h"

ms_status ms_json_model(ms_context *context, const json_t *value, ms_tokenizer *tokenizer);
ms_status ms_json_added_tokens(ms_context *context, const json_t *value, ms_tokenizer *tokenizer);

#endif
