/* shm.h: collectives between the ranks of a node. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_SHM_H
#define MOONSHARD_COMM_TRANSPORT_SHM_SHM_H

#include "comm/transport/shm/state.h"

/* The task of any call between ranks of one node, and memory of this rank's heap. */
ms_task_result ms_local_run(ms_run *run, void *arguments);
ms_status ms_local_storage(ms_comm *comm, ms_stream *stream, size_t bytes, ms_storage **out);

#endif
