/* reduce.c: reductions over ranks: each element is read from every input in rank order and written
 * to every output.
 *
 * Multiply and add are not contracted, so every instruction set gives the same bits. */
#include "comm/cpu/kernels.h"

#include <string.h>

#include "ops/cpu/row.h"

/* ------------------------------------------------------------------- floats */

/* A NaN of either side is the result of min and max. The comparison with b alone is enough: a NaN
 * in a makes both comparisons false, and a is kept. */
MS_VECTOR ms_vf combine(ms_reduce_op op, ms_vf a, ms_vf b)
{
    switch (op) {
    case MS_REDUCE_OP_MIN: return ms_v_select(ms_v_less(b, a) | ms_v_is_nan(b), b, a);
    case MS_REDUCE_OP_MAX: return ms_v_select(ms_v_less(a, b) | ms_v_is_nan(b), b, a);
    case MS_REDUCE_OP_PROD: return a * b;
    default: return a + b;
    }
}

/* Vectors of one block, which the compiler keeps in registers, and the distance of prefetching. */
#define UNROLL 4
#define AHEAD (8 * UNROLL) /* vectors */

/* Two neighbours in bf16 are the halves of a word, so shifts and masks take two vectors of them
 * apart and put them together: elements of even place in one vector, of odd place in the next. In a
 * sum of equal places the order does not matter. */
typedef uint32_t words __attribute__((vector_size(4 * MS_LANES), aligned(2), may_alias));

/* Rounded, in the upper halves. From bf16 numbers (from_bf16) comes no NaN but with a lower half of
 * 0, and rounding leaves that as it is. To nearest even: adding 0x7fff and the lowest kept bit
 * carries exactly where the lower half is above one half, or equal to it and the kept bit is odd.
 */
MS_VECTOR ms_vu bf16_rounded(bool from_bf16, ms_vf v)
{
    ms_vu bits = (ms_vu)v, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    if (from_bf16) return rounded;
#if defined(__AVX512F__)
    return (ms_vu)_mm512_mask_or_epi32((__m512i)rounded,
                                       _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q),
                                       (__m512i)bits, _mm512_set1_epi32(0x400000));
#else
    ms_vu nan = (ms_vu)ms_v_is_nan(v);
    return (nan & (bits | 0x400000u)) | (~nan & rounded);
#endif
}

/* f32 as a cast to dtype and back would leave it. */
MS_VECTOR ms_vf rounded_to(ms_dtype dtype, ms_vf v)
{
    if (dtype == MS_BF16) return (ms_vf)(bf16_rounded(false, v) & 0xffff0000u);
    return dtype == MS_F16 ? ms_v_from_f16(ms_v_to_f16(v)) : v;
}

/* What an input contributes from element i on. The numbers of one input at a time, so only the sum
 * and one block are in registers, however many ranks there are. */
MS_VECTOR void get_block(ms_dtype memory, ms_dtype dtype, ms_reduce_op op,
                         const ms_reduce_task *task, const char *const *inputs, uint32_t input,
                         size_t i, ms_vf block[UNROLL])
{
    const char *from = inputs[input];
    /* Rounding keeps the processor from running ahead as far as it would for a mere sum. */
    for (uint32_t u = 0; memory != dtype && u < UNROLL; u++)
        __builtin_prefetch((const float *)(const void *)from + i + (u + AHEAD) * MS_LANES, 1);
    for (uint32_t u = 0; u < UNROLL; u += 2) {
        if (memory == MS_BF16) {
            ms_vu both = *(const words *)((const uint16_t *)(const void *)from + i + u * MS_LANES);
            block[u] = (ms_vf)(both << 16);
            block[u + 1] = (ms_vf)(both & 0xffff0000u);
        } else {
            block[u] = ms_row_get(memory, from, i + u * MS_LANES);
            block[u + 1] = ms_row_get(memory, from, i + (u + 1) * MS_LANES);
        }
    }
    for (uint32_t u = 0; memory != dtype && u < UNROLL; u++) block[u] = rounded_to(dtype, block[u]);
    for (uint32_t u = 0; op == MS_REDUCE_OP_PREMUL_SUM && u < UNROLL; u++)
        block[u] = block[u] * ms_v_splat(task->factors[input]);
}

/* Rounds the block to `result` once and stores it in every output. All outputs get the same bits,
 * so ranks cannot drift apart. */
MS_VECTOR void put_block(ms_dtype result, ms_reduce_op op, char *const *to, uint32_t outputs,
                         size_t i, const ms_vf block[UNROLL])
{
    bool from_bf16 = op != MS_REDUCE_OP_PREMUL_SUM; /* a factor may be any NaN */
    for (uint32_t u = 0; u < UNROLL; u += 2) {
        ms_vu both = { 0 };
        if (result == MS_BF16)
            both = bf16_rounded(from_bf16, block[u]) >> 16
                   | (bf16_rounded(from_bf16, block[u + 1]) & 0xffff0000u);
        for (uint32_t w = 0; w < outputs; w++) {
            if (result == MS_BF16) *(words *)((uint16_t *)(void *)to[w] + i + u * MS_LANES) = both;
            else {
                ms_row_put(result, to[w], i + u * MS_LANES, block[u]);
                ms_row_put(result, to[w], i + (u + 1) * MS_LANES, block[u + 1]);
            }
        }
    }
}

/* Dividing by a power of two and multiplying by its inverse give the same bits. */
MS_VECTOR ms_vf average(uint32_t divisor, ms_vf sum)
{
    bool halves = (divisor & (divisor - 1)) == 0;
    return halves ? sum * ms_v_splat(1 / (float)divisor) : sum / ms_v_splat((float)divisor);
}

/* The elements of a task from i on, too few for a block. One function serves all cases, because a
 * copy in each of them would double the code for the sake of at most UNROLL * MS_LANES elements. */
static void reduce_rest(ms_dtype memory, ms_dtype result, ms_dtype dtype, ms_reduce_op op,
                        const ms_reduce_task *task, size_t i)
{
    for (; i < task->end; i += MS_LANES) {
        size_t end = i + MS_LANES < task->end ? i + MS_LANES : task->end;
        ms_vf sum = ms_v_splat(0);
        for (uint32_t r = 0; r < task->input_count; r++) {
            ms_vf v = ms_row_get_part(memory, task->inputs[r], i, end, 0);
            if (memory != dtype) v = rounded_to(dtype, v);
            if (op == MS_REDUCE_OP_PREMUL_SUM) v = v * ms_v_splat(task->factors[r]);
            sum = r ? combine(op, sum, v) : v;
        }
        if (op == MS_REDUCE_OP_AVG) sum = average(task->divisor, sum);
        if (result != dtype) sum = rounded_to(dtype, sum);
        for (uint32_t w = 0; w < task->output_count; w++)
            ms_row_put_part(result, task->outputs[w], i, end, sum);
    }
}

/* inputs and outputs are constants in the common case of two ranks, so that the loops over them
 * vanish. from and to: the addresses in task, or copies that no store can change. The loop is bound
 * by memory: inputs + outputs numbers are moved for each element, and one addition for each input.
 */
MS_VECTOR void reduce_floats(ms_dtype memory, ms_dtype result, ms_dtype dtype, ms_reduce_op op,
                             const ms_reduce_task *task, const char *const *from, uint32_t inputs,
                             char *const *to, uint32_t outputs)
{
    uint32_t divisor = task->divisor; /* no store can change it */
    size_t i = task->first, last = task->end;
    for (; i + UNROLL * MS_LANES <= last; i += UNROLL * MS_LANES) {
        ms_vf sum[UNROLL], v[UNROLL];
        get_block(memory, dtype, op, task, from, 0, i, sum);
        for (uint32_t r = 1; r < inputs; r++) {
            get_block(memory, dtype, op, task, from, r, i, v);
            for (uint32_t u = 0; u < UNROLL; u++) sum[u] = combine(op, sum[u], v[u]);
        }
        for (uint32_t u = 0; op == MS_REDUCE_OP_AVG && u < UNROLL; u++)
            sum[u] = average(divisor, sum[u]);
        for (uint32_t u = 0; result != dtype && u < UNROLL; u++) sum[u] = rounded_to(dtype, sum[u]);
        put_block(result, op, to, outputs, i, sum);
    }
    if (i < last) reduce_rest(memory, result, dtype, op, task, i);
}

/* The operator as a constant, so that each case gets a loop of its own without branches in it.
 * Under a sanitizer one loop is for all of them: it takes minutes to compile many. */
#define MANY(op)                                                                                   \
    reduce_floats(memory, result, dtype, op, task, task->inputs, task->input_count, task->outputs, \
                  task->output_count)

/* Any number of ranks, and any operation. */
MS_VECTOR void reduce_op(ms_dtype memory, ms_dtype result, ms_dtype dtype,
                         const ms_reduce_task *task)
{
#if defined(MS_SANITIZE)
    MANY(task->op);
#else
    switch (task->op) {
    case MS_REDUCE_OP_SUM: MANY(MS_REDUCE_OP_SUM); break;
    case MS_REDUCE_OP_AVG: MANY(MS_REDUCE_OP_AVG); break;
    case MS_REDUCE_OP_MIN: MANY(MS_REDUCE_OP_MIN); break;
    case MS_REDUCE_OP_MAX: MANY(MS_REDUCE_OP_MAX); break;
    case MS_REDUCE_OP_PROD: MANY(MS_REDUCE_OP_PROD); break;
    default: MANY(MS_REDUCE_OP_PREMUL_SUM); break;
    }
#endif
}

/* Two ranks in place, the most frequent case, with loops of known length. The pointers are copied
 * to locals, so the compiler knows that stores to tensors do not change them. */
MS_VECTOR void reduce_two(ms_dtype memory, ms_dtype dtype, ms_reduce_op op,
                          const ms_reduce_task *task)
{
    const char *from[2] = { task->inputs[0], task->inputs[1] };
    char *to[2] = { task->outputs[0], task->outputs[1] };
    reduce_floats(memory, memory, dtype, op, task, from, 2, to, 2);
}

#define REDUCE_FLOATS(name, memory, dtype)                                                        \
    static void name(const ms_reduce_task *task)                                                  \
    {                                                                                             \
        if (task->input_count != 2 || task->output_count != 2)                                    \
            reduce_op(memory, memory, dtype, task);                                               \
        else if (task->op == MS_REDUCE_OP_SUM) reduce_two(memory, dtype, MS_REDUCE_OP_SUM, task); \
        else if (task->op == MS_REDUCE_OP_AVG) reduce_two(memory, dtype, MS_REDUCE_OP_AVG, task); \
        else if (task->op == MS_REDUCE_OP_PREMUL_SUM)                                             \
            reduce_two(memory, dtype, MS_REDUCE_OP_PREMUL_SUM, task);                             \
        else reduce_op(memory, memory, dtype, task);                                              \
    }
REDUCE_FLOATS(reduce_f32, MS_F32, MS_F32)
REDUCE_FLOATS(reduce_f16, MS_F16, MS_F16)
REDUCE_FLOATS(reduce_bf16, MS_BF16, MS_BF16)
REDUCE_FLOATS(reduce_f32_by_f16, MS_F32, MS_F16)
REDUCE_FLOATS(reduce_f32_by_bf16, MS_F32, MS_BF16)

/* Sums on their way between nodes: one node's numbers of f32 to a 16-bit sum, and such sums to
 * numbers of f32. */
#define REDUCE_PACKED(dtype)                                    \
    static void reduce_to_##dtype(const ms_reduce_task *task)   \
    {                                                           \
        reduce_op(MS_F32, dtype, dtype, task);                  \
    }                                                           \
    static void reduce_from_##dtype(const ms_reduce_task *task) \
    {                                                           \
        reduce_op(dtype, MS_F32, dtype, task);                  \
    }
REDUCE_PACKED(MS_F16)
REDUCE_PACKED(MS_BF16)

/* ----------------------------------------------------------------- integers */

/* Elements of a block: 8 KiB of i64. */
#define BLOCK 1024

/* Blocks that stay in the first cache. The wide type is unsigned and at least as wide as int, so
 * that sums and products wrap; min and max compare the element's own type. */
#define REDUCE_INTEGERS(name, type, wide, sum, product)                                   \
    static void name(const ms_reduce_task *task)                                          \
    {                                                                                     \
        type block[BLOCK];                                                                \
        for (size_t begin = task->first; begin < task->end; begin += BLOCK) {             \
            size_t n = task->end - begin < BLOCK ? task->end - begin : BLOCK;             \
            memcpy(block, task->inputs[0] + begin * sizeof(type), n * sizeof(type));      \
            for (uint32_t r = 1; r < task->input_count; r++) {                            \
                const type *from = (const type *)(const void *)task->inputs[r] + begin;   \
                switch (task->op) {                                                       \
                case MS_REDUCE_OP_MIN:                                                    \
                    for (size_t i = 0; i < n; i++)                                        \
                        block[i] = from[i] < block[i] ? from[i] : block[i];               \
                    break;                                                                \
                case MS_REDUCE_OP_MAX:                                                    \
                    for (size_t i = 0; i < n; i++)                                        \
                        block[i] = from[i] > block[i] ? from[i] : block[i];               \
                    break;                                                                \
                case MS_REDUCE_OP_PROD:                                                   \
                    for (size_t i = 0; i < n; i++)                                        \
                        block[i] = (type)((wide)block[i] product(wide) from[i]);          \
                    break;                                                                \
                default:                                                                  \
                    for (size_t i = 0; i < n; i++)                                        \
                        block[i] = (type)((wide)block[i] sum(wide) from[i]);              \
                    break;                                                                \
                }                                                                         \
            }                                                                             \
            for (uint32_t w = 0; w < task->output_count; w++)                             \
                memcpy(task->outputs[w] + begin * sizeof(type), block, n * sizeof(type)); \
        }                                                                                 \
    }
REDUCE_INTEGERS(reduce_i64, int64_t, uint64_t, +, *)
REDUCE_INTEGERS(reduce_i32, int32_t, uint32_t, +, *)
REDUCE_INTEGERS(reduce_u16, uint16_t, uint32_t, +, *)
REDUCE_INTEGERS(reduce_u8, uint8_t, uint32_t, +, *)
REDUCE_INTEGERS(reduce_bool, uint8_t, uint32_t, |, &)

/* What rounds to a 16-bit dtype, by where numbers are f32. */
static void reduce_16(const ms_reduce_task *task)
{
    void (*const to_f16[2][2])(const ms_reduce_task *) = {
        { reduce_f16, reduce_from_MS_F16 }, { reduce_to_MS_F16, reduce_f32_by_f16 }
    };
    void (*const to_bf16[2][2])(const ms_reduce_task *) = {
        { reduce_bf16, reduce_from_MS_BF16 }, { reduce_to_MS_BF16, reduce_f32_by_bf16 }
    };
    (task->dtype == MS_F16 ? to_f16
                           : to_bf16)[task->memory == MS_F32][task->result == MS_F32](task);
}

/* bool is u8 with `or` for sums and `and` for products. */
static void reduce(const ms_reduce_task *task)
{
    switch (task->dtype) {
    case MS_F32: reduce_f32(task); break;
    case MS_F16:
    case MS_BF16: reduce_16(task); break;
    case MS_I64: reduce_i64(task); break;
    case MS_I32: reduce_i32(task); break;
    case MS_U16: reduce_u16(task); break;
    case MS_U8: reduce_u8(task); break;
    default: reduce_bool(task); break;
    }
}

const ms_comm_kernels MS_ISA_NAME(ms_comm_kernels) = { .reduce = reduce };
