/* load.h: loading the module of an MPI at run time. For comm/ only. */
#ifndef MOONSHARD_COMM_MPI_LOAD_H
#define MOONSHARD_COMM_MPI_LOAD_H

#include "comm/mpi/module/module.h"
#include "moonshard/base.h"

/* The table of the module in this file, with local symbols: what the program and the MPI link do
 * not meet. It is never unloaded. MS_ERROR_NOT_FOUND: there is no such file, or the MPI that it was
 * built with is not installed; MS_ERROR_UNSUPPORTED: it is no module, or one of another version. */
ms_status ms_mpi_load(ms_context *context, const char *path, const ms_mpi_module **out);

#endif
