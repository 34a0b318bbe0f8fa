/* strided.h: walking a strided loop in chunks, and how work is cut into tiles. For the task files
 * of cpu/. */
#ifndef MOONSHARD_OPS_CPU_STRIDED_H
#define MOONSHARD_OPS_CPU_STRIDED_H

#include "moonshard/cpu_task.h"
#include "ops/loop.h"

#include <string.h>

/* Below this many bytes in all, waking a helper costs more than it saves. */
#define MS_TILES_MIN_BYTES (256 * 1024)
#define MS_TILE_ELEMENTS (64 * 1024)
/* Elements staged at once: a few of these buffers stay in the first-level cache. */
#define MS_CHUNK 512

/* The number of tiles depends on sizes only, so that results never depend on threads. Work that is
 * shared at all has at least 8 tiles, so that 8 threads have something to do, and at most 65536,
 * which bounds the cost of handing them out. */
static inline uint32_t ms_tiles(int64_t elements, uint64_t bytes)
{
    if (bytes < MS_TILES_MIN_BYTES || elements < 8) return elements > 0;
    int64_t tiles = (elements + MS_TILE_ELEMENTS - 1) / MS_TILE_ELEMENTS;
    if (tiles < 8) return 8;
    return tiles > 65536 ? 65536 : (uint32_t)tiles;
}

/* Where tile `index` of `tiles` begins; multiples of 64 elements, so that tiles share no cache line
 * of f32. Rounding up can leave the last tiles empty: they begin where the elements end. What
 * rounding down leaves over belongs to the last tile. */
static inline int64_t ms_tile_begin(int64_t elements, uint32_t tiles, uint32_t index)
{
    if (index >= tiles) return elements;
    int64_t each = (elements / tiles + 63) / 64 * 64, begin = each * index;
    return begin < elements ? begin : elements;
}

/* A position in a loop: coordinates, and each operand's offset in elements. Offsets are kept beside
 * the coordinates, so that a step adds and never multiplies the coordinates again. */
typedef struct ms_cursor {
    int64_t at[MS_DIMS_MAX], offset[MS_LOOP_OPERANDS];
} ms_cursor;

/* The cursor of the element that is `position` steps into the loop, counted in order of the last
 * dimension first. It divides once per dimension, so tiles use it once and then advance. */
static inline void ms_cursor_set(const ms_loop *loop, int64_t position, ms_cursor *cursor)
{
    memset(cursor, 0, sizeof *cursor);
    for (uint32_t d = loop->dims; d-- > 0;) {
        cursor->at[d] = position % loop->shape[d];
        position /= loop->shape[d];
        for (uint32_t k = 0; k < MS_LOOP_OPERANDS; k++)
            cursor->offset[k] += cursor->at[d] * loop->strides[k][d];
    }
}

/* Elements left in the current innermost row. */
static inline int64_t ms_cursor_row(const ms_loop *loop, const ms_cursor *cursor)
{
    return loop->shape[loop->dims - 1] - cursor->at[loop->dims - 1];
}

/* Moves on by `count` elements of the row; at its end to the start of the next row. `count` must
 * not exceed ms_cursor_row. After the last element the first coordinate equals its size, and the
 * cursor must not be used. All operands move, also those that a call does not have: their offsets
 * are not used. */
static inline void ms_cursor_advance(const ms_loop *loop, ms_cursor *cursor, int64_t count)
{
    uint32_t d = loop->dims - 1;
    cursor->at[d] += count;
    for (uint32_t k = 0; k < MS_LOOP_OPERANDS; k++)
        cursor->offset[k] += count * loop->strides[k][d];
    while (cursor->at[d] == loop->shape[d] && d > 0) {
        for (uint32_t k = 0; k < MS_LOOP_OPERANDS; k++)
            cursor->offset[k] += loop->strides[k][d - 1] - loop->shape[d] * loop->strides[k][d];
        cursor->at[d] = 0;
        cursor->at[--d]++;
    }
}

/* Repeats the first element, which is written already, n times in all. Each copy doubles what is
 * there, up to blocks of 4 KiB: memcpy is fast with long blocks, and the source stays in the
 * first-level cache. */
static inline void ms_repeat(void *to, int64_t n, size_t size)
{
    size_t bytes = (size_t)n * size, done = size;
    while (done < bytes) {
        size_t step = done < 4096 ? done : 4096 / size * size;
        if (step > bytes - done) step = bytes - done;
        memcpy((char *)to + done, to, step);
        done += step;
    }
}

/* Copies n elements of `size` bytes (1, 2, 4 or 8); steps in elements. Elements move as unsigned
 * integers, so every bit pattern survives, signalling NaNs included. */
static inline void ms_copy_strided(void *to, int64_t to_step, const void *from, int64_t from_step,
                                   int64_t n, size_t size)
{
#define MS_COPY_AS(type)                                                      \
    {                                                                         \
        type *out = to;                                                       \
        const type *in = from;                                                \
        for (int64_t i = 0; i < n; i++) out[i * to_step] = in[i * from_step]; \
    }
    if (n <= 0) return;
    if (to_step == 1 && from_step == 1) {
        memmove(to, from, (size_t)n * size);
    } else if (to_step == 1 && from_step == 0) {
        memmove(to, from, size);
        ms_repeat(to, n, size);
    } else if (size == 4) MS_COPY_AS(uint32_t)
    else if (size == 2) MS_COPY_AS(uint16_t)
    else if (size == 8) MS_COPY_AS(uint64_t)
    else MS_COPY_AS(uint8_t)
#undef MS_COPY_AS
}

#endif
