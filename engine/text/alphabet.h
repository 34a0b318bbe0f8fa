/* alphabet.h: the characters by which byte-level vocabularies write bytes: a printable character
 * for each byte (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"). */
#ifndef MOONSHARD_TEXT_ALPHABET_H
#define MOONSHARD_TEXT_ALPHABET_H

#include "text/buffer.h"

/* Appends these bytes as characters of the alphabet. */
ms_status ms_alphabet_write(ms_context *context, ms_span bytes, ms_buffer *out);
/* Appends the bytes that the characters represent. false, and nothing appended, if one of them is
 * outside of the alphabet. */
ms_status ms_alphabet_read(ms_context *context, ms_span characters, ms_buffer *out, bool *known);

#endif
