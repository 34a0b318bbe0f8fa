/* codec.c: floats as bytes and back: every code compared with a list of the format's values,
 * errors, layout, and the same bytes on every instruction set and device.
 * ctest: each-isa poisoned late cuda */
#include "gradcheck.h"

#include <float.h>

static ms_engine *engine;

static int setup(void **state)
{
    (void)state;
    engine = engine_with(2, NULL);
    return 0;
}
static int teardown(void **state)
{
    (void)state;
    ms_engine_free(engine);
    return 0;
}

static ms_attributes codec_of(ms_codec_kind kind, int64_t block)
{
    return (ms_attributes){ .codec = { .codec = { .kind = kind, .block = block } } };
}

/* The value of a code, from the definition of the format. */
static double value_of(ms_codec_kind kind, unsigned code)
{
    if (kind == MS_CODEC_INT8) return (int8_t)code;
    if (kind == MS_CODEC_INT4) return (int)code - 8;
    if (kind == MS_CODEC_INT2) return (double[]){ -3, -1, 1, 3 }[code];
    if (kind == MS_CODEC_SIGN) return code ? 1 : -1;
    bool is_fp8 = kind == MS_CODEC_FP8;
    int mantissa = is_fp8 ? 3 : 1;
    int bias = is_fp8 ? 7 : 1;
    int sign = code >> (is_fp8 ? 7 : 3);
    int exponent = (int)(code >> mantissa) & (is_fp8 ? 15 : 3),
        fraction = (int)code & ((1 << mantissa) - 1);
    double size = exponent == 0 ? ldexp(fraction, 1 - bias - mantissa)
                                : ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
    return sign ? -size : size;
}

static double most_of(ms_codec_kind kind) { return (double[]){ 127, 7, 3, 448, 6, 1 }[kind]; }
static unsigned codes_of(ms_codec_kind kind)
{
    return (unsigned[]){ 256, 16, 4, 256, 16, 2 }[kind];
}
static int bits_of(ms_codec_kind kind) { return (int[]){ 8, 4, 2, 8, 4, 1 }[kind]; }

static unsigned code_at(const uint8_t *codes, int bits, int64_t i)
{
    return codes[i * bits / 8] >> (i * bits % 8) & ((1u << bits) - 1);
}

/* The distance from y to the nearest number that the format has. */
static double nearest(ms_codec_kind kind, double y)
{
    double best = INFINITY;
    for (unsigned code = 0; code < codes_of(kind); code++)
        if (fabs(value_of(kind, code)) <= most_of(kind) && fabs(value_of(kind, code) - y) < best)
            best = fabs(value_of(kind, code) - y);
    return best;
}

static void read_bytes(ms_tensor *tensor, uint8_t **out)
{
    *out = malloc(ms_tensor_bytes(tensor) + 1);
    assert_ok(ms_tensor_engine(tensor), ms_tensor_read(tensor, *out, ms_tensor_bytes(tensor)));
}

/* Rows whose last block is short, in all dtypes: scales, codes, decoded values and errors. */
static void test_codes_are_the_nearest(void **state)
{
    (void)state;
    static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_F16 };
    const int64_t rows = 3, n = 147, block = 40, blocks = 4;
    for (ms_codec_kind kind = 0; kind < MS_CODEC_KINDS; kind++)
        for (size_t d = 0; d < 3; d++) {
            ms_tensor *x = tensor_of(engine, dtypes[d], DIMS(rows, n), NULL), *out[2] = { NULL },
                      *decoded = NULL;
            ms_attributes attributes = codec_of(kind, block);
            attributes.codec.n = n;
            int64_t bytes = ms_codec_bytes(&attributes.codec.codec, n);
            assert_int_equal(bytes, blocks * 4 + (n * bits_of(kind) + 7) / 8);
            assert_ok(engine,
                      ms_op_apply(engine, &ms_op_codec_encode, &attributes, false, &x, 1, out, 2));
            assert_int_equal(ms_tensor_shape(out[0])[1], bytes);
            assert_int_equal(ms_tensor_dtype(out[1]), dtypes[d]);
            decoded = apply(engine, &ms_op_codec_decode, &attributes, out, 1);
            double *values = tensor_get(x), *says = tensor_get(decoded), *left = tensor_get(out[1]);
            uint8_t *payload;
            read_bytes(out[0], &payload);
            for (int64_t i = 0; i < rows * n; i++) {
                int64_t row = i / n, b = i % n / block;
                float scale;
                memcpy(&scale, payload + row * bytes + b * 4, 4);
                double size = 0;
                int64_t count = b < 3 ? block : n - 3 * block;
                for (int64_t k = 0; k < count; k++) {
                    double one = fabs(values[row * n + b * block + k]);
                    size = kind == MS_CODEC_SIGN ? size + one / (double)count
                                                 : fmax(size, one / most_of(kind));
                }
                assert_near(scale, size, 1e-6, "scale", (size_t)i);
                double got = value_of(
                    kind, code_at(payload + row * bytes + blocks * 4, bits_of(kind), i % n));
                assert_near(says[i], got * scale, 1e-6, "decoded", (size_t)i);
                assert_near(left[i], values[i] - says[i], dtypes[d] == MS_F32 ? 1e-6 : 4e-3,
                            "error", (size_t)i);
                if (kind == MS_CODEC_SIGN) assert_true(got == (values[i] >= 0 ? 1 : -1));
                else if (fabs(got - values[i] / scale) > nearest(kind, values[i] / scale) + 1e-4)
                    fail_msg("kind %d, element %d: %g for %g", (int)kind, (int)i, got,
                             values[i] / scale);
            }
            free(values);
            free(says);
            free(left);
            free(payload);
            ms_tensor *all[] = { x, out[0], out[1], decoded };
            for (size_t i = 0; i < 4; i++) ms_tensor_release(all[i]);
        }
}

/* Every number that a format has comes back as it was: ties, subnormals, the greatest. */
static void test_what_the_format_has_is_kept(void **state)
{
    (void)state;
    for (ms_codec_kind kind = MS_CODEC_INT8; kind <= MS_CODEC_FP4; kind++) {
        double values[256];
        int64_t count = 0;
        for (unsigned code = 0; code < codes_of(kind); code++)
            if (fabs(value_of(kind, code)) <= most_of(kind))
                values[count++] = value_of(kind, code) * 0.25;
        ms_tensor *x = tensor_of(engine, MS_F32, DIMS(count), values);
        ms_attributes attributes = codec_of(kind, 256);
        attributes.codec.n = count;
        ms_tensor *payload = apply(engine, &ms_op_codec_encode, &attributes, &x, 1),
                  *back = apply(engine, &ms_op_codec_decode, &attributes, &payload, 1);
        assert_values(back, values, (size_t)count, 0, "kept");
        ms_tensor_release(x);
        ms_tensor_release(payload);
        ms_tensor_release(back);
    }
}

static void test_bare_signs(void **state)
{
    (void)state;
    ms_tensor *x =
        tensor_of(engine, MS_F32, DIMS(10), (double[]){ 1, -2, 0, -0.0, 5, 6, 7, -8, -1, 3 });
    ms_attributes attributes = codec_of(MS_CODEC_SIGN, 8);
    attributes.codec.codec.bare = true;
    attributes.codec.n = 10;
    ms_tensor *payload = apply(engine, &ms_op_codec_encode, &attributes, &x, 1),
              *back = apply(engine, &ms_op_codec_decode, &attributes, &payload, 1);
    assert_values(payload, (double[]){ 1 + 4 + 16 + 32 + 64, 2 }, 2, 0, "bits, the lowest first");
    assert_values(back, (double[]){ 1, -1, 1, -1, 1, 1, 1, -1, -1, 1 }, 10, 0, "signs");
    ms_tensor_release(x);
    ms_tensor_release(payload);
    ms_tensor_release(back);
}

/* Sums and products of the greatest numbers overflow, but their means and the values of codes do
 * not. */
static void test_the_greatest_numbers(void **state)
{
    (void)state;
    enum { N = 200 };
    for (ms_codec_kind kind = 0; kind < MS_CODEC_KINDS; kind++)
        for (int round = 0; round < 2; round++) {
            double values[N], size = round ? FLT_MAX : 3e38;
            for (int i = 0; i < N; i++) values[i] = i % 3 ? size : -size;
            ms_tensor *x = tensor_of(engine, MS_F32, DIMS(N), values), *out[2] = { NULL };
            ms_attributes attributes = codec_of(kind, 64);
            attributes.codec.n = N;
            assert_ok(engine,
                      ms_op_apply(engine, &ms_op_codec_encode, &attributes, false, &x, 1, out, 2));
            ms_tensor *back = apply(engine, &ms_op_codec_decode, &attributes, out, 1);
            double *says = tensor_get(back), *left = tensor_get(out[1]);
            for (size_t i = 0; i < N; i++) {
                assert_near(says[i] / size, values[i] / size, 1e-5, "decoded", i);
                assert_near(left[i] / size, 0, 1e-5, "error", i);
            }
            ms_tensor *all[] = { x, out[0], out[1], back };
            for (size_t i = 0; i < 4; i++) ms_tensor_release(all[i]);
            free(says);
            free(left);
        }
    /* Numbers that are not finite still decode to numbers that are not finite. */
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(3), (double[]){ 3e38, INFINITY, 1 });
    ms_attributes attributes = codec_of(MS_CODEC_SIGN, 64);
    attributes.codec.n = 3;
    ms_tensor *payload = apply(engine, &ms_op_codec_encode, &attributes, &x, 1),
              *back = apply(engine, &ms_op_codec_decode, &attributes, &payload, 1);
    double *says = tensor_get(back);
    for (int i = 0; i < 3; i++) assert_true(isnan(says[i]));
    ms_tensor *all[] = { x, payload, back };
    for (size_t i = 0; i < 3; i++) ms_tensor_release(all[i]);
    free(says);
}

static void test_sum_of_rows(void **state)
{
    (void)state;
    const int64_t rows = 5, n = 1000;
    for (ms_codec_kind kind = 0; kind < MS_CODEC_KINDS; kind++) {
        ms_tensor *x = tensor_of(engine, MS_F32, DIMS(rows, n), NULL);
        ms_attributes attributes = codec_of(kind, 64);
        attributes.codec.n = n;
        ms_tensor *payload = apply(engine, &ms_op_codec_encode, &attributes, &x, 1),
                  *each = apply(engine, &ms_op_codec_decode, &attributes, &payload, 1);
        ms_tensor *sum = apply(engine, &ms_op_codec_decode_sum, &attributes, &payload, 1);
        double *one = tensor_get(each), want[1000];
        for (int64_t i = 0; i < n; i++) {
            float total = 0;
            for (int64_t row = 0; row < rows; row++) total += (float)one[row * n + i];
            want[i] = total;
        }
        /* One multiplication may be fused with the addition. */
        assert_values(sum, want, (size_t)n, 5e-7, "rows added in their order");
        free(one);
        ms_tensor *all[] = { x, payload, each, sum };
        for (size_t i = 0; i < 4; i++) ms_tensor_release(all[i]);
    }
}

/* Blocks with inf or nan decode to nan. Tiny numbers decode to 0, and their values are in the
 * error. */
static void test_nan_and_next_to_nothing(void **state)
{
    (void)state;
    for (ms_codec_kind kind = 0; kind < MS_CODEC_KINDS; kind++) {
        double values[24] = { 0 };
        values[3] = INFINITY;
        values[11] = NAN;
        values[17] = 1e-36;
        ms_tensor *x = tensor_of(engine, MS_F32, DIMS(24), values), *out[2] = { NULL };
        ms_attributes attributes = codec_of(kind, 8);
        attributes.codec.n = 24;
        assert_ok(engine,
                  ms_op_apply(engine, &ms_op_codec_encode, &attributes, false, &x, 1, out, 2));
        ms_tensor *back = apply(engine, &ms_op_codec_decode, &attributes, out, 1);
        double *got = tensor_get(back), *left = tensor_get(out[1]);
        for (int i = 0; i < 16; i++) assert_true(isnan(got[i]));
        for (int i = 16; i < 24; i++) assert_true(fabs(got[i]) < 1e-36);
        assert_true(kind == MS_CODEC_SIGN || left[17] == (float)1e-36);
        free(got);
        free(left);
        ms_tensor *all[] = { x, out[0], out[1], back };
        for (size_t i = 0; i < 4; i++) ms_tensor_release(all[i]);
    }
}

/* To one of the two neighbours, so that the mean over many draws is the number: 4 deviations of the
 * mean, and a new draw differs. */
static void test_stochastic_rounding(void **state)
{
    (void)state;
    const int64_t rows = 2000, n = 9;
    for (ms_codec_kind kind = MS_CODEC_INT8; kind <= MS_CODEC_FP4; kind++) {
        double *values = malloc((size_t)(rows * n) * sizeof *values), sums[9] = { 0 };
        for (int64_t i = 0; i < rows * n; i++)
            values[i] = (double)(float)((double[]){ 1, 0.3, -0.123, 0.77, -0.5, 0.0101, -0.9, 0.61,
                                                    0 }[i % n]);
        ms_tensor *x = tensor_of(engine, MS_F32, DIMS(rows, n), values);
        ms_attributes attributes = codec_of(kind, 16);
        attributes.codec.codec.stochastic = true;
        attributes.codec.random = (ms_random){ 7, 1, 2 };
        attributes.codec.n = n;
        ms_tensor *payload = apply(engine, &ms_op_codec_encode, &attributes, &x, 1),
                  *back = apply(engine, &ms_op_codec_decode, &attributes, &payload, 1);
        attributes.codec.random.draw++;
        ms_tensor *other = apply(engine, &ms_op_codec_encode, &attributes, &x, 1);
        double *got = tensor_get(back);
        for (int64_t i = 0; i < rows * n; i++) {
            /* The gap between neighbours is at most twice the least distance of any number in
             * it. */
            double y = values[i] * most_of(kind), z = got[i] * most_of(kind), gap = 1;
            if (kind == MS_CODEC_FP8) gap = fmax(fabs(y) / 8, 0x1p-9);
            else if (kind == MS_CODEC_INT2) gap = 2;
            else if (kind != MS_CODEC_INT8 && kind != MS_CODEC_INT4) gap = fmax(fabs(y) / 2, 0.5);
            if (fabs(z - y) > gap * 1.0001) fail_msg("kind %d: %g for %g", (int)kind, z, y);
            sums[i % n] += got[i];
        }
        for (int64_t i = 0; i < n; i++) {
            double gap = 2 / most_of(kind);
            if (kind == MS_CODEC_INT8 || kind == MS_CODEC_INT4) gap = 1 / most_of(kind);
            else if (kind == MS_CODEC_FP8) gap = 32 / most_of(kind);
            assert_near(sums[i] / (double)rows, values[i], 4 * gap / 2 / sqrt((double)rows), "mean",
                        (size_t)i);
        }
        uint8_t *a, *b;
        read_bytes(payload, &a);
        read_bytes(other, &b);
        assert_memory_not_equal(a, b, ms_tensor_bytes(payload));
        free(a);
        free(b);
        free(got);
        free(values);
        ms_tensor *all[] = { x, payload, back, other };
        for (size_t i = 0; i < 4; i++) ms_tensor_release(all[i]);
    }
}

/* The same bytes on every device, on plain instructions, and on any number of threads. */
static void test_the_same_bytes_everywhere(void **state)
{
    (void)state;
    const int64_t rows = 3, n = 30011;
    for (ms_codec_kind kind = 0; kind < MS_CODEC_KINDS; kind++) {
        uint8_t *first = NULL;
        for (uint32_t threads = 0; threads <= 3; threads++) {
            ms_engine *own = threads == 0 ? engine_of_cpu()
                                          : engine_with(threads, threads == 1 ? "portable" : NULL);
            double *values = malloc((size_t)(rows * n) * sizeof *values);
            for (int64_t i = 0; i < rows * n; i++)
                values[i] = sin((double)i) * exp(cos((double)i / 100) * 9);
            ms_tensor *x = tensor_of(own, MS_F32, DIMS(rows, n), values);
            ms_attributes attributes = codec_of(kind, 104);
            attributes.codec.codec.stochastic = kind != MS_CODEC_SIGN;
            attributes.codec.random = (ms_random){ 1, 2, 3 };
            ms_tensor *payload = apply(own, &ms_op_codec_encode, &attributes, &x, 1);
            uint8_t *bytes;
            read_bytes(payload, &bytes);
            if (first) assert_memory_equal(first, bytes, ms_tensor_bytes(payload));
            if (first) free(bytes);
            else first = bytes;
            ms_tensor_release(payload);
            ms_tensor_release(x);
            free(values);
            ms_engine_free(own);
        }
        free(first);
    }
}

/* Of two values that are as near, the outer one; both zeros keep their signs; negation is exact. */
static void test_ties_of_two_bits(void **state)
{
    (void)state;
    double values[8] = { 3, 2, 1.9, 0, -0.0, -1.9, -2, -3 },
           kept[8] = { 3, 3, 1, 1, -1, -1, -3, -3 };
    ms_attributes attributes = codec_of(MS_CODEC_INT2, 8);
    attributes.codec.n = 8;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(8), values),
              *payload = apply(engine, &ms_op_codec_encode, &attributes, &x, 1),
              *back = apply(engine, &ms_op_codec_decode, &attributes, &payload, 1);
    assert_values(back, kept, 8, 0, "kept");
    uint8_t *bytes;
    read_bytes(payload, &bytes);
    /* 3, 3, 2, 2, then 1, 1, 0, 0, from the lowest bits on. */
    assert_int_equal(bytes[4], 0xaf);
    assert_int_equal(bytes[5], 0x05);
    free(bytes);
    ms_tensor *all[] = { x, payload, back };
    for (size_t i = 0; i < 3; i++) ms_tensor_release(all[i]);
}

static void test_mistakes_are_named(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(2, 16), NULL),
              *whole = tensor_of(engine, MS_I64, DIMS(2), (double[]){ 0, 0 }), *out = NULL;
    ms_tensor *none = tensor_of(engine, MS_F32, DIMS(2, 0), NULL);
    ms_attributes odd = codec_of(MS_CODEC_INT8, 12), bare = codec_of(MS_CODEC_INT4, 8),
                  rounding = codec_of(MS_CODEC_SIGN, 8), good = codec_of(MS_CODEC_INT8, 8);
    bare.codec.codec.bare = true;
    rounding.codec.codec.stochastic = true;
    assert_refused(engine, ms_op_apply(engine, &ms_op_codec_encode, &odd, false, &x, 1, &out, 1),
                   "multiple of 8");
    assert_refused(engine, ms_op_apply(engine, &ms_op_codec_encode, &bare, false, &x, 1, &out, 1),
                   "only sign");
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_codec_encode, &rounding, false, &x, 1, &out, 1),
                   "does not round");
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_codec_encode, &good, false, &whole, 1, &out, 1),
                   "f32, f16 or bf16");
    assert_refused(engine, ms_op_apply(engine, &ms_op_codec_decode, &good, false, &x, 1, &out, 1),
                   "u8");
    ms_tensor *payload = apply(engine, &ms_op_codec_encode, &good, &x, 1),
              *empty = apply(engine, &ms_op_codec_encode, &good, &none, 1);
    good.codec.n = 17;
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_codec_decode, &good, false, &payload, 1, &out, 1),
                   "rows of 17 numbers have 29 bytes, not 24");
    assert_int_equal(ms_tensor_count(empty), 0);
    ms_tensor *all[] = { x, whole, none, payload, empty };
    for (size_t i = 0; i < 5; i++) ms_tensor_release(all[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codes_are_the_nearest),
        cmocka_unit_test(test_what_the_format_has_is_kept),
        cmocka_unit_test(test_bare_signs),
        cmocka_unit_test(test_the_greatest_numbers),
        cmocka_unit_test(test_sum_of_rows),
        cmocka_unit_test(test_nan_and_next_to_nothing),
        cmocka_unit_test(test_stochastic_rounding),
        cmocka_unit_test(test_the_same_bytes_everywhere),
        cmocka_unit_test(test_ties_of_two_bits),
        cmocka_unit_test(test_mistakes_are_named),
    };
    return cmocka_run_group_tests_name("codec", tests, setup, teardown);
}
