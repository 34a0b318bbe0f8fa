/* adopt.h: how a process learns that a launcher started it as a rank. */
#ifndef MOONSHARD_BINDINGS_ADOPT_H
#define MOONSHARD_BINDINGS_ADOPT_H

#include "moonshard/control.h"

/* The rendezvous and the rank that a launcher left in this process' environment; *out NULL: it left
 * none. The caller releases *out. MS_ERROR_ARGUMENT if the rank is not a number of one. */
MS_API ms_status ms_lua_adopt(ms_context *context, ms_rendezvous **out, uint32_t *rank);

/* Set in a rank's process whose launcher has left it all cores, of which the rank takes its share
 * when it knows the NUMA node of its GPU. */
#define MS_CORES_VARIABLE "MOONSHARD_CORES"

#endif
