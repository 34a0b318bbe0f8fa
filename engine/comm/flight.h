/* flight.h: entries of flight records as text. */
#ifndef MOONSHARD_COMM_FLIGHT_H
#define MOONSHARD_COMM_FLIGHT_H

#include "comm/state.h"

/* The call as reports show it; entered_ns and left_ns are 0. */
ms_flight ms_flight_of(const ms_comm_args *args);

#endif
