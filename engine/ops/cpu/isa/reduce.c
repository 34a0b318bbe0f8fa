/* reduce.c: inner loops of the reductions, compiled once for each instruction set. 64 partial sums
 * in fixed order on all of them.
 *
 * Sums of x and |x| and the extremes have the same bits on every instruction set. Terms with a
 * product may be contracted with the addition, and then round once less. */
#include "ops/cpu/reduce.h"

#include "ops/cpu/vector_math.h"

/* Defines what a lane adds to a sum or compares, from x and y (MS_LANES each) and the power p.
 * Terms of sums are 0 for 0, so the last part of a row may be padded with zeros. The extremes need
 * no such padding: their kernels take the last elements one by one. */
#define TERM(name, formula)                                \
    MS_VECTOR ms_vf term_##name(ms_vf x, ms_vf y, float p) \
    {                                                      \
        (void)y, (void)p;                                  \
        return formula;                                    \
    }
TERM(add, x)
TERM(abs, ms_v_abs(x))
TERM(squares, x *x)
TERM(powers, ms_v_pow_positive(ms_v_abs(x), p))
TERM(products, x *y)
TERM(greatest, x)
TERM(least, x)
TERM(greatest_abs, ms_v_abs(x))

/* COLUMNS takes its way of joining as a name, and an operator has none. */
MS_VECTOR ms_vf plus(ms_vf a, ms_vf b) { return a + b; }

/* How a kernel loads its second operand, or a part of a row. Where n is MS_LANES the test is a
 * constant, and a whole vector is loaded; NOTHING reads no memory, since py is NULL for all kernels
 * but products. */
#define NOTHING(p, i, n) ms_v_splat(0)
#define FETCH(p, i, n) ((n) == MS_LANES ? ms_v_load((p) + (i)) : ms_v_load_part((p) + (i), n))

/* Defines a kernel that adds the terms of a row. Element i goes to sum i % 64, also in the rest of
 * the row after the last whole 64, so the order of additions is the same on every instruction set.
 * The 64 sums are independent: with a single vector of sums each addition would wait for the one
 * before, and the loop would be slower than memory delivers. */
#define ROW_SUM(name, load_y)                                                          \
    static float row_##name(const float *px, const float *py, size_t n, float p)       \
    {                                                                                  \
        ms_sum64 total = { { { 0 } } };                                                \
        size_t i = 0;                                                                  \
        (void)py;                                                                      \
        for (; i + MS_SUM_LANES <= n; i += MS_SUM_LANES)                               \
            for (size_t k = 0; k < MS_SUMS; k++)                                       \
                total.of[k] += term_##name(ms_v_load(px + i + k * MS_LANES),           \
                                           load_y(py, i + k * MS_LANES, MS_LANES), p); \
        ms_sum64 all = total; /* of a copy, so that `total` stays in registers */      \
        for (size_t k = 0; i < n; i += MS_LANES, k++) {                                \
            size_t m = n - i < MS_LANES ? n - i : MS_LANES;                            \
            all.of[k] += term_##name(ms_v_load_part(px + i, m), load_y(py, i, m), p);  \
        }                                                                              \
        return ms_v_sum64(all);                                                        \
    }
/* The power is a parameter of all kernels and used by one, so that they share a type. */
ROW_SUM(add, NOTHING)
ROW_SUM(abs, NOTHING)
ROW_SUM(squares, NOTHING)
ROW_SUM(powers, NOTHING)
ROW_SUM(products, FETCH)

/* The order does not matter here, but that NaN wins. ms_v_max and ms_v_min return NaN if either
 * operand is NaN, and so does each step here. Four vectors are compared side by side for the same
 * reason as in ROW_SUM. The loop at the end halves the vector until one lane is left. */
#define ROW_EXTREME(name, pick)                                                                   \
    static float row_##name(const float *px, const float *py, size_t n, float p)                  \
    {                                                                                             \
        ms_vf first = term_##name(ms_v_splat(px[0]), ms_v_splat(0), p),                           \
              best[4] = { first, first, first, first };                                           \
        size_t i = 0;                                                                             \
        (void)py;                                                                                 \
        for (; i + 4 * MS_LANES <= n; i += 4 * MS_LANES)                                          \
            for (size_t k = 0; k < 4; k++)                                                        \
                best[k] = pick(best[k], term_##name(ms_v_load(px + i + k * MS_LANES), first, p)); \
        for (; i + MS_LANES <= n; i += MS_LANES)                                                  \
            best[0] = pick(best[0], term_##name(ms_v_load(px + i), first, p));                    \
        for (; i < n; i++) best[0] = pick(best[0], term_##name(ms_v_splat(px[i]), first, p));     \
        ms_vf all = pick(pick(best[0], best[1]), pick(best[2], best[3]));                         \
        for (int half = MS_LANES / 2; half > 0; half /= 2) {                                      \
            ms_vf other = all;                                                                    \
            for (int k = 0; k < half; k++) other[k] = all[k + half];                              \
            all = pick(all, other);                                                               \
        }                                                                                         \
        return all[0];                                                                            \
    }
/* greatest_abs needs no least_abs beside it: no operator asks for that. */
ROW_EXTREME(greatest, ms_v_max)
ROW_EXTREME(least, ms_v_min)
ROW_EXTREME(greatest_abs, ms_v_max)

/* Four rows at a time, so that the totals are read and written once for four. The four rows are
 * joined in pairs before the total takes them in. reduce_columns in cpu/reduce.c relies on this: it
 * converts four rows at a time, so that other dtypes are added in the same order as f32. Columns do
 * not depend on each other, so the number of lanes may differ. */
#define COLUMNS(name, join)                                                                     \
    static void column_##name(float *totals, const float *px, int64_t stride, size_t rows,      \
                              size_t n, float p)                                                \
    {                                                                                           \
        const ms_vf none = ms_v_splat(0);                                                       \
        for (; rows >= 4; rows -= 4, px += 4 * stride)                                          \
            for (size_t i = 0; i < n; i += MS_LANES) {                                          \
                size_t m = n - i < MS_LANES ? n - i : MS_LANES;                                 \
                ms_vf a = term_##name(FETCH(px, i, m), none, p),                                \
                      b = term_##name(FETCH(px + stride, i, m), none, p);                       \
                ms_vf c = term_##name(FETCH(px + 2 * stride, i, m), none, p),                   \
                      d = term_##name(FETCH(px + 3 * stride, i, m), none, p);                   \
                ms_vf total = join(FETCH(totals, i, m), join(join(a, b), join(c, d)));          \
                if (m == MS_LANES) ms_v_store(totals + i, total);                               \
                else ms_v_store_part(totals + i, total, m);                                     \
            }                                                                                   \
        for (; rows > 0; rows--, px += stride)                                                  \
            for (size_t i = 0; i < n; i += MS_LANES) {                                          \
                size_t m = n - i < MS_LANES ? n - i : MS_LANES;                                 \
                ms_vf total = join(FETCH(totals, i, m), term_##name(FETCH(px, i, m), none, p)); \
                if (m == MS_LANES) ms_v_store(totals + i, total);                               \
                else ms_v_store_part(totals + i, total, m);                                     \
            }                                                                                   \
    }
/* The totals begin as what changes nothing (identity in cpu/reduce.c). */
COLUMNS(add, plus)
COLUMNS(abs, plus)
COLUMNS(squares, plus)
COLUMNS(powers, plus)
COLUMNS(greatest, ms_v_max)
COLUMNS(least, ms_v_min)
COLUMNS(greatest_abs, ms_v_max)

/* No column kernel for products: a dot product is a single row. */
const ms_reduce_kernels MS_ISA_NAME(ms_reduce_kernels) = {
    .row = { [MS_REDUCE_ADD] = row_add,
             [MS_REDUCE_ADD_ABS] = row_abs,
             [MS_REDUCE_ADD_SQUARES] = row_squares,
             [MS_REDUCE_ADD_POWERS] = row_powers,
             [MS_REDUCE_ADD_PRODUCTS] = row_products,
             [MS_REDUCE_GREATEST] = row_greatest,
             [MS_REDUCE_LEAST] = row_least,
             [MS_REDUCE_GREATEST_ABS] = row_greatest_abs },
    .column = { [MS_REDUCE_ADD] = column_add,
                [MS_REDUCE_ADD_ABS] = column_abs,
                [MS_REDUCE_ADD_SQUARES] = column_squares,
                [MS_REDUCE_ADD_POWERS] = column_powers,
                [MS_REDUCE_GREATEST] = column_greatest,
                [MS_REDUCE_LEAST] = column_least,
                [MS_REDUCE_GREATEST_ABS] = column_greatest_abs },
};
