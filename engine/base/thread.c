/* thread.c: futexes by direct system calls, bells, spinning. */
#include "base/thread.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* False only after a timeout. A changed word, a signal and a wake all count as woken: callers look
 * at their condition again in any case. */
static bool futex_wait(ms_word *word, int operation, uint32_t expected, uint64_t timeout_ns)
{
    struct timespec limit = { .tv_sec = (time_t)(timeout_ns / 1000000000u),
                              .tv_nsec = (long)(timeout_ns % 1000000000u) };
    const struct timespec *timeout = timeout_ns == UINT64_MAX ? NULL : &limit;
    long result = syscall(SYS_futex, word, operation, expected, timeout, NULL, 0);
    return result == 0 || errno != ETIMEDOUT;
}

/* The kernel reads the count as an int, in which UINT32_MAX would be negative. */
static void futex_wake(ms_word *word, int operation, uint32_t count)
{
    int most = count > INT32_MAX ? INT32_MAX : (int)count;
    syscall(SYS_futex, word, operation, most, NULL, NULL, 0);
}

/* The private forms are for threads of one process; the kernel then finds the waiters by address,
 * without looking up the page. */
bool ms_futex_wait(ms_word *word, uint32_t expected, uint64_t timeout_ns)
{
    return futex_wait(word, FUTEX_WAIT_PRIVATE, expected, timeout_ns);
}
void ms_futex_wake(ms_word *word, uint32_t count) { futex_wake(word, FUTEX_WAKE_PRIVATE, count); }
/* For words in memory that several processes map, where each sees another address. */
bool ms_futex_wait_shared(ms_word *word, uint32_t expected, uint64_t timeout_ns)
{
    return futex_wait(word, FUTEX_WAIT, expected, timeout_ns);
}
void ms_futex_wake_shared(ms_word *word, uint32_t count) { futex_wake(word, FUTEX_WAKE, count); }
/* Its address names the thread. It is never written or read. */
static _Thread_local const char mark;
const void *ms_thread_mark(void) { return &mark; }

/* For loops that poll a peer on the same core: without it they would use up their time slice while
 * the peer waits for the core. */
void ms_yield(void) { sched_yield(); }

/* A wake takes 17-45 us to reach a thread on another core. Spinning for about that long at most
 * doubles the worst wait (the argument of ski rental). With more threads than cores a spinning
 * thread keeps the thread that it waits for from running, so it sleeps at once. */
ms_spin ms_spin_choose(bool crowded, bool helper)
{
    if (crowded) return (ms_spin){ .nanoseconds = 0 };
    return (ms_spin){ .nanoseconds = helper ? 50000 : 20000 };
}

/* The system call is made only while a thread sleeps. All sleepers are woken, as they may wait for
 * different reasons. */
void ms_bell_ring(ms_bell *bell)
{
    /* Both orders are sequentially consistent, here and in ms_bell_wait: either this thread sees
     * the sleeper, or the sleeper sees the ring. */
    atomic_fetch_add_explicit(&bell->rings, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&bell->sleepers, memory_order_seq_cst) != 0)
        ms_futex_wake(&bell->rings, UINT32_MAX);
}

/* By the vDSO, without a system call; it still costs much more than a look at the bell, so it is
 * read once in 64 looks. */
static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The clock here only bounds spinning, so it need not be the replaceable one: no result depends on
 * it. */
static bool spin_until_rung(ms_bell *bell, uint32_t seen, ms_spin spin)
{
    uint64_t end = clock_ns() + spin.nanoseconds;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&bell->rings, memory_order_acquire) != seen) return true;
            ms_pause();
        }
    } while (clock_ns() < end);
    return false;
}

/* If the bell rings between the load and the system call, the kernel finds a value other than
 * `seen` and returns at once. Leaving `sleepers` raised too long costs a ringer one needless system
 * call and no more. */
void ms_bell_wait_for(ms_bell *bell, uint32_t seen, ms_spin spin, uint64_t timeout_ns)
{
    if (spin.nanoseconds != 0 && spin_until_rung(bell, seen, spin)) return;
    atomic_fetch_add_explicit(&bell->sleepers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&bell->rings, memory_order_seq_cst) == seen)
        ms_futex_wait(&bell->rings, seen, timeout_ns);
    atomic_fetch_sub_explicit(&bell->sleepers, 1, memory_order_seq_cst);
}

void ms_bell_wait(ms_bell *bell, uint32_t seen, ms_spin spin)
{
    ms_bell_wait_for(bell, seen, spin, UINT64_MAX);
}

/* On x86 two bits of MXCSR: results that are denormal become zero, and so do denormal inputs. On
 * ARM the bit FZ of FPCR does both. */
void ms_thread_flush_denormals(void)
{
#if defined(__x86_64__)
    enum { DENORMALS_ARE_ZERO = 0x40, FLUSH_TO_ZERO = 0x8000 };
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | DENORMALS_ARE_ZERO | FLUSH_TO_ZERO);
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    control |= (uint64_t)1 << 24;
    __asm__ volatile("msr fpcr, %0" : : "r"(control));
#endif
}

/* A thread that has slept takes it with 2, since it cannot know whether others sleep still: one
 * wake too many then follows. */
void ms_lock_take(ms_lock *lock)
{
    uint32_t free = 0;
    if (atomic_compare_exchange_strong(&lock->word, &free, 1)) return;
    while (atomic_exchange(&lock->word, 2)) ms_futex_wait(&lock->word, 2, UINT64_MAX);
}

/* One sleeper is enough: it wakes the next one when it gives the lock back. */
void ms_lock_give(ms_lock *lock)
{
    if (atomic_exchange(&lock->word, 0) == 2) ms_futex_wake(&lock->word, 1);
}
