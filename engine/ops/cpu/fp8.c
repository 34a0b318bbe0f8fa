/* fp8.c: matrices in 8-bit floats on the CPU: their greatest size, then their codes.
 *
 * A kernel of another device writes the same bytes: see the invariants of ops/fp8.h. How elements
 * are divided among threads is free, as a maximum does not depend on the order. */
#include "ops/cpu/fp8.h"

#include <string.h>

#include "ops/cpu/strided.h"

enum { TILES_MAX = 64 };

typedef struct job {
    const ms_fp8_encode_args *encode;
    const ms_fp8_decode_args *decode;
    const ms_fp8_kernels *kernels;
    int64_t count;
    uint32_t tiles, most[TILES_MAX];
} job;

static uint32_t tiles_for(int64_t count)
{
    uint32_t tiles = ms_tiles(count, (uint64_t)count * 4);
    return tiles > TILES_MAX ? TILES_MAX : tiles;
}

static void most_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    job *j = context;
    j->most[tile] = j->kernels->most(j->encode, ms_tile_begin(j->count, j->tiles, tile),
                                     ms_tile_begin(j->count, j->tiles, tile + 1));
}
static void encode_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    j->kernels->encode(j->encode, ms_tile_begin(j->count, j->tiles, tile),
                       ms_tile_begin(j->count, j->tiles, tile + 1));
}
static void decode_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    j->kernels->decode(j->decode, ms_tile_begin(j->count, j->tiles, tile),
                       ms_tile_begin(j->count, j->tiles, tile + 1));
}

/* Two walks: no code is known before the greatest size is. */
static ms_task_result encode_run(ms_run *run, void *arguments)
{
    const ms_fp8_encode_args *args = arguments;
    job j = { .encode = args,
              .kernels = ms_fp8_kernels_for(ms_run_isa(run)),
              .count = args->rows * args->columns };
    uint32_t most = 0;
    j.tiles = tiles_for(j.count);
    ms_run_tiles(run, j.tiles, most_tile, &j);
    for (uint32_t i = 0; i < j.tiles; i++)
        if (j.most[i] > most) most = j.most[i];
    args->scales[0]->most = most;
    args->scales[0]->scale =
        ms_float_from_bits(ms_fp8_scale_bits(most, (ms_fp8_format)args->format));
    ms_run_tiles(run, j.tiles, encode_tile, &j);
    return MS_TASK_DONE;
}

static ms_task_result decode_run(ms_run *run, void *arguments)
{
    const ms_fp8_decode_args *args = arguments;
    job j = { .decode = args,
              .kernels = ms_fp8_kernels_for(ms_run_isa(run)),
              .count = args->count,
              .tiles = tiles_for(args->count) };
    ms_run_tiles(run, j.tiles, decode_tile, &j);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_fp8_encode = { .name = "fp8 encode",
                                    .function = encode_run,
                                    .args_bytes = sizeof(ms_fp8_encode_args),
                                    .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_fp8_decode = { .name = "fp8 decode",
                                    .function = decode_run,
                                    .args_bytes = sizeof(ms_fp8_decode_args),
                                    .kind = MS_KIND_COMPUTE };
