/* traffic.c: what a rank sends to other nodes in a call. It is counted when the call is enqueued,
 * so a fake world counts it, too. */
#include "comm/flow.h"

#include "comm/topology.h"
#include "comm/transport/shm/state.h"

bool ms_node_gets(const ms_topology *at, const ms_comm_args *args, uint32_t node)
{
    return (args->kind != MS_REDUCE && args->kind != MS_GATHER) || at->node[args->root] == node;
}

/* ---------------------------------------------------------- the sums of nodes */

uint64_t ms_node_slice(const ms_topology *at, const ms_comm_args *args, uint32_t place,
                       uint64_t *begin)
{
    return ms_slice(args->count, at->least, place, begin);
}

/* Slices shorter than this travel once instead of twice. This is more than a header message carries
 * (comm/transport/mpi/state.h), so sums that travel in header messages are never cut into units. */
#define MS_UNITS_FROM ((uint64_t)256 << 10)

uint32_t ms_node_units(const ms_topology *at, const ms_comm_args *args)
{
    uint64_t begin, bytes = ms_node_slice(at, args, 0, &begin) * ms_dtype_bytes(args->dtype);
    return args->kind == MS_ALL_REDUCE && at->nodes > 2 && bytes >= MS_UNITS_FROM ? at->nodes : 1;
}

uint64_t ms_node_unit(const ms_topology *at, const ms_comm_args *args, uint32_t place,
                      uint32_t unit, uint64_t *begin)
{
    uint64_t slice, within, length = ms_node_slice(at, args, place, &slice);
    length = ms_slice(length, ms_node_units(at, args), unit, &within);
    *begin = slice + within;
    return length;
}

bool ms_node_adds_for(const ms_topology *at, const ms_comm_args *args, uint32_t member)
{
    return ms_topology_at(at, at->here, at->place[member]) == args->group->rank;
}

static uint64_t bytes_of_parts(const ms_topology *at, const ms_comm_args *args)
{
    uint64_t elements = 0, begin, length;
    for (uint32_t m = 0; m < args->group->size; m++) {
        if (at->is_here[m] || !ms_node_adds_for(at, args, m)) continue;
        ms_flow_part(args->counts, args->count, args->group->size, m, &begin, &length);
        elements += length;
    }
    return elements * ms_dtype_bytes(args->dtype);
}

static uint64_t bytes_of_slices(const ms_topology *at, const ms_comm_args *args)
{
    uint64_t begin, elements = 0;
    uint32_t place = at->place[args->group->rank], units = ms_node_units(at, args);
    if (place >= at->least) return 0;
    for (uint32_t h = 0; h < at->nodes; h++) {
        if (h == at->here || !ms_node_gets(at, args, h)) continue;
        elements += ms_node_unit(at, args, place, units > 1 ? h : 0, &begin);
        if (units > 1) elements += ms_node_unit(at, args, place, at->here, &begin);
    }
    return elements * ms_dtype_bytes(args->dtype);
}

/* ------------------------------------------------------ the data of every rank */

uint32_t ms_node_slots(const ms_topology *at, const ms_comm_args *args, uint32_t node)
{
    return ms_kind_parts(args->kind) ? ms_topology_count(at, node) : 1;
}
uint32_t ms_node_slot(const ms_topology *at, const ms_comm_args *args, uint32_t node, uint32_t i)
{
    return ms_kind_parts(args->kind) ? ms_topology_at(at, node, i) : 0;
}

uint64_t ms_node_slot_length(const ms_comm_args *args, uint32_t member, uint32_t slot)
{
    uint64_t begin, length = args->count;
    bool gathers = args->kind == MS_ALL_GATHER || args->kind == MS_GATHER;
    if (gathers || ms_kind_parts(args->kind))
        ms_flow_part(args->counts, args->count, args->group->size, gathers ? member : slot, &begin,
                     &length);
    return length;
}

/* In an all_to_all by counts all get the counts of all, too. */
static uint64_t bytes_of_data(const ms_topology *at, const ms_comm_args *args)
{
    uint32_t own = args->group->rank;
    uint64_t elements = 0, counts = 0;
    if (args->kind == MS_BARRIER || !ms_flow_source(args, own)) return 0;
    if (args->kind == MS_ALL_TO_ALL && args->by_counts)
        counts = (at->nodes - 1) * args->group->size * sizeof *args->counts;
    for (uint32_t h = 0; h < at->nodes; h++) {
        if (h == at->here || !ms_node_gets(at, args, h)) continue;
        for (uint32_t i = 0; i < ms_node_slots(at, args, h); i++)
            elements += ms_node_slot_length(args, own, ms_node_slot(at, args, h, i));
    }
    return counts + elements * ms_dtype_bytes(args->memory);
}

uint64_t ms_bytes_between(const ms_topology *at, const ms_comm_args *args, bool sum_by_ranks)
{
    if (ms_kind_is_pair(args->kind))
        return args->kind == MS_SEND && !at->is_here[args->root]
                   ? args->count * ms_dtype_bytes(args->memory)
                   : 0;
    if (at->nodes == 1 || args->out_of_band) return 0;
    if (!ms_kind_reduces(args->kind) || sum_by_ranks) return bytes_of_data(at, args);
    return args->kind == MS_REDUCE_SCATTER ? bytes_of_parts(at, args) : bytes_of_slices(at, args);
}
