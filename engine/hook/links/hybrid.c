/* hybrid.c: hybrid buckets. A reduce-scatter over the shard group leaves each rank its shard,
 * which is reduced over the ranks that hold the same one: by an all-reduce, or by any chain, which
 * sees the shard as an all_reduce bucket of those ranks.
 *
 * A mean over `divisor` ranks: the first reduction multiplies by replicas / divisor, the second
 * takes the mean over the replicas. */
#include "hook/links/hybrid.h"

#include <string.h>

#include "hook/chain.h"
#include "hook/links/reduce.h"
#include "hook/tensors.h"
#include "hook/link_ops.h"

/* ------------------------------------------------------- the shard's bucket */

/* Keeps the lists after the record aligned. */
static size_t up(size_t bytes) { return (bytes + 15) / 16 * 16; }

/* The parts of gradients that are in the shard, which begins at number `first` of the buffer. A
 * gradient may be in several shards; each of their ranks sees its part as a gradient of its own,
 * so that links by parameter (PowerSGD, Adasum) work on shards. The parts are 1-D, because a cut
 * runs through rows. Padding belongs to no piece. */
static ms_status take_pieces(ms_hybrid *between, int64_t first)
{
    ms_bucket *inner = &between->bucket;
    const ms_bucket *of = between->of;
    int64_t begin = 0, end, last = first + ms_tensor_count(inner->flat);
    for (uint32_t i = 0; i < of->count; i++, begin = end) {
        end = begin + ms_tensor_count(of->gradients[i]);
        int64_t from = begin > first ? begin : first;
        int64_t to = end < last ? end : last;
        /* The gradient is in other shards. */
        if (from >= to) continue;
        ms_status status =
            ms_link_span(inner->flat, from - first, to - from, &inner->gradients[inner->count]);
        if (status) return status;
        inner->parameters[inner->count] = of->parameters[i];
        between->names[inner->count] = of->names[i];
        between->positions[inner->count++] = of->positions[i];
    }
    return MS_OK;
}

/* Of shards that are cut by rows, all rows, in the shapes of rows. A gradient's place in the shard
 * is its piece also where it has fewer rows left, so that pieces are end to end; zeros are there.
 */
static ms_status take_rows(ms_hybrid *between)
{
    ms_bucket *inner = &between->bucket;
    const ms_bucket *of = between->of;
    int64_t at = 0;
    for (uint32_t i = 0; i < of->count; at += of->parts[i++]) {
        const ms_tensor *gradient = of->gradients[i];
        uint32_t dims = ms_tensor_dims(gradient);
        int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX], row = 1;
        if (of->parts[i] == 0) continue;
        for (uint32_t d = dims; d-- > 1; row *= shape[d]) {
            shape[d] = ms_tensor_shape(gradient)[d];
            strides[d] = row;
        }
        shape[0] = of->parts[i] / row;
        strides[0] = row;
        ms_status status = ms_tensor_window(inner->flat, dims ? dims : 1, shape, strides, at,
                                            &inner->gradients[inner->count]);
        if (status) return status;
        inner->parameters[inner->count] = of->parameters[i];
        between->names[inner->count] = of->names[i];
        between->positions[inner->count++] = of->positions[i];
    }
    return MS_OK;
}

/* The lists are of at most as many pieces as the whole bucket has gradients; they follow the record
 * in one allocation. */
static void place_lists(ms_hybrid *between, char *at, size_t pointers)
{
    ms_bucket *inner = &between->bucket;
    inner->gradients = memset(at, 0, pointers);
    inner->parameters = (ms_tensor **)(at + pointers);
    inner->names = between->names = (const char **)(at + 2 * pointers);
    inner->positions = between->positions = (uint32_t *)(at + 3 * pointers);
}

/* An all_reduce bucket of the replicas, which has no numbers yet. It copies the record of the
 * hybrid bucket, then replaces everything that the record owns, since ms_hybrid_drop releases it.
 * links_before makes its links count on after those of the outer chain. A copy of the record brings
 * along what the inner links read: the engine, the index, the label and the account. */
static ms_status new_between(ms_bucket *of, ms_hybrid **out)
{
    size_t head = up(sizeof(ms_hybrid)), pointers = up(of->count * sizeof(void *));
    void *memory = NULL;
    ms_status status = ms_allocate(ms_engine_context(of->engine),
                                   head + 3 * pointers + of->count * sizeof(uint32_t),
                                   "a shard's bucket", &memory);
    if (status) return status;
    ms_hybrid *between = memory;
    *between = (ms_hybrid){ .bucket = *of, .of = of };
    ms_bucket *inner = &between->bucket;
    inner->kind = MS_BUCKET_ALL_REDUCE;
    inner->group = of->replicas;
    inner->shards = inner->replicas = NULL;
    inner->parts = NULL;
    inner->divisor = ms_group_size(of->replicas);
    inner->count = 0;
    inner->flat = inner->buffer = inner->sent = inner->result = NULL;
    inner->links_before = of->links_before + of->link;
    inner->travels = MS_F32;
    inner->fixed_address = of->buffer == of->flat ? of->fixed_address : 0;
    place_lists(between, (char *)memory + head, pointers);
    *out = between;
    return MS_OK;
}

/* Also after a failure in the middle of open_by: what was not reached is NULL. The lists go with
 * the record. */
void ms_hybrid_drop(ms_hybrid *between)
{
    if (!between) return;
    ms_bucket *inner = &between->bucket;
    for (uint32_t i = 0; i < inner->count; i++) ms_tensor_release(inner->gradients[i]);
    ms_tensor_release(inner->flat);
    ms_tensor_release(inner->buffer);
    ms_tensor_release(inner->sent);
    ms_tensor_release(between->exact);
    ms_release(ms_engine_context(inner->engine), between);
}

/* The first half. For error feedback `exact` is the shard before rounding, also where nothing was
 * rounded: the difference to what is sent later is this rank's loss. */
static ms_status open_by(const ms_link *link, ms_bucket *bucket, ms_reduce_op op, ms_hybrid **out)
{
    ms_hybrid *between = NULL;
    uint32_t own;
    ms_bucket_shards(bucket, &own);
    ms_status status = new_between(bucket, &between);
    if (status) return status;
    ms_bucket *inner = &between->bucket;
    bool reports = ms_link_reports(bucket);
    between->factor = op == MS_REDUCE_OP_AVG ? inner->divisor / bucket->divisor : 1;
    status = ms_link_scatter(link, bucket, op, between->factor, &inner->flat, &between->exact);
    if (!status && reports && !between->exact)
        status = ms_link_flat_copy(inner->flat, &between->exact);
    if (!status)
        status = bucket->parts ? take_rows(between)
                               : take_pieces(between, own * ms_tensor_count(inner->flat));
    if (status) {
        ms_hybrid_drop(between);
        return status;
    }
    inner->buffer = ms_tensor_retain(inner->flat);
    inner->wants_sent = reports;
    ms_bucket_mark_lossless(inner);
    *out = between;
    return MS_OK;
}

/* For applications that run the links between in their own language. Until the close, the outer
 * bucket must not be touched. */
ms_status ms_hybrid_open(const ms_link *reduce, ms_bucket *bucket, ms_hybrid **out)
{
    return open_by(reduce, bucket, reduce->options.op, out);
}

/* The loss of the second half is that of one shard, which several replicas hold. Each reports what
 * it lost itself, divided by factor, as numbers of its own buffer. That is for an error_feedback
 * before the whole reduction: one between the halves, which makes wants_sent true as well, keeps
 * the loss itself. */
ms_status ms_hybrid_close(ms_hybrid *between, ms_tensor *result)
{
    ms_bucket *inner = &between->bucket, *of = between->of;
    ms_status status = ms_bucket_check_result(inner, NULL, result);
    if (status || !between->exact) return status;
    if (!inner->sent)
        return ms_engine_fail(of->engine, MS_ERROR_STATE,
                              "error_feedback: the link that reduced bucket %u between replicas "
                              "has not reported what this rank sent: it calls bucket:set_sent(t)",
                              of->index);
    ms_link_ops w = { .link = NULL, .bucket = of };
    ms_link_ops_report_shard(&w, between->exact, inner->sent, between->factor);
    return ms_link_ops_end(&w);
}

/* --------------------------------------------------------- the whole reduction */

/* The native form of open, chain and close; applications that run chains themselves call the three
 * parts. The result is this rank's shard of the bucket's own buffer if the inner reduction works in
 * place.
 */
ms_status ms_hybrid_reduce(const ms_link *link, ms_bucket *bucket, ms_reduce_op op, ms_tensor **out)
{
    ms_hybrid *between = NULL;
    ms_tensor *result = NULL;
    ms_link plain = { .kind = link->kind, .options = { .op = op } };
    ms_status status = open_by(link, bucket, op, &between);
    if (status) return status;
    ms_bucket *inner = &between->bucket;
    if (link->options.between)
        status = ms_chain_run_links(link + 1, link->options.between, inner, &result);
    else status = ms_link_reduce_whole(&plain, inner, op, &result);
    if (!status) status = ms_hybrid_close(between, result);
    ms_hybrid_drop(between);
    if (status) ms_tensor_release(result);
    else *out = result;
    return status;
}
