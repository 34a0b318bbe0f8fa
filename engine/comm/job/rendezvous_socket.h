/* rendezvous_socket.h: how ranks that no launcher started find each other. */
#ifndef MOONSHARD_COMM_JOB_RENDEZVOUS_SOCKET_H
#define MOONSHARD_COMM_JOB_RENDEZVOUS_SOCKET_H

#include "comm/control/shm/state.h"

ms_status ms_shm_meet(ms_context *context, const ms_rendezvous_options *options, const char *path,
                      uint32_t rank, ms_rendezvous **out);

#endif
