/* p2p.h: send and recv between ranks of two nodes. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_P2P_H
#define MOONSHARD_COMM_TRANSPORT_MPI_P2P_H

#include "comm/transport/mpi/state.h"

ms_task_result ms_mpi_p2p_run(ms_run *run, ms_mpi_transport *transport, const ms_comm_args *args);

#endif
