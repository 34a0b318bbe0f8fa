/* collective.h: how a collective becomes a task: checked, described, counted, put on its stream. */
#ifndef MOONSHARD_COMM_COLLECTIVE_H
#define MOONSHARD_COMM_COLLECTIVE_H

#include "comm/state.h"

/* Whether the engine's tasks are functions of the host, as those of control are. */
bool ms_comm_runs_on_host(const ms_comm *comm);
/* The text, or its end where it is too long. */
void ms_copy_tail(char *to, size_t bytes, const char *text);
/* A collective past the public checks. Without tensors (split, shared numbers), the caller has set
 * dtype, memory, in, out and payload_bytes of args. */
ms_status ms_group_issue(ms_group *group, ms_comm_args *args, const ms_collective *collective,
                         ms_point *ready);

#endif
