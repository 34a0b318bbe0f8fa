/* pair.c: send and recv: two ranks, numbered for each ordered pair, apart from the collectives of
 * their groups. */
#include "comm/local/control.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "comm/flow.h"

static uint32_t other_of(const ms_comm_args *args) { return args->group->members[args->root]; }

static ms_pair_line *line_of(const ms_local *local, const ms_comm_args *args)
{
    return args->kind == MS_SEND ? ms_pair(local->rendezvous, local->rank, other_of(args))
                                 : ms_pair(local->rendezvous, other_of(args), local->rank);
}

static ms_ledger_slot *slot_of(const ms_local *local, const ms_comm_args *args, bool sender)
{
    ms_pair_line *line = line_of(local, args);
    return (sender ? line->sent : line->received) + (args->number & 1);
}

/* ------------------------------------------------------------------ waiting */

static bool other_entered(ms_wait *wait)
{
    return atomic_load(&slot_of(wait->local, wait->args, wait->args->kind != MS_SEND)->seq)
           >= wait->args->number;
}
static bool all_read(ms_wait *wait)
{
    return atomic_load(&line_of(wait->local, wait->args)->read) >= wait->target;
}
static bool all_written(ms_wait *wait)
{
    return atomic_load(&line_of(wait->local, wait->args)->written) >= wait->target;
}
static uint32_t missing(ms_wait *wait) { return other_of(wait->args); }

/* Whether the other's process ended before this wait, which had begun, could come to its end. */
static bool has_ended(ms_wait *wait)
{
    bool gone = atomic_load(&wait->local->control->lines[other_of(wait->args)].gone) != 0;
    return gone && !wait->reached(wait);
}

static void look_inside(ms_wait *wait)
{
    if (has_ended(wait)) ms_ledger_ended(wait->local, wait->args, other_of(wait->args), true);
}

static void look_for_the_other(ms_wait *wait)
{
    ms_pair_line *line = line_of(wait->local, wait->args);
    bool finished = atomic_load(&wait->local->control->lines[other_of(wait->args)].finished) != 0,
         ended = has_ended(wait);
    uint64_t calls = atomic_load(wait->args->kind == MS_SEND ? &line->receives : &line->sends);
    if (finished && calls < wait->args->number)
        ms_ledger_gone(wait->local, wait->args, other_of(wait->args), calls, NULL);
    else if (ended) ms_ledger_ended(wait->local, wait->args, other_of(wait->args), false);
}

static bool await(ms_local *local, const ms_comm_args *args, bool (*reached)(ms_wait *),
                  uint64_t target)
{
    ms_wait wait = { .reached = reached,
                     .hopeless = reached == other_entered ? look_for_the_other : look_inside,
                     .missing = missing,
                     .local = local,
                     .args = args,
                     .target = target };
    return ms_local_wait(&wait);
}

/* ----------------------------------------------------------------- entering */

static void disagree(ms_local *local, const ms_comm_args *args, const ms_ledger_slot *mine,
                     const ms_ledger_slot *theirs)
{
    char text[MS_ERROR_MESSAGE_BYTES], a[256], b[256];
    snprintf(text, sizeof text, "ranks disagree:\n  rank %u: %s to or from rank %u\n  rank %u: %s",
             local->rank, ms_flight_describe(&mine->call, a, sizeof a), other_of(args),
             other_of(args), ms_flight_describe(&theirs->call, b, sizeof b));
    ms_rendezvous_abort(local->rendezvous, MS_ABORT_MISMATCH, (int32_t)other_of(args), text);
}

static bool enter(ms_local *local, const ms_comm_args *args, ms_ledger_slot **mine,
                  const ms_ledger_slot **theirs)
{
    *mine = slot_of(local, args, args->kind == MS_SEND);
    *theirs = slot_of(local, args, args->kind != MS_SEND);
    if (ms_local_aborted(local)) return false;
    ms_ledger_write(local, args, *mine);
    local->flights[args->kind == MS_RECV] = ms_ledger_flight(local, &(*mine)->call);
    atomic_store(&(*mine)->seq, args->number);
    ms_local_wake(local, other_of(args));
    if (!await(local, args, other_entered, 0)) return false;
    const ms_flight *x = &(*mine)->call, *y = &(*theirs)->call;
    if (x->dtype == y->dtype && x->count == y->count && x->group == y->group) return true;
    disagree(local, args, *mine, *theirs);
    return false;
}

/* ------------------------------------------------------------------- moving */

static void say(ms_local *local, const ms_comm_args *args, _Atomic uint64_t *word, uint64_t value)
{
    atomic_store(word, value);
    ms_local_wake(local, other_of(args));
}

/* Chunks through the sender's staging area, one being filled while the other is read. The counters
 * go on from message to message. */
static ms_task_result send(ms_run *run, ms_local *local, const ms_comm_args *args, uint64_t *chunks)
{
    ms_pair_line *line = line_of(local, args);
    uint64_t bytes = args->count * ms_dtype_bytes(args->dtype), base = atomic_load(&line->written);
    if (!local->pair_populated) {
        int error = ms_rendezvous_populate_heap(
            local->rendezvous, local->rank,
            ms_stage(local->rendezvous, local->rank, MS_STAGE_AREAS - 1, 0), 2 * MS_STAGE_BYTES);
        if (error)
            return ms_local_raise(run, local, args,
                                  error == -ENOMEM ? MS_ERROR_MEMORY : MS_ERROR_IO,
                                  "no memory for staging a send");
        local->pair_populated = true;
    }
    for (uint64_t done = 0; done < bytes; done += MS_STAGE_BYTES) {
        uint64_t chunk = base + done / MS_STAGE_BYTES, rest = bytes - done;
        if (done >= 2 * MS_STAGE_BYTES && !await(local, args, all_read, chunk - 1))
            return ms_local_fail(run, local, args);
        memcpy(ms_stage(local->rendezvous, local->rank, MS_STAGE_AREAS - 1, chunk), args->in + done,
               rest < MS_STAGE_BYTES ? rest : MS_STAGE_BYTES);
        say(local, args, &line->written, chunk + 1);
    }
    *chunks = atomic_load(&line->written);
    return MS_TASK_DONE;
}

static ms_task_result receive(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    ms_pair_line *line = line_of(local, args);
    uint64_t bytes = args->count * ms_dtype_bytes(args->dtype), base = atomic_load(&line->read);
    for (uint64_t done = 0; done < bytes; done += MS_STAGE_BYTES) {
        uint64_t chunk = base + done / MS_STAGE_BYTES, rest = bytes - done;
        if (!await(local, args, all_written, chunk + 1)) return ms_local_fail(run, local, args);
        memcpy(args->in + done,
               ms_stage(local->rendezvous, other_of(args), MS_STAGE_AREAS - 1, chunk),
               rest < MS_STAGE_BYTES ? rest : MS_STAGE_BYTES);
        say(local, args, &line->read, chunk + 1);
    }
    return MS_TASK_DONE;
}

ms_task_result ms_pair_run(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    ms_pair_line *line = line_of(local, args);
    ms_ledger_slot *mine;
    const ms_ledger_slot *theirs;
    bool sender = args->kind == MS_SEND;
    if (!enter(local, args, &mine, &theirs)) return ms_local_fail(run, local, args);
    if (sender && !ms_local_pace(local, args->wire_bytes)) return ms_local_fail(run, local, args);
    const ms_ledger_slot *sent = sender ? mine : theirs;
    uint64_t chunks = 0;
    ms_task_result result = MS_TASK_DONE;
    if (sent->heap_offset) { /* one chunk, read where it lies */
        if (sender) say(local, args, &line->written, chunks = atomic_load(&line->written) + 1);
        else {
            uint64_t chunk = atomic_load(&line->read) + 1;
            if (!await(local, args, all_written, chunk)) return ms_local_fail(run, local, args);
            ms_flow_copy(run, args->in,
                         local->rendezvous->heaps[other_of(args)].memory + sent->heap_offset - 1,
                         args->count * ms_dtype_bytes(args->dtype));
            say(local, args, &line->read, chunk);
        }
    } else result = sender ? send(run, local, args, &chunks) : receive(run, local, args);
    if (result == MS_TASK_DONE && sender && !await(local, args, all_read, chunks))
        return ms_local_fail(run, local, args);
    if (result == MS_TASK_DONE) ms_ledger_landed(local, local->flights[!sender]);
    return result;
}
