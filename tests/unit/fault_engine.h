/* fault_engine.h: runs a program on an engine of its own with the n-th call of the system failing,
 * for each n. */
#ifndef MOONSHARD_TESTS_FAULT_ENGINE_H
#define MOONSHARD_TESTS_FAULT_ENGINE_H

#include "fault_os.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "moonshard/exec.h"

/* Makes the engine over this table and uses it; *engine stays NULL if it could not be made. It
 * frees everything that it makes besides the engine. */
typedef ms_status (*fault_program)(const ms_os *os, ms_engine **engine);

/* Fails the n-th call, or all from the n-th on, until the program makes fewer calls than n: it must
 * then succeed. Nothing may stay allocated whichever call fails. */
static inline void fail_each_call(fault_program program, bool forever)
{
    for (long n = 1;; n++) {
        fault_os fault;
        fault_os_init(&fault);
        atomic_store(&fault.fail_at, n);
        atomic_store(&fault.forever, forever);
        ms_engine *engine = NULL;
        ms_status status = program(&fault.table, &engine);
        bool reached = atomic_load(&fault.calls) >= n;
        ms_engine_free(engine);
        assert_int_equal(atomic_load(&fault.live), 0);
        if (!reached) {
            assert_int_equal(status, MS_OK);
            return;
        }
        assert_true(n < 1000);
    }
}

#endif
