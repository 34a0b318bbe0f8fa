/* lines.h: the lines of a part of a file, read as they are needed, and the text in a line of JSON.
 */
#ifndef MOONSHARD_TEXT_LINES_H
#define MOONSHARD_TEXT_LINES_H

#include <jansson.h>

#include "moonshard/io.h"
#include "text/buffer.h"

typedef struct ms_lines {
    ms_file *file;
    const char *path;
    uint64_t bytes;  /* of the file */
    uint64_t end;    /* lines that begin from here on are of the next part */
    uint64_t offset; /* of what comes after `held` */
    ms_buffer held;
    size_t at; /* of the next line in `held` */
} ms_lines;

/* The lines that begin from byte `begin` on and before `end`. The path must live until the close.
 */
ms_status ms_lines_open(ms_context *context, const char *path, uint64_t begin, uint64_t end,
                        ms_lines *lines);
/* The next line without its end, until the next call; line->at NULL: there is none. first: where it
 * begins in the file. Of more than MS_DOCUMENT_MAX bytes: MS_ERROR_UNSUPPORTED. */
ms_status ms_lines_next(ms_context *context, ms_lines *lines, ms_span *line, uint64_t *first);
/* The number of the line that begins at this byte, from 1 on: reads the file up to there. */
ms_status ms_lines_number(ms_context *context, ms_lines *lines, uint64_t first, uint64_t *number);
void ms_lines_close(ms_context *context, ms_lines *lines);

/* The text of a member of a JSON object; *text is borrowed from *root, which the caller releases by
 * json_decref. MS_ERROR_CORRUPT: it is no JSON, no object, has no such member, or one that is no
 * string; the message begins with that. */
ms_status ms_line_text(ms_context *context, ms_span line, const char *field, json_t **root,
                       ms_span *text);

#endif
