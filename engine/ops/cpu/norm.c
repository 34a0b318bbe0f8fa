/* norm.c: the norms on the CPU: rows in tiles, and the gradients of weight and bias as sums of the
 * tiles' sums.
 *
 * A kernel of another device must take its statistics from the stored sum (rounded to its dtype),
 * compute them in f32, and subtract the mean before it squares. It writes mean and scale where they
 * are asked for: backward reads them and computes no statistics itself. */
#include "ops/cpu/norm.h"

#include <string.h>

#include "ops/cpu/convert.h"

/* Tiles by shape: at least 16384 elements (64 KiB of f32) each, below which waking a helper costs
 * more than it saves. At most 16, since backward adds up one pair of vectors per tile. A tensor
 * without rows has one tile, which writes gradients of 0 for weight and bias. */
static uint32_t tiles_for(int64_t rows, int64_t width)
{
    int64_t tiles = rows * width / 16384;
    tiles = tiles > 16 ? 16 : tiles;
    if (tiles > rows) return (uint32_t)rows;
    return (uint32_t)(tiles < 1 ? 1 : tiles);
}

/* `partial` belongs to the thread that runs the task; each tile adds to its own pair of vectors, so
 * no two threads write the same memory. */
typedef struct job {
    const void *args;
    const ms_norm_kernels *kernels;
    uint32_t tiles;
    float *partial; /* [tiles][2][width] */
} job;

/* Rows are independent, so the result does not depend on how they are divided. */
static void forward_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    const ms_norm_args *args = j->args;
    j->kernels->forward(args, args->rows * tile / j->tiles, args->rows * (tile + 1) / j->tiles);
}

/* One pass over memory: x (and the residual) is read once, y (and the sum) is written once. */
static ms_task_result forward_run(ms_run *run, void *arguments)
{
    const ms_norm_args *args = arguments;
    job j = { .args = args,
              .kernels = ms_norm_kernels_for(ms_run_isa(run)),
              .tiles = tiles_for(args->rows, args->width) };
    ms_run_tiles(run, j.tiles, forward_tile, &j);
    return MS_TASK_DONE;
}

/* Both vectors are cleared even if only one is wanted; a NULL tells the kernel which to leave out.
 * Clearing is the tile's work and not the task's, so that the thread that adds to the vectors also
 * has them in its cache. */
static void backward_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    const ms_norm_backward_args *args = j->args;
    float *dweight = j->partial + (size_t)tile * 2 * (size_t)args->width,
          *dbias = dweight + args->width;
    memset(dweight, 0, 2 * (size_t)args->width * sizeof *dweight);
    if (args->dweight == NULL) dweight = NULL;
    if (args->dbias == NULL) dbias = NULL;
    j->kernels->backward(args, args->rows * tile / j->tiles, args->rows * (tile + 1) / j->tiles,
                         dweight, dbias);
}

/* Adds the tiles' sums in their order into the first one and rounds once. The number of tiles
 * depends on the shape, so the bits do not depend on threads. `which` chooses between the two
 * vectors of each tile. 16 tiles at most keep this serial part short. */
static void combine(const job *j, int64_t width, uint32_t which, ms_dtype dtype, void *out,
                    const ms_convert_kernels *convert)
{
    if (out == NULL) return;
    float *total = j->partial + which * width;
    for (uint32_t tile = 1; tile < j->tiles; tile++) {
        /* Two vectors of each tile are between. */
        const float *part = total + (int64_t)tile * 2 * width;
        for (int64_t i = 0; i < width; i++) total[i] += part[i];
    }
    convert->from_f32[dtype](out, total, (size_t)width);
}

/* The scratch holds the sums of all tiles, in f32 whatever the dtype of the weight, so that
 * rounding happens once. A device with atomics must not use them for these sums: the order of
 * additions would differ from run to run. */
static ms_task_result backward_run(ms_run *run, void *arguments)
{
    const ms_norm_backward_args *args = arguments;
    job j = { .args = args,
              .kernels = ms_norm_kernels_for(ms_run_isa(run)),
              .tiles = tiles_for(args->rows, args->width) };
    j.partial = ms_thread_scratch(ms_run_thread(run), 0,
                                  (size_t)j.tiles * 2 * (size_t)args->width * sizeof(float));
    if (j.partial == NULL) {
        ms_run_fail(run, MS_ERROR_MEMORY,
                    "norm: no memory for the sums of %u tiles of %lld numbers", j.tiles,
                    (long long)args->width);
        return MS_TASK_FAILED;
    }
    ms_run_tiles(run, j.tiles, backward_tile, &j);
    const ms_convert_kernels *convert = ms_convert_kernels_for(ms_run_isa(run));
    combine(&j, args->width, 0, (ms_dtype)args->dtypes.weight, args->dweight, convert);
    combine(&j, args->width, 1, (ms_dtype)args->dtypes.weight, args->dbias, convert);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_norm_forward = { .name = "norm",
                                      .function = forward_run,
                                      .args_bytes = sizeof(ms_norm_args),
                                      .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_norm_backward = { .name = "norm gradient",
                                       .function = backward_run,
                                       .args_bytes = sizeof(ms_norm_backward_args),
                                       .kind = MS_KIND_COMPUTE };
