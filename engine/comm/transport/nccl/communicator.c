/* communicator.c: whose turn it is in a communicator, waiting for calls in progress, and what an
 * error of NCCL says. */
#include "comm/transport/nccl/communicator.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/flight.h"

#define SPIN_NS 100000u
#define NAP_NS 200000u

/* The supervisor or any rank may have ended it. It is asked in every turn of a waiting loop, and
 * usually costs two loads. */
bool ms_nccl_job_ended(ms_nccl *nccl, ms_abort_record *cause)
{
    ms_abort_record record;
    return ms_rendezvous_cause(nccl->rendezvous, cause ? cause : &record)
           || atomic_load(&nccl->ended);
}

/* NCCL tells nobody when a call has ended, so waiting is asking again. A short call costs no system
 * call but for the yield. The bell ends a nap when the job ends. */
void ms_nccl_nap(ms_nccl *nccl, uint64_t since_ns)
{
    uint32_t seen = ms_bell_read(&nccl->bell);
    if (ms_nccl_now(nccl) - since_ns < SPIN_NS) ms_yield();
    else if (!atomic_load(&nccl->ended)) ms_futex_wait(&nccl->bell.rings, seen, NAP_NS);
}

bool ms_nccl_try_take(ms_communicator *communicator)
{
    uint32_t free = 0;
    return atomic_compare_exchange_strong(&communicator->turn, &free, 1);
}

/* The watchdog has the list for looks, which are short; from the end on it keeps it. */
bool ms_nccl_hold_list(ms_nccl *nccl)
{
    uint64_t since = ms_nccl_now(nccl);
    for (uint32_t free = 0; !atomic_compare_exchange_strong(&nccl->looking, &free, 1); free = 0) {
        if (atomic_load(&nccl->stage) != MS_NCCL_WATCHING) return false;
        ms_nccl_nap(nccl, since);
    }
    if (atomic_load(&nccl->stage) == MS_NCCL_WATCHING) return true;
    ms_nccl_let_list(nccl);
    return false;
}

void ms_nccl_let_list(ms_nccl *nccl) { atomic_store(&nccl->looking, 0); }

/* Sends and recvs are tasks of two streams, whose order the threads would make up. On a device, the
 * order of launches is that of calls. A communicator that was closed under a waiting task has no
 * handle: the job has ended then. */
bool ms_nccl_take(ms_nccl *nccl, ms_communicator *communicator, const ms_comm_args *args)
{
    uint64_t since = ms_nccl_now(nccl);
    while (!ms_nccl_job_ended(nccl, NULL)) {
        bool is_next = !args->turn || atomic_load(&communicator->served) + 1 == args->turn;
        if (is_next && ms_nccl_try_take(communicator)) {
            if (communicator->handle) return true;
            ms_nccl_give(communicator);
        }
        ms_nccl_nap(nccl, since);
    }
    return false;
}

void ms_nccl_give(ms_communicator *communicator) { atomic_store(&communicator->turn, 0); }

/* It looks at the end of the job last: what has succeeded by then has its result. */
ms_nccl_result ms_nccl_settle(ms_nccl *nccl, const ms_communicator *communicator,
                              ms_nccl_result result)
{
    uint64_t since = ms_nccl_now(nccl);
    while (result == MS_NCCL_IN_PROGRESS) {
        bool has_ended = ms_nccl_job_ended(nccl, NULL);
        ms_nccl_result failed = nccl->api.comm_get_async_error(communicator->handle, &result);
        if (failed) return failed;
        if (has_ended) break;
        if (result == MS_NCCL_IN_PROGRESS) ms_nccl_nap(nccl, since);
    }
    return result;
}

/* On the thread that makes the communicator's calls and not when the memory is made: NCCL takes one
 * call at a time, and the host must not wait for one that waits for peers. */
ms_nccl_result ms_nccl_register(ms_nccl *nccl, const ms_nccl_group *group,
                                ms_communicator *communicator)
{
    const ms_nccl_range *newest = atomic_load(&nccl->ranges);
    if (!group->registers) return MS_NCCL_SUCCESS;
    for (const ms_nccl_range *r = newest; r != communicator->registered; r = r->next) {
        void *handle = NULL;
        ms_nccl_result result = ms_nccl_settle(
            nccl, communicator,
            nccl->api.comm_register(communicator->handle, r->memory, r->bytes, &handle));
        if (result) return result;
    }
    communicator->registered = newest;
    return MS_NCCL_SUCCESS;
}

/* ncclGetLastError is asked without a communicator: the one that failed may be in the hands of
 * another thread. */
void ms_nccl_explain(const ms_nccl *nccl, const char *function, ms_nccl_result result,
                     const char *where, ms_error *out)
{
    const char *why = nccl->api.get_error_string(result), *last = nccl->api.get_last_error(NULL);
    bool has_more = last && *last;
    /* The second is what NCCL 2.30 and later say. */
    const char *help =
        has_more && (strstr(last, "Duplicate GPU") || strstr(last, "Ranks are using the same GPU"))
            ? ": NCCL wants a GPU for each rank: start fewer ranks, or show more "
              "GPUs (CUDA_VISIBLE_DEVICES); with --share-gpu ranks share GPUs "
              "without NCCL; with it they may where NCCL_HOSTID is set to another "
              "text for each of them; slices (MIG) of one GPU count as that GPU: "
              "MOONSHARD_TRANSPORT=local does without NCCL"
            : "";
    out->status = MS_ERROR_IO;
    out->rank = (int32_t)nccl->comm->groups[0]->rank;
    snprintf(out->message, sizeof out->message,
             "%s fails on rank %" PRId32 " in %s: %.200s%s%.300s%s", function, out->rank, where,
             why ? why : "unknown error", has_more ? ": " : "", has_more ? last : "", help);
}

void ms_nccl_name(const ms_comm_args *args, char *text, size_t bytes, ms_error *error)
{
    ms_flight flight = ms_flight_of(args);
    ms_flight_describe(&flight, text, bytes);
    if (!error) return;
    error->collective = (int64_t)args->number;
    error->bucket = args->bucket;
    snprintf(error->operation, sizeof error->operation, "%s",
             ms_collective_name((ms_collective_kind)args->kind));
}
