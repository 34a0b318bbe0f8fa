/* rank_copies.h: copies of what the ranks of one node show, in the control files of the others. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_RANK_COPIES_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_RANK_COPIES_H

#include "comm/control/cluster/state.h"

/* Tells the other nodes of bytes of the control file that one of this node has written. */
void ms_agent_tell(ms_agent *agent, uint64_t offset, const void *data, size_t bytes);
/* Puts what another node has told into the control file; false: it may not write there. */
bool ms_agent_apply(ms_agent *agent, uint32_t origin, uint64_t offset, const void *data,
                    size_t bytes);
/* Tells the other nodes how this node's ranks are: what has changed and matters at once, or (all)
 * all that has changed. The end of a rank is not shown before what it has told is passed on
 * (ms_unheard). */
void ms_agent_show(ms_agent *agent, bool all);
/* Whether this is a part of a rank's line that ms_agent_show tells. */
bool ms_agent_shows(const ms_agent *agent, uint64_t offset, size_t bytes);
/* At the end: also the flight records. */
void ms_agent_show_flights(ms_agent *agent);

#endif
