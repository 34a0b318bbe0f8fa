/* plan.c: the plans of a product on the CPU, made when it is enqueued. */
#include "ops/cpu/gemm.h"

/* Runs on the host thread: making a plan allocates and may generate code, which a task must not do.
 * Two plans at most, as all parts but the last have the same shape. With k = 0 there is nothing to
 * multiply, and without support the product is computed by conversion; both leave the plans
 * NULL. */
ms_status ms_cpu_plan_matmul(ms_engine *engine, ms_matmul_args *args)
{
    ms_gemm *gemm = NULL;
    ms_status status = ms_gemm_get(engine, &gemm);
    if (status) return status;
    args->library = gemm;
    if (args->shape.k == 0 || !ms_gemm_supports(gemm, args->shape.in, args->shape.out))
        return MS_OK;
    const ms_gemm_plan *plan = NULL, *last_plan = NULL;
    ms_gemm_shape last = args->shape;
    if (args->split_columns) last.n = args->last;
    else last.m = args->last;
    status = ms_gemm_prepare(engine, gemm, &args->shape, &plan);
    if (!status) status = ms_gemm_prepare(engine, gemm, &last, &last_plan);
    if (status) return status;
    args->plan = plan;
    args->last_plan = last_plan;
    return MS_OK;
}
