/* character.c: classes of characters, by utf8proc. */
#include "text/character.h"

#include <utf8proc.h>

bool ms_is_space(uint32_t code)
{
    if (code < 0x80) return code == ' ' || (code >= '\t' && code <= '\r');
    return code == 0x85 || code == 0xa0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200a)
           || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f
           || code == 0x3000;
}

bool ms_is_mark(uint32_t code)
{
    switch (utf8proc_category((utf8proc_int32_t)code)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME: return true;
    default: return false;
    }
}

bool ms_is_word(uint32_t code)
{
    switch (utf8proc_category((utf8proc_int32_t)code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return ms_is_mark(code) || code == 0x200c || code == 0x200d;
    }
}

/* One letter has two small ones by Unicode's SpecialCasing.txt: I with a dot. */
uint32_t ms_lower(uint32_t code, uint32_t out[2])
{
    out[0] = (uint32_t)utf8proc_tolower((utf8proc_int32_t)code);
    if (code != 0x130) return 1;
    out[0] = 'i';
    out[1] = 0x307;
    return 2;
}

uint32_t ms_character_before(const uint8_t *begin, const uint8_t *end, uint32_t *code)
{
    for (uint32_t length = 1; length <= 4 && (size_t)(end - begin) >= length; length++)
        if (ms_utf8_character(end - length, end, code) == length) return length;
    return 0;
}
