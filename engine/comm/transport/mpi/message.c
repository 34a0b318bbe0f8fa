/* message.c: messages to ranks on other nodes: started, delayed as a simulated link asks, awaited.
 */
#include "comm/transport/mpi/message.h"

#include <stdio.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/job_end.h"
#include "comm/control/shm/mismatch.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"

/* ----------------------------------------------------------------- starting */

/* All that this rank sends to other nodes shares its link, which is busy from the moment when the
 * data are ready. As in ms_local_pace, but nothing waits: the message goes later. 0: at once. */
static uint64_t due_of(const ms_post *post, uint64_t bytes)
{
    ms_local *local = &post->transport->local;
    const ms_control_file *control = local->self->control;
    uint64_t rate = control->link_bytes_per_second;
    if (!rate && !control->link_latency_ns) return 0;
    uint64_t takes = rate ? bytes / rate * 1000000000u + bytes % rate * 1000000000u / rate : 0;
    uint64_t before = atomic_load(&local->link_free), after, now = ms_shm_now(local->self);
    do after = (before > now ? before : now) + takes;
    while (!atomic_compare_exchange_weak(&local->link_free, &before, after));
    return after + control->link_latency_ns;
}

static void start(ms_post *post, ms_tracked_message *tracked, uint32_t member)
{
    tracked->member = member;
    tracked->busy = true;
    tracked->message.peer = post->args->group->members[member];
    tracked->message.tag = post->tag;
    atomic_store_explicit(&tracked->message.state, MS_MPI_NEW, memory_order_relaxed);
}

/* Messages that wait for the link keep their order, since their times only grow. */
void ms_post_send(ms_post *post, ms_tracked_message *tracked, uint32_t member, const void *memory,
                  size_t bytes)
{
    tracked->message =
        (ms_mpi_message){ .memory = (void *)(uintptr_t)memory, .bytes = bytes, .sends = true };
    start(post, tracked, member);
    tracked->due_ns = due_of(post, bytes);
    tracked->next = NULL;
    if (!tracked->due_ns) {
        ms_mpi_post(post->transport->mpi, &tracked->message);
        return;
    }
    if (post->delayed) post->last_delayed->next = tracked;
    else post->delayed = tracked;
    post->last_delayed = tracked;
    post->helper.due_ns = post->delayed->due_ns;
}

void ms_post_receive(ms_post *post, ms_tracked_message *tracked, uint32_t member, void *memory,
                     size_t room)
{
    tracked->message = (ms_mpi_message){ .memory = memory, .bytes = room };
    start(post, tracked, member);
    ms_mpi_post(post->transport->mpi, &tracked->message);
}

void ms_post_delayed(ms_post *post)
{
    if (!post->delayed) return;
    uint64_t now = ms_shm_now(post->transport->local.self);
    while (post->delayed && post->delayed->due_ns <= now) {
        ms_tracked_message *tracked = post->delayed;
        post->delayed = tracked->next;
        ms_mpi_post(post->transport->mpi, &tracked->message);
    }
    post->helper.due_ns = post->delayed ? post->delayed->due_ns : UINT64_MAX;
}

/* ----------------------------------------------------------------- awaiting */

/* In which the agents tell that a rank has died, also on a busy machine. */
#define MS_TOLD_NS ((uint64_t)1000000000)

const char *ms_post_hangs(ms_helper *helper)
{
    return ms_mpi_hangs(((ms_post *)(void *)helper)->transport->mpi);
}

/* A message that fails ends the job: what it carried is lost. MPI may know of the death of a peer
 * before the agents have told it, and theirs is the better cause. */
static void fail(ms_post *post, const ms_tracked_message *tracked)
{
    char text[512], call[256];
    ms_shm_rank *self = post->transport->local.self;
    if (!ms_shm_sleep_until(self, ms_shm_now(self) + MS_TOLD_NS)) return;
    const ms_comm_args *args = post->args;
    ms_ledger_entry mine;
    ms_ledger_write(self, args, &mine);
    snprintf(text, sizeof text, "because rank %u: MPI did not %s %s rank %u in %s: %s", self->rank,
             tracked->message.sends ? "send" : "receive", tracked->message.sends ? "to" : "from",
             tracked->message.peer, ms_flight_describe(&mine.call, call, sizeof call),
             tracked->message.why);
    ms_shm_end_job(self->files, MS_ABORT_RAISED, (int32_t)self->rank, text);
}

bool ms_tracked_message_ended(ms_post *post, ms_tracked_message *tracked)
{
    if (!tracked->busy) return true;
    ms_mpi_state state = ms_mpi_look(&tracked->message);
    if (state == MS_MPI_ENDED) tracked->busy = false;
    else if (state == MS_MPI_FAILED && !ms_shm_aborted(post->transport->local.self))
        fail(post, tracked);
    return !tracked->busy;
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
        if (!ms_tracked_message_ended(own->post, &own->batch->messages[wait->cursor])) return false;
    return true;
}

static uint32_t missing(ms_wait *wait)
{
    batch_wait *own = (batch_wait *)(void *)wait;
    uint32_t at = wait->cursor < own->batch->used ? wait->cursor : 0;
    return own->batch->messages[at].message.peer;
}

/* Both are in the call, so only the end of the other's process can keep the message from coming. */
static void look_for_ended(ms_wait *wait)
{
    uint32_t other = missing(wait);
    bool gone = atomic_load(&wait->self->control->lines[other].gone) != 0;
    if (gone && !all_ended(wait)) ms_ledger_ended(wait->self, wait->args, other, true);
}

static const ms_wait_kind for_messages = { all_ended, look_for_ended, missing };

bool ms_post_await(ms_post *post, ms_batch *batch)
{
    batch_wait own = { .wait = { .kind = &for_messages,
                                 .self = post->transport->local.self,
                                 .args = post->args,
                                 .helper = &post->helper },
                       .post = post,
                       .batch = batch };
    bool ended = batch->used == 0 || ms_shm_wait(&own.wait);
    if (ended) batch->used = 0;
    return ended;
}

ms_tracked_message *ms_batch_next(ms_batch *batch)
{
    MS_ASSERT(batch->used < batch->capacity);
    return &batch->messages[batch->used++];
}
