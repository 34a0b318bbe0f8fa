/* late_device.h: a device of the tests, which runs every task as late as the table of devices
 * allows, in any legal order. Where the core forgets a wait, results differ. */
#ifndef MOONSHARD_TESTS_LATE_DEVICE_H
#define MOONSHARD_TESTS_LATE_DEVICE_H

#include "moonshard/exec.h"

/* The device for ms_engine_options.own_device: NULL unless MOONSHARD_TEST_DEVICE is "late", or
 * "late:SEED", and `device` is the CPU (or NULL). */
const ms_device *late_device(const char *device);

/* Whether MOONSHARD_TEST_DEVICE is the cuda device. */
bool device_is_cuda(void);
/* A GPU carries out no task that is a function of C, and a test that enqueues one of its own skips
 * itself there. Over the stand-in for the driver it is called. */
bool device_runs_own_tasks(void);

#endif
