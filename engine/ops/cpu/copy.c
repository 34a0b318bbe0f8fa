/* copy.c: tasks that copy and fill strided memory, element by element, row by row or in transposed
 * blocks.
 *
 * A kernel of another device must move bits unchanged and write only the positions of the loop. A
 * source that is contiguous along another dimension than the target is the case that needs care:
 * each side should touch whole cache lines or memory segments. */
#include "ops/copy_args.h"

#include "ops/backend.h"
#include "ops/cpu/strided.h"

/* A block of 16 x 16 f32 is 1 KiB, so source lines, buffer and target lines stay in the first-level
 * cache together. */
#define BLOCK 16 /* side of a transposed block: 16 rows of one cache line of f32 */

/* One copy; operand 0 of the loop is the target, operand 1 the source. Source and target never
 * overlap unless they are the same window (ms_copy_into takes care), so tiles may run in any
 * order. */
typedef struct copy_work {
    const ms_copy_args *args;
    int64_t count;
    uint32_t tiles;
    /* The dimension along which the source is contiguous, if that is not the innermost; else -1. */
    int32_t down;
} copy_work;

/* --------------------------------------------------------------- row by row */

/* A tile may begin and end within a row. The loop was collapsed by the host (ms_loop_collapse):
 * rows are as long as the strides allow, and contiguous copies are one row that tiles divide. */
static void row_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const copy_work *work = context;
    const ms_copy_args *args = work->args;
    const ms_loop *loop = &args->loop;
    uint32_t inner = loop->dims - 1;
    int64_t at = ms_tile_begin(work->count, work->tiles, index),
            end = ms_tile_begin(work->count, work->tiles, index + 1), size = args->size;
    ms_cursor cursor;
    ms_cursor_set(loop, at, &cursor);
    while (at < end) {
        int64_t n = ms_cursor_row(loop, &cursor);
        if (n > end - at) n = end - at;
        ms_copy_strided((char *)args->to + cursor.offset[0] * size, loop->strides[0][inner],
                        (const char *)args->from + cursor.offset[1] * size, loop->strides[1][inner],
                        n, args->size);
        ms_cursor_advance(loop, &cursor, n);
        at += n;
    }
}

/* --------------------------------------------------------------- transposed */

/* Defines to[r * to_row + c] = from[r + c * from_column] for one element size. A block of 16 x 16
 * goes through a buffer on the stack: both tensors are then read and written along cache lines,
 * where a plain loop would touch one element per line of one of them. */
#define TRANSPOSE(type, name)                                                                \
    static void name(type *to, int64_t to_row, const type *from, int64_t from_column,        \
                     int64_t rows, int64_t columns)                                          \
    {                                                                                        \
        type block[BLOCK][BLOCK];                                                            \
        for (int64_t c = 0; c < columns; c += BLOCK) {                                       \
            int64_t width = columns - c < BLOCK ? columns - c : BLOCK;                       \
            for (int64_t i = 0; i < width; i++)                                              \
                memcpy(block[i], from + (c + i) * from_column, (size_t)rows * sizeof(type)); \
            for (int64_t r = 0; r < rows; r++)                                               \
                for (int64_t i = 0; i < width; i++) to[r * to_row + c + i] = block[i][r];    \
        }                                                                                    \
    }
TRANSPOSE(uint8_t, transpose_1)
TRANSPOSE(uint16_t, transpose_2)
TRANSPOSE(uint32_t, transpose_4)
TRANSPOSE(uint64_t, transpose_8)

/* Copies one strip: BLOCK rows, all columns, at one position of the outer dimensions, which are all
 * but `down` and the innermost. Dimensions between are decomposed from `outer` by division once for
 * each strip, which a strip of at least 16 rows pays for. */
static void strip(const copy_work *work, int64_t index)
{
    const ms_copy_args *args = work->args;
    const ms_loop *loop = &args->loop;
    uint32_t inner = loop->dims - 1, down = (uint32_t)work->down;
    int64_t strips = (loop->shape[down] + BLOCK - 1) / BLOCK, size = args->size;
    int64_t row = index % strips * BLOCK, outer = index / strips;
    int64_t to_offset = row * loop->strides[0][down], from_offset = row;
    for (uint32_t d = inner; d-- > 0;) {
        if (d == down) continue;
        int64_t at = outer % loop->shape[d];
        outer /= loop->shape[d];
        to_offset += at * loop->strides[0][d];
        from_offset += at * loop->strides[1][d];
    }
    int64_t rows = loop->shape[down] - row < BLOCK ? loop->shape[down] - row : BLOCK;
    void *to = (char *)args->to + to_offset * size;
    const void *from = (const char *)args->from + from_offset * size;
    int64_t to_row = loop->strides[0][down], column = loop->strides[1][inner],
            columns = loop->shape[inner];
    if (size == 4) transpose_4(to, to_row, from, column, rows, columns);
    else if (size == 2) transpose_2(to, to_row, from, column, rows, columns);
    else if (size == 8) transpose_8(to, to_row, from, column, rows, columns);
    else transpose_1(to, to_row, from, column, rows, columns);
}

/* The unit of tiles of a transposed copy. The last strip of each outer position may have fewer than
 * BLOCK rows. */
static int64_t strips_of(const copy_work *work)
{
    const ms_loop *loop = &work->args->loop;
    int64_t rows = loop->shape[work->down], columns = loop->shape[loop->dims - 1];
    return work->count / (rows * columns) * ((rows + BLOCK - 1) / BLOCK);
}

/* Strips write different rows of the target, so two tiles never share an element. */
static void transpose_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const copy_work *work = context;
    int64_t strips = strips_of(work), begin = strips * index / work->tiles,
            end = strips * (index + 1) / work->tiles;
    for (int64_t i = begin; i < end; i++) strip(work, i);
}

/* The dimension to transpose with, or -1. Blocks pay where the target is contiguous along the
 * innermost dimension and the source along another one, and both have at least 4 elements. Shorter
 * dimensions would leave most of a block empty. ms_loop_collapse has put the dimension along which
 * the target moves least innermost. */
static int32_t transposed_dimension(const ms_loop *loop)
{
    uint32_t inner = loop->dims - 1;
    if (loop->strides[0][inner] != 1 || loop->strides[1][inner] <= 1 || loop->shape[inner] < 4)
        return -1;
    for (uint32_t d = 0; d < inner; d++)
        if (loop->strides[1][d] == 1 && loop->shape[d] >= 4) return (int32_t)d;
    return -1;
}

/* A source that is contiguous along another dimension is transposed in blocks; all other copies go
 * row by row. A copy is bound by memory: one read and one write of each byte, which is what the
 * number of tiles is made from. */
static ms_task_result copy_run(ms_run *run, void *arguments)
{
    const ms_copy_args *args = arguments;
    copy_work work = { .args = args,
                       .count = ms_loop_count(&args->loop),
                       .down = transposed_dimension(&args->loop) };
    work.tiles = ms_tiles(work.count, (uint64_t)work.count * args->size * 2);
    if (work.down >= 0) {
        int64_t strips = strips_of(&work);
        if (strips < work.tiles) work.tiles = (uint32_t)strips;
    }
    ms_run_tiles(run, work.tiles, work.down >= 0 ? transpose_tile : row_tile, &work);
    return MS_TASK_DONE;
}

/* ------------------------------------------------------------------ filling */

/* One fill. Every position gets the same bits, so the order of the dimensions does not matter. */
typedef struct fill_work {
    const ms_fill_args *args;
    int64_t count;
    uint32_t tiles;
} fill_work;

/* The low bytes of `bits` are one element. Contiguous zeros take memset, the fastest store. memset
 * repeats one byte, so it serves only zeros here; another constant is repeated by doubling
 * (ms_repeat). */
static void fill_row(void *to, int64_t step, uint64_t bits, uint8_t size, int64_t n)
{
    uint8_t one[8];
    switch (size) {
    case 1: *one = (uint8_t)bits; break;
    case 2: memcpy(one, &(uint16_t){ (uint16_t)bits }, 2); break;
    case 4: memcpy(one, &(uint32_t){ (uint32_t)bits }, 4); break;
    default: memcpy(one, &bits, 8);
    }
    if (bits == 0 && step == 1) memset(to, 0, (size_t)n * size);
    else if (step == 1) ms_copy_strided(to, 1, one, 0, n, size);
    else
        for (int64_t i = 0; i < n; i++) memcpy((char *)to + i * step * size, one, size);
}

/* Only positions of the loop are written: memory between the elements of a strided target keeps
 * what it holds. */
static void fill_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const fill_work *work = context;
    const ms_fill_args *args = work->args;
    const ms_loop *loop = &args->loop;
    int64_t at = ms_tile_begin(work->count, work->tiles, index),
            end = ms_tile_begin(work->count, work->tiles, index + 1);
    ms_cursor cursor;
    ms_cursor_set(loop, at, &cursor);
    while (at < end) {
        int64_t n = ms_cursor_row(loop, &cursor);
        if (n > end - at) n = end - at;
        fill_row((char *)args->to + cursor.offset[0] * args->size, loop->strides[0][loop->dims - 1],
                 args->bits, args->size, n);
        ms_cursor_advance(loop, &cursor, n);
        at += n;
    }
}

static ms_task_result fill_run(ms_run *run, void *arguments)
{
    const ms_fill_args *args = arguments;
    fill_work work = { .args = args, .count = ms_loop_count(&args->loop) };
    work.tiles = ms_tiles(work.count, (uint64_t)work.count * args->size);
    ms_run_tiles(run, work.tiles, fill_tile, &work);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_copy = { "copy", copy_run, sizeof(ms_copy_args), MS_KIND_COPY };
const ms_task ms_cpu_fill = { "fill", fill_run, sizeof(ms_fill_args), MS_KIND_COMPUTE };
