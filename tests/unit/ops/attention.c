/* attention.c: attention with grouped queries, masks, blocks of every size and layout; its memory;
 * rotary embedding. ctest: each-isa poisoned late cuda cudnn */
#include "attention_reference.h"

/* ---------------------------------------------------------------- attention */

static void run_attention(ms_dtype dtype, sizes s, int layout)
{
    check c = attention_of(dtype, s, layout);
    run_check(&c);
}

static void test_attention_small(void **state)
{
    (void)state;
    for (int causal = 0; causal < 2; causal++)
        for (int layout = PLAIN; layout <= SPREAD; layout++) {
            run_attention(MS_F32, (sizes){ 2, 2, 2, 5, 5, 8, causal }, layout);
            /* grouped, more keys than queries */
            run_attention(MS_F32, (sizes){ 1, 4, 2, 3, 6, 5, causal }, layout);
            /* All heads share keys. */
            run_attention(MS_F32, (sizes){ 1, 3, 1, 4, 4, 17, causal }, layout);
        }
    run_attention(MS_F32, (sizes){ 1, 1, 1, 1, 1, 1, true }, PLAIN);
    run_attention(MS_F32, (sizes){ 1, 2, 2, 6, 3, 4, false }, PLAIN); /* fewer keys than queries */
    check scaled = attention_of(MS_F32, (sizes){ 1, 2, 2, 4, 4, 8, true }, PLAIN);
    scaled.attributes.attention.scale = 0.5;
    run_check(&scaled);
}

/* One query has kernels of its own: all widths around those of vectors, all dtypes and layouts; in
 * short ranges each two of dtype, layout and size come together once. */
static void test_attention_of_one_query(void **state)
{
    (void)state;
    for (int dtype = 0; dtype < 3; dtype++)
        for (int layout = PLAIN; layout <= SPREAD; layout++) {
            ms_dtype d = (ms_dtype[]){ MS_F32, MS_BF16, MS_F16 }[dtype];
            const sizes cases[] = { { 2, 2, 1, 1, 7, 8, true },
                                    { 1, 4, 2, 1, 33, 17, layout % 2 },
                                    { 1, 2, 2, 1, 16, 64, true },
                                    { 1, 3, 1, 1, 130, 80, false } };
            for (int i = 0; i < 4; i++)
                if (ranges_are_long() || (dtype + layout + i) % 3 == 0)
                    run_attention(d, cases[i], layout);
        }
    const int64_t stride = ranges_are_long() ? 3 : ranges_are_short() ? 22 : 5;
    for (int64_t width = 1; width < 70; width += stride)
        run_attention(MS_F32, (sizes){ 1, 2, 1, 1, 19, width, true }, PLAIN);
    run_attention(MS_F32, (sizes){ 1, 1, 1, 1, 700, 128, true }, PLAIN);
}

/* Lengths around the sizes of blocks (64 queries, 64 keys, 256 queries at a time), so that blocks
 * are partly masked, partly full, and several. */
static void test_attention_blocks(void **state)
{
    (void)state;
    run_attention(MS_F32, (sizes){ 1, 2, 1, 64, 64, 16, true }, PLAIN);
    run_attention(MS_F32, (sizes){ 1, 1, 1, 65, 257, 16, true }, PLAIN);
    if (!ranges_are_short()) {
        int64_t keys = ranges_are_long() ? 600 : 270;
        run_attention(MS_F32, (sizes){ 1, 2, 2, 300, 300, 16, true }, PLAIN);
        run_attention(MS_F32, (sizes){ 1, 2, 1, 130, keys, 24, false }, PLAIN);
    }
    /* The diagonal begins anywhere in a block. */
    run_attention(MS_F32, (sizes){ 1, 1, 1, 50, 63, 40, true }, PLAIN);
    run_attention(MS_F32, (sizes){ 1, 1, 1, 70, 121, 130, true }, PLAIN);
    /* Wider than what a device may hold at once. */
    run_attention(MS_F32, (sizes){ 1, 2, 1, 5, 9, 331, true }, PLAIN);
    run_attention(MS_F32, (sizes){ 1, 2, 1, 1, 70, 300, false }, PLAIN);
}

/* Lengths and widths that are no multiple of what a kernel takes at once, by one more or less. */
static void test_attention_odd_sizes(void **state)
{
    (void)state;
    run_attention(MS_F32, (sizes){ 1, 1, 1, 127, 127, 65, true }, PLAIN);
    run_attention(MS_BF16, (sizes){ 1, 1, 1, 127, 127, 256, true }, PLAIN);
    int64_t length = ranges_are_long() ? 1025 : ranges_are_short() ? 129 : 321;
    run_attention(MS_F32, (sizes){ 1, 1, 1, length, length, 8, true }, PLAIN);
}

static void test_attention_half(void **state)
{
    (void)state;
    run_attention(MS_BF16, (sizes){ 1, 4, 2, 9, 9, 16, true }, PLAIN);
    run_attention(MS_F16, (sizes){ 1, 4, 2, 9, 9, 16, true }, SPREAD);
    run_attention(MS_F16, (sizes){ 1, 2, 1, 70, 300, 8, true }, PLAIN);
}

/* Operands rounded to bf16 (where the processor multiplies such pairs), everything else in f32:
 * rows that are no whole vectors or pairs, blocks cut by the diagonal, gradients summed over heads.
 * An operand's rounding is 2^-9; a score's error of some of these moves its probability, and so the
 * gradients, by about as much. */
static void test_attention_autocast(void **state)
{
    (void)state;
    const sizes cases[] = { { 2, 2, 2, 5, 5, 8, true },       { 1, 4, 2, 3, 6, 5, false },
                            { 1, 17, 1, 1, 7, 17, true },     { 1, 2, 1, 70, 131, 24, true },
                            { 1, 1, 1, 65, 257, 64, true },   { 1, 2, 2, 300, 300, 16, true },
                            { 1, 2, 1, 130, 200, 80, false }, { 2, 1, 1, 40, 64, 130, true } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (ranges_are_short() && cases[i].queries > 100) continue;
        check c = attention_of(MS_F32, cases[i], i % 2 == 0 ? PLAIN : SPREAD);
        set_autocast(&c, MS_BF16);
        c.tolerance = 1e-2;
        run_check(&c);
    }
    run_attention(MS_BF16, (sizes){ 1, 2, 1, 70, 131, 24, true }, SPREAD);
}

/* Positions of rows that are filled with documents of `lengths` tokens in turn (0 ends the list);
 * each row begins with another one. */
static double *packed(int64_t rows, int64_t time, const int64_t *lengths)
{
    double *positions = malloc((size_t)(rows * time) * sizeof *positions);
    int64_t document = 0, at = 0;
    for (int64_t i = 0; i < rows * time; i++, at++) {
        if (at >= lengths[document] || i % time == 0) {
            document = lengths[document + 1] ? document + 1 : 0;
            at = 0;
        }
        positions[i] = (double)at;
    }
    return positions;
}

static void run_packed(ms_dtype dtype, sizes s, double *positions, int layout, ms_dtype autocast)
{
    check c = attention_of(dtype, s, layout);
    c.ins = 4;
    c.in[3] = (operand){ .dtype = MS_I64,
                         .dims = 2,
                         .shape = { s.batches, s.queries },
                         .layout = layout,
                         .values = positions };
    set_autocast(&c, autocast);
    if (autocast != MS_F32) c.tolerance = 1e-2;
    run_check(&c);
    free(positions);
}

/* Documents shorter than a vector, than a part of a block of keys, than a block and than a tile,
 * and longer than these; one token; documents that end where blocks do. Values and gradients
 * against the plain computation, in which a query sees its own document only. */
static void test_attention_of_packed_documents(void **state)
{
    (void)state;
    const int64_t lengths[][6] = { { 1, 2 },         { 3, 1, 7 },        { 16, 48, 64, 128 },
                                   { 5, 100, 40 },   { 130, 2, 33, 90 }, { 300, 11 },
                                   { 64, 63, 65, 1 } };
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i += ranges_are_short() ? 4 : 1) {
        run_packed(MS_F32, (sizes){ 2, 2, 2, 19, 19, 8, true }, packed(2, 19, lengths[i]),
                   (int)i % 3, MS_F32);
        /* In short ranges the rows are long for the longest document only. */
        int64_t time = ranges_are_long() || lengths[i][0] == 300 ? 333 : 170;
        if (ranges_are_long() || i % 2 == 1)
            run_packed(MS_F32, (sizes){ 2, 2, 1, time, time, 16, true },
                       packed(2, time, lengths[i]), PLAIN, MS_F32);
        if (ranges_are_long() || i % 2 == 0)
            run_packed(MS_F32, (sizes){ 1, 2, 1, 190, 190, 24, true }, packed(1, 190, lengths[i]),
                       SPREAD, MS_BF16);
    }
    const int64_t mixed[] = { 9, 70, 25, 0 };
    run_packed(MS_BF16, (sizes){ 2, 4, 2, 150, 150, 16, true }, packed(2, 150, mixed), PLAIN,
               MS_F32);
    run_packed(MS_F16, (sizes){ 2, 2, 1, 150, 150, 17, true }, packed(2, 150, mixed), SWAPPED,
               MS_F32);
}

/* Where a query's first key is before that of the query before it: a window of 20 tokens, and any
 * first keys. What a block leaves out follows from all of its queries. */
static void test_attention_of_any_positions(void **state)
{
    (void)state;
    enum { TIME = 200 };
    double *window = malloc(TIME * sizeof *window), *any = malloc(TIME * sizeof *any);
    uint64_t numbers = 77;
    for (int i = 0; i < TIME; i++) {
        window[i] = i < 20 ? i : 20;
        any[i] = floor((draw(&numbers) + 1.0) / 2.0 * (i + 1));
    }
    run_packed(MS_F32, (sizes){ 1, 2, 1, TIME, TIME, 16, true }, window, PLAIN, MS_F32);
    run_packed(MS_F32, (sizes){ 1, 2, 1, TIME, TIME, 16, true }, any, PLAIN, MS_F32);
}

/* Windows shorter than a vector, than a part of a block, than a block and than a tile, and as long
 * as the text; also with kept keys, with one query, and with documents that are longer. Values and
 * gradients against the plain computation, in which a query sees the last keys only. */
static void run_window(ms_dtype dtype, sizes s, int64_t window, int layout, ms_dtype autocast)
{
    check c = attention_of(dtype, s, layout);
    c.attributes.attention.window = window;
    set_autocast(&c, autocast);
    if (autocast != MS_F32) c.tolerance = 1e-2;
    run_check(&c);
}

static void test_attention_of_windows(void **state)
{
    (void)state;
    const int64_t windows[] = { 2, 3, 16, 17, 64, 100, 130, 200, 201 };
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i += ranges_are_short() ? 3 : 1) {
        int64_t w = windows[i];
        run_window(MS_F32, (sizes){ 2, 2, 1, 9, 9, 8, true }, w, (int)i % 3, MS_F32);
        run_window(MS_F32, (sizes){ 1, 2, 1, 70, 200, 16, true }, w, PLAIN, MS_F32);
        run_window(MS_F32, (sizes){ 1, 2, 2, 1, 90, 24, true }, w, (int)i % 3, MS_F32);
        if (i % 2 == 0) run_window(MS_BF16, (sizes){ 1, 1, 1, 90, 90, 80, true }, w, PLAIN, MS_F32);
        else run_window(MS_F32, (sizes){ 1, 2, 1, 90, 130, 24, true }, w, SPREAD, MS_BF16);
    }
    run_window(MS_F32, (sizes){ 1, 2, 1, 333, 333, 16, true }, 70, PLAIN, MS_F32);
    run_window(MS_F16, (sizes){ 1, 1, 1, 80, 150, 17, true }, 33, SWAPPED, MS_F32);
}

static void test_attention_of_windows_in_documents(void **state)
{
    (void)state;
    const int64_t lengths[] = { 5, 100, 40, 0 };
    for (int64_t window = 4; window <= 64; window *= 4) {
        check c = attention_of(MS_F32, (sizes){ 2, 2, 1, 170, 170, 16, true }, PLAIN);
        c.attributes.attention.window = window;
        c.ins = 4;
        c.in[3] = (operand){
            .dtype = MS_I64, .dims = 2, .shape = { 2, 170 }, .values = packed(2, 170, lengths)
        };
        run_check(&c);
        free(c.in[3].values);
    }
}

/* Queries that begin at any place among the keys: before them, so that the first ones, or all, see
 * nothing; among them; after them, so that all see all keys. Blocks are cut anywhere, also where
 * keys end within a vector. With windows and with documents, which may begin before the keys. */
static check shifted(ms_dtype dtype, sizes s, int64_t offset, int layout)
{
    check c = attention_of(dtype, s, layout);
    c.attributes.attention.shifted = true;
    c.attributes.attention.offset = offset;
    return c;
}

static void test_attention_of_shifted_queries(void **state)
{
    (void)state;
    const int64_t offsets[] = { -300, -70, -64, -9, -1, 0, 1, 3, 30, 63, 64, 130, 400 };
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        const sizes cases[] = { { 1, 2, 1, 70, 70, 16, true },
                                { 2, 2, 2, 9, 5, 8, true },
                                { 1, 2, 1, 1, 67, 24, true },
                                { 1, 1, 1, 130, 67, 17, true },
                                { 1, 2, 1, 20, 139, 16, true } };
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
            /* One query that sees one key: all gradients of scores are 0, up to rounding. */
            if (cases[k].queries == 1 && offsets[i] == 0) continue;
            /* In quick ranges each offset comes with some of the sizes. */
            if (!ranges_are_long() && (i + k) % 3 != 0) continue;
            ms_dtype dtype = (i + k) % 4 == 1 ? MS_BF16 : (i + k) % 4 == 3 ? MS_F16 : MS_F32;
            check c = shifted(dtype, cases[k], offsets[i], (int)(i + k) % 3);
            run_check(&c);
            /* Of a query that sees nothing, the second result is -infinity. */
            c = shifted(MS_F32, cases[k], offsets[i], (int)(i + k) % 3);
            with_log_sum(&c);
            if (offsets[i] >= 0) run_check(&c);
            c = shifted(MS_F32, cases[k], offsets[i], PLAIN);
            c.attributes.attention.window = 2 + (int64_t)(7 * i + 20 * k) % 90;
            run_check(&c);
        }
    }
}

static void test_attention_of_shifted_documents(void **state)
{
    (void)state;
    enum { TIME = 100 };
    const int64_t offsets[] = { -40, 0, 25, 200 };
    uint64_t numbers = 3;
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        double *positions = malloc(TIME * sizeof *positions);
        for (int k = 0; k < TIME; k++) positions[k] = floor((draw(&numbers) + 1.0) * 70.0);
        check c = shifted(i == 1 ? MS_BF16 : MS_F32, (sizes){ 1, 2, 1, TIME, 90, 16, true },
                          offsets[i], PLAIN);
        c.ins = 4;
        c.in[3] =
            (operand){ .dtype = MS_I64, .dims = 2, .shape = { 1, TIME }, .values = positions };
        run_check(&c);
        free(positions);
    }
}

/* The second result and its gradient, of every kernel: of one query, of f32 and of 16 bits. */
static void test_attention_with_log_sum(void **state)
{
    (void)state;
    const sizes cases[] = { { 2, 4, 2, 5, 5, 8, true },
                            { 1, 2, 1, 1, 33, 17, true },
                            { 1, 2, 1, 70, 131, 24, false },
                            { 1, 1, 1, 65, 257, 16, true },
                            { 1, 2, 2, 130, 130, 64, true } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (ranges_are_short() && cases[i].keys > 200) continue;
        for (int dtype = 0; dtype < 3; dtype++) {
            if (!ranges_are_long() && dtype > 0 && i % 2 == 0) continue;
            check c =
                attention_of((ms_dtype[]){ MS_F32, MS_BF16, MS_F16 }[dtype], cases[i], (int)i % 3);
            with_log_sum(&c);
            run_check(&c);
        }
    }
}

/* A window of all keys has the bits of none; that of one key gives the value itself. */
static void test_attention_of_least_and_greatest_windows(void **state)
{
    (void)state;
    enum { KEYS = 150, COUNT = KEYS * 16 };
    static float values[COUNT], results[4][COUNT];
    uint64_t numbers = 5;
    for (int i = 0; i < COUNT; i++) values[i] = (float)draw(&numbers);
    ms_engine *engine = engine_with(2, NULL);
    for (int i = 0; i < 4; i++) {
        ms_tensor *x = TENSOR(engine, MS_F32, 1, 1, KEYS, 16), *out = NULL;
        OK(ms_tensor_write(x, values, sizeof values));
        ms_attributes attributes = {
            .attention = { .causal = true, .window = (int64_t[]){ 0, KEYS, INT64_MAX, 1 }[i] }
        };
        OK(ms_op_apply(engine, &ms_op_attention, &attributes, false, (ms_tensor *[]){ x, x, x }, 3,
                       &out, 1));
        OK(ms_tensor_read(out, results[i], sizeof results[i]));
        ms_tensor_release(x);
        ms_tensor_release(out);
    }
    assert_memory_equal(results[0], results[1], sizeof results[0]);
    assert_memory_equal(results[0], results[2], sizeof results[0]);
    assert_memory_equal(values, results[3], sizeof values);
    ms_engine_free(engine);
}

/* In documents of one token each, in one row or in rows of their own, a result is the value itself,
 * to the bit. */
static void test_attention_of_single_tokens(void **state)
{
    (void)state;
    enum { TOKENS = 130, WIDTH = 16, COUNT = TOKENS * WIDTH };
    static float values[COUNT], result[COUNT];
    static const int64_t positions[TOKENS];
    uint64_t numbers = 9;
    for (int i = 0; i < COUNT; i++) values[i] = (float)(10.0 * draw(&numbers));
    for (int64_t rows = 1; rows <= TOKENS; rows += TOKENS - 1) {
        ms_engine *engine = engine_with(2, NULL);
        ms_tensor *x = TENSOR(engine, MS_F32, rows, 1, TOKENS / rows, WIDTH),
                  *alone = TENSOR(engine, MS_I64, rows, TOKENS / rows), *out = NULL;
        OK(ms_tensor_write(x, values, sizeof values));
        OK(ms_tensor_write(alone, positions, sizeof positions));
        OK(ms_op_apply(engine, &ms_op_attention, &(ms_attributes){ .attention.causal = true },
                       false, (ms_tensor *[]){ x, x, x, alone }, 4, &out, 1));
        OK(ms_tensor_read(out, result, sizeof result));
        assert_memory_equal(result, values, sizeof result);
        ms_tensor_release(x);
        ms_tensor_release(alone);
        ms_tensor_release(out);
        ms_engine_free(engine);
    }
}

/* Positions of rows that are one document each change no bit. */
static void test_attention_of_whole_rows(void **state)
{
    (void)state;
    enum { TIME = 130, WIDTH = 16, COUNT = 2 * TIME * WIDTH };
    static float values[3][COUNT], plain[COUNT], with[COUNT];
    int64_t positions[2 * TIME];
    ms_engine *engine = engine_with(2, NULL);
    ms_tensor *in[4], *out[2] = { NULL };
    uint64_t numbers = 5;
    for (int i = 0; i < 2 * TIME; i++) positions[i] = i % TIME;
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < COUNT; k++) values[i][k] = (float)draw(&numbers);
        in[i] = TENSOR(engine, MS_F32, 2, 1, TIME, WIDTH);
        OK(ms_tensor_write(in[i], values[i], sizeof values[i]));
    }
    in[3] = TENSOR(engine, MS_I64, 2, TIME);
    OK(ms_tensor_write(in[3], positions, sizeof positions));
    for (int i = 0; i < 2; i++)
        OK(ms_op_apply(engine, &ms_op_attention, &(ms_attributes){ .attention.causal = true },
                       false, in, i == 0 ? 3 : 4, &out[i], 1));
    OK(ms_tensor_read(out[0], plain, sizeof plain));
    OK(ms_tensor_read(out[1], with, sizeof with));
    assert_memory_equal(plain, with, sizeof plain);
    for (int i = 0; i < 4; i++) ms_tensor_release(in[i]);
    for (int i = 0; i < 2; i++) ms_tensor_release(out[i]);
    ms_engine_free(engine);
}

/* Scores whose exponentials overflow, in a later block than the first: the maximum moves on. */
static void test_attention_large_scores(void **state)
{
    (void)state;
    enum { KEYS = 600, WIDTH = 4 };
    ms_engine *engine = engine_with(2, NULL);
    ms_tensor *in[3] = { TENSOR(engine, MS_F32, 1, 1, 1, WIDTH),
                         TENSOR(engine, MS_F32, 1, 1, KEYS, WIDTH),
                         TENSOR(engine, MS_F32, 1, 1, KEYS, WIDTH) },
              *out = NULL;
    float q[WIDTH] = { 100, 0, 0, 0 }, k[KEYS][WIDTH] = { { 0 } }, v[KEYS][WIDTH] = { { 0 } },
          y[WIDTH];
    for (int i = 0; i < KEYS; i++) {
        k[i][0] = (float)i;
        v[i][0] = (float)i;
    }
    OK(ms_tensor_write(in[0], q, sizeof q));
    OK(ms_tensor_write(in[1], k, sizeof k));
    OK(ms_tensor_write(in[2], v, sizeof v));
    OK(ms_op_apply(engine, &ms_op_attention, NULL, false, in, 3, &out, 1));
    OK(ms_tensor_read(out, y, sizeof y));
    assert_true(y[0] == KEYS - 1);
    for (int i = 0; i < 3; i++) ms_tensor_release(in[i]);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

/* Results join into [batch, time, heads * width] without a copy. */
static void test_attention_results_lie_by_time(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *q = TENSOR(engine, MS_F32, 2, 3, 5, 4), *out = NULL, *turned = NULL;
    OK(ms_op_apply(engine, &ms_op_attention, &(ms_attributes){ .attention.causal = true }, false,
                   (ms_tensor *[]){ q, q, q }, 3, &out, 1));
    OK(ms_op_unary(engine, &ms_op_transpose, &(ms_attributes){ .dim = { .a = 1, .b = 2 } }, out,
                   &turned));
    assert_true(ms_tensor_is_contiguous(turned));
    ms_tensor_release(q);
    ms_tensor_release(out);
    ms_tensor_release(turned);
    ms_engine_free(engine);
}

/* Forward and backward with the result as its own gradient; results: of q, k, v. */
static void forward_and_back(ms_engine *engine, ms_tensor *const *in, ms_tensor **results)
{
    ms_tensor *out = NULL;
    ms_tensor_info in_info[3] = { info_from(in[0]), info_from(in[1]), info_from(in[2]) }, out_info;
    ms_op_call call = { .engine = engine,
                        .op = &ms_op_attention,
                        .attributes.attention.causal = true,
                        .inputs = in,
                        .input_count = 3,
                        .outputs = &out,
                        .output_count = 1,
                        .record = true };
    OK(ms_op_run(&call));
    out_info = info_from(out);
    ms_op_gradient gradient = { .engine = engine,
                                .op = &ms_op_attention,
                                .attributes = call.attributes,
                                .saved = call.saved,
                                .saved_count = call.saved_count,
                                .inputs = in_info,
                                .input_count = 3,
                                .outputs = &out_info,
                                .gradients = &out,
                                .output_count = 1,
                                .results = results,
                                .needs = (bool[]){ true, true, true } };
    OK(ms_op_attention.backward(&gradient));
    ms_op_drop_saved(&call);
    ms_tensor_release(out);
}

/* Queries, keys and values that one layer made: their gradients equal those of separate tensors and
 * have the memory layout of that layer's result, so that the backward of the split is a view. */
static void test_attention_side_by_side(void **state)
{
    (void)state;
    enum {
        BATCH = 2,
        HEADS = 4,
        GROUPS = 2,
        TIME = 70,
        WIDTH = 8,
        ROW = (HEADS + 2 * GROUPS) * WIDTH
    };
    ms_engine *engine = engine_with(2, NULL);
    ms_tensor *joined = TENSOR(engine, MS_F32, BATCH, TIME, ROW), *drawn = NULL,
              *parts[3] = { NULL }, *in[3], *apart[3], *results[2][3] = { { NULL } }, *rows[3],
              *whole = NULL;
    int64_t widths[3] = { HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH };
    ms_attributes split = { .split = { .sizes = widths, .count = 3, .dim = -1 } },
                  swap = { .dim = { .a = 1, .b = 2 } };
    OK(ms_op_apply(engine, ms_op_find("normal"),
                   &(ms_attributes){ .random = { .random = { .seed = 3 }, .b = 1 } }, true, &joined,
                   1, &drawn, 1));
    OK(ms_op_apply(engine, &ms_op_split, &split, false, &joined, 1, parts, 3));
    for (int i = 0; i < 3; i++) {
        ms_tensor *heads = NULL;
        OK(ms_op_unary(
            engine, &ms_op_view,
            &(ms_attributes){
                .shape = { .dims = 4, .sizes = { BATCH, TIME, widths[i] / WIDTH, WIDTH } } },
            parts[i], &heads));
        OK(ms_op_unary(engine, &ms_op_transpose, &swap, heads, &in[i]));
        OK(ms_op_unary(engine, &ms_op_clone, NULL, in[i], &apart[i]));
        ms_tensor_release(heads);
    }
    forward_and_back(engine, in, results[0]);
    forward_and_back(engine, apart, results[1]);
    for (int i = 0; i < 3; i++) {
        static double a[BATCH * HEADS * TIME * WIDTH], b[BATCH * HEADS * TIME * WIDTH];
        read_values(engine, results[0][i], a);
        read_values(engine, results[1][i], b);
        assert_memory_equal(a, b, (size_t)ms_tensor_count(in[i]) * sizeof *a);
        ms_tensor *turned = NULL;
        OK(ms_op_unary(engine, &ms_op_transpose, &swap, results[0][i], &turned));
        OK(ms_op_unary(
            engine, &ms_op_view,
            &(ms_attributes){ .shape = { .dims = 3, .sizes = { BATCH, TIME, widths[i] } } }, turned,
            &rows[i]));
        ms_tensor_release(turned);
    }
    ms_tensor_info in_info = info_from(joined),
                   out_info[3] = { info_from(rows[0]), info_from(rows[1]), info_from(rows[2]) };
    ms_op_gradient gradient = { .engine = engine,
                                .op = &ms_op_split,
                                .attributes = split,
                                .inputs = &in_info,
                                .input_count = 1,
                                .outputs = out_info,
                                .gradients = rows,
                                .output_count = 3,
                                .results = &whole,
                                .needs = (bool[]){ true } };
    OK(ms_op_split.backward(&gradient));
    assert_ptr_equal(ms_tensor_storage(whole), ms_tensor_storage(rows[0]));
    assert_true(ms_tensor_is_contiguous(whole) && ms_tensor_data(whole) == ms_tensor_data(rows[0]));
    for (int i = 0; i < 3; i++) {
        ms_tensor *released[] = {
            parts[i], in[i], apart[i], results[0][i], results[1][i], rows[i]
        };
        for (int k = 0; k < 6; k++) ms_tensor_release(released[k]);
    }
    ms_tensor_release(joined);
    ms_tensor_release(drawn);
    ms_tensor_release(whole);
    ms_engine_free(engine);
}

/* With 4,096 queries the scores alone would need 64 MiB for each head, with 384 half a MiB.
 * Only inputs, result, one number for each row, and gradients are live. */
static void test_attention_memory(void **state)
{
    (void)state;
    enum { WIDTH = 16 };
    int64_t time = ranges_are_long() ? 4096 : 384;
    ms_engine *engine = engine_with(2, NULL);
    uint64_t part = (uint64_t)time * WIDTH * sizeof(float), rows = (uint64_t)time * sizeof(float);
    ms_tensor *in[3], *out = NULL, *results[3] = { NULL }, *filled = NULL;
    ms_tensor_info in_info[3], out_info;
    for (int i = 0; i < 3; i++) {
        in[i] = TENSOR(engine, MS_F32, 1, 1, time, WIDTH);
        in_info[i] = info_from(in[i]);
        OK(ms_op_apply(engine, &ms_op_fill, &(ms_attributes){ .scalar.value = 0.5 }, true, &in[i],
                       1, &filled, 1));
        ms_tensor_release(filled);
    }
    ms_op_call call = { .engine = engine,
                        .op = &ms_op_attention,
                        .attributes.attention.causal = true,
                        .inputs = in,
                        .input_count = 3,
                        .outputs = &out,
                        .output_count = 1,
                        .record = true };
    OK(ms_op_run(&call));
    out_info = info_from(out);
    assert_int_equal(ms_engine_memory(engine).peak, 4 * part + rows);
    ms_op_gradient gradient = { .engine = engine,
                                .op = &ms_op_attention,
                                .attributes = call.attributes,
                                .saved = call.saved,
                                .saved_count = call.saved_count,
                                .inputs = in_info,
                                .input_count = 3,
                                .outputs = &out_info,
                                .gradients = &out,
                                .output_count = 1,
                                .results = results,
                                .needs = (bool[]){ true, true, true } };
    OK(ms_op_attention.backward(&gradient));
    assert_int_equal(ms_engine_memory(engine).peak, 7 * part + rows);
    ms_op_drop_saved(&call);
    for (int i = 0; i < 3; i++) {
        ms_tensor_release(in[i]);
        ms_tensor_release(results[i]);
    }
    ms_tensor_release(out);
    ms_engine_free(engine);
}

static void test_attention_refusals(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_attributes causal = { .attention.causal = true };
    ms_tensor *q = TENSOR(engine, MS_F32, 1, 4, 5, 8), *k = TENSOR(engine, MS_F32, 1, 3, 5, 8),
              *few = TENSOR(engine, MS_F32, 1, 2, 4, 8), *flat = TENSOR(engine, MS_F32, 5, 8);
    check_refused(engine, &ms_op_attention, &causal, (ms_tensor *[]){ q, k, k }, 3, "multiple");
    check_refused(engine, &ms_op_attention, &(ms_attributes){ .attention.window = 2 },
                  (ms_tensor *[]){ q, q, q }, 3, "a window is of causal attention");
    check_refused(engine, &ms_op_attention,
                  &(ms_attributes){ .attention = { .causal = true, .window = -1 } },
                  (ms_tensor *[]){ q, q, q }, 3, "the window cannot be negative");
    check_refused(engine, &ms_op_attention, &causal, (ms_tensor *[]){ q, few, few }, 3,
                  "at least as many keys as queries");
    check_refused(engine, &ms_op_attention, &causal, (ms_tensor *[]){ q, k, few }, 3,
                  "the same shape");
    check_refused(engine, &ms_op_attention, &causal, (ms_tensor *[]){ q, flat, flat }, 3,
                  "[batch, heads, time, width]");
    ms_tensor_release(q);
    ms_tensor_release(k);
    ms_tensor_release(few);
    ms_tensor_release(flat);
    ms_engine_free(engine);
}

/* The operator on positions with these values: the message of the task's error. */
static void positions_refused(int64_t at, int64_t value, const char *part)
{
    enum { TIME = 70 };
    ms_engine *engine = engine_with(1, NULL);
    int64_t values[2 * TIME] = { 0 };
    ms_tensor *q = TENSOR(engine, MS_F32, 2, 1, TIME, 8),
              *positions = TENSOR(engine, MS_I64, 2, TIME), *out = NULL, *filled = NULL;
    values[at] = value;
    OK(ms_op_apply(engine, &ms_op_fill, NULL, true, &q, 1, &filled, 1));
    OK(ms_tensor_write(positions, values, sizeof values));
    OK(ms_op_apply(engine, &ms_op_attention, &(ms_attributes){ .attention.causal = true }, false,
                   (ms_tensor *[]){ q, q, q, positions }, 4, &out, 1));
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(ms_engine_error(engine)->message, part));
    ms_tensor_release(filled);
    ms_tensor_release(q);
    ms_tensor_release(positions);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

static void test_attention_positions_refusals(void **state)
{
    (void)state;
    positions_refused(0, 1, "query 0 of row 0 is 1");
    positions_refused(69, -1, "query 69 of row 0 is -1");
    positions_refused(70 + 66, 67, "query 66 of row 1 is 67");
    positions_refused(70 + 66, INT64_MAX, "within 0 .. 66");
    ms_engine *engine = engine_with(1, NULL);
    ms_attributes causal = { .attention.causal = true };
    ms_tensor *q = TENSOR(engine, MS_F32, 1, 2, 5, 8), *k = TENSOR(engine, MS_F32, 1, 2, 7, 8),
              *positions = TENSOR(engine, MS_I64, 1, 5), *longer = TENSOR(engine, MS_I64, 1, 7),
              *narrow = TENSOR(engine, MS_I32, 1, 5);
    check_refused(engine, &ms_op_attention, NULL, (ms_tensor *[]){ q, q, q, positions }, 4,
                  "positions are of causal attention");
    check_refused(engine, &ms_op_attention, &causal, (ms_tensor *[]){ q, k, k, positions }, 4,
                  "as many keys as queries");
    check_refused(engine, &ms_op_attention, &causal, (ms_tensor *[]){ q, q, q, longer }, 4,
                  "i64 [batch, time], here [1, 5]");
    check_refused(engine, &ms_op_attention, &causal, (ms_tensor *[]){ q, q, q, narrow }, 4,
                  "i64 [batch, time], here [1, 5]");
    ms_tensor_release(q);
    ms_tensor_release(k);
    ms_tensor_release(positions);
    ms_tensor_release(longer);
    ms_tensor_release(narrow);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------------- rotary */

/* The frequency of a pair, computed from wavelengths as in the code of transformers. */
static double frequency_of(const ms_attributes *attributes, int64_t j, int64_t width)
{
    const ms_rotary_scaling *s = &attributes->rotary.scaling;
    double plain = 1.0 / pow(attributes->rotary.base, 2.0 * (double)j / (double)width);
    if (s->kind == MS_ROTARY_LINEAR) return plain / s->factor;
    if (s->kind == MS_ROTARY_PLAIN) return plain;
    double wavelength = 2.0 * acos(-1.0) / plain, longest = s->original_context / s->low,
           shortest = s->original_context / s->high;
    if (wavelength > longest) return plain / s->factor;
    if (wavelength < shortest) return plain;
    double smooth = (s->original_context / wavelength - s->low) / (s->high - s->low);
    return (1.0 - smooth) * plain / s->factor + smooth * plain;
}

static void rotary_reference(const check *c)
{
    const operand *x = &c->in[0];
    int64_t times = x->shape[2], width = x->shape[3], half = width / 2;
    for (int64_t row = 0; row < x->shape[0] * x->shape[1] * times; row++)
        for (int64_t j = 0; j < half; j++) {
            double angle = (double)(c->attributes.rotary.first + row % times)
                           * frequency_of(&c->attributes, j, width);
            double a = x->values[row * width + j], b = x->values[row * width + j + half];
            c->out[0].values[row * width + j] = a * cos(angle) - b * sin(angle);
            c->out[0].values[row * width + j + half] = b * cos(angle) + a * sin(angle);
        }
}

static void test_rotary(void **state)
{
    (void)state;
    const struct {
        ms_dtype dtype;
        int64_t heads, times, width, first;
        double base;
        int layout;
    } cases[] = {
        { MS_F32, 3, 5, 8, 0, 10000, PLAIN },   { MS_F32, 3, 5, 34, 0, 10000, SWAPPED },
        { MS_F32, 2, 4, 2, 7, 500000, SPREAD }, { MS_F32, 2, 700, 64, 100000, 10000, PLAIN },
        { MS_BF16, 2, 4, 40, 3, 10000, PLAIN }, { MS_F16, 2, 4, 6, 3, 10000, PLAIN },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        operand x = { .dtype = cases[i].dtype,
                      .dims = 4,
                      .shape = { 2, cases[i].heads, cases[i].times, cases[i].width },
                      .layout = cases[i].layout },
                y = x;
        y.layout = PLAIN;
        check c = { .op = &ms_op_rotary,
                    .attributes.rotary = { .first = cases[i].first, .base = cases[i].base },
                    .in = { x },
                    .ins = 1,
                    .out = { y },
                    .outs = 1,
                    .reference = rotary_reference };
        run_check(&c);
    }
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *odd = TENSOR(engine, MS_F32, 1, 1, 2, 7), *even = TENSOR(engine, MS_F32, 1, 1, 2, 8);
    check_refused(engine, &ms_op_rotary, &(ms_attributes){ .rotary.base = 10000 }, &odd, 1, "even");
    check_refused(engine, &ms_op_rotary, NULL, &even, 1, "base");
    ms_tensor_release(odd);
    ms_tensor_release(even);
    ms_engine_free(engine);
}

static void test_rotary_scaled(void **state)
{
    (void)state;
    /* Llama 3.1's own numbers: of 32 pairs some are above, some below and some between the two
     * wavelengths. */
    const ms_rotary_scaling scalings[] = {
        { .kind = MS_ROTARY_LINEAR, .factor = 4 },
        { .kind = MS_ROTARY_LINEAR, .factor = 0.5 },
        { .kind = MS_ROTARY_LLAMA3, .factor = 8, .low = 1, .high = 4, .original_context = 8192 },
        { .kind = MS_ROTARY_LLAMA3, .factor = 32, .low = 0, .high = 2, .original_context = 16 },
    };
    for (size_t i = 0; i < sizeof scalings / sizeof *scalings; i++) {
        operand x = { .dtype = MS_F32, .dims = 4, .shape = { 2, 2, 300, 64 } }, y = x;
        check c = { .op = &ms_op_rotary,
                    .in = { x },
                    .ins = 1,
                    .out = { y },
                    .outs = 1,
                    .reference = rotary_reference,
                    .attributes.rotary = {
                        .first = 20000, .base = 500000, .scaling = scalings[i] } };
        run_check(&c);
    }
    const struct {
        ms_rotary_scaling scaling;
        const char *fault;
    } refused[] = {
        { { .kind = MS_ROTARY_LINEAR }, "factor" },
        { { .kind = MS_ROTARY_LINEAR, .factor = NAN }, "factor" },
        { { .kind = MS_ROTARY_LLAMA3, .factor = 8, .low = 4, .high = 4, .original_context = 8 },
          "low_freq_factor" },
        { { .kind = MS_ROTARY_LLAMA3, .factor = 8, .low = 1, .high = 4 }, "original context" },
    };
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *x = TENSOR(engine, MS_F32, 1, 1, 2, 8);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        ms_attributes attributes = { .rotary = { .base = 10000, .scaling = refused[i].scaling } };
        check_refused(engine, &ms_op_rotary, &attributes, &x, 1, refused[i].fault);
    }
    ms_tensor_release(x);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    check c = attention_of(MS_F16, (sizes){ 1, 2, 1, 4, 6, 5, true }, SWAPPED);
    check_lack_of_memory(&c);
    check p = attention_of(MS_F32, (sizes){ 1, 2, 1, 4, 4, 5, true }, PLAIN);
    /* Whole numbers below 1: each query sees itself. */
    p.in[3] =
        (operand){ .dtype = MS_I64, .dims = 2, .shape = { 1, 4 }, .layout = SPREAD, .high = 1 };
    p.ins = 4;
    check_lack_of_memory(&p);
    check r = {
        .op = &ms_op_rotary,
        .attributes.rotary.base = 10000,
        .in = { { .dtype = MS_F32, .dims = 4, .shape = { 1, 2, 3, 4 }, .layout = SWAPPED } },
        .ins = 1,
        .outs = 1
    };
    check_lack_of_memory(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_small),
        cmocka_unit_test(test_attention_of_one_query),
        cmocka_unit_test(test_attention_blocks),
        cmocka_unit_test(test_attention_odd_sizes),
        cmocka_unit_test(test_attention_half),
        cmocka_unit_test(test_attention_autocast),
        cmocka_unit_test(test_attention_of_packed_documents),
        cmocka_unit_test(test_attention_of_any_positions),
        cmocka_unit_test(test_attention_of_windows),
        cmocka_unit_test(test_attention_of_windows_in_documents),
        cmocka_unit_test(test_attention_of_shifted_queries),
        cmocka_unit_test(test_attention_of_shifted_documents),
        cmocka_unit_test(test_attention_with_log_sum),
        cmocka_unit_test(test_attention_of_least_and_greatest_windows),
        cmocka_unit_test(test_attention_of_single_tokens),
        cmocka_unit_test(test_attention_of_whole_rows),
        cmocka_unit_test(test_attention_large_scores),
        cmocka_unit_test(test_attention_results_lie_by_time),
        cmocka_unit_test(test_attention_side_by_side),
        cmocka_unit_test(test_attention_memory),
        cmocka_unit_test(test_attention_refusals),
        cmocka_unit_test(test_attention_positions_refusals),
        cmocka_unit_test(test_rotary),
        cmocka_unit_test(test_rotary_scaled),
        cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
