/* buffer.h: bytes that grow. */
#ifndef MOONSHARD_TEXT_BUFFER_H
#define MOONSHARD_TEXT_BUFFER_H

#include <string.h>

#include "moonshard/base.h"
#include "text/utf8.h"

typedef struct ms_buffer {
    uint8_t *data;
    size_t length, capacity;
} ms_buffer;

/* Makes room for so many more bytes. */
static inline ms_status ms_buffer_reserve(ms_context *context, ms_buffer *buffer, size_t more)
{
    size_t need = buffer->length + more;
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
