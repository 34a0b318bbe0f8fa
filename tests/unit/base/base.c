/* base.c: statuses and messages, the POSIX table, growing arrays, strings, 16-bit floats, random
 * numbers, bells. */
#include "base/hash.h"
#include "base/thread.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static void test_status_names_are_the_codes_of_the_surface(void **state)
{
    (void)state;
    assert_string_equal(ms_status_name(MS_ERROR_NOT_FOUND), "not_found");
    assert_string_equal(ms_status_name(MS_ERROR_NO_SPACE), "no_space");
    assert_string_equal(ms_status_name(MS_ERROR_IO), "io");
    for (int i = MS_OK; i <= MS_ERROR_IO; i++)
        assert_true(strlen(ms_status_name((ms_status)i)) > 1);
    assert_string_equal(ms_status_name((ms_status)999), "unknown");
}

static void test_fail_records_and_may_quote_the_error_before(void **state)
{
    (void)state;
    ms_context context;
    ms_context_init(&context, NULL);
    assert_int_equal(context.error.rank, -1);
    assert_int_equal(ms_fail(&context, MS_ERROR_CORRUPT, "header of %d bytes", 7),
                     MS_ERROR_CORRUPT);
    context.error.rank = 3;
    assert_int_equal(ms_fail(&context, MS_ERROR_IO, "loading: %s", context.error.message),
                     MS_ERROR_IO);
    assert_string_equal(context.error.message, "loading: header of 7 bytes");
    assert_int_equal(context.error.status, MS_ERROR_IO);
    assert_int_equal(context.error.rank, -1);
    /* Longer than the record: cut, never past its end. */
    char *longer = calloc(1, 5000);
    memset(longer, 'x', 4999);
    ms_fail(&context, MS_ERROR_IO, "%s", longer);
    assert_int_equal(strlen(context.error.message), MS_ERROR_MESSAGE_BYTES - 1);
    free(longer);
}

static void test_fail_os_maps_what_the_environment_refuses(void **state)
{
    (void)state;
    ms_context context;
    ms_context_init(&context, NULL);
    assert_int_equal(ms_fail_os(&context, -ENOENT, "cannot open", "a/b"), MS_ERROR_NOT_FOUND);
    assert_string_equal(context.error.message, "cannot open 'a/b': No such file or directory");
    assert_int_equal(ms_fail_os(&context, -EACCES, "x", "y"), MS_ERROR_DENIED);
    assert_int_equal(ms_fail_os(&context, -ENOSPC, "x", "y"), MS_ERROR_NO_SPACE);
    assert_int_equal(ms_fail_os(&context, -EEXIST, "x", "y"), MS_ERROR_EXISTS);
    assert_int_equal(ms_fail_os(&context, -EIO, "x", NULL), MS_ERROR_IO);
}

static void keep_message(void *user, ms_log_level level, const char *message)
{
    snprintf(user, 64, "%d %s", (int)level, message);
}

static void test_log_reaches_the_function_from_its_level_on(void **state)
{
    (void)state;
    char text[64] = "";
    ms_context context;
    ms_context_init(&context, NULL);
    ms_log(&context, MS_LOG_WARN, "nobody listens");
    context.log = keep_message;
    context.log_user = text;
    context.log_level = MS_LOG_INFO;
    ms_log(&context, MS_LOG_DEBUG, "too low");
    assert_string_equal(text, "");
    ms_log(&context, MS_LOG_INFO, "%d steps", 3);
    assert_string_equal(text, "1 3 steps");
}

static void test_arrays_grow_zeroed_and_refuse_overflow(void **state)
{
    (void)state;
    ms_context context;
    ms_context_init(&context, NULL);
    void *items = NULL;
    size_t capacity = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        assert_int_equal(ms_grow(&context, &items, &capacity, i + 1, sizeof(uint32_t)), MS_OK);
        assert_int_equal(((uint32_t *)items)[i], 0);
        ((uint32_t *)items)[i] = i;
    }
    for (uint32_t i = 0; i < 1000; i++) assert_int_equal(((uint32_t *)items)[i], i);
    void *before = items;
    size_t capacity_before = capacity;
    assert_int_equal(ms_grow(&context, &items, &capacity, SIZE_MAX / 2, 16), MS_ERROR_MEMORY);
    assert_ptr_equal(items, before);
    assert_int_equal(capacity, capacity_before);
    ms_release(&context, items);

    void *block;
    assert_int_equal(ms_allocate(&context, 100, "block", &block), MS_OK);
    /* Two cache lines: streams and teams keep this distance between data that different threads
     * write. */
    void *blocks[32];
    for (size_t i = 0; i < 32; i++) {
        assert_int_equal(ms_allocate(&context, 100 + 64 * i, "block", &blocks[i]), MS_OK);
        assert_int_equal((uintptr_t)blocks[i] % 128, 0);
    }
    for (size_t i = 0; i < 32; i++) ms_release(&context, blocks[i]);
    for (int i = 0; i < 100; i++) assert_int_equal(((char *)block)[i], 0);
    ms_release(&context, block);
}

/* A table whose allocations fail from the n-th on. */
typedef struct failing {
    ms_os os;
    const ms_os *real;
    int left;
} failing;

static void *failing_allocate(void *user, size_t bytes, size_t alignment)
{
    failing *self = user;
    return self->left-- > 0 ? self->real->allocate(NULL, bytes, alignment) : NULL;
}

static void *failing_reallocate(void *user, void *pointer, size_t bytes)
{
    failing *self = user;
    return self->left-- > 0 ? self->real->reallocate(NULL, pointer, bytes) : NULL;
}

static void test_strings_are_kept_once_and_survive_lack_of_memory(void **state)
{
    (void)state;
    failing table = { .os = *ms_os_posix(), .real = ms_os_posix(), .left = 1 << 30 };
    table.os.user = &table;
    table.os.allocate = failing_allocate;
    table.os.reallocate = failing_reallocate;
    ms_context context;
    ms_context_init(&context, &table.os);
    ms_strings *strings;
    assert_int_equal(ms_strings_new(&context, &strings), MS_OK);
    uint32_t id, again;
    assert_int_equal(ms_strings_add(strings, "", 0, &id), MS_OK);
    assert_int_equal(id, 0);
    char text[32];
    const char *first = NULL;
    for (uint32_t i = 1; i <= 500; i++) {
        int length = snprintf(text, sizeof text, "file.lua:%u", i);
        /* Each string first without memory: an error that changes nothing, then with just enough
         * more. */
        ms_status status = MS_ERROR_MEMORY;
        for (int allowed = 0; status != MS_OK; allowed++) {
            table.left = allowed;
            id = 12345;
            status = ms_strings_add(strings, text, (size_t)length, &id);
            if (status != MS_OK) assert_int_equal(id, 12345);
        }
        assert_int_equal(id, i);
        if (i == 1) first = ms_strings_get(strings, 1);
    }
    assert_ptr_equal(ms_strings_get(strings, 1), first);
    assert_int_equal(ms_strings_add(strings, "file.lua:77 and more", 11, &again), MS_OK);
    assert_int_equal(again, 77);
    assert_string_equal(ms_strings_get(strings, 500), "file.lua:500");
    assert_string_equal(ms_strings_get(strings, 501), "");
    ms_strings_free(strings);
}

static void count_entry(void *to, const char *name)
{
    assert_string_not_equal(name, ".");
    assert_string_not_equal(name, "..");
    ++*(int *)to;
}

static void test_files(void **state)
{
    (void)state;
    const ms_os *os = ms_os_posix();
    char folder[] = "/tmp/moonshard-base-XXXXXX", path[64], other[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/a", folder);
    snprintf(other, sizeof other, "%s/b", folder);
    ms_file *file, *second;
    assert_int_equal(os->open(NULL, path, MS_FILE_READ, &file), -ENOENT);
    assert_int_equal(os->open(NULL, path,
                              MS_FILE_READ | MS_FILE_WRITE | MS_FILE_CREATE | MS_FILE_EXCLUSIVE,
                              &file),
                     0);
    assert_int_equal(os->open(NULL, path, MS_FILE_WRITE | MS_FILE_EXCLUSIVE, &second), -EEXIST);
    assert_int_equal(os->write(NULL, file, "hello", 5, 3), 5);
    char buffer[16] = "";
    assert_int_equal(os->read(NULL, file, buffer, 16, 2), 6);
    assert_memory_equal(buffer, "\0hello", 6);
    assert_int_equal(os->read(NULL, file, buffer, 16, 8), 0);
    assert_int_equal(os->sync(NULL, file), 0);
    uint64_t bytes;
    assert_int_equal(os->size(NULL, file, &bytes), 0);
    assert_int_equal(bytes, 8);
    assert_int_equal(os->lock(NULL, file), 0);
    assert_int_equal(os->open(NULL, path, MS_FILE_READ, &second), 0);
    assert_int_equal(os->lock(NULL, second), -EWOULDBLOCK);
    os->close(NULL, file);
    assert_int_equal(os->lock(NULL, second), 0);
    os->close(NULL, second);

    assert_int_equal(os->rename(NULL, path, other), 0);
    ms_file_info info;
    assert_int_equal(os->info(NULL, path, &info), -ENOENT);
    assert_int_equal(os->info(NULL, other, &info), 0);
    assert_int_equal(info.bytes, 8);
    assert_false(info.is_directory);
    assert_true(info.modified_ns > 1600000000000000000);
    assert_int_equal(os->make_directory(NULL, path), 0);
    int entries = 0;
    assert_int_equal(os->list(NULL, folder, count_entry, &entries), 0);
    assert_int_equal(entries, 2);
    assert_int_equal(os->open(NULL, folder, MS_FILE_DIRECTORY, &file), 0);
    assert_int_equal(os->sync(NULL, file), 0);
    os->close(NULL, file);
    assert_int_equal(os->remove(NULL, folder), -ENOTEMPTY);
    assert_int_equal(os->remove(NULL, path), 0);
    assert_int_equal(os->remove(NULL, other), 0);
    assert_int_equal(os->remove(NULL, folder), 0);
}

/* A name without a file: it takes no place in a folder, one process has it at a time, and its end
 * leaves nothing. */
static void test_names_of_sockets(void **state)
{
    (void)state;
    const ms_os *os = ms_os_posix();
    char name[64], text[16];
    ms_file *door, *second, *guest, *host;
    uint32_t files = 0;
    ms_file_info info;
    snprintf(name, sizeof name, "@moonshard-test-%" PRId64, os->process_id(NULL));
    assert_int_equal(os->socket_connect(NULL, name, &guest), -ECONNREFUSED);
    assert_int_equal(os->socket_listen(NULL, name, &door), 0);
    assert_int_equal(os->info(NULL, name, &info), -ENOENT);
    assert_int_equal(os->socket_listen(NULL, name, &second), -EADDRINUSE);
    assert_int_equal(os->socket_connect(NULL, name, &guest), 0);
    assert_int_equal(os->socket_accept(NULL, door, 1000000000, &host), 0);
    assert_int_equal(os->socket_send(NULL, guest, "hello", 5, NULL, 0), 0);
    assert_int_equal(os->socket_receive(NULL, host, text, sizeof text, 1000000000, NULL, 0, &files),
                     5);
    assert_memory_equal(text, "hello", 5);
    os->close(NULL, door);
    assert_int_equal(os->socket_connect(NULL, name, &second), -ECONNREFUSED);
    os->close(NULL, guest);
    os->close(NULL, host);
}

static void test_reserved_space_becomes_zeroed_memory(void **state)
{
    (void)state;
    const ms_os *os = ms_os_posix();
    /* More than any memory: no pages back it. */
    size_t space = (size_t)64 << 30, used = (size_t)4 << 20;
    char *base = os->reserve(NULL, space);
    assert_non_null(base);
    assert_int_equal(os->commit(NULL, base + used, used, true), 0);
    for (size_t i = 0; i < used; i += 4096) assert_int_equal(base[used + i], 0);
    memset(base + used, 1, used);
    os->unreserve(NULL, base, space);
}

static void test_machine_clock_and_entropy(void **state)
{
    (void)state;
    const ms_os *os = ms_os_posix();
    ms_machine machine;
    assert_int_equal(os->machine(NULL, &machine), 0);
    assert_true(machine.cores >= 1);
    assert_true(machine.memory_bytes > (uint64_t)16 << 20);
    assert_true(machine.cpu[0] != '\0');
    uint64_t before = os->monotonic_ns(NULL);
    assert_true(os->monotonic_ns(NULL) >= before);
    assert_true(os->realtime_ns(NULL) > 1600000000000000000u);
    uint64_t a[4] = { 0 }, b[4] = { 0 };
    assert_int_equal(os->entropy(NULL, a, sizeof a), 0);
    assert_int_equal(os->entropy(NULL, b, sizeof b), 0);
    assert_memory_not_equal(a, b, sizeof a);
    assert_int_equal(os->process_id(NULL), getpid());
    assert_null(os->environment(NULL, "MOONSHARD_NO_SUCH_VARIABLE"));
}

typedef struct player {
    ms_bell bells[2];
    ms_word ball;
    int blocked;
    float product;
} player;

/* Two threads pass a number to and fro; both sleep at once, so that every pass needs a wake: one
 * that is lost hangs the test. */
static void pass_ball(player *game, uint32_t side, uint32_t rounds, ms_spin spin)
{
    for (uint32_t i = 0; i < rounds; i++) {
        for (;;) {
            uint32_t seen = ms_bell_read(&game->bells[side]);
            if (atomic_load(&game->ball) == 2 * i + side) break;
            ms_bell_wait(&game->bells[side], seen, spin);
        }
        atomic_store(&game->ball, 2 * i + side + 1);
        ms_bell_ring(&game->bells[1 - side]);
    }
}

static void second_player(void *argument)
{
    player *game = argument;
    sigset_t mask;
    sigemptyset(&mask);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    game->blocked = sigismember(&mask, SIGINT) && sigismember(&mask, SIGTERM);
    volatile float tiny = 1e-30f;
    game->product = tiny * 1e-10f;
    pass_ball(game, 1, 20000, (ms_spin){ 0 });
}

static void test_threads_wake_each_other_and_leave_the_host_alone(void **state)
{
    (void)state;
    const ms_os *os = ms_os_posix();
    player game = { 0 };
    ms_os_thread *thread;
    sigset_t before, after;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    assert_int_equal(os->thread_start(NULL, "a name longer than the kernel keeps", second_player,
                                      &game, &thread),
                     0);
    assert_int_equal(os->thread_pin(NULL, thread, 0), 0);
    assert_int_equal(os->thread_pin(NULL, thread, 100000), -EINVAL);
    pass_ball(&game, 0, 20000, (ms_spin){ 0 });
    os->thread_join(NULL, thread);
    assert_int_equal(game.ball, 40000);
    assert_true(game.blocked);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    assert_int_equal(sigismember(&before, SIGINT), sigismember(&after, SIGINT));
    /* Denormals vanish in our threads, and only there. */
    volatile float tiny = 1e-30f;
    assert_true(tiny * 1e-10f != 0.0f);
#if defined(__x86_64__) || defined(__aarch64__)
    assert_true(game.product == 0.0f);
#endif
}

static void test_futex_wait_ends_with_its_time(void **state)
{
    (void)state;
    ms_word word = 5;
    assert_false(ms_futex_wait(&word, 5, 1000000));
    assert_true(ms_futex_wait(&word, 4, UINT64_MAX));
}

/* The value of a binary16 by its definition. */
static double half_value(uint16_t half)
{
    int exponent = (half >> 10) & 31, fraction = half & 1023;
    double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

static void test_f16_every_value_and_every_tie(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t half = (uint16_t)i;
        float value = ms_float_from_f16(half);
        if ((half & 0x7c00) == 0x7c00 && (half & 0x3ff) != 0) {
            assert_true(isnan(value));
            assert_true(isnan(ms_float_from_f16(ms_f16_from_float(value))));
            continue;
        }
        if ((half & 0x7fff) == 0x7c00) assert_true(isinf(value) && (value < 0) == (half >> 15));
        else assert_true((double)value == half_value(half));
        assert_int_equal(ms_f16_from_float(value), half);
        if ((half & 0x7fff) >= 0x7c00 - 1) continue;
        /* Between this value and the next: the middle goes to the even one, its neighbours to the
         * nearer one. */
        float next = ms_float_from_f16((uint16_t)(half + 1)), middle = (value + next) / 2;
        assert_int_equal(ms_f16_from_float(middle), half & 1 ? half + 1 : half);
        assert_int_equal(ms_f16_from_float(nextafterf(middle, value)), half);
        assert_int_equal(ms_f16_from_float(nextafterf(middle, next)), half + 1);
    }
    assert_int_equal(ms_f16_from_float(65519.99f), 0x7bff);
    assert_int_equal(ms_f16_from_float(65520.0f), 0x7c00);
    assert_int_equal(ms_f16_from_float(-1e30f), 0xfc00);
    assert_int_equal(ms_f16_from_float(1e-30f), 0);
}

static void test_bf16_rounds_to_even(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t half = (uint16_t)i;
        float value = ms_float_from_bf16(half);
        if (isnan(value)) {
            assert_true(isnan(ms_float_from_bf16(ms_bf16_from_float(value))));
            continue;
        }
        assert_int_equal(ms_bf16_from_float(value), half);
        if ((half & 0x7fff) >= 0x7f80) continue;
        uint32_t tie = (uint32_t)half << 16 | 0x8000u;
        assert_int_equal(ms_bf16_from_float(ms_float_from_bits(tie)), half & 1 ? half + 1 : half);
        assert_int_equal(ms_bf16_from_float(ms_float_from_bits(tie - 1)), half);
        assert_int_equal(ms_bf16_from_float(ms_float_from_bits(tie + 1)), half + 1);
    }
    assert_true(isnan(ms_float_from_bf16(ms_bf16_from_float(ms_float_from_bits(0x7f800001u)))));
}

/* The known answers that the authors of Philox publish with their code. */
static void test_philox_known_answers(void **state)
{
    (void)state;
    static const struct {
        uint64_t key, high, low;
        uint32_t out[4];
    } known[] = {
        { 0, 0, 0, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { UINT64_MAX, UINT64_MAX, UINT64_MAX, { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { 0x299f31d0a4093822u,
          0x0370734413198a2eu,
          0x85a308d3243f6a88u,
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t out[4];
        ms_philox(known[i].key, known[i].high, known[i].low, out);
        assert_memory_equal(out, known[i].out, sizeof out);
    }
}

static void test_hash_depends_on_data_and_seed(void **state)
{
    (void)state;
    /* XXH3's published value for no bytes and seed 0. */
    assert_true(ms_hash("", 0, 0) == 0x2d06800538d394c2u);
    assert_true(ms_hash("a", 1, 0) != ms_hash("b", 1, 0));
    assert_true(ms_hash("a", 1, 0) != ms_hash("a", 1, 1));
    /* XXH3's values for many bytes, whatever instructions this processor has: others read them. */
    static unsigned char bytes[100003];
    for (unsigned i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(i * 31 + (i >> 8));
    assert_true(ms_hash(bytes, sizeof bytes, 0) == 0x42a7a0a88ac8b472u);
    assert_true(ms_hash(bytes, sizeof bytes, 5) == 0xe053facb7158fa10u);
}

/* Bytes of which so many come at a time. */
typedef struct in_pieces {
    const char *at;
    size_t left, piece;
} in_pieces;

static ms_status next_of(void *user, const void **piece, size_t *bytes)
{
    in_pieces *rest = user;
    *piece = rest->at;
    *bytes = rest->left < rest->piece ? rest->left : rest->piece;
    rest->at += *bytes;
    rest->left -= *bytes;
    return MS_OK;
}

static ms_status next_fails(void *user, const void **piece, size_t *bytes)
{
    in_pieces *rest = user;
    return rest->left < 512 ? MS_ERROR_IO : next_of(user, piece, bytes);
}

static void test_hashes_of_pieces_are_those_of_all_and_of_blocks(void **state)
{
    (void)state;
    enum { MOST = 5000, BLOCK = 1024 };
    static char bytes[MOST];
    uint64_t hashes[3 + MOST / BLOCK];
    for (int i = 0; i < MOST; i++) bytes[i] = (char)(i * 7 + i / 256);
    for (size_t count = 0; count <= MOST; count += 3)
        for (size_t piece = 128; piece <= BLOCK; piece *= 2) {
            in_pieces rest = { bytes, count, piece };
            memset(hashes, 0, sizeof hashes);
            assert_int_equal(ms_hash_pieces(next_of, &rest, BLOCK, hashes), MS_OK);
            assert_true(hashes[0] == ms_hash(bytes, count, 0));
            size_t blocks = (count + BLOCK - 1) / BLOCK;
            for (size_t b = 0; b < blocks; b++) {
                size_t left = count - b * BLOCK;
                assert_true(hashes[1 + b]
                            == ms_hash(bytes + b * BLOCK, left < BLOCK ? left : BLOCK, 0));
            }
            assert_true(hashes[1 + blocks] == 0);
            rest = (in_pieces){ bytes, count, piece };
            hashes[1] = 0;
            assert_int_equal(ms_hash_pieces(next_of, &rest, 0, hashes), MS_OK);
            assert_true(hashes[0] == ms_hash(bytes, count, 0) && hashes[1] == 0);
        }
    in_pieces rest = { bytes, MOST, 256 };
    assert_int_equal(ms_hash_pieces(next_fails, &rest, 0, hashes), MS_ERROR_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status_names_are_the_codes_of_the_surface),
        cmocka_unit_test(test_fail_records_and_may_quote_the_error_before),
        cmocka_unit_test(test_fail_os_maps_what_the_environment_refuses),
        cmocka_unit_test(test_log_reaches_the_function_from_its_level_on),
        cmocka_unit_test(test_arrays_grow_zeroed_and_refuse_overflow),
        cmocka_unit_test(test_strings_are_kept_once_and_survive_lack_of_memory),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_names_of_sockets),
        cmocka_unit_test(test_reserved_space_becomes_zeroed_memory),
        cmocka_unit_test(test_machine_clock_and_entropy),
        cmocka_unit_test(test_threads_wake_each_other_and_leave_the_host_alone),
        cmocka_unit_test(test_futex_wait_ends_with_its_time),
        cmocka_unit_test(test_f16_every_value_and_every_tie),
        cmocka_unit_test(test_bf16_rounds_to_even),
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_hash_depends_on_data_and_seed),
        cmocka_unit_test(test_hashes_of_pieces_are_those_of_all_and_of_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
