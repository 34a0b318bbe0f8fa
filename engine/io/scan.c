/* scan.c: reading JSON of a known form, in place. */
#include "io/scan.h"

#include <string.h>

#include "io/path.h"

#define DEPTH_MAX 100 /* of values that are skipped */

/* Keeps the first problem: those that follow it are its consequences. Always false, for use in a
 * return. */
static bool fail(ms_scan *scan, const char *problem)
{
    if (!scan->problem) scan->problem = problem;
    return false;
}

/* JSON's four characters only; isspace would accept others. */
static void skip_space(ms_scan *scan)
{
    /* The end is compared here, so that the zero behind the text is never taken for white space. */
    while (scan->at < scan->end
           && (*scan->at == ' ' || *scan->at == '\n' || *scan->at == '\r' || *scan->at == '\t'))
        scan->at++;
}

/* After a problem the answer is always false, so a caller may check for problems at the end of a
 * chain. */
bool ms_scan_is(ms_scan *scan, char expected)
{
    skip_space(scan);
    if (scan->problem || scan->at == scan->end || *scan->at != expected) return false;
    scan->at++;
    return true;
}

/* The message names all that the grammar allows at this point: where a list may close, it may also
 * go on with a comma. */
bool ms_scan_character(ms_scan *scan, char expected)
{
    if (ms_scan_is(scan, expected)) return true;
    switch (expected) {
    case '{': return fail(scan, "'{' expected");
    case '}': return fail(scan, "',' or '}' expected");
    case '[': return fail(scan, "'[' expected");
    case ']': return fail(scan, "',' or ']' expected");
    case ':': return fail(scan, "':' expected");
    default: return fail(scan, "',' expected");
    }
}

/* It may be called after a problem: the first one stays. */
bool ms_scan_end(ms_scan *scan)
{
    skip_space(scan);
    return scan->at == scan->end || fail(scan, "the end expected");
}

/* A comma right before the closing character is refused by what follows: after a comma the caller
 * reads an item. */
bool ms_scan_more(ms_scan *scan, char close, bool *first)
{
    if (scan->problem) return false;
    /* An empty list closes at once; after the first item only a comma or the end may follow. */
    if (*first) {
        *first = false;
        return !ms_scan_is(scan, close);
    }
    if (ms_scan_is(scan, ',')) return true;
    (void)ms_scan_character(scan, close);
    return false;
}

/* ------------------------------------------------------------------ strings */

/* The value of a hexadecimal digit, or -1. */
static int digit_of(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Reads four hexadecimal digits. The zero at the end of the text is no digit, so this never reads
 * past it. */
static bool read_unit(ms_scan *scan, uint32_t *unit)
{
    *unit = 0;
    for (int i = 0; i < 4; i++, scan->at++) {
        int digit = digit_of(*scan->at); /* at the end is 0, which is no digit */
        if (digit < 0) return fail(scan, "four hexadecimal digits expected");
        *unit = *unit << 4 | (uint32_t)digit;
    }
    return true;
}

/* Writes a code point as UTF-8 in its shortest form; returns the end. */
static char *put_character(char *to, uint32_t code)
{
    if (code < 0x80) {
        *to++ = (char)code;
        return to;
    }
    if (code < 0x800) {
        *to++ = (char)(0xc0 | code >> 6);
    } else {
        if (code < 0x10000) {
            *to++ = (char)(0xe0 | code >> 12);
        } else {
            *to++ = (char)(0xf0 | code >> 18);
            *to++ = (char)(0x80 | (code >> 12 & 0x3f));
        }
        *to++ = (char)(0x80 | (code >> 6 & 0x3f));
    }
    /* Six bits a byte, the highest first; 10 in front marks a continuation. */
    *to++ = (char)(0x80 | (code & 0x3f));
    return to;
}

/* Decodes what follows "\u". Characters beyond U+FFFF are two escapes, a high and a low surrogate;
 * half a pair is refused, as it has no UTF-8. A zero byte is refused because it would end the C
 * string. The result is never longer than its six or twelve characters, so decoding in place is
 * safe. */
static bool read_escaped_unit(ms_scan *scan, char **to)
{
    uint32_t unit, low = 0;
    if (!read_unit(scan, &unit)) return false;
    if (unit >= 0xdc00 && unit < 0xe000) return fail(scan, "half of a surrogate pair");
    if (unit >= 0xd800 && unit < 0xdc00) {
        /* Reading two characters is safe: the text ends with a zero, and the first test stops at
         * it. */
        if (scan->at[0] != '\\' || scan->at[1] != 'u')
            return fail(scan, "half of a surrogate pair");
        scan->at += 2;
        if (!read_unit(scan, &low)) return false;
        if (low < 0xdc00 || low >= 0xe000) return fail(scan, "half of a surrogate pair");
        /* The two halves carry ten bits each of the code point above U+FFFF. */
        unit = 0x10000 + ((unit - 0xd800) << 10 | (low - 0xdc00));
    }
    if (unit == 0) return fail(scan, "a zero byte in a string");
    *to = put_character(*to, unit);
    return true;
}

/* Decodes one escape after its backslash. `c` is tested before strchr, which would find the zero
 * that ends its string. meaning[] has at each place what the letter of from[] at that place
 * represents. */
static bool read_escape(ms_scan *scan, char **to)
{
    static const char from[] = "\"\\/bfnrt", meaning[] = "\"\\/\b\f\n\r\t";
    char c = *scan->at;
    const char *found = c ? strchr(from, c) : NULL;
    if (!found && c != 'u') return fail(scan, "an unknown escape in a string");
    scan->at++;
    if (!found) return read_escaped_unit(scan, to);
    *(*to)++ = meaning[found - from];
    return true;
}

/* Decodes the string where it is: `to` never passes scan->at, since no escape is shorter than
 * what it means. The text before scan->at is overwritten by this. A string without escapes is moved
 * onto itself. */
bool ms_scan_string(ms_scan *scan, char **text)
{
    if (!ms_scan_is(scan, '"')) return fail(scan, "a string expected");
    char *to = scan->at;
    *text = to;
    while (*scan->at != '"') {
        if (*scan->at == '\\') {
            scan->at++;
            if (!read_escape(scan, &to)) return false;
            continue;
        }
        /* JSON forbids control characters in strings, and UTF-8 must be well formed; both count as
         * 0 bytes. */
        size_t bytes = (unsigned char)*scan->at < 0x20 ? 0 : ms_text_character(scan->at);
        if (bytes == 0)
            return fail(scan, scan->at == scan->end ? "a string without an end"
                                                    : "a byte that is not allowed in a string");
        memmove(to, scan->at, bytes);
        to += bytes;
        scan->at += bytes;
    }
    scan->at++;
    *to = 0; /* at the latest where the closing quote stood */
    return true;
}

/* ------------------------------------------------------------- other values */

/* isdigit must not be given a negative char, and a hostile file has any. */
static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* Integers only: fractions, exponents, signs and leading zeros are refused, the last as JSON
 * demands. */
bool ms_scan_size(ms_scan *scan, int64_t *value)
{
    skip_space(scan);
    const char *start = scan->at;
    int64_t size = 0;
    for (; is_digit(*scan->at); scan->at++)
        if (__builtin_mul_overflow(size, 10, &size)
            || __builtin_add_overflow(size, *scan->at - '0', &size))
            return fail(scan, "an integer beyond 63 bits");
    /* A fraction or an exponent after the digits would make it another kind of number. */
    bool leading_zero = *start == '0' && scan->at - start > 1;
    if (scan->problem || scan->at == start || leading_zero || *scan->at == '.' || *scan->at == 'e'
        || *scan->at == 'E')
        return fail(scan, "an integer of 0 or more expected");
    *value = size;
    return true;
}

/* One digit at least, as JSON demands after a point or an exponent. */
static bool skip_digits(ms_scan *scan)
{
    if (!is_digit(*scan->at)) return fail(scan, "a digit expected");
    while (is_digit(*scan->at)) scan->at++;
    return true;
}

/* A value that is skipped must still be a number by JSON's rules: two readers must not see
 * different ends of it. */
static bool skip_number(ms_scan *scan)
{
    if (*scan->at == '-') scan->at++;
    /* No digit may follow a leading zero, so "012" fails at the next character. */
    if (*scan->at == '0') scan->at++;
    else if (!skip_digits(scan)) return false;
    if (*scan->at == '.') {
        scan->at++;
        if (!skip_digits(scan)) return false;
    }
    if (*scan->at == 'e' || *scan->at == 'E') {
        scan->at++;
        if (*scan->at == '+' || *scan->at == '-') scan->at++;
        return skip_digits(scan);
    }
    return true;
}

/* A skipped string is decoded like any other, so its escapes are checked, too. */
static bool skip_scalar(ms_scan *scan)
{
    static const char *const words[] = { "true", "false", "null" };
    char *ignored;
    if (*scan->at == '"') return ms_scan_string(scan, &ignored);
    for (int i = 0; i < 3; i++)
        if (strncmp(scan->at, words[i], strlen(words[i])) == 0) {
            scan->at += strlen(words[i]);
            return true;
        }
    return *scan->at == '-' || is_digit(*scan->at) ? skip_number(scan)
                                                   : fail(scan, "a value expected");
}

/* Skips any value, without recursion: the stack of closing characters is a fixed array, so a
 * hostile nesting ends in an error and not in a stack overflow. */
bool ms_scan_skip(ms_scan *scan)
{
    char close[DEPTH_MAX] = ""; /* of the lists and objects that we are in */
    /* Keys of what is skipped are decoded, hence checked, and forgotten. */
    char *key;
    int depth = 0;
    bool first = false;
    do {
        skip_space(scan);
        if (*scan->at == '[' || *scan->at == '{') {
            /* A file of a few kilobytes can nest deeper than any stack. */
            if (depth == DEPTH_MAX) return fail(scan, "values nested too deep");
            close[depth++] = *scan->at++ == '[' ? ']' : '}';
            first = true;
        } else {
            if (!skip_scalar(scan)) return false;
            first = false;
        }
        /* Goes to the next item, and leaves as many lists and objects as end here. */
        while (depth > 0 && !ms_scan_more(scan, close[depth - 1], &first)) {
            if (scan->problem) return false;
            depth--;
        }
        /* In an object a key is before each value, also before the first. */
        if (depth > 0 && close[depth - 1] == '}'
            && !(ms_scan_string(scan, &key) && ms_scan_character(scan, ':')))
            return false;
    } while (depth > 0);
    return !scan->problem;
}
