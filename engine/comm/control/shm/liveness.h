/* liveness.h: how ranks without a supervisor find out that another has died. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_LIVENESS_H
#define MOONSHARD_COMM_CONTROL_SHM_LIVENESS_H

#include "comm/control/shm/state.h"

/* In a job without a supervisor, a rank shows that its process lives, and a rank that waits for
 * another looks whether the other's process does. */
void ms_liveness_watch(ms_shm_rank *self);
void ms_liveness_look(ms_shm_rank *self, uint32_t rank);
/* In a job over several nodes, whether this node's agent lives. Without it the job ends. For the
 * agent's own process it is dead. */
bool ms_liveness_of_agent(const ms_shm_files *files);
void ms_liveness_look_agent(ms_shm_rank *self);

#endif
