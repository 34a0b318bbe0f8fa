/* fp8_most.c: greatest sizes that kernels give with what they write, for an encode as 8-bit floats:
 * the bits of a second read, and used only where they hold.
 * ctest: each-isa poisoned late cuda */
#include "gradcheck.h"

#include "exec/engine.h"
#include "ops/backend.h"
#include "ops/fp8.h"
#include "ops/linear.h"
#include "ops/values.h"
#include "tensor/tensor.h"

static ms_engine *engine;

static int setup(void **state)
{
    (void)state;
    engine = engine_with(2, getenv("MOONSHARD_CPU"));
    return 0;
}
static int teardown(void **state)
{
    (void)state;
    ms_engine_free(engine);
    return 0;
}

static void set_fp8(bool on)
{
    ms_engine_set_autocast(engine, on ? MS_BF16 : MS_F32);
    ms_engine_set_fp8(engine, on ? MS_FP8_ON : MS_FP8_OFF);
}

/* ------------------------------------------------------------------ comparisons */

static uint32_t greatest(const uint32_t *bits, int64_t count)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) most = bits[i] > most ? bits[i] : most;
    return most;
}

/* The greatest of the bits of |x|. */
static uint32_t found_in(ms_tensor *x)
{
    int64_t count = ms_tensor_count(x);
    bool is_bf16 = ms_tensor_dtype(x) == MS_BF16;
    void *values = calloc((size_t)count + 1, sizeof(uint32_t));
    uint32_t *bits = calloc((size_t)count + 1, sizeof *bits);
    assert_ok(engine, ms_tensor_read(x, values, ms_tensor_bytes(x)));
    for (int64_t i = 0; i < count; i++)
        bits[i] = (is_bf16 ? (uint32_t)((uint16_t *)values)[i] << 16 : ((uint32_t *)values)[i])
                  & 0x7fffffff;
    uint32_t most = greatest(bits, count);
    free(bits);
    free(values);
    return most;
}

static uint32_t given_in(ms_tensor *most)
{
    uint32_t *numbers = malloc(ms_tensor_bytes(most));
    assert_int_equal(ms_tensor_count(most) % MS_FP8_MULTIPLE, 0);
    assert_ok(engine, ms_tensor_read(most, numbers, ms_tensor_bytes(most)));
    uint32_t found = greatest(numbers, ms_tensor_count(most));
    free(numbers);
    return found;
}

static uint8_t *bytes_of(ms_tensor *tensor)
{
    uint8_t *bytes = malloc(ms_tensor_bytes(tensor));
    assert_ok(engine, ms_tensor_read(tensor, bytes, ms_tensor_bytes(tensor)));
    return bytes;
}

/* The payload of x, and on a device for GPUs that of its transpose, have the bytes of those of a
 * copy, of which nothing is known. */
static void check_payloads(ms_tensor *x)
{
    bool turns = ms_engine_is_for_gpu(engine);
    for (ms_fp8_format format = MS_FP8_E4M3; format <= MS_FP8_E5M2; format++) {
        ms_tensor *copy = NULL, *own[2] = { NULL }, *other[2] = { NULL };
        assert_ok(engine, ms_copy_new(engine, x, &copy));
        assert_null(ms_tensor_most(copy));
        assert_ok(engine, ms_fp8_encode(engine, x, format, &own[0], turns ? &own[1] : NULL));
        assert_ok(engine, ms_fp8_encode(engine, copy, format, &other[0], turns ? &other[1] : NULL));
        for (int i = 0; i < 2 && own[i]; i++) {
            uint8_t *a = bytes_of(own[i]), *b = bytes_of(other[i]);
            assert_memory_equal(a, b, ms_tensor_bytes(own[i]));
            free(a);
            free(b);
        }
        release_all(own, 2);
        release_all(other, 2);
        ms_tensor_release(copy);
    }
}

/* gives: a device for GPUs has given the greatest size of x. */
static void check_given(ms_tensor *x, bool gives)
{
    ms_tensor *most = ms_tensor_most(x);
    assert_int_equal(most != NULL, gives && ms_engine_is_for_gpu(engine));
    if (most) assert_int_equal(given_in(most), found_in(x));
    /* Of other rows, a matrix with the same elements. */
    int64_t count = ms_tensor_count(x), columns = ms_tensor_shape(x)[ms_tensor_dims(x) - 1];
    ms_tensor *matrix = columns % MS_FP8_MULTIPLE == 0
                            ? ms_tensor_retain(x)
                            : window_of(x, DIMS(count / 16, 16), SHAPE(16, 1), 0);
    check_payloads(matrix);
    ms_tensor_release(matrix);
}

/* ------------------------------------------------------------------------ norms */

/* A norm of rows: its inputs, results and what backward reads. */
typedef struct norm {
    const ms_op *op;
    ms_tensor *in[4], *out[2], *results[4], *saved[MS_OP_SAVED_MAX];
    ms_attributes attributes;
    uint32_t ins, outs, saved_count;
} norm;

/* x and weight have these dtypes; a residual is f32. */
static norm open_norm(const ms_op *op, ms_dtype x, ms_dtype weight, int64_t rows, int64_t width)
{
    bool is_sum = op == &ms_op_add_layer_norm || op == &ms_op_add_rms_norm,
         has_bias = op == &ms_op_layer_norm || op == &ms_op_add_layer_norm;
    norm n = { .op = op, .attributes.norm.eps = 1e-5, .outs = is_sum ? 2 : 1 };
    n.in[n.ins++] = tensor_of(engine, x, DIMS(2, rows / 2, width), NULL);
    if (is_sum) n.in[n.ins++] = tensor_of(engine, MS_F32, DIMS(2, rows / 2, width), NULL);
    n.in[n.ins++] = tensor_of(engine, weight, DIMS(width), NULL);
    if (has_bias) n.in[n.ins++] = tensor_of(engine, weight, DIMS(width), NULL);
    return n;
}

/* The normalized rows, borrowed. */
static ms_tensor *run_norm(norm *n, bool in_fp8)
{
    ms_op_call call = { .engine = engine,
                        .op = n->op,
                        .attributes = n->attributes,
                        .inputs = n->in,
                        .input_count = n->ins,
                        .outputs = n->out,
                        .output_count = n->outs,
                        .record = true };
    if (in_fp8) set_fp8(true);
    else ms_engine_set_autocast(engine, MS_BF16);
    assert_ok(engine, ms_op_run(&call));
    set_fp8(false);
    n->attributes = call.attributes;
    n->saved_count = call.saved_count;
    memcpy(n->saved, call.saved, sizeof call.saved);
    return n->out[n->outs - 1];
}

static void close_norm(norm *n)
{
    release_all(n->in, 4);
    release_all(n->out, 2);
    release_all(n->results, 4);
    release_all(n->saved, n->saved_count);
}

static void check_norm(const ms_op *op, ms_dtype x, ms_dtype weight, int64_t rows, int64_t width)
{
    norm n = open_norm(op, x, weight, rows, width);
    ms_tensor *y = run_norm(&n, true);
    assert_int_equal(ms_tensor_dtype(y), MS_BF16);
    check_given(y, true);
    for (uint32_t i = 0; i < n.saved_count; i++) assert_null(n.saved[i]->most);
    close_norm(&n);
}

static const ms_op *const norms[] = { &ms_op_layer_norm, &ms_op_rms_norm, &ms_op_add_layer_norm,
                                      &ms_op_add_rms_norm };

/* A row for a warp and for a block; more rows than the encode reads at once. */
static void test_norms(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        check_norm(norms[i], MS_F32, MS_F32, 16, 16);
        check_norm(norms[i], MS_BF16, MS_F32, 48, 80);
        check_norm(norms[i], MS_F32, MS_BF16, 336, 272);
        check_norm(norms[i], MS_BF16, MS_F32, 16, 1040);
        check_norm(norms[i], MS_F32, MS_F32, 1056, 32);
    }
    check_norm(&ms_op_rms_norm, MS_BF16, MS_BF16, 32, 48);
    check_norm(&ms_op_layer_norm, MS_F32, MS_F32, 16, 8208);
    check_norm(&ms_op_layer_norm, MS_F32, MS_F32, 64, 20);
}

/* The payload of x in f32 whose rows, normalized, are multiplied by a weight of these bits; x is
 * ones and their negatives, but for one number. */
static void check_bits(uint32_t number, uint32_t weight)
{
    uint32_t bits[32 * 16], weights[16];
    norm n = open_norm(&ms_op_rms_norm, MS_F32, MS_F32, 32, 16);
    for (uint32_t i = 0; i < COUNT(bits); i++) bits[i] = 0x3f800000u | i % 2 << 31;
    for (uint32_t i = 0; i < COUNT(weights); i++) weights[i] = weight;
    bits[37] = number;
    assert_ok(engine, ms_tensor_write(n.in[0], bits, sizeof bits));
    assert_ok(engine, ms_tensor_write(n.in[1], weights, sizeof weights));
    check_given(run_norm(&n, true), true);
    close_norm(&n);
}

/* NaN, infinity, numbers that become infinite in bf16, subnormal ones and zeros. */
static void test_special_numbers(void **state)
{
    (void)state;
    static const uint32_t numbers[] = { 0x3f800000, 0x7fc00000, 0xffc00001, 0x7f800000, 0xff800000,
                                        0x00000000, 0x80000000, 0x7f7fffff, 0x00000001 },
                          weights[] = { 0x3f800000, 0,          0x80000000, 1,         0x007fffff,
                                        0x00800000, 0x7f7fffff, 0x7f800000, 0x7fc00000 };
    for (size_t i = 0; i < COUNT(numbers); i++)
        for (size_t k = 0; k < COUNT(weights); k++) check_bits(numbers[i], weights[k]);
}

/* Only a view of all elements in their order has the greatest size of the whole. */
static void test_views(void **state)
{
    (void)state;
    norm n = open_norm(&ms_op_layer_norm, MS_F32, MS_F32, 32, 80);
    ms_tensor *y = run_norm(&n, true);
    ms_tensor *whole = window_of(y, DIMS(80, 32), SHAPE(32, 1), 0),
              *same = window_of(whole, DIMS(2560), SHAPE(1), 0),
              *first = window_of(y, DIMS(16, 80), SHAPE(80, 1), 0),
              *last = window_of(y, DIMS(16, 80), SHAPE(80, 1), 1280),
              *turned = window_of(y, DIMS(80, 32), SHAPE(1, 80), 0), *alias = NULL;
    assert_ok(engine, ms_tensor_alias(y, &alias));
    check_given(whole, true);
    check_given(alias, true);
    check_given(first, false);
    check_given(last, false);
    check_given(turned, false);
    assert_int_equal(ms_tensor_most(same) != NULL, ms_engine_is_for_gpu(engine));
    ms_tensor *all[] = { whole, same, first, last, turned, alias };
    release_all(all, COUNT(all));
    close_norm(&n);
}

/* After any write it is out of date: of an operator, of a copy, of the host, through a view. */
static void test_writes(void **state)
{
    (void)state;
    for (int how = 0; how < 4; how++) {
        norm n = open_norm(&ms_op_rms_norm, MS_F32, MS_F32, 32, 48);
        ms_tensor *y = run_norm(&n, true), *out = NULL, *part = NULL,
                  *other = tensor_of(engine, MS_BF16, DIMS(2, 16, 48), NULL);
        ms_attributes twice = { .scalar = { .value = 2 } };
        uint16_t host[32 * 48] = { 0x4600, 0x3f80 };
        assert_ok(engine, ms_tensor_window(y, DIMS(1), SHAPE(1), 77, &part));
        if (how == 0)
            assert_ok(engine, ms_op_apply(engine, &ms_op_mul_scalar, &twice, true, &y, 1, &out, 1));
        if (how == 1) assert_ok(engine, ms_copy_into(engine, other, y));
        if (how == 2) assert_ok(engine, ms_tensor_write(y, host, sizeof host));
        if (how == 3) assert_ok(engine, ms_fill_into(engine, part, 999));
        check_given(y, false);
        ms_tensor_release(out);
        ms_tensor_release(part);
        ms_tensor_release(other);
        close_norm(&n);
    }
}

/* Outside of fp8, in other dtypes and for other numbers of rows nothing is given. */
static void test_not_wanted(void **state)
{
    (void)state;
    norm n = open_norm(&ms_op_rms_norm, MS_F32, MS_F32, 32, 48);
    check_given(run_norm(&n, false), false);
    close_norm(&n);
    n = open_norm(&ms_op_rms_norm, MS_F32, MS_F32, 24, 32);
    assert_null(ms_tensor_most(run_norm(&n, true)));
    close_norm(&n);
    n = open_norm(&ms_op_rms_norm, MS_F32, MS_F32, 0, 32);
    assert_null(ms_tensor_most(run_norm(&n, true)));
    close_norm(&n);
}

/* The memory goes with the tensor, or when the tensor is moved. */
static void test_memory(void **state)
{
    (void)state;
    size_t before = ms_engine_memory(engine).live;
    norm n = open_norm(&ms_op_rms_norm, MS_F32, MS_F32, 32, 48);
    ms_tensor *y = run_norm(&n, true), *base = tensor_of(engine, MS_BF16, DIMS(1536), NULL);
    ms_tensor_rebase(y, base, 0);
    assert_null(y->most);
    ms_tensor_release(base);
    close_norm(&n);
    assert_int_equal(ms_engine_memory(engine).live, before);
}

/* -------------------------------------------------------------------- gradients */

static ms_tensor_info info_from(const ms_tensor *tensor)
{
    ms_tensor_info info = { .dtype = ms_tensor_dtype(tensor), .dims = ms_tensor_dims(tensor) };
    for (uint32_t d = 0; d < info.dims; d++) info.shape[d] = ms_tensor_shape(tensor)[d];
    return info;
}

/* weights: also the gradients of weight and bias, which another kernel makes with that of x. The
 * gradient of x has bf16, as a linear layer's result has. */
static void check_gradient(const ms_op *op, ms_dtype residual, int64_t rows, int64_t width,
                           bool weights)
{
    norm n = open_norm(op, MS_BF16, MS_F32, rows, width);
    ms_tensor *g[2] = { NULL };
    run_norm(&n, true);
    bool needs[4] = { true, n.outs == 2 && residual == MS_F32, weights, weights };
    if (n.outs == 1) needs[1] = weights;
    ms_tensor_info in[4], out[2];
    for (uint32_t i = 0; i < n.ins; i++) in[i] = info_from(n.in[i]);
    for (uint32_t i = 0; i < n.outs; i++) out[i] = info_from(n.out[i]);
    for (uint32_t i = 0; i < n.outs; i++)
        g[i] = tensor_of(engine, out[i].dtype, out[i].dims, out[i].shape, NULL);
    ms_op_gradient gradient = { .engine = engine,
                                .op = op,
                                .attributes = n.attributes,
                                .saved = n.saved,
                                .saved_count = n.saved_count,
                                .inputs = in,
                                .input_count = n.ins,
                                .outputs = out,
                                .gradients = g,
                                .output_count = n.outs,
                                .results = n.results,
                                .needs = needs };
    assert_ok(engine, op->backward(&gradient));
    assert_int_equal(ms_tensor_dtype(n.results[0]), MS_BF16);
    check_given(n.results[0], true);
    release_all(g, 2);
    close_norm(&n);
}

static void test_gradients_of_norms(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {
        { 16, 16 }, { 48, 80 }, { 64, 1040 }, { 1056, 32 }, { 16, 4112 }
    };
    for (size_t s = 0; s < COUNT(shapes); s++)
        for (int i = 0; i < 4; i++)
            for (int weights = 0; weights < 2; weights++) {
                check_gradient(norms[i], MS_F32, shapes[s][0], shapes[s][1], weights);
                if (i > 1) check_gradient(norms[i], MS_BF16, shapes[s][0], shapes[s][1], weights);
            }
}

/* swiglu: its result, and both gradients. `a` may be a row for all. */
static void check_swiglu(int64_t rows, int64_t width, bool repeats, bool in_fp8, bool in_place)
{
    ms_tensor *in[] = { tensor_of(engine, MS_BF16, DIMS(rows, width), NULL),
                        tensor_of(engine, MS_BF16, DIMS(repeats ? 1 : rows, width), NULL) },
              *out = NULL, *g = tensor_of(engine, MS_BF16, DIMS(rows, width), NULL),
              *results[2] = { NULL };
    ms_tensor_info infos[] = { info_from(in[0]), info_from(in[1]) }, made = info_from(g);
    ms_op_call call = { .engine = engine,
                        .op = &ms_op_swiglu,
                        .inputs = in,
                        .input_count = 2,
                        .outputs = &out,
                        .output_count = 1,
                        .in_place = in_place,
                        .record = true };
    if (in_fp8) set_fp8(true);
    assert_ok(engine, ms_op_run(&call));
    set_fp8(false);
    check_given(out, in_fp8);
    ms_op_gradient gradient = { .engine = engine,
                                .op = call.op,
                                .attributes = call.attributes,
                                .saved = call.saved,
                                .saved_count = call.saved_count,
                                .inputs = infos,
                                .input_count = 2,
                                .outputs = &made,
                                .gradients = &g,
                                .output_count = 1,
                                .results = results,
                                .needs = (bool[]){ true, true } };
    assert_ok(engine, call.op->backward(&gradient));
    check_given(results[0], in_fp8);
    if (!repeats) check_given(results[1], in_fp8);
    ms_op_drop_saved(&call);
    ms_tensor *all[] = { in[0], in[1], out, g, results[0], results[1] };
    release_all(all, COUNT(all));
}

static void test_swiglu(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = { { 16, 16 }, { 48, 80 }, { 64, 20 }, { 336, 80 } };
    for (size_t s = 0; s < COUNT(shapes); s++) {
        check_swiglu(shapes[s][0], shapes[s][1], false, true, false);
        check_swiglu(shapes[s][0], shapes[s][1], true, true, false);
        check_swiglu(shapes[s][0], shapes[s][1], false, true, true);
    }
    check_swiglu(48, 80, false, false, false);
}

/* The pass over a linear layer's gradient, at any address and with rows that are apart. */
static void check_pass(int64_t rows, int64_t width, int64_t gap, int64_t at, bool gelu, bool bias)
{
    ms_tensor *room = tensor_of(engine, MS_BF16, DIMS(rows * (width + gap) + at), NULL),
              *g = window_of(room, DIMS(rows, width), SHAPE(width + gap, 1), at),
              *before = tensor_of(engine, MS_BF16, DIMS(rows, width), NULL),
              *h = tensor_of(engine, MS_BF16, DIMS(rows, width), NULL),
              *sums = tensor_of(engine, MS_F32, DIMS(width), NULL), *most = NULL;
    assert_ok(engine, ms_fp8_most_new(engine, ms_linear_most_count(rows, width), &most));
    ms_linear_gradient_args args = { .g = ms_tensor_data(g),
                                     .before = gelu ? ms_tensor_data(before) : NULL,
                                     .out = gelu ? ms_tensor_data(h) : NULL,
                                     .bias = bias ? ms_tensor_data(sums) : NULL,
                                     .most = ms_tensor_data(most),
                                     .rows = rows,
                                     .width = width,
                                     .g_row = width + gap,
                                     .most_count = ms_tensor_count(most),
                                     .dtype = MS_BF16,
                                     .bias_dtype = MS_F32 };
    ms_tensor *reads[] = { g, before }, *writes[] = { h, sums, most };
    assert_ok(engine, ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_linear_backward),
                                        &args, reads, 2, writes, 3, (ms_task_cost){ 0 }));
    assert_int_equal(given_in(most), found_in(gelu ? h : g));
    ms_tensor *all[] = { room, g, before, h, sums, most };
    release_all(all, COUNT(all));
}

static void test_passes(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {
        { 16, 16 }, { 64, 48 }, { 208, 272 }, { 16, 1040 }, { 1040, 16 }
    };
    if (!ms_engine_is_for_gpu(engine)) return;
    for (size_t s = 0; s < COUNT(shapes); s++)
        for (int gelu = 0; gelu < 2; gelu++) {
            check_pass(shapes[s][0], shapes[s][1], 0, 0, gelu, true);
            check_pass(shapes[s][0], shapes[s][1], 0, 0, gelu, false);
            check_pass(shapes[s][0], shapes[s][1], 3, 0, gelu, true);
            check_pass(shapes[s][0], shapes[s][1], 16, 1, gelu, true);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_norms, setup, teardown),
        cmocka_unit_test_setup_teardown(test_special_numbers, setup, teardown),
        cmocka_unit_test_setup_teardown(test_views, setup, teardown),
        cmocka_unit_test_setup_teardown(test_writes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_wanted, setup, teardown),
        cmocka_unit_test_setup_teardown(test_memory, setup, teardown),
        cmocka_unit_test_setup_teardown(test_gradients_of_norms, setup, teardown),
        cmocka_unit_test_setup_teardown(test_swiglu, setup, teardown),
        cmocka_unit_test_setup_teardown(test_passes, setup, teardown),
    };
    return cmocka_run_group_tests_name("fp8_most", tests, NULL, NULL);
}
