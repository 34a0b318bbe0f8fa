/* mpi_progress_thread.c: the thread that calls MPI, over a stub of an MPI whose calls fail or hang.
 */
#include "comm/mpi/load.h"
#include "comm/mpi/progress_thread.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static ms_bell bell;

static void news(void *user)
{
    (void)user;
    ms_bell_ring(&bell);
}

static ms_mpi_state await(ms_mpi_message *message)
{
    for (;;) {
        uint32_t seen = ms_bell_read(&bell);
        ms_mpi_state state = ms_mpi_look(message);
        if (state != MS_MPI_POSTED) return state;
        ms_bell_wait(&bell, seen, (ms_spin){ 0 });
    }
}

/* The library of the module is the stub's. */
static void *function_of_stub(const char *name)
{
    const ms_os *os = ms_os_posix();
    char why[256];
    void *stub = os->library_load(os->user, getenv("MOONSHARD_STUB_MPI"), why, sizeof why);
    if (!stub) fail_msg("%s", why);
    return os->library_symbol(os->user, stub, name);
}
static void goes_wrong(const char *how)
{
    ((void (*)(const char *))function_of_stub("stub_mpi_goes_wrong"))(how);
}
static void goes_well(void) { goes_wrong(NULL); }

static ms_status open_stub(ms_context *context, uint64_t timeout_ns, ms_mpi **out)
{
    const ms_mpi_module *module = NULL;
    const ms_mpi_options options = { .timeout_ns = timeout_ns, .news = news };
    assert_int_equal(ms_mpi_load(context, getenv("MOONSHARD_STUB_MPI"), &module), MS_OK);
    return ms_mpi_open(context, module, &options, out);
}

#define LONG_NS 1800000000000u
#define SHORT_NS 30000000u

static ms_mpi *stub(ms_context *context)
{
    ms_mpi *mpi = NULL;
    if (open_stub(context, LONG_NS, &mpi)) fail_msg("%s", context->error.message);
    return mpi;
}

static void loading(void **state)
{
    (void)state;
    ms_context context = { .os = ms_os_posix() };
    const ms_mpi_module *module = NULL;
    assert_int_equal(ms_mpi_load(&context, "/nowhere/libmpi.so", &module), MS_ERROR_NOT_FOUND);
    assert_non_null(strstr(context.error.message, "/nowhere/libmpi.so"));
    assert_int_equal(ms_mpi_load(&context, "libm.so.6", &module), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(context.error.message, "is no module of Moonshard"));
    assert_null(module);
}

/* Messages of a tag keep their order. */
static void order(void **state)
{
    (void)state;
    enum { COUNT = 1500 };
    static uint32_t sent[COUNT], received[COUNT];
    static ms_mpi_message to[COUNT], from[COUNT];
    ms_context context = { .os = ms_os_posix() };
    ms_mpi *mpi = stub(&context);
    assert_int_equal(ms_mpi_found(mpi)->size, 1);
    assert_string_equal(ms_mpi_found(mpi)->library, "stub MPI 1.0");
    for (uint32_t i = 0; i < COUNT; i++) {
        sent[i] = i;
        to[i] = (ms_mpi_message){ .memory = &sent[i], .bytes = 4, .tag = 5, .sends = true };
        from[i] = (ms_mpi_message){ .memory = &received[i], .bytes = 4, .tag = 5 };
        ms_mpi_post(mpi, &from[i]);
        ms_mpi_post(mpi, &to[i]);
    }
    for (uint32_t i = 0; i < COUNT; i++) {
        assert_int_equal(await(&to[i]), MS_MPI_ENDED);
        assert_int_equal(await(&from[i]), MS_MPI_ENDED);
        assert_int_equal(received[i], i);
        assert_int_equal(from[i].moved, 4);
    }
    assert_int_equal(ms_mpi_close(&context, mpi, NULL), MS_OK);
}

/* Messages that wait for their peers keep no later ones from ending: a rank beside a host of many
 * ranks has receives from all of them in each of its calls. */
static void many_wait(void **state)
{
    (void)state;
    enum { WAITING = 1500 };
    static uint32_t received[WAITING], number = 3, back;
    static ms_mpi_message from[WAITING], to[WAITING];
    ms_context context = { .os = ms_os_posix() };
    ms_mpi *mpi = stub(&context);
    for (uint32_t i = 0; i < WAITING; i++) {
        from[i] = (ms_mpi_message){ .memory = &received[i], .bytes = 4, .tag = 7 };
        ms_mpi_post(mpi, &from[i]);
    }
    ms_mpi_message out = { .memory = &number, .bytes = 4, .tag = 8, .sends = true },
                   in = { .memory = &back, .bytes = 4, .tag = 8 };
    ms_mpi_post(mpi, &in);
    ms_mpi_post(mpi, &out);
    assert_int_equal(await(&in), MS_MPI_ENDED);
    assert_int_equal(back, 3);
    for (uint32_t i = 0; i < WAITING; i++) {
        to[i] = (ms_mpi_message){ .memory = &number, .bytes = 4, .tag = 7, .sends = true };
        ms_mpi_post(mpi, &to[i]);
    }
    for (uint32_t i = 0; i < WAITING; i++) {
        assert_int_equal(await(&from[i]), MS_MPI_ENDED);
        assert_int_equal(await(&to[i]), MS_MPI_ENDED);
    }
    assert_int_equal(await(&out), MS_MPI_ENDED);
    assert_int_equal(ms_mpi_close(&context, mpi, NULL), MS_OK);
}

/* MPI works in its calls only: a message that it has accepted, and says is sent, may leave this
 * process in later calls. So there are later calls though no message is under way, also long after
 * the last one. If there are none, this waits until the test's time is over. */
static void goes_on(void **state)
{
    (void)state;
    uint32_t number = 1, back = 0;
    ms_context context = { .os = ms_os_posix() };
    ms_mpi *mpi = stub(&context);
    unsigned (*calls)(void) = (unsigned (*)(void))function_of_stub("stub_mpi_calls_since");
    ms_mpi_message to = { .memory = &number, .bytes = 4, .sends = true },
                   from = { .memory = &back, .bytes = 4 };
    ms_mpi_post(mpi, &from);
    ms_mpi_post(mpi, &to);
    assert_int_equal(await(&to), MS_MPI_ENDED);
    assert_int_equal(await(&from), MS_MPI_ENDED);
    uint64_t begun = context.os->monotonic_ns(context.os->user), now = begun;
    while (now - begun < 10000000) now = context.os->monotonic_ns(context.os->user);
    for (unsigned before = calls(); calls() == before;) ms_yield();
    /* An error of a call that is about no message is no message's. */
    goes_wrong("fail:Iprobe");
    for (unsigned before = calls(); calls() == before;) ms_yield();
    goes_well();
    ms_mpi_post(mpi, &from);
    ms_mpi_post(mpi, &to);
    assert_int_equal(await(&from), MS_MPI_ENDED);
    assert_int_equal(await(&to), MS_MPI_ENDED);
    assert_int_equal(ms_mpi_close(&context, mpi, NULL), MS_OK);
}

/* A shorter message than there is room for is none of our errors; a longer one is. */
static void lengths(void **state)
{
    (void)state;
    char memory[8] = "";
    ms_context context = { .os = ms_os_posix() };
    ms_mpi *mpi = stub(&context);
    ms_mpi_message to = { .memory = "moonbeam", .bytes = 3, .sends = true },
                   from = { .memory = memory, .bytes = 8 };
    ms_mpi_post(mpi, &to);
    ms_mpi_post(mpi, &from);
    assert_int_equal(await(&from), MS_MPI_ENDED);
    assert_int_equal(from.moved, 3);
    assert_string_equal(memory, "moo");
    to.bytes = 8;
    from.bytes = 4;
    ms_mpi_post(mpi, &to);
    ms_mpi_post(mpi, &from);
    assert_int_equal(await(&from), MS_MPI_FAILED);
    assert_string_equal(from.why, "the message is too long");
    assert_int_equal(ms_mpi_close(&context, mpi, NULL), MS_OK);
}

/* Calls of the beginning that fail, and what MPI gives too little of. */
static void refusals(void **state)
{
    (void)state;
    static const char *const calls[] = { "fail:Init_thread",         "fail:Comm_dup",
                                         "fail:Comm_rank",           "fail:Comm_size",
                                         "fail:Comm_set_errhandler", "fail:Initialized" };
    ms_context context = { .os = ms_os_posix() };
    ms_mpi *mpi = NULL;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        goes_wrong(calls[i]);
        assert_int_equal(open_stub(&context, LONG_NS, &mpi), MS_ERROR_IO);
        assert_non_null(strstr(context.error.message, "stub: the network is down"));
    }
    goes_wrong("level:single");
    assert_int_equal(open_stub(&context, LONG_NS, &mpi), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(context.error.message, "MPI_THREAD_FUNNELED"));
    goes_well();
    assert_null(mpi);
}

/* One message fails: the others do not. MPI as a whole fails: all do, also later ones. */
static void failures(void **state)
{
    (void)state;
    char memory[4];
    ms_context context = { .os = ms_os_posix() };
    static const char *const calls[] = { "fail:Isend", "fail:message" };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        ms_mpi *mpi = stub(&context);
        ms_mpi_message to = { .memory = "abc", .bytes = 4, .sends = true },
                       from = { .memory = memory, .bytes = 4 }, again = to;
        ms_mpi_post(mpi, &from);
        goes_wrong(calls[i]);
        ms_mpi_post(mpi, &to);
        if (i == 0) assert_int_equal(await(&to), MS_MPI_FAILED);
        else assert_int_equal(await(&from), MS_MPI_FAILED);
        goes_well();
        if (i == 1) ms_mpi_post(mpi, &from);
        ms_mpi_post(mpi, &again);
        assert_int_equal(await(&again), MS_MPI_ENDED);
        assert_int_equal(await(&from), MS_MPI_ENDED);
        assert_int_equal(ms_mpi_close(&context, mpi, NULL), MS_OK);
    }
    ms_mpi *mpi = stub(&context);
    ms_mpi_message from = { .memory = memory, .bytes = 4 }, later = from;
    ms_mpi_post(mpi, &from);
    goes_wrong("fail:Testsome");
    assert_int_equal(await(&from), MS_MPI_FAILED);
    goes_well();
    ms_mpi_post(mpi, &later);
    assert_int_equal(await(&later), MS_MPI_FAILED);
    assert_int_equal(ms_mpi_close(&context, mpi, NULL), MS_OK);
}

/* A call that never returns: beginning and ending stop waiting, and after giving up nothing waits.
 * The process then ends although a thread of it is in MPI; each case has one of its own. */
static const char *const begins[] = { "hang:Init_thread", "hang:Comm_dup",
                                      "hang:Get_library_version", "hang:Comm_rank",
                                      "hang:Comm_size" };
static const char *const works[] = { "hang:Isend", "hang:Irecv", "hang:Testsome",
                                     "hang:Get_count" };

/* A case whose process ends with this is tried again with more time: the machine was so busy that
 * the limit struck before the call that hangs. */
#define TOO_EARLY 3

/* The error names the call of "hang:CALL". */
static void assert_names(const ms_context *context, const char *how)
{
    char expected[64];
    snprintf(expected, sizeof expected, "MPI_%s of stub did not return", strchr(how, ':') + 1);
    if (!strstr(context->error.message, expected)) {
        assert_non_null(strstr(context->error.message, " of stub did not return"));
        _exit(TOO_EARLY);
    }
}

static void hangs_in_begin(const char *how, uint64_t limit_ns)
{
    ms_context context = { .os = ms_os_posix() };
    ms_mpi *mpi = NULL;
    goes_wrong(how);
    bool waits_for_others = strcmp(how, begins[0]) == 0 || strcmp(how, begins[1]) == 0;
    ms_status status = open_stub(&context, limit_ns, &mpi);
    assert_names(&context, how);
    assert_int_equal(status, waits_for_others ? MS_ERROR_TIMEOUT : MS_ERROR_STATE);
}

static void hangs_at_work(const char *how)
{
    char memory[4];
    ms_context context = { .os = ms_os_posix() };
    ms_mpi *mpi = stub(&context);
    ms_mpi_message to = { .memory = "abc", .bytes = 4, .sends = true },
                   from = { .memory = memory, .bytes = 4 };
    goes_wrong(how);
    ms_mpi_post(mpi, &to);
    ms_mpi_post(mpi, &from);
    ms_mpi_give_up(mpi);
    /* A thread that is given up before its next call ends, and close joins it. */
    (void)ms_mpi_has_stopped(mpi);
    assert_int_equal(ms_mpi_close(&context, mpi, NULL), MS_OK);
    assert_int_equal(ms_mpi_look(&from), MS_MPI_POSTED);
}

static void hangs_at_the_end(const char *how, uint64_t limit_ns)
{
    ms_context context = { .os = ms_os_posix() };
    ms_mpi *mpi = NULL;
    ms_status status = open_stub(&context, limit_ns, &mpi);
    if (status) assert_names(&context, how);
    assert_int_equal(status, MS_OK);
    goes_wrong(how);
    status = ms_mpi_close(&context, mpi, NULL);
    assert_names(&context, how);
    assert_int_equal(status, MS_ERROR_TIMEOUT);
}

static void *end_job(void *word)
{
    atomic_store((ms_word *)word, 1);
    return NULL;
}

/* The time limit is not over when the case ends, or it would fail with MS_ERROR_TIMEOUT. */
static void hangs_at_the_end_of_a_job(const char *how)
{
    ms_context context = { .os = ms_os_posix() };
    ms_mpi *mpi = stub(&context);
    ms_word over = 0;
    pthread_t ender;
    goes_wrong(how);
    assert_int_equal(pthread_create(&ender, NULL, end_job, &over), 0);
    assert_int_equal(ms_mpi_close(&context, mpi, &over), MS_OK);
    assert_int_equal(pthread_join(ender, NULL), 0);
    /* A thread that was given up before its next call ends, and close joins it. */
    (void)ms_mpi_has_stopped(mpi);
    assert_int_equal(ms_mpi_close(&context, mpi, NULL), MS_OK);
}

/* The process of a case is this program with three arguments. There a failure aborts. */
static int run_case(const char *name, const char *how, const char *limit)
{
    uint64_t limit_ns = strtoull(limit, NULL, 10);
    if (strcmp(name, "begin") == 0) hangs_in_begin(how, limit_ns);
    if (strcmp(name, "work") == 0) hangs_at_work(how);
    if (strcmp(name, "end") == 0) hangs_at_the_end(how, limit_ns);
    if (strcmp(name, "over") == 0) hangs_at_the_end_of_a_job(how);
    _exit(0);
}

static int status_of(const char *name, const char *how, uint64_t limit_ns)
{
    int status = 0;
    char limit[32];
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)limit_ns);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        setenv("CMOCKA_TEST_ABORT", "1", 1);
        execl("/proc/self/exe", "mpi_progress_thread", name, how, limit, (char *)NULL);
        _exit(127);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void in_child(const char *name, const char *how)
{
    uint64_t limit_ns = SHORT_NS;
    int status = status_of(name, how, limit_ns);
    while (WIFEXITED(status) && WEXITSTATUS(status) == TOO_EARLY && limit_ns < LONG_NS) {
        limit_ns *= 8;
        status = status_of(name, how, limit_ns);
    }
    if (status != 0) fail_msg("%s: the process ended with %#x", how, (unsigned)status);
}

static void hangs(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++) in_child("begin", begins[i]);
    for (size_t i = 0; i < sizeof works / sizeof *works; i++) in_child("work", works[i]);
    in_child("end", "hang:Comm_free");
    in_child("end", "hang:Finalize");
    in_child("over", "hang:Finalize");
}

/* Two threads post at once. */
enum { EACH = 400 };
static ms_mpi *shared;
static uint32_t values[2][EACH], found[2][EACH];
static ms_mpi_message pairs[2][EACH][2];

static void post_many(void *argument)
{
    uint32_t who = *(uint32_t *)argument;
    for (uint32_t i = 0; i < EACH; i++) {
        values[who][i] = who * EACH + i;
        ms_mpi_message *to = &pairs[who][i][0], *from = &pairs[who][i][1];
        *to = (ms_mpi_message){
            .memory = &values[who][i], .bytes = 4, .tag = (int32_t)who, .sends = true
        };
        *from = (ms_mpi_message){ .memory = &found[who][i], .bytes = 4, .tag = (int32_t)who };
        ms_mpi_post(shared, to);
        ms_mpi_post(shared, from);
    }
    for (uint32_t i = 0; i < EACH; i++) await(&pairs[who][i][1]);
}

static void threads(void **state)
{
    (void)state;
    ms_context context = { .os = ms_os_posix() };
    ms_os_thread *thread[2];
    uint32_t who[2] = { 0, 1 };
    shared = stub(&context);
    for (int i = 0; i < 2; i++)
        assert_int_equal(
            context.os->thread_start(context.os->user, "post", post_many, &who[i], &thread[i]), 0);
    for (int i = 0; i < 2; i++) context.os->thread_join(context.os->user, thread[i]);
    for (uint32_t t = 0; t < 2; t++)
        for (uint32_t i = 0; i < EACH; i++) assert_int_equal(found[t][i], t * EACH + i);
    for (uint32_t t = 0; t < 2; t++)
        for (uint32_t i = 0; i < EACH; i++) assert_int_equal(await(&pairs[t][i][0]), MS_MPI_ENDED);
    assert_int_equal(ms_mpi_close(&context, shared, NULL), MS_OK);
}

int main(int count, char **arguments)
{
    if (count == 4) return run_case(arguments[1], arguments[2], arguments[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loading), cmocka_unit_test(order),    cmocka_unit_test(many_wait),
        cmocka_unit_test(lengths), cmocka_unit_test(refusals), cmocka_unit_test(failures),
        cmocka_unit_test(threads), cmocka_unit_test(goes_on),  cmocka_unit_test(hangs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
