/* mpi.h of the stub: what the engine's module uses of MPI, for one process that sends to itself.
 *
 * stub_mpi_goes_wrong says what goes wrong from now on, NULL: nothing: "hang:Isend" (the call never
 * returns), "fail:Irecv" (it returns an error), "fail:message" (a message ends with an error of its
 * own), "level:single" (MPI_Init_thread gives less than it was asked for). */
#ifndef MOONSHARD_STUB_MPI_H
#define MOONSHARD_STUB_MPI_H

typedef int MPI_Comm, MPI_Errhandler, MPI_Datatype, MPI_Request;
typedef struct MPI_Status {
    int MPI_ERROR, bytes;
} MPI_Status;

enum { MPI_SUCCESS, MPI_ERR_OTHER, MPI_ERR_IN_STATUS, MPI_ERR_TRUNCATE };
enum { MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE };
#define MPI_COMM_NULL 0
#define MPI_COMM_WORLD 1
#define MPI_COMM_SELF 2
#define MPI_REQUEST_NULL 0
#define MPI_ERRORS_RETURN 1
#define MPI_BYTE 1
#define MPI_ANY_SOURCE (-1)
#define MPI_STATUS_IGNORE ((MPI_Status *)0)
#define MPI_UNDEFINED (-1)
#define MPI_MAX_LIBRARY_VERSION_STRING 64
#define MPI_MAX_ERROR_STRING 64

__attribute__((visibility("default"))) void stub_mpi_goes_wrong(const char *how);
/* How often MPI was called after the last message had ended. */
__attribute__((visibility("default"))) unsigned stub_mpi_calls_since(void);

int MPI_Initialized(int *yes);
int MPI_Query_thread(int *level);
int MPI_Init_thread(int *count, char ***arguments, int wanted, int *given);
int MPI_Get_library_version(char *text, int *length);
int MPI_Comm_dup(MPI_Comm from, MPI_Comm *to);
int MPI_Comm_free(MPI_Comm *comm);
int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler);
int MPI_Comm_rank(MPI_Comm comm, int *rank);
int MPI_Comm_size(MPI_Comm comm, int *size);
int MPI_Isend(const void *memory, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request);
int MPI_Irecv(void *memory, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *request);
int MPI_Testsome(int count, MPI_Request *requests, int *ended, int *indices, MPI_Status *statuses);
int MPI_Iprobe(int from, int tag, MPI_Comm comm, int *found, MPI_Status *status);
int MPI_Get_count(const MPI_Status *status, MPI_Datatype type, int *count);
int MPI_Error_class(int code, int *error_class);
int MPI_Error_string(int code, char *text, int *length);
int MPI_Finalize(void);

#endif
