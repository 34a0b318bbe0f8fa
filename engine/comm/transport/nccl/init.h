/* init.h: the communicators of a group. */
#ifndef MOONSHARD_COMM_TRANSPORT_NCCL_INIT_H
#define MOONSHARD_COMM_TRANSPORT_NCCL_INIT_H

#include "comm/transport/nccl/state.h"

/* Slot of ms_transport_nccl. */
ms_status ms_nccl_prepare(ms_group *group);

#endif
