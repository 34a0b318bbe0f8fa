/* hosts_job.h: a job over several hosts in one process: a set of memory files for each host, a
 * mirror between them, and for each rank an MPI whose messages go from thread to thread. */
#ifndef MOONSHARD_TESTS_HOSTS_JOB_H
#define MOONSHARD_TESTS_HOSTS_JOB_H

#include "moonshard/comm.h"

typedef struct hosts_job hosts_job;

/* layout: the digit of each rank's host. */
hosts_job *hosts_job_new(const ms_rendezvous_options *options, const char *layout);
/* Where this rank meets the others; the job's. */
ms_rendezvous *hosts_job_rendezvous(hosts_job *job, uint32_t rank);
/* As ms_comm_open, on the rank's thread. */
ms_status hosts_job_open(hosts_job *job, ms_engine *engine, uint32_t rank, ms_group **world);
/* After all ranks have ended. */
void hosts_job_free(hosts_job *job);
/* Of the next jobs: messages of this many and more bytes are sent only once they are received;
 * every so many messages of a rank do not fail (0: none fails). */
void hosts_job_network(size_t eager_bytes, unsigned failing);

#endif
