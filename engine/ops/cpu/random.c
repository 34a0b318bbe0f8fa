/* random.c: tasks that draw numbers and drop elements.
 *
 * A kernel of another device must draw the same words: Philox 4x32-10 with the seed as key, and a
 * counter whose lower half is the element's position divided by 4 and whose upper half is
 * ms_random_high. Element i takes word i % 4. What is made of the words is in ops/arithmetic.h:
 * with its functions all devices agree in every bit. */
#include "ops/cpu/random.h"

#include "ops/arithmetic.h"
#include "ops/backend.h"
#include "ops/cpu/convert.h"
#include "ops/cpu/strided.h"

/* One draw. A number depends on seed, step, draw and position only, never on the tile. Drawing is
 * bound by arithmetic: ten Philox rounds for each block of four numbers, then a logarithm, a root,
 * a sine and a cosine for two normal numbers. */
typedef struct random_work {
    const ms_random_args *args;
    const ms_random_kernels *kernels;
    const ms_convert_kernels *convert;
    uint32_t tiles;
} random_work;

/* The two halves of a draw are the same lane of two draws of a block. Four words make one block, so
 * Philox runs once for four elements; a range that begins within a block draws that block as its
 * first step. */
static void draw_whole(const ms_random_args *args, int64_t position, int64_t n, int64_t *out)
{
    uint64_t high = ms_random_high(args->random);
    uint32_t first[4], second[4];
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)(position + i);
        if (i == 0 || at % 4 == 0) {
            ms_philox(args->random.seed, high, at / 4, first);
            ms_philox(args->random.seed, high ^ MS_RANDOM_SECOND, at / 4, second);
        }
        uint64_t below = ms_random_below(args->range, first[at % 4], second[at % 4]);
        out[i] = (int64_t)((uint64_t)args->first + below);
    }
}

/* Other dtypes are drawn in f32 and rounded, so they are the same numbers as in f32, up to
 * rounding. Tiles begin at multiples of 64 (ms_tile_begin) and MS_CHUNK is a multiple of
 * MS_RANDOM_GROUP, so each call of a kernel starts at a whole group, which ms_random_kernels
 * demands. */
static void random_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const random_work *work = context;
    const ms_random_args *args = work->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    int64_t end = ms_tile_begin(args->count, work->tiles, index + 1);
    for (int64_t at = ms_tile_begin(args->count, work->tiles, index), n; at < end; at += n) {
        union {
            float real[MS_CHUNK];
            int64_t whole[MS_CHUNK];
        } drawn;
        n = end - at < MS_CHUNK ? end - at : MS_CHUNK;
        char *to = (char *)args->out + at * (int64_t)ms_dtype_bytes(dtype);
        /* f32 results are drawn into the tensor itself. A kernel writes no element past n, so a
         * short last group does not touch the next tile. */
        float *real = dtype == MS_F32 ? (float *)(void *)to : drawn.real;
        /* Integers have a loop of their own in i64: an f32 holds only 24 bits of them. */
        if (args->kind == MS_RANDOM_INTEGER) {
            draw_whole(args, at, n, drawn.whole);
            work->convert->from_i64[dtype](to, drawn.whole, (size_t)n);
            continue;
        }
        (args->kind == MS_RANDOM_UNIFORM ? work->kernels->uniform : work->kernels->normal)(
            real, (size_t)n, (uint64_t)at, args);
        if (dtype != MS_F32) work->convert->from_f32[dtype](to, real, (size_t)n);
    }
}

/* The kernels need no scratch and cannot fail: a draw is a function of the arguments and the
 * position alone, so the task may run again and gives the same numbers. */
static ms_task_result random_run(ms_run *run, void *arguments)
{
    const ms_random_args *args = arguments;
    random_work work = { args, ms_random_kernels_for(ms_run_isa(run)),
                         ms_convert_kernels_for(ms_run_isa(run)), 0 };
    /* A draw costs several times what writing it does: work on small tensors is shared earlier. */
    work.tiles = ms_tiles(args->count, (uint64_t)args->count * 16);
    ms_run_tiles(run, work.tiles, random_tile, &work);
    return MS_TASK_DONE;
}

/* Dropout draws its mask again in backward from the same counter, so no mask is stored. The
 * operator passes backward the seed, step and draw that forward had; with any other counter the
 * gradient would go through elements that forward has dropped. */
typedef struct dropout_work {
    const ms_dropout_args *args;
    const ms_random_kernels *kernels;
    const ms_convert_kernels *convert;
    uint32_t tiles;
} dropout_work;

/* The mask depends on the position of an element in the tensor, so tiles may be cut anywhere. `out`
 * may be `in`: a chunk of 16-bit elements is widened into `stage` before its place is written, and
 * the f32 kernel reads each element before it writes it. */
static void dropout_tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const dropout_work *work = context;
    const ms_dropout_args *args = work->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    int64_t end = ms_tile_begin(args->count, work->tiles, index + 1),
            size = (int64_t)ms_dtype_bytes(dtype);
    for (int64_t at = ms_tile_begin(args->count, work->tiles, index), n; at < end; at += n) {
        float stage[MS_CHUNK];
        const char *from = (const char *)args->in + at * size;
        char *to = (char *)args->out + at * size;
        n = end - at < MS_CHUNK ? end - at : MS_CHUNK;
        if (dtype == MS_F32) {
            work->kernels->dropout((float *)(void *)to, (const float *)(const void *)from,
                                   (size_t)n, (uint64_t)at, args);
            continue;
        }
        work->convert->to_f32[dtype](stage, from, (size_t)n);
        work->kernels->dropout(stage, stage, (size_t)n, (uint64_t)at, args);
        work->convert->from_f32[dtype](to, stage, (size_t)n);
    }
}

/* The weight of 16 bytes is that of random_run: the draw costs more than the two passes over
 * memory. */
static ms_task_result dropout_run(ms_run *run, void *arguments)
{
    const ms_dropout_args *args = arguments;
    dropout_work work = { args, ms_random_kernels_for(ms_run_isa(run)),
                          ms_convert_kernels_for(ms_run_isa(run)), 0 };
    work.tiles = ms_tiles(args->count, (uint64_t)args->count * 16);
    ms_run_tiles(run, work.tiles, dropout_tile, &work);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_random = { "random", random_run, sizeof(ms_random_args), MS_KIND_COMPUTE };
const ms_task ms_cpu_dropout = { "dropout", dropout_run, sizeof(ms_dropout_args), MS_KIND_COMPUTE };
