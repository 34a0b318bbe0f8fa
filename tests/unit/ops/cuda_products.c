/* cuda_products.c: timing the algorithms of products, and choices among them, over stand-ins for
 * NVIDIA's driver and cuBLASLt. */
#include "cuda_support.h"

#include <math.h>
#include <string.h>

#include "exec/stream.h"
#include "moonshard/ops.h"
#include "moonshard/tensor.h"
#include "ops/cuda/fp8.h"
#include "ops/cuda/matmul.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/state.h"

#define OK(call) assert_int_equal(call, MS_OK)

/* [rows, columns] of bf16 ones. */
static ms_tensor *ones(ms_engine *engine, int64_t rows, int64_t columns)
{
    int64_t shape[2] = { rows, columns };
    ms_tensor *made = NULL;
    OK(ms_op_full(engine, MS_BF16, 2, shape, 1.0, &made));
    return made;
}

/* One product [m, 32] x [32, 16]. */
static void multiply(ms_engine *engine, int64_t m)
{
    ms_tensor *a = ones(engine, m, 32), *b = ones(engine, 32, 16), *c = ones(engine, m, 16);
    OK(ms_matmul_into(engine, a, b, NULL, c));
    ms_tensor_release(a);
    ms_tensor_release(b);
    ms_tensor_release(c);
}

static const ms_product_plan *plan_of(ms_engine *engine, int64_t m)
{
    const ms_products *products = ms_engine_get(engine, MS_SLOT_PLANS);
    for (size_t i = 0; products && i < products->plans.capacity; i++) {
        const ms_product_plan *plan = products->plans.plans[i];
        if (plan && plan->key.shape.m == m) return plan;
    }
    return NULL;
}
/* Which of the stand-in's candidates the product uses. */
static uint64_t candidate_of(ms_engine *engine, int64_t m)
{
    return plan_of(engine, m)->way->algorithm.data[4];
}

static void log_warning(void *user, ms_log_level level, const char *message)
{
    (void)message;
    if (level == MS_LOG_WARN) ++*(int *)user;
}
static ms_engine *engine_with_log(int *warnings)
{
    ms_error error;
    ms_engine *engine = NULL;
    ms_engine_options options = { .own_device = &ms_device_cuda,
                                  .threads = 1,
                                  .log = log_warning,
                                  .log_user = warnings,
                                  .log_level = MS_LOG_WARN };
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    setenv("MOONSHARD_STAND_IN_CUBLASLT_FAST", "3", 1);
    if (ms_engine_new(&options, &error, &engine)) fail_msg("%s", error.message);
    return engine;
}

static void test_times_each_once(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_product_time found[3];
    OK(ms_products_time(engine, &found[0]));
    assert_string_equal(found[0].choice.key, "");
    multiply(engine, 8);
    multiply(engine, 24);
    multiply(engine, 8);
    OK(ms_engine_sync(engine)); /* its event is kept */
    unsigned before = left();
    for (int i = 0; i < 3; i++) OK(ms_products_time(engine, &found[i]));
    assert_int_equal(left(), before); /* streams, events and memory are given back */
    assert_string_not_equal(found[0].choice.key, found[1].choice.key);
    assert_string_equal(found[2].choice.key, "");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(found[i].choice.algorithm[4], 3);
        assert_true(found[i].us >= 0 && found[i].us < found[i].first_us);
        assert_true(found[i].first_us > 9e5);
    }
    assert_int_equal(candidate_of(engine, 8), 0); /* nothing is chosen yet */
    multiply(engine, 40);
    OK(ms_products_time(engine, &found[2]));
    assert_string_equal(
        found[2].choice.key,
        "40x16x32 bf16 to bf16, rows 32 16 16, batches 1 by 0 0 0, aligned 16 16 16");
    ms_engine_free(engine);
}

/* One product [4, 32] x [32, 16] of f32 whose numbers TF32 does not have: the first element. */
static float multiply_f32(bool tf32, ms_product_time *time)
{
    float numbers[4 * 16] = { 0 };
    ms_error error;
    ms_engine *engine = NULL;
    ms_engine_options options = { .own_device = &ms_device_cuda, .threads = 1, .tf32 = tf32 };
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    if (ms_engine_new(&options, &error, &engine)) fail_msg("%s", error.message);
    int64_t shapes[3][2] = { { 4, 32 }, { 32, 16 }, { 4, 16 } };
    ms_tensor *t[3];
    for (int i = 0; i < 3; i++) OK(ms_op_full(engine, MS_F32, 2, shapes[i], 1 + 0x1p-12, &t[i]));
    OK(ms_matmul_into(engine, t[0], t[1], NULL, t[2]));
    OK(ms_tensor_read(t[2], numbers, sizeof numbers));
    multiply(engine, 8);
    assert_int_equal(plan_of(engine, 8)->key.tf32, 0); /* bf16 */
    do OK(ms_products_time(engine, time));
    while (strncmp(time->choice.key, "4x", 2) != 0);
    for (int i = 0; i < 3; i++) ms_tensor_release(t[i]);
    ms_engine_free(engine);
    return numbers[0];
}

/* It is asked for f32 alone, and choices for one are not those for the other. */
static void test_tf32(void **state)
{
    (void)state;
    ms_product_time times[2];
    assert_true(multiply_f32(true, &times[1]) == 32);
    assert_true(multiply_f32(false, &times[0]) > 32);
    assert_string_not_equal(times[0].choice.key, times[1].choice.key);
    assert_non_null(strstr(times[1].choice.key, ", tf32"));
}

static void test_choices(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_product_time found;
    multiply(engine, 8);
    OK(ms_products_time(engine, &found));
    OK(ms_products_use(engine, &found.choice, 1, false));
    assert_int_equal(candidate_of(engine, 8), 3);
    /* In place of earlier ones; none. */
    ms_product_choice other = found.choice;
    other.algorithm[4] = 2;
    OK(ms_products_use(engine, &other, 1, false));
    assert_int_equal(candidate_of(engine, 8), 2);
    OK(ms_products_use(engine, NULL, 0, false));
    assert_int_equal(candidate_of(engine, 8), 0);
    ms_engine_free(engine);
    /* Before its plan is made. */
    engine = engine_with_log(&warnings);
    OK(ms_products_use(engine, &found.choice, 1, false));
    multiply(engine, 8);
    multiply(engine, 24);
    assert_int_equal(candidate_of(engine, 8), 3);
    assert_int_equal(candidate_of(engine, 24), 0);
    assert_int_equal(warnings, 0);
    ms_engine_free(engine);
}

/* Of damaged choices, and of one whose sums have no fixed order. */
static void test_refused(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_product_time found;
    multiply(engine, 8);
    OK(ms_products_time(engine, &found));
    ms_product_choice wrong[3] = { found.choice, found.choice, found.choice };
    wrong[0].algorithm[0]++;
    wrong[1].algorithm[4] = 99;
    wrong[2].algorithm[5] = MS_LT_REDUCTION_IN_PLACE;
    for (int i = 0; i < 3; i++) {
        OK(ms_products_use(engine, &wrong[i], 1, false));
        assert_int_equal(candidate_of(engine, 8), 0);
        assert_int_equal(warnings, i + 1);
        OK(ms_products_use(engine, &wrong[i], 1, true));
        assert_int_equal(warnings, i + 1);
    }
    multiply(engine, 8);
    OK(ms_engine_sync(engine));
    ms_engine_free(engine);
}

static void test_no_memory(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_product_time found;
    multiply(engine, 8);
    OK(ms_engine_sync(engine));
    unsigned before = left();
    fails("cuMemAlloc_v2", MS_CUDA_OUT_OF_MEMORY);
    OK(ms_products_time(engine, &found));
    assert_string_not_equal(found.choice.key, "");
    assert_true(found.us < 0);
    assert_int_equal(left(), before);
    OK(ms_products_time(engine, &found));
    assert_string_equal(found.choice.key, "");
    multiply(engine, 24);
    fails("cuEventCreate", 999);
    assert_int_equal(ms_products_time(engine, &found), MS_ERROR_IO);
    fails(NULL, 0);
    OK(ms_engine_sync(engine));
    assert_int_equal(left(), before);
    ms_engine_free(engine);
}

/* [batches, 8, 32] x [32, 16] plus a bias that begins at its element `first`: 32 + first + column,
 * which every dtype holds. */
static void add_bias(ms_engine *engine, ms_dtype dtype, int64_t batches, int64_t first)
{
    enum { ROWS = 8, K = 32, WIDTH = 16 };
    int64_t a_shape[3] = { batches, ROWS, K }, b_shape[3] = { 1, K, WIDTH },
            c_shape[3] = { batches, ROWS, WIDTH }, wide[1] = { WIDTH + 4 }, narrow[1] = { WIDTH },
            one[1] = { 1 };
    ms_tensor *a = NULL, *b = NULL, *c = NULL, *whole = NULL, *bias = NULL;
    float values[WIDTH + 4], found[2 * ROWS * WIDTH];
    uint16_t half[2 * ROWS * WIDTH];
    for (int i = 0; i < WIDTH + 4; i++) values[i] = (float)i;
    OK(ms_op_full(engine, dtype, 3, a_shape, 1.0, &a));
    OK(ms_op_full(engine, dtype, 3, b_shape, 1.0, &b));
    OK(ms_tensor_new(engine, dtype, 3, c_shape, &c));
    OK(ms_tensor_new(engine, MS_F32, 1, wide, &whole));
    OK(ms_tensor_write(whole, values, sizeof values));
    OK(ms_tensor_window(whole, 1, narrow, one, first, &bias));
    OK(ms_matmul_into(engine, a, b, bias, c));
    size_t count = (size_t)(batches * ROWS * WIDTH);
    if (dtype == MS_F32) OK(ms_tensor_read(c, found, count * sizeof *found));
    else OK(ms_tensor_read(c, half, count * sizeof *half));
    for (size_t i = 0; i < count; i++) {
        if (dtype == MS_BF16) {
            uint32_t bits = (uint32_t)half[i] << 16;
            memcpy(&found[i], &bits, sizeof bits);
        }
        assert_float_equal(found[i], (float)(K + first) + (float)(i % WIDTH), 0);
    }
    ms_tensor *all[] = { a, b, c, whole, bias };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) ms_tensor_release(all[i]);
}

/* A bias at any address, and one that the library does not add. */
static void test_bias(void **state)
{
    (void)state;
    int warnings = 0;
    for (int refuses = 0; refuses < 2; refuses++) {
        ms_product_time found;
        ms_engine *engine = engine_with_log(&warnings);
        if (refuses) setenv("MOONSHARD_STAND_IN_CUBLASLT_NO_BIAS", "1", 1);
        for (int64_t batches = 1; batches <= 2; batches++)
            for (int64_t first = 0; first < 3; first++) {
                add_bias(engine, MS_F32, batches, first);
                add_bias(engine, MS_BF16, batches, first);
            }
        assert_int_equal(plan_of(engine, 8)->adds_bias, !refuses);
        /* Timed like any other. */
        OK(ms_products_time(engine, &found));
        assert_int_equal(found.choice.algorithm[4], 3);
        OK(ms_products_use(engine, &found.choice, 1, false));
        add_bias(engine, MS_F32, 1, 1);
        add_bias(engine, MS_BF16, 2, 1);
        ms_engine_free(engine);
        unsetenv("MOONSHARD_STAND_IN_CUBLASLT_NO_BIAS");
    }
    assert_int_equal(warnings, 0);
}

/* --------------------------------------------------------- what products make beside */

/* How often two kernels of the layer ran. */
static struct counted {
    unsigned runs;
    stand_in_kernel *kernel;
} gelus, sums;
static void count_gelu(const void *arguments, const unsigned blocks[3], const unsigned threads[3],
                       unsigned shared_bytes)
{
    gelus.runs++;
    gelus.kernel(arguments, blocks, threads, shared_bytes);
}
static void count_sums(const void *arguments, const unsigned blocks[3], const unsigned threads[3],
                       unsigned shared_bytes)
{
    sums.runs++;
    sums.kernel(arguments, blocks, threads, shared_bytes);
}
static void count_kernel(struct counted *counted, const char *name, const char *bytes_name,
                         stand_in_kernel *counts)
{
    const ms_os *os = ms_os_posix();
    char why[256];
    void *library =
        os->library_load(os->user, getenv("MOONSHARD_STAND_IN_KERNELS"), why, sizeof why);
    if (!library) fail_msg("%s", why);
    void *kernel = os->library_symbol(os->user, library, name),
         *bytes = os->library_symbol(os->user, library, bytes_name);
    counted->kernel = (stand_in_kernel *)kernel;
    counted->runs = 0;
    ((stand_in_has_function *)stand_in("stand_in_has"))(name, counts, *(unsigned *)bytes);
}
static ms_engine *engine_that_counts(int *warnings, bool lacks)
{
    if (lacks) setenv("MOONSHARD_STAND_IN_CUBLASLT_NO_EXTRA", "1", 1);
    else unsetenv("MOONSHARD_STAND_IN_CUBLASLT_NO_EXTRA");
    ms_engine *engine = engine_with_log(warnings);
    count_kernel(&gelus, "activation", "activation_bytes", count_gelu);
    count_kernel(&sums, "linear_gradient", "linear_gradient_bytes", count_sums);
    return engine;
}

enum { ROWS = 8, IN = 24, WIDTH = 16 };

/* bf16 numbers of 1/8, the same for a seed; `elements` are more than the shape has. */
static ms_tensor *numbers(ms_engine *engine, uint32_t dims, int64_t first, int64_t second,
                          unsigned seed)
{
    int64_t shape[2] = { first, second };
    uint16_t values[ROWS * IN + IN * WIDTH];
    ms_tensor *made = NULL;
    size_t count = (size_t)(dims == 2 ? first * second : first);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1103515245u + 12345u;
        values[i] = ms_bf16_from_float((float)((int)(seed >> 16 & 15) - 8) / 8.0f);
    }
    OK(ms_tensor_new(engine, MS_BF16, dims, shape, &made));
    OK(ms_tensor_write(made, values, count * sizeof *values));
    return made;
}

/* A layer: what it takes, what it makes, and the values of that. The bias's gradient has a home,
 * which begins at element `home` of its memory. */
typedef struct layer {
    const ms_op *op;
    bool gelu, bias, record;
    int64_t home;
    ms_tensor *in[3], *g, *memory, *homes[3], *out[1], *results[3];
    uint16_t y[ROWS * WIDTH], sums[WIDTH], weight[IN * WIDTH];
} layer;

static void open_layer(ms_engine *engine, layer *l)
{
    bool turned = l->op == &ms_op_linear_t;
    int64_t width[1] = { WIDTH }, one[1] = { 1 };
    l->in[0] = numbers(engine, 2, ROWS, IN, 1);
    l->in[1] = numbers(engine, 2, turned ? IN : WIDTH, turned ? WIDTH : IN, 2);
    l->in[2] = l->bias ? numbers(engine, 1, WIDTH, 0, 3) : NULL;
    l->g = numbers(engine, 2, ROWS, WIDTH, 4);
    l->memory = numbers(engine, 1, WIDTH + 8, 0, 5);
    OK(ms_tensor_window(l->memory, 1, width, one, l->home, &l->homes[2]));
}

static void close_layer(ms_engine *engine, layer *l)
{
    for (int i = 0; i < 3; i++) {
        ms_tensor_release(l->in[i]);
        ms_tensor_release(l->homes[i]);
    }
    ms_tensor_release(l->g);
    ms_tensor_release(l->memory);
    OK(ms_engine_sync(engine));
}

static ms_tensor_info info_of(const ms_tensor *tensor)
{
    ms_tensor_info info = { .dtype = tensor->dtype, .dims = tensor->dims };
    memcpy(info.shape, tensor->shape, sizeof info.shape);
    return info;
}

static void go_back(ms_engine *engine, layer *l, const ms_op_call *call)
{
    uint32_t count = call->input_count;
    const bool needs[3] = { true, true, true };
    ms_tensor_info infos[3] = { info_of(l->in[0]), info_of(l->in[1]) }, made = info_of(l->out[0]);
    if (count > 2) infos[2] = info_of(l->in[2]);
    ms_op_gradient gradient = { .engine = engine,
                                .op = l->op,
                                .attributes = call->attributes,
                                .saved = call->saved,
                                .saved_count = call->saved_count,
                                .inputs = infos,
                                .input_count = count,
                                .outputs = &made,
                                .gradients = &l->g,
                                .output_count = 1,
                                .results = l->results,
                                .needs = needs,
                                .homes = l->homes,
                                .last = true };
    OK(l->op->backward(&gradient));
    if (count > 2) assert_ptr_equal(l->results[2], l->homes[2]);
}

/* Forward, and backward if `record`. Values are read if `reads`. */
static void step_layer(ms_engine *engine, layer *l, bool reads)
{
    ms_op_call call = { .engine = engine,
                        .op = l->op,
                        .attributes = { .linear.activation =
                                            l->gelu ? MS_ACTIVATION_GELU : MS_ACTIVATION_NONE },
                        .inputs = l->in,
                        .input_count = l->bias ? 3 : 2,
                        .outputs = l->out,
                        .output_count = 1,
                        .record = l->record };
    OK(ms_op_run(&call));
    if (l->record) go_back(engine, l, &call);
    ms_op_drop_saved(&call);
    ms_engine_drop_casts(engine);
    if (reads) OK(ms_tensor_read(l->out[0], l->y, sizeof l->y));
    if (reads && l->record) OK(ms_tensor_read(l->results[1], l->weight, sizeof l->weight));
    if (reads && l->record && l->bias) OK(ms_tensor_read(l->homes[2], l->sums, sizeof l->sums));
    for (int i = 0; i < 3; i++) ms_tensor_release(l->results[i]);
    ms_tensor_release(l->out[0]);
}

static void run_layer(ms_engine *engine, layer *l)
{
    open_layer(engine, l);
    step_layer(engine, l, true);
    close_layer(engine, l);
}

static const ms_product_plan *plan_with(ms_engine *engine, ms_gemm_extra extra)
{
    const ms_products *products = ms_engine_get(engine, MS_SLOT_PLANS);
    for (size_t i = 0; i < products->plans.capacity; i++) {
        const ms_product_plan *plan = products->plans.plans[i];
        if (plan && plan->key.shape.extra == extra) return plan;
    }
    return NULL;
}

/* The peak of the layer's memory on a device; `for_gpu` of sim. */
static uint64_t peak_of(const char *device, bool for_gpu, layer l)
{
    ms_error error;
    ms_engine *engine = NULL;
    ms_engine_options options = { .device = device, .threads = 1, .for_gpu = for_gpu };
    if (ms_engine_new(&options, &error, &engine)) fail_msg("%s", error.message);
    run_layer(engine, &l);
    uint64_t peak = ms_engine_memory(engine).peak;
    ms_engine_free(engine);
    return peak;
}

/* Gelu is made by the product, or by the kernel after it; with and without a gradient the bits are
 * the same, and the memory is as predicted, whatever the library has. */
static void test_gelu(void **state)
{
    (void)state;
    int warnings = 0;
    for (int i = 0; i < 8; i++) {
        bool lacks = i & 4;
        layer with = { .op = i & 1 ? &ms_op_linear_t : &ms_op_linear,
                       .gelu = true,
                       .bias = i & 2,
                       .record = true },
              without = with;
        without.record = false;
        ms_engine *engine = engine_that_counts(&warnings, lacks);
        run_layer(engine, &without);
        uint64_t peak_without = ms_engine_memory(engine).peak;
        run_layer(engine, &with);
        uint64_t peak_with = ms_engine_memory(engine).peak;
        assert_memory_equal(with.y, without.y, sizeof with.y);
        assert_int_equal(gelus.runs, lacks ? 2 : 0);
        assert_int_equal(sums.runs, 1); /* through gelu */
        assert_int_equal(plan_with(engine, MS_GEMM_GELU)->makes_extra, !lacks);
        ms_engine_free(engine);
        assert_true(peak_without == peak_of("sim", true, without));
        assert_true(peak_with == peak_of("sim", true, with));
        /* Elsewhere nothing is made beside. */
        assert_true(peak_of("cpu", true, without) == peak_of("sim", false, without));
        size_t wide_bias = with.bias ? WIDTH * sizeof(float) : 0; /* a CPU's is cast to f32 */
        assert_true(peak_of("cpu", true, without) + sizeof with.y <= peak_without + wide_bias);
    }
    unsetenv("MOONSHARD_STAND_IN_CUBLASLT_NO_EXTRA");
    assert_int_equal(warnings, 0);
}

/* The bias's gradient is made by the product that makes the weight's, or by the kernel: where the
 * library has no candidate, and where its home does not begin as the library takes it. */
static void test_sums(void **state)
{
    (void)state;
    int warnings = 0;
    for (int i = 0; i < 8; i++) {
        bool lacks = i & 2, apart = i & 4;
        layer l = { .op = i & 1 ? &ms_op_linear_t : &ms_op_linear,
                    .bias = true,
                    .record = true,
                    .home = apart ? 3 : 8 },
              plain = l;
        plain.bias = false;
        ms_engine *engine = engine_that_counts(&warnings, lacks);
        run_layer(engine, &l);
        assert_int_equal(sums.runs, lacks || apart ? 1 : 0);
        uint64_t peak = ms_engine_memory(engine).peak;
        run_layer(engine, &plain);
        assert_memory_equal(l.weight, plain.weight, sizeof l.weight);
        assert_int_equal(sums.runs, lacks || apart ? 1 : 0);
        ms_tensor *g = numbers(engine, 2, ROWS, WIDTH, 4);
        uint16_t rows[ROWS][WIDTH];
        OK(ms_tensor_read(g, rows, sizeof rows));
        for (int column = 0; column < WIDTH; column++) {
            float sum = 0;
            for (int row = 0; row < ROWS; row++) sum += ms_float_from_bf16(rows[row][column]);
            assert_int_equal(l.sums[column], ms_bf16_from_float(sum));
        }
        ms_tensor_release(g);
        ms_engine_free(engine);
        assert_true(peak == peak_of("sim", true, l));
    }
    unsetenv("MOONSHARD_STAND_IN_CUBLASLT_NO_EXTRA");
    assert_int_equal(warnings, 0);
}

/* Two layers with gelu between them: the gradient of what goes into gelu, [ROWS, HIDDEN], whose
 * column sums are the first bias's gradient, and the gradients of x and of the first weight. */
enum { HIDDEN = 16 };
typedef struct two_layers {
    uint16_t x[ROWS * IN], first[HIDDEN * IN], bias[HIDDEN];
} two_layers;

static void run_two_layers(ms_engine *engine, const ms_op *op, two_layers *out)
{
    bool turned = op == &ms_op_mlp_t;
    ms_tensor *y = NULL, *g = numbers(engine, 2, ROWS, WIDTH, 4), *results[5] = { NULL },
              *in[5] = { numbers(engine, 2, ROWS, IN, 1),
                         numbers(engine, 2, turned ? HIDDEN : WIDTH, turned ? WIDTH : HIDDEN, 2),
                         numbers(engine, 1, WIDTH, 0, 3),
                         numbers(engine, 2, turned ? IN : HIDDEN, turned ? HIDDEN : IN, 6),
                         numbers(engine, 1, HIDDEN, 0, 7) };
    const bool needs[5] = { true, true, true, true, true };
    ms_tensor_info infos[5];
    for (int i = 0; i < 5; i++) infos[i] = info_of(in[i]);
    ms_op_call call = { .engine = engine,
                        .op = op,
                        .inputs = in,
                        .input_count = 5,
                        .outputs = &y,
                        .output_count = 1,
                        .record = true };
    OK(ms_op_run(&call));
    ms_tensor_info made = info_of(y);
    ms_op_gradient gradient = { .engine = engine,
                                .op = op,
                                .saved = call.saved,
                                .saved_count = call.saved_count,
                                .inputs = infos,
                                .input_count = 5,
                                .outputs = &made,
                                .gradients = &g,
                                .output_count = 1,
                                .results = results,
                                .needs = needs,
                                .last = true };
    OK(op->backward(&gradient));
    ms_op_drop_saved(&call);
    OK(ms_tensor_read(results[0], out->x, sizeof out->x));
    OK(ms_tensor_read(results[3], out->first, sizeof out->first));
    OK(ms_tensor_read(results[4], out->bias, sizeof out->bias));
    for (int i = 0; i < 5; i++) {
        ms_tensor_release(in[i]);
        ms_tensor_release(results[i]);
    }
    ms_tensor_release(g);
    ms_tensor_release(y);
    OK(ms_engine_sync(engine));
}

/* Gradients of the two ways are sums of up to 16 products, of which one way rounds a factor to
 * bf16 once more. */
static void assert_close(const uint16_t *a, const uint16_t *b, size_t count)
{
    float most = 0;
    for (size_t i = 0; i < count; i++) most = fmaxf(most, fabsf(ms_float_from_bf16(a[i])));
    assert_true(most > 0);
    for (size_t i = 0; i < count; i++) {
        float away = fabsf(ms_float_from_bf16(a[i]) - ms_float_from_bf16(b[i]));
        assert_true(away <= most / 64);
    }
}

/* The gradient goes through gelu in the product that makes it, or in the kernel after it; in the
 * first case no kernel passes over it, since products sum the gradients of both biases. */
static void test_gelu_gradient(void **state)
{
    (void)state;
    int warnings = 0;
    for (int turned = 0; turned < 2; turned++) {
        two_layers found[2];
        for (int lacks = 0; lacks < 2; lacks++) {
            ms_engine *engine = engine_that_counts(&warnings, lacks);
            run_two_layers(engine, turned ? &ms_op_mlp_t : &ms_op_mlp, &found[lacks]);
            /* Backward makes gelu again for the second weight's gradient. */
            assert_int_equal(gelus.runs, lacks ? 2 : 1);
            assert_int_equal(sums.runs, lacks ? 3 : 0);
            assert_int_equal(plan_with(engine, MS_GEMM_GELU_GRADIENT)->makes_extra, !lacks);
            ms_engine_free(engine);
        }
        assert_close(found[0].x, found[1].x, ROWS * IN);
        assert_close(found[0].first, found[1].first, HIDDEN * IN);
        assert_close(found[0].bias, found[1].bias, HIDDEN);
    }
    unsetenv("MOONSHARD_STAND_IN_CUBLASLT_NO_EXTRA");
    assert_int_equal(warnings, 0);
}

/* Keys of choices say what is made beside; choices are made and followed as for any product. */
static void test_choices_of_extras(void **state)
{
    (void)state;
    int warnings = 0, gelu = 0, of_a = 0, of_b = 0, through = 0;
    two_layers both;
    ms_engine *engine = engine_that_counts(&warnings, false);
    layer layers[] = { { .op = &ms_op_linear, .gelu = true, .bias = true, .record = true },
                       { .op = &ms_op_linear, .bias = true, .record = true },
                       { .op = &ms_op_linear_t, .bias = true, .record = true } };
    ms_product_choice choices[32];
    size_t count = 0;
    for (int i = 0; i < 3; i++) run_layer(engine, &layers[i]);
    run_two_layers(engine, &ms_op_mlp, &both);
    for (ms_product_time found;; count++) {
        OK(ms_products_time(engine, &found));
        if (!*found.choice.key) break;
        assert_int_equal(found.choice.algorithm[4], 3);
        assert_true(count < 32);
        gelu += strstr(found.choice.key, "rows 24 24t 16 bias gelu, batches") != NULL;
        of_a += strstr(found.choice.key, " sum of a, batches") != NULL;
        of_b += strstr(found.choice.key, " sum of b, batches") != NULL;
        through += strstr(found.choice.key, " gelu gradient, batches") != NULL;
        choices[count] = found.choice;
    }
    assert_int_equal(gelu, 1);
    assert_int_equal(of_a, 2);
    assert_int_equal(of_b, 1);
    assert_int_equal(through, 1);
    OK(ms_products_use(engine, choices, count, false));
    for (ms_gemm_extra extra = MS_GEMM_GELU; extra <= MS_GEMM_GELU_GRADIENT; extra++)
        assert_int_equal(plan_with(engine, extra)->way->algorithm.data[4], 3);
    gelus.runs = sums.runs = 0;
    for (int i = 1; i < 3; i++) run_layer(engine, &layers[i]);
    assert_int_equal(sums.runs, 0);
    assert_int_equal(warnings, 0);
    ms_engine_free(engine);
}

/* ----------------------------------------------------------------- 8 bits */

/* x w^T in fp8, [32, 48] x [64, 48]; the answer of the call. */
static ms_status multiply_in_fp8(ms_engine *engine, ms_fp8 mode)
{
    ms_tensor *x = ones(engine, 32, 48), *w = ones(engine, 64, 48), *y = NULL;
    ms_engine_set_autocast(engine, MS_BF16);
    ms_engine_set_fp8(engine, mode);
    ms_status status =
        ms_op_apply(engine, &ms_op_linear, NULL, false, (ms_tensor *[]){ x, w }, 2, &y, 1);
    ms_engine_set_fp8(engine, MS_FP8_OFF);
    ms_engine_set_autocast(engine, MS_F32);
    uint16_t values[32 * 64];
    if (!status) {
        OK(ms_tensor_read(y, values, sizeof values));
        for (int i = 0; i < 32 * 64; i++) assert_true(ms_float_from_bf16(values[i]) == 48);
    }
    ms_tensor_release(x);
    ms_tensor_release(w);
    ms_tensor_release(y);
    ms_engine_drop_casts(engine);
    return status;
}

/* Codes are multiplied by the library; algorithms are chosen for them as for others, by a key that
 * names their formats. */
static void test_fp8(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_product_time found;
    OK(multiply_in_fp8(engine, MS_FP8_ON));
    const ms_product_plan *plan = plan_of(engine, 32);
    assert_int_equal(plan->key.shape.in, MS_U8);
    assert_true(plan->key.shape.b_transposed && !plan->key.shape.a_transposed);
    OK(ms_products_time(engine, &found));
    assert_non_null(strstr(found.choice.key, "32x64x48 e4m3 e4m3 to bf16, rows 48 48t 64, "));
    OK(ms_products_use(engine, &found.choice, 1, false));
    assert_int_equal(candidate_of(engine, 32), 3);
    OK(multiply_in_fp8(engine, MS_FP8_ON));
    ms_engine_free(engine);
    assert_int_equal(warnings, 0);
}

/* How many numbers the kernel that finds greatest sizes has read. */
static int64_t most_read;
static stand_in_kernel *most_kernel;
static void count_most(const void *arguments, const unsigned blocks[3], const unsigned threads[3],
                       unsigned shared_bytes)
{
    const ms_cuda_fp8_encode_call *call = arguments;
    most_read += call->e.rows * call->e.columns;
    most_kernel(arguments, blocks, threads, shared_bytes);
}

/* A layer in fp8 after a norm, forward and backward; of gelu, with a bias. copied: between the two
 * there is a copy, of which nothing is known. Answers what was read for greatest sizes. */
static int64_t read_for_most(ms_engine *engine, int64_t rows, bool gelu, bool bias, bool copied)
{
    ms_tensor *x = ones(engine, rows, 48), *y = NULL, *copy = NULL;
    layer l = { .op = &ms_op_linear, .gelu = gelu, .bias = bias, .record = true };
    l.in[1] = ones(engine, 32, 48);
    l.in[2] = l.homes[2] = bias ? numbers(engine, 1, 32, 0, 3) : NULL;
    l.g = ones(engine, rows, 32);
    ms_engine_set_autocast(engine, MS_BF16);
    ms_engine_set_fp8(engine, MS_FP8_ON);
    OK(ms_op_apply(engine, &ms_op_rms_norm, NULL, false, &x, 1, &y, 1));
    OK(ms_copy_new(engine, y, &copy));
    l.in[0] = copied ? copy : y;
    OK(ms_engine_sync(engine));
    most_read = 0;
    step_layer(engine, &l, false);
    OK(ms_engine_sync(engine));
    ms_engine_set_fp8(engine, MS_FP8_OFF);
    ms_engine_set_autocast(engine, MS_F32);
    ms_tensor *all[] = { x, y, copy, l.in[1], l.in[2], l.g };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) ms_tensor_release(all[i]);
    return most_read;
}

/* The kernel that finds greatest sizes reads what no kernel of ours has written or passed over, and
 * the numbers that were given only where these are many. */
static void test_greatest_sizes(void **state)
{
    (void)state;
    int warnings = 0;
    struct counted most;
    ms_engine *engine = engine_with_log(&warnings);
    count_kernel(&most, "fp8_most", "fp8_most_bytes", count_most);
    most_kernel = most.kernel;
    const int64_t weight = 32 * 48;
    for (int64_t rows = 64; rows <= 1600; rows *= 25) {
        int64_t x = rows * 48, g = rows * 32, given = rows > 528 ? rows : 0;
        assert_int_equal(read_for_most(engine, rows, false, false, false), weight + g + given);
        assert_int_equal(read_for_most(engine, rows, false, false, true), weight + g + x);
        assert_int_equal(read_for_most(engine, rows, false, true, false), weight + given);
        assert_int_equal(read_for_most(engine, rows, true, false, false), weight + given);
        assert_int_equal(read_for_most(engine, rows, true, true, true), weight + x);
    }
    ms_engine_free(engine);
    assert_int_equal(warnings, 0);
}

/* A GPU before 8.9 multiplies them where it is asked to emulate. */
static void test_fp8_of_an_older_gpu(void **state)
{
    (void)state;
    int warnings = 0;
    setenv("MOONSHARD_STAND_IN_MAJOR", "8", 1);
    ms_engine *engine = engine_with_log(&warnings);
    assert_int_equal(multiply_in_fp8(engine, MS_FP8_ON), MS_ERROR_UNSUPPORTED);
    assert_string_equal(ms_engine_error(engine)->message,
                        "this GPU has compute capability 8.0, and products in fp8 need 8.9: give "
                        "emulate = true with dtype \"fp8\", or use bf16");
    OK(multiply_in_fp8(engine, MS_FP8_EMULATED));
    assert_int_equal(plan_of(engine, 32)->key.shape.in, MS_BF16);
    ms_engine_free(engine);
    unsetenv("MOONSHARD_STAND_IN_MAJOR");
}

/* In a graph: the bits of a step are those of one that is carried out task by task. */
static void test_extras_repeat(void **state)
{
    (void)state;
    int warnings = 0;
    for (int lacks = 0; lacks < 2; lacks++) {
        ms_engine *engine = engine_that_counts(&warnings, lacks);
        layer layers[2] = { { .op = &ms_op_linear, .gelu = true, .bias = true, .record = true },
                            { .op = &ms_op_linear_t, .bias = true, .record = true } },
              alone[2];
        for (int i = 0; i < 2; i++) open_layer(engine, &layers[i]);
        OK(ms_engine_sync(engine));
        assert_true(ms_engine_set_repeating(engine, true));
        for (int step = 0; step < 16; step++) {
            for (int i = 0; i < 4; i++) step_layer(engine, &layers[i % 2], step == 15 && i > 1);
            ms_engine_set_repeating(engine, false);
            ms_engine_set_repeating(engine, true);
        }
        ms_repeats repeats;
        ms_engine_repeats(engine, &repeats);
        assert_true(repeats.replayed > repeats.alone);
        ms_engine_set_repeating(engine, false);
        for (int i = 0; i < 2; i++) {
            alone[i] = layers[i];
            run_layer(engine, &alone[i]);
            assert_memory_equal(layers[i].y, alone[i].y, sizeof alone[i].y);
            assert_memory_equal(layers[i].weight, alone[i].weight, sizeof alone[i].weight);
            assert_memory_equal(layers[i].sums, alone[i].sums, sizeof alone[i].sums);
            close_layer(engine, &layers[i]);
        }
        ms_engine_free(engine);
    }
    unsetenv("MOONSHARD_STAND_IN_CUBLASLT_NO_EXTRA");
}

/* How many multiprocessors the next product is planned for. */
static uint32_t limit_of(ms_engine *engine)
{
    const ms_products *products = ms_engine_get(engine, MS_SLOT_PLANS);
    size_t count = products->plans.count;
    int64_t m = 100 + (int64_t)count; /* a shape that has no plan yet */
    multiply(engine, m);
    assert_int_equal(products->plans.count, count + 1);
    return plan_of(engine, m)->key.multiprocessors;
}

/* Beside work of another stream that keeps some of them, until a stream is after it; the same in
 * every run, whatever has been carried out. The GPU has two. */
static void test_limit(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_stream *first = ms_engine_current(engine), *side = side_of(engine);
    multiply(engine, 8);
    assert_int_equal(limit_of(engine), 0);
    ms_engine_set_current(engine, side);
    multiply(engine, 8);
    ms_stream_take(side, 16);
    assert_int_equal(limit_of(engine), 0); /* not beside its own stream's */
    ms_engine_set_current(engine, first);
    assert_int_equal(limit_of(engine), 1);
    OK(ms_engine_sync(engine));
    assert_int_equal(limit_of(engine), 1);
    OK(ms_stream_wait(first, ms_stream_last(side)));
    assert_int_equal(limit_of(engine), 0);
    ms_engine_set_current(engine, side);
    multiply(engine, 8);
    ms_engine_set_current(engine, first);
    assert_int_equal(limit_of(engine), 0); /* its later work keeps none */
    ms_engine_free(engine);
}

static void test_other_devices(void **state)
{
    (void)state;
    ms_error error;
    ms_engine *engine = NULL;
    ms_engine_options options = { .device = "cpu", .threads = 1 };
    ms_product_choice choice = { .key = "x" };
    ms_product_time found;
    OK(ms_engine_new(&options, &error, &engine));
    multiply(engine, 8);
    OK(ms_products_use(engine, &choice, 1, false));
    OK(ms_products_time(engine, &found));
    assert_string_equal(found.choice.key, "");
    ms_engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_times_each_once),
        cmocka_unit_test(test_tf32),
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_gelu_gradient),
        cmocka_unit_test(test_choices_of_extras),
        cmocka_unit_test(test_fp8),
        cmocka_unit_test(test_greatest_sizes),
        cmocka_unit_test(test_fp8_of_an_older_gpu),
        cmocka_unit_test(test_extras_repeat),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_other_devices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
