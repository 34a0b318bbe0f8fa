/* codec.c: rows of floats to bytes and back.
 *
 * Codecs make gradients smaller before they are sent. A row of n numbers becomes the scales of its
 * blocks, unless it is bare, and then its codes; moonshard/tensor.h has the format. Rows are coded
 * apart: no block reaches over two rows. */
#include "ops/codec.h"

#include <string.h>

#include "moonshard/ops.h"
#include "tensor/op.h"
#include "ops/values.h"

/* Codes of a row are packed without gaps and rounded up to whole bytes; each block has one f32
 * scale. Ranks compute it for themselves, so both sides of a transfer know the size of a payload
 * without sending it. */
int64_t ms_codec_bytes(const ms_codec *codec, int64_t n)
{
    int64_t codes = (n * ms_codec_bits(codec->kind) + 7) / 8;
    return codec->bare ? codes : ms_codec_blocks(codec, n) * (int64_t)sizeof(float) + codes;
}

/* Blocks are multiples of 8, so that every block's codes begin with a byte, even at one bit each. A
 * sign has no size to be rounded, and all other codes mean nothing without a scale. */
static ms_status check_codec(const ms_op_call *call)
{
    const ms_codec *codec = &call->attributes.codec.codec;
    if ((unsigned)codec->kind >= MS_CODEC_KINDS)
        return ms_op_refuse(call, "there is no codec %d", (int)codec->kind);
    if (codec->block < 8 || codec->block % 8 != 0)
        return ms_op_refuse(call, "block is %lld: it must be a multiple of 8",
                            (long long)codec->block);
    if (codec->bare && codec->kind != MS_CODEC_SIGN)
        return ms_op_refuse(call, "only sign can do without scales");
    if (codec->stochastic && codec->kind == MS_CODEC_SIGN)
        return ms_op_refuse(call, "sign does not round");
    return MS_OK;
}

/* x [..., n] to u8 [..., bytes]. A second output, if asked for, is x minus what the payload decodes
 * to: the residual of error feedback, in the same pass. bytes is stated by the shape of the result,
 * so a hook can allocate the room for it before the task runs. Random numbers come from the
 * attributes: the same call codes to the same bytes. */
static ms_status encode_forward(ms_op_call *call)
{
    ms_tensor *x = call->inputs[0], *from = NULL, *out[2] = { NULL, NULL };
    const ms_codec *codec = &call->attributes.codec.codec;
    uint32_t dims = ms_tensor_dims(x);
    int64_t shape[MS_DIMS_MAX];
    if (!ms_dtype_is_float(ms_tensor_dtype(x)) || dims == 0)
        return ms_op_refuse(call, "it takes f32, f16 or bf16 of one dimension or more");
    ms_status status = check_codec(call);
    if (status) return status;
    memcpy(shape, ms_tensor_shape(x), dims * sizeof *shape);
    /* Rows are the last dimension; all others only count them. */
    int64_t n = shape[dims - 1];
    shape[dims - 1] = ms_codec_bytes(codec, n);
    status = ms_op_output(call, 0, MS_U8, dims, shape, &out[0]);
    if (!status && call->output_count > 1)
        status = ms_op_output(call, 1, ms_tensor_dtype(x), dims, ms_tensor_shape(x), &out[1]);
    /* An empty x has rows without numbers, or no rows: its payload is empty, too. */
    if (status || ms_tensor_count(x) == 0) return status;
    status = ms_op_as_contiguous(call->engine, x, &from);
    if (status) return status;
    ms_codec_args args = { .codec = *codec,
                           .random = call->attributes.codec.random,
                           .x = ms_tensor_data(from),
                           .error = out[1] ? ms_tensor_data(out[1]) : NULL,
                           .payload = ms_tensor_data(out[0]),
                           .rows = ms_tensor_count(x) / n,
                           .n = n,
                           .bytes = shape[dims - 1],
                           .dtype = (uint8_t)ms_tensor_dtype(x) };
    ms_task_cost cost = { .flops = 4.0 * (double)ms_tensor_count(x),
                          .bytes =
                              ms_tensor_bytes(x) * (out[1] ? 2 : 1) + ms_tensor_bytes(out[0]) };
    status = ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_codec_encode),
                               &args, &from, 1, out, out[1] ? 2 : 1, cost);
    ms_tensor_release(from);
    return status;
}

/* u8 [..., bytes] to f32 [..., n]; n is an attribute, as bytes alone do not tell it. sum: payloads
 * [rows, bytes] are decoded and added in order of rows to [n], without storing them apart.
 * Stochastic rounding does not matter here: codes say which way each number was rounded. Adding
 * while decoding saves writing and reading an f32 tensor for each rank's payload. */
static ms_status decode(ms_op_call *call, bool sum)
{
    ms_tensor *payload = call->inputs[0], *from = NULL, *out = NULL;
    const ms_codec *codec = &call->attributes.codec.codec;
    uint32_t dims = ms_tensor_dims(payload);
    int64_t n = call->attributes.codec.n, shape[MS_DIMS_MAX];
    ms_status status = check_codec(call);
    if (status) return status;
    if (ms_tensor_dtype(payload) != MS_U8 || dims == 0 || (sum && dims != 2))
        return ms_op_refuse(call, sum ? "it takes payloads, u8 [rows, bytes]"
                                      : "it takes payloads, u8 [..., bytes]");
    if (n < 0) return ms_op_refuse(call, "n cannot be %lld", (long long)n);
    memcpy(shape, ms_tensor_shape(payload), dims * sizeof *shape);
    /* A payload of another length was coded with other options, or for another n. */
    int64_t have = shape[dims - 1], bytes = ms_codec_bytes(codec, n);
    if (have != bytes)
        return ms_op_refuse(call, "rows of %lld numbers have %lld bytes, not %lld", (long long)n,
                            (long long)bytes, (long long)have);
    shape[dims - 1] = n;
    /* All payloads become one row. */
    if (sum) status = ms_op_output(call, 0, MS_F32, 1, &n, &out);
    else status = ms_op_output(call, 0, MS_F32, dims, shape, &out);
    if (status || ms_tensor_count(out) == 0) return status;
    status = ms_op_as_contiguous(call->engine, payload, &from);
    if (status) return status;
    ms_codec_args args = { .codec = *codec,
                           .x = ms_tensor_data(out),
                           .payload = ms_tensor_data(from),
                           .rows = ms_tensor_count(payload) / bytes,
                           .n = n,
                           .bytes = bytes,
                           .dtype = MS_F32,
                           .sum = sum };
    ms_task_cost cost = { .flops = 2.0 * (double)(args.rows * n),
                          .bytes = ms_tensor_bytes(payload) + ms_tensor_bytes(out) };
    status = ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_codec_decode),
                               &args, &from, 1, &out, 1, cost);
    ms_tensor_release(from);
    return status;
}

/* The results are f32 for every dtype that was coded, as sums of several payloads need it. */
static ms_status decode_forward(ms_op_call *call) { return decode(call, false); }
static ms_status decode_sum_forward(ms_op_call *call) { return decode(call, true); }

const ms_op ms_op_codec_encode = {
    "codec_encode", encode_forward, NULL, 1, 1, MS_OP_NO_GRAD | MS_OP_LOSES_GRAD
};
const ms_op ms_op_codec_decode = { "codec_decode", decode_forward, NULL, 1, 1, MS_OP_NO_GRAD };
const ms_op ms_op_codec_decode_sum = { "codec_decode_sum", decode_sum_forward, NULL, 1, 1,
                                       MS_OP_NO_GRAD };
