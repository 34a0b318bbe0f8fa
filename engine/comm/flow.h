/* flow.h: which elements go from which rank to which in a collective, and on the cpu the collective
 * itself once everybody's tensor is in reach. */
#ifndef MOONSHARD_COMM_FLOW_H
#define MOONSHARD_COMM_FLOW_H

#include "comm/state.h"

#include "moonshard/cpu_task.h"

/* What this rank gets from one member. Elements; from counts from the beginning of the member's
 * `in`, to from that of this rank's `out`. */
typedef struct ms_flow {
    uint64_t from, to, length;
} ms_flow;

/* Whether this member brings data, and whether this rank gets any. */
static inline bool ms_flow_source(const ms_comm_args *args, uint32_t member)
{
    return (args->kind != MS_BROADCAST && args->kind != MS_SCATTER) || member == args->root;
}
static inline bool ms_flow_sink(const ms_comm_args *args)
{
    if (args->kind == MS_BROADCAST) return args->group->rank != args->root;
    return (args->kind != MS_REDUCE && args->kind != MS_GATHER) || args->group->rank == args->root;
}

/* Part `index` of a tensor of `total` elements that is cut by counts, or equally (counts NULL). */
void ms_flow_part(const int64_t *counts, uint64_t total, uint32_t parts, uint32_t index,
                  uint64_t *begin, uint64_t *length);
/* From `member` to this rank. */
ms_flow ms_flow_from(const ms_comm_args *args, uint32_t member);
/* What this rank brings for slot `slot` of ms_flow_slots: the part for that rank, or all. */
ms_flow ms_flow_slot(const ms_comm_args *args, uint32_t slot);
static inline uint32_t ms_flow_slots(const ms_comm_args *args)
{
    return ms_kind_parts(args->kind) ? args->group->size : 1;
}
/* The longest slot of any rank, as far as it follows from this rank's arguments. */
uint64_t ms_flow_longest(const ms_comm_args *args);

/* What is reduced: where the elements of each of them are, and their factors of a premul_sum. */
typedef struct ms_sources {
    const char *const *data;
    const float *factors;
    uint32_t count;
    uint32_t divisor; /* of an avg */
    uint8_t op;
    uint8_t memory, result; /* dtypes of what is read, and of what is written */
} ms_sources;

/* All members of the group, in rank order. */
static inline ms_sources ms_flow_members(const ms_comm_args *args, const char *const *data,
                                         const float *factors)
{
    uint32_t size = args->group->size;
    return (ms_sources){ .data = data,
                         .factors = factors,
                         .count = size,
                         .divisor = size,
                         .op = args->op,
                         .memory = args->memory,
                         .result = args->memory };
}

/* cpu/tiles.c: the reduction of `length` elements of all sources, in their order, to all outputs.
 */
void ms_flow_reduce(ms_run *run, const ms_comm_args *args, const ms_sources *sources,
                    char *const *outputs, uint32_t output_count, uint64_t length);
/* Copies (nothing onto itself), on several threads where it is much. */
void ms_flow_copy(ms_run *run, char *to, const char *from, size_t bytes);

#endif
