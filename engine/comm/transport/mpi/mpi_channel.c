/* mpi_channel.c: a channel of a group over several nodes: what this rank does there for the members
 * of its node, and how a call is entered and left. */
#include "comm/transport/mpi/mpi_channel.h"

#include <errno.h>
#include <string.h>

#include "comm/control/shm/files.h"
#include "comm/control/shm/ledger.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"
#include "comm/transport/mpi/message.h"
#include "comm/transport/shm/staged.h"

/* ------------------------------------------------------------------ relaying */

/* What a member on another node has written in its header message goes where members of this node
 * look for it: the fields, then the data, then the number of the call. */
static void take_header(ms_mpi_channel *channel, uint32_t member, const ms_header_message *header)
{
    ms_shm_rank *self = ms_mpi_channel_self(channel);
    const ms_comm_args *args = channel->post.args;
    ms_ledger_entry *slot = &ms_ledger_line(self, args, member)->slots[args->number & 1];
    memcpy((char *)slot + sizeof slot->seq, (const char *)&header->slot + sizeof slot->seq,
           sizeof *slot - sizeof slot->seq);
    if (channel->unpack && header->bytes != MS_AS_PIECES
        && ms_ledger_agree(&header->slot, ms_ledger_entry_of(self, args, args->group->rank)))
        channel->unpack(channel, member, header);
    atomic_store(&slot->seq, args->number);
    ms_ledger_wake(self, args->group);
}

/* A header message is taken once, when both of its messages are here. */
static void look_at_header(ms_mpi_channel *channel, uint32_t i)
{
    ms_tracked_message *first = &channel->in_headers.messages[i],
                       *rest = &channel->in_rests.messages[i];
    ms_header_message *header = &channel->headers_in[i];
    bool has_rest = rest->busy;
    if (first->busy) {
        if (!ms_tracked_message_ended(&channel->post, first)) return;
        has_rest = header->bytes != MS_AS_PIECES && header->bytes > MS_HEADER_FIRST_BYTES;
        if (has_rest)
            ms_post_receive(&channel->post, rest, first->member,
                            header->data + MS_HEADER_FIRST_BYTES,
                            MS_HEADER_DATA_BYTES - MS_HEADER_FIRST_BYTES);
    } else if (!has_rest) return;
    if (!has_rest || ms_tracked_message_ended(&channel->post, rest))
        take_header(channel, first->member, header);
}

/* The pieces of one member are one after another in the batch. A member whose pieces are all here
 * comes to the phase in which they are read. True: all have. */
static bool take_pieces(ms_mpi_channel *channel)
{
    ms_batch *batch = channel->arriving;
    const ms_comm_args *args = channel->post.args;
    bool all = true;
    for (uint32_t i = 0, end; i < batch->used; i = end) {
        uint32_t member = batch->messages[i].member;
        bool ended = true, news = false;
        for (end = i; end < batch->used && batch->messages[end].member == member; end++) {
            news |= batch->messages[end].busy;
            ended &= ms_tracked_message_ended(&channel->post, &batch->messages[end]);
        }
        all &= ended;
        if (!ended || !news) continue;
        atomic_store(&ms_ledger_line(ms_mpi_channel_self(channel), args, member)->phase,
                     channel->arriving_phase);
        ms_ledger_wake(ms_mpi_channel_self(channel), args->group);
    }
    return all;
}

static void turn(ms_helper *helper)
{
    ms_mpi_channel *channel = (ms_mpi_channel *)(void *)helper;
    ms_post_delayed(&channel->post);
    for (uint32_t i = 0; i < channel->in_headers.used; i++) look_at_header(channel, i);
    if (channel->arriving && take_pieces(channel)) {
        channel->arriving->used = 0;
        channel->arriving = NULL;
    }
}

/* ------------------------------------------------------------------- making */

static void *zeros(const ms_os *os, size_t count, size_t bytes)
{
    void *memory = os->allocate(os->user, count * bytes + 1, 128);
    if (memory) memset(memory, 0, count * bytes);
    return memory;
}

static bool make_batch(const ms_os *os, ms_batch *batch, uint32_t capacity)
{
    batch->messages = zeros(os, capacity, sizeof *batch->messages);
    batch->capacity = capacity;
    return batch->messages != NULL;
}

/* In every step a member gets, or its relay gets for it, one message from each other node at most,
 * and sends one to each member of them at most. */
static bool make_messages(const ms_os *os, ms_mpi_channel *channel, const ms_group *group)
{
    const ms_topology *at = channel->at;
    uint32_t here = ms_topology_count(at, at->here), others = group->size - here,
             in = channel->relayed_count * here;
    if (in < at->nodes) in = at->nodes;
    channel->headers_out = zeros(os, at->nodes, sizeof *channel->headers_out);
    channel->headers_in = zeros(os, channel->relayed_count, sizeof *channel->headers_in);
    bool made = channel->headers_out && channel->headers_in
                && make_batch(os, &channel->out_headers, 2 * at->nodes)
                && make_batch(os, &channel->in_headers, channel->relayed_count)
                && make_batch(os, &channel->in_rests, channel->relayed_count);
    for (int piece = 0; piece < MS_DEPTH && made; piece++)
        made =
            make_batch(os, &channel->out[piece], others) && make_batch(os, &channel->in[piece], in);
    return made;
}

void ms_mpi_channel_free(const ms_os *os, ms_mpi_channel *channel)
{
    if (!channel) return;
    for (int piece = 0; piece < MS_DEPTH; piece++) {
        os->release(os->user, channel->out[piece].messages);
        os->release(os->user, channel->in[piece].messages);
    }
    void *all[] = { channel->headers_out,
                    channel->headers_in,
                    channel->out_headers.messages,
                    channel->in_headers.messages,
                    channel->in_rests.messages,
                    channel->room,
                    channel };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) os->release(os->user, all[i]);
}

/* It grows to what the largest call needs. No message is under way in it between calls. */
bool ms_mpi_channel_make_room(ms_mpi_channel *channel, size_t bytes)
{
    const ms_os *os = ms_mpi_channel_self(channel)->files->base.os;
    if (channel->room_bytes >= bytes) return true;
    os->release(os->user, channel->room);
    channel->room = os->allocate(os->user, bytes, 128);
    channel->room_bytes = channel->room ? bytes : 0;
    return channel->room != NULL;
}

/* A task makes it, so the context of the host thread is not touched. */
ms_mpi_channel *ms_mpi_channel_for(ms_mpi_transport *transport, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    const ms_os *os = transport->local.self->files->base.os;
    ms_mpi_channel **place = &transport->channels[group->id * MS_CHANNELS + args->channel];
    ms_mpi_channel *channel = *place;
    if (channel) return channel;
    channel = zeros(os, 1, sizeof *channel);
    if (!channel) return NULL;
    channel->post =
        (ms_post){ .helper = { .turn = turn, .hangs = ms_post_hangs, .due_ns = UINT64_MAX },
                   .transport = transport,
                   .tag = (int32_t)(group->id * MS_CHANNELS + args->channel) };
    channel->at = group->topology;
    for (uint32_t m = 0; m < group->size; m++)
        if (!channel->at->is_here[m]
            && ms_topology_at(channel->at, channel->at->here, channel->at->place[m]) == group->rank)
            channel->relayed[channel->relayed_count++] = (uint16_t)m;
    if (make_messages(os, channel, group)) *place = channel;
    else ms_mpi_channel_free(os, channel);
    return *place;
}

/* Two ranks may make the same pages, which is harmless. */
static int populate_for(ms_mpi_channel *channel, uint32_t member)
{
    ms_shm_files *files = ms_mpi_channel_self(channel)->files;
    uint32_t rank = channel->post.args->group->members[member], area = (uint32_t)channel->post.tag;
    return ms_shm_files_populate_heap(files, rank, ms_stage(files, rank, area, 0),
                                      2 * MS_STAGE_BYTES);
}

int ms_mpi_channel_populate(ms_mpi_channel *channel)
{
    const ms_comm_args *args = channel->post.args;
    const ms_topology *at = channel->at;
    if (channel->populated) return 0;
    int error =
        ms_staged_populate(&channel->post.transport->local, &args->group->channels[args->channel],
                           (uint32_t)channel->post.tag);
    for (uint32_t i = 0; i < channel->relayed_count && !error; i++)
        error = populate_for(channel, channel->relayed[i]);
    for (uint32_t h = 0; h < at->nodes && !error; h++)
        if (h != at->here)
            error = populate_for(channel, ms_topology_at(at, h, ms_mpi_channel_place(channel)));
    channel->populated = error == 0;
    return error;
}

/* -------------------------------------------------------------------- a call */

void ms_mpi_channel_begin(ms_mpi_channel *channel, const ms_comm_args *args)
{
    channel->post.args = args;
    ms_ledger_post(ms_mpi_channel_self(channel), args);
    channel->in_headers.used = 0;
    for (uint32_t i = 0; i < channel->relayed_count; i++)
        ms_post_receive(&channel->post, ms_batch_next(&channel->in_headers), channel->relayed[i],
                        &channel->headers_in[i], MS_HEADER_FIXED_BYTES + MS_HEADER_FIRST_BYTES);
}

static void send_header(ms_mpi_channel *channel, uint32_t member, const ms_header_message *header,
                        size_t inside)
{
    size_t first = inside < MS_HEADER_FIRST_BYTES ? inside : MS_HEADER_FIRST_BYTES;
    ms_post_send(&channel->post, ms_batch_next(&channel->out_headers), member, header,
                 MS_HEADER_FIXED_BYTES + first);
    if (inside > first)
        ms_post_send(&channel->post, ms_batch_next(&channel->out_headers), member,
                     header->data + first, inside - first);
}

void ms_mpi_channel_write(ms_mpi_channel *channel, ms_header_fill *fill)
{
    const ms_comm_args *args = channel->post.args;
    const ms_ledger_entry *slot =
        ms_ledger_entry_of(ms_mpi_channel_self(channel), args, args->group->rank);
    for (uint32_t h = 0; h < channel->at->nodes; h++) {
        if (h == channel->at->here) continue;
        ms_header_message *header = &channel->headers_out[h];
        memcpy(&header->slot, slot, sizeof *slot);
        header->bytes = fill(channel, h, header->data);
        uint64_t inside = header->bytes == MS_AS_PIECES ? 0 : header->bytes;
        ms_mpi_count_sent(args, inside);
        send_header(channel, ms_topology_at(channel->at, h, ms_mpi_channel_place(channel)), header,
                    inside);
    }
}

void ms_mpi_channel_send(ms_mpi_channel *channel, uint64_t piece, uint32_t member,
                         const void *memory, size_t bytes)
{
    ms_mpi_count_sent(channel->post.args, bytes);
    ms_post_send(&channel->post, ms_batch_next(&channel->out[piece % MS_DEPTH]), member, memory,
                 bytes);
}

void ms_mpi_channel_receive(ms_mpi_channel *channel, uint64_t piece, uint32_t member, void *memory,
                            size_t room)
{
    ms_post_receive(&channel->post, ms_batch_next(&channel->in[piece % MS_DEPTH]), member, memory,
                    room);
}

/* A wait for some members, with this rank's turns for the others. */
static ms_helper *among(ms_mpi_channel *channel, const bool *members)
{
    channel->post.helper.among = members;
    return &channel->post.helper;
}

bool ms_mpi_channel_enter(ms_mpi_channel *channel)
{
    return ms_ledger_await(ms_mpi_channel_self(channel), channel->post.args, among(channel, NULL));
}

bool ms_mpi_channel_enter_here(ms_mpi_channel *channel)
{
    return ms_ledger_await(ms_mpi_channel_self(channel), channel->post.args,
                           among(channel, channel->at->is_here));
}

bool ms_mpi_channel_phase_here(ms_mpi_channel *channel, uint64_t phases)
{
    return ms_ledger_phase(ms_mpi_channel_self(channel), channel->post.args, phases,
                           among(channel, channel->at->is_here));
}

bool ms_mpi_channel_phase(ms_mpi_channel *channel, uint64_t phases)
{
    return ms_ledger_phase(ms_mpi_channel_self(channel), channel->post.args, phases,
                           among(channel, channel->awaited));
}

bool ms_mpi_channel_leave(ms_mpi_channel *channel, uint64_t phases)
{
    for (int piece = 0; piece < MS_DEPTH; piece++)
        if (!ms_post_await(&channel->post, &channel->out[piece])) return false;
    return ms_post_await(&channel->post, &channel->out_headers)
           && ms_ledger_leave(ms_mpi_channel_self(channel), channel->post.args, phases,
                              among(channel, channel->at->is_here));
}
