/* buffer.h: bytes that grow. */
#ifndef MOONSHARD_TEXT_BUFFER_H
#define MOONSHARD_TEXT_BUFFER_H

#include <string.h>

#include "moonshard/base.h"
#include "text/utf8.h"

typedef struct ms_buffer {
    uint8_t *data;
    size_t length, capacity;
    size_t limit; /* of the length; 0: none */
} ms_buffer;

/* The most bytes that the rules of a file may make of so many: rules that replace, one after
 * another, could make any number of them. */
static inline size_t ms_rewritten_max(size_t bytes) { return 64 * bytes + ((size_t)1 << 20); }

/* Makes room for so many more bytes. Beyond the limit: MS_ERROR_UNSUPPORTED. */
static inline ms_status ms_buffer_reserve(ms_context *context, ms_buffer *buffer, size_t more)
{
    size_t need = buffer->length + more;
    if (buffer->limit && need > buffer->limit)
        return ms_fail(
            context, MS_ERROR_UNSUPPORTED,
            "the tokenizer's rules make more than %zu bytes of a text: 64 times its bytes "
            "and 1 MiB",
            buffer->limit);
    if (need <= buffer->capacity) return MS_OK;
    return ms_grow(context, (void **)&buffer->data, &buffer->capacity, need, 1);
}

static inline ms_status ms_buffer_add(ms_context *context, ms_buffer *buffer, const void *data,
                                      size_t bytes)
{
    ms_status status = ms_buffer_reserve(context, buffer, bytes);
    if (status || bytes == 0) return status;
    memcpy(buffer->data + buffer->length, data, bytes);
    buffer->length += bytes;
    return MS_OK;
}

/* All of it, until it changes. */
static inline ms_span ms_buffer_span(const ms_buffer *buffer, bool first)
{
    const uint8_t *at = buffer->data; /* may be NULL if there is nothing */
    return (ms_span){ .at = at, .end = buffer->length ? at + buffer->length : at, .first = first };
}

static inline void ms_buffer_free(ms_context *context, ms_buffer *buffer)
{
    ms_release(context, buffer->data);
    *buffer = (ms_buffer){ 0 };
}

#endif
