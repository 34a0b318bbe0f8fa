/* scan.h: reading JSON of a known form from text that is not trusted: in one pass, without a
 * tree, without recursion.
 *
 * A tree of a hostile header takes fifty times its bytes; this takes none. Strings are decoded
 * where they are, so the text is used up. */
#ifndef MOONSHARD_IO_SCAN_H
#define MOONSHARD_IO_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A position in text that ends with 0 at `end`: reading the end is safe, and no value continues
 * over it. The first problem stays, and all calls but ms_scan_end fail after it, so a caller may
 * check once after several calls. */
typedef struct ms_scan {
    char *begin, *at, *end; /* *end must be 0 */
    const char *problem;    /* the first one, NULL: none; it was met at `at` */
} ms_scan;

/* Each skips white space first and answers false, with a problem noted, if something else is
 * there. */
bool ms_scan_character(ms_scan *scan, char expected);
bool ms_scan_string(ms_scan *scan, char **text);  /* ends with 0; UTF-8 without zero bytes */
bool ms_scan_size(ms_scan *scan, int64_t *value); /* an integer of 0 or more */
bool ms_scan_skip(ms_scan *scan);                 /* any value */
/* Takes that character if it comes next. If it does not, that is no problem. */
bool ms_scan_is(ms_scan *scan, char expected);
bool ms_scan_end(ms_scan *scan); /* nothing but white space is left */

/* Whether a list has one more item; `close` is its closing character. Takes the comma that must
 * precede all items but the first, or the closing character. *first must be true at the start. */
bool ms_scan_more(ms_scan *scan, char close, bool *first);

#endif
