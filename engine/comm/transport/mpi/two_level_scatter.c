/* two_level_scatter.c: reduce_scatter over several nodes: the sum of a part goes to the rank that
 * gets the part. */
#include "comm/flow.h"

#include "comm/transport/mpi/message.h"
#include "comm/transport/mpi/mpi_channel.h"
#include "comm/transport/mpi/two_level_sums.h"
#include "comm/transport/shm/staged.h"

/* Of the part that this member gets. */
static ms_span part_of(const ms_sum *r, uint64_t k, uint32_t member)
{
    uint64_t begin, length;
    ms_flow_part(r->args->counts, r->args->count, r->args->group->size, member, &begin, &length);
    return ms_sum_piece(r, k, member, begin, length);
}

static bool adds_for(const ms_sum *r, uint32_t member)
{
    return ms_node_adds_for(r->channel->at, r->args, member);
}

bool ms_two_level_scatter_prepare(ms_sum *r, uint64_t k)
{
    const ms_local *local = &r->channel->post.transport->local;
    if (!ms_post_await(&r->channel->post, &r->channel->out[ms_sum_turn(r, k)])) return false;
    if (!r->in_place) ms_staged_lay_down(local, r->args, &r->channel->pass, k, k);
    if (!ms_sum_barrier(r, !r->in_place)) return false;
    for (uint32_t m = 0; m < r->args->group->size; m++) {
        if (!adds_for(r, m) || (r->channel->at->is_here[m] && m != r->args->group->rank)) continue;
        ms_span s = part_of(r, k, m);
        ms_sum_add_here(r, &s, k);
    }
    return true;
}

void ms_two_level_scatter_exchange(const ms_sum *r, uint64_t k)
{
    const ms_topology *at = r->channel->at;
    ms_span own = part_of(r, k, r->args->group->rank);
    for (uint32_t h = 0; h < at->nodes; h++) {
        if (h == ms_sum_here(r)) continue;
        uint32_t other = ms_sum_source(r, h);
        ms_mpi_channel_receive(r->channel, ms_sum_turn(r, k), other, ms_sum_arrived(r, &own, h, k),
                               own.length * r->item);
    }
    for (uint32_t m = 0; m < r->args->group->size; m++) {
        if (at->is_here[m] || !adds_for(r, m)) continue;
        ms_span s = part_of(r, k, m);
        ms_mpi_channel_send(r->channel, ms_sum_turn(r, k), m, ms_sum_at(r, &s, k),
                            s.length * r->item);
    }
}

bool ms_two_level_scatter_finish(const ms_sum *r, uint64_t k)
{
    char *out = r->args->out + k * r->width * r->item;
    ms_span s = part_of(r, k, r->args->group->rank);
    if (!ms_post_await(&r->channel->post, &r->channel->in[ms_sum_turn(r, k)])) return false;
    ms_sum_add_nodes(r, &s, k, r->args->memory, &out, 1);
    return true;
}
