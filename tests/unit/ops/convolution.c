/* convolution.c: conv2d against its definition: strides, paddings, dilations, groups, dtypes, and
 * shapes that are cut into several blocks, parts of channels and partial sums.
 * ctest: each-isa poisoned late cuda */
#include "reference.h"

enum { X, WEIGHT, BIAS };

#define OPERANDS(...) \
    (ms_tensor *[]) { __VA_ARGS__ }

/* The definition, element by element. */
static void conv_reference(const check *c)
{
    const int64_t *x = c->in[X].shape, *w = c->in[WEIGHT].shape, *y = c->out[0].shape;
    int64_t groups = c->attributes.window.groups ? c->attributes.window.groups : 1;
    int64_t at[6] = { 0 }, stride[2], dilation[2], padding[2];
    for (int d = 0; d < 2; d++) {
        stride[d] = c->attributes.window.stride[d] ? c->attributes.window.stride[d] : 1;
        dilation[d] = c->attributes.window.dilation[d] ? c->attributes.window.dilation[d] : 1;
        padding[d] = c->attributes.window.padding[d];
    }
    size_t count = count_of(&c->out[0]);
    for (size_t i = 0; i < count; i++) {
        at[3] = (int64_t)i % y[3];
        at[2] = (int64_t)i / y[3] % y[2];
        at[1] = (int64_t)i / (y[2] * y[3]) % y[1];
        at[0] = (int64_t)i / (y[1] * y[2] * y[3]);
        double sum = c->in[BIAS].absent ? 0 : c->in[BIAS].values[at[1]];
        int64_t first = at[1] / (w[0] / groups) * w[1];
        for (int64_t channel = 0; channel < w[1]; channel++)
            for (int64_t a = 0; a < w[2]; a++)
                for (int64_t b = 0; b < w[3]; b++) {
                    int64_t row = at[2] * stride[0] - padding[0] + a * dilation[0],
                            column = at[3] * stride[1] - padding[1] + b * dilation[1];
                    if (row < 0 || row >= x[2] || column < 0 || column >= x[3]) continue;
                    sum += c->in[WEIGHT].values[((at[1] * w[1] + channel) * w[2] + a) * w[3] + b]
                           * c->in[X].values[((at[0] * x[1] + first + channel) * x[2] + row) * x[3]
                                             + column];
                }
        c->out[0].values[i] = sum;
    }
}

/* Sizes of a call; what is left out is 1, padding 0. */
typedef struct sizes {
    int64_t images, channels, rows, columns, results, kernel[2];
    int32_t stride[2], padding[2], dilation[2], groups;
} sizes;

static check check_of(const sizes *s, ms_dtype dtype, int layout, bool bias)
{
    int64_t groups = s->groups ? s->groups : 1, out[2], in[2] = { s->rows, s->columns };
    check c = { .op = &ms_op_conv2d, .ins = 3, .outs = 1, .reference = conv_reference };
    for (int d = 0; d < 2; d++) {
        int64_t dilation = s->dilation[d] ? s->dilation[d] : 1,
                stride = s->stride[d] ? s->stride[d] : 1;
        out[d] = (in[d] + 2 * s->padding[d] - dilation * (s->kernel[d] - 1) - 1) / stride + 1;
        c.attributes.window.stride[d] = s->stride[d];
        c.attributes.window.padding[d] = s->padding[d];
        c.attributes.window.dilation[d] = s->dilation[d];
    }
    c.attributes.window.groups = s->groups;
    c.in[X] = (operand){ .dtype = dtype,
                         .dims = 4,
                         .shape = { s->images, s->channels, s->rows, s->columns },
                         .layout = layout };
    c.in[WEIGHT] =
        (operand){ .dtype = dtype,
                   .dims = 4,
                   .shape = { s->results, s->channels / groups, s->kernel[0], s->kernel[1] },
                   .layout = layout };
    c.in[BIAS] = (operand){ .dtype = dtype, .dims = 1, .shape = { s->results }, .absent = !bias };
    c.out[0] = (operand){ .dtype = dtype,
                          .dims = 4,
                          .shape = { s->images, s->results, out[0], out[1] },
                          .layout = layout };
    return c;
}

static void run(sizes s, ms_dtype dtype, int layout, bool bias, ms_dtype autocast)
{
    check c = check_of(&s, dtype, layout, bias);
    set_autocast(&c, autocast);
    /* Operands are rounded to bf16, and some sums have few terms. */
    if (autocast == MS_BF16) c.tolerance = 8e-3;
    run_check(&c);
}

static void test_strides_paddings_dilations_groups(void **state)
{
    (void)state;
    static const sizes cases[] = {
        { 2, 1, 5, 6, 1, { 3, 3 }, .stride = { 1, 1 } },
        { 2, 3, 7, 6, 4, { 3, 3 }, .padding = { 1, 1 } },
        { 1, 2, 9, 8, 3, { 2, 3 }, .stride = { 2, 3 }, .padding = { 1, 2 } },
        { 2,
          2,
          11,
          10,
          2,
          { 3, 2 },
          .stride = { 1, 2 },
          .padding = { 2, 1 },
          .dilation = { 2, 3 } },
        { 1,
          4,
          6,
          7,
          6,
          { 3, 1 },
          .stride = { 2, 1 },
          .padding = { 1, 0 },
          .dilation = { 1, 2 },
          .groups = 2 },
        { 2,
          6,
          5,
          5,
          6,
          { 3, 3 },
          .stride = { 1, 1 },
          .padding = { 1, 1 },
          .dilation = { 1, 1 },
          .groups = 6 }, /* by channel */
        { 2, 3, 4, 5, 7, { 1, 1 }, .groups = 1 },
        { 1, 2, 4, 5, 3, { 4, 5 }, .groups = 1 },         /* one place */
        { 2, 2, 3, 3, 2, { 5, 5 }, .padding = { 3, 4 } }, /* windows in padding alone */
        { 1,
          1,
          3,
          40,
          2,
          { 1, 7 },
          .stride = { 1, 5 },
          .padding = { 0, 3 },
          .dilation = { 1, 4 } },                        /* a stride above 4 */
        { 1, 1, 1, 7, 1, { 1, 2 }, .stride = { 3, 9 } }, /* strides beyond the input */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run(cases[i], MS_F32, PLAIN, true, MS_F32);
        run(cases[i], MS_F32, i % 2 ? SWAPPED : SPREAD, false, MS_F32);
        run(cases[i], MS_BF16, PLAIN, true, MS_F32);
        run(cases[i], MS_F16, SPREAD, i % 2 == 0, MS_F32);
        run(cases[i], MS_F32, PLAIN, true, MS_BF16);
    }
}

/* Places of several blocks, the last one shorter, and rows that are cut within; dx in parts of
 * channels, the last one smaller; dweight from several partial sums. */
static void test_work_in_parts(void **state)
{
    (void)state;
    static const sizes cases[] = {
        { 1, 60, 13, 21, 3, { 3, 3 }, .padding = { 1, 1 } },
        { 1, 60, 13, 12, 2, { 5, 5 }, .padding = { 2, 2 } },
        { 1, 300, 3, 60, 2, { 3, 3 }, .padding = { 1, 0 } },
        { 20, 24, 23, 23, 4, { 3, 3 }, .padding = { 1, 1 }, .groups = 2 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool in_f32 = i % 3 == 0;
        if (ranges_are_long() || in_f32) run(cases[i], MS_F32, PLAIN, true, MS_F32);
        if (ranges_are_long() || !in_f32)
            run(cases[i], i % 2 ? MS_BF16 : MS_F16, PLAIN, true, MS_F32);
    }
}

/* Without images the gradients of weight and bias are 0, and every other tensor is empty. */
static void test_no_images(void **state)
{
    (void)state;
    run((sizes){ 0, 2, 4, 4, 3, { 3, 3 }, .groups = 1 }, MS_F32, PLAIN, true, MS_F32);
    run((sizes){ 0, 2, 4, 4, 3, { 3, 3 }, .groups = 1 }, MS_BF16, PLAIN, true, MS_F32);
}

/* Each gradient alone. */
static void test_gradients_that_nobody_needs(void **state)
{
    (void)state;
    sizes s = { 2, 3, 6, 5, 4, { 3, 3 }, .padding = { 1, 1 } };
    for (int only = 0; only < 3; only++) {
        check c = check_of(&s, MS_F32, PLAIN, true);
        for (int i = 0; i < 3; i++) c.in[i].constant = i != only;
        run_check(&c);
    }
}

static void test_mistakes_are_named(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *x = TENSOR(engine, MS_F32, 2, 4, 5, 6), *w = TENSOR(engine, MS_F32, 6, 4, 3, 3),
              *half = TENSOR(engine, MS_BF16, 6, 4, 3, 3), *bias = TENSOR(engine, MS_F32, 5),
              *flat = TENSOR(engine, MS_F32, 4, 30), *tall = TENSOR(engine, MS_F32, 6, 4, 6, 3),
              *ids = TENSOR(engine, MS_I64, 2, 4, 5, 6), *none = TENSOR(engine, MS_F32, 2, 4, 0, 6);
    const ms_op *op = &ms_op_conv2d;
    ms_attributes plain = { .window = { .groups = 0 } }, groups = { .window = { .groups = 3 } },
                  fit = { .window = { .groups = 2 } }, more = { .window = { .groups = 4 } },
                  negative = { .window = { .padding = { 0, -1 } } },
                  below = { .window = { .groups = -1 } };
    check_refused(engine, op, &plain, OPERANDS(x, half), 2, "same float dtype");
    check_refused(engine, op, &plain, OPERANDS(ids, w), 2, "same float dtype");
    check_refused(engine, op, &plain, OPERANDS(flat, w), 2, "[images, channels, rows, columns]");
    check_refused(engine, op, &plain, OPERANDS(none, w), 2, "only the number of images");
    check_refused(engine, op, &plain, OPERANDS(x, flat), 2, "the weight must be");
    check_refused(engine, op, &plain, OPERANDS(x, w, bias), 3, "shape [6]");
    check_refused(engine, op, &plain, OPERANDS(x, tall), 2,
                  "6 x 3, more than the padded input's 5");
    check_refused(engine, op, &groups, OPERANDS(x, w), 2, "4 input channels do not divide by 3");
    check_refused(engine, op, &more, OPERANDS(x, w), 2, "6 output channels do not divide by 4");
    check_refused(engine, op, &fit, OPERANDS(x, w), 2, "takes 4 channels, the input has 2");
    check_refused(engine, op, &negative, OPERANDS(x, w), 2, "padding -1");
    check_refused(engine, op, &below, OPERANDS(x, w), 2, "-1 groups");
    ms_tensor **all = OPERANDS(x, w, half, bias, flat, tall, ids, none);
    for (int i = 0; i < 8; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    sizes s = { 2, 2, 4, 4, 2, { 3, 3 }, .padding = { 1, 1 } };
    check c = check_of(&s, MS_F32, SWAPPED, true);
    check_lack_of_memory(&c);
    c = check_of(&s, MS_F16, SWAPPED, true);
    check_lack_of_memory(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_strides_paddings_dilations_groups),
        cmocka_unit_test(test_work_in_parts),
        cmocka_unit_test(test_no_images),
        cmocka_unit_test(test_gradients_that_nobody_needs),
        cmocka_unit_test(test_mistakes_are_named),
        cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
