/* arguments.h: whether the arguments of a collective fit its kind and its group. */
#ifndef MOONSHARD_COMM_ARGUMENTS_H
#define MOONSHARD_COMM_ARGUMENTS_H

#include "comm/state.h"

/* Whether a call's arguments are right; *count: the elements of the whole. */
ms_status ms_collective_check(ms_group *group, uint32_t channel, const ms_collective *c,
                              uint64_t *count);

#endif
