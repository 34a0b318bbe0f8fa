/* ids.c: numbers of groups, which a job hands out and takes back. In a job over several nodes the
 * agent of the first one has the account. */
#include "comm/control/shm/ids.h"

#include "comm/control/shm/bell.h"

#define MS_IDS_LOOK_NS 50000000 /* a rank that waits for numbers looks at least this often */

void ms_ids_put(ms_id_words words, const ms_ids *ids)
{
    for (int w = 0; w < MS_GROUPS_MAX / 64; w++) atomic_fetch_or(&words[w], ids->words[w]);
}

void ms_ids_remove(ms_id_words words, const ms_ids *ids)
{
    for (int w = 0; w < MS_GROUPS_MAX / 64; w++) atomic_fetch_and(&words[w], ~ids->words[w]);
}

void ms_ids_note(ms_control_file *control, uint32_t id)
{
    uint32_t before = atomic_load(&control->groups);
    while (before <= id && !atomic_compare_exchange_weak(&control->groups, &before, id + 1)) {}
}

/* Atomic, because several groups may be split at the same time. 0 is the world's. */
void ms_ids_take(ms_control_file *control, uint32_t parts, ms_ids *ids)
{
    for (uint32_t id = 1; id < MS_GROUPS_MAX && parts > 0; id++) {
        uint64_t bit = (uint64_t)1 << id % 64;
        if (atomic_fetch_or(&control->ids_used[id / 64], bit) & bit) continue;
        ms_ids_add(ids, id);
        parts--;
    }
}

void ms_shm_ids_take(ms_comm *comm, uint32_t parts, ms_ids *ids)
{
    ms_shm_rank *self = comm->control_state;
    ms_ids_take(self->control, parts, ids);
}

void ms_shm_ids_give(ms_comm *comm, const ms_ids *ids)
{
    ms_shm_rank *self = comm->control_state;
    ms_ids_remove(self->control->ids_used, ids);
}

/* The agent of this node asks that of the first one. If the job ends meanwhile there are none, and
 * the caller's next look at the job finds the cause. */
void ms_cluster_ids_take(ms_comm *comm, uint32_t parts, ms_ids *ids)
{
    ms_shm_rank *self = comm->control_state;
    ms_rank_line *line = &self->control->lines[self->rank];
    atomic_store(&line->ids_answered, 0);
    atomic_store(&line->ids_wanted, parts);
    self->files->replication->stir(self->files->replication);
    while (!atomic_load(&line->ids_answered))
        if (ms_shm_aborted(self)) return;
        else ms_shm_nap(self, MS_IDS_LOOK_NS);
    for (int w = 0; w < MS_GROUPS_MAX / 64; w++) ids->words[w] |= line->ids_given.words[w];
}

/* Returns at once. The agent collects the numbers when it next serves a request of this rank, or
 * looks at its line. */
void ms_cluster_ids_give(ms_comm *comm, const ms_ids *ids)
{
    ms_shm_rank *self = comm->control_state;
    ms_ids_put(self->control->lines[self->rank].ids_back, ids);
    self->files->replication->stir(self->files->replication);
}
