/* arguments.c: whether the arguments of a collective fit its kind and its group. */
#include "comm/arguments.h"

#include <stdio.h>

/* An error that begins with the collective's name. Every error of this file is one of arguments:
 * nothing has been claimed, and peers know nothing of the call yet. */
static ms_status refuse(ms_group *group, const ms_collective *c, const char *format, ...)
    MS_PRINTF(3, 4);
static ms_status refuse(ms_group *group, const ms_collective *c, const char *format, ...)
{
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    return ms_engine_fail(group->comm->engine, MS_ERROR_ARGUMENT, "%s: %s",
                          ms_collective_name(c->kind), text);
}

/* Collectives work on addresses and lengths, so tensors must be contiguous. `name` says which one
 * in the message. in and out must have one dtype, because no transport converts; `travels` is the
 * one exception, and it has no out. */
static ms_status check_tensor(ms_group *group, const ms_collective *c, const char *name,
                              const ms_tensor *tensor)
{
    char text[128];
    if (!tensor) return MS_OK;
    if (ms_tensor_engine(tensor) != group->comm->engine)
        return refuse(group, c, "%s belongs to another engine", name);
    if (!ms_tensor_is_contiguous(tensor))
        return refuse(group, c, "%s %s is not contiguous: copy it first", name,
                      ms_tensor_describe(tensor, text, sizeof text));
    if (c->in && ms_tensor_dtype(tensor) != ms_tensor_dtype(c->in))
        return refuse(group, c, "out is %s, in is %s: they must be of one dtype",
                      ms_dtype_name(ms_tensor_dtype(tensor)),
                      ms_dtype_name(ms_tensor_dtype(c->in)));
    return MS_OK;
}

/* The sum is checked at each step: a sum that wraps would pass the checks of lengths. The counts
 * are the caller's numbers, and become offsets into tensors. */
static ms_status check_counts(ms_group *group, const ms_collective *c, const char *name,
                              const int64_t *counts, uint64_t *sum)
{
    *sum = 0;
    for (uint32_t m = 0; m < group->size; m++) {
        if (counts[m] < 0)
            return refuse(group, c, "%s[%u] = %lld is negative", name, m, (long long)counts[m]);
        if (__builtin_add_overflow(*sum, (uint64_t)counts[m], sum) || *sum > INT64_MAX)
            return refuse(group, c, "the sum of %s has more than 63 bits", name);
    }
    return MS_OK;
}

/* Users have channels 1 and 2; the library's own channel for parameters is allowed too. A send to
 * this rank itself would wait for a recv that can only come after it. */
static ms_status check_channel_and_root(ms_group *group, uint32_t channel, const ms_collective *c)
{
    bool pair = ms_kind_is_pair(c->kind);
    if (channel < 1 || channel > MS_CHANNEL_PARAMETERS)
        return refuse(group, c, "channel %u: a group has channels 1 and 2", channel);
    if ((ms_kind_has_root(c->kind) || pair) && c->root >= group->size)
        return refuse(group, c, "rank %u: %s has ranks 0 to %u", c->root, group->name,
                      group->size - 1);
    if (pair && c->root == group->rank) return refuse(group, c, "rank %u is this rank", c->root);
    return MS_OK;
}

/* Whether this rank brings a tensor, and whether it gets its result in another one. */
static bool wants_in(const ms_group *group, const ms_collective *c)
{
    /* The other ranks of a scatter only receive. */
    bool elsewhere = c->kind == MS_SCATTER && group->rank != c->root;
    return c->kind != MS_BARRIER && c->kind != MS_SPLIT && !elsewhere;
}

/* Kinds whose result has another length than the input, or goes to some ranks only, take a separate
 * tensor. */
static bool wants_out(const ms_group *group, const ms_collective *c)
{
    bool all = c->kind == MS_REDUCE_SCATTER || c->kind == MS_ALL_GATHER || c->kind == MS_ALL_TO_ALL;
    return all || c->kind == MS_SCATTER || (c->kind == MS_GATHER && group->rank == c->root);
}

/* Which tensors and counts each kind has: the table at ms_collective. A missing tensor is found
 * here, so the checks after this one may read those that the kind needs. */
static ms_status check_presence(ms_group *group, const ms_collective *c)
{
    bool in = wants_in(group, c), out = wants_out(group, c);
    /* Where a separate result is allowed but not required. */
    bool may_out =
        out || c->kind == MS_ALL_REDUCE || (c->kind == MS_REDUCE && group->rank == c->root);
    if (in != (c->in != NULL))
        return refuse(group, c, in ? "the tensor is missing" : "this rank brings no tensor");
    if (out && !c->out) return refuse(group, c, "the tensor for the result is missing");
    if (!may_out && c->out) return refuse(group, c, "this rank has no separate result");
    /* receive_counts belong to all_to_all, and only together with counts. */
    bool cuts = ms_kind_parts(c->kind) || c->kind == MS_ALL_GATHER || c->kind == MS_GATHER;
    if ((c->counts && !cuts)
        || (c->receive_counts != NULL) != (c->kind == MS_ALL_TO_ALL && c->counts))
        return refuse(group, c, "counts are given where they mean nothing, or only for one side");
    return MS_OK;
}

/* Operations and dtypes that fit. A mean of integers has no exact result, so it is refused.
 * Rounding on the way has no meaning where the result goes to another tensor or another dtype. */
static ms_status check_numbers(ms_group *group, const ms_collective *c)
{
    bool rounds = c->travels != MS_F32,
         may_round = c->kind == MS_ALL_REDUCE && !c->out && ms_tensor_dtype(c->in) == MS_F32;
    if (rounds && !(may_round && (c->travels == MS_F16 || c->travels == MS_BF16)))
        return refuse(group, c,
                      "only an all_reduce of f32 in place can round its numbers on their way, to "
                      "f16 or bf16");
    if (!ms_kind_reduces(c->kind)) return MS_OK;
    if ((unsigned)c->op >= MS_REDUCE_OPS) return refuse(group, c, "there is no such operation");
    if ((c->op == MS_REDUCE_OP_AVG || c->op == MS_REDUCE_OP_PREMUL_SUM)
        && !ms_dtype_is_float(ms_tensor_dtype(c->in)))
        return refuse(group, c, "%s of %s: it needs a float dtype; sum, then divide",
                      ms_reduce_op_name(c->op), ms_dtype_name(ms_tensor_dtype(c->in)));
    return MS_OK;
}

/* The elements of the whole, and of this rank's in and out, as the table at ms_collective says. All
 * in elements. in and out are what this rank's tensors must have. */
typedef struct lengths {
    uint64_t whole, in, out;
} lengths;

/* Computed from what this rank was given; peers compare the length of the whole when they claim.
 * Each kind has one tensor that says how long the whole is: `in` of most, `out` of a scatter
 * elsewhere than on the root. size * in may overflow for a fake world of many ranks, hence the
 * checked product. */
static ms_status expect_lengths(ms_group *group, const ms_collective *c, lengths *expected)
{
    uint64_t in = c->in ? (uint64_t)ms_tensor_count(c->in) : 0;
    uint64_t out = c->out ? (uint64_t)ms_tensor_count(c->out) : 0;
    uint64_t size = group->size, sum = 0, receive = 0, whole = in;
    ms_status status = c->counts ? check_counts(group, c, "counts", c->counts, &sum) : MS_OK;
    if (!status && c->receive_counts)
        status = check_counts(group, c, "receive_counts", c->receive_counts, &receive);
    if (status) return status;
    bool joins = c->kind == MS_ALL_GATHER || c->kind == MS_GATHER, cuts = ms_kind_parts(c->kind);
    if (joins && __builtin_mul_overflow(in, size, &whole))
        return refuse(group, c, "the result has more than 64 bits of elements");
    /* A rank that brings nothing knows the whole from what it gets. */
    if (c->kind == MS_SCATTER && !c->in) whole = out * size;
    if (c->counts) whole = sum;
    if (cuts && !c->counts && whole % size)
        return refuse(group, c,
                      "%llu elements do not divide by %llu ranks: pad to %llu, or give counts",
                      (unsigned long long)whole, (unsigned long long)size,
                      (unsigned long long)((whole + size - 1) / size) * size);
    *expected = (lengths){ .whole = whole, .in = whole, .out = whole };
    uint64_t own = c->counts ? (uint64_t)c->counts[group->rank] : whole / size;
    if (joins) expected->in = c->counts ? own : in;
    if (cuts && c->kind != MS_ALL_TO_ALL) expected->out = own;
    else if (cuts && c->counts) expected->out = receive;
    return MS_OK;
}

/* *count: the elements of the whole, by which peers compare the call. */
static ms_status check_lengths(ms_group *group, const ms_collective *c, uint64_t *count)
{
    lengths expected = { 0 };
    ms_status status = expect_lengths(group, c, &expected);
    if (status) return status;
    uint64_t in = c->in ? (uint64_t)ms_tensor_count(c->in) : expected.in;
    uint64_t out = c->out ? (uint64_t)ms_tensor_count(c->out) : expected.out;
    if (in != expected.in)
        return refuse(group, c, "in has %llu elements, %llu are expected", (unsigned long long)in,
                      (unsigned long long)expected.in);
    if (out != expected.out)
        return refuse(group, c, "out has %llu elements, %llu are expected", (unsigned long long)out,
                      (unsigned long long)expected.out);
    *count = expected.whole;
    return MS_OK;
}

/* Found here, before peers hear of the call: a tensor whose storage is dropped, or that nothing has
 * written since its refill. The task would fail on its stream otherwise, and take the job with it.
 */
static ms_status check_memory(const ms_collective *c, const ms_tensor *tensor, bool read)
{
    if (!tensor) return MS_OK;
    /* Bytes of the storage; the tensor is contiguous, as was checked before. */
    size_t begin = (size_t)ms_tensor_offset(tensor) * ms_dtype_bytes(ms_tensor_dtype(tensor));
    return ms_storage_check(ms_tensor_storage(tensor), begin, begin + ms_tensor_bytes(tensor), read,
                            ms_collective_name(c->kind));
}

/* A restore writes the values that the storage had before, so it needs a source apart from it.
 * Reading a part of the destination while it is being written would make the "same values" depend
 * on order. */
static ms_status check_restore(ms_group *group, const ms_collective *c)
{
    if (!c->restore) return MS_OK;
    if (c->kind != MS_ALL_GATHER)
        return refuse(group, c, "only all_gather restores what it writes");
    if (ms_tensor_storage(c->in) == ms_tensor_storage(c->out))
        return refuse(group, c, "a restore needs a source with memory of its own");
    return MS_OK;
}

/* Presence comes before the checks that read the tensors; lengths come after the counts. Nothing
 * here depends on peers, and nothing has changed if it fails. */
ms_status ms_collective_check(ms_group *group, uint32_t channel, const ms_collective *c,
                              uint64_t *count)
{
    ms_status status = check_channel_and_root(group, channel, c);
    if (!status) status = check_presence(group, c);
    if (!status) status = check_tensor(group, c, "in", c->in);
    if (!status) status = check_tensor(group, c, "out", c->out);
    if (!status) status = check_numbers(group, c);
    if (!status) status = check_restore(group, c);
    if (!status) status = check_lengths(group, c, count);
    if (!status) status = check_memory(c, c->in, c->kind != MS_RECV);
    return status ? status : check_memory(c, c->out, false);
}
