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

bool ms_fp8_wants_most(const ms_engine *engine)
{
    return ms_engine_is_for_gpu(engine) && ms_fp8_is_on(engine);
}

ms_status ms_fp8_most_new(ms_engine *engine, int64_t count, ms_tensor **out)
{
    int64_t rounded = (count + MS_FP8_MULTIPLE - 1) / MS_FP8_MULTIPLE * MS_FP8_MULTIPLE;
    return ms_tensor_new(engine, MS_I32, 1, &rounded, out);
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

bool ms_fp8_is_native(const ms_engine *engine)
{
    return ms_engine_is_for_gpu(engine) && ms_engine_fp8(engine) == MS_FP8_ON;
}

static const int64_t SCALE = (int64_t)sizeof(ms_fp8_scale);

bool ms_fp8_weight_is_native(const ms_tensor *payload, int64_t count)
{
    return payload->count != count + SCALE;
}

/* Where a payload's scale is; NULL for no payload. */
static void *scale_of(const ms_tensor *payload)
{
    return payload ? (uint8_t *)ms_tensor_data(payload) + payload->count - SCALE : NULL;
}

/* The bytes of an encode: it reads the numbers twice, unless their greatest size was given. */
static size_t bytes_of(const ms_tensor *from, const ms_tensor *most, const ms_tensor *payload,
                       const ms_tensor *beside)
{
    return ms_tensor_bytes(from) + ms_tensor_bytes(most ? most : from)
           + (payload ? ms_tensor_bytes(payload) : 0) + (beside ? ms_tensor_bytes(beside) : 0);
}

/* An empty matrix has no scale: no product reads one. */
static ms_status enqueue(ms_engine *engine, ms_tensor *x, ms_fp8_encode_args args,
                         ms_tensor *payload, ms_tensor *beside)
{
    ms_tensor *from = NULL, *writes[] = { payload, beside },
              *most = args.gelu ? NULL : ms_tensor_most(x);
    if (x->count == 0) return MS_OK;
    ms_status status = ms_op_as_contiguous(engine, x, &from);
    if (status) return status;
    args.x = ms_tensor_data(from);
    args.columns = x->shape[x->dims - 1];
    args.rows = x->count / args.columns;
    args.dtype = (uint8_t)x->dtype;
    if (most) {
        args.given = ms_tensor_data(most);
        args.given_count = most->count;
    }
    ms_tensor *reads[] = { from, most };
    /* 20 for each gelu, an estimate. */
    ms_task_cost cost = { .flops = (args.gelu ? 42.0 : 2.0) * (double)x->count,
                          .bytes = bytes_of(from, most, payload, beside) };
    status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_fp8_encode), &args, reads,
                               2, writes, 2, cost);
    ms_tensor_release(from);
    return status;
}

static ms_status encode(ms_engine *engine, ms_tensor *x, ms_fp8_encode_args args, ms_tensor **codes,
                        ms_tensor **turned)
{
    int64_t bytes = x->count + SCALE;
    ms_tensor *made[2] = { NULL };
    ms_status status = codes ? ms_tensor_new(engine, MS_U8, 1, &bytes, &made[0]) : MS_OK;
    if (!status && turned) status = ms_tensor_new(engine, MS_U8, 1, &bytes, &made[1]);
    if (!status) {
        args.codes = made[0] ? ms_tensor_data(made[0]) : NULL;
        args.turned = made[1] ? ms_tensor_data(made[1]) : NULL;
        args.scales[0] = scale_of(made[codes ? 0 : 1]);
        args.scales[1] = codes ? scale_of(made[1]) : NULL;
        status = enqueue(engine, x, args, made[0], made[1]);
    }
    if (status) {
        ms_tensor_release(made[0]);
        ms_tensor_release(made[1]);
        return status;
    }
    if (codes) *codes = made[0];
    if (turned) *turned = made[1];
    return MS_OK;
}

ms_status ms_fp8_encode(ms_engine *engine, ms_tensor *x, ms_fp8_format format, ms_tensor **codes,
                        ms_tensor **turned)
{
    return encode(engine, x, (ms_fp8_encode_args){ .format = (uint8_t)format }, codes, turned);
}

ms_status ms_fp8_encode_gelu(ms_engine *engine, ms_tensor *x, ms_tensor **codes, ms_tensor **turned)
{
    ms_fp8_encode_args args = { .format = MS_FP8_E4M3, .gelu = true };
    return encode(engine, x, args, codes, turned);
}

ms_status ms_fp8_encode_weight_into(ms_engine *engine, ms_tensor *weight, ms_tensor *payload)
{
    uint8_t *codes = ms_tensor_data(payload);
    bool native = ms_fp8_weight_is_native(payload, weight->count);
    ms_fp8_encode_args args = { .codes = codes,
                                .turned = native ? codes + weight->count : NULL,
                                .scales = { scale_of(payload) },
                                .format = MS_FP8_E4M3 };
    return enqueue(engine, weight, args, payload, NULL);
}

ms_status ms_fp8_encode_weight(ms_engine *engine, ms_tensor *weight, ms_tensor **out)
{
    int64_t bytes = (ms_fp8_is_native(engine) ? 2 : 1) * weight->count + SCALE;
    ms_tensor *payload = NULL;
    ms_status status = ms_tensor_new(engine, MS_U8, 1, &bytes, &payload);
    if (!status) status = ms_fp8_encode_weight_into(engine, weight, payload);
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

/* ------------------------------------------------------------------- spans */

ms_status ms_fp8_run_spans(ms_engine *engine, ms_kernel kernel, const ms_fp8_span_args *args,
                           ms_tensor *from, ms_tensor *most, ms_tensor *to)
{
    bool finds = kernel == MS_KERNEL_fp8_span_most;
    ms_tensor *reads[] = { from, most }, *writes[] = { finds ? most : to };
    int64_t count = (args->bounds[args->spans] - args->bounds[0]) * args->repeats;
    uint64_t each = ms_dtype_bytes((ms_dtype)args->dtype) + (finds ? 0 : 1);
    ms_task_cost cost = { .flops = (double)count, .bytes = (uint64_t)count * each };
    return ms_tensor_enqueue(engine, ms_engine_kernel(engine, kernel), args, reads, finds ? 1 : 2,
                             writes, 1, cost);
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
static ms_status multiply_decoded(ms_engine *engine, const ms_fp8_matrix *a, const ms_fp8_matrix *b,
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

/* The operand as the product takes it: codes that follow each other along k, the inner dimension of
 * the left operand and the outer one of the right. A weight's payload has two parts. */
static ms_status coded_operand(const ms_fp8_matrix *matrix, bool is_left, ms_matmul_codes *out)
{
    int64_t rows = matrix->rows, columns = matrix->columns, count = rows * columns, scale = SCALE,
            one = 1;
    bool is_second = matrix->turned == is_left && ms_fp8_weight_is_native(matrix->payload, count);
    int64_t shape[] = { matrix->turned ? columns : rows, matrix->turned ? rows : columns };
    int64_t strides[] = { is_left ? shape[1] : 1, is_left ? 1 : shape[0] };
    out->is_e5m2 = matrix->format == MS_FP8_E5M2;
    ms_status status =
        ms_tensor_window(matrix->payload, 2, shape, strides, is_second ? count : 0, &out->codes);
    if (!status)
        status = ms_tensor_window(matrix->payload, 1, &scale, &one, matrix->payload->count - scale,
                                  &out->scale);
    return status;
}

/* The library writes results of codes at multiples of 16 bytes only. The home of a gradient may
 * begin elsewhere: then it gets a copy. */
static ms_status aligned_result(ms_engine *engine, ms_tensor *out, ms_tensor **result)
{
    if ((size_t)out->offset * ms_dtype_bytes(out->dtype) % MS_FP8_MULTIPLE != 0)
        return ms_tensor_new(engine, out->dtype, 2, out->shape, result);
    *result = ms_tensor_retain(out);
    return MS_OK;
}

static ms_status multiply_codes(ms_engine *engine, const ms_fp8_matrix *a, const ms_fp8_matrix *b,
                                ms_tensor *bias, ms_tensor *out)
{
    ms_matmul_codes left = { .codes = NULL }, right = { .codes = NULL };
    ms_tensor *result = NULL;
    ms_status status = coded_operand(a, true, &left);
    if (!status) status = coded_operand(b, false, &right);
    if (!status) status = aligned_result(engine, out, &result);
    if (!status) status = ms_matmul_codes_into(engine, &left, &right, bias, result);
    if (!status && result->storage != out->storage) status = ms_copy_into(engine, result, out);
    ms_tensor_release(result);
    ms_tensor_release(left.codes);
    ms_tensor_release(left.scale);
    ms_tensor_release(right.codes);
    ms_tensor_release(right.scale);
    return status;
}

ms_status ms_fp8_product(ms_engine *engine, bool native, const ms_fp8_matrix *a,
                         const ms_fp8_matrix *b, ms_tensor *bias, ms_tensor *out)
{
    return (native ? multiply_codes : multiply_decoded)(engine, a, b, bias, out);
}
