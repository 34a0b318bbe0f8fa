/* listen.h: how a process listens for those of other nodes, and how they reach it. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_LISTEN_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_LISTEN_H

#include "comm/control/cluster/state.h"

/* Listens at endpoint->port on all interfaces, or on the first address of the one that is named,
 * and fills in where it can be found. node: of this process, for messages. */
ms_status ms_endpoint_listen(ms_context *context, const char *node, ms_endpoint *endpoint,
                             ms_file **out);
/* 0 or -errno. Tries all addresses in turns, since some may belong to networks that the nodes do
 * not share. */
int ms_endpoint_connect(const ms_os *os, const ms_endpoint *endpoint, uint64_t timeout_ns,
                        ms_file **out);

#endif
