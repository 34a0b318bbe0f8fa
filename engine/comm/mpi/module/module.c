/* module.c: the table of module.h, for the MPI whose mpi.h this is compiled with. It is compiled
 * once for each MPI that the build finds, into libmoonshard_mpi_NAME.so. MS_MPI_NAME is this
 * name. */
#include "module.h"

#include <mpi.h>
#include <stdio.h>
#include <string.h>

typedef struct ms_mpi_state {
    /* Messages of the program that embeds the engine cannot be mistaken for ours. */
    MPI_Comm world;
    MPI_Request requests[MS_MPI_REQUESTS];
    uint32_t highest; /* requests from here on are free: Testsome looks at the others only */
    MPI_Status statuses[MS_MPI_REQUESTS];
    int indices[MS_MPI_REQUESTS];
    /* The application may have initialized MPI itself. Then it also finalizes it, and its threads
     * call MPI beside the engine's one. */
    int initialized_by_others;
    ms_mpi_world *found;
} ms_mpi_state;

/* A call of MPI, which others may see to hang. */
#define CALL(state, name, ...)                                                                  \
    returned(state, (atomic_store_explicit(&(state)->found->call, #name, memory_order_relaxed), \
                     name(__VA_ARGS__)))

static int returned(const ms_mpi_state *state, int code)
{
    ms_mpi_world *found = state->found;
    atomic_store_explicit(&found->call, NULL, memory_order_relaxed);
    atomic_fetch_add_explicit(&found->returned, 1, memory_order_relaxed);
    return code;
}

static int initialize(ms_mpi_state *state, int *level)
{
    int code = MPI_Initialized(&state->initialized_by_others);
    if (code) return code;
    if (state->initialized_by_others) return MPI_Query_thread(level);
    return CALL(state, MPI_Init_thread, NULL, NULL, MPI_THREAD_FUNNELED, level);
}

static void name_library(ms_mpi_state *state)
{
    ms_mpi_world *found = state->found;
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    if (CALL(state, MPI_Get_library_version, text, &length)) text[0] = '\0';
    text[strcspn(text, "\r\n")] = '\0';
    for (char *c = text; *c; c++)
        if (*c == '\t') *c = ' ';
    snprintf(found->library, sizeof found->library, "%.*s", (int)sizeof found->library - 1, text);
}

/* Errors are answers: MPI's own way is to end the process. */
static int begin(void *memory, ms_mpi_world *found)
{
    ms_mpi_state *state = memory;
    state->found = found;
    int level = MPI_THREAD_SINGLE, rank = 0, size = 0;
    for (uint32_t i = 0; i < MS_MPI_REQUESTS; i++) state->requests[i] = MPI_REQUEST_NULL;
    int code = initialize(state, &level);
    if (code) return code;
    found->too_few_threads =
        level < (state->initialized_by_others ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED);
    code = CALL(state, MPI_Comm_dup, MPI_COMM_WORLD, &state->world);
    if (!code) code = MPI_Comm_set_errhandler(state->world, MPI_ERRORS_RETURN);
    if (!code) code = CALL(state, MPI_Comm_rank, state->world, &rank);
    if (!code) code = CALL(state, MPI_Comm_size, state->world, &size);
    found->rank = (uint32_t)rank;
    found->size = (uint32_t)size;
    if (!code) name_library(state);
    return code;
}

static MPI_Request *use(ms_mpi_state *state, uint32_t request)
{
    if (request >= state->highest) state->highest = request + 1;
    return &state->requests[request];
}

static int send(void *memory, uint32_t request, const void *data, size_t bytes, uint32_t to,
                int tag)
{
    ms_mpi_state *state = memory;
    return CALL(state, MPI_Isend, data, (int)bytes, MPI_BYTE, (int)to, tag, state->world,
                use(state, request));
}

static int receive(void *memory, uint32_t request, void *data, size_t bytes, uint32_t from, int tag)
{
    ms_mpi_state *state = memory;
    return CALL(state, MPI_Irecv, data, (int)bytes, MPI_BYTE, (int)from, tag, state->world,
                use(state, request));
}

/* MPI sets a request that has ended to MPI_REQUEST_NULL. */
static void shrink(ms_mpi_state *state)
{
    while (state->highest > 0 && state->requests[state->highest - 1] == MPI_REQUEST_NULL)
        state->highest--;
}

/* The codes of the messages are in their statuses only where the call says so. */
static int done(void *memory, ms_mpi_done *list, uint32_t *count)
{
    ms_mpi_state *state = memory;
    int ended = 0;
    *count = 0;
    int code = CALL(state, MPI_Testsome, (int)state->highest, state->requests, &ended,
                    state->indices, state->statuses);
    bool has_codes = false;
    if (code) {
        int class = 0;
        if (MPI_Error_class(code, &class) || class != MPI_ERR_IN_STATUS) return code;
        has_codes = true;
    }
    for (int i = 0; ended != MPI_UNDEFINED && i < ended; i++) {
        int bytes = 0;
        ms_mpi_done *one = &list[(*count)++];
        one->request = (uint32_t)state->indices[i];
        one->code = has_codes ? state->statuses[i].MPI_ERROR : MPI_SUCCESS;
        if (!one->code) one->code = MPI_Get_count(&state->statuses[i], MPI_BYTE, &bytes);
        one->bytes = bytes > 0 ? (size_t)bytes : 0;
    }
    shrink(state);
    return 0;
}

/* Probes for a message of a tag that no message has: the call makes MPI work on what is under way.
 * MPI_Testsome would return at once, since no request is active. */
static int progress(void *memory)
{
    ms_mpi_state *state = memory;
    int found = 0;
    return CALL(state, MPI_Iprobe, MPI_ANY_SOURCE, MS_MPI_TAG_MAX, state->world, &found,
                MPI_STATUS_IGNORE);
}

/* A process that leaves while MPI_Finalize hangs is an error there for the others, whose work is
 * done: it must not end them. */
static int end(void *memory)
{
    ms_mpi_state *state = memory;
    int code = CALL(state, MPI_Comm_free, &state->world);
    if (state->initialized_by_others) return code;
    if (!code) code = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (!code) code = MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    if (!code) code = CALL(state, MPI_Finalize);
    return code;
}

static void explain(int code, char *text, size_t bytes)
{
    char found[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (MPI_Error_string(code, found, &length)) snprintf(found, sizeof found, "error %d", code);
    found[strcspn(found, "\r\n")] = '\0';
    snprintf(text, bytes, "%s", found);
}

__attribute__((visibility("default"))) ms_mpi_module_function moonshard_mpi_module;

const ms_mpi_module *moonshard_mpi_module(void)
{
    static const ms_mpi_module module = { .version = MS_MPI_MODULE_VERSION,
                                          .name = MS_MPI_NAME,
                                          .state_bytes = sizeof(ms_mpi_state),
                                          .begin = begin,
                                          .send = send,
                                          .receive = receive,
                                          .done = done,
                                          .progress = progress,
                                          .end = end,
                                          .explain = explain };
    return &module;
}
