/* staged.h: collectives in which the data of every rank travel. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_STAGED_H
#define MOONSHARD_COMM_TRANSPORT_MPI_STAGED_H

#include "comm/transport/mpi/state.h"

/* The data of every rank travel, and are taken in rank order. False: the job has ended. */
bool ms_mpi_staged_run(ms_run *run, ms_mpi_channel *channel, const ms_comm_args *args);

#endif
