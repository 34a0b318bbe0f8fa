/* messages.c: processes of mpirun exchange messages through the module of its MPI: contents, order
 * within a tag, more messages than requests, empty and large ones, and how long one takes.
 *     mpirun -n 3 messages libmoonshard_mpi_openmpi.so [stay]
 * With "stay" the processes wait for a signal instead of calling MPI_Finalize. That of MPICH 4.0
 * over the TCP of UCX 1.13 may hang: some processes wait for others that have stopped reading
 * (openucx/ucx#8738). */
#include "comm/mpi/load.h"
#include "comm/mpi/progress_thread.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MANY 1500
#define LARGE ((size_t)8 << 20)

static ms_bell bell;

static void news(void *user)
{
    (void)user;
    ms_bell_ring(&bell);
}

static void fail(const char *what)
{
    fprintf(stderr, "messages: %s\n", what);
    exit(1);
}

static void await(ms_mpi_message *message)
{
    for (;;) {
        uint32_t seen = ms_bell_read(&bell);
        ms_mpi_state state = ms_mpi_look(message);
        if (state == MS_MPI_FAILED) fail("a message failed");
        if (state == MS_MPI_ENDED) return;
        ms_bell_wait(&bell, seen, (ms_spin){ 0 });
    }
}

/* What message i of a rank carries: its length and its bytes follow from both. */
static size_t length_of(uint32_t rank, uint32_t i)
{
    if (i == 7) return LARGE + rank;
    return i % 5 == 0 ? 0 : (size_t)(rank * 131 + i * 977) % 5000;
}
static unsigned char byte_of(uint32_t rank, uint32_t i, size_t at)
{
    return (unsigned char)(rank * 7 + i * 13 + at * 31 + (at >> 8));
}

static void exchange(ms_mpi *mpi)
{
    const ms_mpi_world *world = ms_mpi_found(mpi);
    ms_mpi_message *sent = calloc(MANY * world->size, sizeof *sent),
                   *received = calloc(MANY * world->size, sizeof *received);
    if (!sent || !received) fail("memory");
    for (uint32_t peer = 0; peer < world->size; peer++)
        for (uint32_t i = 0; i < MANY; i++) {
            ms_mpi_message *to = &sent[peer * MANY + i], *from = &received[peer * MANY + i];
            size_t bytes = length_of(world->rank, i), room = length_of(peer, i) + 64;
            unsigned char *memory = malloc(bytes + 1);
            if (!memory) fail("memory");
            for (size_t k = 0; k < bytes; k++) memory[k] = byte_of(world->rank, i, k);
            *to = (ms_mpi_message){ .memory = memory,
                                    .bytes = bytes,
                                    .peer = peer,
                                    .tag = (int32_t)(i % 3),
                                    .sends = true };
            *from = (ms_mpi_message){
                .memory = malloc(room), .bytes = room, .peer = peer, .tag = (int32_t)(i % 3)
            };
            if (!from->memory) fail("memory");
            ms_mpi_post(mpi, from);
            ms_mpi_post(mpi, to);
        }
    for (uint32_t peer = 0; peer < world->size; peer++)
        for (uint32_t i = 0; i < MANY; i++) {
            ms_mpi_message *to = &sent[peer * MANY + i], *from = &received[peer * MANY + i];
            await(to);
            await(from);
            if (from->moved != length_of(peer, i)) fail("a message has another length");
            for (size_t k = 0; k < from->moved; k++)
                if (((unsigned char *)from->memory)[k] != byte_of(peer, i, k))
                    fail("a message has other bytes");
            free(to->memory);
            free(from->memory);
        }
    free(sent);
    free(received);
}

/* Ranks 0 and 1 send each other one number in turn. */
static void play(ms_mpi *mpi, const ms_os *os)
{
    const ms_mpi_world *world = ms_mpi_found(mpi);
    uint64_t number = 0, began = os->monotonic_ns(os->user);
    if (world->size < 2 || world->rank > 1) return;
    for (uint32_t turn = 0; turn < 2000; turn++) {
        ms_mpi_message message = { .memory = &number,
                                   .bytes = sizeof number,
                                   .peer = 1 - world->rank,
                                   .tag = MS_MPI_TAG_MAX,
                                   .sends = turn % 2 == world->rank };
        if (message.sends) number = turn + 1;
        ms_mpi_post(mpi, &message);
        await(&message);
        if (number != turn + 1) fail("a number is missing");
    }
    if (world->rank == 0)
        printf("%.1f us a message\n", (double)(os->monotonic_ns(os->user) - began) / 2000e3);
}

/* How many bytes a rank sends to each. */
static size_t bytes_of(uint32_t rank)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < MANY; i++) bytes += length_of(rank, i);
    return bytes;
}

int main(int count, char **arguments)
{
    ms_context context = { .os = ms_os_posix() };
    const ms_mpi_module *module = NULL;
    const ms_mpi_options options = { .timeout_ns = 1800000000000u, .news = news };
    ms_mpi *mpi = NULL;
    bool stays = count == 3 && strcmp(arguments[2], "stay") == 0;
    if (count != 2 && !stays) fail("give the module's file");
    if (ms_mpi_load(&context, arguments[1], &module)
        || ms_mpi_open(&context, module, &options, &mpi))
        fail(context.error.message);
    exchange(mpi);
    play(mpi, context.os);
    uint32_t rank = ms_mpi_found(mpi)->rank, size = ms_mpi_found(mpi)->size;
    printf("rank %u of %u sent %zu bytes to each: %s\n", rank, size, bytes_of(rank),
           ms_mpi_found(mpi)->library);
    fflush(stdout);
    if (stays) pause();
    if (ms_mpi_close(&context, mpi, NULL)) fail(context.error.message);
    return 0;
}
