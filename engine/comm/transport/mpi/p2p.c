/* p2p.c: send and recv between ranks of two nodes: each tells the other its call in a header
 * message, and the tensor follows from memory to memory. */
#include "comm/transport/mpi/p2p.h"

#include <string.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"
#include "comm/transport/mpi/message.h"
#include "comm/transport/shm/p2p.h"

/* Bytes of one message. */
#define MS_PAIR_BYTES ((size_t)64 << 20)

/* The other's fields go where the other's process would write them on one node. */
static void turn(ms_helper *helper)
{
    ms_mpi_p2p *pair = (ms_mpi_p2p *)(void *)helper;
    ms_shm_rank *self = pair->post.transport->local.self;
    const ms_comm_args *args = pair->post.args;
    ms_post_delayed(&pair->post);
    if (!pair->from.busy || !ms_tracked_message_ended(&pair->post, &pair->from)) return;
    ms_ledger_entry *slot = ms_pair_slot(self, args, args->kind != MS_SEND);
    memcpy((char *)slot + sizeof slot->seq, (const char *)&pair->theirs.slot + sizeof slot->seq,
           sizeof *slot - sizeof slot->seq);
    atomic_store(&slot->seq, args->number);
}

/* Data that fit are in the sender's header message. */
static void exchange_headers(ms_mpi_p2p *pair, const ms_ledger_entry *mine)
{
    const ms_comm_args *args = pair->post.args;
    bool sends = args->kind == MS_SEND;
    size_t bytes = args->count * ms_dtype_bytes(args->dtype);
    bool fits = sends && bytes <= MS_HEADER_DATA_BYTES;
    int32_t tags[2] = { MS_TAG_RECEIVERS, MS_TAG_SENDERS };
    memcpy(&pair->mine.slot, mine, sizeof *mine);
    pair->mine.bytes = fits ? bytes : MS_AS_PIECES;
    if (fits && bytes) memcpy(pair->mine.data, args->in, bytes);
    if (sends) ms_mpi_count_sent(args, bytes);
    pair->post.tag = tags[!sends];
    ms_post_receive(&pair->post, &pair->from, args->root, &pair->theirs, sizeof pair->theirs);
    pair->post.tag = tags[sends];
    ms_post_send(&pair->post, &pair->to, args->root, &pair->mine,
                 MS_HEADER_FIXED_BYTES + (fits ? bytes : 0));
}

static bool await(ms_mpi_p2p *pair, ms_tracked_message *tracked)
{
    ms_batch one = { .messages = tracked, .used = 1, .capacity = 1 };
    return ms_post_await(&pair->post, &one);
}

/* Both have agreed on the bytes. */
static bool move(ms_mpi_p2p *pair, const ms_comm_args *args)
{
    bool sends = args->kind == MS_SEND;
    uint64_t bytes = args->count * ms_dtype_bytes(args->dtype);
    const ms_header_message *header = sends ? &pair->mine : &pair->theirs;
    if (header->bytes != MS_AS_PIECES) {
        if (!sends && bytes) memcpy(args->in, header->data, bytes);
        return true;
    }
    pair->post.tag = MS_TAG_SENDERS;
    for (uint64_t done = 0; done < bytes; done += MS_PAIR_BYTES) {
        size_t most = bytes - done < MS_PAIR_BYTES ? bytes - done : MS_PAIR_BYTES;
        if (sends) ms_post_send(&pair->post, &pair->data, args->root, args->in + done, most);
        else ms_post_receive(&pair->post, &pair->data, args->root, args->in + done, most);
        if (!await(pair, &pair->data)) return false;
    }
    return true;
}

ms_task_result ms_mpi_p2p_run(ms_run *run, ms_mpi_transport *transport, const ms_comm_args *args)
{
    ms_shm_rank *self = transport->local.self;
    ms_mpi_p2p *pair = &transport->pairs[args->kind == MS_RECV];
    pair->post.helper.turn = turn;
    pair->post.helper.hangs = ms_post_hangs;
    pair->post.transport = transport;
    pair->post.args = args;
    pair->post.helper.due_ns = UINT64_MAX;
    if (ms_shm_aborted(self)) return ms_shm_fail(run, self, args);
    exchange_headers(pair, ms_pair_post(&transport->local, args));
    bool done = ms_pair_await(&transport->local, args, &pair->post.helper) && move(pair, args)
                && await(pair, &pair->to);
    if (!done) return ms_shm_fail(run, self, args);
    ms_ledger_landed(self, transport->local.flights[args->kind == MS_RECV]);
    return MS_TASK_DONE;
}
