/* launcher_env.c: the launchers that are known, by their variables. */
#include "comm/job/launcher_env.h"

#include <string.h>

/* The variables of a launcher. `size`: NULL if it sets none. `needs`: one more variable without
 * which it did not start this process, NULL: none. */
typedef struct known {
    ms_launcher_kind kind;
    const char *name, *rank, *size, *local_rank, *job, *needs;
} known;

/* The innermost first. Slurm sets its variables in batch scripts too, where it starts one process
 * and other launchers the rest; a step has a number. */
static const known all[] = {
    { MS_LAUNCHER_OPENMPI, "mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
      "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_ess_base_jobid", NULL },
    { MS_LAUNCHER_PMI, "mpirun of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
      "PMI_JOBID", NULL },
    { MS_LAUNCHER_PMIX, "a launcher with PMIx", "PMIX_RANK", NULL, NULL, "PMIX_NAMESPACE", NULL },
    { MS_LAUNCHER_TORCHRUN, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID",
      "LOCAL_RANK" },
    { MS_LAUNCHER_SLURM, "srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID",
      "SLURM_STEP_ID" },
};

/* Namespaces of srun --mpi=pmix begin so. */
#define SLURM_PMIX "slurm.pmix."

/* Steps that Slurm numbers so are no steps of srun: the batch script, an interactive shell. */
#define SLURM_STEPS 0xfffffff0u

static const char *text_of(const ms_context *context, const char *variable)
{
    const char *text = variable ? context->os->environment(context->os->user, variable) : NULL;
    return text && *text ? text : NULL;
}

/* A number of decimal digits below MS_UNKNOWN. */
static bool parse(const char *text, uint32_t *out)
{
    uint64_t value = 0;
    if (!*text) return false;
    for (const char *c = text; *c; c++) {
        if (*c < '0' || *c > '9') return false;
        value = value * 10 + (uint64_t)(*c - '0');
        if (value >= MS_UNKNOWN) return false;
    }
    *out = (uint32_t)value;
    return true;
}

/* Leaves *out as it is where the variable is not set. */
static ms_status read_number(ms_context *context, const known *one, const char *variable,
                             uint32_t *out)
{
    const char *text = text_of(context, variable);
    if (!text || parse(text, out)) return MS_OK;
    return ms_fail(context, MS_ERROR_ARGUMENT, "%s=%.40s, which %s sets, is no number", variable,
                   text, one->name);
}

/* Whether this launcher started the process. */
static bool is_here(const ms_context *context, const known *one)
{
    uint32_t step = 0;
    const char *needs = text_of(context, one->needs);
    if (!text_of(context, one->rank) || (one->size && !text_of(context, one->size))) return false;
    if (one->needs && !needs) return false;
    return one->kind != MS_LAUNCHER_SLURM || (parse(needs, &step) && step < SLURM_STEPS);
}

/* Whether the launcher whose PMI or PMIx this is was srun itself: mpirun of MPICH and a server of
 * PMIx may run in a step of srun, whose variables their processes inherit. */
static bool is_of_srun(const ms_context *context, const known *one)
{
    const char *job = text_of(context, one->job);
    if (one->kind == MS_LAUNCHER_PMI) return !text_of(context, one->local_rank);
    return one->kind == MS_LAUNCHER_PMIX && job
           && strncmp(job, SLURM_PMIX, strlen(SLURM_PMIX)) == 0;
}

/* Size and local rank as Slurm says them, for a process of srun. */
static ms_status read_slurm(ms_context *context, const known *slurm, ms_launcher *out)
{
    out->name = slurm->name;
    ms_status status = read_number(context, slurm, slurm->size, &out->size);
    /* In a step that has fewer processes than the job, SLURM_NTASKS may be the job's. */
    if (!status) status = read_number(context, slurm, "SLURM_STEP_NUM_TASKS", &out->size);
    return status ? status : read_number(context, slurm, slurm->local_rank, &out->local_rank);
}

static ms_status check(ms_context *context, const ms_launcher *found, const known *one)
{
    if (found->size == 0)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "0 processes, which %s sets (%s): a job has some", found->name,
                       one->size ? one->size : "SLURM_NTASKS");
    if (found->rank < found->size) return MS_OK;
    return ms_fail(context, MS_ERROR_ARGUMENT,
                   "%s=%u of %u processes, which %s sets: ranks count from 0, below the size",
                   one->rank, found->rank, found->size, found->name);
}

ms_status ms_launcher_find(ms_context *context, ms_launcher *out)
{
    *out = (ms_launcher){
        .kind = MS_LAUNCHER_NONE, .rank = MS_UNKNOWN, .size = MS_UNKNOWN, .local_rank = MS_UNKNOWN
    };
    const known *one = NULL;
    for (size_t i = 0; i < sizeof all / sizeof *all && !one; i++)
        if (is_here(context, &all[i])) one = &all[i];
    if (!one) return MS_OK;
    out->kind = one->kind;
    out->name = one->name;
    out->rank_variable = one->rank;
    out->job = text_of(context, one->job);
    ms_status status = read_number(context, one, one->rank, &out->rank);
    if (!status) status = read_number(context, one, one->size, &out->size);
    if (!status) status = read_number(context, one, one->local_rank, &out->local_rank);
    const known *slurm = &all[sizeof all / sizeof *all - 1];
    if (!status && is_here(context, slurm) && (one == slurm || is_of_srun(context, one)))
        status = read_slurm(context, slurm, out);
    if (!status && one->kind == MS_LAUNCHER_TORCHRUN) {
        out->master = text_of(context, "MASTER_ADDR");
        status = read_number(context, one, "MASTER_PORT", &out->master_port);
    }
    return status ? status : check(context, out, one);
}
