/* lines.c: the lines of a part of a file, read as they are needed, and the text in a line of JSON.
 */
#include "text/lines.h"

#include <inttypes.h>
#include <stdio.h>

#include "moonshard/tokenizer.h"
#include "text/json.h"

enum { READ_BYTES = 1 << 20 };

ms_status ms_lines_open(ms_context *context, const char *path, uint64_t begin, uint64_t end,
                        ms_lines *lines)
{
    ms_span line;
    uint64_t first;
    *lines = (ms_lines){ .path = path, .end = end };
    ms_status status = ms_file_open(context, path, MS_FILE_READ, &lines->file);
    if (status) return status;
    int error = context->os->size(context->os->user, lines->file, &lines->bytes);
    if (error) status = ms_fail_os(context, error, "cannot tell the size of", path);
    if (lines->end > lines->bytes) lines->end = lines->bytes;
    /* A line that begins before is of the part before. Where one ends just there, nothing is. */
    if (!status && begin > 0 && begin < lines->end) {
        lines->offset = begin - 1;
        status = ms_lines_next(context, lines, &line, &first);
    } else if (begin > 0) lines->offset = lines->end;
    if (status) ms_lines_close(context, lines);
    return status;
}

/* Appends the next bytes of the file to the buffer, and drops the lines that were returned already.
 */
static ms_status read_more(ms_context *context, ms_lines *lines)
{
    ms_buffer *held = &lines->held;
    uint64_t left = lines->bytes - lines->offset;
    size_t more = left < READ_BYTES ? (size_t)left : READ_BYTES, rest = held->length - lines->at;
    if (lines->at && rest) memmove(held->data, held->data + lines->at, rest);
    held->length = rest;
    lines->at = 0;
    if (rest > MS_DOCUMENT_MAX)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "'%s', byte %" PRIu64 ": the line has more than %" PRIu64 " bytes",
                       lines->path, lines->offset - rest, MS_DOCUMENT_MAX);
    ms_status status = ms_buffer_reserve(context, held, more);
    if (!status)
        status =
            ms_file_read(context, lines->file, lines->path, held->data + rest, more, lines->offset);
    if (status) return status;
    held->length += more;
    lines->offset += more;
    return MS_OK;
}

ms_status ms_lines_next(ms_context *context, ms_lines *lines, ms_span *line, uint64_t *first)
{
    const ms_buffer *held = &lines->held;
    size_t searched = 0;
    *line = (ms_span){ 0 };
    *first = lines->offset - (held->length - lines->at);
    if (*first >= lines->end) return MS_OK;
    for (;;) {
        size_t from = lines->at + searched;
        const uint8_t *end =
            held->length > from ? memchr(held->data + from, '\n', held->length - from) : NULL;
        searched = held->length - lines->at;
        if (end == NULL && lines->offset < lines->bytes) {
            ms_status status = read_more(context, lines);
            if (status) return status;
            continue;
        }
        /* The last line may have no end. */
        line->at = held->data + lines->at;
        line->end = end ? end : held->data + held->length;
        lines->at = end ? (size_t)(end + 1 - held->data) : held->length;
        return MS_OK;
    }
}

ms_status ms_lines_number(ms_context *context, ms_lines *lines, uint64_t first, uint64_t *number)
{
    ms_buffer part = { 0 };
    ms_status status = ms_buffer_reserve(context, &part, READ_BYTES);
    *number = 1;
    for (uint64_t at = 0; !status && at < first;) {
        size_t bytes = first - at < READ_BYTES ? (size_t)(first - at) : READ_BYTES;
        status = ms_file_read(context, lines->file, lines->path, part.data, bytes, at);
        for (size_t i = 0; !status && i < bytes; i++) *number += part.data[i] == '\n';
        at += bytes;
    }
    ms_buffer_free(context, &part);
    return status;
}

void ms_lines_close(ms_context *context, ms_lines *lines)
{
    ms_file_close(context, lines->file);
    lines->file = NULL;
    ms_buffer_free(context, &lines->held);
}

/* ----------------------------------------------------------------------- JSON */

static const char *kind_of(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER:
    case JSON_REAL: return "a number";
    case JSON_NULL: return "null";
    default: return "a boolean";
    }
}

/* The names of an object's members, as far as they have room. */
static void list_members(const json_t *object, char *out, size_t bytes)
{
    const char *key;
    json_t *value;
    size_t used = 0;
    out[0] = '\0';
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        int more = snprintf(out + used, bytes - used, "%s'%.60s'", used ? ", " : "", key);
        if (more < 0 || used + (size_t)more >= bytes) {
            out[used] = '\0';
            return;
        }
        used += (size_t)more;
    }
}

ms_status ms_line_text(ms_context *context, ms_span line, const char *field, json_t **root,
                       ms_span *text)
{
    char members[300];
    ms_status status = ms_json_parse(context, line.at, ms_span_bytes(line), root);
    if (status == MS_ERROR_CORRUPT) {
        const char *why = strstr(context->error.message, "JSON: ");
        snprintf(members, sizeof members, "%.200s", why ? why + 6 : context->error.message);
        return ms_fail(context, MS_ERROR_CORRUPT, "it is no JSON: %s", members);
    }
    if (status) return status;
    if (!json_is_object(*root))
        return ms_fail(context, MS_ERROR_CORRUPT, "it is %s, and no object", kind_of(*root));
    const json_t *value = json_object_get(*root, field);
    list_members(*root, members, sizeof members);
    if (value == NULL)
        return ms_fail(context, MS_ERROR_CORRUPT, "it has no member '%s'%s%s", field,
                       *members ? ", only " : "", members);
    if (!json_is_string(value))
        return ms_fail(context, MS_ERROR_CORRUPT, "its member '%s' is %s, and no string", field,
                       kind_of(value));
    *text = ms_json_text(value);
    return MS_OK;
}
