/* sim.h: the estimate of how long things take on the simulated machine. */
#ifndef MOONSHARD_EXEC_SIM_H
#define MOONSHARD_EXEC_SIM_H

#include "exec/state.h"

/* Nanoseconds that a task of this name and cost takes on an idle machine. */
double ms_rates_ns(const ms_rates *rates, const char *name, const ms_task_cost *cost);

#endif
