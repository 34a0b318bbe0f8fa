/* matmul.c: products of matrices: shapes, layouts, dtypes, autocast.
 * ctest: each-isa poisoned late cuda */
#include "reference.h"

/* ------------------------------------------------------------------- matmul */

static size_t index_in(const operand *o, uint32_t skip, const int64_t *at, uint32_t dims)
{
    /* Position in a broadcast operand of the batch index `at` of `dims` numbers; skip: its own
     * matrix dimensions. */
    uint32_t own = o->dims > skip ? o->dims - skip : 0;
    size_t index = 0;
    for (uint32_t d = 0; d < own; d++) {
        int64_t i = at[dims - own + d];
        index = index * (size_t)o->shape[d] + (size_t)(o->shape[d] == 1 ? 0 : i);
    }
    return index;
}

static void matmul_reference(const check *c)
{
    const operand *a = &c->in[0], *b = &c->in[1], *out = &c->out[0];
    int64_t m = a->dims > 1 ? a->shape[a->dims - 2] : 1;
    int64_t k = a->shape[a->dims - 1];
    int64_t n = b->dims > 1 ? b->shape[b->dims - 1] : 1;
    uint32_t most = a->dims > b->dims ? a->dims : b->dims;
    uint32_t batch_dims = most > 2 ? most - 2 : 0;
    size_t batches = count_of(out) / (size_t)(m * n);
    for (size_t batch = 0; batch < batches; batch++) {
        int64_t at[MS_DIMS_MAX];
        size_t rest = batch;
        for (uint32_t d = batch_dims; d-- > 0;) {
            at[d] = (int64_t)(rest % (size_t)out->shape[d]);
            rest /= (size_t)out->shape[d];
        }
        const double *x = a->values + index_in(a, 2, at, batch_dims) * (size_t)(m * k),
                     *y = b->values + index_in(b, 2, at, batch_dims) * (size_t)(k * n);
        double *z = out->values + batch * (size_t)(m * n);
        /* Row by row of y, so that the compiler adds several columns at once. */
        memset(z, 0, (size_t)(m * n) * sizeof *z);
        for (int64_t i = 0; i < m; i++)
            for (int64_t l = 0; l < k; l++)
                for (int64_t j = 0; j < n; j++) z[i * n + j] += x[i * k + l] * y[l * n + j];
    }
}

static check matmul_of(ms_dtype dtype, operand a, operand b, operand out)
{
    a.dtype = b.dtype = out.dtype = dtype;
    return (check){ .op = &ms_op_matmul,
                    .in = { a, b },
                    .ins = 2,
                    .out = { out },
                    .outs = 1,
                    .reference = matmul_reference };
}

#define SHAPE(...)                                                                           \
    {                                                                                        \
        .dims = (uint32_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), .shape = { \
            __VA_ARGS__                                                                      \
        }                                                                                    \
    }
#define MATMUL(dtype, ...)                                                 \
    do {                                                                   \
        operand operands[] = { __VA_ARGS__ };                              \
        check c = matmul_of(dtype, operands[0], operands[1], operands[2]); \
        run_check(&c);                                                     \
    } while (0)

static void test_matmul_shapes(void **state)
{
    (void)state;
    MATMUL(MS_F32, SHAPE(3, 5), SHAPE(5, 4), SHAPE(3, 4));
    MATMUL(MS_F32, SHAPE(1, 7), SHAPE(7, 1), SHAPE(1, 1));
    MATMUL(MS_F32, SHAPE(7), SHAPE(7, 3), SHAPE(3));
    MATMUL(MS_F32, SHAPE(3, 7), SHAPE(7), SHAPE(3));
    MATMUL(MS_F32, SHAPE(2, 3, 7), SHAPE(7), SHAPE(2, 3));
    MATMUL(MS_F32, SHAPE(7), SHAPE(2, 7, 3), SHAPE(2, 3));
    MATMUL(MS_F32, SHAPE(2, 3, 4, 5), SHAPE(2, 3, 5, 2), SHAPE(2, 3, 4, 2));
    MATMUL(MS_F32, SHAPE(2, 3, 4, 5), SHAPE(5, 2), SHAPE(2, 3, 4, 2));
    MATMUL(MS_F32, SHAPE(4, 5), SHAPE(2, 3, 5, 2), SHAPE(2, 3, 4, 2));
    MATMUL(MS_F32, SHAPE(2, 1, 4, 5), SHAPE(3, 5, 2), SHAPE(2, 3, 4, 2));
    MATMUL(MS_F32, SHAPE(1, 3, 4, 5), SHAPE(2, 1, 5, 2), SHAPE(2, 3, 4, 2));
}

static operand laid(operand o, int layout)
{
    o.layout = layout;
    return o;
}

static void test_matmul_layouts(void **state)
{
    (void)state;
    for (int left = PLAIN; left <= SPREAD; left++)
        for (int right = PLAIN; right <= SPREAD; right++) {
            MATMUL(MS_F32, laid((operand)SHAPE(2, 6, 5), left),
                   laid((operand)SHAPE(2, 5, 7), right), SHAPE(2, 6, 7));
            MATMUL(MS_F32, laid((operand)SHAPE(2, 6, 5), left), laid((operand)SHAPE(5, 7), right),
                   SHAPE(2, 6, 7));
        }
}

/* Sizes at which work is cut into parts, with plans for exact sizes (multiples of 16) and
 * without. */
static void test_matmul_parts(void **state)
{
    (void)state;
    MATMUL(MS_F32, SHAPE(128, 128), SHAPE(128, 128), SHAPE(128, 128));
    MATMUL(MS_F32, SHAPE(131, 100), SHAPE(100, 117), SHAPE(131, 117));
    MATMUL(MS_F32, SHAPE(10, 160), SHAPE(160, 800), SHAPE(10, 800));
    MATMUL(MS_F32, SHAPE(8, 64, 48), SHAPE(8, 48, 64), SHAPE(8, 64, 64));
    MATMUL(MS_F32, SHAPE(3, 100, 64), SHAPE(3, 64, 90), SHAPE(3, 100, 90));
}

/* A weight's transpose with few rows is multiplied in pieces of columns where there is no AVX-512:
 * one, several, and a last one that is shorter; at the most rows, and one more. */
static void test_matmul_pieces(void **state)
{
    (void)state;
    static const int64_t sizes[][3] = {
        { 1, 40, 300 }, { 17, 33, 129 }, { 256, 24, 384 }, { 257, 24, 384 }
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t m = sizes[i][0], k = sizes[i][1], n = sizes[i][2];
        MATMUL(MS_F32, SHAPE(m, k), laid((operand)SHAPE(k, n), SWAPPED), SHAPE(m, n));
    }
    MATMUL(MS_F32, SHAPE(3, 20, 30), laid((operand)SHAPE(3, 30, 200), SWAPPED), SHAPE(3, 20, 200));
}

/* The gradient of a weight has one sum over all tokens, whose two operands are stored token by
 * token: longer rows in the first one, in the second one, or equal; numbers of tokens that are, and
 * are not, a multiple of the block of the sum; matrices that are copied first, and matrices that
 * are too large or too small for that (64 and 4096). */
static void test_matmul_long_sums(void **state)
{
    (void)state;
    static const int64_t tokens[] = { 63, 64, 255, 256, 300, 640, 1025 };
    for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t += ranges_are_short() ? 3 : 1) {
        int64_t k = tokens[t];
        MATMUL(MS_F32, laid((operand)SHAPE(80, k), SWAPPED), SHAPE(k, 32), SHAPE(80, 32));
        MATMUL(MS_F32, laid((operand)SHAPE(32, k), SWAPPED), SHAPE(k, 80), SHAPE(32, 80));
        MATMUL(MS_F32, laid((operand)SHAPE(3, 50, k), SWAPPED), SHAPE(3, k, 50), SHAPE(3, 50, 50));
        MATMUL(MS_F32, laid((operand)SHAPE(2, 80, k), SWAPPED), SHAPE(2, k, 67), SHAPE(2, 80, 67));
    }
    MATMUL(MS_F32, laid((operand)SHAPE(64, 64), SWAPPED), SHAPE(64, 4100), SHAPE(64, 4100));
}

static void test_matmul_half(void **state)
{
    (void)state;
    for (ms_dtype dtype = MS_F16; dtype <= MS_BF16; dtype++) {
        MATMUL(dtype, SHAPE(3, 5), SHAPE(5, 4), SHAPE(3, 4));
        MATMUL(dtype, laid((operand)SHAPE(32, 48), SWAPPED), SHAPE(48, 16), SHAPE(32, 16));
        MATMUL(dtype, SHAPE(2, 6, 5), laid((operand)SHAPE(2, 5, 7), SWAPPED), SHAPE(2, 6, 7));
        /* More than a block that is converted: of the sum; of rows; of columns. Rows of the first
         * operand that are converted once for all columns, and those that are too long for it. */
        MATMUL(dtype, SHAPE(130, 3000), laid((operand)SHAPE(3000, 98), SWAPPED), SHAPE(130, 98));
        MATMUL(dtype, laid((operand)SHAPE(5, 3080), SWAPPED), SHAPE(3080, 260), SHAPE(5, 260));
        MATMUL(dtype, SHAPE(140, 600), SHAPE(600, 260), SHAPE(140, 260));
        MATMUL(dtype, SHAPE(530, 40), SHAPE(40, 540), SHAPE(530, 540));
        MATMUL(dtype, SHAPE(540, 40), SHAPE(40, 530), SHAPE(540, 530));
    }
}

static void test_matmul_autocast(void **state)
{
    (void)state;
    for (ms_dtype dtype = MS_F16; dtype <= MS_BF16; dtype++) {
        /* The second has more than a block of everything, and gradients of f32. */
        check checks[] = { matmul_of(MS_F32, (operand)SHAPE(2, 16, 32), (operand)SHAPE(32, 48),
                                     (operand)SHAPE(2, 16, 48)),
                           matmul_of(MS_F32, (operand)SHAPE(600, 300), (operand)SHAPE(300, 600),
                                     (operand)SHAPE(600, 600)) };
        for (int i = 0; i < 2; i++) {
            set_autocast(&checks[i], dtype);
            /* Both operands are rounded before they are multiplied. */
            checks[i].tolerance = dtype == MS_BF16 ? 1e-2 : 1.5e-3;
            run_check(&checks[i]);
        }
    }
}

static void test_matmul_empty(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *a = TENSOR(engine, MS_F32, 3, 0), *b = TENSOR(engine, MS_F32, 0, 4), *out = NULL;
    float values[12];
    OK(ms_op_binary(engine, &ms_op_matmul, NULL, a, b, &out));
    OK(ms_tensor_read(out, values, sizeof values));
    for (int i = 0; i < 12; i++) assert_true(values[i] == 0.0f);
    ms_tensor_release(a);
    ms_tensor_release(b);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

static void test_matmul_refusals(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *a = TENSOR(engine, MS_F32, 2, 3), *b = TENSOR(engine, MS_F32, 4, 5),
              *h = TENSOR(engine, MS_F16, 3, 5), *batch = TENSOR(engine, MS_F32, 2, 1, 3),
              *three = TENSOR(engine, MS_F32, 3, 3, 2);
    check_refused(engine, &ms_op_matmul, NULL, (ms_tensor *[]){ a, b }, 2,
                  "[2, 3] f32 and [4, 5] f32");
    check_refused(engine, &ms_op_matmul, NULL, (ms_tensor *[]){ a, b }, 2,
                  "the last dimension of the first (3)");
    check_refused(engine, &ms_op_matmul, NULL, (ms_tensor *[]){ a, h }, 2, "the same float dtype");
    check_refused(engine, &ms_op_matmul, NULL, (ms_tensor *[]){ batch, three }, 2, "broadcast");
    ms_tensor_release(a);
    ms_tensor_release(b);
    ms_tensor_release(h);
    ms_tensor_release(batch);
    ms_tensor_release(three);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    check product = matmul_of(MS_BF16, (operand)SHAPE(2, 1, 16, 32), (operand)SHAPE(3, 32, 16),
                              (operand)SHAPE(2, 3, 16, 16));
    check_lack_of_memory(&product);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul_shapes),   cmocka_unit_test(test_matmul_layouts),
        cmocka_unit_test(test_matmul_parts),    cmocka_unit_test(test_matmul_long_sums),
        cmocka_unit_test(test_matmul_pieces),   cmocka_unit_test(test_matmul_half),
        cmocka_unit_test(test_matmul_autocast), cmocka_unit_test(test_matmul_empty),
        cmocka_unit_test(test_matmul_refusals), cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
