/* reduce.c: inner loops of the reductions, compiled once for each instruction set. 64 partial sums in fixed order on all of them. */
#include "tensor/cpu/reduce.h"
#include "tensor/cpu/vector_math.h"

/* The value that a lane takes in, from x and y (16 lanes each) and the power p. All are 0 for 0, so a last part may be padded. */
#define SUM(name, load_y, term) \
    static float row_##name(const float *px, const float *py, size_t n, float p) \
    { \
        ms_v16f total[4] = { ms_v_splat(0), ms_v_splat(0), ms_v_splat(0), ms_v_splat(0) }; \
        size_t i = 0; \
        (void)p, (void)py; \
        for (; i + 4 * MS_LANES <= n; i += 4 * MS_LANES) \
            for (size_t k = 0; k < 4; k++) { \
                ms_v16f x = ms_v_load(px + i + k * MS_LANES), y = load_y(py, i + k * MS_LANES, MS_LANES); \
                (void)y; \
                total[k] += (term); \
            } \
        for (size_t k = 0; i < n; i += MS_LANES, k++) { \
            size_t m = n - i < MS_LANES ? n - i : MS_LANES; \
            ms_v16f x = ms_v_load_part(px + i, m), y = load_y(py, i, m); \
            (void)y; \
            total[k] += (term); \
        } \
        return ms_v_sum((total[0] + total[1]) + (total[2] + total[3])); \
    } \
    static void column_##name(float *totals, const float *px, size_t n, float p) \
    { \
        size_t i = 0; \
        (void)p; \
        for (; i + MS_LANES <= n; i += MS_LANES) { \
            ms_v16f x = ms_v_load(px + i), y = x; \
            (void)y; \
            ms_v_store(totals + i, ms_v_load(totals + i) + (term)); \
        } \
        if (i < n) { \
            ms_v16f x = ms_v_load_part(px + i, n - i), y = x; \
            (void)y; \
            ms_v_store_part(totals + i, ms_v_load_part(totals + i, n - i) + (term), n - i); \
        } \
    }
#define NOTHING(p, i, n) ms_v_splat(0)
#define FETCH(p, i, n) ((n) == MS_LANES ? ms_v_load((p) + (i)) : ms_v_load_part((p) + (i), n))

SUM(add, NOTHING, x)
SUM(abs, NOTHING, ms_v_abs(x))
SUM(squares, NOTHING, x * x)
SUM(powers, NOTHING, ms_v_pow_positive(ms_v_abs(x), p))
SUM(products, FETCH, x * y)

#define EXTREME(name, pick, term) \
    static float row_##name(const float *px, const float *py, size_t n, float p) \
    { \
        (void)py, (void)p; \
        ms_v16f x = ms_v_splat(px[0]), best = (term); \
        size_t i = 0; \
        for (; i + MS_LANES <= n; i += MS_LANES) { \
            x = ms_v_load(px + i); \
            best = pick(best, (term)); \
        } \
        for (; i < n; i++) { \
            x = ms_v_splat(px[i]); \
            best = pick(best, (term)); \
        } \
        for (int half = MS_LANES / 2; half > 0; half /= 2) { \
            ms_v16f other = best; \
            for (int k = 0; k < half; k++) other[k] = best[k + half]; \
            best = pick(best, other); \
        } \
        return best[0]; \
    } \
    static void column_##name(float *totals, const float *px, size_t n, float p) \
    { \
        (void)p; \
        size_t i = 0; \
        for (; i + MS_LANES <= n; i += MS_LANES) { \
            ms_v16f x = ms_v_load(px + i); \
            ms_v_store(totals + i, pick(ms_v_load(totals + i), (term))); \
        } \
        if (i < n) { \
            ms_v16f x = ms_v_load_part(px + i, n - i); \
            ms_v_store_part(totals + i, pick(ms_v_load_part(totals + i, n - i), (term)), n - i); \
        } \
    }
EXTREME(greatest, ms_v_max, x)
EXTREME(least, ms_v_min, x)
EXTREME(greatest_abs, ms_v_max, ms_v_abs(x))

const ms_reduce_kernels MS_ISA_NAME(ms_reduce_kernels) = {
    .row = { [MS_REDUCE_ADD] = row_add, [MS_REDUCE_ADD_ABS] = row_abs, [MS_REDUCE_ADD_SQUARES] = row_squares, [MS_REDUCE_ADD_POWERS] = row_powers,
             [MS_REDUCE_ADD_PRODUCTS] = row_products, [MS_REDUCE_GREATEST] = row_greatest, [MS_REDUCE_LEAST] = row_least,
             [MS_REDUCE_GREATEST_ABS] = row_greatest_abs },
    .column = { [MS_REDUCE_ADD] = column_add, [MS_REDUCE_ADD_ABS] = column_abs, [MS_REDUCE_ADD_SQUARES] = column_squares,
                [MS_REDUCE_ADD_POWERS] = column_powers, [MS_REDUCE_ADD_PRODUCTS] = column_products, [MS_REDUCE_GREATEST] = column_greatest,
                [MS_REDUCE_LEAST] = column_least, [MS_REDUCE_GREATEST_ABS] = column_greatest_abs },
};
