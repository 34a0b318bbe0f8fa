/* job_end.c: why a job has ended, and the flight records that its ranks have left. */
#include "comm/control/shm/job_end.h"

#include <string.h>

#include "comm/control/shm/files.h"

#define MS_AGREE_NS ((uint64_t)1000000000) /* a message to another node and back, and more */

/* Unconditionally, also where no thread sleeps: it runs when a job ends, where a lost wake would be
 * worse than a system call. */
void ms_shm_ring_all(ms_control_file *control)
{
    for (uint32_t r = 0; r < control->ranks; r++) {
        atomic_fetch_add(&control->lines[r].bell, 1);
        ms_futex_wake_shared(&control->lines[r].bell, UINT32_MAX);
    }
}

/* strncpy that always ends the text. Safe in signal handlers, like everything that
 * ms_shm_end_job calls. */
static void copy_text(char *to, const char *from, size_t bytes)
{
    size_t i = 0;
    for (; from && from[i] && i + 1 < bytes; i++) to[i] = from[i];
    to[i] = '\0';
}

/* The status that ranks raise for this reason. */
static ms_status status_of(ms_abort_reason reason)
{
    if (reason == MS_ABORT_MISMATCH) return MS_ERROR_MISMATCH;
    return reason == MS_ABORT_TIMEOUT ? MS_ERROR_TIMEOUT : MS_ERROR_ABORTED;
}

/* The first caller of all ranks and the supervisor wins the exchange and writes the record; all
 * others return false. 2 is stored after the record is complete. Safe in signal handlers: no lock,
 * no allocation, no stdio. */
bool ms_shm_end_job(ms_shm_files *files, ms_abort_reason reason, int32_t rank, const char *message)
{
    ms_control_file *control = files->control;
    uint32_t none = 0;
    /* From here on every waiting rank sees that the job ends, and waits for the text. */
    if (!atomic_compare_exchange_strong(&control->aborted, &none, 1)) return false;
    ms_error *error = &control->record.error;
    control->record.reason = reason;
    error->status = status_of(reason);
    error->rank = rank;
    error->collective = -1;
    error->bucket = -1;
    copy_text(error->message, message, sizeof error->message);
    atomic_store(&control->aborted, 2);
    ms_shm_ring_all(control);
    if (files->replication) files->replication->stir(files->replication);
    return true;
}

/* Whether the word gets this value, in so long. */
static bool await_word(const ms_os *os, ms_word *word, uint32_t value, uint64_t most_ns)
{
    uint64_t limit = os->monotonic_ns(os->user) + most_ns;
    for (uint32_t now; (now = atomic_load(word)) != value;) {
        if (os->monotonic_ns(os->user) >= limit) return false;
        ms_futex_wait_shared(word, now, 1000000);
    }
    return true;
}

/* A rank may have died while it wrote the record: then there is a cause, but no text. A writer
 * needs microseconds; 20 ms without it mean that it died. */
bool ms_shm_own_cause(const ms_shm_files *files, ms_abort_record *out)
{
    ms_control_file *control = files->control;
    if (!atomic_load(&control->aborted)) return false;
    if (await_word(files->base.os, &control->aborted, 2, 20000000)) {
        *out = control->record;
        out->error.message[sizeof out->error.message - 1] = '\0';
        return true;
    }
    memset(out, 0, sizeof *out);
    out->reason = MS_ABORT_DIED;
    out->error.status = MS_ERROR_ABORTED;
    out->error.rank = out->error.bucket = -1;
    out->error.collective = -1;
    copy_text(out->error.message, "a rank died while it reported why the job ends",
              sizeof out->error.message);
    return true;
}

/* Over several nodes it is what the agents have agreed on. Where they cannot, since the network or
 * an agent is gone, it is what this node has: one process of it waits in vain, once. */
bool ms_shm_cause(const ms_shm_files *files, ms_abort_record *out)
{
    ms_control_file *control = files->control;
    if (!atomic_load(&control->aborted)) return false;
    if (control->nodes > 1 && !atomic_load(&control->unheard)
        && !await_word(files->base.os, &control->agreed, 1, MS_AGREE_NS))
        atomic_store(&control->unheard, 1);
    if (!atomic_load(&control->agreed)) return ms_shm_own_cause(files, out);
    *out = control->agreed_record;
    return true;
}

/* The ring may be overwritten while it is read, so texts are ended here. index counts all entries
 * of the rank. Calls count from 1: an entry of a rank on another node that has not arrived is 0.
 * Group names are ended by the writer; they are shorter than their field. */
bool ms_shm_flight(const ms_shm_files *files, uint32_t rank, uint64_t index, ms_flight *out)
{
    ms_rank_line *line = &files->control->lines[rank];
    uint64_t count = atomic_load(&line->flights);
    if (index >= count || index + MS_FLIGHTS < count) return false;
    ms_copy_words(out, &line->flight[index % MS_FLIGHTS], sizeof *out);
    out->label[sizeof out->label - 1] = out->script[sizeof out->script - 1] = '\0';
    return out->number > 0;
}
