/* two_level_reduce.c: reductions over several nodes. The members of a node add up what they bring,
 * each a part of it; the sums of all nodes travel, and are added in the order of nodes.
 *
 * In a reduce_scatter (two_level_scatter.c) the sum of a part goes to the rank that gets it.
 * Otherwise a tensor is cut into as many slices as the smallest node has members, and the members
 * at one place of all nodes exchange the sums of one slice, or of its units (topology.h). While
 * pieces are on their way, the next one is added up. */
#include "comm/transport/mpi/two_level_reduce.h"

#include <string.h>

#include "comm/flow.h"
#include "comm/transport/mpi/message.h"
#include "comm/transport/mpi/mpi_channel.h"
#include "comm/transport/mpi/two_level_sums.h"

/* ------------------------------------------------------------------ slices */

/* Where the members of this node find the result of a unit: in the area of a member of another
 * node, in which nothing else is. */
static char *result_of(const ms_sum *r, uint32_t place, uint32_t unit, uint64_t half)
{
    return ms_sum_stage(r, ms_topology_at(r->channel->at, ms_sum_here(r) == 0, place), half)
           + unit * r->width * r->item;
}

/* Whether this rank has a slice; whether a node gets results. */
static bool has_slice(const ms_sum *r)
{
    return ms_mpi_channel_place(r->channel) < r->channel->at->least;
}
static bool node_gets(const ms_sum *r, uint32_t node)
{
    return ms_node_gets(r->channel->at, r->args, node);
}

static void lay_down(const ms_sum *r, uint64_t k)
{
    for (uint32_t i = 0; i < r->channel->at->least * r->units; i++) {
        ms_span s = ms_sum_unit(r, k, i / r->units, i % r->units);
        memcpy(ms_sum_stage(r, r->args->group->rank, k) + s.stage, r->args->in + s.at * r->item,
               s.length * r->item);
    }
}

/* This node's sums of the slice of piece k. */
static bool prepare_slice(ms_sum *r, uint64_t k)
{
    if (!ms_post_await(&r->channel->post, &r->channel->out[ms_sum_turn(r, k)])) return false;
    if (!r->in_place) lay_down(r, k);
    if (!ms_sum_barrier(r, !r->in_place || !r->direct)) return false;
    for (uint32_t unit = 0; unit < r->units && has_slice(r); unit++) {
        ms_span s = ms_sum_unit(r, k, ms_mpi_channel_place(r->channel), unit);
        ms_sum_add_here(r, &s, k);
    }
    return true;
}

/* Each node gets the others' sums of its unit, or of the only one. */
static void exchange_slice(const ms_sum *r, uint64_t k)
{
    uint32_t place = ms_mpi_channel_place(r->channel);
    bool several = r->units > 1;
    if (!has_slice(r)) return;
    ms_span own = ms_sum_unit(r, k, place, several ? ms_sum_here(r) : 0);
    for (uint32_t h = 0; h < r->channel->at->nodes; h++) {
        if (h == ms_sum_here(r)) continue;
        uint32_t other = ms_sum_source(r, h);
        ms_span theirs = ms_sum_unit(r, k, place, several ? h : 0);
        if (r->gets)
            ms_mpi_channel_receive(r->channel, ms_sum_turn(r, k), other,
                                   ms_sum_arrived(r, &own, h, k), own.length * r->sent);
        if (node_gets(r, h))
            ms_mpi_channel_send(r->channel, ms_sum_turn(r, k), other, ms_sum_at(r, &theirs, k),
                                theirs.length * r->sent);
    }
}

/* Where a result belongs, or where all members of this node take it from; how many they are. */
static uint32_t outputs_of(const ms_sum *r, const ms_span *s, uint64_t k, char **outputs)
{
    uint32_t count = r->direct ? ms_sum_members(r) : 1;
    if (!r->direct) outputs[0] = result_of(r, ms_mpi_channel_place(r->channel), s->unit, k);
    else if (count == 1) outputs[0] = r->args->out + s->at * r->item;
    for (uint32_t p = 0; p < count && count > 1; p++)
        outputs[p] =
            ms_sum_tensor(r, ms_topology_at(r->channel->at, ms_sum_here(r), p)) + s->at * r->item;
    return count;
}

/* What the members of this node take from where results are. */
static bool take_results(ms_sum *r, uint64_t k)
{
    if (!ms_sum_barrier(r, r->gets && !r->direct)) return false;
    if (r->direct || !ms_flow_sink(r->args)) return true;
    for (uint32_t i = 0; i < r->channel->at->least * r->units; i++) {
        ms_span s = ms_sum_unit(r, k, i / r->units, i % r->units);
        ms_flow_copy(r->run, r->args->out + s.at * r->item, result_of(r, i / r->units, s.unit, k),
                     s.length * r->item);
    }
    return true;
}

/* The result may be written over the tensor that is being sent, so that has ended before. */
static bool await_sums(const ms_sum *r, uint64_t k)
{
    return ms_post_await(&r->channel->post, &r->channel->in[ms_sum_turn(r, k)])
           && ((!ms_sum_is_tensor(r) && r->units == 1)
               || ms_post_await(&r->channel->post, &r->channel->out[ms_sum_turn(r, k)]));
}

static bool finish_slice(ms_sum *r, uint64_t k)
{
    char *outputs[MS_LOCAL_RANKS_MAX];
    if (r->gets && has_slice(r)) {
        if (!await_sums(r, k)) return false;
        ms_span s = ms_sum_unit(r, k, ms_mpi_channel_place(r->channel), 0);
        uint32_t count = outputs_of(r, &s, k, outputs);
        ms_sum_add_nodes(r, &s, k, r->args->memory, outputs, count);
    }
    return take_results(r, k);
}

/* ------------------------------------------------------------------- units */

/* Adds this node's unit and sends the result to the others, as it travels. */
static bool spread_unit(const ms_sum *r, uint64_t k)
{
    if (!has_slice(r)) return true;
    if (!await_sums(r, k)) return false;
    ms_span own = ms_sum_unit(r, k, ms_mpi_channel_place(r->channel), ms_sum_here(r));
    char *sum = ms_sum_result_room(r, ms_sum_here(r), k);
    ms_sum_add_nodes(r, &own, k, r->args->dtype, &sum, 1);
    for (uint32_t h = 0; h < r->channel->at->nodes; h++) {
        if (h == ms_sum_here(r)) continue;
        ms_span theirs = ms_sum_unit(r, k, ms_mpi_channel_place(r->channel), h);
        ms_mpi_channel_receive(r->channel, ms_sum_turn(r, k), ms_sum_source(r, h),
                               ms_sum_result_room(r, h, k), theirs.length * r->sent);
        ms_mpi_channel_send(r->channel, ms_sum_turn(r, k), ms_sum_source(r, h), sum,
                            own.length * r->sent);
    }
    return true;
}

static bool finish_units(ms_sum *r, uint64_t k)
{
    char *outputs[MS_LOCAL_RANKS_MAX];
    if (has_slice(r) && !ms_post_await(&r->channel->post, &r->channel->in[ms_sum_turn(r, k)]))
        return false;
    for (uint32_t unit = 0; unit < r->units && has_slice(r); unit++) {
        ms_span s = ms_sum_unit(r, k, ms_mpi_channel_place(r->channel), unit);
        const char *result = ms_sum_result_room(r, unit, k);
        ms_sources one = { .data = &result,
                           .count = 1,
                           .divisor = 1,
                           .op = MS_REDUCE_OP_SUM,
                           .memory = r->args->dtype,
                           .result = r->args->memory };
        uint32_t count = outputs_of(r, &s, k, outputs);
        ms_flow_reduce(r->run, r->args, &one, outputs, count, s.length);
    }
    return take_results(r, k);
}

/* ------------------------------------------------------------------ the call */

static bool prepare(ms_sum *r, uint64_t k)
{
    return r->parts ? ms_two_level_scatter_prepare(r, k) : prepare_slice(r, k);
}
static void exchange(const ms_sum *r, uint64_t k)
{
    if (r->parts) ms_two_level_scatter_exchange(r, k);
    else exchange_slice(r, k);
}

/* The next pieces are added up while piece k is on its way. */
static bool go_by_pieces(ms_sum *r)
{
    uint64_t steps = ms_sum_steps(r), begun = 0;
    for (uint64_t k = 0; k < steps; k++) {
        for (; begun < steps && begun < k + r->depth; begun++) {
            if (!prepare(r, begun)) return false;
            exchange(r, begun);
        }
        if (!(r->parts ? ms_two_level_scatter_finish(r, k) : finish_slice(r, k))) return false;
    }
    return true;
}

/* Results of piece k - 1 arrive while the sums of piece k do. */
static bool go_by_units(ms_sum *r)
{
    uint64_t steps = ms_sum_steps(r), begun = 0;
    for (uint64_t k = 0; k <= steps; k++) {
        for (; begun < steps && begun < k + r->depth - 1; begun++) {
            if (!prepare(r, begun)) return false;
            exchange(r, begun);
        }
        if (k < steps && !spread_unit(r, k)) return false;
        if (k > 0 && !finish_units(r, k - 1)) return false;
    }
    return true;
}

static uint64_t nothing(ms_mpi_channel *channel, uint32_t node, char *data)
{
    (void)channel, (void)node, (void)data;
    return MS_AS_PIECES;
}

/* A header message takes the sum of this rank's slice along. It is where ms_sum_at says: the whole
 * is one piece. */
static uint64_t fill(ms_mpi_channel *channel, uint32_t node, char *data)
{
    ms_sum r = ms_sum_begin(NULL, channel, channel->post.args);
    ms_sum_choose_way(&r, false);
    if (!has_slice(&r) || !node_gets(&r, node)) return 0;
    ms_span s = ms_sum_unit(&r, 0, ms_mpi_channel_place(channel), 0);
    if (s.length) memcpy(data, ms_sum_at(&r, &s, 0), s.length * r.sent);
    return s.length * r.sent;
}

/* Few numbers: the sums are in the header messages, so that the call takes one message each way. */
static bool go_by_headers(ms_sum *r)
{
    if (!ms_mpi_channel_enter_here(r->channel)) return false;
    ms_sum_choose_way(r, false);
    if (!prepare_slice(r, 0)) return false;
    ms_mpi_channel_write(r->channel, fill);
    if (!ms_mpi_channel_enter(r->channel)) return false;
    return finish_slice(r, 0);
}

/* Whether the longest slice goes into a header message, and is one piece on every node. */
static bool fits_headers(const ms_sum *r)
{
    return !r->parts && r->longest > 0 && r->longest <= ms_sum_staged_piece(r->channel, r->args)
           && r->longest * r->sent <= MS_HEADER_DATA_BYTES;
}

bool ms_two_level_run(ms_run *run, ms_mpi_channel *channel, const ms_comm_args *args)
{
    ms_sum r = ms_sum_begin(run, channel, args);
    r.gets = node_gets(&r, ms_sum_here(&r));
    r.headers = fits_headers(&r);
    channel->unpack = NULL;
    ms_mpi_channel_begin(channel, args);
    if (r.headers) {
        if (!go_by_headers(&r)) return false;
    } else {
        ms_mpi_channel_write(channel, nothing);
        if (!ms_mpi_channel_enter(channel)) return false;
        ms_sum_choose_way(&r, true);
        channel->pass = (ms_staging){ .area = (uint32_t)channel->post.tag,
                                      .width = r.width,
                                      .longest = r.longest,
                                      .item = r.item };
        if (!(r.units > 1 ? go_by_units(&r) : go_by_pieces(&r))) return false;
    }
    return ms_mpi_channel_leave(channel, r.phases + 1);
}
