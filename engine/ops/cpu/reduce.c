/* reduce.c: tasks that reduce, find positions, sum up as they go, and count.
 *
 * What is added to what depends on shapes only: blocks of a row in f32 (64 partial sums), blocks in
 * f64 in order, and parts of a very long row, which different threads may take, in f64 in order of
 * position.
 *
 * A kernel of another device may add in another order, if that depends on shapes only. It must keep
 * the edge cases: a sum over nothing is 0, NaN wins over every extreme, the lowest position wins
 * among equals, and integers wrap. Every kind reads its input once, so memory bounds its speed. */
#include "ops/cpu/reduce.h"

#include <math.h>

#include "ops/backend.h"
#include "ops/cpu/convert.h"
#include "ops/cpu/strided.h"

#define PART (64 * 1024) /* elements of a row that one thread takes */
#define WIDTH 512        /* columns that are reduced together */

/* How one reduction is cut. A unit is what one tile step computes: a part of a row, or a part of a
 * strip of columns. With several parts per result, `partial` holds their values and `finish` joins
 * them. The cut decides the order of additions, so it follows from the shape alone. */
typedef struct reduce_work {
    const ms_reduce_args *args;
    const ms_reduce_kernels *kernels;
    const ms_convert_kernels *convert;
    double *partial; /* [unit]; NULL where a unit is a whole result */
    int64_t units, parts, part_rows;
    uint32_t tiles;
    bool integers;
} reduce_work;

/* A block of a row in the computing type, on the stack: 8 KiB of f32 or 16 KiB of i64, which stay
 * in the first-level cache. */
typedef union block {
    float real[MS_REDUCE_BLOCK];
    int64_t whole[MS_REDUCE_BLOCK];
} block;

/* n elements of a dtype, `stride` apart, as contiguous f32. The result points at the input itself
 * where it is contiguous f32, else at `to`, which has room for a block. The copy of a strided block
 * goes through `raw`, because conversions read contiguous memory only. */
static const float *real_block(const ms_convert_kernels *convert, ms_dtype dtype, const void *from,
                               int64_t stride, int64_t n, float *to)
{
    if (stride == 1 && dtype == MS_F32) return from;
    if (stride == 1) {
        convert->to_f32[dtype](to, from, (size_t)n);
        return to;
    }
    uint64_t raw[MS_REDUCE_BLOCK];
    ms_copy_strided(raw, 1, from, stride, n, ms_dtype_bytes(dtype));
    convert->to_f32[dtype](to, raw, (size_t)n);
    return to;
}

/* As real_block, in i64. i64 holds every value of every integer dtype, and bool as 0 and 1. */
static const int64_t *whole_block(const ms_convert_kernels *convert, ms_dtype dtype,
                                  const void *from, int64_t stride, int64_t n, int64_t *to)
{
    if (stride == 1 && dtype == MS_I64) return from;
    uint64_t raw[MS_REDUCE_BLOCK];
    ms_copy_strided(raw, 1, from, stride, n, ms_dtype_bytes(dtype));
    convert->to_i64[dtype](to, raw, (size_t)n);
    return to;
}

/* The first element of a row. Rows are numbered by (outer, inner), inner changing faster. The
 * position in the results is outer * inner + inner's index, so `row` is also the place of the row's
 * result. */
static const void *row_start(const ms_rows *rows, const void *in, ms_dtype dtype, int64_t row)
{
    int64_t at = row / rows->inner * rows->outer_stride + row % rows->inner * rows->inner_stride;
    return (const char *)in + at * (int64_t)ms_dtype_bytes(dtype);
}

/* Strides are in elements, addresses in bytes. */
static const void *step(const void *from, int64_t elements, ms_dtype dtype)
{
    return (const char *)from + elements * (int64_t)ms_dtype_bytes(dtype);
}

/* -------------------------------------------------------------- f32 results */

/* The value that changes nothing when it is joined; also the result over no elements. For sums of
 * powers it is 0, too, since every term is. */
static double identity(uint8_t kind)
{
    if (kind == MS_REDUCE_GREATEST) return -INFINITY;
    return kind == MS_REDUCE_LEAST ? INFINITY : 0;
}

/* Joins two partial results. NaN wins over every extreme, as it does inside the kernels. The last
 * line picks the lesser for MS_REDUCE_LEAST and the greater otherwise; GREATEST_ABS has its
 * absolute values from the kernel. */
static double joined(uint8_t kind, double a, double b)
{
    if (kind < MS_REDUCE_GREATEST) return a + b;
    if (a != a || b != b) return NAN;
    return (kind == MS_REDUCE_LEAST) == (a < b) ? a : b;
}

/* Writes one result: divided for means, then the root for norms. sqrt is exact to the last bit,
 * which pow is not, so the usual norm does not use pow. The value is f64 until here, so means and
 * norms of 16-bit tensors are rounded to f32 and then once to their dtype. */
static void put(const reduce_work *work, int64_t index, double value)
{
    const ms_reduce_args *args = work->args;
    value /= args->divisor;
    if (args->root == 2) value = sqrt(value);
    else if (args->root != 1) value = pow(value, 1 / args->root);
    float rounded = (float)value;
    work->convert->from_f32[args->out_dtype](
        (char *)args->out + index * (int64_t)ms_dtype_bytes((ms_dtype)args->out_dtype), &rounded,
        1);
}

/* Elements begin .. end-1 of a row, block by block: f32 inside a block, f64 between blocks. Reading
 * memory bounds the speed for sums and extremes; only sums of powers are bound by arithmetic (a
 * logarithm and an exponential for each element). */
static double reduce_row(const reduce_work *work, int64_t row, int64_t begin, int64_t end)
{
    const ms_reduce_args *args = work->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    const void *from = row_start(&args->rows, args->in, dtype, row);
    double total = identity(args->kind);
    for (int64_t at = begin; at < end; at += MS_REDUCE_BLOCK) {
        float stage[MS_REDUCE_BLOCK], second_stage[MS_REDUCE_BLOCK];
        int64_t n = end - at < MS_REDUCE_BLOCK ? end - at : MS_REDUCE_BLOCK;
        const float *x = real_block(work->convert, dtype, step(from, at * args->rows.stride, dtype),
                                    args->rows.stride, n, stage),
                    *y = NULL;
        if (args->second != NULL)
            y = real_block(work->convert, dtype,
                           step(args->second, at * args->second_stride, dtype), args->second_stride,
                           n, second_stage);
        total = joined(args->kind, total,
                       work->kernels->row[args->kind](x, y, (size_t)n, (float)args->power));
    }
    return total;
}

/* Units are whole rows, or parts of PART elements where rows are long. A unit's place says what it
 * adds, so the tile that computes it does not matter. Parts of one row may go to different tiles;
 * each writes a place of its own in `partial`, and finish adds them in order. */
static void row_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const reduce_work *work = context;
    int64_t begin = work->units * index / work->tiles,
            end = work->units * (index + 1) / work->tiles, n = work->args->rows.n;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t first = unit % work->parts * PART,
                last = work->partial == NULL || first + PART > n ? n : first + PART;
        double value = reduce_row(work, unit / work->parts, first, last);
        if (work->partial != NULL) work->partial[unit] = value;
        else put(work, unit, value);
    }
}

/* Rows begin .. end-1 of `width` neighbouring columns, into totals. f32 sums cover MS_REDUCE_ROWS
 * rows and are then added to the f64 totals. Other dtypes are converted four rows at a time, which
 * is what the kernel joins before it touches its sums: the order of additions is the same for all
 * dtypes. A row of 512 columns is 2 KiB of f32, so the totals, the sums and the rows that are being
 * added stay in the first-level cache. */
static void reduce_columns(const reduce_work *work, const void *from, int64_t begin, int64_t end,
                           int64_t width, double *totals)
{
    const ms_reduce_args *args = work->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    void (*column)(float *, const float *, int64_t, size_t, size_t, float) =
        work->kernels->column[args->kind];
    for (int64_t i = 0; i < width; i++) totals[i] = identity(args->kind);
    for (int64_t at = begin; at < end; at += MS_REDUCE_ROWS) {
        /* Extremes start at an infinity (those of |x| at 0), which every element replaces; sums
         * start at 0. */
        float sums[WIDTH];
        int64_t rows = end - at < MS_REDUCE_ROWS ? end - at : MS_REDUCE_ROWS;
        const void *x = step(from, at * args->rows.stride, dtype);
        for (int64_t i = 0; i < width; i++) sums[i] = (float)identity(args->kind);
        if (dtype == MS_F32) {
            column(sums, x, args->rows.stride, (size_t)rows, (size_t)width, (float)args->power);
        } else {
            float stage[4 * WIDTH]; /* four rows: what the kernel adds at once */
            for (int64_t r = 0; r < rows; r += 4) {
                int64_t some = rows - r < 4 ? rows - r : 4;
                for (int64_t k = 0; k < some; k++)
                    work->convert->to_f32[dtype](stage + k * width,
                                                 step(x, (r + k) * args->rows.stride, dtype),
                                                 (size_t)width);
                column(sums, stage, width, (size_t)some, (size_t)width, (float)args->power);
            }
        }
        if (args->kind < MS_REDUCE_GREATEST)
            for (int64_t i = 0; i < width; i++) totals[i] += sums[i];
        else
            for (int64_t i = 0; i < width; i++) totals[i] = joined(args->kind, totals[i], sums[i]);
    }
}

/* Units are (outer, WIDTH columns, part of the rows); partial is then [part][outer, inner]. Reading
 * whole rows of a strip uses every byte of a cache line, where walking down one column would use
 * one element of each line. */
static void column_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const reduce_work *work = context;
    const ms_rows *rows = &work->args->rows;
    int64_t begin = work->units * index / work->tiles,
            end = work->units * (index + 1) / work->tiles,
            strips = (rows->inner + WIDTH - 1) / WIDTH;
    for (int64_t unit = begin; unit < end; unit++) {
        double totals[WIDTH];
        int64_t part = unit % work->parts, strip = unit / work->parts % strips,
                outer = unit / work->parts / strips, column = strip * WIDTH;
        int64_t width = rows->inner - column < WIDTH ? rows->inner - column : WIDTH;
        int64_t first = part * work->part_rows,
                last = first + work->part_rows < rows->n ? first + work->part_rows : rows->n;
        const void *from =
            step(work->args->in, outer * rows->outer_stride + column, (ms_dtype)work->args->dtype);
        reduce_columns(work, from, first, last, width, totals);
        int64_t result = outer * rows->inner + column;
        for (int64_t i = 0; i < width; i++) {
            if (work->partial != NULL)
                work->partial[part * rows->outer * rows->inner + result + i] = totals[i];
            else put(work, result + i, totals[i]);
        }
    }
}

/* Joins the parts of each result in order of position. In `partial` the parts of one result are
 * `far` apart, and results are `near` apart. It runs on the thread of the task after all tiles, and
 * there is one number for each part, so it is not divided. */
static void finish(const reduce_work *work, int64_t near, int64_t far)
{
    int64_t results = work->args->rows.outer * work->args->rows.inner;
    for (int64_t i = 0; i < results; i++) {
        double value = identity(work->args->kind);
        for (int64_t part = 0; part < work->parts; part++)
            value = joined(work->args->kind, value, work->partial[i * near + part * far]);
        put(work, i, value);
    }
}

/* ---------------------------------------------------------- integer results */

/* Integers add exactly and wrap, so order does not matter; the sum is unsigned because signed
 * overflow is undefined in C. All three results are computed in one loop, which the compiler
 * vectorises, and one of them is used: reading the row costs more. */
static int64_t reduce_row_whole(const reduce_work *work, int64_t row)
{
    const ms_reduce_args *args = work->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    const void *from = row_start(&args->rows, args->in, dtype, row);
    uint64_t sum = 0;
    int64_t greatest = INT64_MIN, least = INT64_MAX;
    for (int64_t at = 0; at < args->rows.n; at += MS_REDUCE_BLOCK) {
        int64_t stage[MS_REDUCE_BLOCK],
            n = args->rows.n - at < MS_REDUCE_BLOCK ? args->rows.n - at : MS_REDUCE_BLOCK;
        const int64_t *x =
            whole_block(work->convert, dtype, step(from, at * args->rows.stride, dtype),
                        args->rows.stride, n, stage);
        for (int64_t i = 0; i < n; i++) {
            sum += (uint64_t)x[i];
            greatest = x[i] > greatest ? x[i] : greatest;
            least = x[i] < least ? x[i] : least;
        }
    }
    /* Over nothing: any is false, every is true. */
    if (args->rows.n == 0 && args->kind != MS_REDUCE_ADD) return args->kind == MS_REDUCE_LEAST;
    if (args->kind == MS_REDUCE_ADD) return (int64_t)sum;
    return args->kind == MS_REDUCE_GREATEST ? greatest : least;
}

/* Integers have no parts: a unit is a whole row, however long, and columns are walked with their
 * stride. */
static void whole_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const reduce_work *work = context;
    ms_dtype dtype = (ms_dtype)work->args->out_dtype;
    for (int64_t row = work->units * index / work->tiles;
         row < work->units * (index + 1) / work->tiles; row++) {
        int64_t value = reduce_row_whole(work, row);
        work->convert->from_i64[dtype](
            (char *)work->args->out + row * (int64_t)ms_dtype_bytes(dtype), &value, 1);
    }
}

/* ------------------------------------------------------------ the reduction */

/* No more tiles than units; no units, no tiles, as nothing has to be written. */
static uint32_t unit_tiles(int64_t units, int64_t elements, uint64_t bytes)
{
    uint32_t tiles = ms_tiles(elements, bytes);
    if (tiles == 0) tiles = 1;
    return units < tiles ? (uint32_t)units : tiles;
}

/* Decides how the work is cut, from the shape alone; true for columns. Neighbouring columns are
 * reduced together where they are contiguous and the reduced dimension is not. Few columns of many
 * rows are also split by rows, so that several threads have work. Parts of rows are multiples of
 * MS_REDUCE_ROWS, so that cutting does not change which rows are added in f32 first. About 8 parts
 * in all are made: enough for the threads of a small machine, and few partial results to join. */
static bool cut(reduce_work *work)
{
    const ms_rows *rows = &work->args->rows;
    int64_t results = rows->outer * rows->inner, elements = results * rows->n;
    uint64_t bytes = (uint64_t)elements * ms_dtype_bytes((ms_dtype)work->args->dtype);
    bool columns =
        !work->integers && rows->inner > 1 && rows->stride != 1 && rows->inner_stride == 1;
    work->parts = 1;
    work->part_rows = rows->n;
    if (columns) {
        int64_t strips = rows->outer * ((rows->inner + WIDTH - 1) / WIDTH);
        if (bytes >= MS_TILES_MIN_BYTES && strips < 8 && rows->n >= 16 * MS_REDUCE_ROWS) {
            work->part_rows =
                (rows->n * strips / 8 + MS_REDUCE_ROWS - 1) / MS_REDUCE_ROWS * MS_REDUCE_ROWS;
            work->parts = (rows->n + work->part_rows - 1) / work->part_rows;
        }
        work->units = strips * work->parts;
    } else {
        if (!work->integers && rows->n > PART) work->parts = (rows->n + PART - 1) / PART;
        work->units = results * work->parts;
    }
    work->tiles = unit_tiles(work->units, elements, bytes);
    return columns;
}

/* The scratch for partial results belongs to the thread that runs the task; helpers write their
 * units' places in it. `partial` needs no clearing, since every unit writes its place. */
static ms_task_result reduce_run(ms_run *run, void *arguments)
{
    const ms_reduce_args *args = arguments;
    reduce_work work = { .args = args,
                         .kernels = ms_reduce_kernels_for(ms_run_isa(run)),
                         .convert = ms_convert_kernels_for(ms_run_isa(run)),
                         .integers = !ms_dtype_is_float((ms_dtype)args->dtype) };
    bool columns = cut(&work);
    int64_t results = args->rows.outer * args->rows.inner;
    if (work.parts > 1) {
        work.partial = ms_thread_scratch(ms_run_thread(run), 0,
                                         (size_t)(results * work.parts) * sizeof *work.partial);
        if (work.partial == NULL) {
            ms_run_fail(run, MS_ERROR_MEMORY, "no memory for %lld partial sums",
                        (long long)results * work.parts);
            return MS_TASK_FAILED;
        }
    }
    if (work.integers) ms_run_tiles(run, work.tiles, whole_tile, &work);
    else ms_run_tiles(run, work.tiles, columns ? column_tile : row_tile, &work);
    if (work.partial != NULL && columns) finish(&work, 1, results);
    else if (work.partial != NULL) finish(&work, work.parts, 1);
    return MS_TASK_DONE;
}

/* ------------------------------------------------- position of the greatest */

/* One search for the positions of the greatest (or least) elements; a unit is a whole row. */
typedef struct arg_work {
    const ms_reduce_arg_args *args;
    const ms_reduce_kernels *kernels;
    const ms_convert_kernels *convert;
    int64_t rows;
    uint32_t tiles;
} arg_work;

/* Finds the position of the greatest (or least) element. Blocks are reduced first, which
 * vectorises; only a block with a better value is searched. The lowest position wins, because a
 * later block must be strictly better. The first NaN wins over everything and ends the search. A
 * row that is empty never gets here: the operator refuses it. The search of a block is a second
 * read of data that is in the first-level cache. */
static int64_t find_real(const arg_work *work, const void *from)
{
    const ms_reduce_arg_args *args = work->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    uint8_t kind = args->least ? MS_REDUCE_LEAST : MS_REDUCE_GREATEST;
    float best = 0;
    int64_t found = -1;
    for (int64_t at = 0; at < args->rows.n && (found < 0 || best == best); at += MS_REDUCE_BLOCK) {
        float stage[MS_REDUCE_BLOCK];
        int64_t n = args->rows.n - at < MS_REDUCE_BLOCK ? args->rows.n - at : MS_REDUCE_BLOCK,
                i = 0;
        const float *x = real_block(work->convert, dtype, step(from, at * args->rows.stride, dtype),
                                    args->rows.stride, n, stage);
        float here = work->kernels->row[kind](x, NULL, (size_t)n, 0);
        if (found >= 0 && here == here && !(args->least ? here < best : here > best)) continue;
        while (i < n - 1 && !(here == here ? x[i] == here : x[i] != x[i])) i++;
        best = here;
        found = at + i;
    }
    return found;
}

/* The same for integers, element by element: there is no NaN, and the strict comparison keeps the
 * lowest position. */
static int64_t find_whole(const arg_work *work, const void *from)
{
    const ms_reduce_arg_args *args = work->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    int64_t best = 0, found = -1;
    for (int64_t at = 0; at < args->rows.n; at += MS_REDUCE_BLOCK) {
        int64_t stage[MS_REDUCE_BLOCK],
            n = args->rows.n - at < MS_REDUCE_BLOCK ? args->rows.n - at : MS_REDUCE_BLOCK;
        const int64_t *x =
            whole_block(work->convert, dtype, step(from, at * args->rows.stride, dtype),
                        args->rows.stride, n, stage);
        for (int64_t i = 0; i < n; i++) {
            if (found >= 0 && !(args->least ? x[i] < best : x[i] > best)) continue;
            best = x[i];
            found = at + i;
        }
    }
    return found;
}

/* Positions are i64 whatever the dtype of the input, and count from 0 along the row. */
static void arg_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const arg_work *work = context;
    ms_dtype dtype = (ms_dtype)work->args->dtype;
    for (int64_t row = work->rows * index / work->tiles;
         row < work->rows * (index + 1) / work->tiles; row++) {
        const void *from = row_start(&work->args->rows, work->args->in, dtype, row);
        work->args->out[row] =
            ms_dtype_is_float(dtype) ? find_real(work, from) : find_whole(work, from);
    }
}

/* Rows are not divided: an argmax over one long row runs on one thread. */
static ms_task_result reduce_arg_run(ms_run *run, void *arguments)
{
    const ms_reduce_arg_args *args = arguments;
    arg_work work = { args, ms_reduce_kernels_for(ms_run_isa(run)),
                      ms_convert_kernels_for(ms_run_isa(run)), args->rows.outer * args->rows.inner,
                      0 };
    work.tiles =
        unit_tiles(work.rows, work.rows * args->rows.n,
                   (uint64_t)(work.rows * args->rows.n) * ms_dtype_bytes((ms_dtype)args->dtype));
    ms_run_tiles(run, work.tiles, arg_tile, &work);
    return MS_TASK_DONE;
}

/* ---------------------------------------------------------- cumulative sums */

/* Rows of a cumulative sum are independent of each other; within a row the work is serial. */
typedef struct cumsum_work {
    const ms_cumsum_args *args;
    const ms_convert_kernels *convert;
    int64_t rows;
    uint32_t tiles;
} cumsum_work;

/* One row, block by block. The running sum is f64, whose error over a long row stays below that of
 * one f32 addition. A reverse sum walks blocks and elements from the end. The copy into `sums`
 * comes first, so the output may be the input. A parallel scan adds in another order, so its
 * results may differ in the last bits. */
static void cumsum_row(const cumsum_work *work, int64_t row)
{
    const ms_cumsum_args *args = work->args;
    const ms_rows *rows = &args->rows;
    ms_dtype dtype = (ms_dtype)args->dtype, out_dtype = (ms_dtype)args->out_dtype;
    bool real = ms_dtype_is_float(dtype);
    size_t size = ms_dtype_bytes(out_dtype);
    const void *from = row_start(rows, args->in, dtype, row);
    char *to = (char *)args->out
               + (row / rows->inner * rows->n * rows->inner + row % rows->inner) * (int64_t)size;
    double real_sum = 0;
    uint64_t whole_sum = 0;
    for (int64_t done = 0; done < rows->n; done += MS_REDUCE_BLOCK) {
        int64_t n = rows->n - done < MS_REDUCE_BLOCK ? rows->n - done : MS_REDUCE_BLOCK;
        int64_t at = args->reverse ? rows->n - done - n : done;
        block sums;
        uint64_t raw[MS_REDUCE_BLOCK];
        const void *x = step(from, at * rows->stride, dtype);
        if (real)
            memmove(sums.real, real_block(work->convert, dtype, x, rows->stride, n, sums.real),
                    (size_t)n * sizeof(float));
        else
            memmove(sums.whole, whole_block(work->convert, dtype, x, rows->stride, n, sums.whole),
                    (size_t)n * sizeof(int64_t));
        /* Unsigned sums wrap, as those of integers do everywhere in the engine; signed overflow
         * would be undefined. */
        for (int64_t k = 0; k < n; k++) {
            int64_t i = args->reverse ? n - 1 - k : k;
            if (real) sums.real[i] = (float)(real_sum += sums.real[i]);
            else sums.whole[i] = (int64_t)(whole_sum += (uint64_t)sums.whole[i]);
        }
        if (real) work->convert->from_f32[out_dtype](raw, sums.real, (size_t)n);
        else work->convert->from_i64[out_dtype](raw, sums.whole, (size_t)n);
        ms_copy_strided(to + at * rows->inner * (int64_t)size, rows->inner, raw, 1, n, size);
    }
}

static void cumsum_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const cumsum_work *work = context;
    for (int64_t row = work->rows * index / work->tiles;
         row < work->rows * (index + 1) / work->tiles; row++)
        cumsum_row(work, row);
}

/* An element counts 8 bytes for the number of tiles: the chain of f64 additions costs more than the
 * load. */
static ms_task_result cumsum_run(ms_run *run, void *arguments)
{
    const ms_cumsum_args *args = arguments;
    cumsum_work work = { args, ms_convert_kernels_for(ms_run_isa(run)),
                         args->rows.outer * args->rows.inner, 0 };
    work.tiles =
        unit_tiles(work.rows, work.rows * args->rows.n, (uint64_t)(work.rows * args->rows.n) * 8);
    ms_run_tiles(run, work.tiles, cumsum_tile, &work);
    return MS_TASK_DONE;
}

/* ---------------------------------------------------------------- histogram */

/* Each tile counts in bins of its own, so that counting needs no atomics. counts is [tiles][bins],
 * in scratch of the thread that runs the task. */
typedef struct histogram_work {
    const ms_histogram_args *args;
    const ms_convert_kernels *convert;
    int64_t *counts;
    uint32_t tiles;
} histogram_work;

/* The test is written so that NaN fails it. The product may round up to `bins` for values next to
 * `high`, hence the last bin's bound. A value equal to `high` counts in the last bin. Values
 * outside are counted nowhere. */
static void histogram_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const histogram_work *work = context;
    const ms_histogram_args *args = work->args;
    int64_t *counts = work->counts + (int64_t)index * args->bins;
    int64_t begin = ms_tile_begin(args->count, work->tiles, index),
            end = ms_tile_begin(args->count, work->tiles, index + 1);
    double scale = (double)args->bins / (args->high - args->low);
    memset(counts, 0, (size_t)args->bins * sizeof *counts);
    for (int64_t at = begin; at < end; at += MS_REDUCE_BLOCK) {
        float stage[MS_REDUCE_BLOCK];
        int64_t n = end - at < MS_REDUCE_BLOCK ? end - at : MS_REDUCE_BLOCK;
        const float *x = real_block(work->convert, (ms_dtype)args->dtype,
                                    step(args->in, at * args->stride, (ms_dtype)args->dtype),
                                    args->stride, n, stage);
        for (int64_t i = 0; i < n; i++) {
            if (!(x[i] >= args->low && x[i] <= args->high)) continue;
            int64_t bin = (int64_t)((x[i] - args->low) * scale);
            counts[bin < args->bins ? bin : args->bins - 1]++;
        }
    }
}

/* At most 8 tiles: each one's bins are cleared and added up, which must stay cheap next to
 * counting. */
static ms_task_result histogram_run(ms_run *run, void *arguments)
{
    const ms_histogram_args *args = arguments;
    histogram_work work = { args, ms_convert_kernels_for(ms_run_isa(run)), NULL,
                            ms_tiles(args->count, (uint64_t)args->count * 4) };
    if (work.tiles > 8) work.tiles = 8;
    if (work.tiles == 0) work.tiles = 1;
    work.counts = ms_thread_scratch(ms_run_thread(run), 0,
                                    work.tiles * (size_t)args->bins * sizeof *work.counts);
    if (work.counts == NULL) {
        ms_run_fail(run, MS_ERROR_MEMORY, "no memory for %lld bins", (long long)args->bins);
        return MS_TASK_FAILED;
    }
    ms_run_tiles(run, work.tiles, histogram_tile, &work);
    for (int64_t bin = 0; bin < args->bins; bin++) {
        args->out[bin] = 0;
        for (uint32_t tile = 0; tile < work.tiles; tile++)
            args->out[bin] += work.counts[tile * args->bins + bin];
    }
    return MS_TASK_DONE;
}

const ms_task ms_cpu_reduce = { "reduce", reduce_run, sizeof(ms_reduce_args), MS_KIND_COMPUTE };
const ms_task ms_cpu_reduce_arg = { "argmax", reduce_arg_run, sizeof(ms_reduce_arg_args),
                                    MS_KIND_COMPUTE };
const ms_task ms_cpu_cumsum = { "cumsum", cumsum_run, sizeof(ms_cumsum_args), MS_KIND_COMPUTE };
const ms_task ms_cpu_histogram = { "histogram", histogram_run, sizeof(ms_histogram_args),
                                   MS_KIND_COMPUTE };
