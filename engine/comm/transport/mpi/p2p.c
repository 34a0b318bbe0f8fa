/* p2p.c: send and recv between ranks of two hosts: each tells the other its call in a letter, and
 * the tensor follows from memory to memory. */
#include "comm/transport/mpi/p2p.h"

#include <string.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/record.h"
#include "comm/control/shm/wait.h"
#include "comm/transport/mpi/message.h"
#include "comm/transport/shm/p2p.h"

/* Bytes of one message. */
#define MS_PAIR_BYTES ((size_t)64 << 20)

/* The other's fields go where the other's process would write them on one host. */
static void turn(ms_helper *helper)
{
    ms_hosts_pair *pair = (ms_hosts_pair *)(void *)helper;
    ms_host *host = pair->post.hosts->local.host;
    const ms_comm_args *args = pair->post.args;
    ms_post_delayed(&pair->post);
    if (!pair->from.busy || !ms_parcel_ended(&pair->post, &pair->from)) return;
    ms_ledger_slot *slot = ms_pair_slot(host, args, args->kind != MS_SEND);
    memcpy((char *)slot + sizeof slot->seq, (const char *)&pair->theirs.slot + sizeof slot->seq,
           sizeof *slot - sizeof slot->seq);
    atomic_store(&slot->seq, args->number);
}

/* Data that fit are in the sender's letter. */
static void exchange_letters(ms_hosts_pair *pair, const ms_ledger_slot *mine)
{
    const ms_comm_args *args = pair->post.args;
    bool sends = args->kind == MS_SEND;
    size_t bytes = args->count * ms_dtype_bytes(args->dtype);
    bool fits = sends && bytes <= MS_LETTER_BYTES;
    int32_t tags[2] = { MS_TAG_RECEIVERS, MS_TAG_SENDERS };
    memcpy(&pair->mine.slot, mine, sizeof *mine);
    pair->mine.bytes = fits ? bytes : MS_AS_PIECES;
    if (fits && bytes) memcpy(pair->mine.data, args->in, bytes);
    if (sends) ms_hosts_count(args, bytes);
    pair->post.tag = tags[!sends];
    ms_post_receive(&pair->post, &pair->from, args->root, &pair->theirs, sizeof pair->theirs);
    pair->post.tag = tags[sends];
    ms_post_send(&pair->post, &pair->to, args->root, &pair->mine,
                 MS_LETTER_HEAD + (fits ? bytes : 0));
}

static bool await(ms_hosts_pair *pair, ms_parcel *parcel)
{
    ms_batch one = { .parcels = parcel, .used = 1, .capacity = 1 };
    return ms_post_await(&pair->post, &one);
}

/* Both have agreed on the bytes. */
static bool move(ms_hosts_pair *pair, const ms_comm_args *args)
{
    bool sends = args->kind == MS_SEND;
    uint64_t bytes = args->count * ms_dtype_bytes(args->dtype);
    const ms_letter *letter = sends ? &pair->mine : &pair->theirs;
    if (letter->bytes != MS_AS_PIECES) {
        if (!sends && bytes) memcpy(args->in, letter->data, bytes);
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

ms_task_result ms_hosts_pair_run(ms_run *run, ms_hosts *hosts, const ms_comm_args *args)
{
    ms_host *host = hosts->local.host;
    ms_hosts_pair *pair = &hosts->pairs[args->kind == MS_RECV];
    pair->post.helper.turn = turn;
    pair->post.helper.hangs = ms_post_hangs;
    pair->post.hosts = hosts;
    pair->post.args = args;
    pair->post.helper.due_ns = UINT64_MAX;
    if (ms_host_aborted(host)) return ms_host_fail(run, host, args);
    exchange_letters(pair, ms_pair_post(&hosts->local, args));
    bool done = ms_pair_await(&hosts->local, args, &pair->post.helper) && move(pair, args)
                && await(pair, &pair->to);
    if (!done) return ms_host_fail(run, host, args);
    ms_ledger_landed(host, hosts->local.flights[args->kind == MS_RECV]);
    return MS_TASK_DONE;
}
