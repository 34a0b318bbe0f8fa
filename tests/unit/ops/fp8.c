/* fp8.c: matrices and spans in 8-bit floats, and linear layers that multiply them: codes by the
 * definition of the formats and PyTorch's, the same bytes as on a CPU, products by their terms in
 * f64, refusals.
 * ctest: each-isa poisoned late cuda */
#include "gradcheck.h"

#include "exec/engine.h"
#include "moonshard/io.h"
#include "ops/autocast.h"
#include "ops/fp8.h"

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

/* ----------------------------------------------------------------- payloads */

/* A payload in the host's memory. */
typedef struct coded {
    uint8_t *codes;
    int64_t rows, columns;
    ms_fp8_scale scale;
    ms_fp8_format format;
} coded;

static coded read_coded(ms_tensor *payload, int64_t rows, int64_t columns, ms_fp8_format format)
{
    size_t bytes = ms_tensor_bytes(payload);
    coded c = { .codes = malloc(bytes), .rows = rows, .columns = columns, .format = format };
    assert_ok(ms_tensor_engine(payload), ms_tensor_read(payload, c.codes, bytes));
    memcpy(&c.scale, c.codes + bytes - sizeof c.scale, sizeof c.scale);
    return c;
}

static void check_turned(const coded *c, const uint8_t *turned)
{
    for (int64_t i = 0; i < c->rows; i++)
        for (int64_t j = 0; j < c->columns; j++)
            assert_int_equal(turned[j * c->rows + i], c->codes[i * c->columns + j]);
}

/* On a device for GPUs also the codes of the transpose, beside them and alone. */
static coded code(ms_engine *on, ms_tensor *x, ms_fp8_format format)
{
    ms_tensor *payload = NULL, *turned[2] = { NULL };
    int64_t columns = ms_tensor_shape(x)[ms_tensor_dims(x) - 1],
            rows = ms_tensor_count(x) / columns;
    bool turns = ms_engine_is_for_gpu(on);
    assert_ok(on, ms_fp8_encode(on, x, format, &payload, turns ? &turned[0] : NULL));
    coded c = read_coded(payload, rows, columns, format);
    if (turns) assert_ok(on, ms_fp8_encode(on, x, format, NULL, &turned[1]));
    for (int i = 0; i < 2 && turns; i++) {
        coded t = read_coded(turned[i], columns, rows, format);
        assert_memory_equal(&t.scale, &c.scale, sizeof c.scale);
        check_turned(&c, t.codes);
        free(t.codes);
        ms_tensor_release(turned[i]);
    }
    ms_tensor_release(payload);
    return c;
}

/* What a code represents, by the definition of the format; NaN for codes that represent no number.
 */
static double value_of(unsigned code, ms_fp8_format format)
{
    int mantissa = format == MS_FP8_E4M3 ? 3 : 2, bias = format == MS_FP8_E4M3 ? 7 : 15;
    unsigned size = code & 0x7f, fraction = size & ((1u << mantissa) - 1);
    int exponent = (int)(size >> mantissa);
    if (format == MS_FP8_E4M3 ? size == 0x7f : size >= 0x7c) return NAN;
    double value = exponent ? ldexp((1 << mantissa) + (int)fraction, exponent - bias - mantissa)
                            : ldexp((int)fraction, 1 - bias - mantissa);
    return code & 0x80 ? -value : value;
}

static double greatest_of(ms_fp8_format format) { return format == MS_FP8_E4M3 ? 448 : 57344; }

/* The code of the nearest number, of two the one whose last bit is 0. */
static unsigned nearest(double x, ms_fp8_format format)
{
    unsigned best = 0;
    for (unsigned code = 0; code < 0x80 && !isnan(value_of(code, format)); code++) {
        double less = fabs(value_of(code, format) - fabs(x)),
               least = fabs(value_of(best, format) - fabs(x));
        if (less < least || (less == least && code % 2 == 0)) best = code;
    }
    return best | (signbit(x) ? 0x80 : 0);
}

static float most_of(const coded *c) { return ms_float_from_bits(c->scale.most); }

/* All that fp8.h states of a payload of finite numbers. */
static void check_coded(const coded *c, const double *values)
{
    double most = 0, scale = (double)c->scale.scale;
    size_t count = (size_t)(c->rows * c->columns);
    int exponent;
    for (size_t i = 0; i < count; i++) most = fmax(most, fabs(values[i]));
    assert_true((double)most_of(c) == most);
    assert_true(frexp(scale, &exponent) == 0.5);
    if (most == 0) assert_true(scale == 1);
    else {
        assert_true(most <= greatest_of(c->format) * scale);
        assert_true(most > greatest_of(c->format) * scale / 2 || scale == 0x1p-100);
    }
    for (size_t i = 0; i < count; i++)
        if (c->codes[i] != nearest(values[i] / scale, c->format))
            fail_msg("%.9g / %g has the code %02x, not %02x", values[i], scale, c->codes[i],
                     nearest(values[i] / scale, c->format));
}

/* Sizes of one tile and of many, odd numbers of tiles, and windows whose rows are apart or begin
 * anywhere. */
static void test_codes_are_the_nearest(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = { { 16, 16 }, { 48, 80 }, { 64, 64 }, { 336, 272 } };
    for (size_t s = 0; s < COUNT(shapes); s++)
        for (ms_dtype dtype = MS_F32; dtype <= MS_BF16; dtype += MS_BF16 - MS_F32)
            for (ms_fp8_format format = MS_FP8_E4M3; format <= MS_FP8_E5M2; format++) {
                int64_t rows = shapes[s][0], columns = shapes[s][1];
                ms_tensor *whole = tensor_of(engine, dtype, DIMS(rows, columns + 3), NULL),
                          *part = window_of(whole, DIMS(rows, columns), SHAPE(columns + 3, 1), 3),
                          *turned = window_of(whole, DIMS(columns, rows), SHAPE(1, columns + 3), 0),
                          *flat = window_of(whole, DIMS(1, rows, columns), SHAPE(1, columns, 1), 1);
                ms_tensor *all[] = { part, turned, flat };
                for (size_t i = 0; i < COUNT(all); i++) {
                    double *values = tensor_get(all[i]);
                    coded c = code(engine, all[i], format);
                    check_coded(&c, values);
                    free(c.codes);
                    free(values);
                }
                ms_tensor_release(whole);
                release_all(all, COUNT(all));
            }
}

/* The bits of an f32 as they are, subnormal ones too. */
static ms_tensor *of_bits(ms_engine *on, const uint32_t *bits, int64_t rows, int64_t columns)
{
    ms_tensor *x = NULL;
    assert_ok(on, ms_tensor_new(on, MS_F32, DIMS(rows, columns), &x));
    assert_ok(on, ms_tensor_write(x, bits, ms_tensor_bytes(x)));
    return x;
}

/* Numbers that are too small to be scaled have the codes of 0, with their signs. */
static void test_small_numbers(void **state)
{
    (void)state;
    static const uint32_t most[] = { 0, 1, 0x7fffff, 0x800000, 0x0d800000, 0x1a000000 };
    for (size_t m = 0; m < COUNT(most); m++)
        for (ms_fp8_format format = MS_FP8_E4M3; format <= MS_FP8_E5M2; format++) {
            uint32_t bits[256] = { 0 };
            for (uint32_t i = 0; i < 256; i++) bits[i] = most[m] >> i % 24 | i % 2 << 31;
            bits[77] = most[m];
            ms_tensor *x = of_bits(engine, bits, 16, 16);
            coded c = code(engine, x, format);
            assert_int_equal(c.scale.most, most[m]);
            assert_int_equal(ms_bits_from_float(c.scale.scale),
                             most[m] == 0 ? 0x3f800000
                             : most[m] == 0x1a000000
                                 ? (0x1a000000 - (format ? 15u << 23 : 8u << 23))
                                 : 27u << 23);
            for (uint32_t i = 0; i < 256; i++) {
                double value = (double)ms_float_from_bits(bits[i] & 0x7fffffff);
                if ((bits[i] & 0x7fffffff) < 0x800000) value = 0;
                value = copysign(value / (double)c.scale.scale, bits[i] >> 31 ? -1 : 1);
                assert_int_equal(c.codes[i], nearest(value, format));
            }
            free(c.codes);
            ms_tensor_release(x);
        }
}

/* One number that is not finite makes all of them NaN, and so is each result. */
static void test_not_finite(void **state)
{
    (void)state;
    static const uint32_t bad[] = { 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001 };
    for (size_t b = 0; b < COUNT(bad); b++)
        for (ms_fp8_format format = MS_FP8_E4M3; format <= MS_FP8_E5M2; format++) {
            uint32_t bits[256] = { 0 };
            bits[200] = bad[b];
            bits[3] = 0x7f7fffff;
            ms_tensor *x = of_bits(engine, bits, 16, 16), *y = NULL;
            coded c = code(engine, x, format);
            assert_true(isnan(c.scale.scale));
            assert_int_equal(c.scale.most, bad[b] & 0x7fffffff);
            for (int i = 0; i < 256; i++) assert_int_equal(c.codes[i], 0x7f);
            ms_engine_set_autocast(engine, MS_BF16);
            ms_engine_set_fp8(engine, MS_FP8_ON);
            y = apply(engine, &ms_op_linear, NULL, OPERANDS(x, x), 2);
            ms_engine_set_autocast(engine, MS_F32);
            double *values = tensor_get(y);
            for (int i = 0; i < 256; i++) assert_true(isnan(values[i]));
            free(values);
            free(c.codes);
            ms_tensor_release(x);
            ms_tensor_release(y);
        }
}

/* The whole range of sizes, in all bytes as an engine on a CPU writes them. */
static void test_bytes_are_those_of_the_cpu(void **state)
{
    (void)state;
    ms_engine *cpu = engine_of_cpu();
    for (uint32_t spread = 1; spread < 250; spread += 31)
        for (ms_fp8_format format = MS_FP8_E4M3; format <= MS_FP8_E5M2; format++) {
            uint32_t bits[96 * 80], random[4];
            for (uint64_t i = 0; i < COUNT(bits); i++) {
                ms_philox(3, spread, i, random);
                bits[i] = (random[0] & 0x807fffff) | (random[1] % spread) << 23;
            }
            ms_tensor *x = of_bits(engine, bits, 96, 80), *y = of_bits(cpu, bits, 96, 80);
            coded a = code(engine, x, format), b = code(cpu, y, format);
            assert_memory_equal(a.codes, b.codes, sizeof bits / 4);
            assert_memory_equal(&a.scale, &b.scale, sizeof a.scale);
            free(a.codes);
            free(b.codes);
            ms_tensor_release(x);
            ms_tensor_release(y);
        }
    ms_engine_free(cpu);
}

/* ------------------------------------------------------------------- spans */

/* Numbers in spans, with what the tasks made of them, in the host's memory. `skip` elements come
 * before each array, so that it begins at any address. */
typedef struct spanned {
    ms_fp8_span_args args;
    ms_dtype dtype;
    int64_t skip, all; /* all: elements of the codes and of what is decoded */
    uint32_t *bits;    /* of the numbers, as f32 */
    uint32_t most[MS_FP8_SPANS], given[MS_FP8_SPANS]; /* found; encoded and decoded with */
    uint8_t *codes;
    uint32_t *decoded;
} spanned;

enum { MARK8 = 0xa5 };
static const float MARK = 12288;

static ms_tensor *bytes_of(ms_dtype dtype, int64_t count, const void *from)
{
    ms_tensor *x = NULL;
    assert_ok(engine, ms_tensor_new(engine, dtype, DIMS(count), &x));
    assert_ok(engine, ms_tensor_write(x, from, ms_tensor_bytes(x)));
    return x;
}

/* `count` numbers after `skip` others, of dtype. */
static ms_tensor *numbers_of(const spanned *s, const uint32_t *bits, int64_t count)
{
    bool wide = s->dtype == MS_F32;
    size_t item = wide ? 4 : 2;
    uint8_t *memory = malloc((size_t)(s->skip + count) * item);
    for (int64_t i = 0; i < s->skip + count; i++) {
        uint32_t word = i < s->skip ? 0x7f7fffff : bits[i - s->skip];
        uint16_t half = (uint16_t)(word >> 16);
        memcpy(memory + (size_t)i * item, wide ? (void *)&word : (void *)&half, item);
    }
    ms_tensor *x = bytes_of(s->dtype, s->skip + count, memory);
    free(memory);
    return x;
}

static void run_spans(const spanned *s, ms_kernel kernel, ms_tensor *from, ms_tensor *most,
                      ms_tensor *to)
{
    bool finds = kernel == MS_KERNEL_fp8_span_most;
    ms_fp8_span_args args = s->args;
    ms_tensor *reads[] = { from, most }, *writes[] = { finds ? most : to };
    args.dtype = (uint8_t)s->dtype;
    args.most = ms_tensor_data(most);
    args.from =
        (uint8_t *)ms_tensor_data(from) + (size_t)s->skip * ms_dtype_bytes(ms_tensor_dtype(from));
    if (!finds)
        args.to =
            (uint8_t *)ms_tensor_data(to) + (size_t)s->skip * ms_dtype_bytes(ms_tensor_dtype(to));
    assert_ok(engine, ms_tensor_enqueue(engine, ms_engine_kernel(engine, kernel), &args, reads,
                                        finds ? 1 : 2, writes, 1, (ms_task_cost){ 0 }));
}

static void read_codes(spanned *s, ms_tensor *codes)
{
    uint8_t *memory = malloc(ms_tensor_bytes(codes));
    assert_ok(engine, ms_tensor_read(codes, memory, ms_tensor_bytes(codes)));
    for (int64_t i = 0; i < s->skip; i++) assert_int_equal(memory[i], MARK8);
    s->codes = malloc((size_t)s->all);
    memcpy(s->codes, memory + s->skip, (size_t)s->all);
    free(memory);
}

static void read_decoded(spanned *s, ms_tensor *decoded)
{
    double *values = tensor_get(decoded);
    s->decoded = malloc((size_t)s->all * sizeof *s->decoded);
    for (int64_t i = 0; i < s->all; i++)
        s->decoded[i] = ms_bits_from_float((float)values[s->skip + i]);
    free(values);
}

/* Finds the greatest sizes; encodes with them times `more`, as if other ranks had greater ones;
 * decodes `repeats` copies of the codes. */
static void run_all(spanned *s, float more)
{
    ms_fp8_span_args *args = &s->args;
    int64_t end = args->bounds[args->spans];
    uint32_t mark = ms_bits_from_float(MARK), unset[MS_FP8_SPANS];
    uint32_t *marks = malloc((size_t)s->all * sizeof *marks);
    uint8_t *bytes = malloc((size_t)(s->skip + s->all));
    memset(bytes, MARK8, (size_t)(s->skip + s->all));
    memset(unset, MARK8, sizeof unset);
    for (int64_t i = 0; i < s->all; i++) marks[i] = mark;
    ms_tensor *x = numbers_of(s, s->bits, end), *most = bytes_of(MS_I32, MS_FP8_SPANS, unset),
              *codes = bytes_of(MS_U8, s->skip + s->all, bytes),
              *decoded = numbers_of(s, marks, s->all);
    run_spans(s, MS_KERNEL_fp8_span_most, x, most, NULL);
    assert_ok(engine, ms_tensor_read(most, s->most, sizeof s->most));
    for (uint32_t k = 0; k < args->spans; k++)
        s->given[k] = s->most[k] >= 0x7f800000u
                          ? s->most[k]
                          : ms_bits_from_float(ms_float_from_bits(s->most[k]) * more);
    for (uint32_t k = args->spans; k < MS_FP8_SPANS; k++) assert_int_equal(s->most[k], unset[0]);
    assert_ok(engine, ms_tensor_write(most, s->given, sizeof s->given));
    run_spans(s, MS_KERNEL_fp8_span_encode, x, most, codes);
    read_codes(s, codes);
    for (int64_t r = 1; r < args->repeats; r++)
        memcpy(s->codes + r * args->period, s->codes, (size_t)end);
    memcpy(bytes + s->skip, s->codes, (size_t)s->all);
    assert_ok(engine, ms_tensor_write(codes, bytes, ms_tensor_bytes(codes)));
    run_spans(s, MS_KERNEL_fp8_span_decode, codes, most, decoded);
    read_decoded(s, decoded);
    ms_tensor *all[] = { x, most, codes, decoded };
    release_all(all, COUNT(all));
    free(marks);
    free(bytes);
}

static bool is_not_finite(uint32_t most) { return most >= 0x7f800000u; }

static void check_decoded(const spanned *s, uint32_t span, int64_t i, double scale)
{
    for (int64_t r = 0; r < s->args.repeats; r++) {
        float got = ms_float_from_bits(s->decoded[r * s->args.period + i]);
        double expected = value_of(s->codes[i], MS_FP8_E4M3) * scale;
        if (is_not_finite(s->given[span])) assert_true(isnan(got));
        else if ((double)got != expected || !signbit(got) != !signbit(expected))
            fail_msg("code %02x is decoded to %.9g, not %.9g", s->codes[i], (double)got, expected);
    }
}

/* Against the definitions, in f64. What is in no span is as it was. */
static void check_spans(const spanned *s)
{
    const ms_fp8_span_args *args = &s->args;
    for (uint32_t k = 0; k < args->spans; k++) {
        uint32_t most = 0;
        double scale = (double)ms_float_from_bits(ms_fp8_scale_bits(s->given[k], MS_FP8_E4M3));
        for (int64_t i = args->bounds[k]; i < args->bounds[k + 1]; i++)
            if ((s->bits[i] & 0x7fffffff) > most) most = s->bits[i] & 0x7fffffff;
        assert_int_equal(s->most[k], most);
        for (int64_t i = args->bounds[k]; i < args->bounds[k + 1]; i++) {
            double x = (double)ms_float_from_bits(s->bits[i]);
            assert_int_equal(s->codes[i],
                             is_not_finite(s->given[k]) ? 0x7f : nearest(x / scale, MS_FP8_E4M3));
            check_decoded(s, k, i, scale);
        }
    }
    for (int64_t i = 0; i < s->all; i++) {
        int64_t at = i % args->period;
        if (at >= args->bounds[0] && at < args->bounds[args->spans]) continue;
        assert_int_equal(s->codes[i], MARK8);
        assert_true(ms_float_from_bits(s->decoded[i]) == MARK);
    }
}

/* Random numbers, each span of another order of magnitude. bad: bits of one number of span 1. */
static void fill_spans(spanned *s, uint32_t bad)
{
    const ms_fp8_span_args *args = &s->args;
    int64_t end = args->bounds[args->spans];
    s->bits = calloc((size_t)end + 1, sizeof *s->bits);
    for (uint32_t k = 0; k < args->spans; k++)
        for (int64_t i = args->bounds[k]; i < args->bounds[k + 1]; i++) {
            uint32_t random[4];
            ms_philox(7, k, (uint64_t)i, random);
            s->bits[i] = (random[0] & 0x807fffff) | (60 + 7 * (k % 20) + random[1] % 14) << 23;
            if (k == 3) s->bits[i] = random[0] & 0x80000000;
            if (s->dtype == MS_BF16) s->bits[i] &= 0xffff0000;
        }
    if (bad) s->bits[args->bounds[1] + 5] = bad;
}

static void check_case(spanned s, uint32_t bad, float more)
{
    fill_spans(&s, bad);
    run_all(&s, more);
    check_spans(&s);
    free(s.bits);
    free(s.codes);
    free(s.decoded);
}

/* Spans that begin and end anywhere, empty ones, one of zeros, as many as a task takes, and several
 * tiles; arrays that begin anywhere; numbers that are not finite. */
static void test_spans(void **state)
{
    (void)state;
    static const int64_t cuts[][8] = { { 0, 16, 48, 48, 64 },
                                       { 0, 7, 40, 59, 59, 77, 600 },
                                       { 3, 19, 1040, 1041, 5000, 5016, 5017 },
                                       { 16, 32, 20000, 20003, 20036, 20052, 70011 } };
    static const uint32_t bad[] = { 0, 0x7f800000, 0xffc00000 };
    for (size_t c = 0; c < COUNT(cuts); c++)
        for (ms_dtype dtype = MS_F32; dtype <= MS_BF16; dtype += MS_BF16 - MS_F32)
            for (size_t b = 0; b < (c == 3 ? 1 : COUNT(bad)); b++)
                for (int64_t skip = c == 3 && dtype == MS_F32 ? 16 : 0; skip < 17;
                     skip += c == 3 ? 17 : 1 + skip * 3) {
                    spanned s = { .dtype = dtype, .skip = skip };
                    s.args.spans = c == 0 ? 4 : 6;
                    memcpy(s.args.bounds, cuts[c], (s.args.spans + 1u) * sizeof(int64_t));
                    s.args.repeats = c == 3 ? 1 : 1 + skip % 3;
                    s.args.period = s.args.bounds[s.args.spans] + (int64_t)c * 5;
                    s.all = s.args.period * s.args.repeats;
                    check_case(s, bad[b], skip % 2 ? 3 : 1);
                }
}

static void test_many_spans(void **state)
{
    (void)state;
    spanned s = { .dtype = MS_F32, .skip = 0 };
    s.args.spans = MS_FP8_SPANS;
    for (int64_t k = 0; k <= MS_FP8_SPANS; k++) s.args.bounds[k] = 37 * k;
    s.args.repeats = 2;
    s.all = 2 * (s.args.period = 37 * MS_FP8_SPANS);
    check_case(s, 0, 1);
}

/* What is decoded has the numbers of the first codes when it is encoded again, also where the scale
 * is half of what it was. */
static void test_encoded_again(void **state)
{
    (void)state;
    static const float most[] = { 448, 224.1f, 231, 224, 233, 300, 0x1p-93f, 0x1p-97f, 0x1p120f };
    for (size_t m = 0; m < COUNT(most); m++) {
        uint32_t bits[256], random[4];
        for (uint64_t i = 0; i < 256; i++) {
            ms_philox(5, m, i, random);
            bits[i] = ms_bits_from_float(most[m] * ((float)random[0] * 0x1p-31f - 1)
                                         * (random[1] % 3 ? 1 : 0x1p-9f));
        }
        bits[9] = ms_bits_from_float(-most[m]);
        ms_tensor *x = of_bits(engine, bits, 16, 16), *y = NULL;
        coded a = code(engine, x, MS_FP8_E4M3);
        spanned s = { .dtype = MS_F32, .bits = bits, .all = 256 };
        s.args.spans = 1;
        s.args.bounds[1] = s.args.period = 256;
        s.args.repeats = 1;
        run_all(&s, 1);
        assert_int_equal(s.most[0], a.scale.most);
        assert_memory_equal(s.codes, a.codes, 256);
        y = of_bits(engine, s.decoded, 16, 16);
        coded b = code(engine, y, MS_FP8_E4M3);
        for (int i = 0; i < 256; i++)
            assert_true(value_of(a.codes[i], MS_FP8_E4M3) * (double)a.scale.scale
                        == value_of(b.codes[i], MS_FP8_E4M3) * (double)b.scale.scale);
        free(a.codes);
        free(b.codes);
        free(s.codes);
        free(s.decoded);
        ms_tensor_release(x);
        ms_tensor_release(y);
    }
}

/* -------------------------------------------------------------- golden data */

static ms_safetensors *golden_open(ms_context *context)
{
    char path[4096];
    const char *source = getenv("MOONSHARD_SOURCE");
    ms_safetensors *file = NULL;
    snprintf(path, sizeof path, "%s/tests/golden/fp8/fp8.safetensors", source ? source : ".");
    if (ms_safetensors_open(context, path, &file)) fail_msg("%s", context->error.message);
    return file;
}

static ms_tensor *golden(ms_safetensors *file, const char *a, const char *b)
{
    char name[100];
    ms_tensor *out = NULL;
    snprintf(name, sizeof name, "%s%s", a, b);
    const ms_safetensors_entry *entry = ms_safetensors_find(file, name);
    if (!entry) fail_msg("%s is not in the file", name);
    assert_ok(engine, ms_safetensors_load(engine, file, entry, NULL, &out));
    return out;
}

static double golden_number(ms_safetensors *file, const char *a, const char *b)
{
    ms_tensor *tensor = golden(file, a, b);
    double *values = tensor_get(tensor), number = values[0];
    free(values);
    ms_tensor_release(tensor);
    return number;
}

static void test_golden_casts(void **state)
{
    (void)state;
    static const char *const
        cases[] = { "normal.f32",    "normal.bf16",   "wide.f32",      "wide.bf16",
                    "tiny.f32",      "tiny.bf16",     "huge.f32",      "huge.bf16",
                    "zeros.f32",     "zeros.bf16",    "ties_e4m3.f32", "ties_e4m3.bf16",
                    "ties_e5m2.f32", "ties_e5m2.bf16" },
        *const formats[] = { ".e4m3", ".e5m2" }, *const scales[] = { ".e4m3.scale", ".e5m2.scale" };
    ms_safetensors *file = golden_open(ms_engine_context(engine));
    for (size_t i = 0; i < COUNT(cases); i++)
        for (ms_fp8_format format = MS_FP8_E4M3; format <= MS_FP8_E5M2; format++) {
            ms_tensor *x = golden(file, cases[i], ".x"),
                      *codes = golden(file, cases[i], formats[format]);
            coded c = code(engine, x, format);
            size_t bytes = ms_tensor_bytes(codes);
            uint8_t *expected = malloc(bytes);
            assert_ok(engine, ms_tensor_read(codes, expected, bytes));
            assert_true((double)most_of(&c) == golden_number(file, cases[i], ".most"));
            assert_true((double)c.scale.scale == golden_number(file, cases[i], scales[format]));
            assert_memory_equal(c.codes, expected, bytes);
            free(expected);
            free(c.codes);
            ms_tensor_release(x);
            ms_tensor_release(codes);
        }
    ms_safetensors_close(file);
}

/* ---------------------------------------------------------------- linear layers */

/* Tensors of a call and of its backward. */
typedef struct layer {
    const ms_op *op;
    ms_attributes attributes;
    ms_fp8 mode;
    ms_tensor *in[3], *g; /* x, weight, bias or NULL; of the result */
    ms_tensor *homes[3];  /* of gradients, or NULL */
    ms_tensor *out, *results[3];
    ms_tensor *saved[MS_OP_SAVED_MAX];
    uint32_t saved_count;
    bool needs[3];
} layer;

static ms_tensor_info info_from(const ms_tensor *tensor)
{
    ms_tensor_info info = { .dtype = ms_tensor_dtype(tensor), .dims = ms_tensor_dims(tensor) };
    for (uint32_t d = 0; d < info.dims; d++) info.shape[d] = ms_tensor_shape(tensor)[d];
    return info;
}

/* Under autocast in fp8 forward, outside of it backward, as a training step calls them. */
static void run_layer(layer *l)
{
    ms_tensor_info in[3] = { 0 }, out;
    ms_op_call call = { .engine = engine,
                        .op = l->op,
                        .attributes = l->attributes,
                        .inputs = l->in,
                        .input_count = 3,
                        .outputs = &l->out,
                        .output_count = 1,
                        .record = true };
    ms_engine_set_autocast(engine, MS_BF16);
    ms_engine_set_fp8(engine, MS_FP8_ON);
    if (l->mode) ms_engine_set_fp8(engine, l->mode);
    assert_ok(engine, ms_op_run(&call));
    ms_engine_set_fp8(engine, MS_FP8_OFF);
    ms_engine_set_autocast(engine, MS_F32);
    assert_int_equal(ms_tensor_dtype(l->out), MS_BF16);
    out = info_from(l->out);
    for (int i = 0; i < 3; i++)
        if (l->in[i]) in[i] = info_from(l->in[i]);
    ms_op_gradient gradient = { .engine = engine,
                                .op = l->op,
                                .attributes = call.attributes,
                                .saved = call.saved,
                                .saved_count = call.saved_count,
                                .inputs = in,
                                .input_count = 3,
                                .outputs = &out,
                                .gradients = &l->g,
                                .output_count = 1,
                                .results = l->results,
                                .needs = l->needs,
                                .homes = l->homes };
    assert_ok(engine, l->op->backward(&gradient));
    l->saved_count = call.saved_count;
    memcpy(l->saved, call.saved, sizeof l->saved);
}

static void free_layer(layer *l)
{
    release_all(l->in, 3);
    release_all(l->results, 3);
    release_all(l->saved, l->saved_count);
    ms_tensor_release(l->out);
    ms_tensor_release(l->g);
    ms_engine_drop_casts(engine);
}

/* A matrix in f64 that a product reads in either direction. */
typedef struct matrix {
    double *values;
    int64_t row, column; /* elements to the next one */
} matrix;

static matrix matrix_of(const coded *c, bool turned)
{
    size_t count = (size_t)(c->rows * c->columns);
    matrix m = { .values = malloc(count * sizeof(double)),
                 .row = turned ? 1 : c->columns,
                 .column = turned ? c->columns : 1 };
    for (size_t i = 0; i < count; i++)
        m.values[i] = value_of(c->codes[i], c->format) * (double)c->scale.scale;
    return m;
}

/* Each element of `got` is a b (+ bias) within the stated bound: k + 2 roundings in f32 of terms
 * whose sizes sum up to `sizes`, and one to bf16. On a GPU the bias is rounded to bf16, too. */
static void check_product(ms_tensor *got, const coded *a, bool a_turned, const coded *b,
                          bool b_turned, ms_tensor *bias)
{
    matrix left = matrix_of(a, a_turned), right = matrix_of(b, b_turned);
    int64_t m = a_turned ? a->columns : a->rows, k = a_turned ? a->rows : a->columns,
            n = b_turned ? b->rows : b->columns;
    double *values = tensor_get(got), *added = bias ? tensor_get(bias) : NULL;
    assert_int_equal(ms_tensor_count(got), m * n);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = added ? added[j] : 0, sizes = fabs(sum);
            for (int64_t l = 0; l < k; l++) {
                double term = left.values[i * left.row + l * left.column]
                              * right.values[l * right.row + j * right.column];
                sum += term;
                sizes += fabs(term);
            }
            double bound = (double)(k + 2) * 0x1p-24 * sizes;
            if (ms_tensor_dtype(got) == MS_BF16) bound += fabs(sum) * 0x1p-8;
            if (added && ms_engine_is_for_gpu(engine)) bound += fabs(added[j]) * 0x1p-8;
            if (!(fabs(values[i * n + j] - sum) <= bound))
                fail_msg("[%d, %d] is %.9g, not %.9g within %.3g", (int)i, (int)j,
                         values[i * n + j], sum, bound);
        }
    free(added);
    free(values);
    free(left.values);
    free(right.values);
}

static void check_layer(const ms_op *op, ms_fp8 mode, ms_dtype x, ms_dtype w, int64_t rows,
                        int64_t in, int64_t out, unsigned needs)
{
    bool turned = op == &ms_op_linear_t;
    layer l = { .op = op,
                .mode = mode,
                .in = { tensor_of(engine, x, DIMS(2, rows / 2, in), NULL),
                        turned ? tensor_of(engine, w, DIMS(in, out), NULL)
                               : tensor_of(engine, w, DIMS(out, in), NULL),
                        tensor_of(engine, w, DIMS(out), NULL) },
                .g = tensor_of(engine, MS_BF16, DIMS(2, rows / 2, out), NULL),
                .needs = { needs & 1, needs & 2, needs & 4 } };
    run_layer(&l);
    coded a = code(engine, l.in[0], MS_FP8_E4M3), b = code(engine, l.in[1], MS_FP8_E4M3),
          g = code(engine, l.g, MS_FP8_E5M2);
    check_product(l.out, &a, false, &b, !turned, l.in[2]);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(l.results[i] != NULL, l.needs[i]);
        if (l.results[i]) assert_int_equal(ms_tensor_dtype(l.results[i]), i == 0 ? x : w);
    }
    if (l.needs[0]) check_product(l.results[0], &g, false, &b, turned, NULL);
    if (l.needs[1])
        check_product(l.results[1], turned ? &a : &g, true, turned ? &g : &a, false, NULL);
    if (l.needs[2]) {
        double *sums = tensor_get(l.results[2]), *values = tensor_get(l.g);
        for (int64_t j = 0; j < out; j++) {
            double sum = 0;
            for (int64_t i = 0; i < rows; i++) sum += values[i * out + j];
            assert_near(sums[j], sum, w == MS_F32 ? 1e-5 : 1e-2, "gradient of the bias", (size_t)j);
        }
        free(sums);
        free(values);
    }
    free(a.codes);
    free(b.codes);
    free(g.codes);
    free_layer(&l);
}

static void test_products(void **state)
{
    (void)state;
    const ms_op *ops[] = { &ms_op_linear, &ms_op_linear_t };
    for (int i = 0; i < 2; i++)
        for (ms_fp8 mode = MS_FP8_ON; mode <= MS_FP8_EMULATED; mode++) {
            check_layer(ops[i], mode, MS_F32, MS_F32, 16, 16, 16, 7);
            check_layer(ops[i], mode, MS_BF16, MS_F32, 32, 48, 80, 7);
            check_layer(ops[i], mode, MS_BF16, MS_BF16, 64, 144, 32, 7);
            check_layer(ops[i], mode, MS_F32, MS_BF16, 160, 64, 272, 7);
            for (unsigned needs = 0; needs < 7; needs++)
                check_layer(ops[i], mode, MS_BF16, MS_F32, 16, 32, 16, needs);
        }
}

/* The place of a weight's gradient in a bucket may begin at any element. */
static void test_homes(void **state)
{
    (void)state;
    for (int64_t at = 0; at < 3; at++) {
        layer l = { .op = &ms_op_linear,
                    .in = { tensor_of(engine, MS_BF16, DIMS(32, 48), NULL),
                            tensor_of(engine, MS_F32, DIMS(64, 48), NULL) },
                    .g = tensor_of(engine, MS_BF16, DIMS(32, 64), NULL),
                    .needs = { false, true, false } };
        ms_tensor *room = tensor_of(engine, MS_F32, DIMS(64 * 48 + 3), NULL);
        l.homes[1] = window_of(room, DIMS(64, 48), SHAPE(48, 1), at);
        run_layer(&l);
        assert_ptr_equal(l.results[1], l.homes[1]);
        coded a = code(engine, l.in[0], MS_FP8_E4M3), g = code(engine, l.g, MS_FP8_E5M2);
        check_product(l.homes[1], &g, true, &a, false, NULL);
        free(a.codes);
        free(g.codes);
        ms_tensor_release(l.homes[1]);
        ms_tensor_release(room);
        free_layer(&l);
    }
}

/* Forward keeps codes: half of what 16 bits take, and the scales. */
static void test_codes_are_kept(void **state)
{
    (void)state;
    layer l = { .op = &ms_op_linear,
                .in = { tensor_of(engine, MS_BF16, DIMS(32, 48), NULL),
                        tensor_of(engine, MS_F32, DIMS(64, 48), NULL) },
                .g = tensor_of(engine, MS_BF16, DIMS(32, 64), NULL) };
    run_layer(&l);
    assert_int_equal(l.saved_count, 2);
    for (int i = 0; i < 2; i++) assert_int_equal(ms_tensor_dtype(l.saved[i]), MS_U8);
    assert_int_equal(ms_tensor_bytes(l.saved[0]), 32 * 48 + sizeof(ms_fp8_scale));
    assert_int_equal(ms_tensor_bytes(l.saved[1]),
                     (ms_engine_is_for_gpu(engine) ? 2 : 1) * 64 * 48 + sizeof(ms_fp8_scale));
    free_layer(&l);
}

/* PyTorch's numbers: the bits of its f64 results in f32, within the sums' roundings. */
static void test_golden_layer(void **state)
{
    (void)state;
    static const char *const names[] = { "grad.x", "grad.weight", "grad.bias" };
    ms_safetensors *file = golden_open(ms_engine_context(engine));
    layer l = { .op = &ms_op_linear,
                .in = { golden(file, "linear.", "x"), golden(file, "linear.", "weight"),
                        golden(file, "linear.", "bias") },
                .g = golden(file, "linear.", "gradient"),
                .needs = { true, true, true } };
    run_layer(&l);
    ms_tensor *y = golden(file, "linear.", "y");
    double *expected = tensor_get(y);
    double tolerance = ms_engine_is_for_gpu(engine) ? 0x1p-7 : 0x1p-8;
    assert_values(l.out, expected, (size_t)ms_tensor_count(y), tolerance, "y");
    free(expected);
    ms_tensor_release(y);
    for (int i = 0; i < 3; i++) {
        ms_tensor *gradient = golden(file, "linear.", names[i]);
        expected = tensor_get(gradient);
        assert_values(l.results[i], expected, (size_t)ms_tensor_count(gradient), 2e-6, names[i]);
        free(expected);
        ms_tensor_release(gradient);
    }
    ms_safetensors_close(file);
    free_layer(&l);
}

/* gelu of the rounded sums, and its gradient, as outside of fp8; mlp has the bits of two layers. */
static void test_activation_and_mlp(void **state)
{
    (void)state;
    const ms_op *ops[][2] = { { &ms_op_linear, &ms_op_mlp }, { &ms_op_linear_t, &ms_op_mlp_t } };
    for (int i = 0; i < 2; i++) {
        bool turned = i == 1;
        ms_tensor *x = tensor_of(engine, MS_BF16, DIMS(32, 48), NULL),
                  *first = turned ? tensor_of(engine, MS_F32, DIMS(48, 80), NULL)
                                  : tensor_of(engine, MS_F32, DIMS(80, 48), NULL),
                  *second = turned ? tensor_of(engine, MS_F32, DIMS(80, 16), NULL)
                                   : tensor_of(engine, MS_F32, DIMS(16, 80), NULL),
                  *bias = tensor_of(engine, MS_F32, DIMS(80), NULL),
                  *last = tensor_of(engine, MS_F32, DIMS(16), NULL),
                  *g = tensor_of(engine, MS_BF16, DIMS(32, 16), NULL);
        layer up = { .op = ops[i][0],
                     .attributes = { .linear = { .activation = MS_ACTIVATION_GELU } },
                     .in = { x, first, bias },
                     .needs = { true, true, true } },
              down = { .op = ops[i][0],
                       .in = { NULL, second, last },
                       .needs = { true, true, true } };
        /* up's forward once for its result, once more with the gradient that comes back. */
        up.g = tensor_of(engine, MS_BF16, DIMS(32, 80), NULL);
        layer before = up;
        run_layer(&before);
        down.in[0] = before.out;
        down.g = g;
        run_layer(&down);
        ms_tensor_release(up.g);
        up.g = down.results[0];
        run_layer(&up);

        ms_tensor *inputs[] = { x, second, last, first, bias }, *out = NULL, *results[5] = { NULL };
        bool needs[] = { true, true, true, true, true };
        ms_tensor_info in[5], info;
        ms_op_call call = { .engine = engine,
                            .op = ops[i][1],
                            .inputs = inputs,
                            .input_count = 5,
                            .outputs = &out,
                            .output_count = 1,
                            .record = true };
        ms_engine_set_autocast(engine, MS_BF16);
        ms_engine_set_fp8(engine, MS_FP8_ON);
        assert_ok(engine, ms_op_run(&call));
        ms_engine_set_fp8(engine, MS_FP8_OFF);
        ms_engine_set_autocast(engine, MS_F32);
        for (int k = 0; k < 5; k++) in[k] = info_from(inputs[k]);
        info = info_from(out);
        ms_op_gradient gradient = { .engine = engine,
                                    .op = ops[i][1],
                                    .saved = call.saved,
                                    .saved_count = call.saved_count,
                                    .inputs = in,
                                    .input_count = 5,
                                    .outputs = &info,
                                    .gradients = &g,
                                    .output_count = 1,
                                    .results = results,
                                    .needs = needs };
        assert_ok(engine, ops[i][1]->backward(&gradient));
        /* On a GPU gelu may be rounded otherwise where it is encoded at once: some of its results
         * get the next code. */
        double tolerance = ms_engine_is_for_gpu(engine) ? 0x1p-5 : 0;
        ms_tensor *pairs[][2] = { { out, down.out },
                                  { results[0], up.results[0] },
                                  { results[1], down.results[1] },
                                  { results[2], down.results[2] },
                                  { results[3], up.results[1] },
                                  { results[4], up.results[2] } };
        for (size_t k = 0; k < COUNT(pairs); k++) {
            double *expected = tensor_get(pairs[k][1]);
            assert_values(pairs[k][0], expected, (size_t)ms_tensor_count(pairs[k][1]), tolerance,
                          "mlp");
            free(expected);
        }
        /* The activation reads the rounded sums. */
        ms_tensor *gelu = apply(engine, &ms_op_gelu, NULL, OPERANDS(before.saved[2]), 1);
        double *expected = tensor_get(gelu);
        assert_values(before.out, expected, (size_t)ms_tensor_count(gelu), 0x1p-7, "gelu");
        free(expected);
        ms_tensor_release(gelu);
        release_all(results, 5);
        ms_tensor_release(out);
        ms_op_drop_saved(&call);
        release_all(before.results, 3);
        release_all(before.saved, before.saved_count);
        release_all(up.results, 3);
        release_all(up.saved, up.saved_count);
        ms_tensor_release(up.out);
        release_all(down.results, 3);
        release_all(down.saved, down.saved_count);
        ms_tensor_release(down.out);
        ms_tensor_release(before.out);
        release_all(inputs, 5);
        ms_tensor_release(g);
        ms_engine_drop_casts(engine);
    }
}

static ms_status try_linear(ms_tensor *x, ms_tensor *w)
{
    ms_tensor *out = NULL;
    ms_engine_set_autocast(engine, MS_BF16);
    ms_engine_set_fp8(engine, MS_FP8_ON);
    ms_status status = ms_op_apply(engine, &ms_op_linear, NULL, false, OPERANDS(x, w), 2, &out, 1);
    ms_engine_set_fp8(engine, MS_FP8_OFF);
    ms_engine_set_autocast(engine, MS_F32);
    ms_tensor_release(out);
    return status;
}

static void test_refusals(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(16, 32), NULL),
              *w = tensor_of(engine, MS_F32, DIMS(48, 32), NULL),
              *few = tensor_of(engine, MS_F32, DIMS(2, 4, 32), NULL),
              *narrow = tensor_of(engine, MS_F32, DIMS(16, 24), NULL),
              *narrow_w = tensor_of(engine, MS_F32, DIMS(48, 24), NULL),
              *odd = tensor_of(engine, MS_F32, DIMS(50, 32), NULL),
              *half = tensor_of(engine, MS_F16, DIMS(16, 32), NULL),
              *half_w = tensor_of(engine, MS_F16, DIMS(48, 32), NULL),
              *empty = tensor_of(engine, MS_F32, DIMS(0, 32), NULL);
    assert_ok(engine, try_linear(x, w));
    assert_ok(engine, try_linear(empty, w));
    assert_refused(engine, try_linear(few, w),
                   "multiples of 16, and the input has 8 rows (its leading dimensions together): "
                   "pad it, or compute this product in 16 bits with layer.fp8 = false");
    assert_refused(engine, try_linear(narrow, narrow_w), "the input's last dimension is 24");
    assert_refused(engine, try_linear(x, odd), "the weight has 50 outputs");
    assert_refused(engine, try_linear(half, half_w), "take f32 and bf16: cast with x:to(\"bf16\")");
    /* Outside of fp8 all of these are right. */
    ms_engine_set_fp8(engine, MS_FP8_ON);
    ms_tensor *y = apply(engine, &ms_op_linear, NULL, OPERANDS(few, odd), 2);
    ms_engine_set_fp8(engine, MS_FP8_OFF);
    assert_int_equal(ms_tensor_dtype(y), MS_F32);
    ms_tensor *all[] = { x, w, few, narrow, narrow_w, odd, half, half_w, empty, y };
    release_all(all, COUNT(all));
}

/* The weight's codes serve until it changes; bf16 and fp8 do not mix them up. */
static void test_codes_of_weights(void **state)
{
    (void)state;
    ms_tensor *w = tensor_of(engine, MS_F32, DIMS(16, 32), NULL), *a = NULL, *b = NULL;
    assert_ok(engine, ms_tensor_cast_cached(engine, w, MS_U8, true, &a));
    assert_ok(engine, ms_tensor_cast_cached(engine, w, MS_U8, true, &b));
    assert_ptr_equal(a, b);
    ms_tensor_release(b);
    assert_ok(engine, ms_tensor_cast_cached(engine, w, MS_BF16, true, &b));
    assert_int_equal(ms_tensor_dtype(b), MS_BF16);
    ms_tensor_release(b);
    /* Those of the transpose are asked for on a device for GPUs only. */
    for (ms_fp8 mode = MS_FP8_ON; mode <= MS_FP8_EMULATED; mode++) {
        ms_engine_set_fp8(engine, mode);
        assert_ok(engine, ms_tensor_cast_cached(engine, w, MS_U8, true, &b));
        bool native = ms_engine_is_for_gpu(engine) && mode == MS_FP8_ON;
        assert_int_equal(ms_fp8_weight_is_native(b, 16 * 32), native);
        coded c = read_coded(b, 16, 32, MS_FP8_E4M3);
        if (native) check_turned(&c, c.codes + 16 * 32);
        free(c.codes);
        ms_tensor_release(b);
    }
    ms_engine_set_fp8(engine, MS_FP8_OFF);
    double *values = tensor_get(w);
    for (int i = 0; i < 16 * 32; i++) values[i] *= 4;
    tensor_set(w, values);
    assert_ok(engine, ms_tensor_cast_cached(engine, w, MS_U8, true, &b));
    coded c = read_coded(b, 16, 32, MS_FP8_E4M3);
    check_coded(&c, values);
    free(c.codes);
    free(values);
    ms_tensor *all[] = { w, a, b };
    release_all(all, COUNT(all));
    ms_engine_drop_casts(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_codes_are_the_nearest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_small_numbers, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_finite, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bytes_are_those_of_the_cpu, setup, teardown),
        cmocka_unit_test_setup_teardown(test_spans, setup, teardown),
        cmocka_unit_test_setup_teardown(test_many_spans, setup, teardown),
        cmocka_unit_test_setup_teardown(test_encoded_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_golden_casts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_products, setup, teardown),
        cmocka_unit_test_setup_teardown(test_homes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_codes_are_kept, setup, teardown),
        cmocka_unit_test_setup_teardown(test_golden_layer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_activation_and_mlp, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_codes_of_weights, setup, teardown),
    };
    return cmocka_run_group_tests_name("fp8", tests, NULL, NULL);
}
