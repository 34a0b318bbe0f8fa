/* reduce.c: launches the kernels that reduce, find positions, sum up as they go, and count. */
#include "ops/cuda/reduce.h"

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(reduce)
MS_CUDA_KERNEL(reduce, reduce_rows)
MS_CUDA_KERNEL(reduce, reduce_rows_whole)
MS_CUDA_KERNEL(reduce, reduce_columns)
MS_CUDA_KERNEL(reduce, reduce_columns_whole)
MS_CUDA_KERNEL(reduce, reduce_parts)
MS_CUDA_KERNEL(reduce, reduce_parts_whole)
MS_CUDA_KERNEL(reduce, reduce_arg)
MS_CUDA_KERNEL(reduce, cumsum_serial)
MS_CUDA_KERNEL(reduce, cumsum_serial_whole)
MS_CUDA_KERNEL(reduce, cumsum_parts)
MS_CUDA_KERNEL(reduce, cumsum_parts_whole)
MS_CUDA_KERNEL(reduce, cumsum_rows)
MS_CUDA_KERNEL(reduce, cumsum_rows_whole)
MS_CUDA_KERNEL(reduce, histogram)

/* As many units as keep all multiprocessors busy; more come from cutting rows into parts. */
enum { UNITS = 1056 };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t divided(int64_t a, int64_t by) { return (a + by - 1) / by; }

/* Cuts n elements into parts of at least `shortest`, a multiple of it, so that there are about
 * UNITS units, and no fewer than `units`. */
static int64_t part_of(int64_t n, int64_t units, int64_t shortest)
{
    int64_t parts = units < UNITS ? divided(UNITS, units) : 1;
    return divided(divided(n, parts), shortest) * shortest;
}

static ms_cuda_shape in_blocks(int64_t blocks, uint32_t threads)
{
    return (ms_cuda_shape){ .blocks = { (uint32_t)least(blocks, MS_CUDA_BLOCKS_MOST) },
                            .threads = { threads } };
}

/* ------------------------------------------------------------------ reduction */

/* With one part, the units are the results. False: there is no memory. */
static bool make_parts(ms_cuda_work *work, ms_cuda_reduce_call *call)
{
    int64_t n = call->r.rows.n;
    call->parts = n > call->part_rows ? divided(n, call->part_rows) : 1;
    if (call->parts == 1) return true;
    call->partial = ms_cuda_scratch(work, (size_t)(call->results * call->parts) * 8);
    return call->partial != NULL;
}

/* Rows of up to 2048 elements take a warp or less of it, eight elements a lane. */
static void reduce_by_rows(ms_cuda_work *work, ms_cuda_reduce_call *call, bool integers)
{
    int64_t n = call->r.rows.n;
    call->width = 1;
    while (call->width < 32 && call->width * 8 < n) call->width *= 2;
    if (n > 2048) call->width = MS_CUDA_REDUCE_THREADS;
    call->part_rows = n > 2048 ? part_of(n, call->results, 8192) : n;
    if (!make_parts(work, call)) return;
    int64_t groups = MS_CUDA_REDUCE_THREADS / call->width;
    ms_cuda_launch(work, integers ? &reduce_rows_whole : &reduce_rows,
                   in_blocks(divided(call->results * call->parts, groups), MS_CUDA_REDUCE_THREADS),
                   call, sizeof *call);
}

/* A block takes up to 32 columns. */
static void reduce_by_columns(ms_cuda_work *work, ms_cuda_reduce_call *call, bool integers)
{
    const ms_rows *rows = &call->r.rows;
    uint32_t columns = 2;
    while (columns < 32 && columns < rows->inner) columns *= 2;
    uint32_t deep = MS_CUDA_REDUCE_THREADS / columns;
    int64_t units = rows->outer * divided(rows->inner, columns);
    call->part_rows = part_of(rows->n, units, 32 * (int64_t)deep);
    if (!make_parts(work, call)) return;
    ms_cuda_shape shape = in_blocks(units * call->parts, columns);
    shape.threads[1] = deep;
    ms_cuda_launch(work, integers ? &reduce_columns_whole : &reduce_columns, shape, call,
                   sizeof *call);
}

static void run_reduce(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_reduce_call call = { .r = *(const ms_reduce_args *)arguments };
    const ms_rows *rows = &call.r.rows;
    bool integers = !ms_dtype_is_float((ms_dtype)call.r.dtype);
    call.results = rows->outer * rows->inner;
    if (call.results == 0) return;
    if (rows->inner > 1 && rows->stride != 1 && rows->inner_stride == 1)
        reduce_by_columns(work, &call, integers);
    else reduce_by_rows(work, &call, integers);
    if (call.partial == NULL) return;
    ms_cuda_launch(
        work, integers ? &reduce_parts_whole : &reduce_parts,
        in_blocks(divided(call.results, MS_CUDA_REDUCE_THREADS / 32), MS_CUDA_REDUCE_THREADS),
        &call, sizeof call);
}

/* Where many columns are side by side, each has one thread. */
static void run_reduce_arg(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_reduce_arg_call call = { .r = *(const ms_reduce_arg_args *)arguments };
    const ms_rows *rows = &call.r.rows;
    uint32_t threads = rows->n > 16384 ? 1024 : 256;
    call.results = rows->outer * rows->inner;
    call.width = 1;
    if (rows->stride == 1 || rows->inner_stride != 1 || call.results < 4096) {
        while (call.width < 32 && call.width < rows->n) call.width *= 2;
        if (rows->n > 2048) call.width = (int32_t)threads;
    }
    ms_cuda_launch(work, &reduce_arg,
                   in_blocks(divided(call.results, threads / call.width), threads), &call,
                   sizeof call);
}

/* ------------------------------------------------------------- cumulative sums */

static void run_cumsum(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_cumsum_call call = { .c = *(const ms_cumsum_args *)arguments, .parts = 1 };
    const ms_rows *rows = &call.c.rows;
    bool integers = !ms_dtype_is_float((ms_dtype)call.c.dtype);
    call.results = rows->outer * rows->inner;
    if (call.results == 0 || rows->n == 0) return;
    if (rows->n <= 32 || (rows->inner > 1 && call.results >= 4096)) {
        ms_cuda_launch(work, integers ? &cumsum_serial_whole : &cumsum_serial,
                       ms_cuda_grid(call.results, 1), &call, sizeof call);
        return;
    }
    call.part_rows = part_of(rows->n, call.results, MS_CUDA_CUMSUM_TILE);
    call.parts = divided(rows->n, call.part_rows);
    int64_t units = call.results * call.parts;
    ms_cuda_shape shape = in_blocks(units, MS_CUDA_REDUCE_THREADS);
    if (call.parts > 1) {
        call.sums = ms_cuda_scratch(work, (size_t)units * 8);
        if (call.sums == NULL) return;
        ms_cuda_launch(work, integers ? &cumsum_parts_whole : &cumsum_parts, shape, &call,
                       sizeof call);
    }
    ms_cuda_launch(work, integers ? &cumsum_rows_whole : &cumsum_rows, shape, &call, sizeof call);
}

/* ------------------------------------------------------------------- histogram */

/* Blocks have bins of their own where these fit into 48 KiB. A block counts fewer than 2^32. */
static void run_histogram(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_histogram_call call = { .h = *(const ms_histogram_args *)arguments };
    ms_cuda_clear(work, call.h.out, (size_t)call.h.bins * sizeof *call.h.out);
    ms_cuda_shape shape = ms_cuda_grid(call.h.count, 16);
    call.shared = call.h.bins <= 12288 && call.h.count / MS_CUDA_BLOCKS_MOST < UINT32_MAX;
    if (call.shared) shape.shared_bytes = (uint32_t)call.h.bins * 4;
    ms_cuda_launch(work, &histogram, shape, &call, sizeof call);
}

MS_CUDA_TASK(reduce, "reduce", ms_reduce_args, MS_KIND_COMPUTE, run_reduce)
MS_CUDA_TASK(reduce_arg, "argmax", ms_reduce_arg_args, MS_KIND_COMPUTE, run_reduce_arg)
MS_CUDA_TASK(cumsum, "cumsum", ms_cumsum_args, MS_KIND_COMPUTE, run_cumsum)
MS_CUDA_TASK(histogram, "histogram", ms_histogram_args, MS_KIND_COMPUTE, run_histogram)
