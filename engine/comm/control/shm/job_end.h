/* job_end.h: why a job has ended, and the flight records that its ranks have left. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_JOB_END_H
#define MOONSHARD_COMM_CONTROL_SHM_JOB_END_H

#include "comm/control/shm/state.h"

/* As ms_rendezvous_abort, ms_rendezvous_cause and ms_rendezvous_flight. */
bool ms_host_end_job(ms_host_files *files, ms_abort_reason reason, int32_t rank,
                     const char *message);
bool ms_host_cause(const ms_host_files *files, ms_abort_record *out);
/* What this host has recorded, which may differ from what the hosts agree on. */
bool ms_host_own_cause(const ms_host_files *files, ms_abort_record *out);
bool ms_host_flight(const ms_host_files *files, uint32_t rank, uint64_t index, ms_flight *out);
/* Wakes every rank, in case it sleeps. Safe in signal handlers. */
void ms_host_ring_all(ms_control_file *control);

#endif
