/* thread_mpi.h: an MPI between threads of one process, as a module of the engine: messages keep
 * their order for each sender and tag, long ones are sent once they are received, and each takes a
 * time of its own. */
#ifndef MOONSHARD_TESTS_THREAD_MPI_H
#define MOONSHARD_TESTS_THREAD_MPI_H

#include "comm/mpi/module/module.h"

extern const ms_mpi_module thread_mpi;
/* A new world; none is open. failing: as in cluster_job.h. */
void thread_mpi_begin(uint32_t size, size_t eager_bytes, unsigned failing);
/* The module's next `begin` is that of this rank. */
void thread_mpi_next(uint32_t rank);
void thread_mpi_end(void);

#endif
