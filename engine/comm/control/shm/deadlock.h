/* deadlock.h: deadlock detection among the ranks of one node. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_DEADLOCK_H
#define MOONSHARD_COMM_CONTROL_SHM_DEADLOCK_H

#include "comm/control/shm/bell.h"
#include "comm/control/shm/state.h"

/* Deadlock detection. Begin and end enclose a wait that sleeps. Look is called each time that the
 * wait has looked in vain, and ends the job where all ranks wait for each other. */
void ms_deadlock_begin(ms_shm_rank *self, ms_wait *wait);
void ms_deadlock_look(ms_shm_rank *self, ms_wait *wait);
void ms_deadlock_end(ms_shm_rank *self, ms_wait *wait);

#endif
