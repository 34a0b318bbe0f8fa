/* io_safetensors.c: files that the reader accepts and refuses, the writer's files, flipped bits,
 * failing calls and allocations. */
#include "io_support.h"

static ms_context context;

/* Writes length, header and `data` zero bytes, and opens the result. */
static ms_status open_text(const char *header, size_t data, ms_safetensors **out)
{
    size_t length = strlen(header);
    char *bytes = calloc(1, 8 + length + data + 1);
    for (int i = 0; i < 8; i++) bytes[i] = (char)(length >> 8 * i & 0xff);
    memcpy(bytes + 8, header, length);
    put_file(in_folder("file"), bytes, 8 + length + data);
    free(bytes);
    return ms_safetensors_open(&context, in_folder("file"), out);
}

static void test_a_small_file_is_read(void **state)
{
    (void)state;
    ms_safetensors *file = NULL;
    const char *key, *value;
    assert_int_equal(open_text("{\"b\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[3,11]},"
                               "\"__metadata__\":{\"k\":\"v\\n\"},"
                               "\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
                               "\"e\":{\"dtype\":\"F64\",\"shape\":[0],\"data_offsets\":[3,3]}}   ",
                               11, &file),
                     MS_OK);
    assert_int_equal(ms_safetensors_count(file), 3);
    assert_string_equal(ms_safetensors_at(file, 0)->name, "a");
    const ms_safetensors_entry *b = ms_safetensors_find(file, "b");
    assert_int_equal(b->dims, 2);
    assert_int_equal(b->shape[0], 2);
    assert_int_equal(b->bytes, 8);
    assert_true(b->supported && b->dtype == MS_F32);
    const ms_safetensors_entry *e = ms_safetensors_find(file, "e");
    assert_false(e->supported);
    assert_string_equal(e->dtype_name, "f64");
    assert_null(ms_safetensors_find(file, "c"));
    assert_true(ms_safetensors_metadata(file, 0, &key, &value));
    assert_string_equal(key, "k");
    assert_string_equal(value, "v\n");
    assert_false(ms_safetensors_metadata(file, 1, &key, &value));
    ms_safetensors_close(file);
    assert_int_equal(open_text("{}", 0, &file), MS_OK);
    assert_int_equal(ms_safetensors_count(file), 0);
    ms_safetensors_close(file);
}

#define U8(name, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end "]}"

static void test_what_breaks_a_rule_is_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        const char *why;
    } bad[] = {
        { "", 0, "does not begin with '{'" },
        { " {}", 0, "does not begin with '{'" },
        { "{", 0, "byte 9: a string expected" },
        { "{}x", 0, "byte 10: the end expected" },
        { "{\"a\xff\":1}", 0, "byte 11: a byte that is not allowed" },
        { "{\"a\n\":1}", 0, "byte 11: a byte that is not allowed" },
        { "{\"a", 0, "a string without an end" },
        { "{\"a\\", 0, "an unknown escape" },
        { "{\"a\\x\":1}", 0, "an unknown escape" },
        { "{\"a\\u00", 0, "four hexadecimal digits" },
        { "{\"a\\ud800\":1}", 0, "half of a surrogate pair" },
        { "{\"a\\ud800\\u0041\":1}", 0, "half of a surrogate pair" },
        { "{\"a\\udc00\":1}", 0, "half of a surrogate pair" },
        { "{\"a\\u0000\":1}", 0, "a zero byte" },
        { "{" U8("a", "1", "0", "1") "," U8("a", "1", "1", "2") "}", 2,
          "the name 'a' occurs twice" },
        { "{" U8("a", "1", "0", "1") ",}", 1, "a string expected" },
        { "{" U8("a", "1", "0", "1") " " U8("b", "1", "1", "2") "}", 2, "',' or '}' expected" },
        { "{" U8("a", "1", "0", "1") "}", 2, "1 bytes at the end" },
        { "{" U8("a", "2", "0", "2") "}", 1, "tensor 'a'" },
        { "{" U8("a", "1", "1", "2") "}", 2, "tensor 'a'" },
        { "{" U8("a", "2", "0", "2") "," U8("b", "2", "1", "3") "}", 3, "tensor 'b'" },
        { "{" U8("a", "2", "0", "2") "," U8("b", "2", "0", "2") "}", 2, "tensor 'b'" },
        { "{" U8("a", "2", "0", "1") "}", 1,
          "tensor 'a' has 2 bytes by dtype and shape, but data_offsets 0 to 1" },
        { "{" U8("a", "1", "1", "0") "}", 1, "data_offsets 1 to 0" },
        { "{" U8("a", "-1", "0", "1") "}", 1, "an integer of 0 or more" },
        { "{" U8("a", "1.0", "0", "1") "}", 1, "an integer of 0 or more" },
        { "{" U8("a", "1e0", "0", "1") "}", 1, "an integer of 0 or more" },
        { "{" U8("a", "01", "0", "1") "}", 1, "an integer of 0 or more" },
        { "{" U8("a", "1,", "0", "1") "}", 1, "an integer of 0 or more" },
        { "{" U8("a", "4294967296,4294967296,0", "0", "0") "}", 0, "larger than any file" },
        { "{" U8("a", "0,9223372036854775807,3", "0", "0") "}", 0, "larger than any file" },
        { "{" U8("a", "0,4294967296,4294967296", "0", "0") "}", 0, "larger than any file" },
        { "{" U8("a", "3,9223372036854775807,0", "0", "0") "}", 0, "larger than any file" },
        { "{" U8("a", "3074457345618258603,3,0", "0", "0") "}", 0, "larger than any file" },
        { "{" U8("a", "9223372036854775808", "0", "0") "}", 0, "beyond 63 bits" },
        { "{" U8("a", "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", "0", "1") "}", 1, "more than 16" },
        { "{" U8("a\\u0001", "1", "0", "1") "}", 1, "control characters" },
        { "{" U8("a\\u007f", "1", "0", "1") "}", 1, "control characters" },
        { "{\"a\":1}", 0, "'{' expected" },
        { "{\"a\" 1}", 0, "':' expected" },
        { "{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "no dtype" },
        { "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "no shape" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "no data_offsets" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "',' expected" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1,
          "',' or ']' expected" },
        { "{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "a string expected" },
        { "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
          "tensor 'a' has 'dtype' twice" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
          "has 'shape' twice" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"data_offsets\":[0,1]}}",
          1, "has 'data_offsets' twice" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":tru}}", 1,
          "a value expected" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":[1,{\"y\":[}]]}}", 1,
          "a value expected" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1.}}", 1,
          "a digit expected" },
        { "{\"__metadata__\":[]}", 0, "'{' expected" },
        { "{\"__metadata__\":{\"k\":1}}", 0, "a string expected" },
        { "{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "the metadata 'k' stand twice" },
        { "{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ occurs twice" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ms_safetensors *file = NULL;
        ms_status status = open_text(bad[i].header, bad[i].data, &file);
        if (status != MS_ERROR_CORRUPT || !strstr(context.error.message, bad[i].why)
            || !strstr(context.error.message, "/file'"))
            fail_msg("header %s gave %s: %s", bad[i].header, ms_status_name(status),
                     context.error.message);
        assert_null(file);
    }
    ms_safetensors *file = NULL;
    assert_int_equal(
        open_text("{\"a\":{\"dtype\":\"Q3\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, &file),
        MS_ERROR_UNSUPPORTED);
}

/* Files that the format allows and that other readers accept, although no writer makes them. */
static void test_unusual_headers_are_taken(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        const char *name;
    } good[] = {
        { "{ \"a\"\n:\t{\"data_offsets\" : [ 0 , 1 ] , \"shape\":[ ],\r\"dtype\":\"U8\"}\n} \n", 1,
          "a" },
        { "{" U8("\\u0041\\/\\\"\\\\", "1", "0", "1") "}", 1, "A/\"\\" },
        { "{" U8("\\ud83d\\uDE00\\u00e9\\u20ac", "1", "0", "1") "}", 1,
          "\xf0\x9f\x98\x80\xc3\xa9\xe2\x82\xac" },
        { "{" U8("\xf0\x9f\x98\x80", "1", "0", "1") "}", 1, "\xf0\x9f\x98\x80" },
        { "{" U8("", "0,4294967296,1048576", "0", "0") "}", 0, "" },
        { "{\"a\":{\"x\":[1,-2.5e+3,[],{},{\"y\":[null,true,false,\"\\n\"]}],\"dtype\":\"U8\","
          "\"shape\":[1],\"data_offsets\":[0,1],\"z\":0}}",
          1, "a" },
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        ms_safetensors *file = NULL;
        if (open_text(good[i].header, good[i].data, &file))
            fail_msg("header %s gave %s", good[i].header, context.error.message);
        assert_int_equal(ms_safetensors_count(file), 1);
        assert_string_equal(ms_safetensors_at(file, 0)->name, good[i].name);
        assert_int_equal(ms_safetensors_at(file, 0)->bytes, good[i].data);
        ms_safetensors_close(file);
    }
}

static void test_deep_and_long_headers_are_refused(void **state)
{
    (void)state;
    ms_safetensors *file = NULL;
    size_t deep = 1000000;
    char *header = malloc(deep + 11);
    memcpy(header, "{\"a\":{\"x\":", 10);
    memset(header + 10, '[', deep);
    header[deep + 10] = 0;
    assert_int_equal(open_text(header, 0, &file), MS_ERROR_CORRUPT);
    assert_non_null(strstr(context.error.message, "nested too deep"));
    free(header);
    /* A name of 1,024 bytes is the longest. */
    char text[1400], name[1026];
    memset(name, 'n', sizeof name);
    for (int length = 1024; length <= 1025; length++) {
        snprintf(text, sizeof text,
                 "{\"%.*s\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", length, name);
        assert_int_equal(open_text(text, 1, &file), length == 1024 ? MS_OK : MS_ERROR_CORRUPT);
        ms_safetensors_close(file);
        file = NULL;
    }
    /* A length beyond the file, and one beyond the limit of the reader. */
    uint64_t length = UINT64_MAX;
    put_file(in_folder("file"), &length, 8);
    assert_int_equal(ms_safetensors_open(&context, in_folder("file"), &file), MS_ERROR_CORRUPT);
    put_file(in_folder("file"), &length, 7);
    assert_int_equal(ms_safetensors_open(&context, in_folder("file"), &file), MS_ERROR_CORRUPT);
    length = MS_SAFETENSORS_HEADER_MAX + 1;
    put_file(in_folder("file"), &length, 8);
    assert_int_equal(truncate(in_folder("file"), (off_t)length + 8), 0);
    assert_int_equal(ms_safetensors_open(&context, in_folder("file"), &file), MS_ERROR_CORRUPT);
    assert_non_null(strstr(context.error.message, "at most 32 MiB"));
}

/* ------------------------------------------------------------------ writing */

static const int64_t shape_23[] = { 2, 3 };
static const ms_safetensors_spec specs[] = {
    { .name = "odd", .dtype = MS_U8, .dims = 1, .shape = (const int64_t[]){ 5 } },
    { .name = "wide", .dtype = MS_I64, .dims = 2, .shape = shape_23 },
    { .name = "half \"quoted\" \\ \xc3\xa9", .dtype = MS_BF16, .dims = 2, .shape = shape_23 },
    { .name = "scalar", .dtype = MS_F32, .dims = 0 },
    { .name = "empty", .dtype = MS_F32, .dims = 1, .shape = (const int64_t[]){ 0 } },
    { .name = "flags", .dtype = MS_BOOL, .dims = 1, .shape = (const int64_t[]){ 1 } },
};
enum { SPECS = sizeof specs / sizeof *specs };

static size_t spec_bytes(const ms_safetensors_spec *spec)
{
    size_t bytes = ms_dtype_bytes(spec->dtype);
    for (uint32_t d = 0; d < spec->dims; d++) bytes *= (size_t)spec->shape[d];
    return bytes;
}

/* Writes the specs, backwards if asked; the bytes of a tensor depend on its name only. */
static ms_status write_specs(ms_context *own, const char *path, bool backwards)
{
    static const char *const metadata[] = { "format", "pt", "note", "line\n\"two\"" };
    ms_safetensors_spec order[SPECS];
    ms_safetensors_writer *writer = NULL;
    for (int i = 0; i < SPECS; i++) order[i] = specs[backwards ? SPECS - 1 - i : i];
    ms_status status = ms_safetensors_create(own, path, order, SPECS, metadata, 2, &writer);
    for (uint32_t i = 0; i < SPECS && !status; i++) {
        char bytes[64];
        memset(bytes, order[i].name[0], sizeof bytes);
        status = ms_safetensors_write(writer, i, bytes, spec_bytes(&order[i]));
    }
    if (!status) status = ms_safetensors_commit(writer);
    ms_safetensors_free(writer);
    return status;
}

static void test_what_is_written_is_read_and_depends_on_names_only(void **state)
{
    (void)state;
    assert_int_equal(write_specs(&context, in_folder("one"), false), MS_OK);
    assert_int_equal(write_specs(&context, in_folder("two"), true), MS_OK);
    void *one = NULL, *two = NULL;
    size_t bytes = 0, others = 0;
    assert_int_equal(ms_file_read_all(&context, in_folder("one"), 10000, &one, &bytes), MS_OK);
    assert_int_equal(ms_file_read_all(&context, in_folder("two"), 10000, &two, &others), MS_OK);
    assert_int_equal(bytes, others);
    assert_memory_equal(one, two, bytes);
    ms_release(&context, one);
    ms_release(&context, two);

    ms_safetensors *file = NULL;
    assert_int_equal(ms_safetensors_open(&context, in_folder("one"), &file), MS_OK);
    assert_int_equal(ms_safetensors_count(file), SPECS);
    for (int i = 0; i < SPECS; i++) {
        const ms_safetensors_entry *entry = ms_safetensors_find(file, specs[i].name);
        char data[64], expected[64];
        assert_non_null(entry);
        assert_int_equal(entry->dtype, specs[i].dtype);
        assert_int_equal(entry->dims, specs[i].dims);
        for (uint32_t d = 0; d < entry->dims; d++)
            assert_int_equal(entry->shape[d], specs[i].shape[d]);
        assert_int_equal(entry->bytes, spec_bytes(&specs[i]));
        assert_int_equal(entry->offset % ms_dtype_bytes(entry->dtype), 0);
        memset(expected, specs[i].name[0], sizeof expected);
        assert_int_equal(ms_safetensors_read(&context, file, entry, data), MS_OK);
        assert_memory_equal(data, expected, entry->bytes);
    }
    ms_safetensors_close(file);
}

static void test_the_writer_refuses_what_readers_would(void **state)
{
    (void)state;
    const char *const names[] = { "__metadata__", "bell\a", "bad \xc0\x80" };
    for (int i = 0; i < 3; i++) {
        ms_safetensors_spec spec = { .name = names[i], .dtype = MS_U8 };
        ms_safetensors_writer *writer = NULL;
        assert_int_equal(
            ms_safetensors_create(&context, in_folder("file"), &spec, 1, NULL, 0, &writer),
            MS_ERROR_ARGUMENT);
        assert_null(writer);
    }
    ms_safetensors_spec twice[] = { { .name = "a", .dtype = MS_U8 },
                                    { .name = "a", .dtype = MS_F32 } };
    ms_safetensors_writer *writer = NULL;
    assert_int_equal(ms_safetensors_create(&context, in_folder("file"), twice, 2, NULL, 0, &writer),
                     MS_ERROR_ARGUMENT);
    assert_non_null(strstr(context.error.message, "two tensors have the name 'a'"));
    /* A tensor that was not written must not appear as zeros. */
    assert_int_equal(
        ms_safetensors_create(&context, in_folder("file"), specs, SPECS, NULL, 0, &writer), MS_OK);
    assert_int_equal(ms_safetensors_write(writer, 0, "1234567", 7), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_safetensors_write(writer, 0, "12345", 5), MS_OK);
    assert_int_equal(ms_safetensors_commit(writer), MS_ERROR_STATE);
    ms_safetensors_free(writer);
    assert_int_equal(count_names(test_folder), 0);
}

/* One bit flipped, at every place of a small file: the file is refused, or all its ranges are
 * inside the file. */
static void test_flipped_bits_never_lead_outside(void **state)
{
    (void)state;
    char *data = NULL, buffer[4096];
    size_t bytes = 0;
    int refused = 0, taken = 0;
    assert_int_equal(write_specs(&context, in_folder("one"), false), MS_OK);
    assert_int_equal(ms_file_read_all(&context, in_folder("one"), 10000, (void **)&data, &bytes),
                     MS_OK);
    for (size_t bit = 0; bit < bytes * 8; bit++) {
        ms_safetensors *file = NULL;
        data[bit / 8] ^= (char)(1 << bit % 8);
        put_file(in_folder("flipped"), data, bytes);
        data[bit / 8] ^= (char)(1 << bit % 8);
        if (ms_safetensors_open(&context, in_folder("flipped"), &file)) {
            refused++;
            continue;
        }
        taken++;
        for (uint32_t i = 0; i < ms_safetensors_count(file); i++) {
            const ms_safetensors_entry *entry = ms_safetensors_at(file, i);
            assert_true(entry->offset + entry->bytes <= bytes && entry->bytes < sizeof buffer);
            assert_int_equal(ms_safetensors_read(&context, file, entry, buffer), MS_OK);
        }
        ms_safetensors_close(file);
    }
    /* A reader cannot notice flipped bits of values and names; it must notice most of the
     * others. */
    assert_true(refused > 1000 && taken > 400);
    /* A file that is cut off at any place is refused. */
    for (size_t length = 0; length < bytes; length++) {
        ms_safetensors *file = NULL;
        put_file(in_folder("cut"), data, length);
        assert_int_equal(ms_safetensors_open(&context, in_folder("cut"), &file), MS_ERROR_CORRUPT);
    }
    ms_release(&context, data);
}

/* ------------------------------------------------------------------ tensors */

/* An engine on that table saves two tensors, of which one is a transposed view, and loads them
 * again. */
static ms_status through_an_engine(const ms_os *os, bool *equal)
{
    static const float values[6] = { 1, 2, 3, 4, 5, 6 };
    ms_engine_options options = { .os = os, .threads = 1, .memory_bytes = 64u << 20 };
    ms_engine *engine = NULL;
    ms_tensor *tensors[2] = { NULL, NULL }, *loaded = NULL;
    ms_safetensors *file = NULL;
    const char *names[2] = { "t", "view" };
    ms_status status = ms_engine_new(&options, NULL, &engine);
    if (status) return status;
    status = ms_tensor_new(engine, MS_F32, 2, shape_23, &tensors[0]);
    if (!status) status = ms_tensor_write(tensors[0], values, sizeof values);
    if (!status)
        status = ms_tensor_window(tensors[0], 2, (const int64_t[]){ 3, 2 },
                                  (const int64_t[]){ 1, 3 }, 0, &tensors[1]);
    if (!status)
        status = ms_safetensors_save(engine, in_folder("saved"), names, tensors, 2, NULL, 0);
    if (!status) status = ms_safetensors_open(ms_engine_context(engine), in_folder("saved"), &file);
    uint64_t hash = 0;
    float read[6];
    if (!status)
        status =
            ms_safetensors_load(engine, file, ms_safetensors_find(file, "view"), &hash, &loaded);
    if (!status) status = ms_tensor_read(loaded, read, sizeof read);
    if (!status) {
        const float expected[6] = { 1, 4, 2, 5, 3, 6 };
        *equal = memcmp(read, expected, sizeof read) == 0
                 && hash == ms_hash(expected, sizeof expected, 0)
                 && ms_tensor_shape(loaded)[0] == 3;
    }
    ms_safetensors_close(file);
    ms_tensor_release(loaded);
    ms_tensor_release(tensors[0]);
    ms_tensor_release(tensors[1]);
    ms_engine_free(engine);
    return status;
}

static void test_tensors_go_to_a_file_and_back(void **state)
{
    (void)state;
    bool equal = false;
    assert_int_equal(through_an_engine(NULL, &equal), MS_OK);
    assert_true(equal);
}

static void test_what_an_engine_cannot_hold_is_unsupported(void **state)
{
    (void)state;
    ms_safetensors *file = NULL;
    ms_engine *engine = NULL;
    ms_tensor *tensor = NULL;
    assert_int_equal(ms_engine_new(NULL, NULL, &engine), MS_OK);
    assert_int_equal(
        open_text("{\"a\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,8]},\"b\":{"
                  "\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[8,9]}}",
                  9, &file),
        MS_OK);
    assert_int_equal(ms_safetensors_load(engine, file, ms_safetensors_at(file, 0), NULL, &tensor),
                     MS_ERROR_UNSUPPORTED);
    assert_int_equal(ms_safetensors_load(engine, file, ms_safetensors_at(file, 1), NULL, &tensor),
                     MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_error(engine)->message, "'b' is u8 with 9 dimensions"));
    ms_safetensors_close(file);
    ms_engine_free(engine);
}

static void test_files_that_other_code_wrote_are_read(void **state)
{
    (void)state;
    ms_safetensors *file = NULL;
    assert_int_equal(
        ms_safetensors_open(&context, "tests/golden/data/operators.safetensors", &file), MS_OK);
    assert_true(ms_safetensors_count(file) > 50);
    ms_safetensors_close(file);
}

static void test_each_allocation_may_fail(void **state)
{
    (void)state;
    ms_status status = MS_ERROR_MEMORY;
    bool equal = false;
    for (long n = 1; status; n++) {
        fault_os fault;
        fault_os_init(&fault);
        atomic_store(&fault.fail_at, n);
        status = through_an_engine(&fault.table, &equal);
        assert_int_equal(atomic_load(&fault.live), 0);
        assert_true(count_names(test_folder) <= 1);
        assert_true(n < 500);
    }
    assert_true(equal);
}

static void test_each_file_call_may_fail(void **state)
{
    (void)state;
    ms_status status = MS_ERROR_IO;
    for (long n = 1; status; n++) {
        fault_files fault;
        ms_context own;
        fault_files_init(&fault);
        ms_context_init(&own, &fault.table);
        fault.fail_at = n;
        status = write_specs(&own, in_folder("file"), false);
        ms_safetensors *file = NULL;
        if (count_names(test_folder))
            assert_int_equal(ms_safetensors_open(&context, in_folder("file"), &file), MS_OK);
        ms_safetensors_close(file);
        unlink(in_folder("file"));
        assert_true(n < 100);
    }
}

#define in_new_folder(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_new_folder(test_a_small_file_is_read),
        in_new_folder(test_what_breaks_a_rule_is_refused_by_name),
        in_new_folder(test_unusual_headers_are_taken),
        in_new_folder(test_deep_and_long_headers_are_refused),
        in_new_folder(test_what_is_written_is_read_and_depends_on_names_only),
        in_new_folder(test_the_writer_refuses_what_readers_would),
        in_new_folder(test_flipped_bits_never_lead_outside),
        in_new_folder(test_tensors_go_to_a_file_and_back),
        in_new_folder(test_what_an_engine_cannot_hold_is_unsupported),
        in_new_folder(test_files_that_other_code_wrote_are_read),
        in_new_folder(test_each_allocation_may_fail),
        in_new_folder(test_each_file_call_may_fail),
    };
    ms_context_init(&context, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
