/* embedding.c: rows by index, repeated indices, 16-bit tables, indices out of range.
 * ctest: each-isa poisoned late cuda */
#include "reference.h"

static void embedding_reference(const check *c)
{
    size_t width = (size_t)c->in[1].shape[1];
    for (size_t i = 0; i < count_of(&c->in[0]); i++)
        memcpy(c->out[0].values + i * width, c->in[1].values + (size_t)c->in[0].values[i] * width,
               width * sizeof(double));
}

static void run_embedding(ms_dtype dtype, ms_dtype index, int64_t count, int64_t rows,
                          int64_t width, int layout)
{
    check c = { .op = &ms_op_embedding,
                .ins = 2,
                .outs = 1,
                .reference = embedding_reference,
                .in = { { .dtype = index,
                          .dims = 2,
                          .shape = { 2, count },
                          .low = 0,
                          .high = (double)rows,
                          .layout = layout },
                        { .dtype = dtype, .dims = 2, .shape = { rows, width }, .layout = layout } },
                .out = { { .dtype = dtype, .dims = 3, .shape = { 2, count, width } } } };
    /* Many 16-bit numbers add up before one rounding; incoming ones are exact. */
    c.tolerance = dtype == MS_BF16 ? 4e-3 : 5e-4;
    if (dtype == MS_F32) c.tolerance = 1e-6;
    run_check(&c);
}

static void test_embedding(void **state)
{
    (void)state;
    run_embedding(MS_F32, MS_I64, 6, 11, 8, PLAIN);
    run_embedding(MS_F32, MS_I32, 6, 11, 17, PLAIN);
    run_embedding(MS_F32, MS_U16, 6, 11, 1, SWAPPED);
    run_embedding(MS_F32, MS_I64, 700, 50, 33, PLAIN); /* every row many times */
    /* Most rows never; the table in many tiles. */
    run_embedding(MS_F32, MS_I64, 300, 3000, 64, PLAIN);
    /* Ids enough for several tiles of a sort, of few rows and of more than 2^16. */
    run_embedding(MS_F32, MS_U16, 2600, 7, 8, PLAIN);
    run_embedding(MS_F32, MS_I32, 2600, 70000, 2, PLAIN);
    run_embedding(MS_BF16, MS_I64, 6, 11, 17, PLAIN);
    run_embedding(MS_F16, MS_I64, 200, 3000, 100, PLAIN); /* sums in pieces */
}

static void test_embedding_names_the_bad_id(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(2, NULL);
    int64_t ids[3] = { 4, 5, -1 };
    ms_tensor *in[2] = { TENSOR(engine, MS_I64, 3), TENSOR(engine, MS_F32, 5, 2) }, *out = NULL,
              *filled = NULL;
    OK(ms_op_apply(engine, &ms_op_fill, NULL, true, &in[1], 1, &filled, 1));
    ms_tensor_release(filled);
    OK(ms_tensor_write(in[0], ids, sizeof ids));
    OK(ms_op_apply(engine, &ms_op_embedding, NULL, false, in, 2, &out, 1));
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_ARGUMENT);
    const char *message = ms_engine_error(engine)->message;
    if (!strstr(message, "embedding") || !strstr(message, "position 1 is 5")
        || !strstr(message, "5 rows"))
        fail_msg("%s", message);
    check_refused(engine, &ms_op_embedding, NULL, (ms_tensor *[]){ in[1], in[1] }, 2,
                  "i64, i32 or u16");
    ms_tensor_release(in[0]);
    ms_tensor_release(in[1]);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    check c = { .op = &ms_op_embedding,
                .ins = 2,
                .outs = 1,
                .in = { { .dtype = MS_I32,
                          .dims = 2,
                          .shape = { 2, 3 },
                          .low = 0,
                          .high = 5,
                          .layout = SWAPPED },
                        { .dtype = MS_F16, .dims = 2, .shape = { 5, 7 }, .layout = SWAPPED } } };
    check_lack_of_memory(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_embedding),
                                        cmocka_unit_test(test_embedding_names_the_bad_id),
                                        cmocka_unit_test(test_lack_of_memory) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
