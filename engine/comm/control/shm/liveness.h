/* liveness.h: how ranks without a supervisor find out that another has died. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_LIVENESS_H
#define MOONSHARD_COMM_CONTROL_SHM_LIVENESS_H

#include "comm/control/shm/state.h"

/* In a job without a supervisor, a rank shows that its process lives, and a rank that waits for
 * another looks whether the other's process does. */
void ms_death_watch(ms_host *host);
void ms_death_look(ms_host *host, uint32_t rank);
/* In a job over several hosts, whether this host's keeper lives. Without it the job ends. For the
 * keeper's own process it is dead. */
bool ms_death_of_keeper(const ms_host_files *files);
void ms_death_look_keeper(ms_host *host);

#endif
