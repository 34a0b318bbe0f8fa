/* link_ops.c: operators one after another, for native links. */
#include "hook/link_ops.h"

#include "hook/bucket_rows.h"
#include "hook/tensors.h"

/* Takes ownership before anything else can fail, so no caller has to release. The limit is an error
 * and not an assertion, because the number of tensors may depend on a script's options. The tensor
 * is released at once: an owner that gives up must leave nothing behind. */
ms_tensor *ms_link_ops_own(ms_link_ops *work, ms_tensor *owned)
{
    if (owned && work->count == MS_WORK_TENSORS) {
        ms_tensor_release(owned);
        work->status =
            ms_engine_fail(work->bucket->engine, MS_ERROR_STATE, "%s: more than %d tensors at once",
                           work->link->kind->name, MS_WORK_TENSORS);
        return NULL;
    }
    if (owned) work->made[work->count++] = owned;
    return owned;
}

/* Releasing is safe before the tasks have run: memory is handed on in stream order, so its next
 * owner waits for them. The count is reset, so that ending twice is harmless. */
ms_status ms_link_ops_end(ms_link_ops *work)
{
    for (uint32_t i = 0; i < work->count; i++) ms_tensor_release(work->made[i]);
    work->count = 0;
    return work->status;
}

/* It starts with the outer status: after a failure the inner part does nothing either. The caller
 * writes the inner end's status back. */
ms_link_ops ms_link_ops_inner(const ms_link_ops *work)
{
    return (ms_link_ops){
        .link = work->link, .bucket = work->bucket, .group = work->group, .status = work->status
    };
}

/* The work's own group is for parts of a reduction, such as the shard group of a hybrid bucket. */
ms_group *ms_link_ops_group(const ms_link_ops *work)
{
    return work->group ? work->group : ms_link_group(work->link, work->bucket);
}

/* Outputs are owned in order; a failure in owning the second leaves the first to ms_link_ops_end.
 */
ms_tensor *ms_link_ops_operator(ms_link_ops *work, const ms_op *op, ms_attributes attributes,
                                bool in_place, ms_tensor *const *inputs, uint32_t count,
                                ms_tensor **second)
{
    ms_tensor *outputs[2] = { NULL };
    if (second) *second = NULL;
    if (work->status) return NULL;
    work->status = ms_op_apply(work->bucket->engine, op, &attributes, in_place, inputs, count,
                               outputs, second ? 2 : 1);
    if (work->status) return NULL;
    if (second) *second = ms_link_ops_own(work, outputs[1]);
    return ms_link_ops_own(work, outputs[0]);
}

/* The number goes to attributes.scalar.value, where all operators that links use expect theirs;
 * operators that need other attributes go through ms_link_ops_operator. */
ms_tensor *ms_link_ops_apply(ms_link_ops *work, const ms_op *op, double value, ms_tensor *a,
                             ms_tensor *b)
{
    ms_tensor *inputs[] = { a, b };
    return ms_link_ops_operator(work, op, (ms_attributes){ .scalar = { .value = value } }, false,
                                inputs, b ? 2 : 1, NULL);
}

/* In place, so that a link's memory does not grow with the number of its operators. */
void ms_link_ops_change(ms_link_ops *work, const ms_op *op, double value, ms_tensor *a,
                        ms_tensor *b)
{
    if (!work->status) work->status = ms_link_change(op, value, a, b);
}

/* A tensor that has the dtype is owned by one more reference, and released like a new one. A tensor
 * that may be the caller's own must not be changed in place: compare it with the argument first. */
ms_tensor *ms_link_ops_cast(ms_link_ops *work, ms_tensor *t, ms_dtype dtype)
{
    ms_tensor *made = NULL;
    if (!work->status) work->status = ms_link_cast(t, dtype, &made);
    return ms_link_ops_own(work, made);
}

/* Casts on the way where the dtypes differ. */
void ms_link_ops_copy(ms_link_ops *work, ms_tensor *from, ms_tensor *to)
{
    if (!work->status) work->status = ms_copy_into(work->bucket->engine, from, to);
}

/* The group's memory, since a collective reads or writes the tensor; ms_link_ops_scratch is for the
 * rest. Two dimensions, since what travels is either a row for each rank or a matrix; [1, n] is a
 * plain list. The contents are undefined. */
ms_tensor *ms_link_ops_new(ms_link_ops *work, ms_dtype dtype, int64_t rows, int64_t columns)
{
    ms_storage *storage = NULL;
    ms_tensor *made = NULL;
    const int64_t shape[] = { rows, columns };
    if (work->status) return NULL;
    work->status =
        ms_group_storage(ms_link_ops_group(work), ms_engine_current(work->bucket->engine),
                         (size_t)(rows * columns) * ms_dtype_bytes(dtype), &storage);
    if (!work->status) work->status = ms_tensor_on(storage, dtype, 2, shape, &made);
    ms_storage_release(storage);
    return ms_link_ops_own(work, made);
}

/* Ordinary memory of this rank, which costs no space in the heap that ranks share. */
ms_tensor *ms_link_ops_scratch(ms_link_ops *work, int64_t count)
{
    ms_tensor *made = NULL;
    if (!work->status) work->status = ms_tensor_new(work->bucket->engine, MS_F32, 1, &count, &made);
    return ms_link_ops_own(work, made);
}

/* For a tensor whose numbers are needed after it was written: the copy is ordered before that write
 * on the same stream. */
ms_tensor *ms_link_ops_copy_of(ms_link_ops *work, ms_tensor *t)
{
    ms_tensor *made = NULL;
    if (!work->status) work->status = ms_link_flat_copy(t, &made);
    return ms_link_ops_own(work, made);
}

/* A window, which enqueues nothing. A list (columns 0) has one dimension, with stride 1. */
ms_tensor *ms_link_ops_view(ms_link_ops *work, ms_tensor *t, int64_t offset, int64_t rows,
                            int64_t columns)
{
    ms_tensor *made = NULL;
    const int64_t shape[] = { rows, columns }, strides[] = { columns ? columns : 1, 1 };
    if (!work->status)
        work->status = ms_tensor_window(t, columns ? 2 : 1, shape, strides, offset, &made);
    return ms_link_ops_own(work, made);
}

/* By strides; no number moves. */
ms_tensor *ms_link_ops_transposed(ms_link_ops *work, ms_tensor *t, int64_t offset, int64_t rows,
                                  int64_t columns)
{
    ms_tensor *made = NULL;
    const int64_t shape[] = { columns, rows }, strides[] = { 1, columns };
    if (!work->status) work->status = ms_tensor_window(t, 2, shape, strides, offset, &made);
    return ms_link_ops_own(work, made);
}

/* It is found by the bucket's parameters, so each bucket of a pass gets its own. Writing it is how
 * a link keeps something for the next iteration. */
ms_tensor *ms_link_ops_state(ms_link_ops *work, const char *name)
{
    ms_tensor *made = NULL;
    if (!work->status)
        work->status =
            ms_link_state_tensor(work->link->state, work->bucket, name, NULL, NULL, &made);
    return ms_link_ops_own(work, made);
}

/* All ranks must come here in the same order with equal sizes: whether it is called may depend on
 * shapes and options, never on values. */
void ms_link_ops_collective(ms_link_ops *work, ms_collective_kind kind, ms_tensor *in,
                            ms_tensor *out)
{
    if (!work->status)
        work->status = ms_link_collective(work->bucket, ms_link_ops_group(work),
                                          (ms_collective){ .kind = kind, .in = in, .out = out });
}

/* ranks is the first dimension, so that the rows are in rank order, and sums over them are the same
 * on all ranks. */
ms_tensor *ms_link_ops_all_gather(ms_link_ops *work, ms_tensor *t)
{
    if (work->status) return NULL;
    int64_t ranks = ms_group_size(ms_link_ops_group(work));
    ms_tensor *all = ms_link_ops_new(work, ms_tensor_dtype(t), ranks, ms_tensor_count(t));
    ms_link_ops_collective(work, MS_ALL_GATHER, t, all);
    return all;
}

/* Only this rank's shard is written, so that the result is a part of the bucket's buffer and needs
 * no copy in the reducer. */
ms_status ms_link_ops_give(ms_link_ops *work, ms_tensor *result, ms_tensor **out)
{
    ms_tensor *to = NULL, *buffer = work->bucket->buffer;
    if (!work->status && work->bucket->parts)
        work->status = ms_link_check_rows(work->bucket, buffer);
    if (!work->status) work->status = ms_link_place(work->bucket, buffer, &to);
    if (!work->status) work->status = ms_link_copy_shard(work->bucket, result, to);
    ms_status status = ms_link_ops_end(work);
    if (status) ms_tensor_release(to);
    else *out = to;
    return status;
}

ms_status ms_stream_wait_users(ms_stream *stream, const ms_tensor *tensor)
{
    ms_point points[MS_STREAMS_MAX];
    const ms_storage *storage = ms_tensor_storage(tensor);
    uint32_t count = ms_storage_users(storage, 0, ms_storage_bytes(storage), points);
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) status = ms_stream_wait(stream, points[i]);
    return status;
}
