/* topology.h: the members of a group by nodes, and what each sends to other nodes in a call. For
 * comm/ only.
 *
 * Invariants
 * - All members of a group find the same, but for `here` and `is_here`.
 * - What ms_bytes_between tells follows from the call and the topology alone: not from how a call
 *   is cut into pieces, nor from where its tensors are. The transport sends exactly that much. */
#ifndef MOONSHARD_COMM_TOPOLOGY_H
#define MOONSHARD_COMM_TOPOLOGY_H

#include "comm/state.h"

#include "moonshard/control.h"

/* Nodes are numbered in the order of their first members, places on a node in the order of the
 * group. */
struct ms_topology {
    uint32_t nodes, here; /* here: this rank's node */
    uint32_t least;       /* members on the node that has the fewest */
    uint16_t node[MS_LOCAL_RANKS_MAX], place[MS_LOCAL_RANKS_MAX]; /* by member */
    uint16_t list[MS_LOCAL_RANKS_MAX];                            /* members, node by node */
    uint16_t first[MS_LOCAL_RANKS_MAX + 1];                       /* of each node, in list */
    bool is_here[MS_LOCAL_RANKS_MAX];
};

/* node_of: by world rank. */
void ms_topology_find(ms_topology *at, const uint16_t *node_of, const ms_group *group);
static inline uint32_t ms_topology_count(const ms_topology *at, uint32_t node)
{
    return at->first[node + 1] - at->first[node];
}
/* The member at this place of a node; places go around where the node has fewer members. So it is
 * the relay there of members at this place of other nodes. */
static inline uint32_t ms_topology_at(const ms_topology *at, uint32_t node, uint32_t place)
{
    return at->list[at->first[node] + place % ms_topology_count(at, node)];
}

/* ------------------------------------------------------------------ traffic.c */

/* Whether any rank of the node gets data. */
bool ms_node_gets(const ms_topology *at, const ms_comm_args *args, uint32_t node);
/* Reductions by nodes: slice `place` of the tensor, whose sum the member at this place of each node
 * sends to those at the same place of others. */
uint64_t ms_node_slice(const ms_topology *at, const ms_comm_args *args, uint32_t place,
                       uint64_t *begin);
/* A long slice of an all_reduce over three or more nodes is cut into a unit for each node: the sums
 * of a unit go to the member on its node, which adds them and sends the result to the others. So
 * each sends 2 (H - 1) / H of the slice instead of H - 1 times the slice. Elsewhere a slice is one
 * unit, and each adds for itself. */
uint32_t ms_node_units(const ms_topology *at, const ms_comm_args *args);
uint64_t ms_node_unit(const ms_topology *at, const ms_comm_args *args, uint32_t place,
                      uint32_t unit, uint64_t *begin);
/* reduce_scatter: whether this rank adds up what its node brings for the part of a member. */
bool ms_node_adds_for(const ms_topology *at, const ms_comm_args *args, uint32_t member);
/* Where the data of every rank travel, slots are what a node's ranks read of a member, in the order
 * of these ranks: one for each of them, or one for all. */
uint32_t ms_node_slots(const ms_topology *at, const ms_comm_args *args, uint32_t node);
uint32_t ms_node_slot(const ms_topology *at, const ms_comm_args *args, uint32_t node, uint32_t i);
/* Elements of a slot of a member. By counts of an all_to_all, this rank knows its own only. */
uint64_t ms_node_slot_length(const ms_comm_args *args, uint32_t member, uint32_t slot);

/* The bytes of tensors that this rank sends to other nodes. sum_by_ranks: reductions add in the
 * order of ranks. */
uint64_t ms_bytes_between(const ms_topology *at, const ms_comm_args *args, bool sum_by_ranks);

#endif
