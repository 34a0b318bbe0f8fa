/* hang_report.h: reports to a supervisor about a rank that others have waited for too long. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_HANG_REPORT_H
#define MOONSHARD_COMM_CONTROL_SHM_HANG_REPORT_H

#include "comm/control/shm/state.h"

/* Slots of the rendezvous. */
void ms_shm_judge(ms_rendezvous *rendezvous);
bool ms_shm_hang_report(ms_rendezvous *rendezvous, uint32_t rank, char text[MS_HANG_REPORT_BYTES]);
void ms_shm_dismiss_hang_report(ms_rendezvous *rendezvous, uint32_t rank);
/* A rank's progress: what it has got done so far. */
uint64_t ms_rank_progress(const ms_rank_line *line);
/* Reports to the supervisor that `missing` has not come; the caller then goes on waiting. False: no
 * supervisor decides in this job. */
bool ms_report_hang(ms_shm_rank *self, uint32_t missing, uint64_t progress, const char *text);

#endif
