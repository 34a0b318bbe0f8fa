/* listen.h: how a process listens for those of other hosts, and how they reach it. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_LISTEN_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_LISTEN_H

#include "comm/control/cluster/state.h"

/* Listens at reach->port on all interfaces, or on the first address of the one that is named, and
 * fills in where it can be found. host: of this process, for messages. */
ms_status ms_reach_open(ms_context *context, const char *host, ms_reach *reach, ms_file **out);
/* 0 or -errno. Tries all addresses in turns, since some may belong to networks that the hosts do
 * not share. */
int ms_reach_connect(const ms_os *os, const ms_reach *reach, uint64_t timeout_ns, ms_file **out);

#endif
