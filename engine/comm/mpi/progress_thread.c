/* progress_thread.c: the thread that makes all calls of MPI. */
#include "comm/mpi/progress_thread.h"

#include <stdio.h>
#include <string.h>

#define POLL_NS 100000u
#define POLL_NS_PER_KIB 1000u /* a slow network; a message makes way only while MPI is called */
#define SLEEP_NS 200000u
#define LOOKS 16 /* before it yields: Open MPI looks at its sockets in every eighth call only */
#define STOP_NS 1000000000u
#define HANGS_NS 100000000u /* no call of ours takes as long, where MPI lives */
/* How often a wait for the end of MPI looks whether the job has ended. */
#define LOOK_NS 20000000u

/* How far the thread is with the calls that block. */
typedef enum stage { BEGINNING, RUNNING, REFUSED, RESTING, CLOSED } stage;

struct ms_mpi {
    const ms_os *os;
    const ms_mpi_module *module;
    void *state; /* the module's */
    ms_mpi_options options;
    ms_os_thread *thread;
    ms_mpi_world world;
    char why[256]; /* why begin or end failed; empty: they did not */
    ms_word stage;
    _Atomic bool resting, closing, given_up;
    /* What is posted, the latest first. */
    _Atomic(ms_mpi_message *) posted;
    ms_bell bell;
    /* The thread's: messages that wait for a free request, in order; those under way, by request;
     * requests that are free; why MPI as a whole has failed. */
    ms_mpi_message *first, *last;
    ms_mpi_message *active[MS_MPI_REQUESTS];
    uint16_t idle[MS_MPI_REQUESTS];
    ms_mpi_done done[MS_MPI_REQUESTS];
    uint32_t idle_count;
    uint64_t under_way; /* bytes, with the room of those to receive */
    int broken;
};

/* ----------------------------------------------------------------- the thread */

/* The state is stored last: who posted the message may free it then. Sequentially consistent, as
 * bells of ranks ask for (comm/control/shm/state.h): a sleeper that `news` does not see has seen
 * it. */
static void finish(const ms_mpi *mpi, ms_mpi_message *message, int code, size_t moved)
{
    if (code) mpi->module->explain(code, message->why, sizeof message->why);
    message->moved = moved;
    atomic_store(&message->state, code ? MS_MPI_FAILED : MS_MPI_ENDED);
}

/* Appends what was posted since the last call to the queue, the earliest first. False: nothing. */
static bool take_posted(ms_mpi *mpi)
{
    ms_mpi_message *list = atomic_exchange_explicit(&mpi->posted, NULL, memory_order_acquire),
                   *reversed = NULL, *end = list;
    while (list) {
        ms_mpi_message *next = list->next;
        list->next = reversed;
        reversed = list;
        list = next;
    }
    if (!reversed) return false;
    if (mpi->last) mpi->last->next = reversed;
    else mpi->first = reversed;
    mpi->last = end;
    return true;
}

static int start(ms_mpi *mpi, ms_mpi_message *message, uint32_t request)
{
    return message->sends ? mpi->module->send(mpi->state, request, message->memory, message->bytes,
                                              message->peer, message->tag)
                          : mpi->module->receive(mpi->state, request, message->memory,
                                                 message->bytes, message->peer, message->tag);
}

/* Starts what waits, as far as requests are free. After MPI has failed all messages fail. True:
 * some message has ended already. */
static bool start_all(ms_mpi *mpi)
{
    bool ended = false;
    while (mpi->first && (mpi->idle_count > 0 || mpi->broken)) {
        ms_mpi_message *message = mpi->first;
        mpi->first = message->next;
        if (!mpi->first) mpi->last = NULL;
        uint32_t request = mpi->broken ? 0 : mpi->idle[mpi->idle_count - 1];
        int code = mpi->broken ? mpi->broken : start(mpi, message, request);
        if (code) {
            finish(mpi, message, code, 0);
            ended = true;
            continue;
        }
        mpi->idle_count--;
        mpi->under_way += message->bytes;
        mpi->active[request] = message;
    }
    return ended;
}

static void fail_all(ms_mpi *mpi, int code)
{
    mpi->broken = code;
    for (uint32_t i = 0; i < MS_MPI_REQUESTS; i++) {
        if (mpi->active[i]) finish(mpi, mpi->active[i], code, 0);
        mpi->active[i] = NULL;
    }
}

/* True: some message has ended. */
static bool collect(ms_mpi *mpi)
{
    ms_mpi_done *list = mpi->done;
    uint32_t count = 0;
    int code = mpi->module->done(mpi->state, list, &count);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t request = list[i].request;
        ms_mpi_message *message = mpi->active[request];
        mpi->active[request] = NULL;
        mpi->under_way -= message->bytes;
        mpi->idle[mpi->idle_count++] = (uint16_t)request;
        finish(mpi, message, list[i].code, list[i].bytes);
    }
    if (code) fail_all(mpi, code);
    return count > 0 || code;
}

static void nap(ms_mpi *mpi, uint32_t seen, uint64_t most_ns)
{
    atomic_fetch_add(&mpi->bell.sleepers, 1);
    if (ms_bell_read(&mpi->bell) == seen) ms_futex_wait(&mpi->bell.rings, seen, most_ns);
    atomic_fetch_sub(&mpi->bell.sleepers, 1);
}

/* How long it goes on looking after the last news: a message makes way only while MPI is called,
 * and calls of a program follow each other. */
static uint64_t patience_ns(const ms_mpi *mpi)
{
    return POLL_NS + mpi->under_way / 1024 * POLL_NS_PER_KIB;
}

static bool is_busy(const ms_mpi *mpi) { return mpi->idle_count < MS_MPI_REQUESTS && !mpi->broken; }

/* Calls MPI so often that it looks at the network. True: some message has ended. Where none is
 * under way, a new one is awaited first, and comes first: a call of MPI may give the core away. An
 * error of a call that is about no message is told by the next one that is. */
static bool look(ms_mpi *mpi, uint32_t seen, uint64_t news_ns)
{
    bool ended = false, has_messages = is_busy(mpi);
    if (!has_messages && mpi->os->monotonic_ns(mpi->os->user) - news_ns < POLL_NS) return false;
    for (int i = 0; i < LOOKS && !ended && !mpi->broken; i++) {
        if (has_messages) ended = collect(mpi);
        else if (ms_bell_read(&mpi->bell) == seen) (void)mpi->module->progress(mpi->state);
    }
    return ended;
}

/* How long it sleeps, where nothing has happened for `quiet` nanoseconds. */
static uint64_t sleep_ns(const ms_mpi *mpi, uint64_t quiet)
{
    if (is_busy(mpi)) return SLEEP_NS;
    return mpi->broken ? UINT64_MAX : quiet;
}

/* One look at MPI; false: there is nothing more to do. */
static bool turn(ms_mpi *mpi, uint64_t *news_ns)
{
    uint32_t seen = ms_bell_read(&mpi->bell);
    if (atomic_load(&mpi->given_up)) return false;
    bool was_busy = is_busy(mpi), begins = take_posted(mpi) && !was_busy,
         ended = start_all(mpi) || look(mpi, seen, *news_ns);
    uint64_t now = mpi->os->monotonic_ns(mpi->os->user);
    if (ended || begins) *news_ns = now;
    if (ended) mpi->options.news(mpi->options.user);
    else if (!is_busy(mpi) && atomic_load(&mpi->resting)) return false;
    else if (now - *news_ns >= patience_ns(mpi)) nap(mpi, seen, sleep_ns(mpi, now - *news_ns));
    else if (mpi->options.crowded) ms_yield();
    else ms_pause();
    return true;
}

static void say(ms_mpi *mpi, stage reached)
{
    atomic_store(&mpi->stage, reached);
    ms_futex_wake(&mpi->stage, 1);
}

/* Until MPI is to be finalized, or is given up. */
static void rest(ms_mpi *mpi)
{
    say(mpi, RESTING);
    for (;;) {
        uint32_t seen = ms_bell_read(&mpi->bell);
        if (atomic_load(&mpi->closing) || atomic_load(&mpi->given_up)) return;
        nap(mpi, seen, UINT64_MAX);
    }
}

static void run(void *argument)
{
    ms_mpi *mpi = argument;
    int code = mpi->module->begin(mpi->state, &mpi->world);
    if (code) mpi->module->explain(code, mpi->why, sizeof mpi->why);
    if (code || mpi->world.too_few_threads) {
        say(mpi, REFUSED);
        return;
    }
    uint64_t news_ns = mpi->os->monotonic_ns(mpi->os->user);
    say(mpi, RUNNING);
    while (turn(mpi, &news_ns)) {}
    rest(mpi);
    /* A message that failed, or was given up, may still be under way at a peer, for which Finalize
     * would wait. */
    if (!mpi->broken && !atomic_load(&mpi->given_up)) code = mpi->module->end(mpi->state);
    if (code) mpi->module->explain(code, mpi->why, sizeof mpi->why);
    say(mpi, CLOSED);
}

/* -------------------------------------------------------------------- public */

/* Waits until the thread has reached this stage or a later one. Returns false on timeout, or if the
 * job has ended. */
static bool await_stage(ms_mpi *mpi, stage reached, uint64_t most_ns, ms_word *over)
{
    const ms_os *os = mpi->os;
    uint64_t limit = os->monotonic_ns(os->user) + most_ns;
    for (uint32_t at; (at = atomic_load(&mpi->stage)) < (uint32_t)reached;) {
        uint64_t now = os->monotonic_ns(os->user);
        if (now >= limit || (over && atomic_load(over))) return false;
        ms_futex_wait(&mpi->stage, at, over && limit - now > LOOK_NS ? LOOK_NS : limit - now);
    }
    return true;
}

/* The call that runs, or the one that was expected. */
static const char *call_of(const ms_mpi *mpi, const char *expected)
{
    const char *call = atomic_load_explicit(&mpi->world.call, memory_order_relaxed);
    return call ? call : expected;
}

/* MPI does not come back while it begins. Some calls wait for all processes: another one may be the
 * reason. */
static ms_status fail_to_begin(ms_context *context, const ms_mpi *mpi)
{
    const char *call = call_of(mpi, "MPI_Init_thread");
    double seconds = (double)mpi->options.timeout_ns * 1e-9;
    if (strcmp(call, "MPI_Init_thread") == 0 || strcmp(call, "MPI_Comm_dup") == 0)
        return ms_fail(context, MS_ERROR_TIMEOUT,
                       "%s of %s did not return in %g s: see that all processes of the job were "
                       "started, and that the hosts reach each other",
                       call, mpi->module->name, seconds);
    return ms_fail(context, MS_ERROR_STATE,
                   "%s of %s did not return in %g s, though it waits for no other process", call,
                   mpi->module->name, seconds);
}

/* Why MPI did not begin. */
static ms_status refusal(ms_context *context, const ms_mpi *mpi)
{
    if (!*mpi->why)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "%s gives no thread of its own to the engine: it has less than "
                       "MPI_THREAD_FUNNELED (MPI_THREAD_MULTIPLE where the program itself calls "
                       "MPI_Init)",
                       mpi->module->name);
    return ms_fail(context, MS_ERROR_IO, "MPI_Init_thread of %s: %s", mpi->module->name, mpi->why);
}

ms_status ms_mpi_open(ms_context *context, const ms_mpi_module *module,
                      const ms_mpi_options *options, ms_mpi **out)
{
    const ms_os *os = context->os;
    void *memory = NULL;
    /* In one piece, so that nothing is half there; MPI's types need no more than 16 bytes. */
    size_t own = (sizeof(ms_mpi) + 15) & ~(size_t)15;
    ms_status status =
        ms_allocate(context, own + module->state_bytes, "the thread of MPI", &memory);
    if (status) return status;
    ms_mpi *mpi = memory;
    mpi->state = (char *)memory + own;
    mpi->os = os;
    mpi->module = module;
    mpi->options = *options;
    for (uint32_t i = 0; i < MS_MPI_REQUESTS; i++)
        mpi->idle[mpi->idle_count++] = (uint16_t)(MS_MPI_REQUESTS - 1 - i);
    int error = os->thread_start(os->user, "ms-mpi", run, mpi, &mpi->thread);
    if (error) {
        ms_release(context, mpi);
        return ms_fail_os(context, error, "cannot start the thread of MPI", NULL);
    }
    /* The record stays: MPI may come back while the process ends. */
    if (!await_stage(mpi, RUNNING, options->timeout_ns, NULL)) return fail_to_begin(context, mpi);
    if (atomic_load(&mpi->stage) == RUNNING) {
        *out = mpi;
        return MS_OK;
    }
    os->thread_join(os->user, mpi->thread);
    status = refusal(context, mpi);
    ms_release(context, mpi);
    return status;
}

const ms_mpi_world *ms_mpi_found(const ms_mpi *mpi) { return &mpi->world; }

void ms_mpi_post(ms_mpi *mpi, ms_mpi_message *message)
{
    atomic_store_explicit(&message->state, MS_MPI_POSTED, memory_order_relaxed);
    ms_mpi_message *before = atomic_load_explicit(&mpi->posted, memory_order_relaxed);
    do message->next = before;
    while (!atomic_compare_exchange_weak_explicit(&mpi->posted, &before, message,
                                                  memory_order_release, memory_order_relaxed));
    ms_bell_ring(&mpi->bell);
}

const char *ms_mpi_hangs(ms_mpi *mpi)
{
    const ms_os *os = mpi->os;
    ms_mpi_world *world = &mpi->world;
    uint64_t before = atomic_load_explicit(&world->returned, memory_order_relaxed),
             limit = os->monotonic_ns(os->user) + HANGS_NS;
    ms_word never = 0;
    for (uint64_t now; (now = os->monotonic_ns(os->user)) < limit;)
        ms_futex_wait(&never, 0, limit - now);
    if (atomic_load_explicit(&world->returned, memory_order_relaxed) != before) return NULL;
    return atomic_load_explicit(&world->call, memory_order_relaxed);
}

void ms_mpi_give_up(ms_mpi *mpi)
{
    atomic_store(&mpi->given_up, true);
    ms_bell_ring(&mpi->bell);
}

bool ms_mpi_has_stopped(ms_mpi *mpi) { return await_stage(mpi, CLOSED, STOP_NS, NULL); }

void ms_mpi_rest(ms_mpi *mpi)
{
    atomic_store(&mpi->resting, true);
    ms_bell_ring(&mpi->bell);
    (void)await_stage(mpi, RESTING, STOP_NS, NULL);
}

/* The thread is at its end. */
static void free_stopped(ms_context *context, ms_mpi *mpi)
{
    mpi->os->thread_join(mpi->os->user, mpi->thread);
    if (mpi->options.owns_user) ms_release(context, mpi->options.user);
    ms_release(context, mpi);
}

ms_status ms_mpi_close(ms_context *context, ms_mpi *mpi, ms_word *over)
{
    if (atomic_load(&mpi->given_up)) {
        if (atomic_load(&mpi->stage) != CLOSED) return MS_OK;
        free_stopped(context, mpi);
        return MS_OK;
    }
    atomic_store(&mpi->resting, true);
    atomic_store(&mpi->closing, true);
    ms_bell_ring(&mpi->bell);
    uint64_t most_ns = mpi->options.ending_ns ? mpi->options.ending_ns : mpi->options.timeout_ns;
    bool ended = await_stage(mpi, CLOSED, most_ns, over);
    if (!ended && over && atomic_load(over)) {
        ms_mpi_give_up(mpi);
        return MS_OK;
    }
    if (!ended)
        return ms_fail(context, MS_ERROR_TIMEOUT, "%s of %s did not return in %g s",
                       call_of(mpi, "MPI_Finalize"), mpi->module->name, (double)most_ns * 1e-9);
    ms_status status = *mpi->why ? ms_fail(context, MS_ERROR_IO, "MPI_Finalize of %s: %s",
                                           mpi->module->name, mpi->why)
                                 : MS_OK;
    free_stopped(context, mpi);
    return status;
}
