/* oob.h: numbers out of band go from rank to rank through the control file. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_OOB_H
#define MOONSHARD_COMM_CONTROL_SHM_OOB_H

#include "comm/control/shm/state.h"

/* Slot of ms_control_shm. */
extern const ms_task ms_shm_tasks[MS_COLLECTIVES];

#endif
