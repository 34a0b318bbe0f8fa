/* job_end.h: why a job has ended, and the flight records that its ranks have left. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_JOB_END_H
#define MOONSHARD_COMM_CONTROL_SHM_JOB_END_H

#include "comm/control/shm/state.h"

/* As ms_rendezvous_abort, ms_rendezvous_cause and ms_rendezvous_flight. */
bool ms_shm_end_job(ms_shm_files *files, ms_abort_reason reason, int32_t rank, const char *message);
bool ms_shm_cause(const ms_shm_files *files, ms_abort_record *out);
/* What this node has recorded, which may differ from what the nodes agree on. */
bool ms_shm_own_cause(const ms_shm_files *files, ms_abort_record *out);
bool ms_shm_flight(const ms_shm_files *files, uint32_t rank, uint64_t index, ms_flight *out);
/* Wakes every rank, in case it sleeps. Safe in signal handlers. */
void ms_shm_ring_all(ms_control_file *control);

#endif
