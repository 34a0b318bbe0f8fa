/* json_steps.h: normalizers and pre-tokenizers of tokenizer.json. */
#ifndef MOONSHARD_TEXT_JSON_STEPS_H
#define MOONSHARD_TEXT_JSON_STEPS_H

#include "text/json.h"

/* Each reads one member of the file, which may be NULL or null. */
ms_status ms_json_normalizer(ms_context *context, const json_t *value, ms_tokenizer *tokenizer);
ms_status ms_json_pre_tokenizer(ms_context *context, const json_t *value, ms_tokenizer *tokenizer);
/* Whether the pre-tokenizer turns text into characters of the byte alphabet. */
bool ms_json_is_byte_level(const json_t *pre_tokenizer);

#endif
