/* in_flight.c: calls that NCCL has put on a GPU's stream, until the host knows that they have
 * ended.
 */
#include "comm/transport/nccl/in_flight.h"

#include <string.h>

#include "comm/transport/nccl/call.h"
#include "comm/transport/nccl/watchdog.h"

ms_nccl_in_flight *ms_nccl_flight_begin(const ms_comm_args *args)
{
    ms_comm *comm = args->group->comm;
    ms_nccl *nccl = comm->transport_state;
    void *memory = nccl->spare;
    if (memory) nccl->spare = nccl->spare->next;
    else if (ms_host_memory_new(comm->engine, sizeof(ms_nccl_in_flight), "call", &memory))
        return NULL;
    ms_nccl_in_flight *flight = memory;
    memset(memory, 0, sizeof *flight);
    flight->to = ms_nccl_communicator_of(args);
    flight->args = *args;
    ms_nccl_lock(flight->to);
    ms_nccl_in_flight **at = &flight->to->flights;
    while (*at) at = &(*at)->next;
    *at = flight;
    ms_nccl_unlock(flight->to);
    return flight;
}

/* What control has not heard of yet. With the lock. */
static void report(ms_comm *comm, ms_nccl_in_flight *flight)
{
    const ms_control *control = flight->args.group->control;
    bool has_ended = flight->ended != 0;
    if (!flight->has_entered && (has_ended || flight->started)) {
        flight->place = control->entered(comm, &flight->args);
        flight->has_entered = true;
    }
    if (flight->has_landed || !has_ended) return;
    control->landed(comm, flight->place);
    flight->has_landed = true;
}

/* A call that NCCL could not launch has made the stream fail already. */
ms_status ms_nccl_flight_land(void *user, ms_error *error)
{
    ms_nccl_in_flight *flight = user;
    ms_comm *comm = flight->args.group->comm;
    ms_nccl *nccl = comm->transport_state;
    ms_nccl_lock(flight->to);
    ms_nccl_in_flight **at = &flight->to->flights;
    while (*at != flight) at = &(*at)->next;
    *at = flight->next;
    if (!flight->is_aborted) report(comm, flight);
    ms_nccl_unlock(flight->to);
    bool is_aborted = flight->is_aborted;
    if (is_aborted) ms_nccl_end_of(&flight->args, error);
    flight->next = nccl->spare;
    nccl->spare = flight;
    return is_aborted ? error->status : MS_OK;
}

/* The streams have ended, so all are spare. */
void ms_nccl_flights_free(ms_nccl *nccl)
{
    while (nccl->spare) {
        ms_nccl_in_flight *flight = nccl->spare;
        nccl->spare = flight->next;
        ms_host_memory_free(nccl->comm->engine, flight);
    }
}

/* Only the first one that has started and not ended waits for peers. Control looks at a copy, since
 * the host thread must not wait for that. */
uint64_t ms_nccl_in_flight_look(ms_nccl *nccl, ms_communicator *communicator)
{
    ms_comm_args args;
    ms_awaited awaited;
    ms_nccl_in_flight *first = NULL;
    ms_nccl_lock(communicator);
    for (ms_nccl_in_flight *f = communicator->flights; f; f = f->next) {
        report(nccl->comm, f);
        if (!first && f->started && !f->ended) first = f;
    }
    if (first) {
        if (!first->awaited.since_ns) first->awaited.since_ns = ms_nccl_now(nccl);
        args = first->args;
        awaited = first->awaited;
    }
    ms_nccl_unlock(communicator);
    if (!first) return UINT64_MAX;
    uint64_t next = nccl->comm->control->look(nccl->comm, &args, &awaited);
    ms_nccl_lock(communicator);
    for (ms_nccl_in_flight *f = communicator->flights; f; f = f->next)
        if (f == first && f->args.number == args.number) f->awaited = awaited;
    ms_nccl_unlock(communicator);
    return next;
}

void ms_nccl_flights_abort(ms_nccl *nccl)
{
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) {
            ms_nccl_lock(&g->communicators[i]);
            for (ms_nccl_in_flight *f = g->communicators[i].flights; f; f = f->next)
                f->is_aborted = !f->ended;
            ms_nccl_unlock(&g->communicators[i]);
        }
}
