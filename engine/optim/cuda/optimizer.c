/* optimizer.c: launches the step of one parameter. */
#include "optim/cuda/optimizer.h"

MS_CUDA_IMAGE(optimizer)
MS_CUDA_KERNEL(optimizer, optimizer_scalars)

#define STEP(kind, kernel) \
    [kind] = { .image = ms_cuda_image_optimizer, .name = "optimizer_" kernel }
static const ms_cuda_kernel steps[MS_OPTIMIZER_KINDS] = {
    STEP(MS_SGD, "sgd"),         STEP(MS_ADAM, "adam"),         STEP(MS_ADAMW, "adamw"),
    STEP(MS_ADAGRAD, "adagrad"), STEP(MS_ADADELTA, "adadelta"), STEP(MS_RMSPROP, "rmsprop"),
    STEP(MS_RPROP, "rprop"),     STEP(MS_ADAMAX, "adamax"),
};

static void run(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_optimizer_call call = { .o = *(const ms_optimizer_args *)arguments };
    const ms_optimizer_args *o = &call.o;
    call.aligned = ms_cuda_is_aligned(o->parameter) && ms_cuda_is_aligned(o->gradient)
                   && ms_cuda_is_aligned(o->master);
    for (int i = 0; i < MS_OPTIMIZER_STATES; i++)
        call.aligned = call.aligned && ms_cuda_is_aligned(o->states[i]);
    call.scalars = ms_cuda_scratch(work, sizeof *call.scalars);
    if (!call.scalars) return;
    ms_cuda_shape one = { .blocks = { 1 }, .threads = { 1 } };
    ms_cuda_launch(work, &optimizer_scalars, one, &call, sizeof call);
    ms_cuda_launch(work, &steps[o->kind], ms_cuda_grid(o->elements, 8), &call, sizeof call);
}

MS_CUDA_TASK(optimizer, "optimizer", ms_optimizer_args, MS_KIND_OPTIMIZER, run)
