/* tiles.c: reductions and copies of collectives on the threads of a rank. */
#include <string.h>

#include "comm/cpu/kernels.h"
#include "comm/flow.h"

/* Bytes that one thread works on at a time. Fixed, so the cuts depend on sizes only. */
#define MS_TILE_BYTES ((size_t)1 << 20)

/* One reduction that is cut into tiles; it is on the stack of the task, which waits for all tiles.
 */
typedef struct reduction {
    const ms_comm_kernels *kernels;
    ms_reduce_task task;
    size_t tile;
} reduction;

/* Each tile writes elements of its own, so threads need no lock, and the result does not depend on
 * which thread takes which tile. A tile reads and writes its own range of every input and output.
 */
static void reduce_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const reduction *work = context;
    ms_reduce_task part = work->task;
    part.first = tile * work->tile;
    if (part.end - part.first > work->tile) part.end = part.first + work->tile;
    work->kernels->reduce(&part);
}

/* A short tensor is reduced on the stream's own thread: waking other threads would take longer. The
 * loop is bound by memory: it reads every input once and writes every output once, so more threads
 * help until the memory's rate is reached. */
void ms_flow_reduce(ms_run *run, const ms_comm_args *args, const ms_sources *sources,
                    char *const *outputs, uint32_t output_count, uint64_t length)
{
    if (length == 0) return;
    reduction work = { .kernels = ms_comm_kernels_for(ms_run_isa(run)) };
    work.task = (ms_reduce_task){ .dtype = args->dtype,
                                  .memory = sources->memory,
                                  .result = sources->result,
                                  .op = (ms_reduce_op)sources->op,
                                  .input_count = sources->count,
                                  .divisor = sources->divisor,
                                  .output_count = output_count,
                                  .inputs = sources->data,
                                  .outputs = outputs,
                                  .factors = sources->factors,
                                  .end = length };
    work.tile = MS_TILE_BYTES / ms_dtype_bytes(args->memory);
    uint64_t tiles = (length + work.tile - 1) / work.tile;
    if (tiles < 2) work.kernels->reduce(&work.task);
    else ms_run_tiles(run, (uint32_t)tiles, reduce_tile, &work);
}

/* A copy that is cut into tiles. Also on the task's stack; ms_run_tiles returns when all tiles are
 * done. */
typedef struct copying {
    char *to;
    const char *from;
    size_t bytes;
} copying;

/* Cut by bytes and not by elements, since a copy knows no dtype. */
static void copy_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const copying *work = context;
    size_t begin = tile * MS_TILE_BYTES, rest = work->bytes - begin;
    memcpy(work->to + begin, work->from + begin, rest < MS_TILE_BYTES ? rest : MS_TILE_BYTES);
}

/* to and from are equal where a rank gathers its own part in place; they never overlap otherwise.
 */
void ms_flow_copy(ms_run *run, char *to, const char *from, size_t bytes)
{
    if (bytes == 0 || to == from) return;
    copying work = { .to = to, .from = from, .bytes = bytes };
    size_t tiles = (bytes + MS_TILE_BYTES - 1) / MS_TILE_BYTES;
    if (tiles < 2) memcpy(to, from, bytes);
    else ms_run_tiles(run, (uint32_t)tiles, copy_tile, &work);
}
