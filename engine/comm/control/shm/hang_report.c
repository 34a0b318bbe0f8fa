/* hang_report.c: reports to a supervisor about a rank that others have waited for too long. The
 * supervisor decides whether that rank still works. */
#include "comm/control/shm/hang_report.h"

#include <string.h>

/* Calls of the host and tasks done: it grows as long as the rank does anything. Only differences
 * count, so it need not begin at 0. */
uint64_t ms_rank_progress(const ms_rank_line *line)
{
    return atomic_load(&line->activity.calls) + atomic_load(&line->activity.done);
}

/* The first rank that reports writes; the others wait for the same decision. True: a supervisor
 * decides, and the caller goes on waiting. */
bool ms_suspect(ms_host *host, uint32_t missing, uint64_t progress, const char *text)
{
    if (!atomic_load(&host->control->judged)) return false;
    ms_suspicion *suspicion = &host->control->lines[missing].suspicion;
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&suspicion->state, &none, 1)) return true;
    suspicion->progress = progress;
    strncpy(suspicion->text, text, sizeof suspicion->text - 1);
    atomic_store(&suspicion->state, 2);
    return true;
}

/* From now on ranks report to a supervisor instead of ending the job at the time limit. */
void ms_host_judge(ms_rendezvous *rendezvous)
{
    atomic_store(&ms_host_files_of(rendezvous)->control->judged, 1);
}

/* A report counts only while the rank has done nothing since it was written. */
bool ms_host_suspect(ms_rendezvous *rendezvous, uint32_t rank, char text[MS_SUSPICION_BYTES])
{
    ms_rank_line *line = &ms_host_files_of(rendezvous)->control->lines[rank];
    if (atomic_load(&line->suspicion.state) != 2) return false;
    memcpy(text, line->suspicion.text, MS_SUSPICION_BYTES);
    text[MS_SUSPICION_BYTES - 1] = '\0';
    return line->suspicion.progress == ms_rank_progress(line);
}

/* Frees the place for the next report; one that is being written is left alone. */
void ms_host_acquit(ms_rendezvous *rendezvous, uint32_t rank)
{
    uint32_t complete = 2;
    atomic_compare_exchange_strong(
        &ms_host_files_of(rendezvous)->control->lines[rank].suspicion.state, &complete, 0);
}
