/* lifetime.h: the transport between the ranks of a node joins and leaves. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_LIFETIME_H
#define MOONSHARD_COMM_TRANSPORT_SHM_LIFETIME_H

#include "comm/transport/shm/state.h"

/* Slots of ms_transport_local. */
ms_status ms_local_open(ms_comm *comm);
void ms_local_close(ms_comm *comm);
/* The same for a record that is a part of another transport's. */
ms_status ms_local_begin(ms_comm *comm, ms_local *local);
void ms_local_end(ms_local *local);

#endif
