/* two_level_sums.c: how reductions over several nodes cut a tensor, where their sums are, and how
 * they are added. */
#include "comm/transport/mpi/two_level_sums.h"

#include "comm/control/shm/call_record.h"
#include "comm/flow.h"
#include "comm/transport/mpi/mpi_channel.h"

/* Bytes of a piece where no area for staging limits them: each message costs a handshake of MPI and
 * some wakes of threads, and numbers are added while the next piece is on its way. */
#define MS_PIECE_BYTES ((uint64_t)512 << 10)

char *ms_sum_stage(const ms_sum *r, uint32_t member, uint64_t half)
{
    return ms_stage(ms_mpi_channel_self(r->channel)->files, r->args->group->members[member],
                    (uint32_t)r->channel->post.tag, half);
}

char *ms_sum_tensor(const ms_sum *r, uint32_t member)
{
    const ms_shm_rank *self = ms_mpi_channel_self(r->channel);
    uint64_t offset = ms_ledger_entry_of(self, r->args, member)->heap_offset;
    if (member == r->args->group->rank) return r->args->in;
    return self->files->heaps[r->args->group->members[member]].memory + offset - 1;
}

/* ---------------------------------------------------------------- the cut */

static uint64_t longest_unit(const ms_mpi_channel *channel, const ms_comm_args *args)
{
    uint64_t begin;
    return ms_node_unit(channel->at, args, 0, 0, &begin);
}

/* Elements of a piece, where each unit of each slice has its place in half of a staging area, and
 * where nothing is staged. */
uint64_t ms_sum_staged_piece(const ms_mpi_channel *channel, const ms_comm_args *args)
{
    uint32_t places = channel->at->least * ms_node_units(channel->at, args);
    return MS_STAGE_BYTES / places / ms_dtype_bytes(args->memory) & ~(uint64_t)63;
}
static uint64_t free_piece(const ms_mpi_channel *channel, const ms_comm_args *args)
{
    uint32_t units = ms_node_units(channel->at, args);
    return MS_PIECE_BYTES / units / ms_dtype_bytes(args->dtype) & ~(uint64_t)63;
}

/* For each piece on its way: this node's sums of all units, one sum that comes from each other
 * node, and where units are several, the results of all. */
static uint32_t sums_at_once(const ms_mpi_channel *channel, uint32_t units)
{
    return units + channel->at->nodes - 1 + (units > 1 ? units : 0);
}
size_t ms_two_level_scratch_bytes(const ms_mpi_channel *channel, const ms_comm_args *args)
{
    uint64_t staged = ms_sum_staged_piece(channel, args), piece = free_piece(channel, args),
             longest = longest_unit(channel, args);
    if (args->kind == MS_REDUCE_SCATTER) return 0;
    if (piece < staged) piece = staged;
    if (piece > longest) piece = longest;
    return sums_at_once(channel, ms_node_units(channel->at, args)) * MS_DEPTH * piece
           * ms_dtype_bytes(args->dtype);
}

static char *room_at(const ms_sum *r, uint32_t index, uint64_t k)
{
    uint64_t piece = r->width < r->longest ? r->width : r->longest;
    return r->channel->room + (index * r->depth + ms_sum_turn(r, k)) * piece * r->sent;
}
static char *room_from(const ms_sum *r, uint32_t node, uint64_t k)
{
    return room_at(r, r->units + node - (node > ms_sum_here(r)), k);
}
char *ms_sum_result_room(const ms_sum *r, uint32_t unit, uint64_t k)
{
    return room_at(r, r->units + r->channel->at->nodes - 1 + unit, k);
}

uint64_t ms_sum_steps(const ms_sum *r) { return (r->longest + r->width - 1) / r->width; }

ms_span ms_sum_piece(const ms_sum *r, uint64_t k, uint32_t index, uint64_t begin, uint64_t length)
{
    uint64_t done = k * r->width, rest = length > done ? length - done : 0;
    return (ms_span){ .at = begin + done,
                      .length = rest < r->width ? rest : r->width,
                      .stage = index * r->width * r->item };
}

ms_span ms_sum_unit(const ms_sum *r, uint64_t k, uint32_t place, uint32_t unit)
{
    uint64_t begin, length = ms_node_unit(r->channel->at, r->args, place, unit, &begin);
    ms_span s = ms_sum_piece(r, k, place * r->units + unit, begin, length);
    s.unit = unit;
    return s;
}

/* Whether each member of the node has its tensor in a heap, or has no other member beside it. */
static bool reads_in_place(const ms_sum *r, uint32_t node)
{
    const ms_topology *at = r->channel->at;
    if (ms_topology_count(at, node) == 1) return true;
    for (uint32_t p = 0; p < ms_topology_count(at, node); p++)
        if (!ms_ledger_entry_of(ms_mpi_channel_self(r->channel), r->args,
                                ms_topology_at(at, node, p))
                 ->heap_offset)
            return false;
    return true;
}
static bool writes_in_place(const ms_sum *r, uint32_t node)
{
    return ms_topology_count(r->channel->at, node) == 1
           || (reads_in_place(r, node) && r->args->everywhere_in_place);
}

void ms_sum_choose_way(ms_sum *r, bool all_entered)
{
    bool is_free = all_entered && !r->parts;
    r->in_place = reads_in_place(r, ms_sum_here(r));
    r->direct = writes_in_place(r, ms_sum_here(r));
    for (uint32_t h = 0; h < r->channel->at->nodes && is_free; h++) is_free = writes_in_place(r, h);
    r->width = r->parts  ? MS_STAGE_BYTES / r->args->group->size / r->item & ~(uint64_t)63
               : is_free ? free_piece(r->channel, r->args)
                         : ms_sum_staged_piece(r->channel, r->args);
    r->depth = is_free ? MS_DEPTH : 2;
}

ms_sum ms_sum_begin(ms_run *run, ms_mpi_channel *channel, const ms_comm_args *args)
{
    return (ms_sum){ .run = run,
                     .channel = channel,
                     .args = args,
                     .parts = args->kind == MS_REDUCE_SCATTER,
                     .longest = args->kind == MS_REDUCE_SCATTER ? ms_flow_longest(args)
                                                                : longest_unit(channel, args),
                     .units = ms_node_units(channel->at, args),
                     .item = ms_dtype_bytes(args->memory),
                     .sent = ms_dtype_bytes(args->dtype) };
}

/* ------------------------------------------------------------------ adding */

bool ms_sum_is_tensor(const ms_sum *r)
{
    return ms_sum_members(r) == 1 && r->args->op != MS_REDUCE_OP_PREMUL_SUM
           && r->args->memory == r->args->dtype;
}

char *ms_sum_at(const ms_sum *r, const ms_span *s, uint64_t k)
{
    if (ms_sum_is_tensor(r)) return r->args->in + s->at * r->item;
    return r->parts ? ms_sum_stage(r, r->args->group->rank, k) + s->stage : room_at(r, s->unit, k);
}

void ms_sum_add_here(const ms_sum *r, const ms_span *s, uint64_t half)
{
    const char *data[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
    uint8_t op = r->args->op == MS_REDUCE_OP_AVG ? MS_REDUCE_OP_SUM : r->args->op;
    char *out = ms_sum_at(r, s, half);
    if (ms_sum_is_tensor(r)) return;
    for (uint32_t p = 0; p < ms_sum_members(r); p++) {
        uint32_t m = ms_topology_at(r->channel->at, ms_sum_here(r), p);
        data[p] = r->in_place ? ms_sum_tensor(r, m) + s->at * r->item
                              : ms_sum_stage(r, m, half) + s->stage;
        factors[p] = (float)ms_ledger_entry_of(ms_mpi_channel_self(r->channel), r->args, m)->factor;
    }
    ms_sources sources = { .data = data,
                           .factors = factors,
                           .count = ms_sum_members(r),
                           .divisor = 1,
                           .op = op,
                           .memory = r->args->memory,
                           .result = r->args->dtype };
    ms_flow_reduce(r->run, r->args, &sources, &out, 1, s->length);
}

uint32_t ms_sum_source(const ms_sum *r, uint32_t node)
{
    return ms_topology_at(r->channel->at, node, ms_mpi_channel_place(r->channel));
}

char *ms_sum_arrived(const ms_sum *r, const ms_span *s, uint32_t node, uint64_t k)
{
    const ms_mpi_channel *channel = r->channel;
    uint32_t member = ms_sum_source(r, node), i = 0;
    if (r->parts) return ms_sum_stage(r, member, k) + s->stage;
    if (!r->headers) return room_from(r, node, k);
    while (channel->relayed[i] != member) i++;
    return channel->headers_in[i].data;
}

void ms_sum_add_nodes(const ms_sum *r, const ms_span *s, uint64_t half, uint8_t result,
                      char *const *outputs, uint32_t output_count)
{
    const char *data[MS_LOCAL_RANKS_MAX];
    uint8_t op = r->args->op == MS_REDUCE_OP_PREMUL_SUM ? MS_REDUCE_OP_SUM : r->args->op;
    for (uint32_t h = 0; h < r->channel->at->nodes; h++)
        data[h] = h == ms_sum_here(r) ? ms_sum_at(r, s, half) : ms_sum_arrived(r, s, h, half);
    ms_sources sources = { .data = data,
                           .count = r->channel->at->nodes,
                           .divisor = r->args->group->size,
                           .op = op,
                           .memory = r->args->dtype,
                           .result = result };
    ms_flow_reduce(r->run, r->args, &sources, outputs, output_count, s->length);
}

bool ms_sum_barrier(ms_sum *r, bool needed)
{
    r->phases++;
    return !needed || ms_mpi_channel_phase_here(r->channel, r->phases);
}
