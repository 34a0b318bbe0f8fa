/* bucket_rows.c: buckets whose shards are cut by rows: shard r has rows [r n, (r + 1) n) of each
 * parameter, where n is the number of rows by the number of shards, rounded up.
 *
 * The buffer has the parameters end to end, as links expect. A collective over the shards needs the
 * shards end to end; this file copies from one order to the other. Numbers that a parameter lacks
 * for its last shards are zeros there. */
#include "hook/bucket_rows.h"

#include "hook/tensors.h"

/* What shard `shard` has of one parameter: count numbers of the buffer from `first` on, at `at` of
 * the shard, where `part` places are for them. */
typedef struct rows {
    int64_t first, at, count, part;
} rows;

static rows rows_of(const ms_bucket *bucket, uint32_t index, uint32_t shard, int64_t begin,
                    int64_t at)
{
    rows r = { .at = at, .part = bucket->parts[index] };
    int64_t whole = ms_tensor_count(bucket->gradients[index]), skip = shard * r.part;
    if (skip > whole) skip = whole;
    r.first = begin + skip;
    r.count = whole - skip < r.part ? whole - skip : r.part;
    return r;
}

ms_status ms_link_each_rows(const ms_bucket *bucket, ms_link_rows *f, void *user)
{
    ms_status status = MS_OK;
    int64_t begin = 0, at = 0;
    uint32_t own;
    ms_bucket_shards(bucket, &own);
    for (uint32_t i = 0; i < bucket->count && !status; i++) {
        rows r = rows_of(bucket, i, own, begin, at);
        status = f(user, i, r.first, r.at, r.count);
        begin += ms_tensor_count(bucket->gradients[i]);
        at += r.part;
    }
    return status;
}

/* ------------------------------------------------------------- this rank's shard */

typedef struct copy {
    ms_tensor *full, *to;
} copy;

static ms_status copy_rows(void *user, uint32_t index, int64_t first, int64_t at, int64_t count)
{
    const copy *c = user;
    ms_tensor *from = NULL, *place = NULL;
    (void)index;
    if (count == 0) return MS_OK;
    ms_status status = ms_link_span(c->full, first, count, &from);
    if (!status) status = ms_link_span(c->to, at, count, &place);
    if (!status) status = ms_copy_into(ms_tensor_engine(c->to), from, place);
    ms_tensor_release(from);
    ms_tensor_release(place);
    return status;
}

/* Places without numbers become zeros first. */
ms_status ms_link_copy_shard(const ms_bucket *bucket, ms_tensor *full, ms_tensor *to)
{
    uint32_t own, shards = ms_bucket_shards(bucket, &own);
    int64_t length = ms_tensor_count(to);
    ms_status status = MS_OK;
    if (!bucket->parts) {
        ms_tensor *part = NULL;
        status = ms_link_span(full, own * length, length, &part);
        if (!status) status = ms_copy_into(bucket->engine, part, to);
        ms_tensor_release(part);
        return status;
    }
    if (length * shards > ms_bucket_numbers(bucket)) status = ms_fill_into(bucket->engine, to, 0);
    return status ? status
                  : ms_link_each_rows(bucket, copy_rows, &(copy){ .full = full, .to = to });
}

/* ------------------------------------------------------------------ all shards */

/* count blocks of `size` numbers, at `at` and then every `stride` numbers: copied from `from`
 * (NULL: zeros), where they are end to end. */
static ms_status put_blocks(ms_tensor *from, ms_tensor *to, int64_t at, int64_t stride,
                            int64_t count, int64_t size)
{
    const int64_t shape[] = { count, size }, strides[] = { stride, 1 }, dense[] = { size, 1 };
    ms_engine *engine = ms_tensor_engine(to);
    ms_tensor *place = NULL, *blocks = NULL;
    if (count <= 0 || size <= 0) return MS_OK;
    ms_status status = ms_tensor_window(to, 2, shape, strides, at, &place);
    if (!status && from) status = ms_tensor_window(from, 2, shape, dense, 0, &blocks);
    if (!status)
        status = from ? ms_copy_into(engine, blocks, place) : ms_fill_into(engine, place, 0);
    ms_tensor_release(blocks);
    ms_tensor_release(place);
    return status;
}

/* One parameter: whole parts, the rest of its numbers in the next shard, and zeros. */
static ms_status spread(ms_tensor *numbers, int64_t part, uint32_t shards, ms_tensor *to,
                        int64_t at)
{
    int64_t count = ms_tensor_count(numbers), stride = ms_tensor_count(to) / shards;
    int64_t full = part ? count / part : shards, rest = count - full * part;
    int64_t next = at + full * stride, left = shards - full;
    ms_tensor *tail = NULL;
    ms_status status = put_blocks(numbers, to, at, stride, full, part);
    if (!status && rest) {
        status = ms_link_span(numbers, full * part, rest, &tail);
        if (!status) status = put_blocks(tail, to, next, stride, 1, rest);
        if (!status) status = put_blocks(NULL, to, next + rest, stride, 1, part - rest);
        next += stride;
        left--;
    }
    if (!status) status = put_blocks(NULL, to, next, stride, left, part);
    ms_tensor_release(tail);
    return status;
}

/* In the memory of the group that reduces them. One gradient alone has its rows in order already.
 */
ms_status ms_link_by_shards(const ms_bucket *bucket, ms_group *group, ms_tensor *t, ms_tensor **out)
{
    uint32_t own, shards = ms_bucket_shards(bucket, &own);
    int64_t begin = 0, at = 0, count = ms_tensor_count(t);
    ms_storage *storage = NULL;
    ms_tensor *made = NULL;
    ms_status status = bucket->parts ? ms_link_check_rows(bucket, t) : MS_OK;
    if (!status && (!bucket->parts || bucket->count == 1)) {
        *out = ms_tensor_retain(t);
        return MS_OK;
    }
    if (!status)
        status = ms_group_storage(group, ms_engine_current(bucket->engine),
                                  (size_t)count * ms_dtype_bytes(ms_tensor_dtype(t)), &storage);
    if (!status) status = ms_tensor_on(storage, ms_tensor_dtype(t), 1, &count, &made);
    for (uint32_t i = 0; i < bucket->count && !status; i++) {
        int64_t numbers = ms_tensor_count(bucket->gradients[i]);
        ms_tensor *one = NULL;
        status = ms_link_span(t, begin, numbers, &one);
        if (!status) status = spread(one, bucket->parts[i], shards, made, at);
        begin += numbers;
        at += bucket->parts[i];
        ms_tensor_release(one);
    }
    ms_storage_release(storage);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

/* A link that changed how many numbers there are has left no rows. */
ms_status ms_link_check_rows(const ms_bucket *bucket, ms_tensor *t)
{
    if (ms_tensor_count(t) == ms_tensor_count(bucket->flat)) return MS_OK;
    return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                          "the buffer of bucket %u \"%s\" has %lld numbers instead of %lld, and "
                          "layout = \"rows\" cuts each parameter by its own rows: use layout = "
                          "\"flat\" with a link that changes how many numbers there are",
                          bucket->index, bucket->label, (long long)ms_tensor_count(t),
                          (long long)ms_tensor_count(bucket->flat));
}
