/* codec.c: launches the kernels of codecs. */
#include "ops/cuda/codec.h"

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(codec)

#define KIND(of, kind, suffix) [kind] = { .image = ms_cuda_image_codec, .name = of "_" #suffix }
#define BY_KIND(of)                                                     \
    {                                                                   \
        KIND(of, MS_CODEC_INT8, int8), KIND(of, MS_CODEC_INT4, int4),   \
            KIND(of, MS_CODEC_INT2, int2), KIND(of, MS_CODEC_FP8, fp8), \
            KIND(of, MS_CODEC_FP4, fp4), KIND(of, MS_CODEC_SIGN, sign)  \
    }
_Static_assert(MS_CODEC_KINDS == MS_CODEC_SIGN + 1, "a kind that is added has kernels here");
static const ms_cuda_kernel encoders[MS_CODEC_KINDS] = BY_KIND("encode"),
                            decoders[MS_CODEC_KINDS] = BY_KIND("decode");

static ms_cuda_codec_call call_of(const ms_codec_args *args)
{
    return (ms_cuda_codec_call){ .c = *args,
                                 .blocks = ms_codec_blocks(&args->codec, args->n),
                                 .drawn = (args->codec.block + 63) / 64 * 64 };
}

/* A warp codes a block. */
static void run_encode(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_codec_call call = call_of(arguments);
    ms_cuda_launch(work, &encoders[call.c.codec.kind],
                   ms_cuda_grid(call.c.rows * call.blocks * 32, 1), &call, sizeof call);
}

/* A thread makes eight numbers of the result. The sum of no rows is 0. */
static void run_decode(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_codec_call call = call_of(arguments);
    int64_t rows = call.c.sum ? 1 : call.c.rows;
    ms_cuda_launch(work, &decoders[call.c.codec.kind], ms_cuda_grid(rows * ((call.c.n + 7) / 8), 1),
                   &call, sizeof call);
}

MS_CUDA_TASK(codec_encode, "codec_encode", ms_codec_args, MS_KIND_COMPUTE, run_encode)
MS_CUDA_TASK(codec_decode, "codec_decode", ms_codec_args, MS_KIND_COMPUTE, run_decode)
