/* backward.h: the walk of backward through the tape, from roots to leaves, latest node first. */
#ifndef MOONSHARD_GRAD_BACKWARD_H
#define MOONSHARD_GRAD_BACKWARD_H

#include "grad/state.h"

/* A backward inside of the one that is running. Gradients of nodes that both go through are added
 * up here, and the outer backward runs those nodes. Frees what it has used. */
ms_status ms_backward_inside(ms_engine *engine, ms_tensor *const *roots,
                             ms_tensor *const *gradients, uint32_t count);
/* Whether others may read the memory of a gradient that arrived at one edge, so that it is not to
 * be written in place. */
bool ms_gradient_is_shared(const ms_tensor *gradient);

#endif
