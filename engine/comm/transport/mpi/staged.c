/* staged.c: collectives in which the data of every rank travel: a rank's staging area is copied to
 * the other hosts as far as their ranks read it, and all go on as on one host. */
#include "comm/transport/mpi/staged.h"

#include <string.h>

#include "comm/control/shm/record.h"
#include "comm/flow.h"
#include "comm/transport/mpi/message.h"
#include "comm/transport/mpi/mpi_channel.h"
#include "comm/transport/shm/staged.h"

static bool gets(const ms_lane *lane, const ms_comm_args *args, uint32_t host)
{
    return ms_host_gets(lane->at, args, host);
}
static uint32_t slots_for(const ms_lane *lane, const ms_comm_args *args, uint32_t host)
{
    return ms_host_slots(lane->at, args, host);
}
static uint32_t slot_for(const ms_lane *lane, const ms_comm_args *args, uint32_t host, uint32_t i)
{
    return ms_host_slot(lane->at, args, host, i);
}

static char *stage_of(const ms_lane *lane, uint32_t member, uint64_t half)
{
    return ms_stage(ms_lane_host(lane)->files, lane->post.args->group->members[member],
                    lane->pass.area, half);
}

/* ------------------------------------------------------------------ letters */

/* Data that are few are in the letter, slot after slot; more, and those of unknown lengths, follow
 * as pieces. */
static uint64_t fill(ms_lane *lane, uint32_t host, char *data)
{
    const ms_comm_args *args = lane->post.args;
    const ms_staging *pass = &lane->pass;
    uint32_t own = args->group->rank, slots = slots_for(lane, args, host);
    uint64_t bytes = 0;
    if (args->kind == MS_BARRIER || !ms_flow_source(args, own) || !gets(lane, args, host)) return 0;
    if (pass->by_counts || pass->longest > pass->width) return MS_AS_PIECES;
    for (uint32_t i = 0; i < slots; i++) {
        ms_flow flow = ms_flow_slot(args, slot_for(lane, args, host, i));
        if (bytes + flow.length * pass->item > MS_LETTER_BYTES) return MS_AS_PIECES;
        if (flow.length)
            memcpy(data + bytes, args->in + flow.from * pass->item, flow.length * pass->item);
        bytes += flow.length * pass->item;
    }
    return bytes;
}

/* The mirror of fill. The data are in the first half, as if they had been laid down there. */
static void unpack(ms_lane *lane, uint32_t member, const ms_letter *letter)
{
    const ms_comm_args *args = lane->post.args;
    const ms_staging *pass = &lane->pass;
    uint32_t here = lane->at->here, slots = slots_for(lane, args, here);
    const char *data = letter->data;
    for (uint32_t i = 0; letter->bytes && i < slots; i++) {
        uint32_t slot = slot_for(lane, args, here, i);
        uint64_t bytes = ms_host_slot_length(args, member, slot) * pass->item;
        memcpy(stage_of(lane, member, 0) + slot * pass->width * pass->item, data, bytes);
        data += bytes;
    }
    uint64_t base = args->group->channels[args->channel].phase;
    atomic_store(&ms_ledger_line(ms_lane_host(lane), args, member)->phase, base + 1);
}

/* ------------------------------------------------------------------- pieces */

/* Receives what the members that this rank relays lay down for this host in the step. Messages may
 * be shorter than their room. */
static void expect(ms_lane *lane, uint64_t half, uint64_t phase, size_t room, bool first)
{
    const ms_comm_args *args = lane->post.args;
    uint32_t here = lane->at->here, slots = slots_for(lane, args, here);
    if (!gets(lane, args, here)) return;
    for (uint32_t i = 0; i < lane->relayed_count; i++) {
        uint32_t member = lane->relayed[i];
        if (!ms_flow_source(args, member)) continue;
        if (first && lane->letters_in[i].bytes != MS_AS_PIECES) continue;
        for (uint32_t s = 0; s < slots; s++)
            ms_lane_receive(lane, half & 1, member,
                            stage_of(lane, member, half) + slot_for(lane, args, here, s) * room,
                            room);
    }
    lane->arriving = lane->in[half & 1].used ? &lane->in[half & 1] : NULL;
    lane->arriving_phase = args->group->channels[args->channel].phase + phase;
}

/* Sends what this rank has laid down, to all hosts that its letters have not served. Slots that are
 * shorter than others end as empty messages. */
static void deliver(ms_lane *lane, uint64_t step, uint64_t half)
{
    const ms_comm_args *args = lane->post.args;
    const ms_staging *pass = &lane->pass;
    uint32_t own = args->group->rank;
    uint64_t done = step * pass->width;
    for (uint32_t h = 0; h < lane->at->hosts; h++) {
        if (h == lane->at->here || lane->letters_out[h].bytes != MS_AS_PIECES) continue;
        uint32_t relay = ms_topology_at(lane->at, h, ms_lane_place(lane));
        for (uint32_t i = 0; i < slots_for(lane, args, h); i++) {
            uint32_t slot = slot_for(lane, args, h, i);
            uint64_t length = ms_host_slot_length(args, own, slot),
                     rest = length > done ? length - done : 0;
            ms_lane_send(lane, half & 1, relay,
                         stage_of(lane, own, half) + slot * pass->width * pass->item,
                         (rest < pass->width ? rest : pass->width) * pass->item);
        }
    }
}

/* all_to_all by counts: all get the counts of all, before the first step. */
static bool exchange_counts(ms_lane *lane, const ms_comm_args *args)
{
    const ms_local *local = &lane->post.hosts->local;
    size_t bytes = args->group->size * sizeof *args->counts;
    for (uint32_t i = 0; i < lane->relayed_count; i++)
        ms_lane_receive(lane, 0, lane->relayed[i], stage_of(lane, lane->relayed[i], 0), bytes);
    lane->arriving = lane->in[0].used ? &lane->in[0] : NULL;
    lane->arriving_phase = args->group->channels[args->channel].phase + 1;
    ms_staged_put_counts(local, args, lane->pass.area);
    for (uint32_t h = 0; h < lane->at->hosts; h++)
        if (h != lane->at->here)
            ms_lane_send(lane, 0, ms_topology_at(lane->at, h, ms_lane_place(lane)),
                         stage_of(lane, args->group->rank, 0), bytes);
    return ms_lane_phase(lane, 1) && ms_staged_check_counts(local, args, lane->pass.area);
}

/* As go_by_steps of the local transport. The pieces of a step are received once all members here
 * have read those of the step before the last, which were in the same half: they have then laid
 * down those of the last. */
static bool go_by_steps(ms_run *run, ms_lane *lane, const ms_comm_args *args, uint64_t *phases)
{
    const ms_local *local = &lane->post.hosts->local;
    const ms_staging *pass = &lane->pass;
    size_t room = pass->width * pass->item;
    uint64_t half = *phases = pass->by_counts ? 1 : 0;
    if (pass->by_counts && !exchange_counts(lane, args)) return false;
    if (pass->longest) expect(lane, half, *phases + 1, room, true);
    for (uint64_t step = 0; step * pass->width < pass->longest; step++, half++) {
        if (!ms_post_await(&lane->post, &lane->out[half & 1])) return false;
        ms_staged_lay_down(local, args, pass, step, half);
        deliver(lane, step, half);
        if (!ms_lane_phase(lane, ++*phases)) return false;
        if ((step + 1) * pass->width < pass->longest)
            expect(lane, half + 1, *phases + 1, room, false);
        ms_staged_pick_up(run, local, args, pass, step, half);
    }
    return true;
}

bool ms_steps_run(ms_run *run, ms_lane *lane, const ms_comm_args *args)
{
    const ms_local *local = &lane->post.hosts->local;
    uint64_t phases = 0;
    /* By counts the plan needs what the others bring; until then only these two are used. */
    lane->pass = (ms_staging){ .area = (uint32_t)lane->post.tag, .by_counts = true };
    if (args->kind != MS_ALL_TO_ALL || !args->by_counts) lane->pass = ms_staged_plan(local, args);
    lane->unpack = args->kind == MS_BARRIER ? NULL : unpack;
    for (uint32_t m = 0; m < args->group->size; m++)
        lane->awaited[m] =
            lane->at->is_here[m] || (gets(lane, args, lane->at->here) && ms_flow_source(args, m));
    ms_lane_begin(lane, args);
    ms_lane_write(lane, fill);
    if (!ms_lane_enter(lane)) return false;
    lane->pass = ms_staged_plan(local, args);
    if (args->kind != MS_BARRIER && !go_by_steps(run, lane, args, &phases)) return false;
    return ms_lane_leave(lane, phases + 1);
}
