/* thread.h: how threads of one process wait for each other: futexes, bells, and for how long to
 * spin first.
 *
 * Invariants
 * - A bell is one 32-bit word that only grows. Every reason to wake a sleeper rings its bell, so a
 *   sleeper that has read the bell before it looked at its reasons can never sleep through one.
 * - Ringing costs a system call only while somebody sleeps.
 * - Waiting may return early; who waits looks at its reasons again. */
#ifndef MOONSHARD_BASE_THREAD_H
#define MOONSHARD_BASE_THREAD_H

#include "moonshard/base.h"
#include <stdatomic.h>

typedef _Atomic uint32_t ms_word;

/* Sleeps while *word == expected, at most timeout_ns (UINT64_MAX: no limit). false: the time is
 * over. Private to this process. */
bool ms_futex_wait(ms_word *word, uint32_t expected, uint64_t timeout_ns);
void ms_futex_wake(ms_word *word, uint32_t count);
/* The same for a word in memory that several processes map. */
bool ms_futex_wait_shared(ms_word *word, uint32_t expected, uint64_t timeout_ns);
void ms_futex_wake_shared(ms_word *word, uint32_t count);
/* An address that no other thread of this process has while this one runs: names a thread without a
 * system call. */
const void *ms_thread_mark(void);
/* Lets other threads of this core run. */
void ms_yield(void);

/* Tells the core that this is a waiting loop. */
static inline void ms_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* How long a waiting thread burns its core before it sleeps. */
typedef struct ms_spin {
    uint32_t nanoseconds;
} ms_spin;

/* A thread with a core of its own spins for about half of what a wake would cost, a helper (in the
 * middle of shared work) a little more; where more threads want to run than there are cores, none
 * spins. */
ms_spin ms_spin_choose(bool crowded, bool helper);

/* `rings` is the futex word. `sleepers` counts the threads in or near the system call. */
typedef struct ms_bell {
    ms_word rings, sleepers;
} ms_bell;

/* Read this first, then look at the reasons to go on, then wait with what was read. */
static inline uint32_t ms_bell_read(ms_bell *bell)
{
    return atomic_load_explicit(&bell->rings, memory_order_acquire);
}
/* Wakes all waiting threads. They see what was written before the ring. */
void ms_bell_ring(ms_bell *bell);
/* Returns once the bell has rung since `seen` was read, or earlier for no reason. */
void ms_bell_wait(ms_bell *bell, uint32_t seen, ms_spin spin);
/* The same, and after it has slept for timeout_ns. */
void ms_bell_wait_for(ms_bell *bell, uint32_t seen, ms_spin spin, uint64_t timeout_ns);

/* For state that several threads of a process use now and then, never on the path of a task. A
 * thread that finds it taken sleeps. 0: free, 1: taken, 2: taken, and others sleep. */
typedef struct ms_lock {
    ms_word word;
} ms_lock;
void ms_lock_take(ms_lock *lock);
void ms_lock_give(ms_lock *lock);

/* Sets flush-to-zero for the calling thread's float arithmetic: denormals cost a hundred cycles and
 * carry no information here. Only for threads that the engine owns; the application's threads keep
 * their settings. */
void ms_thread_flush_denormals(void);

#endif
