/* lockstep.h: ranks that use different units, or have different numbers of inputs. */
#ifndef MOONSHARD_FSDP_LOCKSTEP_H
#define MOONSHARD_FSDP_LOCKSTEP_H

#include "fsdp/state.h"

ms_status ms_lockstep_open(ms_fsdp *fsdp);
/* Whether ranks agree on what comes next before each collective. */
bool ms_lockstep_is_on(const ms_fsdp *fsdp);
/* These gather and reduce a unit, if need be once all ranks do; and end a forward or backward. */
ms_status ms_lockstep_on_gather(ms_unit *unit);
ms_status ms_lockstep_on_reduction(ms_unit *unit);
ms_status ms_lockstep_on_end(ms_fsdp *fsdp, bool of_backward);

#endif
