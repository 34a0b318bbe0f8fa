/* wrong.c: a real MPI whose calls go wrong as MOONSHARD_WRONG_MPI says.
 * It replaces functions of the MPI, and calls the real ones by the MPI's
 * interface for profilers (PMPI). The values:
 * - hang:Isend:1: MPI_Isend does not return on rank 1.
 * - hang:Testsome:1:/FILE: the same of MPI_Testsome, as soon as this file exists.
 * - level:single: all processes get a lower thread level than they ask for. */
#include <mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *rank_of_launcher(void)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (!rank) rank = getenv("PMI_RANK");
    return rank ? rank : "";
}

/* Whether the calls of this rank hang now. */
static bool hangs(const char *call)
{
    char wanted[64];
    const char *text = getenv("MOONSHARD_WRONG_MPI");
    int length = snprintf(wanted, sizeof wanted, "hang:%s:%s", call, rank_of_launcher());
    if (!text || strncmp(text, wanted, (size_t)length) != 0) return false;
    return !text[length] || (text[length] == ':' && access(text + length + 1, F_OK) == 0);
}

static void may_hang(const char *call)
{
    while (hangs(call)) pause();
}

int MPI_Init_thread(int *count, char ***arguments, int wanted, int *given)
{
    const char *text = getenv("MOONSHARD_WRONG_MPI");
    may_hang("Init_thread");
    int code = PMPI_Init_thread(count, arguments, wanted, given);
    if (text && strcmp(text, "level:single") == 0) *given = MPI_THREAD_SINGLE;
    return code;
}

int MPI_Get_library_version(char *text, int *length)
{
    may_hang("Get_library_version");
    return PMPI_Get_library_version(text, length);
}

int MPI_Comm_dup(MPI_Comm from, MPI_Comm *to)
{
    may_hang("Comm_dup");
    return PMPI_Comm_dup(from, to);
}

int MPI_Comm_rank(MPI_Comm comm, int *rank)
{
    may_hang("Comm_rank");
    return PMPI_Comm_rank(comm, rank);
}

int MPI_Comm_size(MPI_Comm comm, int *size)
{
    may_hang("Comm_size");
    return PMPI_Comm_size(comm, size);
}

int MPI_Isend(const void *memory, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request)
{
    may_hang("Isend");
    return PMPI_Isend(memory, count, type, to, tag, comm, request);
}

int MPI_Irecv(void *memory, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *request)
{
    may_hang("Irecv");
    return PMPI_Irecv(memory, count, type, from, tag, comm, request);
}

int MPI_Testsome(int count, MPI_Request *requests, int *ended, int *indices, MPI_Status *statuses)
{
    may_hang("Testsome");
    return PMPI_Testsome(count, requests, ended, indices, statuses);
}

int MPI_Iprobe(int from, int tag, MPI_Comm comm, int *found, MPI_Status *status)
{
    may_hang("Iprobe");
    return PMPI_Iprobe(from, tag, comm, found, status);
}

int MPI_Finalize(void)
{
    may_hang("Finalize");
    return PMPI_Finalize();
}
