/* recompute.h: what backward asks of a node that may be a recomputed function's. */
#ifndef MOONSHARD_GRAD_RECOMPUTE_H
#define MOONSHARD_GRAD_RECOMPUTE_H

#include "grad/state.h"

bool ms_is_recomputed(const ms_tape_node *node);

#endif
