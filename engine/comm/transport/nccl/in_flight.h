/* in_flight.h: calls that NCCL has put on a GPU's stream, until the host knows that they have
 * ended. */
#ifndef MOONSHARD_COMM_TRANSPORT_NCCL_IN_FLIGHT_H
#define MOONSHARD_COMM_TRANSPORT_NCCL_IN_FLIGHT_H

#include "comm/transport/nccl/state.h"

/* On the host thread. begin: the call gets a place in its communicator's list; NULL: no memory.
 * land: an ms_cuda_after_function; user: the flight, which is gone afterwards. */
ms_nccl_in_flight *ms_nccl_flight_begin(const ms_comm_args *args);
ms_status ms_nccl_flight_land(void *user, ms_error *error);
void ms_nccl_flights_free(ms_nccl *nccl);
/* On the watchdog's thread. look: tells control what has begun and ended; returns when the next
 * look is due. abort: what has not ended counts as aborted. */
uint64_t ms_nccl_in_flight_look(ms_nccl *nccl, ms_communicator *communicator);
void ms_nccl_flights_abort(ms_nccl *nccl);

#endif
