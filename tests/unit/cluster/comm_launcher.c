/* comm_launcher.c: which launcher started a process, from the variables that it sets. */
#include "comm/job/launcher_env.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* NAME=VALUE, separated by spaces. */
static const char *set;

/* The last answers stay, as those of a real environment do. */
static const char *environment(void *user, const char *name)
{
    static char answers[32][64];
    static int next;
    (void)user;
    size_t length = strlen(name);
    for (const char *at = set; *at; at += strcspn(at, " "), at += *at == ' ')
        if (strncmp(at, name, length) == 0 && at[length] == '=') {
            size_t bytes = strcspn(at + length + 1, " ");
            char *answer = answers[next++ % 32];
            memcpy(answer, at + length + 1, bytes);
            answer[bytes] = '\0';
            return answer;
        }
    return NULL;
}

static ms_os table(void)
{
    ms_os os = *ms_os_posix();
    os.environment = environment;
    return os;
}

static ms_launcher find(const char *variables)
{
    ms_os os = table();
    ms_context context = { .os = &os };
    ms_launcher found;
    set = variables;
    if (ms_launcher_find(&context, &found)) fail_msg("%s: %s", variables, context.error.message);
    return found;
}

static void refuses(const char *variables, const char *message)
{
    ms_os os = table();
    ms_context context = { .os = &os };
    ms_launcher found;
    set = variables;
    assert_int_equal(ms_launcher_find(&context, &found), MS_ERROR_ARGUMENT);
    if (!strstr(context.error.message, message))
        fail_msg("'%s' is not in: %s", message, context.error.message);
}

static void none(void **state)
{
    (void)state;
    /* Half of what a launcher sets, empty values, and the shell and batch script of Slurm. */
    static const char *const others[] = {
        "",
        "PATH=/bin RANK=3",
        "WORLD_SIZE=4 RANK=3",
        "OMPI_COMM_WORLD_RANK=1",
        "OMPI_COMM_WORLD_RANK= OMPI_COMM_WORLD_SIZE=4",
        "PMI_SIZE=2",
        "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=77",
        "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_ID=4294967291",
        "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_ID=batch",
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        ms_launcher found = find(others[i]);
        assert_int_equal(found.kind, MS_LAUNCHER_NONE);
        assert_int_equal(found.rank, MS_UNKNOWN);
    }
}

static void each(void **state)
{
    (void)state;
    ms_launcher found = find("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 "
                             "OMPI_COMM_WORLD_LOCAL_RANK=1");
    assert_int_equal(found.kind, MS_LAUNCHER_OPENMPI);
    assert_int_equal(found.rank, 3);
    assert_int_equal(found.size, 8);
    assert_int_equal(found.local_rank, 1);
    found = find("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0");
    assert_int_equal(found.kind, MS_LAUNCHER_PMI);
    assert_int_equal(found.size, 2);
    assert_int_equal(found.local_rank, 0);
    found = find("PMIX_RANK=5 PMIX_NAMESPACE=job.17");
    assert_int_equal(found.kind, MS_LAUNCHER_PMIX);
    assert_int_equal(found.rank, 5);
    assert_int_equal(found.size, MS_UNKNOWN);
    assert_int_equal(found.local_rank, MS_UNKNOWN);
    assert_string_equal(found.job, "job.17");
    found = find("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=node1 MASTER_PORT=29500");
    assert_int_equal(found.kind, MS_LAUNCHER_TORCHRUN);
    assert_string_equal(found.master, "node1");
    assert_int_equal(found.master_port, 29500);
    found = find("SLURM_PROCID=7 SLURM_NTASKS=16 SLURM_LOCALID=3 SLURM_STEP_ID=0 SLURM_JOB_ID=12");
    assert_int_equal(found.kind, MS_LAUNCHER_SLURM);
    assert_int_equal(found.rank, 7);
    assert_int_equal(found.size, 16);
    assert_int_equal(found.local_rank, 3);
    assert_string_equal(found.job, "12");
}

static void innermost(void **state)
{
    (void)state;
    /* mpirun in a batch script: Slurm's rank is 0 in all processes. */
    ms_launcher found = find("SLURM_PROCID=0 SLURM_NTASKS=8 OMPI_COMM_WORLD_RANK=2 "
                             "OMPI_COMM_WORLD_SIZE=4");
    assert_int_equal(found.kind, MS_LAUNCHER_OPENMPI);
    assert_int_equal(found.rank, 2);
    /* A server of PMIx that srun started once on each of four hosts. */
    found = find("SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_STEP_ID=1 PMIX_RANK=2 PMIX_NAMESPACE=a");
    assert_int_equal(found.kind, MS_LAUNCHER_PMIX);
    assert_int_equal(found.size, MS_UNKNOWN);
    /* mpirun of MPICH, whose processes srun's daemons start. */
    found = find("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 PMI_RANK=5 PMI_SIZE=8 "
                 "MPI_LOCALRANKID=1");
    assert_int_equal(found.size, 8);
    assert_int_equal(found.local_rank, 1);
    assert_string_equal(found.name, "mpirun of MPICH or Intel MPI");
    /* Open MPI of today sets PMIX_RANK, too. */
    found = find("PMIX_RANK=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2");
    assert_int_equal(found.kind, MS_LAUNCHER_OPENMPI);
    /* torchrun, started once on each host by srun. */
    found = find("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 RANK=5 WORLD_SIZE=8 LOCAL_RANK=1");
    assert_int_equal(found.kind, MS_LAUNCHER_TORCHRUN);
    assert_int_equal(found.rank, 5);
    /* A step of two of the job's eight tasks. */
    found = find("SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=2");
    assert_int_equal(found.size, 2);
}

/* srun --mpi=pmix and --mpi=pmi2 set their own variables and Slurm's, which say more. */
static void srun(void **state)
{
    (void)state;
    ms_launcher found = find("SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_STEP_ID=1 SLURM_LOCALID=1 "
                             "PMIX_RANK=2 PMIX_NAMESPACE=slurm.pmix.17.1");
    assert_int_equal(found.kind, MS_LAUNCHER_PMIX);
    assert_string_equal(found.name, "srun");
    assert_int_equal(found.rank, 2);
    assert_int_equal(found.size, 4);
    assert_int_equal(found.local_rank, 1);
    found = find("SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_ID=1 "
                 "SLURM_LOCALID=0 PMI_RANK=3 PMI_SIZE=4 PMI_JOBID=17.1");
    assert_int_equal(found.kind, MS_LAUNCHER_PMI);
    assert_string_equal(found.name, "srun");
    assert_int_equal(found.size, 4);
    assert_int_equal(found.local_rank, 0);
}

static void wrong(void **state)
{
    (void)state;
    refuses("OMPI_COMM_WORLD_RANK=x OMPI_COMM_WORLD_SIZE=4",
            "OMPI_COMM_WORLD_RANK=x, which mpirun of Open MPI sets, is no number");
    refuses("PMI_RANK=0 PMI_SIZE=-2", "PMI_SIZE=-2");
    refuses("PMI_RANK=0 PMI_SIZE=99999999999", "PMI_SIZE=99999999999");
    refuses("PMI_RANK=2 PMI_SIZE=2", "PMI_RANK=2 of 2 processes, which mpirun of MPICH");
    refuses("PMI_RANK=0 PMI_SIZE=0", "(PMI_SIZE)");
    refuses("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_PORT=http", "MASTER_PORT=http");
    refuses("SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=1",
            "ranks count from 0");
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(none), cmocka_unit_test(each),
                                        cmocka_unit_test(innermost), cmocka_unit_test(srun),
                                        cmocka_unit_test(wrong) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
