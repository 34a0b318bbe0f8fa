/* graphs.h: calls that are launched as graphs. */
#ifndef MOONSHARD_COMM_TRANSPORT_NCCL_GRAPHS_H
#define MOONSHARD_COMM_TRANSPORT_NCCL_GRAPHS_H

#include "comm/transport/nccl/state.h"

/* Slots of ms_transport_nccl. */
void ms_nccl_choose(ms_comm_args *args);
void ms_nccl_chosen(const ms_comm_args *args);
/* Of a call that has a graph, or gets one now; with the turn. */
ms_nccl_graph *ms_nccl_graph_of(const ms_comm_args *args);
/* drop: the watchdog destroys the communicator's graphs before NCCL frees the communicator. No task
 * makes calls in it any more. free: the host thread releases the memory of the list, after the
 * watchdog has ended. */
void ms_nccl_graph_drop(ms_nccl *nccl, ms_communicator *communicator);
void ms_nccl_graph_free(const ms_nccl *nccl, ms_communicator *communicator);

#endif
