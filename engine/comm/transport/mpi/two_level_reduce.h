/* two_level_reduce.h: reductions over several hosts. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_TWO_LEVEL_REDUCE_H
#define MOONSHARD_COMM_TRANSPORT_MPI_TWO_LEVEL_REDUCE_H

#include "comm/transport/mpi/state.h"

/* The sums of hosts travel. False: the job has ended. */
bool ms_slices_run(ms_run *run, ms_lane *lane, const ms_comm_args *args);

#endif
