/* issue.h: how a collective becomes a task: described, counted, put on its stream. */
#ifndef MOONSHARD_COMM_ISSUE_H
#define MOONSHARD_COMM_ISSUE_H

#include "comm/state.h"

/* Whether the engine's tasks are functions of the host, as those of control are. */
bool ms_comm_runs_on_host(const ms_comm *comm);
/* The first half of a call that is past the public checks: describes it, and lets the transport
 * refuse it. Without tensors (split, numbers out of band), the caller has set dtype, memory, in,
 * out and payload_bytes of args. */
ms_status ms_group_prepare(ms_group *group, ms_comm_args *args, const ms_collective *collective);
/* The second half: the call gets its number and goes onto its stream. */
ms_status ms_group_issue(ms_group *group, ms_comm_args *args, const ms_collective *collective,
                         ms_point *ready);
/* Writes the number that the call will have into args, for reports; it is not counted yet. */
void ms_group_number_call(ms_group *group, ms_comm_args *args);

#endif
