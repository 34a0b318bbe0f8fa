/* utf8.h: characters of UTF-8 in text that need not be valid. */
#ifndef MOONSHARD_TEXT_UTF8_H
#define MOONSHARD_TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A part of a text. */
typedef struct ms_span {
    const uint8_t *at, *end;
    bool first; /* it begins where the whole text begins */
} ms_span;

static inline size_t ms_span_bytes(ms_span span) { return (size_t)(span.end - span.at); }

/* The well-formed character at `at`: its bytes, and its code if `code` is not NULL; 0 if there is
 * none before `end` (The Unicode Standard 15, table 3-7). */
uint32_t ms_utf8_character(const uint8_t *at, const uint8_t *end, uint32_t *code);
/* The end of the well-formed UTF-8 that begins at `at`. */
const uint8_t *ms_utf8_valid_end(const uint8_t *at, const uint8_t *end);
/* The end of the bytes that begin at `at` and are no UTF-8. */
const uint8_t *ms_utf8_invalid_end(const uint8_t *at, const uint8_t *end);
/* How many bytes at the end could begin a character of which the rest is missing: 0 to 3. */
size_t ms_utf8_unfinished(const uint8_t *at, const uint8_t *end);
/* Writes a character; returns its 1 to 4 bytes. */
uint32_t ms_utf8_write(uint32_t code, uint8_t out[4]);

#endif
