/* embedding.c: a row of any float dtype added to a row of f32.
 *
 * Only additions, one for each element, in the order of the calls: the bits are the same on every
 * instruction set. */
#include "ops/cpu/embedding.h"

#include "ops/cpu/row.h"

/* Sums stay in f32 whatever the dtype of the rows, so that many small gradients are not lost. The
 * addition reads and writes `to` and reads `from` once: it is bound by memory, and by where the row
 * of `to` is. */
MS_VECTOR void add_row(const ms_dtype D, float *to, const void *from, size_t n)
{
    size_t i = 0;
    for (; i + MS_LANES <= n; i += MS_LANES)
        ms_v_store(to + i, ms_v_load(to + i) + ms_row_get(D, from, i));
    if (i < n)
        ms_v_store_part(
            to + i, ms_v_load_part(to + i, n - i) + ms_row_get_part(D, from, i, n, 0.0f), n - i);
}

/* `from` may have 16 bits; `to` is the row of sums, or an f32 table itself. */
static void add(float *to, ms_dtype dtype, const void *from, int64_t n)
{
    MS_ROW_SWITCH(dtype, add_row(D, to, from, (size_t)n));
}

const ms_embedding_kernels MS_ISA_NAME(ms_embedding_kernels) = { .add = add };
