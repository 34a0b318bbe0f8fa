/* differentiable.c: collectives in a forward: what each gives back in backward.
 *
 * The gradient of a result is what this rank's loss knows of it; the loss of the job is the sum of
 * all ranks' losses. So a value that went to several ranks gathers their gradients, and a sum hands
 * its gradient to every summand:
 * - all_reduce: sum, avg: the same of the gradients; premul_sum: their sum times the rank's factor.
 * - broadcast: reduce to root; zeros elsewhere.
 * - all_gather: reduce_scatter.
 * - reduce_scatter: all_gather; avg: divided by the size; premul_sum: times the rank's factor.
 * - all_to_all: all_to_all with the counts exchanged.
 *
 * All ranks must go backward through it, as all go forward. What only a root gets (reduce, gather)
 * and scatter have no gradient: ranks whose loss knows nothing of the result would not go backward
 * through it. */
#include "moonshard/comm.h"

#include <string.h>

#include "moonshard/grad.h"

/* It is the user of a node on the tape, and goes with the graph. */
typedef struct link { /* the collective of a forward, as its backward needs it */
    ms_engine *engine;
    ms_group *group;
    uint32_t channel;
    ms_collective call; /* without tensors */
    ms_dtype dtype;
    uint32_t dims;
    int64_t shape[MS_DIMS_MAX];       /* of the input */
    int64_t *counts, *receive_counts; /* in the memory after this struct, or NULL */
} link;

/* Only sums pass a gradient on to every summand. A minimum's gradient would go to the rank whose
 * number it was, which no other rank knows. */
static bool is_sum(ms_reduce_op op)
{
    return op == MS_REDUCE_OP_SUM || op == MS_REDUCE_OP_AVG || op == MS_REDUCE_OP_PREMUL_SUM;
}

/* Every member gets something of the result, so every member goes backward. */
static bool is_differentiable(const ms_collective *call)
{
    if (call->kind == MS_ALL_REDUCE || call->kind == MS_REDUCE_SCATTER) return is_sum(call->op);
    return call->kind == MS_ALL_GATHER || call->kind == MS_ALL_TO_ALL || call->kind == MS_BROADCAST;
}

/* Of a broadcast: the rank whose values the others got. */
static bool is_root(const link *l) { return ms_group_rank(l->group) == l->call.root; }

/* The opposite collective of g into a new tensor in the input's shape (in place: g's copy itself).
 * It goes on the channel of the forward, in an order that the graph fixes on every rank. */
static ms_status exchange(const link *l, ms_collective_kind kind, ms_tensor *in, ms_tensor *out)
{
    ms_collective back = { .kind = kind,
                           .op = MS_REDUCE_OP_SUM,
                           .root = l->call.root,
                           .in = in,
                           .out = out,
                           .counts = l->counts,
                           .bucket = -1,
                           .label = "gradient" };
    if (kind == MS_ALL_REDUCE && l->call.op == MS_REDUCE_OP_AVG) back.op = MS_REDUCE_OP_AVG;
    /* What came in now goes out: the two lists change places. */
    if (kind == MS_ALL_TO_ALL && l->counts) {
        back.counts = l->receive_counts;
        back.receive_counts = l->counts;
    }
    return ms_group_enqueue(l->group, l->channel, &back, NULL);
}

/* t *= factor, in place. */
static ms_status scale(const link *l, double factor, ms_tensor *t)
{
    ms_attributes attributes = { .scalar = { .value = factor } };
    ms_tensor *same = NULL;
    ms_status status =
        ms_op_apply(l->engine, &ms_op_mul_scalar, &attributes, true, &t, 1, &same, 1);
    ms_tensor_release(same);
    return status;
}

/* What the sum did to this rank's tensor before it was added. all_reduce by avg is its own
 * opposite, so it needs no factor here. */
static ms_status finish_sum(const link *l, ms_tensor *result)
{
    if (l->call.op == MS_REDUCE_OP_PREMUL_SUM) return scale(l, l->call.factor, result);
    if (l->call.op == MS_REDUCE_OP_AVG && l->call.kind != MS_ALL_REDUCE)
        return scale(l, 1.0 / (double)ms_group_size(l->group), result);
    return MS_OK;
}

/* A copy of g, on which the collective works in place. */
static ms_status in_place(const link *l, ms_collective_kind kind, ms_tensor *g, ms_tensor **result)
{
    ms_status status = ms_op_apply(l->engine, &ms_op_clone, NULL, false, &g, 1, result, 1);
    return status ? status : exchange(l, kind, *result, NULL);
}

/* Only the root's input reached the others, so other ranks' inputs get no gradient. */
static ms_status zeros(const link *l, ms_tensor *result)
{
    ms_attributes attributes = { .scalar = { .value = 0.0 } };
    ms_tensor *same = NULL;
    ms_status status = ms_op_apply(l->engine, &ms_op_fill, &attributes, true, &result, 1, &same, 1);
    ms_tensor_release(same);
    return status;
}

/* The gradient of the input from the contiguous gradient of the result; *result may be left for the
 * caller to release also after an error. */
static ms_status gradient_of(const link *l, ms_tensor *g, ms_tensor **result)
{
    ms_status status = MS_OK;
    switch (l->call.kind) {
    case MS_ALL_REDUCE:
        status = in_place(l, MS_ALL_REDUCE, g, result);
        return status ? status : finish_sum(l, *result);
    case MS_BROADCAST:
        status = in_place(l, MS_REDUCE, g, result);
        return status || is_root(l) ? status : zeros(l, *result);
    default: break;
    }
    static const ms_collective_kind opposite[] = { [MS_REDUCE_SCATTER] = MS_ALL_GATHER,
                                                   [MS_ALL_GATHER] = MS_REDUCE_SCATTER,
                                                   [MS_ALL_TO_ALL] = MS_ALL_TO_ALL };
    status = ms_tensor_new(l->engine, l->dtype, l->dims, l->shape, result);
    if (!status) status = exchange(l, opposite[l->call.kind], g, *result);
    return status ? status : finish_sum(l, *result);
}

/* All ranks reach this node in the same order, because they recorded the same forward; so the
 * collectives of backward match. */
static ms_status link_backward(void *user, ms_tensor *const *gradients, ms_tensor **results,
                               const bool *needs)
{
    const link *l = user;
    ms_tensor *g = NULL, *result = NULL;
    if (!gradients[0] || !needs[0]) return MS_OK;
    ms_status status = ms_op_apply(l->engine, &ms_op_contiguous, NULL, false, gradients, 1, &g, 1);
    if (!status) status = gradient_of(l, g, &result);
    ms_tensor_release(g);
    if (status) ms_tensor_release(result);
    else results[0] = result;
    return status;
}

/* Tensors were never kept. A graph may outlive the membership, and its groups, when the engine
 * ends. */
static void link_free(void *user)
{
    link *l = user;
    if (ms_comm_world(l->engine)) ms_group_release(l->group);
    ms_release(ms_engine_context(l->engine), l);
}

static const ms_function link_function = { .name = "a collective",
                                           .backward = link_backward,
                                           .free = link_free };

/* Copies the call and its counts: the caller's lists may be gone when backward runs. */
static ms_status new_link(ms_group *group, uint32_t channel, const ms_collective *call,
                          const ms_tensor *input, link **out)
{
    ms_engine *engine = ms_group_engine(group);
    size_t lists = 0, size = ms_group_size(group);
    if (call->counts) lists = call->receive_counts ? 2 : 1;
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(engine), sizeof(link) + lists * size * sizeof(int64_t),
                    "a collective's gradient", &memory);
    if (status) return status;
    link *l = memory;
    *l = (link){ .engine = engine,
                 .group = ms_group_retain(group),
                 .channel = channel,
                 .call = *call,
                 .dtype = ms_tensor_dtype(input),
                 .dims = ms_tensor_dims(input) };
    memcpy(l->shape, ms_tensor_shape(input), l->dims * sizeof *l->shape);
    int64_t *list = (int64_t *)(l + 1);
    if (call->counts) l->counts = memcpy(list, call->counts, size * sizeof *list);
    if (call->receive_counts)
        l->receive_counts = memcpy(list + size, call->receive_counts, size * sizeof *list);
    /* Tensors and lists of the caller may be gone when backward runs. */
    l->call.in = l->call.out = NULL;
    l->call.counts = l->call.receive_counts = NULL;
    *out = l;
    return MS_OK;
}

/* What backward needs is allocated before the collective is enqueued, because a call that peers
 * have seen cannot be taken back for want of memory. */
ms_status ms_group_apply(ms_group *group, uint32_t channel, const ms_collective *call,
                         ms_tensor *input, ms_point *ready)
{
    ms_engine *engine = ms_group_engine(group);
    if (!ms_engine_is_recording(engine) || !ms_tensor_requires_grad(input))
        return ms_group_enqueue(group, channel, call, ready);
    if (!is_differentiable(call)) {
        bool reduces = call->kind <= MS_REDUCE_SCATTER;
        const char *with = reduces ? " with op " : "";
        const char *operation = reduces ? ms_reduce_op_name(call->op) : "";
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%s%s%s has no gradient: run it inside no_grad, on a detached "
                              "tensor, or use an all_ form",
                              ms_collective_name(call->kind), with, operation);
    }
    link *l = NULL;
    /* In place, `in` is a copy of the input that the caller has made. */
    ms_tensor *output = call->out ? call->out : call->in;
    ms_status status = new_link(group, channel, call, input, &l);
    if (!status) status = ms_group_enqueue(group, channel, call, ready);
    if (!status) status = ms_record(engine, &link_function, l, &input, 1, &output, 1);
    if (status && l) link_free(l);
    return status;
}
