/* loop.c: collapsing nests of strided loops.
 *
 * Most operands of most calls are contiguous. Collapsing finds that out once, on the host, and
 * leaves a kernel one long inner loop; without it each kernel would handle up to MS_DIMS_MAX short
 * ones. */
#include "ops/loop.h"

#include <string.h>

/* Operands that are not set later keep strides of 0, as numbers need. */
void ms_loop_begin(ms_loop *loop, uint32_t dims, const int64_t *shape, const int64_t *strides)
{
    memset(loop, 0, sizeof *loop);
    loop->dims = dims;
    for (uint32_t d = 0; d < dims; d++) {
        loop->shape[d] = shape[d];
        loop->strides[0][d] = strides[d];
    }
}

/* Aligned at the last dimension. A size of 1 repeats, whatever its stride says. Leading dimensions
 * that the operand has not keep the stride 0 of ms_loop_begin; those that the loop has not are of
 * size 1, and are passed over. */
void ms_loop_set(ms_loop *loop, uint32_t index, uint32_t dims, const int64_t *shape,
                 const int64_t *strides)
{
    for (uint32_t d = dims > loop->dims ? dims - loop->dims : 0; d < dims; d++)
        loop->strides[index][loop->dims - dims + d] = shape[d] == 1 ? 0 : strides[d];
}

/* Exchanges two dimensions for all operands. Operands that are not set have strides of 0, which do
 * no harm. */
static void loop_swap(ms_loop *loop, uint32_t a, uint32_t b)
{
    int64_t size = loop->shape[a];
    loop->shape[a] = loop->shape[b];
    loop->shape[b] = size;
    for (uint32_t k = 0; k < MS_LOOP_OPERANDS; k++) {
        int64_t stride = loop->strides[k][a];
        loop->strides[k][a] = loop->strides[k][b];
        loop->strides[k][b] = stride;
    }
}

/* Dimension `from` takes the place of `to`. */
static void loop_move(ms_loop *loop, uint32_t to, uint32_t from)
{
    loop->shape[to] = loop->shape[from];
    for (uint32_t k = 0; k < MS_LOOP_OPERANDS; k++) loop->strides[k][to] = loop->strides[k][from];
}

/* Whether all operands step over dimensions d and next (the one inside of it) as over a single one
 * of shape[d] * shape[next] positions. An operand that repeats along both has stride 0 in both, and
 * they join; along one of them only, they do not. */
static bool loop_joins(const ms_loop *loop, uint32_t operands, uint32_t d, uint32_t next)
{
    for (uint32_t k = 0; k < operands; k++)
        if (loop->strides[k][d] != loop->strides[k][next] * loop->shape[next]) return false;
    return true;
}

/* Three passes: drop sizes of 1, sort by the result's stride, join neighbours. The result decides
 * the order, since writes that jump cost more than reads that do. A loop without dimensions
 * (numbers only) becomes one of a single position. */
void ms_loop_collapse(ms_loop *loop, uint32_t operands)
{
    uint32_t dims = 0;
    for (uint32_t d = 0; d < loop->dims; d++)
        if (loop->shape[d] != 1) loop_move(loop, dims++, d);
    /* Insertion sort, stable, so that a contiguous result keeps its order. */
    for (uint32_t d = 1; d < dims; d++)
        for (uint32_t i = d; i > 0 && loop->strides[0][i - 1] < loop->strides[0][i]; i--)
            loop_swap(loop, i - 1, i);
    uint32_t last = 0;
    for (uint32_t d = 1; d < dims; d++) {
        if (loop_joins(loop, operands, last, d)) {
            int64_t size = loop->shape[last];
            loop_move(loop, last, d);
            loop->shape[last] *= size;
        } else {
            loop_move(loop, ++last, d);
        }
    }
    if (dims == 0) {
        loop->shape[0] = 1;
        for (uint32_t k = 0; k < MS_LOOP_OPERANDS; k++) loop->strides[k][0] = 1;
    }
    loop->dims = dims == 0 ? 1 : last + 1;
}

/* 0 where a size is 0; callers enqueue nothing then. */
int64_t ms_loop_count(const ms_loop *loop)
{
    int64_t count = 1;
    for (uint32_t d = 0; d < loop->dims; d++) count *= loop->shape[d];
    return count;
}
