/* bucket_launch.h: counts the gradients of each bucket, launches buckets in order of their index,
 * and makes the end of backward wait for the results. */
#ifndef MOONSHARD_DDP_BUCKET_LAUNCH_H
#define MOONSHARD_DDP_BUCKET_LAUNCH_H

#include "ddp/state.h"

/* Changes the phase. */
void ms_reducer_enter(ms_reducer *reducer, ms_reducer_phase phase);
/* The engine's error ends the job, with its reason for all ranks. Returns status. */
ms_status ms_reducer_end_job(ms_reducer *reducer, ms_status status);
/* The gradient is complete in its bucket, or none comes in this pass. Launches the buckets that are
 * due; the last one ends the pass. */
ms_status ms_gradient_ready(ms_ddp_parameter *parameter);
/* No gradient of the pass has come yet. */
void ms_reducer_reset(ms_reducer *reducer);

#endif
