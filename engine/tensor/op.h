/* op.h: what an operator is made of, and what its forward and backward get. For tensor/, and for
 * the layers above that define operators, run them or enqueue work on tensors.
 *
 * Invariants
 * - forward checks everything first (shapes, dtypes, attributes), then makes its outputs, then
 *   enqueues. It changes nothing when it fails.
 * - backward gets gradients of the outputs (NULL where none arrived), and fills results[i] only
 *   where needs[i]; each result has the shape and dtype of input i, and may be a view (also one
 *   that repeats elements). What it makes on the way it releases. It uses ms_op_apply, never the
 *   tape.
 * - What backward needs is saved by forward with ms_op_save, and only if call->record is true.
 *
 * An operator is a const struct without state: all that differs between two calls is in ms_op_call
 * or ms_op_gradient. The tape keeps of a call what the second needs: attributes, saved tensors, and
 * what inputs and outputs were. */
#ifndef MOONSHARD_TENSOR_OP_H
#define MOONSHARD_TENSOR_OP_H

#include "moonshard/tensor.h"
#include "tensor/shape.h"

/* Room in a node for saved tensors. Attention saves the most, five. */
#define MS_OP_SAVED_MAX 8
/* Room for what the first part of a backward keeps for the second. */
#define MS_OP_KEPT_MAX 2

/* What backward knows of a tensor that may be gone by then. */
typedef struct ms_tensor_info {
    ms_dtype dtype;
    uint32_t dims;
    int64_t shape[MS_DIMS_MAX];
} ms_tensor_info;

/* One call of forward. The caller owns inputs; forward fills outputs with tensors that the caller
 * then owns. saved belongs to the call until the tape takes it over. */
typedef struct ms_op_call {
    ms_engine *engine;
    const ms_op *op;
    ms_attributes attributes; /* forward may write what backward is to find here */
    ms_tensor *const *inputs;
    uint32_t input_count;
    ms_tensor **outputs; /* filled by forward, in order */
    uint32_t output_count;
    ms_tensor *saved[MS_OP_SAVED_MAX]; /* aliases, owned by the call */
    uint32_t saved_count;
    bool in_place, record;
    /* With record: for each input whether backward will want its gradient, for an operator that
     * makes gradients in forward. NULL: of each input. */
    const bool *needs;
} ms_op_call;

/* One call of backward. gradients[o] is the sum of all gradients of output o, in that output's
 * shape and dtype, with any strides, 0 included. All tensors are borrowed but results, which the
 * caller takes over. After an error results may hold tensors: the caller releases them. */
typedef struct ms_op_gradient {
    ms_engine *engine;
    const ms_op *op;
    ms_attributes attributes;
    ms_tensor *const *saved;
    uint32_t saved_count;
    const ms_tensor_info *inputs; /* what the inputs were */
    uint32_t input_count;
    const ms_tensor_info *outputs;
    ms_tensor *const *gradients;
    uint32_t output_count;
    ms_tensor **results;
    const bool *needs;
    /* For each input its gradient summed so far, or NULL: backward may add to it in place; it then
     * returns the same tensor, retained, as the result. The array may be NULL. */
    ms_tensor *const *sums;
    /* For each input a destination buffer, or NULL: a contiguous tensor of the input's shape and
     * dtype that backward may write; it then returns the same tensor, retained, as the result. See
     * ms_op_result. The array may be NULL. */
    ms_tensor *const *homes;
    /* Of a backward in two parts, which calls backward twice if the operator has MS_OP_SPLITS. In
     * the first call later[i] says that result i is left to the second one. No matrix product may
     * run in both: backward puts what both need into kept[], owned by the node from then on. It may
     * also fill results[i] where later[i], which the tape then keeps and delivers: what one task
     * makes, or one of two products that share their work. In the second call later is NULL, needs
     * has what is still missing, and kept[] is what the first has put there. Otherwise both are
     * NULL. Both calls together must give the bits of one. */
    const bool *later;
    ms_tensor **kept; /* MS_OP_KEPT_MAX */
    /* Of the first call: backward sets bit k where the second one will not read the numbers of
     * saved[k], so that they may change or be dropped. Where it leaves no result to the second
     * call, nothing is kept for that. */
    uint32_t *unread;
    /* The graph is freed after this call: memory that only `saved` refers to may be overwritten. */
    bool last;
} ms_op_gradient;

/* Notes in the first of two calls whether the second one reads saved[k]. */
static inline void ms_op_reads_later(const ms_op_gradient *gradient, uint32_t k, bool yes)
{
    if (gradient->unread && !yes) *gradient->unread |= 1u << k;
}

/* Whether the second of two calls makes this result. */
static inline bool ms_op_is_left(const ms_op_gradient *gradient, uint32_t index)
{
    return index < gradient->input_count && gradient->later && gradient->later[index]
           && !gradient->results[index];
}

/* Whether this call may make the result: it is needed now, or in the second part. */
static inline bool ms_op_wants(const ms_op_gradient *gradient, uint32_t index)
{
    return index < gradient->input_count
           && (gradient->needs[index] || (gradient->later && gradient->later[index]));
}

enum {
    MS_OP_VIEW = 1,     /* outputs share inputs[0]'s storage */
    MS_OP_IN_PLACE = 2, /* has an in-place twin */
    MS_OP_NO_GRAD = 4,  /* the result never needs a gradient (comparisons, argmax) */
    MS_OP_VARIADIC = 8, /* any number of inputs from inputs_min on */
    /* With MS_OP_NO_GRAD: the result depends smoothly on the inputs, so that the tape refuses an
     * input that requires a gradient. */
    MS_OP_LOSES_GRAD = 16,
    /* What initial.c asks. Of one tensor: each element of the result depends on that element and
     * the attributes only; all elements are overwritten, whatever they were. And: the result has
     * the values of the last input, in its own dtype. */
    MS_OP_ELEMENTWISE = 32,
    MS_OP_OVERWRITES = 64,
    MS_OP_COPIES = 128,
    /* What part.c asks, beside these three: of a rank's part of a tensor it gives what it gives
     * there of the whole, element by element; or, over all elements, what ranks may combine. */
    MS_OP_PARTS = 256,
    MS_OP_OVER_PARTS = 512,
    /* Under autocast the result of 16 bits is f32: see ms_autocast_wide. */
    MS_OP_WIDE = 1024,
    /* Has matrix products, some of which a backward in two parts leaves to the second one. Other
     * operators are called once, in the first part, for all results: to read the gradient again
     * later would take more time than to compute a result while it is in the cache, and what is
     * kept until then, the results, is mostly smaller than the gradient and what forward saved. */
    MS_OP_SPLITS = 2048
};

/* The facts of an operator. outputs are as many as the call asks for; operators with a variable
 * number check it. */
struct ms_op {
    const char *name;
    ms_status (*forward)(ms_op_call *call);
    ms_status (*backward)(ms_op_gradient *gradient); /* NULL with MS_OP_NO_GRAD */
    uint8_t inputs_min, inputs_max;                  /* those past min may be NULL or absent */
    uint16_t flags;
};

/* Checks the inputs and runs forward; after a failure nothing is left in outputs and saved. For the
 * tape. */
ms_status ms_op_run(ms_op_call *call);

/* initial.c: the record of how values on "meta" would have been made: what a call goes on from,
 * taken before forward, since forward counts its write; and noting what the call has done. */
typedef struct ms_initializer_source {
    const ms_initializer *record; /* of the tensor that is read; borrowed */
    bool begins;                  /* nothing is read */
} ms_initializer_source;
ms_initializer_source ms_initializer_before(const ms_op_call *call);
ms_status ms_initializer_after(const ms_op_call *call, ms_initializer_source source);

/* Releases what forward saved. */
void ms_op_drop_saved(ms_op_call *call);

/* ------------------------------------------------------ helpers for forward */

/* Makes output `index`: a new tensor, or inputs[0] itself for index 0 of an in-place call. In place
 * the target must have this dtype and shape, and no element of it may represent several. *borrowed
 * is the call's. */
ms_status ms_op_output(ms_op_call *call, uint32_t index, ms_dtype dtype, uint32_t dims,
                       const int64_t *shape, ms_tensor **borrowed);
/* Keeps an alias of the tensor for backward, in order; does nothing unless call->record. An alias
 * has no history, so a node that saves its own result does not keep itself alive. */
ms_status ms_op_save(ms_op_call *call, ms_tensor *tensor);

/* "matmul: [2, 3] f32 and [4, 5] f32: <format>" as MS_ERROR_ARGUMENT: the operator, all inputs,
 * then what is wrong and what would fit. */
ms_status ms_op_refuse(const ms_op_call *call, const char *format, ...) MS_PRINTF(2, 3);

/* Enqueues on the current stream. Tensors may repeat; writes counts as a change of their storages'
 * versions. The cost's dtype becomes that of the first tensor that is read, or else written. */
ms_status ms_tensor_enqueue(ms_engine *engine, const ms_task *task, const void *arguments,
                            ms_tensor *const *reads, uint32_t read_count, ms_tensor *const *writes,
                            uint32_t write_count, ms_task_cost cost);

/* From here to the call with NULLs, what tasks write in `target` is computed from `source` alone,
 * and counts as a restore (ms_storage_restore) instead of a write. Both are borrowed. */
void ms_tensor_restoring(ms_engine *engine, const ms_tensor *target, const ms_tensor *source);

/* ----------------------------------------------------- helpers for backward */

/* Short forms of ms_op_apply for one output. The result is owned by the caller. */
ms_status ms_op_unary(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                      ms_tensor *a, ms_tensor **out);
ms_status ms_op_binary(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                       ms_tensor *a, ms_tensor *b, ms_tensor **out);
/* Where backward writes its gradient of input `index`: the input's home if it was offered one, else
 * a new tensor. It has the input's shape and dtype, is contiguous, and may hold anything. The
 * caller releases it, or returns it as its result. */
ms_status ms_op_result(const ms_op_gradient *gradient, uint32_t index, ms_tensor **out);

#endif
