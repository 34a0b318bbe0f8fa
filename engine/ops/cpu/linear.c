/* linear.c: tasks around the product of a linear layer: its activation, and one pass over its
 * gradient.
 *
 * A kernel of another device may divide rows and columns as it likes, if the sums for the bias
 * depend on the shape only. It must allow the results to be over `before` (see ms_activation_args
 * and ms_linear_gradient_args). */
#include "ops/cpu/linear.h"

#include <string.h>

#include "ops/cpu/convert.h"
#include "ops/cpu/strided.h"

/* Rows whose sums are made in f32 before they join the f64 totals, and the most tiles: each has two
 * vectors of scratch. */
enum { BLOCK_ROWS = 64, TILES_MAX = 16 };

/* --------------------------------------------------------------- activation */

/* The activation is elementwise, so its tiles are ranges of elements. */
typedef struct activation_job {
    const ms_activation_args *args;
    const ms_linear_kernels *kernels;
    uint32_t tiles;
} activation_job;

/* Tiles begin at multiples of 64 elements, so two of them share no cache line of the result. */
static void activation_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const activation_job *j = context;
    int64_t count = j->args->count;
    j->kernels->activate(j->args, ms_tile_begin(count, j->tiles, tile),
                         ms_tile_begin(count, j->tiles, tile + 1));
}

/* An element counts 8 bytes whatever the dtypes, one read and one write of f32. */
static ms_task_result activation_run(ms_run *run, void *arguments)
{
    const ms_activation_args *args = arguments;
    activation_job j = { .args = args,
                         .kernels = ms_linear_kernels_for(ms_run_isa(run)),
                         .tiles = ms_tiles(args->count, (uint64_t)args->count * 8) };
    ms_run_tiles(run, j.tiles, activation_tile, &j);
    return MS_TASK_DONE;
}

/* ----------------------------------------------------------------- gradient */

/* The gradient of the bias is the sum of all rows. Each tile has totals and sums of its own in the
 * scratch of the thread that runs the task. A tile writes rows of args->out that no other tile
 * writes. */
typedef struct gradient_job {
    const ms_linear_gradient_args *args;
    const ms_linear_kernels *kernels;
    uint32_t tiles;
    double *totals; /* [tiles][width] */
    float *sums;    /* [tiles][width]: of one block of rows */
} gradient_job;

/* Tiles by shape: at least 16384 elements (64 KiB of f32) each, below which waking a helper costs
 * more than it saves. The number of tiles decides how the bias's gradient is added up, so it may
 * depend on the shape only. */
static uint32_t tiles_for(int64_t rows, int64_t width)
{
    int64_t tiles = rows * width / 16384;
    tiles = tiles > TILES_MAX ? TILES_MAX : tiles;
    if (tiles > rows) return (uint32_t)rows;
    return (uint32_t)(tiles < 1 ? 1 : tiles);
}

/* One pass computes the gradient before the activation and the column sums, so the incoming
 * gradient is read from memory once. f32 sums cover 64 rows and are then added in f64: thousands of
 * rows, as a batch of sequences has, would lose digits in one f32 sum. */
static void gradient_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const gradient_job *j = context;
    const ms_linear_gradient_args *args = j->args;
    int64_t begin = args->rows * tile / j->tiles, end = args->rows * (tile + 1) / j->tiles,
            width = args->width;
    if (args->bias == NULL) {
        j->kernels->gradient(args, begin, end, NULL);
        return;
    }
    double *totals = j->totals + tile * width;
    float *sums = j->sums + tile * width;
    memset(totals, 0, (size_t)width * sizeof *totals);
    for (int64_t row = begin; row < end; row += BLOCK_ROWS) {
        memset(sums, 0, (size_t)width * sizeof *sums);
        j->kernels->gradient(args, row, row + BLOCK_ROWS < end ? row + BLOCK_ROWS : end, sums);
        for (int64_t i = 0; i < width; i++) totals[i] += (double)sums[i];
    }
}

/* Adds the tiles' totals in their order and rounds once, to f32 and then to the bias's dtype. The
 * first tile's sums serve as the staging memory; they are not needed any more. It is serial, but
 * small: 16 vectors at most. */
static void put_bias(const gradient_job *j, const ms_convert_kernels *convert)
{
    int64_t width = j->args->width;
    for (uint32_t tile = 1; tile < j->tiles; tile++)
        for (int64_t i = 0; i < width; i++) j->totals[i] += j->totals[tile * width + i];
    for (int64_t i = 0; i < width; i++) j->sums[i] = (float)j->totals[i];
    convert->from_f32[j->args->bias_dtype](j->args->bias, j->sums, (size_t)width);
}

/* The scratch belongs to the thread that runs the task and holds all tiles' vectors, f64 before f32
 * so that both are aligned. Without a bias the pass needs none. */
static ms_task_result gradient_run(ms_run *run, void *arguments)
{
    const ms_linear_gradient_args *args = arguments;
    gradient_job j = { .args = args,
                       .kernels = ms_linear_kernels_for(ms_run_isa(run)),
                       .tiles = tiles_for(args->rows, args->width) };
    if (args->bias != NULL) {
        size_t numbers = (size_t)j.tiles * (size_t)args->width;
        j.totals =
            ms_thread_scratch(ms_run_thread(run), 0, numbers * (sizeof(double) + sizeof(float)));
        if (j.totals == NULL) {
            ms_run_fail(run, MS_ERROR_MEMORY,
                        "linear: no memory for the sums of %u tiles of %lld numbers", j.tiles,
                        (long long)args->width);
            return MS_TASK_FAILED;
        }
        void *behind = j.totals + numbers;
        j.sums = behind;
    }
    ms_run_tiles(run, j.tiles, gradient_tile, &j);
    if (args->bias != NULL) put_bias(&j, ms_convert_kernels_for(ms_run_isa(run)));
    return MS_TASK_DONE;
}

const ms_task ms_cpu_activation = { .name = "gelu",
                                    .function = activation_run,
                                    .args_bytes = sizeof(ms_activation_args),
                                    .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_linear_backward = { .name = "linear gradient",
                                         .function = gradient_run,
                                         .args_bytes = sizeof(ms_linear_gradient_args),
                                         .kind = MS_KIND_COMPUTE };
