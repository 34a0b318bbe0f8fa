/* grad_support.h: small tensors and graphs for the tests of the tape. */
#ifndef MOONSHARD_TESTS_GRAD_SUPPORT_H
#define MOONSHARD_TESTS_GRAD_SUPPORT_H

#include "late_device.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "fault_os.h"
#include "moonshard/grad.h"

#define OK(call) assert_int_equal(call, MS_OK)

static inline ms_engine *make_engine(const ms_os *os)
{
    ms_engine_options options = { .os = os,
                                  .own_device = late_device(NULL),
                                  .threads = 2,
                                  .strict = true,
                                  .memory_bytes = 512 << 20,
                                  .seed = 3 };
    ms_engine *engine = NULL;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    return engine;
}

static inline ms_status vector(ms_engine *engine, float first, float second, bool leaf,
                               ms_tensor **out)
{
    const int64_t shape[] = { 2 };
    const float values[] = { first, second };
    ms_status status = ms_tensor_new(engine, MS_F32, 1, shape, out);
    if (!status) status = ms_tensor_write(*out, values, sizeof values);
    if (!status && leaf) status = ms_tensor_set_requires_grad(*out, true);
    if (status && *out) {
        ms_tensor_release(*out);
        *out = NULL;
    }
    return status;
}

static inline ms_status apply(ms_engine *engine, const ms_op *op, ms_tensor *a, ms_tensor *b,
                              ms_tensor **out)
{
    ms_tensor *inputs[] = { a, b };
    return ms_apply(engine, op, NULL, false, inputs, b ? 2 : 1, out, 1);
}

static inline ms_status total(ms_engine *engine, ms_tensor *a, ms_tensor **out)
{
    ms_attributes attributes = { .reduce = { .all = true } };
    return ms_apply(engine, &ms_op_sum, &attributes, false, &a, 1, out, 1);
}

static inline ms_status multiply_in_place(ms_engine *engine, ms_tensor *a, ms_tensor *by)
{
    ms_tensor *inputs[] = { a, by }, *same = NULL;
    ms_status status = ms_apply(engine, &ms_op_mul, NULL, true, inputs, 2, &same, 1);
    ms_tensor_release(same);
    return status;
}

static inline void assert_values(ms_tensor *tensor, float first, float second)
{
    float got[2];
    assert_non_null(tensor);
    assert_int_equal(ms_tensor_read(tensor, got, sizeof got), MS_OK);
    assert_true(got[0] == first && got[1] == second);
}

static inline void assert_gradient(const ms_tensor *leaf, float first, float second)
{
    assert_values(ms_tensor_grad(leaf), first, second);
}

#endif
