/* fault_rank.h: for tests of functions that ranks use: one rank of a fake world whose n-th
 * allocation fails, for every n. */
#ifndef MOONSHARD_TESTS_FAULT_RANK_H
#define MOONSHARD_TESTS_FAULT_RANK_H

#include <stdatomic.h>

#include "comm_support.h"
#include "fault_os.h"
#include "ranges.h"

/* The thread sanitizer sees little in one failure that it does not see in another one. */
#ifdef __SANITIZE_THREAD__
#define EACH (ranges_are_short() ? 7 : 1)
#else
#define EACH 1
#endif

/* Each failure (once, or of all from the n-th on) is an error or makes no difference. It leaks
 * nothing, and the engine can still be used. */
static inline void fail_each_allocation(ms_status (*life)(rank *self, const void *which),
                                        const void *which, bool forever)
{
    for (long n = 1;; n += EACH) {
        fault_os fault;
        fault_os_init(&fault);
        rank self = { .ranks = 2 };
        ms_engine_options options = {
            .os = &fault.table, .threads = 1, .strict = true, .memory_bytes = 64 << 20
        };
        assert_int_equal(ms_engine_new(&options, NULL, &self.engine), MS_OK);
        assert_int_equal(ms_comm_open_fake(self.engine, 0, 2, &self.world), MS_OK);
        long limit = atomic_load(&fault.calls) + n;
        atomic_store(&fault.forever, forever);
        atomic_store(&fault.fail_at, limit);
        ms_status status = life(&self, which);
        bool reached = atomic_load(&fault.calls) >= limit;
        atomic_store(&fault.fail_at, 0);
        if (!reached) assert_int_equal(status, MS_OK);
        ms_engine_sync(self.engine);
        assert_int_equal(ms_engine_memory(self.engine).live, 0);
        assert_int_equal(life(&self, which), MS_OK);
        ms_engine_free(self.engine);
        assert_int_equal(atomic_load(&fault.live), 0);
        if (!reached) break;
        assert_true(n < 3000);
    }
}

#endif
