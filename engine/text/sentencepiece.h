/* sentencepiece.h: SentencePiece's tokenizer.model of type BPE. The numbers of fields are those of
 * its sentencepiece_model.proto. */
#ifndef MOONSHARD_TEXT_SENTENCEPIECE_H
#define MOONSHARD_TEXT_SENTENCEPIECE_H

#include "text/formats.h"

ms_status ms_format_sentencepiece(ms_context *context, ms_span data, ms_tokenizer *tokenizer,
                                  ms_extra *extra);

#endif
