/* staged.c: collectives in which the data of every rank travel: all kinds but reductions, and
 * reductions in the order of ranks (sum_by_ranks). A rank's staging area is copied to the other
 * nodes as far as their ranks read it, and all go on as on one node
 * (comm/transport/shm/staged.c). */
#include "comm/transport/mpi/staged.h"

#include <string.h>

#include "comm/control/shm/call_record.h"
#include "comm/flow.h"
#include "comm/transport/mpi/message.h"
#include "comm/transport/mpi/mpi_channel.h"
#include "comm/transport/shm/staged.h"

static bool gets(const ms_mpi_channel *channel, const ms_comm_args *args, uint32_t node)
{
    return ms_node_gets(channel->at, args, node);
}
static uint32_t slots_for(const ms_mpi_channel *channel, const ms_comm_args *args, uint32_t node)
{
    return ms_node_slots(channel->at, args, node);
}
static uint32_t slot_for(const ms_mpi_channel *channel, const ms_comm_args *args, uint32_t node,
                         uint32_t i)
{
    return ms_node_slot(channel->at, args, node, i);
}

static char *stage_of(const ms_mpi_channel *channel, uint32_t member, uint64_t half)
{
    return ms_stage(ms_mpi_channel_self(channel)->files, channel->post.args->group->members[member],
                    channel->pass.area, half);
}

/* ------------------------------------------------------------------ header messages */

/* Data that are few are in the header message, slot after slot; more, and those of unknown lengths,
 * follow as pieces. */
static uint64_t fill(ms_mpi_channel *channel, uint32_t node, char *data)
{
    const ms_comm_args *args = channel->post.args;
    const ms_staging *pass = &channel->pass;
    uint32_t own = args->group->rank, slots = slots_for(channel, args, node);
    uint64_t bytes = 0;
    if (args->kind == MS_BARRIER || !ms_flow_source(args, own) || !gets(channel, args, node))
        return 0;
    if (pass->by_counts || pass->longest > pass->width) return MS_AS_PIECES;
    for (uint32_t i = 0; i < slots; i++) {
        ms_flow flow = ms_flow_slot(args, slot_for(channel, args, node, i));
        if (bytes + flow.length * pass->item > MS_HEADER_DATA_BYTES) return MS_AS_PIECES;
        if (flow.length)
            memcpy(data + bytes, args->in + flow.from * pass->item, flow.length * pass->item);
        bytes += flow.length * pass->item;
    }
    return bytes;
}

/* The counterpart of fill. The data are in the first half, as if they had been laid down there. */
static void unpack(ms_mpi_channel *channel, uint32_t member, const ms_header_message *header)
{
    const ms_comm_args *args = channel->post.args;
    const ms_staging *pass = &channel->pass;
    uint32_t here = channel->at->here, slots = slots_for(channel, args, here);
    const char *data = header->data;
    for (uint32_t i = 0; header->bytes && i < slots; i++) {
        uint32_t slot = slot_for(channel, args, here, i);
        uint64_t bytes = ms_node_slot_length(args, member, slot) * pass->item;
        memcpy(stage_of(channel, member, 0) + slot * pass->width * pass->item, data, bytes);
        data += bytes;
    }
    uint64_t base = args->group->channels[args->channel].phase;
    atomic_store(&ms_ledger_line(ms_mpi_channel_self(channel), args, member)->phase, base + 1);
}

/* ------------------------------------------------------------------- pieces */

/* Receives what the members that this rank relays lay down for this node in the step. Messages may
 * be shorter than their room. */
static void expect(ms_mpi_channel *channel, uint64_t half, uint64_t phase, size_t room, bool first)
{
    const ms_comm_args *args = channel->post.args;
    uint32_t here = channel->at->here, slots = slots_for(channel, args, here);
    if (!gets(channel, args, here)) return;
    for (uint32_t i = 0; i < channel->relayed_count; i++) {
        uint32_t member = channel->relayed[i];
        if (!ms_flow_source(args, member)) continue;
        if (first && channel->headers_in[i].bytes != MS_AS_PIECES) continue;
        for (uint32_t s = 0; s < slots; s++)
            ms_mpi_channel_receive(
                channel, half & 1, member,
                stage_of(channel, member, half) + slot_for(channel, args, here, s) * room, room);
    }
    channel->arriving = channel->in[half & 1].used ? &channel->in[half & 1] : NULL;
    channel->arriving_phase = args->group->channels[args->channel].phase + phase;
}

/* Sends what this rank has laid down, to all nodes that its header messages have not served. Slots
 * that are shorter than others end as empty messages. */
static void deliver(ms_mpi_channel *channel, uint64_t step, uint64_t half)
{
    const ms_comm_args *args = channel->post.args;
    const ms_staging *pass = &channel->pass;
    uint32_t own = args->group->rank;
    uint64_t done = step * pass->width;
    for (uint32_t h = 0; h < channel->at->nodes; h++) {
        if (h == channel->at->here || channel->headers_out[h].bytes != MS_AS_PIECES) continue;
        uint32_t relay = ms_topology_at(channel->at, h, ms_mpi_channel_place(channel));
        for (uint32_t i = 0; i < slots_for(channel, args, h); i++) {
            uint32_t slot = slot_for(channel, args, h, i);
            uint64_t length = ms_node_slot_length(args, own, slot),
                     rest = length > done ? length - done : 0;
            ms_mpi_channel_send(channel, half & 1, relay,
                                stage_of(channel, own, half) + slot * pass->width * pass->item,
                                (rest < pass->width ? rest : pass->width) * pass->item);
        }
    }
}

/* all_to_all by counts: all get the counts of all, before the first step. */
static bool exchange_counts(ms_mpi_channel *channel, const ms_comm_args *args)
{
    const ms_local *local = &channel->post.transport->local;
    size_t bytes = args->group->size * sizeof *args->counts;
    for (uint32_t i = 0; i < channel->relayed_count; i++)
        ms_mpi_channel_receive(channel, 0, channel->relayed[i],
                               stage_of(channel, channel->relayed[i], 0), bytes);
    channel->arriving = channel->in[0].used ? &channel->in[0] : NULL;
    channel->arriving_phase = args->group->channels[args->channel].phase + 1;
    ms_staged_put_counts(local, args, channel->pass.area);
    for (uint32_t h = 0; h < channel->at->nodes; h++)
        if (h != channel->at->here)
            ms_mpi_channel_send(channel, 0,
                                ms_topology_at(channel->at, h, ms_mpi_channel_place(channel)),
                                stage_of(channel, args->group->rank, 0), bytes);
    return ms_mpi_channel_phase(channel, 1)
           && ms_staged_check_counts(local, args, channel->pass.area);
}

/* As go_by_steps of the local transport. The pieces of a step are received once all members here
 * have read those of the step before the last, which were in the same half: they have then laid
 * down those of the last. */
static bool go_by_steps(ms_run *run, ms_mpi_channel *channel, const ms_comm_args *args,
                        uint64_t *phases)
{
    const ms_local *local = &channel->post.transport->local;
    const ms_staging *pass = &channel->pass;
    size_t room = pass->width * pass->item;
    uint64_t half = *phases = pass->by_counts ? 1 : 0;
    if (pass->by_counts && !exchange_counts(channel, args)) return false;
    if (pass->longest) expect(channel, half, *phases + 1, room, true);
    for (uint64_t step = 0; step * pass->width < pass->longest; step++, half++) {
        if (!ms_post_await(&channel->post, &channel->out[half & 1])) return false;
        ms_staged_lay_down(local, args, pass, step, half);
        deliver(channel, step, half);
        if (!ms_mpi_channel_phase(channel, ++*phases)) return false;
        if ((step + 1) * pass->width < pass->longest)
            expect(channel, half + 1, *phases + 1, room, false);
        ms_staged_pick_up(run, local, args, pass, step, half);
    }
    return true;
}

bool ms_mpi_staged_run(ms_run *run, ms_mpi_channel *channel, const ms_comm_args *args)
{
    const ms_local *local = &channel->post.transport->local;
    uint64_t phases = 0;
    /* By counts the plan needs what the others bring; until then only these two are used. */
    channel->pass = (ms_staging){ .area = (uint32_t)channel->post.tag, .by_counts = true };
    if (args->kind != MS_ALL_TO_ALL || !args->by_counts)
        channel->pass = ms_staged_plan(local, args);
    channel->unpack = args->kind == MS_BARRIER ? NULL : unpack;
    for (uint32_t m = 0; m < args->group->size; m++)
        channel->awaited[m] =
            channel->at->is_here[m]
            || (gets(channel, args, channel->at->here) && ms_flow_source(args, m));
    ms_mpi_channel_begin(channel, args);
    ms_mpi_channel_write(channel, fill);
    if (!ms_mpi_channel_enter(channel)) return false;
    channel->pass = ms_staged_plan(local, args);
    if (args->kind != MS_BARRIER && !go_by_steps(run, channel, args, &phases)) return false;
    return ms_mpi_channel_leave(channel, phases + 1);
}
