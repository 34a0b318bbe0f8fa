/* thread_mpi.c: messages between threads: each thread touches memory of its own rank only. */
#include "thread_mpi.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANKS 16
#define TRUNCATED 1
#define BROKEN 2

/* On its way: in the receiver's list, the earliest first. */
typedef struct letter {
    struct letter *next;
    uint32_t from;
    int tag;
    size_t bytes;
    char *data;     /* a copy; NULL: the sender has not been asked for it yet */
    unsigned delay; /* looks of the receiver until it is seen */
    bool taken, wanted, breaks;
} letter;

/* A request of a rank. */
typedef struct request {
    bool used, sends, ended;
    char *memory;
    size_t bytes, moved;
    uint32_t peer;
    int tag, code;
    letter *letter;
    unsigned number;
} request;

typedef struct rank {
    uint32_t number;
    unsigned started, sent;
    uint32_t highest; /* requests from here on were never used */
    request requests[MS_MPI_REQUESTS];
    bool passed[MS_MPI_REQUESTS];
} rank;

static struct {
    pthread_mutex_t lock;
    uint32_t size, next;
    size_t eager_bytes;
    unsigned failing, noise;
    letter *inbox[RANKS];
} world = { .lock = PTHREAD_MUTEX_INITIALIZER };

void thread_mpi_begin(uint32_t size, size_t eager_bytes, unsigned failing)
{
    world.size = size;
    world.eager_bytes = eager_bytes;
    world.failing = failing;
}

void thread_mpi_next(uint32_t number) { world.next = number; }

static void free_letter(letter *one)
{
    free(one->data);
    free(one);
}

void thread_mpi_end(void)
{
    for (uint32_t r = 0; r < RANKS; r++)
        while (world.inbox[r]) {
            letter *one = world.inbox[r];
            world.inbox[r] = one->next;
            free_letter(one);
        }
}

static int begin(void *state, ms_mpi_world *found)
{
    rank *self = state;
    self->number = found->rank = world.next;
    found->size = world.size;
    snprintf(found->library, sizeof found->library, "threads");
    return 0;
}

static char *copy(const void *memory, size_t bytes)
{
    char *made = malloc(bytes + 1);
    if (bytes) memcpy(made, memory, bytes);
    return made;
}

static request *use(rank *self, uint32_t number, bool sends, void *memory, size_t bytes,
                    uint32_t peer, int tag)
{
    request *one = &self->requests[number];
    if (number >= self->highest) self->highest = number + 1;
    *one = (request){ .used = true,
                      .sends = sends,
                      .memory = memory,
                      .bytes = bytes,
                      .peer = peer,
                      .tag = tag,
                      .number = self->started++ };
    return one;
}

static int send(void *state, uint32_t number, const void *memory, size_t bytes, uint32_t to,
                int tag)
{
    rank *self = state;
    request *one = use(self, number, true, (void *)(uintptr_t)memory, bytes, to, tag);
    letter *made = calloc(1, sizeof *made), **end = &world.inbox[to];
    *made = (letter){ .from = self->number, .tag = tag, .bytes = bytes };
    made->breaks = world.failing && ++self->sent % world.failing == 0;
    one->ended = bytes < world.eager_bytes;
    if (one->ended) made->data = copy(memory, bytes);
    else one->letter = made;
    pthread_mutex_lock(&world.lock);
    world.noise = world.noise * 1103515245u + 12345u;
    made->delay = (world.noise >> 16) % 4;
    while (*end) end = &(*end)->next;
    *end = made;
    pthread_mutex_unlock(&world.lock);
    return 0;
}

static int receive(void *state, uint32_t number, void *memory, size_t bytes, uint32_t from, int tag)
{
    use(state, number, false, memory, bytes, from, tag);
    return 0;
}

/* The earliest letter from there that no receive has, if it is seen already. */
static letter *find(const rank *self, const request *wanted)
{
    for (letter *one = world.inbox[self->number]; one; one = one->next)
        if (!one->taken && one->from == wanted->peer && one->tag == wanted->tag) {
            if (one->delay == 0) return one;
            one->delay--;
            return NULL;
        }
    return NULL;
}

static void take(const rank *self, request *one)
{
    letter *from = one->letter, **at = &world.inbox[self->number];
    if (!from->data) {
        from->wanted = true;
        return;
    }
    one->moved = from->bytes < one->bytes ? from->bytes : one->bytes;
    memcpy(one->memory, from->data, one->moved);
    one->code = from->bytes > one->bytes ? TRUNCATED : from->breaks ? BROKEN : 0;
    one->ended = true;
    while (*at != from) at = &(*at)->next;
    *at = from->next;
    free_letter(from);
}

/* Of the receives without a letter, the earliest posted one. */
static void match(rank *self, request *requests)
{
    bool *passed = self->passed;
    memset(passed, 0, self->highest * sizeof *passed);
    for (;;) {
        request *first = NULL;
        for (uint32_t i = 0; i < self->highest; i++) {
            request *one = &requests[i];
            if (one->used && !one->sends && !one->letter && !one->ended && !passed[i]
                && (!first || one->number < first->number))
                first = one;
        }
        if (!first) return;
        passed[first - requests] = true;
        first->letter = find(self, first);
        if (first->letter) first->letter->taken = true;
        else /* later ones of the same kind stay behind it */
            for (uint32_t i = 0; i < self->highest; i++)
                if (requests[i].peer == first->peer && requests[i].tag == first->tag)
                    passed[i] = true;
    }
}

static int done(void *state, ms_mpi_done *list, uint32_t *count)
{
    rank *self = state;
    *count = 0;
    pthread_mutex_lock(&world.lock);
    match(self, self->requests);
    for (uint32_t i = 0; i < self->highest; i++) {
        request *one = &self->requests[i];
        if (!one->used) continue;
        if (!one->ended && one->sends && one->letter->wanted) {
            one->letter->data = copy(one->memory, one->bytes);
            one->ended = true;
        } else if (!one->ended && !one->sends && one->letter) take(self, one);
        if (!one->ended) continue;
        one->used = false;
        list[(*count)++] =
            (ms_mpi_done){ .request = i, .code = one->code, .bytes = one->sends ? 0 : one->moved };
    }
    pthread_mutex_unlock(&world.lock);
    return 0;
}

/* What was sent is at its receiver. */
static int progress(void *state)
{
    (void)state;
    return 0;
}

static int end(void *state)
{
    (void)state;
    return 0;
}

static void explain(int code, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s", code == TRUNCATED ? "the message is too long" : "the cable is cut");
}

const ms_mpi_module thread_mpi = { .version = MS_MPI_MODULE_VERSION,
                                   .name = "threads",
                                   .state_bytes = sizeof(rank),
                                   .begin = begin,
                                   .send = send,
                                   .receive = receive,
                                   .done = done,
                                   .progress = progress,
                                   .end = end,
                                   .explain = explain };
