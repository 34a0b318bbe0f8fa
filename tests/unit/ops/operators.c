/* operators.c: requirements for every operator, checked with one table of all operators: it touches
 * only memory that its tasks declare, forward and backward (poison.h), makes the same decisions
 * about memory without data, and survives the failure of any allocation without a leak. A new
 * operator without a row here fails the first test. ctest: late cuda */
#include "fault_os.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "exec/poison.h"
#include "late_device.h"
#include "moonshard/grad.h"
#include "tensor/op.h"
#include "ops/values.h"

/* Inputs: f [4,6]  g [6,5]  v [6]  w [5]  s []  h [2,4,8,16]  k [2,2,8,16], all f32;  i index [4,6]
 * of 0..3 along dimension 0  j ids [4] b bool [4,6]  o [1] f32  l f32 [24]  n f32 (positive) [4,6]
 * t [5,6]  p u8 [3,8]  c [5,4,3,3]  - absent. A capital letter after them: I in place. */
typedef struct row {
    const char *op, *inputs;
    uint32_t outputs;
    ms_attributes attributes;
} row;

#define NONE                 \
    {                        \
        .cast = {.kind = 0 } \
    }

static const int64_t parts[] = { 1, 3 };

static const row rows[] = {
    { "neg", "f", 1, NONE },
    { "exp", "f", 1, NONE },
    { "log", "n", 1, NONE },
    { "sqrt", "n", 1, NONE },
    { "rsqrt", "n", 1, NONE },
    { "square", "f", 1, NONE },
    { "abs", "f", 1, NONE },
    { "sign", "f", 1, NONE },
    { "relu", "f", 1, NONE },
    { "gelu", "f", 1, NONE },
    { "gelu_erf", "f", 1, NONE },
    { "silu", "f", 1, NONE },
    { "tanh", "f", 1, NONE },
    { "sigmoid", "f", 1, NONE },
    { "sin", "f", 1, NONE },
    { "cos", "f", 1, NONE },
    { "floor", "f", 1, NONE },
    { "ceil", "f", 1, NONE },
    { "round", "f", 1, NONE },
    { "pow", "n", 1, { .scalar = { .value = 1.5 } } },
    { "clamp",
      "f",
      1,
      { .scalar = { .value = -0.5, .high = 0.5, .has_low = true, .has_high = true } } },
    { "is_finite", "f", 1, NONE },
    { "add_scalar", "f", 1, { .scalar = { .value = 2 } } },
    { "mul_scalar", "f", 1, { .scalar = { .value = 2 } } },
    { "div_scalar", "f", 1, { .scalar = { .value = 2 } } },
    { "rsub_scalar", "f", 1, { .scalar = { .value = 2 } } },
    { "rdiv_scalar", "n", 1, { .scalar = { .value = 2 } } },
    { "maximum_scalar", "f", 1, { .scalar = { .value = 0.1 } } },
    { "minimum_scalar", "f", 1, { .scalar = { .value = 0.1 } } },
    { "eq_scalar", "f", 1, NONE },
    { "ne_scalar", "f", 1, NONE },
    { "lt_scalar", "f", 1, NONE },
    { "le_scalar", "f", 1, NONE },
    { "gt_scalar", "f", 1, NONE },
    { "ge_scalar", "f", 1, NONE },
    { "add", "fv", 1, NONE },
    { "add", "fvI", 1, NONE },
    { "sub", "fn", 1, NONE },
    { "mul", "fv", 1, NONE },
    { "mul", "fnI", 1, NONE },
    { "div", "fn", 1, NONE },
    { "maximum", "fn", 1, NONE },
    { "minimum", "fn", 1, NONE },
    { "swiglu", "fn", 1, NONE },
    { "eq", "fn", 1, NONE },
    { "ne", "fn", 1, NONE },
    { "lt", "fn", 1, NONE },
    { "le", "fn", 1, NONE },
    { "gt", "fn", 1, NONE },
    { "ge", "fn", 1, NONE },
    { "lerp", "fnv", 1, NONE },
    { "addcmul", "fnn", 1, NONE },
    { "addcdiv", "fnn", 1, NONE },
    { "where", "bfn", 1, NONE },
    { "masked_fill", "fb", 1, { .scalar = { .value = 3 } } },
    { "clone", "f", 1, NONE },
    { "contiguous", "f", 1, NONE },
    { "cast", "f", 1, { .cast = { .dtype = MS_BF16 } } },
    { "copy", "fvI", 1, NONE },
    { "fill", "fI", 1, { .scalar = { .value = 3 } } },
    { "cat", "fnf", 1, NONE },
    { "stack", "fn", 1, NONE },
    { "view", "f", 1, { .shape = { .dims = 1, .sizes = { 24 } } } },
    { "reshape", "f", 1, { .shape = { .dims = 2, .sizes = { 6, -1 } } } },
    { "narrow", "f", 1, { .dim = { .a = 1, .start = 2, .length = 3 } } },
    { "select", "f", 1, { .dim = { .a = 0, .start = 1 } } },
    { "split", "f", 2, { .split = { .sizes = parts, .count = 2, .dim = 0 } } },
    { "transpose", "f", 1, { .dim = { .a = 0, .b = 1 } } },
    { "permute", "f", 1, { .shape = { .dims = 2, .sizes = { 1, 0 } } } },
    { "expand", "v", 1, { .shape = { .dims = 2, .sizes = { 3, 6 } } } },
    { "squeeze", "o", 1, { .dim = { .a = 0 } } },
    { "unsqueeze", "f", 1, { .dim = { .a = 1 } } },
    { "sum", "f", 1, { .reduce = { .dim = 0 } } },
    { "sum", "f", 1, { .reduce = { .all = true } } },
    { "mean", "f", 1, { .reduce = { .dim = 1 } } },
    { "max", "f", 1, { .reduce = { .dim = 1 } } },
    { "min", "f", 1, { .reduce = { .all = true } } },
    { "norm", "f", 1, { .reduce = { .all = true, .p = 2 } } },
    { "any", "b", 1, NONE },
    { "every", "b", 1, NONE },
    { "argmax", "f", 1, { .reduce = { .dim = 1 } } },
    { "cumsum", "f", 1, { .dim = { .a = 1 } } },
    { "dot", "vv", 1, NONE },
    { "histogram", "f", 1, { .histogram = { .low = -1, .high = 1, .bins = 4 } } },
    { "quantile", "f", 1, { .scalar = { .value = 0.3 } } },
    { "topk", "f", 2, { .top = { .k = 3, .dim = 1, .largest = true } } },
    { "above", "ls", 3, { .dim = { .length = 8 } } },
    { "gather", "fi", 1, NONE },
    { "index_select", "fj", 1, NONE },
    { "scatter", "fin", 1, NONE },
    { "scatter_add", "fin", 1, NONE },
    { "orthonormalize", "gI", 1, NONE },
    { "codec_encode",
      "f",
      2,
      { .codec = { .codec = { .kind = MS_CODEC_INT4, .block = 8, .stochastic = true } } } },
    { "codec_decode",
      "p",
      1,
      { .codec = { .codec = { .kind = MS_CODEC_INT8, .block = 8 }, .n = 4 } } },
    { "codec_decode_sum",
      "p",
      1,
      { .codec = { .codec = { .kind = MS_CODEC_INT8, .block = 8 }, .n = 4 } } },
    { "matmul", "fg", 1, NONE },
    { "linear", "ftw", 1, NONE },
    { "linear", "ftw", 1, { .linear = { .activation = MS_ACTIVATION_GELU } } },
    { "linear_t", "fgw", 1, NONE },
    { "mlp", "fgvtw", 1, NONE },
    { "mlp", "fg-t", 1, NONE },
    { "mlp_t", "ftvgw", 1, NONE },
    { "conv2d", "hcw", 1, { .window = { .stride = { 2, 1 }, .padding = { 1, 1 } } } },
    { "conv2d", "hc", 1, NONE },
    { "max_pool2d", "h", 1, { .window = { .kernel = { 3, 2 }, .stride = { 2, 2 } } } },
    { "avg_pool2d", "h", 1, { .window = { .kernel = { 3, 2 }, .padding = { 1, 1 } } } },
    { "layer_norm", "fvv", 1, { .norm = { .eps = 1e-5 } } },
    { "rms_norm", "fv", 1, { .norm = { .eps = 1e-5 } } },
    { "add_layer_norm", "fnvv", 2, { .norm = { .eps = 1e-5 } } },
    { "add_rms_norm", "fnv", 2, { .norm = { .eps = 1e-5 } } },
    { "softmax", "f", 1, { .dim = { .a = 1 } } },
    { "log_softmax", "f", 1, { .dim = { .a = 0 } } },
    { "cross_entropy", "fj", 1, { .loss = { .ignore_index = -100 } } },
    { "mse_loss", "fn", 1, NONE },
    { "linear_cross_entropy", "ftj", 1, { .loss = { .ignore_index = -100, .chunk = 3 } } },
    { "attention", "hkk", 1, { .attention = { .causal = true } } },
    { "rotary", "h", 1, { .rotary = { .base = 10000 } } },
    { "embedding", "jf", 1, NONE },
    { "uniform", "fI", 1, { .random = { .a = 0, .b = 1 } } },
    { "normal", "fI", 1, { .random = { .a = 0, .b = 1 } } },
    { "randint", "iI", 1, { .random = { .a = 0, .b = 4 } } },
    { "dropout", "f", 1, { .random = { .a = 0.3 } } },
};

enum { ROWS = sizeof rows / sizeof *rows, INPUTS = 5, OUTPUTS = 3 };

/* ------------------------------------------------------------------- inputs */

static float number(int64_t i, bool positive)
{
    float value = (float)((i * 7919 + 13) % 101) / 50.0f - 1.0f;
    return positive ? fabsf(value) + 0.3f : value;
}

static ms_status input(ms_engine *engine, char kind, ms_tensor **out)
{
    static const struct {
        char kind;
        uint32_t dims;
        int64_t shape[4];
    } shapes[] = {
        { 'f', 2, { 4, 6 } },        { 'g', 2, { 6, 5 } }, { 'v', 1, { 6 } },
        { 'w', 1, { 5 } },           { 's', 0, { 0 } },    { 'h', 4, { 2, 4, 8, 16 } },
        { 'k', 4, { 2, 2, 8, 16 } }, { 'i', 2, { 4, 6 } }, { 'j', 1, { 4 } },
        { 'b', 2, { 4, 6 } },        { 'o', 1, { 1 } },    { 'l', 1, { 24 } },
        { 'n', 2, { 4, 6 } },        { 't', 2, { 5, 6 } }, { 'p', 2, { 3, 8 } },
        { 'c', 4, { 5, 4, 3, 3 } },
    };
    size_t at = 0;
    while (shapes[at].kind != kind) at++;
    ms_dtype dtype = MS_F32;
    if (kind == 'i' || kind == 'j') dtype = MS_I64;
    else if (kind == 'b') dtype = MS_BOOL;
    else if (kind == 'p') dtype = MS_U8;
    ms_status status = ms_tensor_new(engine, dtype, shapes[at].dims, shapes[at].shape, out);
    if (status) return status;
    int64_t count = ms_tensor_count(*out);
    int64_t values[2048];
    for (int64_t i = 0; i < count; i++) {
        if (dtype == MS_I64) values[i] = i % 4;
        else if (dtype == MS_BOOL || dtype == MS_U8) ((uint8_t *)values)[i] = i % 3 == 0;
        else ((float *)values)[i] = number(i + kind, kind == 'n');
    }
    status = ms_tensor_write(*out, values, ms_tensor_bytes(*out));
    if (status) {
        ms_tensor_release(*out);
        *out = NULL;
    }
    return status;
}

/* ------------------------------------------------------------------ running */

static ms_status add_hash(ms_tensor *tensor, uint64_t *hash)
{
    char values[16384];
    if (!tensor) return MS_OK;
    ms_status status = ms_tensor_read(tensor, values, ms_tensor_bytes(tensor));
    if (!status) *hash = ms_hash(values, ms_tensor_bytes(tensor), *hash);
    return status;
}

/* Gradients of ones for all float outputs back to the float inputs. */
static ms_status go_back(ms_engine *engine, ms_tensor **outputs, uint32_t count, uint64_t *hash,
                         ms_tensor **inputs, uint32_t input_count)
{
    ms_tensor *roots[OUTPUTS], *ones[OUTPUTS] = { NULL };
    uint32_t used = 0;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        if (!ms_tensor_requires_grad(outputs[i])) continue;
        roots[used] = outputs[i];
        status = ms_op_full(engine, ms_tensor_dtype(outputs[i]), ms_tensor_dims(outputs[i]),
                            ms_tensor_shape(outputs[i]), 1, &ones[used]);
        if (!status) used++;
    }
    if (!status && used) status = ms_backward(engine, roots, ones, used, false);
    for (uint32_t i = 0; i < used; i++) ms_tensor_release(ones[i]);
    for (uint32_t i = 0; i < input_count && !status; i++)
        status = add_hash(inputs[i] ? ms_tensor_grad(inputs[i]) : NULL, hash);
    return status;
}

static bool loses_gradient(const char *op)
{
    return (ms_op_find(op)->flags & MS_OP_LOSES_GRAD) != 0;
}

/* One row, forward and backward; *hash of all results. It releases everything, also after an
 * error. */
static ms_status run_row(ms_engine *engine, const row *r, uint64_t *hash)
{
    ms_tensor *inputs[INPUTS] = { NULL }, *outputs[OUTPUTS] = { NULL };
    uint32_t count = 0;
    bool in_place = false;
    ms_status status = MS_OK;
    for (const char *kind = r->inputs; *kind && !status; kind++) {
        if (*kind == 'I') {
            in_place = true;
            continue;
        }
        if (*kind == '-') {
            count++;
            continue;
        }
        status = input(engine, *kind, &inputs[count]);
        /* In place, the first operand must not be a leaf that requires a gradient; the others may
         * require one, unless the operator does not support it. */
        if (!status && ms_dtype_is_float(ms_tensor_dtype(inputs[count]))
            && !(count == 0 && strchr(r->inputs, 'I')) && !loses_gradient(r->op))
            status = ms_tensor_set_requires_grad(inputs[count], true);
        count++;
    }
    if (!status)
        status = ms_apply(engine, ms_op_find(r->op), &r->attributes, in_place, inputs, count,
                          outputs, r->outputs);
    for (uint32_t i = 0; i < r->outputs && !status; i++) status = add_hash(outputs[i], hash);
    if (!status) status = go_back(engine, outputs, r->outputs, hash, inputs, count);
    for (uint32_t i = 0; i < OUTPUTS; i++) ms_tensor_release(outputs[i]);
    for (uint32_t i = 0; i < INPUTS; i++) ms_tensor_release(inputs[i]);
    return status;
}

static ms_engine *make_engine(const ms_os *os, const char *device)
{
    ms_engine_options options = { .os = os,
                                  .own_device = late_device(device),
                                  .device = device,
                                  .threads = 2,
                                  .strict = true,
                                  .for_gpu = device_is_cuda(),
                                  .memory_bytes = 256 << 20,
                                  .cpu = getenv("MOONSHARD_CPU") };
    ms_engine *engine = NULL;
    return ms_engine_new(&options, NULL, &engine) ? NULL : engine;
}

/* -------------------------------------------------------------------- tests */

static void every_operator_has_a_row(void **state)
{
    (void)state;
    for (uint32_t i = 0; ms_op_at(i); i++) {
        bool found = false;
        for (size_t r = 0; r < ROWS; r++) found |= strcmp(rows[r].op, ms_op_name(ms_op_at(i))) == 0;
        if (!found) fail_msg("operator %s has no row in this test", ms_op_name(ms_op_at(i)));
    }
}

static void tasks_touch_only_what_they_declare(void **state)
{
    (void)state;
    for (size_t r = 0; r < ROWS; r++) {
        uint64_t plain = 0, poisoned = 0;
        ms_engine *engine = make_engine(NULL, "cpu");
        ms_status status = run_row(engine, &rows[r], &plain);
        if (status) fail_msg("%s: %s", rows[r].op, ms_engine_error(engine)->message);
        ms_engine_set_poison(engine, true);
        status = run_row(engine, &rows[r], &poisoned);
        if (status) fail_msg("%s, poisoned: %s", rows[r].op, ms_engine_error(engine)->message);
        if (plain != poisoned)
            fail_msg("%s gives other values when memory that it does not declare is poisoned",
                     rows[r].op);
        assert_int_equal(ms_engine_memory(engine).live, 0);
        ms_engine_free(engine);
    }
}

static void memory_is_the_same_without_data(void **state)
{
    (void)state;
    for (size_t r = 0; r < ROWS; r++) {
        uint64_t hash = 0, peaks[2];
        for (int sim = 0; sim < 2; sim++) {
            ms_engine *engine = make_engine(NULL, sim ? "sim" : "cpu");
            ms_status status = run_row(engine, &rows[r], &hash);
            if (status) fail_msg("%s: %s", rows[r].op, ms_engine_error(engine)->message);
            peaks[sim] = ms_engine_memory(engine).peak;
            ms_engine_free(engine);
        }
        if (peaks[0] != peaks[1])
            fail_msg("%s: peak %llu with data, %llu without", rows[r].op,
                     (unsigned long long)peaks[0], (unsigned long long)peaks[1]);
    }
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    for (size_t r = 0; r < ROWS; r++)
        for (long n = 1;; n++) {
            fault_os fault;
            fault_os_init(&fault);
            ms_engine *engine = make_engine(&fault.table, "cpu");
            assert_non_null(engine);
            uint64_t hash = 0, live = ms_engine_memory(engine).live;
            atomic_store(&fault.fail_at, atomic_load(&fault.calls) + n);
            long limit = atomic_load(&fault.fail_at);
            ms_status status = run_row(engine, &rows[r], &hash);
            bool reached = atomic_load(&fault.calls) >= limit;
            atomic_store(&fault.fail_at, 0);
            if (reached && status != MS_ERROR_MEMORY && status != MS_OK)
                fail_msg("%s, allocation %ld: %s", rows[r].op, n, ms_engine_error(engine)->message);
            if (!reached && status)
                fail_msg("%s: %s", rows[r].op, ms_engine_error(engine)->message);
            if (ms_engine_memory(engine).live != live)
                fail_msg("%s, allocation %ld: tensor memory is left behind", rows[r].op, n);
            /* The engine still works: the same row now succeeds. */
            ms_engine_step_end(engine, 0);
            status = run_row(engine, &rows[r], &hash);
            if (status)
                fail_msg("%s, after a failure of allocation %ld: %s", rows[r].op, n,
                         ms_engine_error(engine)->message);
            ms_engine_free(engine);
            if (atomic_load(&fault.live) != 0)
                fail_msg("%s, allocation %ld: %ld blocks leak", rows[r].op, n,
                         atomic_load(&fault.live));
            if (!reached) break;
            assert_true(n < 200);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operator_has_a_row),
        cmocka_unit_test(tasks_touch_only_what_they_declare),
        cmocka_unit_test(memory_is_the_same_without_data),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
