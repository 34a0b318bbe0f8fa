/* p2p.h: send and recv between ranks of two hosts. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_P2P_H
#define MOONSHARD_COMM_TRANSPORT_MPI_P2P_H

#include "comm/transport/mpi/state.h"

ms_task_result ms_hosts_pair_run(ms_run *run, ms_hosts *hosts, const ms_comm_args *args);

#endif
