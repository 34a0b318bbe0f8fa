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
bool ms_report_hang(ms_shm_rank *self, uint32_t missing, uint64_t progress, const char *text)
{
    if (!atomic_load(&self->control->judged)) return false;
    ms_hang_report *hang_report = &self->control->lines[missing].hang_report;
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&hang_report->state, &none, 1)) return true;
    hang_report->progress = progress;
    strncpy(hang_report->text, text, sizeof hang_report->text - 1);
    atomic_store(&hang_report->state, 2);
    return true;
}

/* From now on ranks report to a supervisor instead of ending the job at the time limit. */
void ms_shm_judge(ms_rendezvous *rendezvous)
{
    atomic_store(&ms_shm_files_of(rendezvous)->control->judged, 1);
}

/* A report counts only while the rank has done nothing since it was written. */
bool ms_shm_hang_report(ms_rendezvous *rendezvous, uint32_t rank, char text[MS_HANG_REPORT_BYTES])
{
    ms_rank_line *line = &ms_shm_files_of(rendezvous)->control->lines[rank];
    if (atomic_load(&line->hang_report.state) != 2) return false;
    memcpy(text, line->hang_report.text, MS_HANG_REPORT_BYTES);
    text[MS_HANG_REPORT_BYTES - 1] = '\0';
    return line->hang_report.progress == ms_rank_progress(line);
}

/* Frees the place for the next report; one that is being written is left alone. */
void ms_shm_dismiss_hang_report(ms_rendezvous *rendezvous, uint32_t rank)
{
    uint32_t complete = 2;
    atomic_compare_exchange_strong(
        &ms_shm_files_of(rendezvous)->control->lines[rank].hang_report.state, &complete, 0);
}
