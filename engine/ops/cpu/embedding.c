/* embedding.c: rows of a table on the CPU: copies forward; backward sums of the rows of one id in
 * order of position.
 *
 * A kernel of another device must copy bits unchanged, fail with the lowest bad position, and add
 * the rows of one id in an order that does not depend on timing. Tables are large and ids few: what
 * counts is to touch each row of the table once. */
#include "ops/cpu/embedding.h"

#include <stdatomic.h>
#include <string.h>

#include "ops/embedding.h"
#include "ops/cpu/convert.h"

/* A tile's part of a 16-bit table is summed in f32 in pieces of this size. */
enum { SUM_FLOATS = 1 << 18 };

/* What the tiles of one task share. `bad` is the lowest bad position, kept by compare and exchange,
 * so that the error does not depend on threads. `convert` is set in backward only. */
typedef struct job {
    const ms_embedding_args *args;
    const ms_embedding_kernels *kernels;
    const ms_convert_kernels *convert;
    uint32_t tiles;
    _Atomic int64_t bad; /* the first position whose id is no row; INT64_MAX: none */
    atomic_bool no_memory;
} job;

/* Copies and additions are cheap, so a tile has at least 32768 elements. At most 16, since each
 * tile of backward reads all ids. The number of tiles does not show in the results: every row of
 * the table is summed by one tile. */
static uint32_t tiles_for(int64_t rows, int64_t width)
{
    int64_t tiles = rows * width / 32768;
    tiles = tiles > 16 ? 16 : tiles;
    if (tiles > rows) return (uint32_t)rows;
    return (uint32_t)(tiles < 1 ? 1 : tiles);
}

/* The operator admits ids of i64, i32 and u16. */
static int64_t id_at(const ms_embedding_args *args, int64_t position)
{
    if (args->ids_dtype == MS_I64) return ((const int64_t *)args->ids)[position];
    return args->ids_dtype == MS_I32 ? ((const int32_t *)args->ids)[position]
                                     : ((const uint16_t *)args->ids)[position];
}

/* A bad id is remembered and skipped; the task fails after the last tile. Each row is copied with
 * its bits, whatever the dtype. The copies are bound by memory, and the rows of the table come in
 * the order of the ids. */
static void forward_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    job *j = context;
    const ms_embedding_args *args = j->args;
    size_t bytes = (size_t)args->width * ms_dtype_bytes((ms_dtype)args->dtype);
    for (int64_t at = args->count * tile / j->tiles; at < args->count * (tile + 1) / j->tiles;
         at++) {
        int64_t id = id_at(args, at);
        if (id >= 0 && id < args->rows) {
            memcpy((char *)args->values + (size_t)at * bytes,
                   (const char *)args->table + (size_t)id * bytes, bytes);
            continue;
        }
        /* The lowest position wins, whichever tile comes first; the loop ends as soon as another
         * tile has recorded a lower one. */
        int64_t first = atomic_load(&j->bad);
        while (at < first && !atomic_compare_exchange_weak(&j->bad, &first, at)) {}
    }
}

/* Ids are values on the device, which the host cannot check when it enqueues; so a bad one is an
 * error of the task. */
static ms_task_result forward_run(ms_run *run, void *arguments)
{
    const ms_embedding_args *args = arguments;
    job j = { .args = args, .tiles = tiles_for(args->count, args->width), .bad = INT64_MAX };
    ms_run_tiles(run, j.tiles, forward_tile, &j);
    int64_t bad = atomic_load(&j.bad);
    if (bad == INT64_MAX) return MS_TASK_DONE;
    ms_run_fail(
        run, MS_ERROR_ARGUMENT,
        "embedding: the id at position %lld is %lld, but the weight has %lld rows, counted from 0",
        (long long)bad, (long long)id_at(args, bad), (long long)args->rows);
    return MS_TASK_FAILED;
}

/* Sums the gradients of rows begin .. end - 1 of the table in f32. It reads all ids and adds those
 * in its range, in order of position: no atomics, and the same bits for any number of threads. It
 * trusts the ids: forward has failed for bad ones, and an id outside of every range is added
 * nowhere. Atomic additions would give other bits in each run. */
static void sum_rows(const job *j, int64_t begin, int64_t end, float *sums)
{
    const ms_embedding_args *args = j->args;
    size_t bytes = (size_t)args->width * ms_dtype_bytes((ms_dtype)args->dtype);
    if (!args->accumulate) memset(sums, 0, (size_t)((end - begin) * args->width) * sizeof *sums);
    for (int64_t at = 0; at < args->count; at++) {
        int64_t id = id_at(args, at);
        if (id >= begin && id < end)
            j->kernels->add(sums + (id - begin) * args->width, (ms_dtype)args->dtype,
                            (const char *)args->values + (size_t)at * bytes, args->width);
    }
}

/* An f32 table is summed in place. A 16-bit table is summed in f32 scratch and rounded once; it is
 * done in pieces to bound the scratch, at the cost of reading the ids once per piece. Rounding to
 * 16 bits after each addition would lose the gradients of frequent ids: bf16 keeps 8 bits, so a sum
 * stops growing at 256 times an addend. */
static void backward_tile(void *context, uint32_t tile, ms_thread *thread)
{
    job *j = context;
    const ms_embedding_args *args = j->args;
    int64_t begin = args->rows * tile / j->tiles, end = args->rows * (tile + 1) / j->tiles;
    if (args->dtype == MS_F32) {
        sum_rows(j, begin, end, (float *)args->table + begin * args->width);
        return;
    }
    int64_t piece = args->width < SUM_FLOATS ? SUM_FLOATS / args->width : 1;
    float *sums = ms_thread_scratch(thread, 0, (size_t)(piece * args->width) * sizeof *sums);
    if (sums == NULL) {
        atomic_store(&j->no_memory, true);
        return;
    }
    for (; begin < end; begin += piece) {
        int64_t stop = begin + piece < end ? begin + piece : end;
        sum_rows(j, begin, stop, sums);
        j->convert->from_f32[args->dtype]((char *)args->table + (size_t)(begin * args->width) * 2,
                                          sums, (size_t)((stop - begin) * args->width));
    }
}

/* Tiles divide the table and not the ids, so each row has one writer. A row whose id does not occur
 * gets a gradient of 0, or keeps what it holds where the gradient accumulates. */
static ms_task_result backward_run(ms_run *run, void *arguments)
{
    const ms_embedding_args *args = arguments;
    job j = { .args = args,
              .kernels = ms_embedding_kernels_for(ms_run_isa(run)),
              .convert = ms_convert_kernels_for(ms_run_isa(run)),
              .tiles = tiles_for(args->rows, args->width) };
    ms_run_tiles(run, j.tiles, backward_tile, &j);
    if (!atomic_load(&j.no_memory)) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY, "embedding: no memory for sums of rows of %lld numbers",
                (long long)args->width);
    return MS_TASK_FAILED;
}

const ms_task ms_cpu_embedding = { .name = "embedding",
                                   .function = forward_run,
                                   .args_bytes = sizeof(ms_embedding_args),
                                   .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_embedding_backward = { .name = "embedding gradient",
                                            .function = backward_run,
                                            .args_bytes = sizeof(ms_embedding_args),
                                            .kind = MS_KIND_COMPUTE };
