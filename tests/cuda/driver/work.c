/* work.c: work of streams, and when it runs. */
#include "work.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

stream *streams;
order_clock host;
uint64_t seed = 1;

uint64_t draw(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return seed >> 33;
}

static _Atomic uint64_t passed_ns; /* see stand_in_pass */
API void stand_in_pass(uint64_t ns) { passed_ns += ns; }

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + passed_ns;
}

work *add_work(void *to, work_kind kind)
{
    stream *on = to;
    work *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->kind = kind;
    made->host = host;
    if (on->capture) {
        capture_work(on, made);
        return made;
    }
    *on->last = made;
    on->last = &made->next;
    return made;
}

void free_work(work *gone)
{
    if (gone->gone) gone->gone(gone->argument);
    free(gone->memory);
    free(gone->after);
    free(gone);
}

void take_away(stream *on)
{
    work *gone = on->first;
    on->first = gone->next;
    if (!on->first) on->last = &on->first;
    if (gone->kind == PROGRAM) program_over(gone);
    free_work(gone);
}

static void copy(const work *now)
{
    const void *from = now->memory ? now->memory : now->from;
    if (order_is_on()) {
        order_touch(from, now->bytes, false);
        order_touch(now->to, now->bytes, true);
    }
    memcpy(now->to, from, now->bytes);
}

/* Whether the kernel is the one of MOONSHARD_STAND_IN_FAULT=NAME:N, the Nth that runs of those
 * whose names contain NAME. */
static bool is_faulty(const char *name)
{
    static unsigned count;
    char part[64];
    unsigned wanted;
    const char *fault = getenv("MOONSHARD_STAND_IN_FAULT");
    if (!fault || sscanf(fault, "%63[^:]:%u", part, &wanted) != 2 || !strstr(name, part)
        || ++count < wanted)
        return false;
    count = 0;
    return true;
}

/* Functions of the host call nothing of the driver and wait for nothing: the lock stays taken, so
 * that all work stops while one runs. */
void carry_out(const work *now)
{
    if (now->kind == KERNEL && is_faulty(now->name)) driver.stopped = ILLEGAL_ADDRESS;
    else if (now->kind == KERNEL)
        now->kernel(now->memory, now->blocks, now->threads, now->shared_bytes);
    if (now->kind == COPY) copy(now);
    if (now->kind == CALL || now->kind == OTHER) now->call(now->argument);
}

API void stand_in_touch(const void *address, size_t bytes, bool writes)
{
    if (order_is_on()) order_touch(address, bytes, writes);
}

static bool can_begin(const stream *on)
{
    const work *now = on->first;
    if (!now) return false;
    if (now->kind == WAIT) return now->event->passed >= now->record;
    return now->kind != OTHER || now->ready(now->argument);
}

static bool step(stream *on)
{
    work *now = on->first;
    if (!can_begin(on)) return false;
    if (now->kind == PROGRAM) {
        if (!program_step(on->number, now)) return false;
        if (!now->left) take_away(on);
        return true;
    }
    order_begin(on->number, &now->host, now->name);
    carry_out(now);
    if (now->kind == WAIT) order_wait(on->number, &now->event->clock);
    /* An event represents its latest record, in the order of the host's calls. */
    if (now->kind == RECORD && now->record > now->event->passed) {
        now->event->passed = now->record;
        now->event->ns = clock_ns();
        now->event->clock = *order_now(on->number);
    }
    take_away(on);
    return true;
}

/* One piece of work of a stream that is chosen at random; false: there is none that can run. */
bool step_any(void)
{
    unsigned count = 0;
    if (driver.stopped) return false;
    for (stream *one = streams; one; one = one->next) count++;
    for (unsigned tries = 0, at = count ? (unsigned)(draw() % count) : 0; tries < count;
         tries++, at = (at + 1) % count) {
        stream *one = streams;
        for (unsigned i = 0; i < at; i++) one = one->next;
        if (step(one)) return true;
    }
    return false;
}

/* Whether something is under way that other threads or processes carry on. */
static bool is_waiting(void)
{
    for (const stream *one = streams; one; one = one->next)
        for (const work *now = one->first; now; now = now->next)
            if (now->kind == OTHER || (now->kind == PROGRAM && program_waits(now))) return true;
    return false;
}

static void let_others(unsigned us)
{
    pthread_mutex_unlock(&stand_in_lock);
    usleep(us);
    pthread_mutex_lock(&stand_in_lock);
}

bool any_has_work(void)
{
    for (const stream *one = streams; one; one = one->next)
        if (one->first) return true;
    return false;
}

/* For a thread that waits: false: nothing will ever happen again. Others are asked again soon, and
 * more rarely where they take long. */
bool go_on(void)
{
    static _Thread_local unsigned in_vain;
    if (step_any()) {
        in_vain = 0;
        return true;
    }
    if (driver.stopped || !is_waiting()) return false;
    let_others(in_vain++ < 5 ? 20 : 150);
    return true;
}

void await_all(void)
{
    const char *waits = getenv("MOONSHARD_STAND_IN_WAITS");
    while (waits && strcmp(waits, "1") == 0 && any_has_work() && go_on()) {}
}

/* A GPU works while no thread of the host waits for it. */
static void *carry_on(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&stand_in_lock);
    for (;;) {
        for (int i = 0; i < 16 && is_waiting() && !driver.stopped && step_any(); i++) {}
        let_others(300);
    }
    return NULL;
}

API void stand_in_share(void)
{
    static pid_t carried_on_by;
    pthread_t thread;
    pthread_mutex_lock(&stand_in_lock);
    if (carried_on_by != getpid()
        && (pthread_create(&thread, NULL, carry_on, NULL) || pthread_detach(thread)))
        abort();
    carried_on_by = getpid();
    pthread_mutex_unlock(&stand_in_lock);
}

static work *add_library_work(void *on, bool (*ready)(void *), void (*run)(void *), void *argument)
{
    work *made = add_work(on, OTHER);
    made->name = "work of a library";
    made->ready = ready;
    made->call = run;
    made->argument = argument;
    return made;
}

API void stand_in_work(void *on, bool (*ready)(void *), void (*run)(void *), void *argument)
{
    pthread_mutex_lock(&stand_in_lock);
    capture *broken = ((stream *)on)->capture;
    if (broken) (void)capture_broken(broken, "a library waits for others");
    (void)add_library_work(on, ready, run, argument);
    pthread_mutex_unlock(&stand_in_lock);
}

API bool stand_in_captured_work(void *on, const stand_in_library_work *what, void *argument)
{
    pthread_mutex_lock(&stand_in_lock);
    bool captured = ((stream *)on)->capture != NULL;
    if (captured) {
        work *made = add_library_work(on, what->ready, what->run, argument);
        made->launched = what->launched;
        made->gone = what->gone;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return captured;
}
