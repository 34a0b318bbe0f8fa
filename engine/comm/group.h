/* group.h: a rank's membership in its job, and its groups: made, split, asked. */
#ifndef MOONSHARD_COMM_GROUP_H
#define MOONSHARD_COMM_GROUP_H

#include "comm/state.h"

/* The membership of an engine that has none yet, and its world. */
ms_status ms_comm_new(ms_engine *engine, const ms_membership *membership, ms_group **world);
ms_status ms_group_new(ms_comm *comm, uint32_t id, const char *name, uint32_t rank, uint32_t size,
                       const uint32_t *members, ms_group **out);
ms_comm *ms_comm_of(const ms_engine *engine);
/* The ranks are on these nodes (for `open` of control, or after it). */
void ms_comm_place(ms_comm *comm, const uint16_t *node_of, uint32_t ranks, bool sum_by_ranks);
/* Makes the group's topology, if it has nodes and lacks one. */
ms_status ms_group_place(ms_group *group);
/* As ms_comm_check. */
ms_status ms_comm_verify(ms_comm *comm);
/* The group leaves its place, on all its ranks at the same place among their calls: none uses it,
 * and its calls have ended. false: the job has ended, and the group stays. */
bool ms_group_leave(ms_group *group);

#endif
