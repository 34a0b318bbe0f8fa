/* mpi.c: an MPI of one process, which sends to itself, and whose calls go wrong on request. */
#include "mpi.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MESSAGES 4096

/* A request is the number of its message here, plus 1. */
static struct message {
    bool used, sends, ended;
    void *memory;
    int bytes, tag, moved, error;
    unsigned number;
} messages[MESSAGES];
static unsigned numbers;
static atomic_uint calls_since; /* calls of MPI_Iprobe since the last message ended */

static _Atomic(const char *) wrong;

void stub_mpi_goes_wrong(const char *how) { atomic_store(&wrong, how); }
unsigned stub_mpi_calls_since(void) { return atomic_load(&calls_since); }

/* Whether this was asked of this call; the answer to "hang" does not come. */
static bool goes_wrong(const char *how, const char *call)
{
    const char *wanted = atomic_load(&wrong);
    size_t length = strlen(how);
    bool yes = wanted && strncmp(wanted, how, length) == 0 && wanted[length] == ':'
               && strcmp(wanted + length + 1, call) == 0;
    while (yes && strcmp(how, "hang") == 0) pause();
    return yes;
}
static int answer(const char *call)
{
    (void)goes_wrong("hang", call);
    return goes_wrong("fail", call) ? MPI_ERR_OTHER : MPI_SUCCESS;
}

int MPI_Initialized(int *yes)
{
    *yes = 0;
    return answer("Initialized");
}

int MPI_Query_thread(int *level)
{
    *level = MPI_THREAD_SINGLE;
    return answer("Query_thread");
}

int MPI_Init_thread(int *count, char ***arguments, int wanted, int *given)
{
    (void)count, (void)arguments;
    memset(messages, 0, sizeof messages);
    *given = goes_wrong("level", "single") ? MPI_THREAD_SINGLE : wanted;
    return answer("Init_thread");
}

int MPI_Get_library_version(char *text, int *length)
{
    *length = snprintf(text, MPI_MAX_LIBRARY_VERSION_STRING, "stub MPI 1.0\nsecond line");
    return answer("Get_library_version");
}

int MPI_Comm_dup(MPI_Comm from, MPI_Comm *to)
{
    *to = from + 1;
    return answer("Comm_dup");
}

int MPI_Comm_free(MPI_Comm *comm)
{
    *comm = MPI_COMM_NULL;
    return answer("Comm_free");
}

int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler)
{
    (void)comm, (void)handler;
    return answer("Comm_set_errhandler");
}

int MPI_Comm_rank(MPI_Comm comm, int *rank)
{
    (void)comm;
    *rank = 0;
    return answer("Comm_rank");
}

int MPI_Comm_size(MPI_Comm comm, int *size)
{
    (void)comm;
    *size = 1;
    return answer("Comm_size");
}

/* The earliest message of the other kind with this tag that has no partner yet. */
static struct message *partner_of(const struct message *one)
{
    struct message *found = NULL;
    for (int i = 0; i < MESSAGES; i++) {
        struct message *other = &messages[i];
        if (other->used && !other->ended && other->sends != one->sends && other->tag == one->tag
            && (!found || other->number < found->number))
            found = other;
    }
    return found;
}

static void join(struct message *from, struct message *to)
{
    to->moved = from->bytes < to->bytes ? from->bytes : to->bytes;
    memcpy(to->memory, from->memory, (size_t)to->moved);
    to->error = from->bytes > to->bytes ? MPI_ERR_TRUNCATE : MPI_SUCCESS;
    if (goes_wrong("fail", "message")) to->error = MPI_ERR_OTHER;
    from->ended = to->ended = true;
}

static int begin(const char *call, bool sends, void *memory, int count, int tag,
                 MPI_Request *request)
{
    int code = answer(call), at = 0;
    if (code) return code;
    while (at < MESSAGES && messages[at].used) at++;
    if (at == MESSAGES) return MPI_ERR_OTHER;
    messages[at] = (struct message){ .used = true,
                                     .sends = sends,
                                     .memory = memory,
                                     .bytes = count,
                                     .tag = tag,
                                     .number = numbers++ };
    *request = at + 1;
    struct message *partner = partner_of(&messages[at]);
    if (partner && sends) join(&messages[at], partner);
    else if (partner) join(partner, &messages[at]);
    return MPI_SUCCESS;
}

int MPI_Isend(const void *memory, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request)
{
    (void)type, (void)to, (void)comm;
    return begin("Isend", true, (void *)(size_t)memory, count, tag, request);
}

int MPI_Irecv(void *memory, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *request)
{
    (void)type, (void)from, (void)comm;
    return begin("Irecv", false, memory, count, tag, request);
}

int MPI_Testsome(int count, MPI_Request *requests, int *ended, int *indices, MPI_Status *statuses)
{
    int code = answer("Testsome"), active = 0;
    *ended = 0;
    if (code) return code;
    for (int i = 0; i < count; i++) {
        if (requests[i] == MPI_REQUEST_NULL) continue;
        struct message *message = &messages[requests[i] - 1];
        active++;
        if (!message->ended) continue;
        indices[*ended] = i;
        statuses[(*ended)++] = (MPI_Status){ message->error, message->moved };
        if (message->error) code = MPI_ERR_IN_STATUS;
        message->used = false;
        requests[i] = MPI_REQUEST_NULL;
    }
    if (active == 0) *ended = MPI_UNDEFINED;
    if (*ended > 0) atomic_store(&calls_since, 0);
    return code;
}

int MPI_Iprobe(int from, int tag, MPI_Comm comm, int *found, MPI_Status *status)
{
    (void)from, (void)tag, (void)comm, (void)status;
    *found = 0;
    atomic_fetch_add(&calls_since, 1);
    return answer("Iprobe");
}

int MPI_Get_count(const MPI_Status *status, MPI_Datatype type, int *count)
{
    (void)type;
    *count = status->bytes;
    return answer("Get_count");
}

int MPI_Error_class(int code, int *error_class)
{
    *error_class = code;
    return MPI_SUCCESS;
}

int MPI_Error_string(int code, char *text, int *length)
{
    static const char *const texts[] = { "no error", "the network is down", "see the statuses",
                                         "the message is too long" };
    *length = snprintf(text, MPI_MAX_ERROR_STRING, "%s", texts[code]);
    return MPI_SUCCESS;
}

int MPI_Finalize(void) { return answer("Finalize"); }
