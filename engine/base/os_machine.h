/* os_machine.h: what this process may use of the machine. Inside base only; others ask the
 * table. */
#ifndef MOONSHARD_BASE_OS_MACHINE_H
#define MOONSHARD_BASE_OS_MACHINE_H

#include "moonshard/base.h"

/* 0, or -errno. */
int ms_os_machine(ms_machine *out);

#endif
