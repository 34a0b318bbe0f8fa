/* module.h: what the engine asks of an MPI: a table that a shared library of ours, a module, gives.
 * There is one module for each MPI, compiled against its mpi.h, since MPIs have no common binary
 * interface. The table names no type of mpi.h. The program loads one module at run time (load.h)
 * and links no MPI.
 *
 * Invariants
 * - One thread calls all slots; only `explain` may come after `end`.
 * - `state` is memory of the caller, where the module keeps all that it has: `state_bytes` zeros at
 *   `begin`.
 * - A request is a number below MS_MPI_REQUESTS, which the caller chooses and which is free: it has
 *   not been used, or `done` has named it since. The memory of a message belongs to MPI until then.
 * - Slots answer 0 or the MPI's own error code, which `explain` turns into text. No slot but
 *   `begin` and `end` blocks.
 * - No message is longer than MS_MPI_BYTES_MAX, since MPI counts in int.
 *
 * This header needs nothing of the engine, so that a module can be compiled by itself. */
#ifndef MOONSHARD_COMM_MPI_MODULE_H
#define MOONSHARD_COMM_MPI_MODULE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A module that was compiled with another version is refused. */
#define MS_MPI_MODULE_VERSION 3
#define MS_MPI_MODULE_SYMBOL "moonshard_mpi_module"

/* As many as all calls of a rank can have under way (comm/transport/mpi/state.h), so no
 * message waits for a request. With fewer, calls could block each other: each would hold requests
 * that others need. */
#define MS_MPI_REQUESTS 32832
#define MS_MPI_BYTES_MAX ((size_t)1 << 30)
#define MS_MPI_TAG_MAX 32767 /* what every MPI allows; no message has it */

/* What `begin` finds, and what the module says of itself as long as its state lives. */
typedef struct ms_mpi_world {
    uint32_t rank, size;
    /* The thread level that MPI gives is below MPI_THREAD_FUNNELED (below MPI_THREAD_MULTIPLE where
     * the application initialized MPI): the world must not be used. */
    bool too_few_threads;
    char library[256]; /* as the MPI names itself, the first line */
    /* The call of MPI that runs, such as "MPI_Isend", NULL: none; how many have returned. */
    _Atomic(const char *) call;
    atomic_uint_fast64_t returned;
} ms_mpi_world;

/* A message that has been sent or has arrived. */
typedef struct ms_mpi_done {
    uint32_t request;
    int code;     /* 0, or why it failed */
    size_t bytes; /* of one that has arrived */
} ms_mpi_done;

typedef struct ms_mpi_module {
    uint32_t version;
    const char *name; /* "openmpi", "mpich" */
    size_t state_bytes;
    /* MPI_Init_thread, and a communicator of our own over all processes. */
    int (*begin)(void *state, ms_mpi_world *world);
    int (*send)(void *state, uint32_t request, const void *memory, size_t bytes, uint32_t to,
                int tag);
    /* memory has room for `bytes`; a longer message is an error, a shorter one is not. */
    int (*receive)(void *state, uint32_t request, void *memory, size_t bytes, uint32_t from,
                   int tag);
    /* Writes what has ended since the last call, at most MS_MPI_REQUESTS, and how many. A failure
     * of the call itself is its result. */
    int (*done)(void *state, ms_mpi_done *list, uint32_t *count);
    /* Lets MPI work where no message is under way. A message that was sent has ended as soon as its
     * memory is free again; what MPI has kept of it may leave this process in a later call only. */
    int (*progress)(void *state);
    int (*end)(void *state);
    void (*explain)(int code, char *text, size_t bytes);
} ms_mpi_module;

/* The only symbol of a module; the result is static. */
typedef const ms_mpi_module *ms_mpi_module_function(void);

#endif
