/* p2p.c: send and recv: two ranks, numbered for each ordered pair, apart from the collectives of
 * their groups. */
#include "comm/transport/shm/p2p.h"

#include <errno.h>
#include <string.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/files.h"
#include "comm/control/shm/mismatch.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"
#include "comm/flow.h"
#include "comm/transport/shm/throttle.h"

/* The peer's world rank. */
static uint32_t other_of(const ms_comm_args *args) { return args->group->members[args->root]; }

/* The line of the ordered pair (sender, receiver). */
static ms_pair_line *line_of(const ms_shm_rank *self, const ms_comm_args *args)
{
    return args->kind == MS_SEND ? ms_pair(self->files, self->rank, other_of(args))
                                 : ms_pair(self->files, other_of(args), self->rank);
}

/* The sender's or the receiver's slot of this call. */
ms_ledger_entry *ms_pair_slot(const ms_shm_rank *self, const ms_comm_args *args, bool sender)
{
    ms_pair_line *line = line_of(self, args);
    return (sender ? line->sent : line->received) + (args->number & 1);
}

/* ------------------------------------------------------------------ waiting */

/* What the three kinds of waits wait for. First: the other side of this call has come. */
static bool other_entered(ms_wait *wait)
{
    ms_wait_turn(wait);
    return atomic_load(&ms_pair_slot(wait->self, wait->args, wait->args->kind != MS_SEND)->seq)
           >= wait->args->number;
}
/* The receiver has read so many chunks, which frees their halves of the staging area. */
static bool all_read(ms_wait *wait)
{
    return atomic_load(&line_of(wait->self, wait->args)->read) >= wait->target;
}
/* The sender has written so many chunks, which may be read now. */
static bool all_written(ms_wait *wait)
{
    return atomic_load(&line_of(wait->self, wait->args)->written) >= wait->target;
}
/* A pair has one other, so that is the rank that is waited for. */
static uint32_t missing(ms_wait *wait) { return other_of(wait->args); }

/* Whether the other's process ended before this wait came to its end. */
static bool has_ended(ms_wait *wait)
{
    bool gone = atomic_load(&wait->self->control->lines[other_of(wait->args)].gone) != 0;
    return gone && !wait->kind->reached(wait);
}

/* Both have entered, so only the end of the other's process can keep it from coming on. */
static void look_inside(ms_wait *wait)
{
    if (has_ended(wait)) ms_ledger_ended(wait->self, wait->args, other_of(wait->args), true);
}

/* `finished` is read before the count of calls: a rank that has finished issues no more, so a count
 * that is too small stays so. */
static void look_for_the_other(ms_wait *wait)
{
    ms_pair_line *line = line_of(wait->self, wait->args);
    bool finished = atomic_load(&wait->self->control->lines[other_of(wait->args)].finished) != 0,
         ended = has_ended(wait);
    uint64_t calls = atomic_load(wait->args->kind == MS_SEND ? &line->receives : &line->sends);
    if (finished && calls < wait->args->number)
        ms_ledger_gone(wait->self, wait->args, other_of(wait->args), calls, NULL);
    else if (ended) ms_ledger_ended(wait->self, wait->args, other_of(wait->args), false);
}

static const ms_wait_kind for_entry = { other_entered, look_for_the_other, missing },
                          for_reading = { all_read, look_inside, missing },
                          for_writing = { all_written, look_inside, missing };

/* The wait is on the stack of the task; deadlock.c sees it while it sleeps. */
static bool await(ms_local *local, const ms_comm_args *args, const ms_wait_kind *kind,
                  uint64_t target)
{
    ms_wait wait = { .kind = kind, .self = local->self, .args = args, .target = target };
    return ms_shm_wait(&wait);
}

/* ----------------------------------------------------------------- entering */

/* As ms_ledger_enter, for two ranks. seq is stored last, as in ms_ledger_enter: the other reads the
 * slot only after it. */
const ms_ledger_entry *ms_pair_post(ms_local *local, const ms_comm_args *args)
{
    ms_ledger_entry *mine = ms_pair_slot(local->self, args, args->kind == MS_SEND);
    ms_ledger_write(local->self, args, mine);
    local->flights[args->kind == MS_RECV] = ms_ledger_flight(local->self, &mine->call);
    atomic_store(&mine->seq, args->number);
    ms_shm_wake(local->self, other_of(args));
    return mine;
}

/* The other's slot is complete once its number is there. */
bool ms_pair_await(ms_local *local, const ms_comm_args *args, ms_helper *helper)
{
    const ms_ledger_entry *mine = ms_pair_slot(local->self, args, args->kind == MS_SEND),
                          *theirs = ms_pair_slot(local->self, args, args->kind != MS_SEND);
    ms_wait wait = { .kind = &for_entry, .self = local->self, .args = args, .helper = helper };
    if (!ms_shm_wait(&wait)) return false;
    if (ms_ledger_agree_pair(mine, theirs)) return true;
    ms_ledger_disagree_pair(local->self, args, theirs);
    return false;
}

/* ------------------------------------------------------------------- moving */

/* The bytes are written, or read, before the counter shows it. */
static void say(ms_local *local, const ms_comm_args *args, _Atomic uint64_t *word, uint64_t value)
{
    atomic_store(word, value);
    ms_shm_wake(local->self, other_of(args));
}

/* Chunks go through the sender's staging area: one half is filled while the other is read. The
 * counters continue from message to message. */
static ms_task_result send(ms_run *run, ms_local *local, const ms_comm_args *args, uint64_t *chunks)
{
    ms_pair_line *line = line_of(local->self, args);
    uint64_t bytes = args->count * ms_dtype_bytes(args->dtype), base = atomic_load(&line->written);
    /* The pages are taken at the first send: a rank that never sends pays nothing for them. */
    if (!local->pair_populated) {
        int error = ms_shm_files_populate_heap(
            local->self->files, local->self->rank,
            ms_stage(local->self->files, local->self->rank, MS_STAGE_AREAS - 1, 0),
            2 * MS_STAGE_BYTES);
        if (error)
            return ms_shm_raise(run, local->self, args,
                                error == -ENOMEM ? MS_ERROR_MEMORY : MS_ERROR_IO,
                                "no memory for staging a send");
        local->pair_populated = true;
    }
    for (uint64_t done = 0; done < bytes; done += MS_STAGE_BYTES) {
        uint64_t chunk = base + done / MS_STAGE_BYTES, rest = bytes - done;
        /* The first two chunks fill both halves, which the call before has left free. */
        if (done >= 2 * MS_STAGE_BYTES && !await(local, args, &for_reading, chunk - 1))
            return ms_shm_fail(run, local->self, args);
        memcpy(ms_stage(local->self->files, local->self->rank, MS_STAGE_AREAS - 1, chunk),
               args->in + done, rest < MS_STAGE_BYTES ? rest : MS_STAGE_BYTES);
        say(local, args, &line->written, chunk + 1);
    }
    *chunks = atomic_load(&line->written);
    return MS_TASK_DONE;
}

/* The counterpart of send: reads a chunk once it is written, and counts it as read, which frees its
 * half. */
static ms_task_result receive(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    ms_pair_line *line = line_of(local->self, args);
    uint64_t bytes = args->count * ms_dtype_bytes(args->dtype), base = atomic_load(&line->read);
    for (uint64_t done = 0; done < bytes; done += MS_STAGE_BYTES) {
        uint64_t chunk = base + done / MS_STAGE_BYTES, rest = bytes - done;
        if (!await(local, args, &for_writing, chunk + 1))
            return ms_shm_fail(run, local->self, args);
        memcpy(args->in + done,
               ms_stage(local->self->files, other_of(args), MS_STAGE_AREAS - 1, chunk),
               rest < MS_STAGE_BYTES ? rest : MS_STAGE_BYTES);
        say(local, args, &line->read, chunk + 1);
    }
    return MS_TASK_DONE;
}

/* A tensor in the sender's heap is one chunk, which the receiver reads in place. Large tensors are
 * copied once, by several threads. */
static ms_task_result receive_in_place(ms_run *run, ms_local *local, const ms_comm_args *args,
                                       uint64_t heap_offset)
{
    ms_pair_line *line = line_of(local->self, args);
    uint64_t chunk = atomic_load(&line->read) + 1;
    if (!await(local, args, &for_writing, chunk)) return ms_shm_fail(run, local->self, args);
    /* The slot has the offset plus 1, since 0 says that the tensor is in no heap. */
    ms_flow_copy(run, args->in, local->self->files->heaps[other_of(args)].memory + heap_offset - 1,
                 args->count * ms_dtype_bytes(args->dtype));
    say(local, args, &line->read, chunk);
    return MS_TASK_DONE;
}

/* Ends when the receiver has read all. The sender's stream may then reuse the tensor. */
static ms_task_result run_send(ms_run *run, ms_local *local, const ms_comm_args *args,
                               const ms_ledger_entry *mine)
{
    ms_pair_line *line = line_of(local->self, args);
    uint64_t chunks = 0;
    if (!ms_local_pace(local, args->wire_bytes)) return ms_shm_fail(run, local->self, args);
    /* One chunk represents the whole tensor: the receiver reads it in place. */
    if (mine->heap_offset) {
        chunks = atomic_load(&line->written) + 1;
        say(local, args, &line->written, chunks);
    } else if (send(run, local, args, &chunks) != MS_TASK_DONE) return MS_TASK_FAILED;
    return await(local, args, &for_reading, chunks) ? MS_TASK_DONE
                                                    : ms_shm_fail(run, local->self, args);
}

/* Whether the sender's tensor is in a heap decides the way; both ranks see it in the sender's slot.
 */
ms_task_result ms_pair_run(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    bool sends = args->kind == MS_SEND;
    ms_task_result result;
    if (ms_shm_aborted(local->self)) return ms_shm_fail(run, local->self, args);
    const ms_ledger_entry *mine = ms_pair_post(local, args),
                          *theirs = ms_pair_slot(local->self, args, !sends);
    if (!ms_pair_await(local, args, NULL)) return ms_shm_fail(run, local->self, args);
    if (sends) result = run_send(run, local, args, mine);
    else if (theirs->heap_offset) result = receive_in_place(run, local, args, theirs->heap_offset);
    else result = receive(run, local, args);
    if (result == MS_TASK_DONE) ms_ledger_landed(local->self, local->flights[!sends]);
    return result;
}

/* ------------------------------------------------------------------ in two parts */

/* One chunk represents the whole tensor, as for one in a heap. */
ms_task_result ms_pair_enter(ms_run *run, ms_local *local, const ms_comm_args *args,
                             const ms_ledger_entry **theirs)
{
    ms_pair_line *line = line_of(local->self, args);
    bool sends = args->kind == MS_SEND;
    if (ms_shm_aborted(local->self)) return ms_shm_fail(run, local->self, args);
    (void)ms_pair_post(local, args);
    *theirs = ms_pair_slot(local->self, args, !sends);
    bool entered = ms_pair_await(local, args, NULL);
    if (entered && sends) entered = ms_local_pace(local, args->wire_bytes);
    else if (entered) entered = await(local, args, &for_writing, atomic_load(&line->read) + 1);
    if (!entered) return ms_shm_fail(run, local->self, args);
    if (sends) say(local, args, &line->written, atomic_load(&line->written) + 1);
    return MS_TASK_DONE;
}

/* The sender leaves once the receiver has read. */
ms_task_result ms_pair_leave(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    ms_pair_line *line = line_of(local->self, args);
    bool sends = args->kind == MS_SEND;
    if (!sends) say(local, args, &line->read, atomic_load(&line->read) + 1);
    else if (!await(local, args, &for_reading, atomic_load(&line->written)))
        return ms_shm_fail(run, local->self, args);
    ms_ledger_landed(local->self, local->flights[!sends]);
    return MS_TASK_DONE;
}
