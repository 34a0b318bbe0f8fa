/* progress_thread.h: the one thread that makes all calls of MPI, and the messages that others give
 * it. For comm/ only.
 *
 * Invariants
 * - All calls of a module run on the progress thread, from `begin` to `end`.
 * - A message belongs to the progress thread from ms_mpi_post until its state says that it has
 *   ended; its memory does too. States only go on.
 * - Messages that one thread posts for one peer and tag start in that order, and MPI keeps it.
 * - The thread looks around until 100 us have passed since a message last ended, and 1 us more for
 *   each KiB under way. Then it sleeps, at most 200 us at a time while a message is under way.
 * - MPI makes progress in its calls only, and it may report a message as sent before all bytes have
 *   left this process: a peer may wait for the rest. So the thread goes on calling MPI while no
 *   message is under way. It calls first 100 us after the last message ended, and then doubles the
 *   time between calls. A peer waits at most twice as long for such bytes as it would if the thread
 *   called all the time, and a process that computes for a minute is woken twenty times.
 * - MPI may hang in any call. So no thread waits for a call of MPI without a time limit.
 *   ms_mpi_open and ms_mpi_close wait for the progress thread only as long as the timeout says.
 *   After ms_mpi_give_up the thread begins no further call, and only ms_mpi_has_stopped waits for
 *   it, for a moment. Unless it has stopped, the ms_mpi, messages and their memory are not freed
 *   before the process ends. */
#ifndef MOONSHARD_COMM_MPI_PROGRESS_THREAD_H
#define MOONSHARD_COMM_MPI_PROGRESS_THREAD_H

#include "base/thread.h"
#include "comm/mpi/module/module.h"

typedef struct ms_mpi ms_mpi;

typedef enum ms_mpi_state { MS_MPI_NEW, MS_MPI_POSTED, MS_MPI_ENDED, MS_MPI_FAILED } ms_mpi_state;

typedef struct ms_mpi_message {
    void *memory; /* a message that is sent is only read */
    size_t bytes; /* of one to receive: the room, at most MS_MPI_BYTES_MAX */
    uint32_t peer;
    int32_t tag; /* 0 .. MS_MPI_TAG_MAX - 1 */
    bool sends;
    /* The progress thread's */
    ms_word state; /* ms_mpi_state */
    char why[64];  /* of a failure */
    size_t moved;  /* of one that has arrived: its bytes */
    struct ms_mpi_message *next;
} ms_mpi_message;

typedef struct ms_mpi_options {
    uint64_t timeout_ns; /* for beginning */
    uint64_t ending_ns;  /* for ending; 0: timeout_ns */
    bool crowded;        /* more threads want to run than there are cores: it yields its own */
    /* Called by the progress thread when messages have ended, or all have failed. */
    void (*news)(void *user);
    void *user;
    bool owns_user; /* once opened, `user` is memory of a context, freed with the record */
} ms_mpi_options;

/* Starts the thread and MPI. If MPI does not come back, the process can only end: MS_ERROR_TIMEOUT
 * says that other processes may be the reason, MS_ERROR_STATE that none is. The module stays
 * loaded. */
ms_status ms_mpi_open(ms_context *context, const ms_mpi_module *module,
                      const ms_mpi_options *options, ms_mpi **out);
/* What MPI said at the beginning; borrowed. */
const ms_mpi_world *ms_mpi_found(const ms_mpi *mpi);
/* From any thread. The caller has filled the fields before `state`. */
void ms_mpi_post(ms_mpi *mpi, ms_mpi_message *message);
static inline ms_mpi_state ms_mpi_look(ms_mpi_message *message)
{
    return (ms_mpi_state)atomic_load(&message->state);
}
/* The call of MPI that does not return while this waits, 100 ms; NULL: they do. For who has waited
 * for a message in vain. */
const char *ms_mpi_hangs(ms_mpi *mpi);
/* The job has ended: nothing more is posted, and nothing waits for MPI again. */
void ms_mpi_give_up(ms_mpi *mpi);
/* After it was given up: whether the thread has come back from MPI, waiting at most 1 s. Then
 * nothing touches the memory of messages any more. */
bool ms_mpi_has_stopped(ms_mpi *mpi);
/* All messages have ended, here and in all other processes: the thread calls MPI no more until
 * ms_mpi_close. Waits for it, at most 1 s. MPICH may hang in MPI_Finalize when another process
 * still calls it for messages. */
void ms_mpi_rest(ms_mpi *mpi);
/* All messages have ended. Finalizes MPI, ends the thread and frees the record; on an error the
 * record stays and the process can only end. After ms_mpi_give_up MPI is not finalized, and the
 * record is freed if the thread has stopped. It is given up, and nothing waits for it any longer,
 * when the word `over` is no longer 0: the job has ended. NULL: that is not looked at. */
ms_status ms_mpi_close(ms_context *context, ms_mpi *mpi, ms_word *over);

#endif
