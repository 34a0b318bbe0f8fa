/* peers.h: frames from keeper to keeper. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_PEERS_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_PEERS_H

#include "comm/control/cluster/state.h"

/* To the first keeper, or from it to this host; a host that has gone is passed over. */
void ms_keeper_send(ms_keeper *keeper, uint32_t host, ms_frame_kind kind, const void *body,
                    size_t bytes);
/* Two parts of one body. origin: whose frame it is. */
void ms_keeper_send_parts(ms_keeper *keeper, uint32_t host, uint32_t origin, ms_frame_kind kind,
                          const void *first, size_t first_bytes, const void *second,
                          size_t second_bytes);
/* From the first keeper to all others but one. */
void ms_keeper_spread(ms_keeper *keeper, uint32_t except, ms_frame_kind kind, const void *body,
                      size_t bytes);
/* The thread that receives from a peer. */
void ms_keeper_listen(void *peer);
/* 0 or -errno: one whole frame, checked. -EPROTO: it is none. */
int ms_keeper_receive(const ms_os *os, ms_file *socket, uint64_t timeout_ns, ms_frame_head *head,
                      void *body);

#endif
