/* ids.c: numbers of groups, which a job hands out and takes back. In a job over several hosts the
 * keeper of the first one has the account. */
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

void ms_host_note_id(ms_control_file *control, uint32_t id)
{
    uint32_t before = atomic_load(&control->groups);
    while (before <= id && !atomic_compare_exchange_weak(&control->groups, &before, id + 1)) {}
}

/* Atomic, because several groups may be split at the same time. 0 is the world's. */
void ms_host_take_ids(ms_control_file *control, uint32_t parts, ms_ids *ids)
{
    for (uint32_t id = 1; id < MS_GROUPS_MAX && parts > 0; id++) {
        uint64_t bit = (uint64_t)1 << id % 64;
        if (atomic_fetch_or(&control->ids_used[id / 64], bit) & bit) continue;
        ms_ids_add(ids, id);
        parts--;
    }
}

void ms_host_take(ms_comm *comm, uint32_t parts, ms_ids *ids)
{
    ms_host *host = comm->control_state;
    ms_host_take_ids(host->control, parts, ids);
}

void ms_host_give(ms_comm *comm, const ms_ids *ids)
{
    ms_host *host = comm->control_state;
    ms_ids_remove(host->control->ids_used, ids);
}

/* The keeper of this host asks that of the first one. If the job ends meanwhile there are none, and
 * the caller's next look at the job finds the cause. */
void ms_hosts_take(ms_comm *comm, uint32_t parts, ms_ids *ids)
{
    ms_host *host = comm->control_state;
    ms_rank_line *line = &host->control->lines[host->rank];
    atomic_store(&line->ids_answered, 0);
    atomic_store(&line->ids_wanted, parts);
    host->files->mirror->stir(host->files->mirror);
    while (!atomic_load(&line->ids_answered))
        if (ms_host_aborted(host)) return;
        else ms_host_nap(host, MS_IDS_LOOK_NS);
    for (int w = 0; w < MS_GROUPS_MAX / 64; w++) ids->words[w] |= line->ids_given.words[w];
}

/* Returns at once. The keeper collects the numbers when it next serves a request of this rank, or
 * looks at its line. */
void ms_hosts_give(ms_comm *comm, const ms_ids *ids)
{
    ms_host *host = comm->control_state;
    ms_ids_put(host->control->lines[host->rank].ids_back, ids);
    host->files->mirror->stir(host->files->mirror);
}
