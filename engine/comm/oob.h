/* oob.h: numbers and texts that ranks exchange out of band: through control, in host memory. */
#ifndef MOONSHARD_COMM_OOB_H
#define MOONSHARD_COMM_OOB_H

#include "comm/state.h"

/* What the members of the group bring to a split, and what all learn. On channel 1 and as a call of
 * its own kind. hash: what must agree beside it. Blocks. */
ms_status ms_group_share_split(ms_group *group, uint64_t hash, ms_split_words *words);
/* cpu/oob_task.c */
/* An ms_host_function; user: an ms_oob_call, in place until the call's point is reached, or NULL:
 * nothing is carried. */
ms_status ms_comm_carry(void *user, char *message, size_t bytes);

#endif
