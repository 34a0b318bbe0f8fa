/* request.h: requests of a supervisor to all ranks. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_REQUEST_H
#define MOONSHARD_COMM_CONTROL_SHM_REQUEST_H

#include "comm/control/shm/state.h"

/* Slots of ms_control_shm, and of the rendezvous. */
void ms_shm_request(ms_rendezvous *rendezvous, ms_request kind, uint8_t value);
const char *ms_shm_folder(const ms_rendezvous *rendezvous, char *text, size_t bytes);
void ms_shm_step(ms_comm *comm, uint64_t serial, int64_t step, uint8_t values[MS_REQUESTS]);
void ms_shm_set_folder(ms_comm *comm, const char *folder);

#endif
