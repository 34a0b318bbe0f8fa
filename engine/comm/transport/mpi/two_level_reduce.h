/* two_level_reduce.h: reductions over several nodes. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_TWO_LEVEL_REDUCE_H
#define MOONSHARD_COMM_TRANSPORT_MPI_TWO_LEVEL_REDUCE_H

#include "comm/transport/mpi/state.h"

/* The sums of nodes travel. False: the job has ended. */
bool ms_two_level_run(ms_run *run, ms_mpi_channel *channel, const ms_comm_args *args);

#endif
