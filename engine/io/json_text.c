/* json_text.c: JSON of other programs, in which integers have any number of digits. */
#include <string.h>

#include "moonshard/io.h"

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* Whether a number of JSON is an integer that int64_t cannot hold. JSON allows no leading zeros. */
static bool is_too_big(const char *number, size_t bytes)
{
    bool negative = *number == '-';
    const char *digits = number + negative;
    size_t count = bytes - negative;
    for (size_t i = 0; i < count; i++)
        if (!is_digit(digits[i])) return false;
    const char *most = negative ? "9223372036854775808" : "9223372036854775807";
    size_t limit = strlen(most);
    return count > limit || (count == limit && memcmp(digits, most, limit) > 0);
}

/* The bytes of the string, from its quote to the one that ends it, or to the text's end. */
static size_t string_at(const char *text, size_t bytes)
{
    size_t i = 1;
    while (i < bytes && text[i] != '"') i += text[i] == '\\' ? 2 : 1;
    return i < bytes ? i + 1 : bytes;
}

static size_t number_at(const char *text, size_t bytes)
{
    size_t i = 1;
    while (i < bytes && (is_digit(text[i]) || (text[i] && strchr("+-.eE", text[i])))) i++;
    return i;
}

size_t ms_json_big_integers(const char *text, size_t bytes, char *out)
{
    size_t written = 0;
    for (size_t i = 0, length; i < bytes; i += length) {
        bool number = is_digit(text[i]) || text[i] == '-';
        length = text[i] == '"' ? string_at(text + i, bytes - i)
                 : number       ? number_at(text + i, bytes - i)
                                : 1;
        if (out) memcpy(out + written, text + i, length);
        written += length;
        if (!number || !is_too_big(text + i, length)) continue;
        if (out) {
            out[written] = '.';
            out[written + 1] = '0';
        }
        written += 2;
    }
    return written;
}
