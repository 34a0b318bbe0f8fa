/* clip.c: clipping by the common norm of many gradients, and unscaling with a found-inf flag: few
 * tasks, fixed order of sums.
 *
 * The norm is that of all gradients as one vector, as if they were flattened. It never comes to the
 * host unless the caller reads it: the factor is computed on the device, and the scaling task reads
 * it there. Sums of one gradient are added in tiles of fixed size and the parts in order, so the
 * norm has the same bits on any number of threads. */
#include "optim/tasks.h"

#include <math.h>

#include "moonshard/ops.h"
#include "tensor/op.h"
#include "ops/values.h"

/* Gradients must be contiguous: scaling writes them in place, which a copy cannot serve. */
static ms_status check_gradients(ms_engine *engine, const char *what, ms_tensor *const *gradients,
                                 uint32_t count)
{
    char text[160];
    /* A norm of nothing would be 0, and hides that a script passed the wrong list. */
    if (count == 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "%s: there are no gradients", what);
    for (uint32_t i = 0; i < count; i++)
        if (!ms_dtype_is_float(ms_tensor_dtype(gradients[i]))
            || !ms_tensor_is_contiguous(gradients[i]))
            return ms_engine_fail(
                engine, MS_ERROR_ARGUMENT,
                "%s: gradient %u is %s; it must be contiguous and of a float dtype", what, i + 1,
                ms_tensor_describe(gradients[i], text, sizeof text));
    return MS_OK;
}

/* How many gradients the task that begins with number `first` takes. The groups decide no sum: each
 * gradient has a part of its own. */
static uint32_t group_size(uint32_t count, uint32_t first)
{
    return count - first < MS_CLIP_TENSORS ? count - first : MS_CLIP_TENSORS;
}

/* Enqueues the measuring of each gradient's part of the norm into partial[i], one task for each
 * group. Each gradient is read once, which is what the time goes into. */
static ms_status measure(ms_engine *engine, ms_tensor *const *gradients, uint32_t count, double p,
                         ms_tensor *partial)
{
    for (uint32_t first = 0; first < count; first += MS_CLIP_TENSORS) {
        ms_measure_args args = { .p = p,
                                 .count = group_size(count, first),
                                 /* Each task writes its own places, so groups need no order among
                                  * them. */
                                 .partial = (double *)ms_tensor_data(partial) + first };
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < args.count; i++) {
            ms_tensor *g = gradients[first + i];
            args.tensors[i].data = ms_tensor_data(g);
            args.tensors[i].dtype = (int32_t)ms_tensor_dtype(g);
            args.tensors[i].elements = ms_tensor_count(g);
            bytes += ms_tensor_bytes(g);
        }
        ms_status status = ms_tensor_enqueue(engine, ms_optim_task_of(engine, MS_OPTIM_MEASURE),
                                             &args, gradients + first, args.count, &partial, 1,
                                             (ms_task_cost){ .bytes = bytes });
        if (status) return status;
    }
    return MS_OK;
}

/* Multiplies all gradients by factor, one task for each group; finite (may be NULL) turns false
 * where a result is not finite. Gradients and `finite` are read and written, so they are in both
 * lists: they come first in `used`, of which the writes are a prefix. The factor is declared last,
 * as it is only read. */
static ms_status scale(ms_engine *engine, ms_tensor *const *gradients, uint32_t count,
                       ms_tensor *factor, ms_tensor *finite)
{
    for (uint32_t first = 0; first < count; first += MS_CLIP_TENSORS) {
        ms_scale_args args = { .factor = ms_tensor_data(factor),
                               .count = group_size(count, first),
                               .finite = finite ? ms_tensor_data(finite) : NULL };
        ms_tensor *used[MS_CLIP_TENSORS + 2];
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < args.count; i++) {
            ms_tensor *g = gradients[first + i];
            used[i] = g;
            args.tensors[i].data = ms_tensor_data(g);
            args.tensors[i].dtype = (int32_t)ms_tensor_dtype(g);
            args.tensors[i].elements = ms_tensor_count(g);
            bytes += 2 * ms_tensor_bytes(g);
        }
        /* NULL where the caller does not ask: ms_tensor_enqueue passes over it. */
        used[args.count] = finite;
        used[args.count + 1] = factor;
        ms_status status = ms_tensor_enqueue(engine, ms_optim_task_of(engine, MS_OPTIM_SCALE),
                                             &args, used, args.count + 2, used, args.count + 1,
                                             (ms_task_cost){ .bytes = bytes });
        if (status) return status;
    }
    return MS_OK;
}

/* Enqueues the norm of `count` parts, the factor that brings it down to max, and the position of
 * the first part that is not finite. results: norm, factor, position. The cost is that of reading
 * the parts: 8 bytes each. */
static ms_status combine(ms_engine *engine, ms_tensor *partial, uint32_t count, double max,
                         double p, ms_tensor *const results[3])
{
    ms_combine_args args = { .p = p,
                             .max = max,
                             .count = count,
                             .partial = ms_tensor_data(partial),
                             .norm = ms_tensor_data(results[0]),
                             .factor = ms_tensor_data(results[1]),
                             .bad = ms_tensor_data(results[2]) };
    return ms_tensor_enqueue(engine, ms_optim_task_of(engine, MS_OPTIM_COMBINE), &args, &partial, 1,
                             results, 3, (ms_task_cost){ .bytes = 8u * count });
}

/* An infinite max measures without scaling: no gradient is written. With a finite max, a norm that
 * is not finite gives a factor of 0 or NaN; the caller learns of it from *bad. Three kinds of tasks
 * and no wait: the host goes on before the norm exists. */
ms_status ms_clip_norm(ms_engine *engine, ms_tensor *const *gradients, uint32_t count, double max,
                       double p, ms_tensor **norm, ms_tensor **bad)
{
    /* The order in which combine takes its results. */
    enum { NORM, FACTOR, BAD };
    ms_tensor *partial = NULL, *made[3] = { NULL };
    /* Written so that NaN is refused. */
    if (!(max >= 0))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "clip_grad_norm: max = %g; a number of 0 or more is allowed", max);
    if (!(p > 0))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "clip_grad_norm: p = %g; above 0 or math.huge is allowed", p);
    ms_status status = check_gradients(engine, "clip_grad_norm", gradients, count);
    int64_t numbers = count;
    /* There is no dtype f64: elements of 8 bytes hold the parts. */
    if (!status) status = ms_tensor_new(engine, MS_I64, 1, &numbers, &partial);
    if (!status) status = ms_tensor_new(engine, MS_F32, 0, NULL, &made[NORM]);
    if (!status) status = ms_tensor_new(engine, MS_F32, 0, NULL, &made[FACTOR]);
    if (!status) status = ms_tensor_new(engine, MS_I64, 0, NULL, &made[BAD]);
    if (!status) status = measure(engine, gradients, count, p, partial);
    if (!status) status = combine(engine, partial, count, max, p, made);
    /* The scaling tasks read the factor in stream order, after combine has written it. */
    if (!status && max < INFINITY) status = scale(engine, gradients, count, made[FACTOR], NULL);
    ms_tensor_release(partial);
    ms_tensor_release(made[FACTOR]);
    if (!status) *norm = made[NORM];
    else ms_tensor_release(made[NORM]);
    /* The caller may not want to know; the task writes it in any case. */
    if (!status && bad) *bad = made[BAD];
    else ms_tensor_release(made[BAD]);
    return status;
}

/* `finite` begins as true; each task may only turn it false. It stays on the device as well: an
 * optimizer's only_if reads it there. */
ms_status ms_unscale(ms_engine *engine, ms_tensor *const *gradients, uint32_t count,
                     ms_tensor *factor, ms_tensor **finite)
{
    ms_tensor *made = NULL;
    ms_status status = check_gradients(engine, "unscale", gradients, count);
    if (!status && (ms_tensor_dtype(factor) != MS_F32 || ms_tensor_count(factor) != 1))
        status = ms_engine_fail(engine, MS_ERROR_ARGUMENT, "unscale: the factor must be one f32");
    if (!status) status = ms_op_full(engine, MS_BOOL, 0, NULL, 1, &made);
    if (!status) status = scale(engine, gradients, count, factor, made);
    if (status) ms_tensor_release(made);
    else *finite = made;
    return status;
}
