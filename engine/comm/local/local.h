/* local.h: the transport between the ranks of a host: memory of the heaps that all of them map, and
 * staging areas in them for data outside of heaps. For comm/local/ only. */
#ifndef MOONSHARD_COMM_LOCAL_LOCAL_H
#define MOONSHARD_COMM_LOCAL_LOCAL_H

#include "base/assert.h"
#include "comm/host/host.h"
#include "comm/transport.h"

/* ms_comm.transport_state. */
typedef struct ms_local {
    ms_host *host;
    ms_arena *arena;
    _Atomic uint64_t link_free; /* when the link has sent what was given to it */
    bool pair_populated;        /* tasks of sends: the staging area has pages */
    uint64_t flights[2];        /* tasks of sends and recvs: place in the flight record */
} ms_local;

/* open.c: slots of ms_transport_local. */
ms_status ms_local_open(ms_comm *comm);
void ms_local_close(ms_comm *comm);

/* link.c: waits as long as the link needs for these bytes; false: the job has ended. */
bool ms_local_pace(ms_local *local, uint64_t bytes);

/* pair.c: the task of a send or recv. */
ms_task_result ms_pair_run(ms_run *run, ms_local *local, const ms_comm_args *args);

#endif
