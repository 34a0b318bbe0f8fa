/* rendezvous.c: functions of moonshard/control.h for ranks and supervisors, which pass each call on
 * to the kind of the rendezvous. */
#include "comm/rendezvous.h"

/* Atomic, since thread ranks retain and release one rendezvous from their own threads. The count is
 * this process' own: other processes have a record of their own over the same files. */
ms_rendezvous *ms_rendezvous_retain(ms_rendezvous *rendezvous)
{
    atomic_fetch_add(&rendezvous->references, 1);
    return rendezvous;
}

/* The last reference closes this process' side. What other processes map stays. */
void ms_rendezvous_release(ms_rendezvous *rendezvous)
{
    if (rendezvous && atomic_fetch_sub(&rendezvous->references, 1) == 1)
        rendezvous->kind->close(rendezvous);
}

/* What follows passes on to the kind, whose table has a function for each. The context is the
 * caller's, because an error of this call is not the rendezvous' own. */
ms_status ms_rendezvous_share(ms_rendezvous *rendezvous, ms_context *context, char *text,
                              size_t bytes)
{
    return rendezvous->kind->share(rendezvous, context, text, bytes);
}

/* Fixed when the rendezvous is made. */
uint32_t ms_rendezvous_ranks(const ms_rendezvous *rendezvous) { return rendezvous->ranks; }

/* A rank asks before its engine starts: ranks of one node share its cores. */
uint32_t ms_rendezvous_threads(const ms_rendezvous *rendezvous)
{
    return rendezvous->kind->threads(rendezvous);
}

bool ms_rendezvous_crowded(const ms_rendezvous *rendezvous)
{
    return rendezvous->kind->crowded(rendezvous);
}

/* Before its engine starts, too: it decides which GPU is the rank's. */
uint32_t ms_rendezvous_place(const ms_rendezvous *rendezvous, uint32_t rank, uint32_t *here)
{
    return rendezvous->kind->place(rendezvous, rank, here);
}

/* A signal handler may call it, so a kind must not lock or allocate here. */
bool ms_rendezvous_abort(ms_rendezvous *rendezvous, ms_abort_reason reason, int32_t rank,
                         const char *message)
{
    return rendezvous->kind->abort(rendezvous, reason, rank, message);
}

/* A supervisor asks after its ranks have ended, and each rank asks before it raises an error of its
 * own: the first cause is the one to show. */
bool ms_rendezvous_cause(const ms_rendezvous *rendezvous, ms_abort_record *out)
{
    return rendezvous->kind->cause(rendezvous, out);
}

/* Values are read while the rank runs, so they are hints of about the same moment. */
void ms_rendezvous_rank(const ms_rendezvous *rendezvous, uint32_t rank, ms_rank_state *out)
{
    rendezvous->kind->rank(rendezvous, rank, out);
}

/* Reports read it after the rank has died: the record is in shared memory. */
bool ms_rendezvous_flight(const ms_rendezvous *rendezvous, uint32_t rank, uint64_t index,
                          ms_flight *out)
{
    return rendezvous->kind->flight(rendezvous, rank, index, out);
}

/* Without this, peers would wait for a rank that ended without an engine until their time limit. */
void ms_rendezvous_left(ms_rendezvous *rendezvous, uint32_t rank)
{
    rendezvous->kind->left(rendezvous, rank);
}

/* The host of the rank writes it, and the supervisor asks it questions; both look at the same
 * memory. */
ms_activity *ms_rendezvous_activity(ms_rendezvous *rendezvous, uint32_t rank)
{
    return rendezvous->kind->activity(rendezvous, rank);
}

/* Called once, before any rank joins: a rank must not give up on a peer by itself in one moment and
 * leave it to the supervisor in the next. */
void ms_rendezvous_judge(ms_rendezvous *rendezvous) { rendezvous->kind->judge(rendezvous); }

/* A supervisor looks at each tick; the text says which peer waits and in which call. */
bool ms_rendezvous_hang_report(ms_rendezvous *rendezvous, uint32_t rank,
                               char text[MS_HANG_REPORT_BYTES])
{
    return rendezvous->kind->hang_report(rendezvous, rank, text);
}

/* Until then, further hang reports of this rank are dropped. */
void ms_rendezvous_dismiss_hang_report(ms_rendezvous *rendezvous, uint32_t rank)
{
    rendezvous->kind->dismiss_hang_report(rendezvous, rank);
}

/* Signal handlers call it, too, so it neither waits nor retries; a request that comes while one of
 * its kind is pending is dropped. */
void ms_rendezvous_request(ms_rendezvous *rendezvous, ms_request kind, uint8_t value)
{
    rendezvous->kind->request(rendezvous, kind, value);
}

/* A supervisor writes its report there, next to what the ranks have written. */
const char *ms_rendezvous_folder(const ms_rendezvous *rendezvous, char *text, size_t bytes)
{
    return rendezvous->kind->folder(rendezvous, text, bytes);
}
