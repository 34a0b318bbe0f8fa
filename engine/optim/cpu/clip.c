/* clip.c: norms and scaling of many gradients on the CPU. Tiles run over all gradients of a task,
 * cut at fixed places.
 *
 * A tile is MS_TILE elements of one gradient, and its sum is kept apart until all tiles are done;
 * then the sums are added in order. Which thread ran which tile therefore does not show in the
 * norm. 16-bit gradients are converted in chunks that fit into a core's first cache, in f32, where
 * all arithmetic on elements is done. */
#include "optim/cpu/kernels.h"

#include <math.h>

#include "ops/cpu/convert.h"

/* Elements of a tile, and elements that are converted at once. Both decide where sums are cut:
 * another value changes the last bits of norms. */
#define MS_TILE 65536
#define MS_CHUNK 2048

/* An empty gradient has no tiles. */
static int64_t tiles_of(int64_t elements) { return (elements + MS_TILE - 1) / MS_TILE; }

/* The part of a task's gradients that one tile covers. */
typedef struct tile_range {
    char *data;
    ms_dtype dtype;
    size_t n;
} tile_range;

/* The tiles of all gradients together, so that small gradients share the threads with large
 * ones. */
static int64_t count_tiles(const ms_clip_tensor *tensors, uint32_t count)
{
    int64_t tiles = 0;
    for (uint32_t i = 0; i < count; i++) tiles += tiles_of(tensors[i].elements);
    return tiles;
}

/* Finds what the tile with this number covers. Tiles are numbered through the gradients of the
 * task, each of which begins a new one, so where they are cut depends on shapes only. tile is below
 * count_tiles(). */
static tile_range range_of(const ms_clip_tensor *tensors, uint32_t tile)
{
    int64_t at = tile;
    while (at >= tiles_of(tensors->elements)) at -= tiles_of((tensors++)->elements);
    int64_t first = at * MS_TILE, rest = tensors->elements - first;
    ms_dtype dtype = (ms_dtype)tensors->dtype;
    return (tile_range){ .data = (char *)tensors->data + (size_t)first * ms_dtype_bytes(dtype),
                         .dtype = dtype,
                         .n = (size_t)(rest < MS_TILE ? rest : MS_TILE) };
}

/* Adds one more part of a p-norm: a sum of powers or, for infinity, the largest. A NaN must not be
 * lost, since the caller finds bad gradients by it: it fails both comparisons, so it is asked for
 * by name. */
static double add_part(double sum, double part, double p)
{
    if (!isinf(p)) return sum + part;
    return part > sum || isnan(part) ? part : sum;
}

/* ---------------------------------------------------------------- measuring */

/* What the tiles of one measuring task share; sums has one entry for each tile. */
typedef struct measure_job {
    const ms_measure_args *args;
    const ms_optimizer_kernels *kernels;
    const ms_convert_kernels *convert;
    double *sums;
} measure_job;

/* The sum of |g|^p over n elements, or their maximum; f32 is read where it is, 16 bits through a
 * chunk. */
static double measure_range(const measure_job *j, const char *data, ms_dtype dtype, size_t n)
{
    if (dtype == MS_F32)
        return j->kernels->sum_of_powers((const float *)(const void *)data, n, j->args->p);
    float chunk[MS_CHUNK];
    double sum = 0;
    for (size_t at = 0; at < n; at += MS_CHUNK) {
        size_t part = n - at < MS_CHUNK ? n - at : MS_CHUNK;
        j->convert->to_f32[dtype](chunk, data + at * 2, part);
        sum = add_part(sum, j->kernels->sum_of_powers(chunk, part, j->args->p), j->args->p);
    }
    return sum;
}

/* A tile writes one place of `sums`; no two tiles share one. */
static void measure_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const measure_job *j = context;
    tile_range range = range_of(j->args->tensors, tile);
    j->sums[tile] = measure_range(j, range.data, range.dtype, range.n);
}

/* Runs the tiles on the device's threads, then adds the sums of each gradient in the order of its
 * tiles. The scratch is the thread's own and is kept for the next task. */
static ms_task_result measure_run(ms_run *run, void *arguments)
{
    const ms_measure_args *args = arguments;
    int64_t tiles = count_tiles(args->tensors, args->count);
    measure_job j = { .args = args,
                      .kernels = ms_optimizer_kernels_for(ms_run_isa(run)),
                      .convert = ms_convert_kernels_for(ms_run_isa(run)) };
    j.sums = ms_thread_scratch(ms_run_thread(run), 0, (size_t)(tiles + 1) * sizeof *j.sums);
    if (!j.sums) {
        ms_run_fail(run, MS_ERROR_MEMORY, "no memory for the sums of a norm");
        return MS_TASK_FAILED;
    }
    ms_run_tiles(run, (uint32_t)tiles, measure_tile, &j);
    int64_t at = 0;
    for (uint32_t i = 0; i < args->count; i++) {
        double sum = 0;
        for (int64_t t = 0; t < tiles_of(args->tensors[i].elements); t++)
            sum = add_part(sum, j.sums[at++], args->p);
        args->partial[i] = sum;
    }
    return MS_TASK_DONE;
}

const ms_task ms_cpu_measure = { .name = "gradient_norm",
                                 .function = measure_run,
                                 .args_bytes = sizeof(ms_measure_args),
                                 .kind = MS_KIND_OPTIMIZER };

/* norm = (sum of parts)^(1/p), factor = min(1, max / (norm + 1e-6)). The 1e-6 keeps a norm of 0
 * from dividing by 0, and is the peers'. A NaN norm must give a NaN factor, which a plain minimum
 * would turn into 1: then all gradients become NaN, and the fault is seen. */
static ms_task_result combine_run(ms_run *run, void *arguments)
{
    (void)run;
    const ms_combine_args *args = arguments;
    double sum = 0;
    *args->bad = -1;
    for (uint32_t i = 0; i < args->count; i++) {
        if (!isfinite(args->partial[i]) && *args->bad < 0) *args->bad = i;
        sum = add_part(sum, args->partial[i], args->p);
    }
    double norm = sum;
    if (!isinf(args->p) && args->p != 1) norm = args->p == 2 ? sqrt(sum) : pow(sum, 1 / args->p);
    /* Without a maximum nothing is scaled; dividing infinity by a norm of infinity would be NaN. */
    double factor = isinf(args->max) ? 1 : args->max / (norm + 1e-6);
    *args->norm = (float)norm;
    *args->factor = factor < 1 || isnan(factor) ? (float)factor : 1;
    return MS_TASK_DONE;
}

const ms_task ms_cpu_combine = { .name = "clip_factor",
                                 .function = combine_run,
                                 .args_bytes = sizeof(ms_combine_args),
                                 .kind = MS_KIND_OPTIMIZER };

/* ------------------------------------------------------------------ scaling */

/* What the tiles of one scaling task share. Any tile may set bad; none clears it. */
typedef struct scale_job {
    const ms_scale_args *args;
    const ms_optimizer_kernels *kernels;
    const ms_convert_kernels *convert;
    _Atomic uint8_t bad;
} scale_job;

/* Multiplies n elements by the factor in place. Whether results are finite is asked of the f32
 * values, before they are rounded to 16 bits. */
static bool scale_range(const scale_job *j, char *data, ms_dtype dtype, size_t n)
{
    float chunk[MS_CHUNK], factor = *j->args->factor;
    bool finite = true;
    for (size_t at = 0; at < n; at += MS_CHUNK) {
        size_t part = n - at < MS_CHUNK ? n - at : MS_CHUNK;
        float *values = dtype == MS_F32 ? (float *)(void *)data + at : chunk;
        if (dtype != MS_F32) j->convert->to_f32[dtype](chunk, data + at * 2, part);
        j->kernels->scale(values, part, factor);
        if (j->args->finite) finite = j->kernels->all_finite(values, part) && finite;
        if (dtype != MS_F32) j->convert->from_f32[dtype](data + at * 2, chunk, part);
    }
    return finite;
}

/* The flag only ever goes from 0 to 1, so the order of tiles does not matter. */
static void scale_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    scale_job *j = context;
    tile_range range = range_of(j->args->tensors, tile);
    if (!scale_range(j, range.data, range.dtype, range.n)) j->bad = 1;
}

/* A factor of exactly 1 is the usual case of clipping: nothing is read or written then, unless the
 * caller wants to know whether all is finite. */
static ms_task_result scale_run(ms_run *run, void *arguments)
{
    const ms_scale_args *args = arguments;
    if (*args->factor == 1 && !args->finite) return MS_TASK_DONE;
    scale_job j = { .args = args,
                    .kernels = ms_optimizer_kernels_for(ms_run_isa(run)),
                    .convert = ms_convert_kernels_for(ms_run_isa(run)) };
    ms_run_tiles(run, (uint32_t)count_tiles(args->tensors, args->count), scale_tile, &j);
    if (args->finite && j.bad) *args->finite = 0;
    return MS_TASK_DONE;
}

const ms_task ms_cpu_scale = { .name = "gradient_scale",
                               .function = scale_run,
                               .args_bytes = sizeof(ms_scale_args),
                               .kind = MS_KIND_OPTIMIZER };
