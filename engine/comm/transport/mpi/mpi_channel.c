/* mpi_channel.c: a channel of a group over several hosts: what this rank does there for the members
 * of its host, and how a call is entered and left. */
#include "comm/transport/mpi/mpi_channel.h"

#include <errno.h>
#include <string.h>

#include "comm/control/shm/files.h"
#include "comm/control/shm/ledger.h"
#include "comm/control/shm/record.h"
#include "comm/control/shm/wait.h"
#include "comm/transport/mpi/message.h"
#include "comm/transport/shm/staged.h"

/* ------------------------------------------------------------------ relaying */

/* What a member on another host has written in its letter goes where members of this host look for
 * it: the fields, then the data, then the number of the call. */
static void take_letter(ms_lane *lane, uint32_t member, const ms_letter *letter)
{
    ms_host *host = ms_lane_host(lane);
    const ms_comm_args *args = lane->post.args;
    ms_ledger_slot *slot = &ms_ledger_line(host, args, member)->slots[args->number & 1];
    memcpy((char *)slot + sizeof slot->seq, (const char *)&letter->slot + sizeof slot->seq,
           sizeof *slot - sizeof slot->seq);
    if (lane->unpack && letter->bytes != MS_AS_PIECES
        && ms_ledger_agree(&letter->slot, ms_ledger_slot_of(host, args, args->group->rank)))
        lane->unpack(lane, member, letter);
    atomic_store(&slot->seq, args->number);
    ms_ledger_wake(host, args->group);
}

/* A letter is taken once, when both of its messages are here. */
static void look_at_letter(ms_lane *lane, uint32_t i)
{
    ms_parcel *first = &lane->in_letters.parcels[i], *rest = &lane->in_rests.parcels[i];
    ms_letter *letter = &lane->letters_in[i];
    bool has_rest = rest->busy;
    if (first->busy) {
        if (!ms_parcel_ended(&lane->post, first)) return;
        has_rest = letter->bytes != MS_AS_PIECES && letter->bytes > MS_LETTER_FIRST;
        if (has_rest)
            ms_post_receive(&lane->post, rest, first->member, letter->data + MS_LETTER_FIRST,
                            MS_LETTER_BYTES - MS_LETTER_FIRST);
    } else if (!has_rest) return;
    if (!has_rest || ms_parcel_ended(&lane->post, rest)) take_letter(lane, first->member, letter);
}

/* The pieces of one member are one after another in the batch. A member whose pieces are all here
 * comes to the phase in which they are read. True: all have. */
static bool take_pieces(ms_lane *lane)
{
    ms_batch *batch = lane->arriving;
    const ms_comm_args *args = lane->post.args;
    bool all = true;
    for (uint32_t i = 0, end; i < batch->used; i = end) {
        uint32_t member = batch->parcels[i].member;
        bool ended = true, news = false;
        for (end = i; end < batch->used && batch->parcels[end].member == member; end++) {
            news |= batch->parcels[end].busy;
            ended &= ms_parcel_ended(&lane->post, &batch->parcels[end]);
        }
        all &= ended;
        if (!ended || !news) continue;
        atomic_store(&ms_ledger_line(ms_lane_host(lane), args, member)->phase,
                     lane->arriving_phase);
        ms_ledger_wake(ms_lane_host(lane), args->group);
    }
    return all;
}

static void turn(ms_helper *helper)
{
    ms_lane *lane = (ms_lane *)(void *)helper;
    ms_post_delayed(&lane->post);
    for (uint32_t i = 0; i < lane->in_letters.used; i++) look_at_letter(lane, i);
    if (lane->arriving && take_pieces(lane)) {
        lane->arriving->used = 0;
        lane->arriving = NULL;
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
    batch->parcels = zeros(os, capacity, sizeof *batch->parcels);
    batch->capacity = capacity;
    return batch->parcels != NULL;
}

/* In every step a member gets, or its relay gets for it, one message from each other host at most,
 * and sends one to each member of them at most. */
static bool make_messages(const ms_os *os, ms_lane *lane, const ms_group *group)
{
    const ms_topology *at = lane->at;
    uint32_t here = ms_topology_count(at, at->here), others = group->size - here,
             in = lane->relayed_count * here;
    if (in < at->hosts) in = at->hosts;
    lane->letters_out = zeros(os, at->hosts, sizeof *lane->letters_out);
    lane->letters_in = zeros(os, lane->relayed_count, sizeof *lane->letters_in);
    bool made = lane->letters_out && lane->letters_in
                && make_batch(os, &lane->out_letters, 2 * at->hosts)
                && make_batch(os, &lane->in_letters, lane->relayed_count)
                && make_batch(os, &lane->in_rests, lane->relayed_count);
    for (int piece = 0; piece < MS_DEPTH && made; piece++)
        made = make_batch(os, &lane->out[piece], others) && make_batch(os, &lane->in[piece], in);
    return made;
}

void ms_lane_free(const ms_os *os, ms_lane *lane)
{
    if (!lane) return;
    for (int piece = 0; piece < MS_DEPTH; piece++) {
        os->release(os->user, lane->out[piece].parcels);
        os->release(os->user, lane->in[piece].parcels);
    }
    void *all[] = { lane->letters_out,
                    lane->letters_in,
                    lane->out_letters.parcels,
                    lane->in_letters.parcels,
                    lane->in_rests.parcels,
                    lane->room,
                    lane };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) os->release(os->user, all[i]);
}

/* It grows to what the largest call needs. No message is under way in it between calls. */
bool ms_lane_make_room(ms_lane *lane, size_t bytes)
{
    const ms_os *os = ms_lane_host(lane)->files->base.os;
    if (lane->room_bytes >= bytes) return true;
    os->release(os->user, lane->room);
    lane->room = os->allocate(os->user, bytes, 128);
    lane->room_bytes = lane->room ? bytes : 0;
    return lane->room != NULL;
}

/* A task makes it, so the context of the host thread is not touched. */
ms_lane *ms_lane_for(ms_hosts *hosts, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    const ms_os *os = hosts->local.host->files->base.os;
    ms_lane **place = &hosts->lanes[group->id * MS_CHANNELS + args->channel];
    ms_lane *lane = *place;
    if (lane) return lane;
    lane = zeros(os, 1, sizeof *lane);
    if (!lane) return NULL;
    lane->post =
        (ms_post){ .helper = { .turn = turn, .hangs = ms_post_hangs, .due_ns = UINT64_MAX },
                   .hosts = hosts,
                   .tag = (int32_t)(group->id * MS_CHANNELS + args->channel) };
    lane->at = group->topology;
    for (uint32_t m = 0; m < group->size; m++)
        if (!lane->at->is_here[m]
            && ms_topology_at(lane->at, lane->at->here, lane->at->place[m]) == group->rank)
            lane->relayed[lane->relayed_count++] = (uint16_t)m;
    if (make_messages(os, lane, group)) *place = lane;
    else ms_lane_free(os, lane);
    return *place;
}

/* Two ranks may make the same pages, which is harmless. */
static int populate_for(ms_lane *lane, uint32_t member)
{
    ms_host_files *files = ms_lane_host(lane)->files;
    uint32_t rank = lane->post.args->group->members[member], area = (uint32_t)lane->post.tag;
    return ms_host_files_populate_heap(files, rank, ms_stage(files, rank, area, 0),
                                       2 * MS_STAGE_BYTES);
}

int ms_lane_populate(ms_lane *lane)
{
    const ms_comm_args *args = lane->post.args;
    const ms_topology *at = lane->at;
    if (lane->populated) return 0;
    int error = ms_staged_populate(&lane->post.hosts->local, &args->group->channels[args->channel],
                                   (uint32_t)lane->post.tag);
    for (uint32_t i = 0; i < lane->relayed_count && !error; i++)
        error = populate_for(lane, lane->relayed[i]);
    for (uint32_t h = 0; h < at->hosts && !error; h++)
        if (h != at->here) error = populate_for(lane, ms_topology_at(at, h, ms_lane_place(lane)));
    lane->populated = error == 0;
    return error;
}

/* -------------------------------------------------------------------- a call */

void ms_lane_begin(ms_lane *lane, const ms_comm_args *args)
{
    lane->post.args = args;
    ms_ledger_post(ms_lane_host(lane), args);
    lane->in_letters.used = 0;
    for (uint32_t i = 0; i < lane->relayed_count; i++)
        ms_post_receive(&lane->post, ms_batch_next(&lane->in_letters), lane->relayed[i],
                        &lane->letters_in[i], MS_LETTER_HEAD + MS_LETTER_FIRST);
}

static void send_letter(ms_lane *lane, uint32_t member, const ms_letter *letter, size_t inside)
{
    size_t first = inside < MS_LETTER_FIRST ? inside : MS_LETTER_FIRST;
    ms_post_send(&lane->post, ms_batch_next(&lane->out_letters), member, letter,
                 MS_LETTER_HEAD + first);
    if (inside > first)
        ms_post_send(&lane->post, ms_batch_next(&lane->out_letters), member, letter->data + first,
                     inside - first);
}

void ms_lane_write(ms_lane *lane, ms_letter_fill *fill)
{
    const ms_comm_args *args = lane->post.args;
    const ms_ledger_slot *slot = ms_ledger_slot_of(ms_lane_host(lane), args, args->group->rank);
    for (uint32_t h = 0; h < lane->at->hosts; h++) {
        if (h == lane->at->here) continue;
        ms_letter *letter = &lane->letters_out[h];
        memcpy(&letter->slot, slot, sizeof *slot);
        letter->bytes = fill(lane, h, letter->data);
        uint64_t inside = letter->bytes == MS_AS_PIECES ? 0 : letter->bytes;
        ms_hosts_count(args, inside);
        send_letter(lane, ms_topology_at(lane->at, h, ms_lane_place(lane)), letter, inside);
    }
}

void ms_lane_send(ms_lane *lane, uint64_t piece, uint32_t member, const void *memory, size_t bytes)
{
    ms_hosts_count(lane->post.args, bytes);
    ms_post_send(&lane->post, ms_batch_next(&lane->out[piece % MS_DEPTH]), member, memory, bytes);
}

void ms_lane_receive(ms_lane *lane, uint64_t piece, uint32_t member, void *memory, size_t room)
{
    ms_post_receive(&lane->post, ms_batch_next(&lane->in[piece % MS_DEPTH]), member, memory, room);
}

/* A wait for some members, with this rank's turns for the others. */
static ms_helper *among(ms_lane *lane, const bool *members)
{
    lane->post.helper.among = members;
    return &lane->post.helper;
}

bool ms_lane_enter(ms_lane *lane)
{
    return ms_ledger_await(ms_lane_host(lane), lane->post.args, among(lane, NULL));
}

bool ms_lane_enter_here(ms_lane *lane)
{
    return ms_ledger_await(ms_lane_host(lane), lane->post.args, among(lane, lane->at->is_here));
}

bool ms_lane_phase_here(ms_lane *lane, uint64_t phases)
{
    return ms_ledger_phase(ms_lane_host(lane), lane->post.args, phases,
                           among(lane, lane->at->is_here));
}

bool ms_lane_phase(ms_lane *lane, uint64_t phases)
{
    return ms_ledger_phase(ms_lane_host(lane), lane->post.args, phases, among(lane, lane->awaited));
}

bool ms_lane_leave(ms_lane *lane, uint64_t phases)
{
    for (int piece = 0; piece < MS_DEPTH; piece++)
        if (!ms_post_await(&lane->post, &lane->out[piece])) return false;
    return ms_post_await(&lane->post, &lane->out_letters)
           && ms_ledger_leave(ms_lane_host(lane), lane->post.args, phases,
                              among(lane, lane->at->is_here));
}
