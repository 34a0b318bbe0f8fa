/* cuda_comm.c: collectives of a fake world, and of a rank by itself, on the cuda device: the bits
 * that the CPU gives, for all kinds, dtypes and operations. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "../cuda/driver/driver.h"
#include "exec/device.h"
#include "moonshard/comm.h"
#include "moonshard/control.h"

static ms_engine *engine_on(const ms_device *device)
{
    ms_engine_options options = { .own_device = device, .threads = 1, .strict = true };
    ms_engine *engine = NULL;
    ms_error error;
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    if (ms_engine_new(&options, &error, &engine)) fail_msg("%s", error.message);
    return engine;
}

/* Streams of communication have the driver's greatest priority, and "compute" its least. Returns
 * how many there are. */
static int check_priorities(ms_engine *engine)
{
    const ms_os *os = ms_os_posix();
    char why[256];
    ms_stream *stream;
    int count = 0;
    void *library = os->library_load(os->user, getenv("MOONSHARD_STAND_IN"), why, sizeof why);
    assert_non_null(library);
    stand_in_priority_function *priority_of =
        (stand_in_priority_function *)os->library_symbol(os->user, library, "stand_in_priority");
    for (; (stream = ms_engine_stream_at(engine, (uint16_t)count)); count++) {
        void *native = NULL;
        bool is_compute = strcmp(ms_stream_name(stream), "compute") == 0;
        assert_int_equal(ms_stream_native(stream, &native), MS_OK);
        assert_int_equal(priority_of(native), is_compute ? 0 : -5);
    }
    return count;
}

/* One call on both devices: what the tensors hold afterwards is compared. */
typedef struct call {
    ms_collective_kind kind;
    ms_reduce_op op;
    ms_dtype dtype, travels;
    uint32_t ranks, rank, root;
    int64_t in, out; /* elements; 0: there is no such tensor */
    const int64_t *counts, *receive_counts;
    double factor;
    int64_t offset; /* elements of `in` and `out` before them in their storages */
} call;

/* Bits of all sorts: floats with fractions, huge and tiny ones, infinities and NaN. Subnormal
 * floats are left out: the CPU takes them for 0, a GPU does not. */
static void fill_bytes(ms_dtype dtype, int64_t elements, unsigned char *bytes)
{
    static const float special[] = { 0.1f, -3.7f, 1e30f, -1e-30f, INFINITY, NAN, -0.0f, 65519.0f };
    uint64_t random = 7;
    for (int64_t i = 0; i < elements; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint64_t word = random >> 16;
        size_t item = ms_dtype_bytes(dtype);
        float number = i % 5 ? (float)((int64_t)(word % 20001) - 10000) * 0.37f
                             : special[(size_t)(i / 5) % (sizeof special / sizeof *special)];
        if (dtype == MS_BOOL) word &= 1;
        if (dtype == MS_F32) memcpy(&word, &number, sizeof number);
        if (dtype == MS_F16) word = ms_f16_from_float(number);
        if (dtype == MS_BF16) word = ms_bf16_from_float(number);
        memcpy(bytes + (size_t)i * item, &word, item);
    }
}

static ms_tensor *tensor_of(ms_engine *engine, const call *c, int64_t elements)
{
    ms_storage *storage = NULL;
    ms_tensor *whole = NULL, *window = NULL;
    int64_t all = elements + c->offset, one = 1;
    size_t bytes = (size_t)all * ms_dtype_bytes(c->dtype);
    if (!elements) return NULL;
    unsigned char *values = calloc(1, bytes + 1);
    assert_non_null(values);
    fill_bytes(c->dtype, all, values);
    assert_int_equal(ms_storage_new(ms_engine_current(engine), bytes, &storage), MS_OK);
    assert_int_equal(ms_tensor_on(storage, c->dtype, 1, &all, &whole), MS_OK);
    assert_int_equal(ms_tensor_write(whole, values, bytes), MS_OK);
    assert_int_equal(ms_tensor_window(whole, 1, &elements, &one, c->offset, &window), MS_OK);
    ms_tensor_release(whole);
    ms_storage_release(storage);
    free(values);
    return window;
}

static unsigned char *bytes_of(ms_tensor *tensor, size_t *bytes)
{
    *bytes = tensor ? ms_tensor_bytes(tensor) : 0;
    unsigned char *out = calloc(1, *bytes + 1);
    assert_non_null(out);
    if (tensor) assert_int_equal(ms_tensor_read(tensor, out, *bytes), MS_OK);
    return out;
}

/* What `in` and `out` hold after the call. */
static void run_on(const ms_device *device, const call *c, bool alone, unsigned char *held[2],
                   size_t bytes[2])
{
    ms_engine *engine = engine_on(device);
    ms_group *group = NULL;
    assert_int_equal(ms_comm_open_fake(engine, c->rank, c->ranks, &group), MS_OK);
    if (alone) assert_int_equal(ms_comm_alone(engine, &group), MS_OK);
    ms_tensor *in = tensor_of(engine, c, c->in), *out = tensor_of(engine, c, c->out);
    ms_collective collective = { .kind = c->kind,
                                 .op = c->op,
                                 .in = in,
                                 .out = out,
                                 .travels = c->travels,
                                 .root = c->root,
                                 .counts = c->counts,
                                 .receive_counts = c->receive_counts,
                                 .factor = c->factor,
                                 .bucket = -1 };
    if (ms_group_enqueue(group, 1, &collective, NULL))
        fail_msg("%s", ms_engine_error(engine)->message);
    if (ms_engine_sync(engine)) fail_msg("%s", ms_engine_error(engine)->message);
    if (device == &ms_device_cuda) assert_int_equal(check_priorities(engine), 2);
    held[0] = bytes_of(in, &bytes[0]);
    held[1] = bytes_of(out, &bytes[1]);
    ms_tensor_release(in);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

/* A GPU has one NaN of each dtype, whatever bits went in. */
static bool is_nan(ms_dtype dtype, const unsigned char *at)
{
    uint32_t bits = 0;
    if (!ms_dtype_is_float(dtype)) return false;
    memcpy(&bits, at, ms_dtype_bytes(dtype));
    if (dtype == MS_F32) return (bits & 0x7fffffffu) > 0x7f800000u;
    return (bits & 0x7fffu) > (dtype == MS_BF16 ? 0x7f80u : 0x7c00u);
}

static void compare(const call *c, bool alone)
{
    unsigned char *cpu[2], *cuda[2];
    size_t bytes[2], again[2];
    run_on(&ms_device_cpu, c, alone, cpu, bytes);
    run_on(&ms_device_cuda, c, alone, cuda, again);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(bytes[i], again[i]);
        size_t item = ms_dtype_bytes(c->dtype);
        for (size_t at = 0; at < bytes[i]; at += item) {
            const unsigned char *a = cpu[i] + at, *b = cuda[i] + at;
            if (memcmp(a, b, item) == 0 || (is_nan(c->dtype, a) && is_nan(c->dtype, b))) continue;
            fail_msg("%s by %s of %s over %u ranks: element %zu of %s differs",
                     ms_collective_name(c->kind), ms_reduce_op_name(c->op), ms_dtype_name(c->dtype),
                     c->ranks, at / item, i ? "out" : "in");
        }
        free(cpu[i]);
        free(cuda[i]);
    }
}

static bool is_defined(ms_dtype dtype, ms_reduce_op op)
{
    return ms_dtype_is_float(dtype) || (op != MS_REDUCE_OP_AVG && op != MS_REDUCE_OP_PREMUL_SUM);
}

/* In place and apart, at addresses of every alignment, whole and in parts. */
static void reductions_have_the_cpus_bits(void **state)
{
    (void)state;
    for (ms_dtype dtype = 0; dtype < MS_DTYPES; dtype++)
        for (ms_reduce_op op = 0; op < MS_REDUCE_OPS; op++) {
            if (!is_defined(dtype, op)) continue;
            call c = { .kind = MS_ALL_REDUCE,
                       .op = op,
                       .dtype = dtype,
                       .travels = MS_F32,
                       .ranks = 3,
                       .rank = 1,
                       .in = 1003,
                       .factor = 0.3 };
            compare(&c, false);
            compare(&c, true);
            c.out = c.in;
            c.offset = 3;
            compare(&c, false);
            c.kind = MS_REDUCE_SCATTER;
            c.in = 3 * 77;
            c.out = 77;
            compare(&c, false);
            c.kind = MS_REDUCE;
            c.root = 1;
            c.out = 0;
            compare(&c, false);
        }
}

static void numbers_are_rounded_on_their_way(void **state)
{
    (void)state;
    static const ms_dtype ways[] = { MS_F16, MS_BF16 };
    for (int w = 0; w < 2; w++)
        for (ms_reduce_op op = 0; op < MS_REDUCE_OPS; op++) {
            call c = { .kind = MS_ALL_REDUCE,
                       .op = op,
                       .travels = ways[w],
                       .ranks = 6,
                       .rank = 4,
                       .in = 515,
                       .factor = 1.7 };
            compare(&c, false);
            compare(&c, true);
        }
}

/* Parts of other lengths: what this rank has not got is zero. */
static void parts_are_copied(void **state)
{
    (void)state;
    static const int64_t counts[] = { 5, 0, 9 }, received[] = { 7, 0, 2 };
    const call calls[] = {
        { .kind = MS_ALL_GATHER, .in = 40, .out = 120 },
        { .kind = MS_ALL_GATHER, .in = 9, .out = 14, .counts = counts },
        { .kind = MS_GATHER, .in = 40, .out = 120, .root = 2 },
        { .kind = MS_GATHER, .in = 40, .root = 0 },
        { .kind = MS_SCATTER, .in = 120, .out = 40, .root = 2 },
        { .kind = MS_SCATTER, .out = 40, .root = 1 },
        { .kind = MS_ALL_TO_ALL, .in = 120, .out = 120 },
        { .kind = MS_ALL_TO_ALL, .in = 14, .out = 9, .counts = counts, .receive_counts = received },
        { .kind = MS_BROADCAST, .in = 40 },
        { .kind = MS_SEND, .in = 40 },
        { .kind = MS_RECV, .in = 40 },
        { .kind = MS_BARRIER },
    };
    static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_U8, MS_I64 };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (int d = 0; d < 4; d++)
            for (int64_t offset = 0; offset < 2; offset++) {
                call c = calls[i];
                c.ranks = 3;
                c.rank = 2;
                c.dtype = dtypes[d];
                c.travels = MS_F32;
                c.offset = offset;
                compare(&c, false);
            }
}

/* Numbers that hosts share, and groups that are made of others, are in host memory. */
static void hosts_share_numbers(void **state)
{
    (void)state;
    static const uint32_t sizes[] = { 2, 2 }, members[] = { 0, 1, 2, 3 };
    ms_engine *engine = engine_on(&ms_device_cuda);
    ms_group *world = NULL, *half = NULL;
    int64_t mine[2] = { 5, -2 }, all[8] = { 0 };
    assert_int_equal(ms_comm_open_fake(engine, 2, 4, &world), MS_OK);
    ms_sharing sharing = { .kind = MS_ALL_GATHER, .dtype = MS_I64, .count = 2, .label = "two" };
    assert_int_equal(ms_group_share(world, &sharing, mine, all), MS_OK);
    for (int i = 0; i < 8; i++) assert_int_equal(all[i], mine[i % 2]);
    sharing.kind = MS_ALL_REDUCE;
    assert_int_equal(ms_group_share(world, &sharing, mine, all), MS_OK);
    assert_int_equal(all[0], 20);
    assert_int_equal(ms_group_split(world, 2, sizes, members, &half), MS_OK);
    assert_int_equal(ms_group_size(half), 2);
    assert_int_equal(ms_group_barrier(half, 0), MS_OK);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    assert_true(check_priorities(engine) > 1);
    ms_engine_free(engine);
}

/* A launcher may make a job of one rank: it needs no library between GPUs. */
static void a_job_of_one_rank_needs_no_nccl(void **state)
{
    (void)state;
    ms_context context;
    ms_rendezvous *rendezvous = NULL;
    ms_group *world = NULL;
    ms_tensor *t = NULL;
    ms_rendezvous_options ranks = { .ranks = 1, .threads = 1, .heap_bytes = 1 << 20 };
    float values[2] = { 1, 2 }, got[2] = { 0 };
    setenv("MOONSHARD_NCCL", "/nowhere/libnccl.so.2", 1);
    ms_context_init(&context, NULL);
    assert_int_equal(ms_rendezvous_new(&context, &ranks, &rendezvous), MS_OK);
    ms_engine *engine = engine_on(&ms_device_cuda);
    if (ms_comm_open(engine, rendezvous, 0, &world))
        fail_msg("%s", ms_engine_error(engine)->message);
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, (int64_t[]){ 2 }, &t), MS_OK);
    assert_int_equal(ms_tensor_write(t, values, sizeof values), MS_OK);
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 };
    if (ms_group_enqueue(world, 1, &c, NULL)) fail_msg("%s", ms_engine_error(engine)->message);
    assert_int_equal(ms_tensor_read(t, got, sizeof got), MS_OK);
    assert_memory_equal(got, values, sizeof got);
    ms_tensor_release(t);
    ms_engine_free(engine);
    ms_rendezvous_release(rendezvous);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reductions_have_the_cpus_bits),
        cmocka_unit_test(numbers_are_rounded_on_their_way),
        cmocka_unit_test(parts_are_copied),
        cmocka_unit_test(hosts_share_numbers),
        cmocka_unit_test(a_job_of_one_rank_needs_no_nccl),
    };
    return cmocka_run_group_tests_name("cuda_comm", tests, NULL, NULL);
}
