/* array.c: memory of the host side, and arrays that grow. All of it comes from the context's
 * table. */
#include "moonshard/base.h"

#include <string.h>

/* Zeroed, so that an object whose making fails half way can be released by its normal function.
 * Alignment 128 keeps two such objects from sharing a cache line or a pair of lines. */
ms_status ms_allocate(ms_context *context, size_t bytes, const char *what, void **out)
{
    const ms_os *os = context->os;
    size_t size = bytes != 0 ? bytes : 1; /* so that NULL always means that there was no memory */
    void *pointer = os->allocate(os->user, size, 128);
    if (pointer == NULL)
        return ms_fail(context, MS_ERROR_MEMORY, "%s: no memory for %zu bytes", what, bytes);
    memset(pointer, 0, size);
    *out = pointer;
    return MS_OK;
}

/* NULL is allowed, so that clean-up code need not know how far the making got. */
void ms_release(ms_context *context, void *pointer)
{
    if (pointer != NULL) context->os->release(context->os->user, pointer);
}

/* New items are zero. Alignment 16 is what reallocate can keep. On failure *items and *capacity are
 * unchanged, so the caller's array stays valid. */
ms_status ms_grow(ms_context *context, void **items, size_t *capacity, size_t need,
                  size_t item_bytes)
{
    const ms_os *os = context->os;
    if (need <= *capacity) return MS_OK;
    /* Half as much again: the sum of all copies stays below three times the final size. */
    size_t grown = *capacity + *capacity / 2;
    if (grown < *capacity || grown < need) grown = need;
    /* Short lists do not grow one by one. */
    if (grown < 8) grown = 8;
    size_t bytes;
    if (!ms_multiply(grown, item_bytes, &bytes))
        return ms_fail(context, MS_ERROR_MEMORY,
                       "an array of %zu items of %zu bytes is larger than any memory", need,
                       item_bytes);
    void *pointer = *items == NULL ? os->allocate(os->user, bytes, 16)
                                   : os->reallocate(os->user, *items, bytes);
    if (pointer == NULL)
        return ms_fail(context, MS_ERROR_MEMORY, "no memory for an array of %zu bytes", bytes);
    memset((char *)pointer + *capacity * item_bytes, 0, bytes - *capacity * item_bytes);
    *items = pointer;
    *capacity = grown;
    return MS_OK;
}
