/* utf8.c: characters of UTF-8 in text that need not be valid. */
#include "text/utf8.h"

#include <string.h>

/* The bytes that a character with this first byte has, or 0. */
static uint32_t length_by_first(uint8_t first)
{
    if (first < 0x80) return 1;
    if (first >= 0xc2 && first <= 0xdf) return 2;
    if (first >= 0xe0 && first <= 0xef) return 3;
    return first >= 0xf0 && first <= 0xf4 ? 4 : 0;
}

/* The second byte alone excludes overlong forms, surrogates, and codes above U+10FFFF. */
static bool is_second(uint8_t first, uint8_t second)
{
    switch (first) {
    case 0xe0: return second >= 0xa0 && second <= 0xbf;
    case 0xed: return second >= 0x80 && second <= 0x9f;
    case 0xf0: return second >= 0x90 && second <= 0xbf;
    case 0xf4: return second >= 0x80 && second <= 0x8f;
    default: return (second & 0xc0) == 0x80;
    }
}

/* How many of the bytes from `at` on agree with a character of `length` bytes. */
static uint32_t agreeing(const uint8_t *at, const uint8_t *end, uint32_t length)
{
    uint32_t i = 1;
    if (end - at < 2 || length < 2 || !is_second(at[0], at[1])) return 1;
    for (i = 2; i < length && at + i < end; i++)
        if ((at[i] & 0xc0) != 0x80) break;
    return i;
}

uint32_t ms_utf8_character(const uint8_t *at, const uint8_t *end, uint32_t *code)
{
    if (at >= end) return 0;
    uint32_t length = length_by_first(*at);
    if (length == 0 || (length > 1 && agreeing(at, end, length) < length)) return 0;
    if (code == NULL) return length;
    /* The bits of the first byte that are the code's. */
    *code = length == 1 ? at[0] : at[0] & (0x7fu >> length);
    for (uint32_t i = 1; i < length; i++) *code = *code << 6 | (at[i] & 0x3f);
    return length;
}

/* Eight bytes of ASCII are passed at once: most text is. */
const uint8_t *ms_utf8_valid_end(const uint8_t *at, const uint8_t *end)
{
    for (;;) {
        uint64_t eight;
        while (end - at >= 8) {
            memcpy(&eight, at, sizeof eight);
            if (eight & UINT64_C(0x8080808080808080)) break;
            at += sizeof eight;
        }
        uint32_t length = ms_utf8_character(at, end, NULL);
        if (length == 0) return at;
        at += length;
    }
}

const uint8_t *ms_utf8_invalid_end(const uint8_t *at, const uint8_t *end)
{
    while (at < end && ms_utf8_character(at, end, NULL) == 0) at++;
    return at;
}

size_t ms_utf8_unfinished(const uint8_t *at, const uint8_t *end)
{
    size_t most = end - at < 3 ? (size_t)(end - at) : 3;
    for (size_t i = 1; i <= most; i++) {
        uint32_t length = length_by_first(end[-(ptrdiff_t)i]);
        if (length > i) return agreeing(end - i, end, length) == i ? i : 0;
        /* Not the later bytes of a character: nothing waits. */
        if (length != 0 || (end[-(ptrdiff_t)i] & 0xc0) != 0x80) return 0;
    }
    return 0;
}

uint32_t ms_utf8_write(uint32_t code, uint8_t out[4])
{
    if (code < 0x80) {
        out[0] = (uint8_t)code;
        return 1;
    }
    uint32_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (uint32_t i = length - 1; i > 0; i--, code >>= 6) out[i] = (uint8_t)(0x80 | (code & 0x3f));
    /* As many leading ones as there are bytes. */
    out[0] = (uint8_t)((0xf00u >> length) | code);
    return length;
}
