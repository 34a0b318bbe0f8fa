/* cluster_job.h: a job over several hosts in one process: a set of memory files for each host, a
 * mirror between them, and for each rank an MPI whose messages go from thread to thread. */
#ifndef MOONSHARD_TESTS_CLUSTER_JOB_H
#define MOONSHARD_TESTS_CLUSTER_JOB_H

#include "moonshard/comm.h"

typedef struct cluster_job cluster_job;

/* layout: the digit of each rank's host. */
cluster_job *cluster_job_new(const ms_rendezvous_options *options, const char *layout);
/* Where this rank meets the others; the job's. */
ms_rendezvous *cluster_job_rendezvous(cluster_job *job, uint32_t rank);
/* As ms_comm_open, on the rank's thread. */
ms_status cluster_job_open(cluster_job *job, ms_engine *engine, uint32_t rank, ms_group **world);
/* After all ranks have ended. */
void cluster_job_free(cluster_job *job);
/* Of the next jobs: messages of this many and more bytes are sent only once they are received;
 * every so many messages of a rank do not fail (0: none fails). */
void cluster_job_network(size_t eager_bytes, unsigned failing);

#endif
