/* character.h: classes of characters, for what needs no pattern. */
#ifndef MOONSHARD_TEXT_CHARACTER_H
#define MOONSHARD_TEXT_CHARACTER_H

#include "text/utf8.h"

bool ms_is_space(uint32_t code); /* Unicode's White_Space */
bool ms_is_word(uint32_t code);  /* a letter, mark, decimal digit or connecting punctuation */
bool ms_is_mark(uint32_t code);  /* an accent and the like */
/* The small letters of one letter; returns how many: 1 or 2. */
uint32_t ms_lower(uint32_t code, uint32_t out[2]);
/* The character that ends at `end`; 0 if none does. */
uint32_t ms_character_before(const uint8_t *begin, const uint8_t *end, uint32_t *code);

#endif
