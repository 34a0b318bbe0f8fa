/* fp8.c: numbers in 8-bit floats on the CPU: matrices, their greatest size first and then their
 * codes, and spans of tensors, whose greatest sizes are found apart.
 *
 * A kernel of another device writes the same bytes: see the invariants of ops/fp8.h. How elements
 * are divided among threads is free, as a maximum does not depend on the order. */
#include "ops/cpu/fp8.h"

#include <string.h>

#include "ops/cpu/strided.h"

enum { TILES_MAX = 64 };

static uint32_t tiles_for(int64_t count)
{
    uint32_t tiles = ms_tiles(count, (uint64_t)count * 4);
    return tiles > TILES_MAX ? TILES_MAX : tiles;
}

static float scale_from(uint32_t most, uint8_t format)
{
    return ms_float_from_bits(ms_fp8_scale_bits(most, (ms_fp8_format)format));
}

/* ---------------------------------------------------------------- matrices */

typedef struct job {
    ms_fp8_numbers numbers;
    const ms_fp8_kernels *kernels;
    int64_t count;
    uint32_t tiles, most[TILES_MAX];
} job;

static void most_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    job *j = context;
    j->most[tile] = j->kernels->most(&j->numbers, ms_tile_begin(j->count, j->tiles, tile),
                                     ms_tile_begin(j->count, j->tiles, tile + 1));
}
static void encode_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    j->kernels->encode(&j->numbers, ms_tile_begin(j->count, j->tiles, tile),
                       ms_tile_begin(j->count, j->tiles, tile + 1));
}
static void decode_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    j->kernels->decode(&j->numbers, ms_tile_begin(j->count, j->tiles, tile),
                       ms_tile_begin(j->count, j->tiles, tile + 1));
}

/* Two walks: no code is known before the greatest size is. */
static ms_task_result encode_run(ms_run *run, void *arguments)
{
    const ms_fp8_encode_args *args = arguments;
    job j = { .numbers = { .from = args->x,
                           .to = args->codes,
                           .dtype = args->dtype,
                           .format = args->format },
              .kernels = ms_fp8_kernels_for(ms_run_isa(run)),
              .count = args->rows * args->columns };
    uint32_t most = 0;
    j.tiles = tiles_for(j.count);
    ms_run_tiles(run, j.tiles, most_tile, &j);
    for (uint32_t i = 0; i < j.tiles; i++)
        if (j.most[i] > most) most = j.most[i];
    args->scales[0]->most = most;
    args->scales[0]->scale = j.numbers.scale = scale_from(most, args->format);
    ms_run_tiles(run, j.tiles, encode_tile, &j);
    return MS_TASK_DONE;
}

static ms_task_result decode_run(ms_run *run, void *arguments)
{
    const ms_fp8_decode_args *args = arguments;
    job j = { .numbers = { .from = args->codes,
                           .to = args->out,
                           .scale = args->scale->scale,
                           .dtype = MS_BF16,
                           .format = args->format },
              .kernels = ms_fp8_kernels_for(ms_run_isa(run)),
              .count = args->count,
              .tiles = tiles_for(args->count) };
    ms_run_tiles(run, j.tiles, decode_tile, &j);
    return MS_TASK_DONE;
}

/* ------------------------------------------------------------------- spans */

typedef struct span_job {
    const ms_fp8_span_args *args;
    const ms_fp8_kernels *kernels;
    uint32_t tiles, most[TILES_MAX][MS_FP8_SPANS];
} span_job;

/* The elements of all spans, one repeat after another. */
static int64_t length_of(const ms_fp8_span_args *args)
{
    return args->bounds[args->spans] - args->bounds[0];
}

typedef void visit(span_job *j, uint32_t tile, uint32_t span, int64_t begin, int64_t end);

/* Calls f for what a tile has of each span. */
static void walk(span_job *j, uint32_t tile, int64_t repeats, visit *f)
{
    const ms_fp8_span_args *args = j->args;
    int64_t length = length_of(args), at = ms_tile_begin(length * repeats, j->tiles, tile),
            end = ms_tile_begin(length * repeats, j->tiles, tile + 1);
    while (at < end) {
        int64_t base = at / length * args->period, in = at % length + args->bounds[0],
                last = in + (end - at);
        for (uint32_t k = 0; k < args->spans; k++) {
            int64_t from = in > args->bounds[k] ? in : args->bounds[k],
                    to = last < args->bounds[k + 1] ? last : args->bounds[k + 1];
            if (from < to) f(j, tile, k, base + from, base + to);
        }
        at = (at / length + 1) * length;
    }
}

static ms_fp8_numbers numbers_of(const ms_fp8_span_args *args, uint32_t span)
{
    return (ms_fp8_numbers){ .from = args->from,
                             .to = args->to,
                             .scale = scale_from(args->most[span], MS_FP8_E4M3),
                             .dtype = args->dtype,
                             .format = MS_FP8_E4M3 };
}

static void span_most(span_job *j, uint32_t tile, uint32_t span, int64_t begin, int64_t end)
{
    ms_fp8_numbers numbers = { .from = j->args->from, .dtype = j->args->dtype };
    j->most[tile][span] = j->kernels->most(&numbers, begin, end);
}
static void span_encode(span_job *j, uint32_t tile, uint32_t span, int64_t begin, int64_t end)
{
    (void)tile;
    ms_fp8_numbers numbers = numbers_of(j->args, span);
    j->kernels->encode(&numbers, begin, end);
}
static void span_decode(span_job *j, uint32_t tile, uint32_t span, int64_t begin, int64_t end)
{
    (void)tile;
    ms_fp8_numbers numbers = numbers_of(j->args, span);
    j->kernels->decode(&numbers, begin, end);
}

static void span_most_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    walk(context, tile, 1, span_most);
}
static void span_encode_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    walk(context, tile, 1, span_encode);
}
static void span_decode_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    span_job *j = context;
    walk(j, tile, j->args->repeats, span_decode);
}

static ms_task_result span_most_run(ms_run *run, void *arguments)
{
    const ms_fp8_span_args *args = arguments;
    span_job j = { .args = args,
                   .kernels = ms_fp8_kernels_for(ms_run_isa(run)),
                   .tiles = tiles_for(length_of(args)) };
    ms_run_tiles(run, j.tiles, span_most_tile, &j);
    for (uint32_t k = 0; k < args->spans; k++) {
        uint32_t most = 0;
        for (uint32_t i = 0; i < j.tiles; i++)
            if (j.most[i][k] > most) most = j.most[i][k];
        args->most[k] = most;
    }
    return MS_TASK_DONE;
}

static ms_task_result span_encode_run(ms_run *run, void *arguments)
{
    span_job j = { .args = arguments, .kernels = ms_fp8_kernels_for(ms_run_isa(run)) };
    j.tiles = tiles_for(length_of(j.args));
    ms_run_tiles(run, j.tiles, span_encode_tile, &j);
    return MS_TASK_DONE;
}

static ms_task_result span_decode_run(ms_run *run, void *arguments)
{
    span_job j = { .args = arguments, .kernels = ms_fp8_kernels_for(ms_run_isa(run)) };
    j.tiles = tiles_for(length_of(j.args) * j.args->repeats);
    ms_run_tiles(run, j.tiles, span_decode_tile, &j);
    return MS_TASK_DONE;
}

#define TASK(kernel, title, run, type)                                                      \
    const ms_task ms_cpu_##kernel = {                                                       \
        .name = title, .function = run, .args_bytes = sizeof(type), .kind = MS_KIND_COMPUTE \
    };
TASK(fp8_encode, "fp8 encode", encode_run, ms_fp8_encode_args)
TASK(fp8_decode, "fp8 decode", decode_run, ms_fp8_decode_args)
TASK(fp8_span_most, "fp8 span most", span_most_run, ms_fp8_span_args)
TASK(fp8_span_encode, "fp8 span encode", span_encode_run, ms_fp8_span_args)
TASK(fp8_span_decode, "fp8 span decode", span_decode_run, ms_fp8_span_args)
