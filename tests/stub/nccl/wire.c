/* wire.c: the memory by which the ranks of a communicator of the stub move bytes. It is a file
 * without a name, which its id names by a process and a descriptor: nothing is left behind. */
#include "nccl.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RING_BYTES ((size_t)32 << 10)

typedef struct ring {
    _Alignas(64) _Atomic uint64_t written;
    _Alignas(64) _Atomic uint64_t read;
    _Alignas(64) char bytes[RING_BYTES];
} ring;

typedef struct shared {
    _Atomic int come, left;
    ring rings[STUB_RANKS_MAX][STUB_RANKS_MAX]; /* from, to */
} shared;

struct stub_wire {
    shared *memory;
    int rank, ranks;
    int maker; /* the descriptor of whoever made the id, to be closed; -1 */
};

bool stub_wire_name(ncclUniqueId *id)
{
    int file = memfd_create("stub of NCCL", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, sizeof(shared))) return false;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", (int)getpid(), file);
    return true;
}

/* The first rank of a communicator made its id, in this process. */
stub_wire *stub_wire_open(const ncclUniqueId *id, int rank, int ranks)
{
    int process = 0, maker = -1, file = open(id->internal, O_RDWR | O_CLOEXEC);
    if (file < 0 || ranks > STUB_RANKS_MAX) return NULL;
    shared *memory = mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    stub_wire *wire = calloc(1, sizeof *wire);
    if (memory == MAP_FAILED || !wire) abort();
    if (sscanf(id->internal, "/proc/%d/fd/%d", &process, &maker) != 2) abort();
    *wire = (stub_wire){
        .memory = memory, .rank = rank, .ranks = ranks, .maker = rank == 0 ? maker : -1
    };
    atomic_fetch_add(&memory->come, 1);
    return wire;
}

void stub_wire_close(stub_wire *wire)
{
    if (wire->maker >= 0) close(wire->maker);
    munmap(wire->memory, sizeof(shared));
    free(wire);
}

bool stub_wire_is_complete(const stub_wire *wire)
{
    return atomic_load(&wire->memory->come) == wire->ranks;
}

void stub_wire_leave(stub_wire *wire) { atomic_fetch_add(&wire->memory->left, 1); }

bool stub_wire_is_left(const stub_wire *wire)
{
    return atomic_load(&wire->memory->left) == wire->ranks;
}

/* From a place of the ring on, without going past its end. */
static size_t stretch(uint64_t at, uint64_t room, size_t count)
{
    size_t most = RING_BYTES - at % RING_BYTES;
    if (room < most) most = room;
    return count < most ? count : most;
}

size_t stub_wire_send(stub_wire *wire, int to, const void *bytes, size_t count)
{
    ring *r = &wire->memory->rings[wire->rank][to];
    uint64_t at = atomic_load(&r->written), room = RING_BYTES - (at - atomic_load(&r->read));
    size_t n = stretch(at, room, count);
    memcpy(r->bytes + at % RING_BYTES, bytes, n);
    atomic_store(&r->written, at + n);
    return n;
}

size_t stub_wire_receive(stub_wire *wire, int from, void *bytes, size_t count)
{
    ring *r = &wire->memory->rings[from][wire->rank];
    uint64_t at = atomic_load(&r->read), there = atomic_load(&r->written) - at;
    size_t n = stretch(at, there, count);
    memcpy(bytes, r->bytes + at % RING_BYTES, n);
    atomic_store(&r->read, at + n);
    return n;
}
