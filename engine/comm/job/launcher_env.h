/* launcher_env.h: which launcher started this process as one of several: mpirun, srun, torchrun.
 * Found by the variables that it sets. For comm/ only.
 *
 * Invariants
 * - Of launchers inside one another the innermost counts, since it started this process: an mpirun
 *   in a batch script of Slurm, not Slurm.
 * - Nothing is guessed: a launcher sets its rank and its size, or it did not start this process. A
 *   value that is no number, or a rank that is not below the size, is an error. */
#ifndef MOONSHARD_COMM_JOB_LAUNCHER_ENV_H
#define MOONSHARD_COMM_JOB_LAUNCHER_ENV_H

#include "moonshard/base.h"

typedef enum ms_launcher_kind {
    MS_LAUNCHER_NONE,
    MS_LAUNCHER_OPENMPI,
    MS_LAUNCHER_PMI, /* MPICH, Intel MPI, and srun --mpi=pmi2 */
    MS_LAUNCHER_PMIX,
    MS_LAUNCHER_TORCHRUN,
    MS_LAUNCHER_SLURM,
    MS_LAUNCHERS
} ms_launcher_kind;

#define MS_UNKNOWN UINT32_MAX

typedef struct ms_launcher {
    ms_launcher_kind kind;
    const char *name;          /* for messages; static */
    const char *rank_variable; /* that gave the rank; static */
    uint32_t rank;
    uint32_t size;       /* MS_UNKNOWN under PMIx but for srun's: only MPI_Comm_size tells it */
    uint32_t local_rank; /* among the processes of this node; MS_UNKNOWN if it is not said */
    /* What tells this job from others on the same nodes, and where torchrun's first process is: of
     * the environment, NULL if not said. */
    const char *job, *master;
    uint32_t master_port; /* 0: not said */
} ms_launcher;

/* What the environment says. MS_ERROR_ARGUMENT names the variable that is wrong. */
ms_status ms_launcher_find(ms_context *context, ms_launcher *out);

#endif
