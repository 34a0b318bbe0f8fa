/* adasum.c: sums that grow where ranks agree on little and stay means where they agree (Maleki et al. 2020; behaviours F9, V10).
 *
 * Two ranks' gradients a and b of a parameter become a (1 - a.b / 2 a.a) + b (1 - a.b / 2 b.b), with products in f64. Ranks go together by pairs, pairs of pairs
 * and so on, in every round with the rank whose number differs in one bit, and both compute the same; ranks above the greatest power of two are taken in
 * before and told the result behind.
 */
#include "hook/work.h"
#include "tensor/op.h"

typedef struct combine_args { float *a; const float *b; int64_t count; } combine_args;

enum { LANES = 8 };

static double product(const float *a, const float *b, int64_t count)
{
    double sums[LANES] = { 0 }, total = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += (double)a[i + lane] * b[i + lane];
    for (; i < count; i++) sums[0] += (double)a[i] * b[i];
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    return total;
}

/* Into a. Ranks have a and b the other way round, and add in the same order. */
static ms_task_result run_combine(ms_run *run, void *arguments)
{
    (void)run;
    const combine_args *args = arguments;
    double ab = product(args->a, args->b, args->count), aa = product(args->a, args->a, args->count), bb = product(args->b, args->b, args->count);
    float of_a = aa > 0 ? (float)(1 - ab / (2 * aa)) : 1, of_b = bb > 0 ? (float)(1 - ab / (2 * bb)) : 1;
    for (int64_t i = 0; i < args->count; i++) {
        float a = args->a[i] * of_a, b = args->b[i] * of_b;
        args->a[i] = a + b;
    }
    return MS_TASK_DONE;
}

static const ms_task combine_task = { .name = "adasum", .function = run_combine, .args_bytes = sizeof(combine_args), .kind = MS_KIND_COMPUTE };

/* mine := mine and theirs, parameter by parameter. */
static void combine(ms_work *w, ms_tensor *mine, ms_tensor *theirs)
{
    int64_t at = 0;
    for (uint32_t i = 0; i < w->bucket->count && !w->status; i++) {
        int64_t count = ms_tensor_count(w->bucket->parameters[i]);
        ms_work one = { .link = w->link, .bucket = w->bucket };
        ms_tensor *a = ms_work_view(&one, mine, at, count, 0), *b = ms_work_view(&one, theirs, at, count, 0), *reads[] = { a, b };
        if (!one.status) {
            combine_args args = { .a = ms_tensor_data(a), .b = ms_tensor_data(b), .count = count };
            ms_task_cost cost = { .flops = 9.0 * (double)count, .bytes = 3 * ms_tensor_bytes(a) };
            one.status = ms_tensor_enqueue(w->bucket->engine, &combine_task, &args, reads, 2, &a, 1, cost);
        }
        w->status = ms_work_end(&one);
        at += count;
    }
}

static void pass(ms_work *w, ms_collective_kind kind, ms_tensor *t, uint32_t other)
{
    ms_point ready = { 0 };
    ms_collective call = { .kind = kind, .in = t, .root = other, .bucket = (int32_t)w->bucket->index, .label = w->bucket->label };
    if (!w->status) w->status = ms_group_enqueue(ms_link_group(w->link, w->bucket), 1, &call, &ready);
    if (!w->status) w->status = ms_stream_wait(ms_engine_current(w->bucket->engine), ready);
}

/* What the other rank has, in f32; mine is then what it was on the wire. In a fake world the other has the same. */
static ms_tensor *receive(ms_work *w, ms_tensor *like, uint32_t other)
{
    ms_dtype dtype = ms_tensor_dtype(w->bucket->buffer);
    ms_tensor *theirs = ms_work_view(w, ms_work_new(w, dtype, 1, ms_tensor_count(w->bucket->buffer)), 0, ms_tensor_count(w->bucket->buffer), 0);
    if (ms_group_is_fake(w->bucket->group)) ms_work_copy(w, like, theirs);
    pass(w, MS_RECV, theirs, other);
    return ms_work_cast(w, theirs, MS_F32);
}

static void exchange(ms_work *w, ms_tensor *mine, uint32_t other)
{
    ms_work one = { .link = w->link, .bucket = w->bucket, .status = w->status };
    ms_dtype dtype = ms_tensor_dtype(w->bucket->buffer);
    ms_tensor *wire = ms_work_cast(&one, mine, dtype);
    if (dtype != MS_F32) ms_work_copy(&one, wire, mine);
    ms_point sent = { 0 };
    ms_collective call = { .kind = MS_SEND, .in = wire, .root = other, .bucket = (int32_t)w->bucket->index, .label = w->bucket->label };
    if (!one.status) one.status = ms_group_enqueue(ms_link_group(w->link, w->bucket), 1, &call, &sent);
    ms_tensor *theirs = receive(&one, mine, other);
    if (!one.status) one.status = ms_stream_wait(ms_engine_current(w->bucket->engine), sent);
    combine(&one, mine, theirs);
    w->status = ms_work_end(&one);
}

/* All there are; and, of more than a power of two, the ones above it by their partners below. */
static void go_together(ms_work *w, ms_tensor *mine)
{
    const ms_group *group = ms_link_group(w->link, w->bucket);
    uint32_t rank = ms_group_rank(group), size = ms_group_size(group), power = 1;
    while (power * 2 <= size) power *= 2;
    if (rank >= power) {
        ms_tensor *wire = ms_work_cast(w, mine, ms_tensor_dtype(w->bucket->buffer));
        pass(w, MS_SEND, wire, rank - power);
        ms_work_copy(w, receive(w, mine, rank - power), mine);
        return;
    }
    if (rank + power < size) combine(w, mine, receive(w, mine, rank + power));
    for (uint32_t distance = 1; distance < power; distance *= 2) exchange(w, mine, rank ^ distance);
    if (rank + power < size) pass(w, MS_SEND, ms_work_cast(w, mine, ms_tensor_dtype(w->bucket->buffer)), rank + power);
}

static ms_status reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    ms_work w = { .link = link, .bucket = bucket, .status = ms_link_check_length(link, bucket) };
    if (!w.status && bucket->wants_sent && !bucket->sent) w.status = ms_bucket_set_sent(bucket, bucket->buffer);
    ms_tensor *mine = ms_work_cast(&w, bucket->buffer, MS_F32);
    go_together(&w, mine);
    if (mine != bucket->buffer) return ms_work_give(&w, mine, out);
    ms_status status = ms_work_end(&w);
    if (!status) *out = ms_tensor_retain(bucket->buffer);
    return status;
}

const ms_link_kind ms_link_adasum = { .name = "adasum", .reduce = reduce };
