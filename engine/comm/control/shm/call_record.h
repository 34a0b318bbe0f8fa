/* call_record.h: what a rank writes down of its calls. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_CALL_RECORD_H
#define MOONSHARD_COMM_CONTROL_SHM_CALL_RECORD_H

#include "comm/control/shm/state.h"

/* The place of a world rank among the members; the group's size if it is none. */
uint32_t ms_ledger_member(const ms_group *group, uint32_t rank);
static inline ms_member_line *ms_ledger_line(const ms_shm_rank *self, const ms_comm_args *args,
                                             uint32_t member)
{
    return ms_member(self->files, args->group->id, args->channel, args->group->members[member]);
}
/* How many calls the rank has issued in this group and channel. What it has issued in a former
 * group with this number does not count. */
static inline uint64_t ms_ledger_issued(const ms_shm_rank *self, const ms_group *group,
                                        uint32_t channel, uint32_t rank)
{
    uint64_t issued = atomic_load(&ms_member(self->files, group->id, channel, rank)->issued);
    return issued > group->numbers ? issued : group->numbers;
}
const ms_ledger_entry *ms_ledger_entry_of(const ms_shm_rank *self, const ms_comm_args *args,
                                          uint32_t member);
/* Fills a slot but its seq. */
void ms_ledger_write(ms_shm_rank *self, const ms_comm_args *args, ms_ledger_entry *slot);
/* Appends the call to this rank's flight record; the place for ms_ledger_landed. */
uint64_t ms_ledger_flight(ms_shm_rank *self, const ms_flight *call);
void ms_ledger_landed(ms_shm_rank *self, uint64_t flight);
/* Whether two ranks' calls agree; and the same as a number, known before the call is entered. */
bool ms_ledger_agree(const ms_ledger_entry *a, const ms_ledger_entry *b);
/* The same for the two sides of a send. */
bool ms_ledger_agree_pair(const ms_ledger_entry *a, const ms_ledger_entry *b);
uint64_t ms_ledger_hash(const ms_comm_args *args);
/* The fields of a member's call of this number (but for seq), as its host has published them or its
 * task has entered it; false: they are not there, or no longer. */
bool ms_ledger_call(ms_member_line *line, uint64_t number, ms_ledger_entry *out);
/* The fields of a call as published there; false: they are of another call. */
bool ms_ledger_read(const ms_published *from, uint64_t number, ms_ledger_entry *out);

#endif
