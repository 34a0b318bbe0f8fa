/* poison.h: a check that tasks touch nothing but what they declare. */
#ifndef MOONSHARD_EXEC_CPU_POISON_H
#define MOONSHARD_EXEC_CPU_POISON_H

#include "exec/cpu/state.h"

extern const ms_poison ms_cpu_poison;

#endif
