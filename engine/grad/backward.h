/* backward.h: the walk of backward through the tape, from roots to leaves, latest node first. */
#ifndef MOONSHARD_GRAD_BACKWARD_H
#define MOONSHARD_GRAD_BACKWARD_H

#include "grad/state.h"

/* A backward, or a part of one. */
typedef enum ms_backward_part {
    MS_BACKWARD_WHOLE,
    MS_BACKWARD_INPUTS,
    MS_BACKWARD_REST
} ms_backward_part;

/* What the outermost backward that runs is; WHOLE also if none runs. */
ms_backward_part ms_backward_running(const ms_engine *engine);

/* A backward inside of the one that is running. Gradients of nodes that both go through are added
 * up here, and the outer backward runs those nodes. Frees what it has used. */
ms_status ms_backward_inside(ms_engine *engine, ms_tensor *const *roots,
                             ms_tensor *const *gradients, uint32_t count);
/* Whether others may read the memory of a gradient that arrived at one edge, so that it is not to
 * be written in place. */
bool ms_gradient_is_shared(const ms_tensor *gradient);

#endif
