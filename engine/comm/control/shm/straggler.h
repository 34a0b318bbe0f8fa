/* straggler.h: a warning about a rank for which others wait unusually long, long before they give
 * up. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_STRAGGLER_H
#define MOONSHARD_COMM_CONTROL_SHM_STRAGGLER_H

#include "comm/control/shm/state.h"

/* A step begins now. */
void ms_straggler_step(ms_shm_rank *self, uint64_t now);
/* Warns of the missing rank, unless a peer has warned of it since its last progress. */
void ms_straggler_warn(ms_shm_rank *self, const ms_comm_args *args, uint32_t missing,
                       uint64_t progress, uint64_t waited_ns, uint64_t limit_ns);

#endif
