/* fp8.c: products of linear layers in 8-bit floats: payloads, and products of them. fp8.h has what
 * holds. */
#include "ops/fp8.h"

#include "exec/engine.h"
#include "ops/autocast.h"
#include "ops/matmul.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/tensor.h"

/* If the state cannot be allocated, linear layers stay with 16 bits. */
void ms_engine_set_fp8(ms_engine *engine, ms_fp8 mode)
{
    ms_tensor_state *state = NULL;
    if (!ms_tensor_state_of(engine, &state)) state->fp8 = mode;
}

ms_fp8 ms_engine_fp8(const ms_engine *engine)
{
    const ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    return state ? state->fp8 : MS_FP8_OFF;
}

bool ms_fp8_is_on(const ms_engine *engine)
{
    return ms_engine_fp8(engine) != MS_FP8_OFF && ms_engine_autocast(engine) == MS_BF16;
}

/* The three sizes are asked of every device, so that what runs on one runs on all. A product of the
 * backward has the same three, in another order. */
ms_status ms_fp8_check(const ms_op_call *call, ms_dtype compute, int64_t rows, int64_t in,
                       int64_t out)
{
    const struct {
        int64_t size;
        const char *before, *after;
    } sizes[] = { { rows, "the input has ", " rows (its leading dimensions together)" },
                  { in, "the input's last dimension is ", "" },
                  { out, "the weight has ", " outputs" } };
    if (compute != MS_BF16)
        return ms_op_refuse(call, "products in fp8 take f32 and bf16: cast with x:to(\"bf16\")");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].size % MS_FP8_MULTIPLE != 0)
            return ms_op_refuse(call,
                                "products in fp8 take multiples of %d, and %s%lld%s: pad it, or "
                                "compute this product in 16 bits with layer.fp8 = false or "
                                "ms.autocast(\"bf16\", f)",
                                MS_FP8_MULTIPLE, sizes[i].before, (long long)sizes[i].size,
                                sizes[i].after);
    return MS_OK;
}

/* ----------------------------------------------------------------- payloads */

int64_t ms_fp8_bytes(const ms_engine *engine, const ms_tensor *x)
{
    (void)engine;
    return x->count + (int64_t)sizeof(ms_fp8_scale);
}

/* Where a payload's scale is. */
static void *scale_of(const ms_tensor *payload)
{
    char *data = ms_tensor_data(payload);
    return data ? data + payload->count - sizeof(ms_fp8_scale) : NULL;
}

/* An empty matrix has no scale: no product reads one. */
ms_status ms_fp8_encode_into(ms_engine *engine, ms_tensor *x, ms_fp8_format format,
                             ms_tensor *payload)
{
    ms_tensor *from = NULL;
    if (x->count == 0) return MS_OK;
    ms_status status = ms_op_as_contiguous(engine, x, &from);
    if (status) return status;
    int64_t columns = x->shape[x->dims - 1];
    ms_fp8_encode_args args = { .x = ms_tensor_data(from),
                                .codes = ms_tensor_data(payload),
                                .scale = scale_of(payload),
                                .rows = x->count / columns,
                                .columns = columns,
                                .dtype = (uint8_t)x->dtype,
                                .format = (uint8_t)format };
    /* Two walks over the numbers. */
    ms_task_cost cost = { .flops = 2.0 * (double)x->count,
                          .bytes = 2 * ms_tensor_bytes(from) + ms_tensor_bytes(payload) };
    status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_fp8_encode), &args, &from,
                               1, &payload, 1, cost);
    ms_tensor_release(from);
    return status;
}

ms_status ms_fp8_encode(ms_engine *engine, ms_tensor *x, ms_fp8_format format, ms_tensor **out)
{
    int64_t bytes = ms_fp8_bytes(engine, x);
    ms_tensor *payload = NULL;
    ms_status status = ms_tensor_new(engine, MS_U8, 1, &bytes, &payload);
    if (!status) status = ms_fp8_encode_into(engine, x, format, payload);
    if (status) ms_tensor_release(payload);
    else *out = payload;
    return status;
}

/* The numbers that the codes represent, bf16 [rows, columns]. */
static ms_status decode(ms_engine *engine, const ms_fp8_matrix *matrix, ms_tensor **out)
{
    int64_t shape[] = { matrix->rows, matrix->columns };
    ms_tensor *numbers = NULL, *payload = matrix->payload;
    ms_status status = ms_tensor_new(engine, MS_BF16, 2, shape, &numbers);
    if (!status && numbers->count > 0) {
        ms_fp8_decode_args args = { .codes = ms_tensor_data(payload),
                                    .scale = scale_of(payload),
                                    .out = ms_tensor_data(numbers),
                                    .count = numbers->count,
                                    .format = (uint8_t)matrix->format };
        ms_task_cost cost = { .flops = (double)numbers->count,
                              .bytes = ms_tensor_bytes(payload) + ms_tensor_bytes(numbers) };
        status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_fp8_decode), &args,
                                   &payload, 1, &numbers, 1, cost);
    }
    if (status) ms_tensor_release(numbers);
    else *out = numbers;
    return status;
}

/* ----------------------------------------------------------------- products */

/* The matrix in bf16, as the product takes it. */
static ms_status decoded_operand(ms_engine *engine, const ms_fp8_matrix *matrix, ms_tensor **out)
{
    ms_tensor *numbers = NULL;
    ms_status status = decode(engine, matrix, &numbers);
    if (!status && matrix->turned) status = ms_matrix_swapped(numbers, out);
    else if (!status) *out = ms_tensor_retain(numbers);
    ms_tensor_release(numbers);
    return status;
}

/* By emulation: bf16 holds what the codes represent, so its product has the same terms. */
ms_status ms_fp8_product(ms_engine *engine, const ms_fp8_matrix *a, const ms_fp8_matrix *b,
                         ms_tensor *bias, ms_tensor *out)
{
    ms_tensor *left = NULL, *right = NULL;
    ms_status status = decoded_operand(engine, a, &left);
    if (!status) status = decoded_operand(engine, b, &right);
    if (!status) status = ms_matmul_into(engine, left, right, bias, out);
    ms_tensor_release(left);
    ms_tensor_release(right);
    return status;
}
