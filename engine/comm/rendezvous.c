/* rendezvous.c: a rendezvous, of whatever kind, for ranks and supervisors. */
#include "comm/rendezvous.h"

ms_rendezvous *ms_rendezvous_retain(ms_rendezvous *rendezvous)
{
    atomic_fetch_add(&rendezvous->references, 1);
    return rendezvous;
}

void ms_rendezvous_release(ms_rendezvous *rendezvous)
{
    if (rendezvous && atomic_fetch_sub(&rendezvous->references, 1) == 1)
        rendezvous->kind->close(rendezvous);
}

ms_status ms_rendezvous_share(ms_rendezvous *rendezvous, ms_context *context, char *text,
                              size_t bytes)
{
    return rendezvous->kind->share(rendezvous, context, text, bytes);
}

uint32_t ms_rendezvous_ranks(const ms_rendezvous *rendezvous) { return rendezvous->ranks; }

uint32_t ms_rendezvous_threads(const ms_rendezvous *rendezvous)
{
    return rendezvous->kind->threads(rendezvous);
}

bool ms_rendezvous_abort(ms_rendezvous *rendezvous, ms_abort_reason reason, int32_t rank,
                         const char *message)
{
    return rendezvous->kind->abort(rendezvous, reason, rank, message);
}

bool ms_rendezvous_cause(const ms_rendezvous *rendezvous, ms_abort_record *out)
{
    return rendezvous->kind->cause(rendezvous, out);
}

void ms_rendezvous_rank(const ms_rendezvous *rendezvous, uint32_t rank, ms_rank_state *out)
{
    rendezvous->kind->rank(rendezvous, rank, out);
}

bool ms_rendezvous_flight(const ms_rendezvous *rendezvous, uint32_t rank, uint64_t index,
                          ms_flight *out)
{
    return rendezvous->kind->flight(rendezvous, rank, index, out);
}

void ms_rendezvous_left(ms_rendezvous *rendezvous, uint32_t rank)
{
    rendezvous->kind->left(rendezvous, rank);
}

ms_activity *ms_rendezvous_activity(ms_rendezvous *rendezvous, uint32_t rank)
{
    return rendezvous->kind->activity(rendezvous, rank);
}

void ms_rendezvous_judge(ms_rendezvous *rendezvous) { rendezvous->kind->judge(rendezvous); }

bool ms_rendezvous_suspect(ms_rendezvous *rendezvous, uint32_t rank, char text[MS_SUSPICION_BYTES])
{
    return rendezvous->kind->suspect(rendezvous, rank, text);
}

void ms_rendezvous_acquit(ms_rendezvous *rendezvous, uint32_t rank)
{
    rendezvous->kind->acquit(rendezvous, rank);
}

void ms_rendezvous_request(ms_rendezvous *rendezvous, ms_request kind, uint8_t value)
{
    rendezvous->kind->request(rendezvous, kind, value);
}

const char *ms_rendezvous_folder(const ms_rendezvous *rendezvous, char *text, size_t bytes)
{
    return rendezvous->kind->folder(rendezvous, text, bytes);
}
