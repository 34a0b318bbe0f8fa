/* all_reduce.c: what MPI_Allreduce takes: sums of f32, in place. It is built once for each MPI, and
 * rank 0 prints the figures.
 *     mpirun -n 2 all_reduce_openmpi [BYTES...] */
#include "figures.h"

#include <mpi.h>
#include <unistd.h>

static void fail(const char *what)
{
    fprintf(stderr, "all_reduce: %s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void reduce(float *values, size_t count)
{
    if (MPI_Allreduce(MPI_IN_PLACE, values, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD))
        fail("MPI_Allreduce failed");
}

/* The first run shows that sums are right; sums of zeros stay small, however many follow. */
static void measure(const size *one, samples *all, int rank, int ranks)
{
    size_t count = one->bytes / sizeof(float);
    float *values = malloc(one->bytes);
    if (!values) fail("memory");
    for (size_t i = 0; i < count; i++) values[i] = (float)(i % 251) + (float)rank;
    for (unsigned run = 0; run < runs_of(one); run++) {
        note_run(all, one, run);
        reduce(values, count);
        if (run > 0) continue;
        for (size_t i = 0; i < count; i++) {
            size_t sum = i % 251 * (size_t)ranks + (size_t)(ranks * (ranks - 1) / 2);
            if (values[i] != (float)sum) fail("a sum is wrong");
            values[i] = 0;
        }
    }
    note_run(all, one, runs_of(one));
    free(values);
}

/* MPI_Finalize of MPICH may hang (see tests/mpi/messages.c): rank 0 ends all, without an error. */
static void end(int rank)
{
#ifdef MPICH_VERSION
    if (rank == 0) MPI_Abort(MPI_COMM_WORLD, 0);
    pause();
#else
    (void)rank;
    MPI_Finalize();
#endif
}

/* A launcher that ends a job may drop what it has not passed on yet, so figures go to the file that
 * FIGURES names. */
static void open_figures(void)
{
    const char *path = getenv("FIGURES");
    if (path && !freopen(path, "w", stdout)) fail("FIGURES cannot be written");
}

int main(int count, char **arguments)
{
    int rank = 0, ranks = 0;
    samples all;
    const size_list list = sizes_of(count - 1, arguments + 1);
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (rank == 0) open_figures();
    for (size_t i = 0; i < list.count; i++) {
        measure(&list.sizes[i], &all, rank, ranks);
        if (rank == 0) print_figures(PEER, &list.sizes[i], &all);
    }
    end(rank);
    return 0;
}
