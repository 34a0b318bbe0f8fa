/* forget.h: the communicators of a group that all its members have dropped. */
#ifndef MOONSHARD_COMM_TRANSPORT_NCCL_FORGET_H
#define MOONSHARD_COMM_TRANSPORT_NCCL_FORGET_H

#include "comm/transport/nccl/state.h"

/* Slot of ms_transport_nccl. */
bool ms_nccl_forget(ms_group *group);

#endif
