/* reduce.c: reductions of the stub, element by element in the order of ranks. */
#include "nccl.h"

#include <math.h>
#include <string.h>

#include "moonshard/base.h"

size_t stub_bytes(ncclDataType_t type)
{
    switch (type) {
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt64: return 8;
    default: return 4;
    }
}

float stub_float(const void *from, size_t i, ncclDataType_t type)
{
    if (type == ncclFloat32) return ((const float *)from)[i];
    uint16_t bits = ((const uint16_t *)from)[i];
    return type == ncclFloat16 ? ms_float_from_f16(bits) : ms_float_from_bf16(bits);
}

static void put_float(void *to, size_t i, ncclDataType_t type, float value)
{
    if (type == ncclFloat32) ((float *)to)[i] = value;
    else
        ((uint16_t *)to)[i] =
            type == ncclFloat16 ? ms_f16_from_float(value) : ms_bf16_from_float(value);
}

static int64_t get_integer(const void *from, size_t i, ncclDataType_t type)
{
    if (type == ncclInt64) return ((const int64_t *)from)[i];
    return type == ncclInt32 ? ((const int32_t *)from)[i] : ((const uint8_t *)from)[i];
}

static void put_integer(void *to, size_t i, ncclDataType_t type, int64_t value)
{
    if (type == ncclInt64) ((int64_t *)to)[i] = value;
    else if (type == ncclInt32) ((int32_t *)to)[i] = (int32_t)value;
    else ((uint8_t *)to)[i] = (uint8_t)value;
}

static float combine_floats(ncclRedOp_t op, float a, float b)
{
    switch (op) {
    case ncclMin: return fminf(a, b);
    case ncclMax: return fmaxf(a, b);
    case ncclProd: return a * b;
    default: return a + b;
    }
}

static int64_t combine_integers(ncclRedOp_t op, int64_t a, int64_t b)
{
    switch (op) {
    case ncclMin: return a < b ? a : b;
    case ncclMax: return a > b ? a : b;
    case ncclProd: return (int64_t)((uint64_t)a * (uint64_t)b);
    default: return (int64_t)((uint64_t)a + (uint64_t)b);
    }
}

void stub_reduce(void *out, const void *const *inputs, const float *factors, int ranks,
                 size_t count, ncclDataType_t type, ncclRedOp_t op)
{
    bool floats = type == ncclFloat32 || type == ncclFloat16 || type == ncclBfloat16;
    for (size_t i = 0; i < count; i++) {
        if (!floats) {
            int64_t sum = get_integer(inputs[0], i, type);
            for (int r = 1; r < ranks; r++)
                sum = combine_integers(op, sum, get_integer(inputs[r], i, type));
            put_integer(out, i, type, sum);
            continue;
        }
        float sum = 0;
        for (int r = 0; r < ranks; r++) {
            float value = stub_float(inputs[r], i, type) * (factors ? factors[r] : 1);
            sum = r ? combine_floats(op, sum, value) : value;
        }
        put_float(out, i, type, op == ncclAvg ? sum / (float)ranks : sum);
    }
}
