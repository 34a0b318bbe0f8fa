/* message.c: messages to ranks on other hosts: started, delayed as a simulated link asks, awaited.
 */
#include "comm/transport/mpi/message.h"

#include <stdio.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/job_end.h"
#include "comm/control/shm/mismatch.h"
#include "comm/control/shm/record.h"
#include "comm/control/shm/wait.h"

/* ----------------------------------------------------------------- starting */

/* All that this rank sends to other hosts shares its link, which is busy from the moment when the
 * data are ready. As in ms_local_pace, but nothing waits: the message goes later. 0: at once. */
static uint64_t due_of(const ms_post *post, uint64_t bytes)
{
    ms_local *local = &post->hosts->local;
    const ms_control_file *control = local->host->control;
    uint64_t rate = control->link_bytes_per_second;
    if (!rate && !control->link_latency_ns) return 0;
    uint64_t takes = rate ? bytes / rate * 1000000000u + bytes % rate * 1000000000u / rate : 0;
    uint64_t before = atomic_load(&local->link_free), after, now = ms_host_now(local->host);
    do after = (before > now ? before : now) + takes;
    while (!atomic_compare_exchange_weak(&local->link_free, &before, after));
    return after + control->link_latency_ns;
}

static void start(ms_post *post, ms_parcel *parcel, uint32_t member)
{
    parcel->member = member;
    parcel->busy = true;
    parcel->message.peer = post->args->group->members[member];
    parcel->message.tag = post->tag;
    atomic_store_explicit(&parcel->message.state, MS_MPI_NEW, memory_order_relaxed);
}

/* Messages that wait for the link keep their order, since their times only grow. */
void ms_post_send(ms_post *post, ms_parcel *parcel, uint32_t member, const void *memory,
                  size_t bytes)
{
    parcel->message =
        (ms_mpi_message){ .memory = (void *)(uintptr_t)memory, .bytes = bytes, .sends = true };
    start(post, parcel, member);
    parcel->due_ns = due_of(post, bytes);
    parcel->next = NULL;
    if (!parcel->due_ns) {
        ms_mpi_post(post->hosts->mpi, &parcel->message);
        return;
    }
    if (post->delayed) post->last_delayed->next = parcel;
    else post->delayed = parcel;
    post->last_delayed = parcel;
    post->helper.due_ns = post->delayed->due_ns;
}

void ms_post_receive(ms_post *post, ms_parcel *parcel, uint32_t member, void *memory, size_t room)
{
    parcel->message = (ms_mpi_message){ .memory = memory, .bytes = room };
    start(post, parcel, member);
    ms_mpi_post(post->hosts->mpi, &parcel->message);
}

void ms_post_delayed(ms_post *post)
{
    if (!post->delayed) return;
    uint64_t now = ms_host_now(post->hosts->local.host);
    while (post->delayed && post->delayed->due_ns <= now) {
        ms_parcel *parcel = post->delayed;
        post->delayed = parcel->next;
        ms_mpi_post(post->hosts->mpi, &parcel->message);
    }
    post->helper.due_ns = post->delayed ? post->delayed->due_ns : UINT64_MAX;
}

/* ----------------------------------------------------------------- awaiting */

/* In which the keepers tell that a rank has died, also on a busy machine. */
#define MS_TOLD_NS ((uint64_t)1000000000)

const char *ms_post_hangs(ms_helper *helper)
{
    return ms_mpi_hangs(((ms_post *)(void *)helper)->hosts->mpi);
}

/* A message that fails ends the job: what it carried is lost. MPI may know of the death of a peer
 * before the keepers have told it, and theirs is the better cause. */
static void fail(ms_post *post, const ms_parcel *parcel)
{
    char text[512], call[256];
    ms_host *host = post->hosts->local.host;
    if (!ms_host_sleep_until(host, ms_host_now(host) + MS_TOLD_NS)) return;
    const ms_comm_args *args = post->args;
    ms_ledger_slot mine;
    ms_ledger_write(host, args, &mine);
    snprintf(text, sizeof text, "because rank %u: MPI did not %s %s rank %u in %s: %s", host->rank,
             parcel->message.sends ? "send" : "receive", parcel->message.sends ? "to" : "from",
             parcel->message.peer, ms_flight_describe(&mine.call, call, sizeof call),
             parcel->message.why);
    ms_host_end_job(host->files, MS_ABORT_RAISED, (int32_t)host->rank, text);
}

bool ms_parcel_ended(ms_post *post, ms_parcel *parcel)
{
    if (!parcel->busy) return true;
    ms_mpi_state state = ms_mpi_look(&parcel->message);
    if (state == MS_MPI_ENDED) parcel->busy = false;
    else if (state == MS_MPI_FAILED && !ms_host_aborted(post->hosts->local.host))
        fail(post, parcel);
    return !parcel->busy;
}

/* A wait for the messages of a batch. */
typedef struct batch_wait {
    ms_wait wait; /* first */
    ms_post *post;
    ms_batch *batch;
} batch_wait;

static bool all_ended(ms_wait *wait)
{
    batch_wait *own = (batch_wait *)(void *)wait;
    ms_wait_turn(wait);
    for (; wait->cursor < own->batch->used; wait->cursor++)
        if (!ms_parcel_ended(own->post, &own->batch->parcels[wait->cursor])) return false;
    return true;
}

static uint32_t missing(ms_wait *wait)
{
    batch_wait *own = (batch_wait *)(void *)wait;
    uint32_t at = wait->cursor < own->batch->used ? wait->cursor : 0;
    return own->batch->parcels[at].message.peer;
}

/* Both are in the call, so only the end of the other's process can keep the message from coming. */
static void look_for_ended(ms_wait *wait)
{
    uint32_t other = missing(wait);
    bool gone = atomic_load(&wait->host->control->lines[other].gone) != 0;
    if (gone && !all_ended(wait)) ms_ledger_ended(wait->host, wait->args, other, true);
}

static const ms_wait_kind for_messages = { all_ended, look_for_ended, missing };

bool ms_post_await(ms_post *post, ms_batch *batch)
{
    batch_wait own = { .wait = { .kind = &for_messages,
                                 .host = post->hosts->local.host,
                                 .args = post->args,
                                 .helper = &post->helper },
                       .post = post,
                       .batch = batch };
    bool ended = batch->used == 0 || ms_host_wait(&own.wait);
    if (ended) batch->used = 0;
    return ended;
}

ms_parcel *ms_batch_next(ms_batch *batch)
{
    MS_ASSERT(batch->used < batch->capacity);
    return &batch->parcels[batch->used++];
}
