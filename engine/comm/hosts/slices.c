/* slices.c: reductions over several hosts. The members of a host add up what they bring, each a
 * part of it; the sums of all hosts travel, and are added in the order of hosts.
 *
 * In a reduce_scatter the sum of a part goes to the rank that gets the part. In the others a tensor
 * is cut into as many slices as the smallest host has members, and the members at one place of all
 * hosts exchange the sums of one slice, or of its units (topology.h). While pieces are on their
 * way, the next one is added up. */
#include <string.h>

#include "comm/flow.h"
#include "comm/hosts/lane.h"

/* Bytes of a piece where no area for staging limits them: each message costs a handshake of MPI and
 * some wakes of threads, and numbers are added while the next piece is on its way. */
#define MS_PIECE_BYTES ((uint64_t)512 << 10)

/* How a call is carried out. The way (in_place, direct) is one host's own, the rest all members
 * agree on. */
typedef struct reduction {
    ms_run *run;
    ms_lane *lane;
    const ms_comm_args *args;
    uint64_t width, longest; /* elements of a piece; of the longest unit or part */
    uint64_t phases;         /* so far */
    size_t item, sent;       /* bytes of an element in the tensor, and in a sum on its way */
    uint32_t depth;          /* pieces at once */
    uint32_t units;          /* of a slice */
    bool parts;              /* reduce_scatter */
    bool in_place;           /* this host's members read each other's tensors where they are */
    bool direct;             /* this host's results are written where they belong */
    bool letters;            /* the sums travel in letters */
    bool gets;               /* this host has a rank that gets results */
} reduction;

/* One contiguous sum of a piece. at: its elements in the whole tensor; stage: its byte in staging
 * areas; unit: of the slice. */
typedef struct span {
    uint64_t at, length;
    size_t stage;
    uint32_t unit;
} span;

static uint32_t here(const reduction *r) { return r->lane->at->here; }
static uint32_t members_here(const reduction *r) { return ms_topology_count(r->lane->at, here(r)); }

static char *stage_of(const reduction *r, uint32_t member, uint64_t half)
{
    return ms_stage(ms_lane_host(r->lane)->files, r->args->group->members[member],
                    (uint32_t)r->lane->post.tag, half);
}

/* A member's tensor in this process, if it is in a heap of this host. */
static char *tensor_of(const reduction *r, uint32_t member)
{
    const ms_host *host = ms_lane_host(r->lane);
    uint64_t offset = ms_ledger_slot_of(host, r->args, member)->heap_offset;
    if (member == r->args->group->rank) return r->args->in;
    return host->files->heaps[r->args->group->members[member]].memory + offset - 1;
}

/* Where piece k has its messages and its memory. */
static uint64_t turn_of(const reduction *r, uint64_t k) { return k % r->depth; }

/* ---------------------------------------------------------------- the cut */

static uint64_t longest_unit(const ms_lane *lane, const ms_comm_args *args)
{
    uint64_t begin;
    return ms_host_unit(lane->at, args, 0, 0, &begin);
}

/* Elements of a piece, where each unit of each slice has its place in half of a staging area, and
 * where nothing is staged. */
static uint64_t staged_piece(const ms_lane *lane, const ms_comm_args *args)
{
    uint32_t places = lane->at->least * ms_host_units(lane->at, args);
    return MS_STAGE_BYTES / places / ms_dtype_bytes(args->memory) & ~(uint64_t)63;
}
static uint64_t free_piece(const ms_lane *lane, const ms_comm_args *args)
{
    uint32_t units = ms_host_units(lane->at, args);
    return MS_PIECE_BYTES / units / ms_dtype_bytes(args->dtype) & ~(uint64_t)63;
}

/* For each piece on its way: this host's sums of all units, one sum that comes from each other
 * host, and where units are several, the results of all. */
static uint32_t sums_at_once(const ms_lane *lane, uint32_t units)
{
    return units + lane->at->hosts - 1 + (units > 1 ? units : 0);
}
size_t ms_slices_room(const ms_lane *lane, const ms_comm_args *args)
{
    uint64_t staged = staged_piece(lane, args), piece = free_piece(lane, args),
             longest = longest_unit(lane, args);
    if (args->kind == MS_REDUCE_SCATTER) return 0;
    if (piece < staged) piece = staged;
    if (piece > longest) piece = longest;
    return sums_at_once(lane, ms_host_units(lane->at, args)) * MS_DEPTH * piece
           * ms_dtype_bytes(args->dtype);
}

static char *room_at(const reduction *r, uint32_t index, uint64_t k)
{
    uint64_t piece = r->width < r->longest ? r->width : r->longest;
    return r->lane->room + (index * r->depth + turn_of(r, k)) * piece * r->sent;
}
static char *room_from(const reduction *r, uint32_t host, uint64_t k)
{
    return room_at(r, r->units + host - (host > here(r)), k);
}
static char *room_of_result(const reduction *r, uint32_t unit, uint64_t k)
{
    return room_at(r, r->units + r->lane->at->hosts - 1 + unit, k);
}

static uint64_t steps_of(const reduction *r) { return (r->longest + r->width - 1) / r->width; }

/* Piece k of a slice or part of `length` elements from `begin` on. */
static span piece_of(const reduction *r, uint64_t k, uint32_t index, uint64_t begin,
                     uint64_t length)
{
    uint64_t done = k * r->width, rest = length > done ? length - done : 0;
    return (span){ .at = begin + done,
                   .length = rest < r->width ? rest : r->width,
                   .stage = index * r->width * r->item };
}

/* Of a unit of the slice at this place: units do not depend on pieces. */
static span unit_of(const reduction *r, uint64_t k, uint32_t place, uint32_t unit)
{
    uint64_t begin, length = ms_host_unit(r->lane->at, r->args, place, unit, &begin);
    span s = piece_of(r, k, place * r->units + unit, begin, length);
    s.unit = unit;
    return s;
}

/* Of the part that this member gets. */
static span part_of(const reduction *r, uint64_t k, uint32_t member)
{
    uint64_t begin, length;
    ms_flow_part(r->args->counts, r->args->count, r->args->group->size, member, &begin, &length);
    return piece_of(r, k, member, begin, length);
}

/* Whether each member of the host has its tensor in a heap, or has no other member beside it. */
static bool reads_in_place(const reduction *r, uint32_t host)
{
    const ms_topology *at = r->lane->at;
    if (ms_topology_count(at, host) == 1) return true;
    for (uint32_t p = 0; p < ms_topology_count(at, host); p++)
        if (!ms_ledger_slot_of(ms_lane_host(r->lane), r->args, ms_topology_at(at, host, p))
                 ->heap_offset)
            return false;
    return true;
}
static bool writes_in_place(const reduction *r, uint32_t host)
{
    return ms_topology_count(r->lane->at, host) == 1
           || (reads_in_place(r, host) && r->args->everywhere_in_place);
}

/* The members of this host have entered; where pieces are longer than a staging area holds, all
 * have. */
static void choose_way(reduction *r, bool all_entered)
{
    bool is_free = all_entered && !r->parts;
    r->in_place = reads_in_place(r, here(r));
    r->direct = writes_in_place(r, here(r));
    for (uint32_t h = 0; h < r->lane->at->hosts && is_free; h++) is_free = writes_in_place(r, h);
    r->width = r->parts  ? MS_STAGE_BYTES / r->args->group->size / r->item & ~(uint64_t)63
               : is_free ? free_piece(r->lane, r->args)
                         : staged_piece(r->lane, r->args);
    r->depth = is_free ? MS_DEPTH : 2;
}

static reduction reduction_of(ms_run *run, ms_lane *lane, const ms_comm_args *args)
{
    return (reduction){ .run = run,
                        .lane = lane,
                        .args = args,
                        .parts = args->kind == MS_REDUCE_SCATTER,
                        .longest = args->kind == MS_REDUCE_SCATTER ? ms_flow_longest(args)
                                                                   : longest_unit(lane, args),
                        .units = ms_host_units(lane->at, args),
                        .item = ms_dtype_bytes(args->memory),
                        .sent = ms_dtype_bytes(args->dtype) };
}

/* ------------------------------------------------------------------ adding */

/* Whether the host's sum is the tensor of its only member, as it is. */
static bool sends_tensor(const reduction *r)
{
    return members_here(r) == 1 && r->args->op != MS_REDUCE_OP_PREMUL_SUM
           && r->args->memory == r->args->dtype;
}

/* Where the sum of this host is, before and after it is added up. */
static char *sum_at(const reduction *r, const span *s, uint64_t k)
{
    if (sends_tensor(r)) return r->args->in + s->at * r->item;
    return r->parts ? stage_of(r, r->args->group->rank, k) + s->stage : room_at(r, s->unit, k);
}

/* The members of this host, in the order of ranks. It is rounded to the dtype in which it travels:
 * that of the tensor, or the 16-bit one to which the call rounds. */
static void add_here(const reduction *r, const span *s, uint64_t half)
{
    const char *data[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
    uint8_t op = r->args->op == MS_REDUCE_OP_AVG ? MS_REDUCE_OP_SUM : r->args->op;
    char *out = sum_at(r, s, half);
    if (sends_tensor(r)) return;
    for (uint32_t p = 0; p < members_here(r); p++) {
        uint32_t m = ms_topology_at(r->lane->at, here(r), p);
        data[p] = r->in_place ? tensor_of(r, m) + s->at * r->item : stage_of(r, m, half) + s->stage;
        factors[p] = (float)ms_ledger_slot_of(ms_lane_host(r->lane), r->args, m)->factor;
    }
    ms_sources sources = { .data = data,
                           .factors = factors,
                           .count = members_here(r),
                           .divisor = 1,
                           .op = op,
                           .memory = r->args->memory,
                           .result = r->args->dtype };
    ms_flow_reduce(r->run, r->args, &sources, &out, 1, s->length);
}

/* The member of another host from which this rank gets the sum of its slice or part. */
static uint32_t source_on(const reduction *r, uint32_t host)
{
    return ms_topology_at(r->lane->at, host, ms_lane_place(r->lane));
}

static char *arrived_at(const reduction *r, const span *s, uint32_t host, uint64_t k)
{
    const ms_lane *lane = r->lane;
    uint32_t member = source_on(r, host), i = 0;
    if (r->parts) return stage_of(r, member, k) + s->stage;
    if (!r->letters) return room_from(r, host, k);
    while (lane->relayed[i] != member) i++;
    return lane->letters_in[i].data;
}

/* The sums of all hosts, in their order, to numbers of the tensor or to what travels. */
static void add_hosts(const reduction *r, const span *s, uint64_t half, uint8_t result,
                      char *const *outputs, uint32_t output_count)
{
    const char *data[MS_LOCAL_RANKS_MAX];
    uint8_t op = r->args->op == MS_REDUCE_OP_PREMUL_SUM ? MS_REDUCE_OP_SUM : r->args->op;
    for (uint32_t h = 0; h < r->lane->at->hosts; h++)
        data[h] = h == here(r) ? sum_at(r, s, half) : arrived_at(r, s, h, half);
    ms_sources sources = { .data = data,
                           .count = r->lane->at->hosts,
                           .divisor = r->args->group->size,
                           .op = op,
                           .memory = r->args->dtype,
                           .result = result };
    ms_flow_reduce(r->run, r->args, &sources, outputs, output_count, s->length);
}

/* ------------------------------------------------------------------ slices */

/* Where the members of this host find the result of a unit: in the area of a member of another
 * host, in which nothing else lies. */
static char *result_of(const reduction *r, uint32_t place, uint32_t unit, uint64_t half)
{
    return stage_of(r, ms_topology_at(r->lane->at, here(r) == 0, place), half)
           + unit * r->width * r->item;
}

/* Whether this rank has a slice; whether a host gets results. */
static bool has_slice(const reduction *r) { return ms_lane_place(r->lane) < r->lane->at->least; }
static bool host_gets(const reduction *r, uint32_t host)
{
    return ms_host_gets(r->lane->at, r->args, host);
}

/* All members of this host have come to the next phase. Where they read and write tensors only,
 * nobody waits: entering and leaving are enough. */
static bool barrier_here(reduction *r, bool needed)
{
    r->phases++;
    return !needed || ms_lane_phase_here(r->lane, r->phases);
}

static void lay_down(const reduction *r, uint64_t k)
{
    for (uint32_t i = 0; i < r->lane->at->least * r->units; i++) {
        span s = unit_of(r, k, i / r->units, i % r->units);
        memcpy(stage_of(r, r->args->group->rank, k) + s.stage, r->args->in + s.at * r->item,
               s.length * r->item);
    }
}

/* This host's sums of the slice of piece k. */
static bool prepare_slice(reduction *r, uint64_t k)
{
    if (!ms_post_await(&r->lane->post, &r->lane->out[turn_of(r, k)])) return false;
    if (!r->in_place) lay_down(r, k);
    if (!barrier_here(r, !r->in_place || !r->direct)) return false;
    for (uint32_t unit = 0; unit < r->units && has_slice(r); unit++) {
        span s = unit_of(r, k, ms_lane_place(r->lane), unit);
        add_here(r, &s, k);
    }
    return true;
}

/* Each host gets the others' sums of its unit, or of the only one. */
static void exchange_slice(const reduction *r, uint64_t k)
{
    uint32_t place = ms_lane_place(r->lane);
    bool several = r->units > 1;
    if (!has_slice(r)) return;
    span own = unit_of(r, k, place, several ? here(r) : 0);
    for (uint32_t h = 0; h < r->lane->at->hosts; h++) {
        if (h == here(r)) continue;
        uint32_t other = source_on(r, h);
        span theirs = unit_of(r, k, place, several ? h : 0);
        if (r->gets)
            ms_lane_receive(r->lane, turn_of(r, k), other, arrived_at(r, &own, h, k),
                            own.length * r->sent);
        if (host_gets(r, h))
            ms_lane_send(r->lane, turn_of(r, k), other, sum_at(r, &theirs, k),
                         theirs.length * r->sent);
    }
}

/* Where a result belongs, or where all members of this host take it from; how many they are. */
static uint32_t outputs_of(const reduction *r, const span *s, uint64_t k, char **outputs)
{
    uint32_t count = r->direct ? members_here(r) : 1;
    if (!r->direct) outputs[0] = result_of(r, ms_lane_place(r->lane), s->unit, k);
    else if (count == 1) outputs[0] = r->args->out + s->at * r->item;
    for (uint32_t p = 0; p < count && count > 1; p++)
        outputs[p] = tensor_of(r, ms_topology_at(r->lane->at, here(r), p)) + s->at * r->item;
    return count;
}

/* What the members of this host take from where results are. */
static bool take_results(reduction *r, uint64_t k)
{
    if (!barrier_here(r, r->gets && !r->direct)) return false;
    if (r->direct || !ms_flow_sink(r->args)) return true;
    for (uint32_t i = 0; i < r->lane->at->least * r->units; i++) {
        span s = unit_of(r, k, i / r->units, i % r->units);
        ms_flow_copy(r->run, r->args->out + s.at * r->item, result_of(r, i / r->units, s.unit, k),
                     s.length * r->item);
    }
    return true;
}

/* The result may be written over the tensor that is being sent, so that has ended before. */
static bool await_sums(const reduction *r, uint64_t k)
{
    return ms_post_await(&r->lane->post, &r->lane->in[turn_of(r, k)])
           && ((!sends_tensor(r) && r->units == 1)
               || ms_post_await(&r->lane->post, &r->lane->out[turn_of(r, k)]));
}

static bool finish_slice(reduction *r, uint64_t k)
{
    char *outputs[MS_LOCAL_RANKS_MAX];
    if (r->gets && has_slice(r)) {
        if (!await_sums(r, k)) return false;
        span s = unit_of(r, k, ms_lane_place(r->lane), 0);
        uint32_t count = outputs_of(r, &s, k, outputs);
        add_hosts(r, &s, k, r->args->memory, outputs, count);
    }
    return take_results(r, k);
}

/* ------------------------------------------------------------------- units */

/* Adds this host's unit and sends the result to the others, as it travels. */
static bool spread_unit(const reduction *r, uint64_t k)
{
    if (!has_slice(r)) return true;
    if (!await_sums(r, k)) return false;
    span own = unit_of(r, k, ms_lane_place(r->lane), here(r));
    char *sum = room_of_result(r, here(r), k);
    add_hosts(r, &own, k, r->args->dtype, &sum, 1);
    for (uint32_t h = 0; h < r->lane->at->hosts; h++) {
        if (h == here(r)) continue;
        span theirs = unit_of(r, k, ms_lane_place(r->lane), h);
        ms_lane_receive(r->lane, turn_of(r, k), source_on(r, h), room_of_result(r, h, k),
                        theirs.length * r->sent);
        ms_lane_send(r->lane, turn_of(r, k), source_on(r, h), sum, own.length * r->sent);
    }
    return true;
}

static bool finish_units(reduction *r, uint64_t k)
{
    char *outputs[MS_LOCAL_RANKS_MAX];
    if (has_slice(r) && !ms_post_await(&r->lane->post, &r->lane->in[turn_of(r, k)])) return false;
    for (uint32_t unit = 0; unit < r->units && has_slice(r); unit++) {
        span s = unit_of(r, k, ms_lane_place(r->lane), unit);
        const char *result = room_of_result(r, unit, k);
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

/* ------------------------------------------------------------------- parts */

static bool adds_for(const reduction *r, uint32_t member)
{
    return ms_host_adds_for(r->lane->at, r->args, member);
}

static bool prepare_parts(reduction *r, uint64_t k)
{
    const ms_local *local = &r->lane->post.hosts->local;
    if (!ms_post_await(&r->lane->post, &r->lane->out[turn_of(r, k)])) return false;
    if (!r->in_place) ms_staged_lay_down(local, r->args, &r->lane->pass, k, k);
    if (!barrier_here(r, !r->in_place)) return false;
    for (uint32_t m = 0; m < r->args->group->size; m++) {
        if (!adds_for(r, m) || (r->lane->at->is_here[m] && m != r->args->group->rank)) continue;
        span s = part_of(r, k, m);
        add_here(r, &s, k);
    }
    return true;
}

static void exchange_parts(const reduction *r, uint64_t k)
{
    const ms_topology *at = r->lane->at;
    span own = part_of(r, k, r->args->group->rank);
    for (uint32_t h = 0; h < at->hosts; h++) {
        if (h == here(r)) continue;
        uint32_t other = source_on(r, h);
        ms_lane_receive(r->lane, turn_of(r, k), other, arrived_at(r, &own, h, k),
                        own.length * r->item);
    }
    for (uint32_t m = 0; m < r->args->group->size; m++) {
        if (at->is_here[m] || !adds_for(r, m)) continue;
        span s = part_of(r, k, m);
        ms_lane_send(r->lane, turn_of(r, k), m, sum_at(r, &s, k), s.length * r->item);
    }
}

static bool finish_part(reduction *r, uint64_t k)
{
    char *out = r->args->out + k * r->width * r->item;
    span s = part_of(r, k, r->args->group->rank);
    if (!ms_post_await(&r->lane->post, &r->lane->in[turn_of(r, k)])) return false;
    add_hosts(r, &s, k, r->args->memory, &out, 1);
    return true;
}

/* ------------------------------------------------------------------ the call */

static bool prepare(reduction *r, uint64_t k)
{
    return r->parts ? prepare_parts(r, k) : prepare_slice(r, k);
}
static void exchange(const reduction *r, uint64_t k)
{
    if (r->parts) exchange_parts(r, k);
    else exchange_slice(r, k);
}

/* The next pieces are added up while piece k is on its way. */
static bool go_by_pieces(reduction *r)
{
    uint64_t steps = steps_of(r), begun = 0;
    for (uint64_t k = 0; k < steps; k++) {
        for (; begun < steps && begun < k + r->depth; begun++) {
            if (!prepare(r, begun)) return false;
            exchange(r, begun);
        }
        if (!(r->parts ? finish_part(r, k) : finish_slice(r, k))) return false;
    }
    return true;
}

/* Results of piece k - 1 arrive while the sums of piece k do. */
static bool go_by_units(reduction *r)
{
    uint64_t steps = steps_of(r), begun = 0;
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

static uint64_t nothing(ms_lane *lane, uint32_t host, char *data)
{
    (void)lane, (void)host, (void)data;
    return MS_AS_PIECES;
}

/* A letter takes the sum of this rank's slice along. It is where sum_at says: the whole is one
 * piece. */
static uint64_t fill(ms_lane *lane, uint32_t host, char *data)
{
    reduction r = reduction_of(NULL, lane, lane->post.args);
    choose_way(&r, false);
    if (!has_slice(&r) || !host_gets(&r, host)) return 0;
    span s = unit_of(&r, 0, ms_lane_place(lane), 0);
    if (s.length) memcpy(data, sum_at(&r, &s, 0), s.length * r.sent);
    return s.length * r.sent;
}

/* Few numbers: the sums are in the letters, so that the call takes one message each way. */
static bool go_by_letters(reduction *r)
{
    if (!ms_lane_enter_here(r->lane)) return false;
    choose_way(r, false);
    if (!prepare_slice(r, 0)) return false;
    ms_lane_write(r->lane, fill);
    if (!ms_lane_enter(r->lane)) return false;
    return finish_slice(r, 0);
}

/* Whether the longest slice goes into a letter, and is one piece on every host. */
static bool fits_letters(const reduction *r)
{
    return !r->parts && r->longest > 0 && r->longest <= staged_piece(r->lane, r->args)
           && r->longest * r->sent <= MS_LETTER_BYTES;
}

bool ms_slices_run(ms_run *run, ms_lane *lane, const ms_comm_args *args)
{
    reduction r = reduction_of(run, lane, args);
    r.gets = host_gets(&r, here(&r));
    r.letters = fits_letters(&r);
    lane->unpack = NULL;
    ms_lane_begin(lane, args);
    if (r.letters) {
        if (!go_by_letters(&r)) return false;
    } else {
        ms_lane_write(lane, nothing);
        if (!ms_lane_enter(lane)) return false;
        choose_way(&r, true);
        lane->pass = (ms_staging){
            .area = (uint32_t)lane->post.tag, .width = r.width, .longest = r.longest, .item = r.item
        };
        if (!(r.units > 1 ? go_by_units(&r) : go_by_pieces(&r))) return false;
    }
    return ms_lane_leave(lane, r.phases + 1);
}
