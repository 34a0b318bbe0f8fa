/* peers.h: frames from agent to agent. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_PEERS_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_PEERS_H

#include "comm/control/cluster/state.h"

/* To the first agent, or from it to this node; a node that has gone is passed over. */
void ms_agent_send(ms_agent *agent, uint32_t node, ms_frame_kind kind, const void *body,
                   size_t bytes);
/* Two parts of one body. origin: whose frame it is. */
void ms_agent_send_parts(ms_agent *agent, uint32_t node, uint32_t origin, ms_frame_kind kind,
                         const void *first, size_t first_bytes, const void *second,
                         size_t second_bytes);
/* From the first agent to all others but one. */
void ms_agent_spread(ms_agent *agent, uint32_t except, ms_frame_kind kind, const void *body,
                     size_t bytes);
/* The thread that receives from a peer. */
void ms_agent_listen(void *peer);
/* 0 or -errno: one whole frame, checked. -EPROTO: it is none. */
int ms_agent_receive(const ms_os *os, ms_file *socket, uint64_t timeout_ns, ms_frame_head *head,
                     void *body);

#endif
