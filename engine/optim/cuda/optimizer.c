/* optimizer.c: launches the steps of one parameter, or of many together. */
#include "optim/cuda/optimizer.h"

MS_CUDA_IMAGE(optimizer)
MS_CUDA_KERNEL(optimizer, optimizer_scalars)

#define STEP(kind, kernel) \
    [kind] = { .image = ms_cuda_image_optimizer, .name = "optimizer_" #kernel },
static const ms_cuda_kernel steps[MS_OPTIMIZER_KINDS] = { MS_OPTIMIZER_LIST(STEP) };

/* For a parameter; an empty one has none, so its step only counts. */
static uint32_t blocks_of(const ms_optimizer_args *o)
{
    return (uint32_t)((o->elements + MS_CUDA_OPTIMIZER_PIECE - 1) / MS_CUDA_OPTIMIZER_PIECE);
}

static ms_cuda_optimizer_step step_of(const ms_optimizer_args *o)
{
    ms_cuda_optimizer_step step = { .o = *o };
    step.aligned = ms_cuda_is_aligned(o->parameter) && ms_cuda_is_aligned(o->gradient)
                   && ms_cuda_is_aligned(o->master) && ms_cuda_is_aligned(o->cast);
    for (int i = 0; i < MS_OPTIMIZER_STATES; i++)
        step.aligned = step.aligned && ms_cuda_is_aligned(o->states[i]);
    return step;
}

/* Several steps as the GPU gets them. */
typedef struct table {
    ms_cuda_optimizer_step steps[MS_CUDA_BATCH];
    uint32_t first[MS_CUDA_BATCH];
} table;
_Static_assert(sizeof(table) <= MS_CUDA_PUT_MOST, "it is put in one piece");

/* The scratch memory: the scalars of each step, then the table. */
static void put_table(ms_cuda_work *work, const void *const *arguments,
                      ms_cuda_optimizer_call *call)
{
    table all, *there = (table *)(void *)(call->scalars + call->count);
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < call->count; i++) {
        all.steps[i] = step_of(arguments[i]);
        all.first[i] = blocks;
        blocks += blocks_of(arguments[i]);
    }
    ms_cuda_put(work, there, &all, sizeof all);
    call->steps = there->steps;
    call->first = there->first;
}

static void run_all(ms_cuda_work *work, const void *const *arguments, uint32_t count)
{
    const ms_optimizer_args *first = arguments[0];
    ms_cuda_optimizer_call call = { .one = step_of(first), .count = count };
    size_t scalars = count * sizeof *call.scalars;
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < count; i++) blocks += blocks_of(arguments[i]);
    call.scalars = ms_cuda_scratch(work, scalars + (count > 1 ? sizeof(table) : 0));
    if (!call.scalars) return;
    if (count > 1) put_table(work, arguments, &call);
    ms_cuda_shape one = { .blocks = { 1 }, .threads = { MS_CUDA_BATCH } },
                  each = { .blocks = { blocks }, .threads = { MS_CUDA_THREADS } };
    ms_cuda_launch(work, &optimizer_scalars, one, &call, sizeof call);
    ms_cuda_launch(work, &steps[first->kind], each, &call, sizeof call);
}

static void run(ms_cuda_work *work, const void *arguments) { run_all(work, &arguments, 1); }

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    return (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
}

/* A kernel is of one kind. What one step writes, no other may touch: parameters that share memory,
 * and gradients that are other parameters, are stepped one after another. States belong to their
 * parameter. */
static bool joins(const void *const *arguments, uint32_t count, const void *next)
{
    const ms_optimizer_args *o = next, *first = arguments[0];
    size_t bytes = (size_t)o->elements * ms_dtype_bytes(o->dtype),
           gradient_bytes = (size_t)o->elements * ms_dtype_bytes(o->gradient_dtype);
    uint64_t blocks = blocks_of(o);
    if (o->kind != first->kind) return false;
    for (uint32_t i = 0; i < count; i++) {
        const ms_optimizer_args *other = arguments[i];
        size_t other_bytes = (size_t)other->elements * ms_dtype_bytes(other->dtype),
               other_gradient = (size_t)other->elements * ms_dtype_bytes(other->gradient_dtype);
        if (other->count == o->count || overlap(o->parameter, bytes, other->parameter, other_bytes)
            || overlap(o->gradient, gradient_bytes, other->parameter, other_bytes)
            || overlap(o->parameter, bytes, other->gradient, other_gradient))
            return false;
        blocks += blocks_of(other);
    }
    return blocks <= INT32_MAX;
}

MS_CUDA_CLEAR_PADDING(optimizer, ms_optimizer_args)
const ms_cuda_task ms_cuda_optimizer = { .task = { .name = "optimizer",
                                                   .args_bytes = sizeof(ms_optimizer_args),
                                                   .kind = MS_KIND_OPTIMIZER },
                                         .function = run,
                                         .clear_padding = MS_CUDA_PADDING(optimizer),
                                         .batch = run_all,
                                         .joins = joins };
