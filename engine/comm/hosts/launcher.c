/* launcher.c: the launchers that are known, by their variables. */
#include "comm/hosts/launcher.h"

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

static ms_status check(ms_context *context, const ms_launcher *found, const known *one)
{
    if (found->size == 0)
        return ms_fail(context, MS_ERROR_ARGUMENT, "%s=0, which %s sets: a job has processes",
                       one->size, one->name);
    if (found->rank < found->size) return MS_OK;
    return ms_fail(context, MS_ERROR_ARGUMENT,
                   "%s=%u and %s=%u, which %s sets: ranks count from 0, below the size", one->rank,
                   found->rank, one->size, found->size, one->name);
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
    /* In a step that has fewer processes than the job, SLURM_NTASKS may be the job's. */
    if (!status && one->kind == MS_LAUNCHER_SLURM)
        status = read_number(context, one, "SLURM_STEP_NUM_TASKS", &out->size);
    if (!status) status = read_number(context, one, one->local_rank, &out->local_rank);
    if (!status && one->kind == MS_LAUNCHER_TORCHRUN) {
        out->master = text_of(context, "MASTER_ADDR");
        status = read_number(context, one, "MASTER_PORT", &out->master_port);
    }
    return status ? status : check(context, out, one);
}
