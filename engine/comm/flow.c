/* flow.c: how each kind of collective cuts tensors into parts, and reductions and copies on the
 * threads of a rank. */
#include "comm/flow.h"

#include <string.h>

#include "comm/local/kernels.h"

/* Bytes that one thread works on at a time. Fixed, so the cuts depend on sizes only. */
#define MS_TILE_BYTES ((size_t)1 << 20)

void ms_flow_part(const int64_t *counts, uint64_t total, uint32_t parts, uint32_t index,
                  uint64_t *begin, uint64_t *length)
{
    if (!counts) {
        *length = total / parts;
        *begin = index * *length;
        return;
    }
    *begin = 0;
    for (uint32_t i = 0; i < index; i++) *begin += (uint64_t)counts[i];
    *length = (uint64_t)counts[index];
}

ms_flow ms_flow_from(const ms_comm_args *args, uint32_t member)
{
    const ms_group *group = args->group;
    ms_flow flow = { .length = args->count };
    switch (args->kind) {
    case MS_ALL_GATHER:
    case MS_GATHER: /* count is that of the whole */
        ms_flow_part(args->counts, args->count, group->size, member, &flow.to, &flow.length);
        break;
    case MS_REDUCE_SCATTER:
    case MS_SCATTER:
        ms_flow_part(args->counts, args->count, group->size, group->rank, &flow.from, &flow.length);
        break;
    /* With counts, `from` is right in a fake world only: the counts of other ranks are not known
     * here. */
    case MS_ALL_TO_ALL: {
        uint64_t sent = 0;
        ms_flow_part(args->counts, args->count, group->size, group->rank, &flow.from, &sent);
        ms_flow_part(args->receive_counts, args->count, group->size, member, &flow.to,
                     &flow.length);
        break;
    }
    default: break;
    }
    return flow;
}

ms_flow ms_flow_slot(const ms_comm_args *args, uint32_t slot)
{
    const ms_group *group = args->group;
    ms_flow flow = { .length = args->count };
    if (ms_kind_parts(args->kind))
        ms_flow_part(args->counts, args->count, group->size, slot, &flow.from, &flow.length);
    else if (args->kind == MS_ALL_GATHER || args->kind == MS_GATHER) {
        uint64_t begin = 0;
        ms_flow_part(args->counts, args->count, group->size, group->rank, &begin, &flow.length);
    }
    return flow;
}

uint64_t ms_flow_longest(const ms_comm_args *args)
{
    uint64_t longest = 0, begin, length;
    if (!ms_kind_parts(args->kind) && args->kind != MS_ALL_GATHER && args->kind != MS_GATHER)
        return args->count;
    for (uint32_t i = 0; i < args->group->size; i++) {
        ms_flow_part(args->counts, args->count, args->group->size, i, &begin, &length);
        if (length > longest) longest = length;
    }
    return longest;
}

/* -------------------------------------------------------------------- tiles */

typedef struct reduction {
    const ms_comm_kernels *kernels;
    ms_reduce_task task;
    size_t tile;
} reduction;

static void reduce_range(const reduction *work, size_t begin, size_t count)
{
    const ms_reduce_task *whole = &work->task;
    size_t item = ms_dtype_bytes(whole->memory), shift = begin * item;
    if (shift == 0 && count == whole->count) {
        work->kernels->reduce(whole);
        return;
    }
    const char *inputs[MS_LOCAL_RANKS_MAX];
    char *outputs[MS_LOCAL_RANKS_MAX];
    for (uint32_t i = 0; i < whole->input_count; i++) inputs[i] = whole->inputs[i] + shift;
    for (uint32_t i = 0; i < whole->output_count; i++) outputs[i] = whole->outputs[i] + shift;
    ms_reduce_task part = *whole;
    part.inputs = inputs;
    part.outputs = outputs;
    part.count = count;
    work->kernels->reduce(&part);
}

static void reduce_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const reduction *work = context;
    size_t begin = tile * work->tile, rest = work->task.count - begin;
    reduce_range(work, begin, rest < work->tile ? rest : work->tile);
}

void ms_flow_reduce(ms_run *run, const ms_comm_args *args, const ms_sources *sources,
                    char *const *outputs, uint32_t output_count, uint64_t length)
{
    if (length == 0) return;
    reduction work = { .kernels = ms_comm_kernels_for(ms_run_isa(run)) };
    work.task = (ms_reduce_task){ .dtype = args->dtype,
                                  .memory = args->memory,
                                  .op = args->op,
                                  .input_count = args->group->size,
                                  .output_count = output_count,
                                  .inputs = sources->data,
                                  .outputs = outputs,
                                  .factors = sources->factors,
                                  .count = length };
    work.tile = MS_TILE_BYTES / ms_dtype_bytes(args->memory);
    uint64_t tiles = (length + work.tile - 1) / work.tile;
    if (tiles < 2 || args->group->size > MS_LOCAL_RANKS_MAX) work.kernels->reduce(&work.task);
    else ms_run_tiles(run, (uint32_t)tiles, reduce_tile, &work);
}

typedef struct copying {
    char *to;
    const char *from;
    size_t bytes;
} copying;

static void copy_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const copying *work = context;
    size_t begin = tile * MS_TILE_BYTES, rest = work->bytes - begin;
    memcpy(work->to + begin, work->from + begin, rest < MS_TILE_BYTES ? rest : MS_TILE_BYTES);
}

void ms_flow_copy(ms_run *run, char *to, const char *from, size_t bytes)
{
    if (bytes == 0 || to == from) return;
    copying work = { .to = to, .from = from, .bytes = bytes };
    size_t tiles = (bytes + MS_TILE_BYTES - 1) / MS_TILE_BYTES;
    if (tiles < 2) memcpy(to, from, bytes);
    else ms_run_tiles(run, (uint32_t)tiles, copy_tile, &work);
}
