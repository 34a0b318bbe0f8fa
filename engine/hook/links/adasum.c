/* adasum.c: sums that grow where ranks agree on little and stay means where they agree (Maleki et
 * al. 2020).
 *
 * Two vectors a and b of a parameter become a (1 - a.b / 2 a.a) + b (1 - a.b / 2 b.b), with
 * products in f32. Ranks go together by pairs, pairs of pairs and so on: in every round a rank and
 * the one whose number differs in one bit hold the same part of two vectors; each sends half of it
 * and goes on with the other half, so that every number is combined by one rank only. Products are
 * added up over the ranks that hold the parts of a vector. In the end the halves go back the way
 * they came. Ranks from the greatest power of two on first send their vector to a partner below it,
 * and receive the result from it at the end. */
#include "hook/link_ops.h"

#include "hook/links.h"

/* A run of the bucket's numbers. It may run across parameters, and across their borders. */
typedef struct span {
    int64_t first, count;
} span;

/* ------------------------------------------------------------- what travels */

/* One half of an exchange, on its own point: the caller decides when the current stream waits.
 * Sends and receives are numbered for each pair of ranks and direction and run on streams of their
 * own, so that a pair cannot block another one. */
static void pass(ms_link_ops *w, ms_collective_kind kind, ms_tensor *t, uint32_t other,
                 ms_point *ready)
{
    ms_collective call = { .kind = kind,
                           .in = t,
                           .root = other,
                           .bucket = (int32_t)w->bucket->index,
                           .label = w->bucket->label };
    if (!w->status) w->status = ms_group_enqueue(ms_link_ops_group(w), 1, &call, ready);
}

/* Tasks that are enqueued on the current stream after this see what was received. */
static void wait_for(ms_link_ops *w, ms_point ready)
{
    if (!w->status) w->status = ms_stream_wait(ms_engine_current(w->bucket->engine), ready);
}

/* A 1-D view of a run of numbers. */
static ms_tensor *part_of(ms_link_ops *w, ms_tensor *t, span part)
{
    return ms_link_ops_view(w, t, part.first, part.count, 0);
}

/* Another rank's numbers, as many as `like` has, in f32. With the fake transport nothing arrives,
 * so the tensor is filled with the numbers of `like`. */
static ms_tensor *receive(ms_link_ops *w, ms_tensor *like, ms_dtype dtype, uint32_t other)
{
    ms_point ready = { 0 };
    int64_t count = w->status ? 0 : ms_tensor_count(like);
    ms_tensor *theirs = part_of(w, ms_link_ops_new(w, dtype, 1, count), (span){ 0, count });
    if (!ms_group_has_others(w->bucket->group)) ms_link_ops_copy(w, like, theirs);
    pass(w, MS_RECV, theirs, other, &ready);
    wait_for(w, ready);
    return ms_link_ops_cast(w, theirs, MS_F32);
}

/* The stream waits until the message is out, because the tensor may be released after that. */
static void send(ms_link_ops *w, ms_tensor *t, ms_dtype dtype, uint32_t other)
{
    ms_point sent = { 0 };
    pass(w, MS_SEND, ms_link_ops_cast(w, t, dtype), other, &sent);
    wait_for(w, sent);
}

/* Both ranks send before they receive; the send is waited for last, so neither waits for the
 * other's receive first. */
static ms_tensor *exchange(ms_link_ops *w, ms_tensor *out, ms_tensor *like, ms_dtype dtype,
                           uint32_t other)
{
    ms_point sent = { 0 };
    pass(w, MS_SEND, ms_link_ops_cast(w, out, dtype), other, &sent);
    ms_tensor *theirs = receive(w, like, dtype, other);
    wait_for(w, sent);
    return theirs;
}

/* ------------------------------------------------------- how it is combined */

/* Three rows with a number for each parameter: a.b, a.a, b.b; then, in the place of the last two,
 * their factors. `mine` is 1 or 2, by this rank's bit in the round, so that both ranks of a pair
 * keep a and b in the same rows and add up the same sums. */
typedef struct table {
    ms_tensor *numbers;
    uint32_t mine, theirs;
} table;
typedef void (*part_function)(ms_link_ops *w, const table *t, uint32_t position, ms_tensor *mine,
                              ms_tensor *theirs);

/* The number of one parameter in one row. */
static ms_tensor *entry(ms_link_ops *w, const table *t, uint32_t row, uint32_t position)
{
    return part_of(w, t->numbers, (span){ (int64_t)row * w->bucket->count + position, 1 });
}

/* The three products of the parts that this rank holds. Parameters are combined one by one, since
 * the factors of one must not depend on the scale of another. */
static void multiply(ms_link_ops *w, const table *t, uint32_t position, ms_tensor *mine,
                     ms_tensor *theirs)
{
    ms_link_ops_copy(w, ms_link_ops_apply(w, &ms_op_dot, 0, mine, theirs),
                     entry(w, t, 0, position));
    ms_link_ops_copy(w, ms_link_ops_apply(w, &ms_op_dot, 0, mine, mine),
                     entry(w, t, t->mine, position));
    ms_link_ops_copy(w, ms_link_ops_apply(w, &ms_op_dot, 0, theirs, theirs),
                     entry(w, t, t->theirs, position));
}

/* mine = mine * its factor + theirs * its factor. `theirs` is scratch and is scaled in place. */
static void combine(ms_link_ops *w, const table *t, uint32_t position, ms_tensor *mine,
                    ms_tensor *theirs)
{
    ms_link_ops_change(w, &ms_op_mul, 0, mine, entry(w, t, t->mine, position));
    ms_link_ops_change(w, &ms_op_mul, 0, theirs, entry(w, t, t->theirs, position));
    ms_link_ops_change(w, &ms_op_add, 0, mine, theirs);
}

/* f for the part of each parameter that is in `kept`; `theirs` begins at the same number. An inner
 * work for each parameter keeps the number of tensors at once small, whatever the model has. */
static void each_parameter(ms_link_ops *w, span kept, ms_tensor *mine, ms_tensor *theirs,
                           const table *t, part_function f)
{
    int64_t begin = 0, end;
    for (uint32_t i = 0; i < w->bucket->count && !w->status; i++, begin = end) {
        end = begin + ms_tensor_count(w->bucket->gradients[i]);
        int64_t kept_end = kept.first + kept.count;
        int64_t from = begin > kept.first ? begin : kept.first;
        int64_t to = end < kept_end ? end : kept_end;
        ms_link_ops one = ms_link_ops_inner(w);
        if (from < to)
            f(&one, t, i, part_of(&one, mine, (span){ from, to - from }),
              part_of(&one, theirs, (span){ from - kept.first, to - from }));
        w->status = ms_link_ops_end(&one);
    }
}

/* 1 - a.b / 2 a.a for each parameter, and 1 where a is zero: a zero vector has no direction, and
 * the quotient would be NaN. */
static void make_factors(ms_link_ops *w, const table *t, uint32_t row)
{
    int64_t count = w->bucket->count;
    ms_tensor *both = part_of(w, t->numbers, (span){ 0, count }),
              *own = part_of(w, t->numbers, (span){ row * count, count });
    ms_tensor *share = ms_link_ops_apply(w, &ms_op_div, 0, both,
                                         ms_link_ops_apply(w, &ms_op_mul_scalar, 2, own, NULL));
    ms_tensor *factor = ms_link_ops_apply(w, &ms_op_rsub_scalar, 1, share, NULL);
    ms_link_ops_copy(w,
                     ms_link_ops_apply(w, &ms_op_masked_fill, 1, factor,
                                       ms_link_ops_apply(w, &ms_op_le_scalar, 0, own, NULL)),
                     own);
}

/* All ranks of a round get the same products, because a + b and b + a are the same bits. */
static void add_up(ms_link_ops *w, ms_tensor *numbers, uint32_t rank, uint32_t distance)
{
    for (uint32_t bit = 1; distance && bit <= distance; bit *= 2) {
        ms_link_ops one = ms_link_ops_inner(w);
        ms_link_ops_change(&one, &ms_op_add, 0, numbers,
                           exchange(&one, numbers, numbers, MS_F32, rank ^ bit));
        w->status = ms_link_ops_end(&one);
    }
}

/* Combines mine's numbers in kept with theirs. distance: the bit in which the ranks that hold one
 * vector differ from those that hold the other; 0: this rank has both of them whole. */
static void go_together(ms_link_ops *w, ms_tensor *mine, span kept, ms_tensor *theirs,
                        uint32_t distance)
{
    uint32_t rank = ms_group_rank(ms_link_ops_group(w)), own = rank & distance ? 2 : 1;
    int64_t count = 3 * (int64_t)w->bucket->count;
    table t = { .numbers = part_of(w, ms_link_ops_new(w, MS_F32, 1, count), (span){ 0, count }),
                .mine = own,
                .theirs = 3 - own };
    ms_link_ops_change(w, &ms_op_fill, 0, t.numbers, NULL);
    each_parameter(w, kept, mine, theirs, &t, multiply);
    add_up(w, t.numbers, rank, distance);
    make_factors(w, &t, 1);
    make_factors(w, &t, 2);
    each_parameter(w, kept, mine, theirs, &t, combine);
}

/* ---------------------------------------------------------------- all ranks */

/* The half that a rank goes on with. The lower half is the smaller one where the count is odd; both
 * ranks of a pair compute the same cut. */
static span half_of(span part, bool upper)
{
    int64_t lower = part.count / 2;
    return upper ? (span){ part.first + lower, part.count - lower } : (span){ part.first, lower };
}

/* All ranks below a power of two. Before the round of `distance`, a rank has in `part` what the
 * ranks that differ from it in lower bits have combined. The recursion halves the part in each
 * round; on the way back each rank receives the half that it gave away. Everything is enqueued in
 * the same order on the ranks of a pair, so their messages match. */
static void reduce_part(ms_link_ops *w, ms_tensor *mine, span part, uint32_t distance,
                        uint32_t power)
{
    uint32_t rank = ms_group_rank(ms_link_ops_group(w)), other = rank ^ distance;
    ms_dtype dtype = w->status ? MS_F32 : ms_tensor_dtype(w->bucket->buffer);
    span kept = half_of(part, rank & distance), given = half_of(part, !(rank & distance));
    if (distance == power) return;
    ms_link_ops one = ms_link_ops_inner(w);
    go_together(&one, mine, kept,
                exchange(&one, part_of(&one, mine, given), part_of(&one, mine, kept), dtype, other),
                distance);
    w->status = ms_link_ops_end(&one);
    reduce_part(w, mine, kept, distance * 2, power);
    one.status = w->status;
    ms_tensor *place = part_of(&one, mine, given);
    ms_link_ops_copy(&one, exchange(&one, part_of(&one, mine, kept), place, dtype, other), place);
    w->status = ms_link_ops_end(&one);
}

/* All ranks. Those from the greatest power of two on are combined by their partners below it. */
static void reduce_all(ms_link_ops *w, ms_tensor *mine)
{
    const ms_group *group = ms_link_ops_group(w);
    uint32_t rank = ms_group_rank(group), size = ms_group_size(group), power = 1;
    ms_dtype dtype = ms_tensor_dtype(w->bucket->buffer);
    span whole = { 0, ms_tensor_count(w->bucket->buffer) };
    while (power * 2 <= size) power *= 2;
    if (rank >= power) {
        send(w, mine, dtype, rank - power);
        ms_link_ops_copy(w, receive(w, mine, dtype, rank - power), mine);
        return;
    }
    if (rank + power < size) go_together(w, mine, whole, receive(w, mine, dtype, rank + power), 0);
    reduce_part(w, mine, whole, 1, power);
    if (rank + power < size) send(w, mine, dtype, rank + power);
}

/* A buffer in f32 is combined in place; another dtype is cast, combined and written back. */
ms_status ms_adasum_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    ms_link_ops w = { .link = link, .bucket = bucket };
    ms_tensor *mine = ms_link_ops_cast(&w, bucket->buffer, MS_F32);
    reduce_all(&w, mine);
    if (mine != bucket->buffer) return ms_link_ops_give(&w, mine, out);
    ms_status status = ms_link_ops_end(&w);
    return status ? status : ms_bucket_shard(bucket, bucket->buffer, out);
}
