/* unit.h: a unit's memory and handles. */
#ifndef MOONSHARD_FSDP_UNIT_H
#define MOONSHARD_FSDP_UNIT_H

#include "fsdp/state.h"

void ms_unit_enter(ms_unit *unit, ms_unit_phase phase);
/* An edge of the unit has done its work: a range of the trace since record `first`, and a line of
 * the log at level debug. edge: "pre_forward" ... */
void ms_unit_note(const ms_unit *unit, const char *edge, size_t first);
/* Whether gathers to come give the shards' dtype; what is gathered in the other one is resharded.
 * MS_ERROR_STATE while that is in use. */
ms_status ms_unit_set_full(ms_unit *unit, bool yes);
/* Enqueues the gather of what is not gathered or has changed since; handles stay as they are. */
ms_status ms_unit_gather(ms_unit *unit);
/* The same for all of it, whatever is gathered already: where ranks may have gathered different
 * units. */
ms_status ms_unit_gather_again(ms_unit *unit);
/* Whether ms_unit_gather would enqueue nothing. */
bool ms_unit_is_fresh(const ms_unit *unit);
/* Whether the backward that runs reads the unit's values: not the rest of one in two parts, if the
 * first part has read them for all that is left. */
bool ms_unit_needs_values(const ms_unit *unit);
/* After a gather: the current stream waits for it, and handles become whole parameters. */
ms_status ms_unit_use(ms_unit *unit);
/* Handles become pieces. MS_ERROR_STATE if a whole parameter was written, which would be lost. */
ms_status ms_unit_release(ms_unit *unit);
/* Gives the memory of whole parameters back, if the unit is sharded. Handles must be pieces. */
ms_status ms_unit_reshard(ms_unit *unit);
/* The bytes of its whole flat parameters, as far as they are sharded. */
uint64_t ms_unit_whole_bytes(const ms_unit *unit);
/* The tensor of a member becomes the whole parameter, or its piece, without any task. */
void ms_member_show(ms_member *member, bool whole);

#endif
