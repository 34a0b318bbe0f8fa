/* nccl.c: the functions of NCCL as the stub has them. */
#include "nccl.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ALIVE 0x4c4343
#define OPS 16

/* Bytes to or from a peer. Those of one direction and peer go in the order of the list. */
typedef struct flow {
    bool sends;
    int peer;
    char *at;
    size_t rest;
} flow;

/* A reduction, once all bytes are there. */
typedef struct ending {
    const void *inputs[STUB_RANKS_MAX];
    float factors[STUB_RANKS_MAX];
    void *out, *memory;
    bool has_factors;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    struct ending *next;
} ending;

typedef enum stage { BEGINNING, RUNNING, FINALIZING } stage;

struct ncclComm {
    unsigned magic;
    int rank, ranks;
    stub_wire *wire;
    stage stage;
    atomic_int inside; /* a thread is in one of the functions */
    bool in_progress, never;
    uint64_t not_before_ns;
    ncclResult_t after, error; /* after: what is wrong once the call has ended */
    flow *flows;
    size_t count, capacity;
    ending *endings;
    const void *self; /* of a send to this rank itself, until its receive */
    bool is_made[OPS];
    float factors[OPS];
};

/* The group that this thread has open. */
static _Thread_local struct {
    int depth;
    ncclComm_t comm;
    ncclResult_t failed;
} group;

static _Atomic int seen_min_ctas, seen_max_ctas, seen_registered;

void stub_nccl_seen(int *min_ctas, int *max_ctas, int *registered)
{
    *min_ctas = seen_min_ctas;
    *max_ctas = seen_max_ctas;
    *registered = seen_registered;
}

void moonshard_nccl_host_memory(void) {}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ------------------------------------------------------------------- rules */

static void enter(ncclComm_t comm, const char *function, bool may_be_in_progress)
{
    if (!comm || comm->magic != ALIVE) stub_broken(function, "there is no such communicator");
    if (atomic_exchange(&comm->inside, 1))
        stub_broken(function, "two threads use one communicator at the same time");
    if (comm->in_progress && !may_be_in_progress)
        stub_broken(function, "the communicator was used while a call was in progress");
}

static ncclResult_t leave(ncclComm_t comm, ncclResult_t result)
{
    atomic_store(&comm->inside, 0);
    return result;
}

/* ----------------------------------------------------------------- progress */

static void drop_work(ncclComm_t comm)
{
    comm->count = 0;
    comm->self = NULL;
    for (ending *next; comm->endings; comm->endings = next) {
        next = comm->endings->next;
        free(comm->endings->memory);
        free(comm->endings);
    }
}

/* Whether all bytes have moved. */
static bool move(ncclComm_t comm)
{
    unsigned blocked[2] = { 0 };
    bool all = true;
    for (size_t i = 0; i < comm->count; i++) {
        flow *f = &comm->flows[i];
        if (!f->rest || blocked[f->sends] >> f->peer & 1) continue;
        for (size_t n = 1; n && f->rest; f->rest -= n, f->at += n)
            n = f->sends ? stub_wire_send(comm->wire, f->peer, f->at, f->rest)
                         : stub_wire_receive(comm->wire, f->peer, f->at, f->rest);
        if (!f->rest) continue;
        blocked[f->sends] |= 1u << f->peer;
        all = false;
    }
    return all;
}

static bool has_ended(ncclComm_t comm)
{
    if (comm->stage == BEGINNING) return stub_wire_is_complete(comm->wire);
    if (comm->stage == FINALIZING) return stub_wire_is_left(comm->wire);
    if (!move(comm)) return false;
    for (const ending *e = comm->endings; e; e = e->next)
        stub_reduce(e->out, e->inputs, e->has_factors ? e->factors : NULL, comm->ranks, e->count,
                    e->type, e->op);
    drop_work(comm);
    return true;
}

/* An error that comes after the end of a call is seen by the next look. */
static void advance(ncclComm_t comm)
{
    if (!comm->in_progress) {
        if (comm->after) comm->error = comm->after;
        return;
    }
    if (comm->never || now_ns() < comm->not_before_ns || !has_ended(comm)) return;
    comm->in_progress = false;
    if (comm->stage == BEGINNING) comm->stage = RUNNING;
}

/* Always in progress at first, where there are peers: who does not ask again finds that nothing
 * has happened. */
static ncclResult_t start(ncclComm_t comm, stub_due due)
{
    comm->never = due.how == STUB_NEVER;
    comm->not_before_ns = due.how == STUB_LATE ? now_ns() + (uint64_t)due.value * 1000000u : 0;
    comm->after = due.how == STUB_ASYNC ? (ncclResult_t)due.value : ncclSuccess;
    comm->in_progress = true;
    if (comm->ranks == 1) advance(comm);
    return comm->in_progress ? ncclInProgress : ncclSuccess;
}

/* ------------------------------------------------------------ building work */

static void add_flow(ncclComm_t comm, bool sends, int peer, const void *at, size_t bytes)
{
    if (comm->count == comm->capacity) {
        comm->capacity = comm->capacity ? 2 * comm->capacity : 64;
        comm->flows = realloc(comm->flows, comm->capacity * sizeof *comm->flows);
        if (!comm->flows) abort();
    }
    comm->flows[comm->count++] =
        (flow){ .sends = sends, .peer = peer, .at = (char *)(uintptr_t)at, .rest = bytes };
}

/* What a call brings to a reduction of `root`: its factor first, if there are factors. */
static void give(ncclComm_t comm, int root, const void *in, size_t bytes, ncclRedOp_t op)
{
    if (op >= ncclNumOps)
        add_flow(comm, true, root, &comm->factors[op - ncclNumOps], sizeof(float));
    add_flow(comm, true, root, in, bytes);
}

static void collect(ncclComm_t comm, const void *own, void *out, size_t count, ncclDataType_t type,
                    ncclRedOp_t op)
{
    size_t bytes = count * stub_bytes(type);
    ending *e = calloc(1, sizeof *e);
    char *memory = malloc((size_t)comm->ranks * bytes + 1);
    if (!e || !memory) abort();
    *e = (ending){ .out = out,
                   .memory = memory,
                   .has_factors = op >= ncclNumOps,
                   .count = count,
                   .type = type,
                   .op = op,
                   .next = comm->endings };
    for (int r = 0; r < comm->ranks; r++) {
        e->inputs[r] = r == comm->rank ? own : memory + (size_t)r * bytes;
        if (e->has_factors) e->factors[r] = comm->factors[op - ncclNumOps];
        if (r == comm->rank) continue;
        if (e->has_factors) add_flow(comm, false, r, &e->factors[r], sizeof(float));
        add_flow(comm, false, r, e->inputs[r], bytes);
    }
    comm->endings = e;
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (to != from && bytes) memcpy(to, from, bytes);
}

/* Around each call that moves bytes: begin; then its work is added; end. */
static ncclResult_t begin(ncclComm_t comm, const char *function, stub_due *due)
{
    enter(comm, function, false);
    *due = stub_ask(function, comm->rank);
    if (group.depth && group.comm && group.comm != comm)
        stub_broken(function, "a group of calls of two communicators");
    if (group.depth) group.comm = comm;
    if (due->how != STUB_FAIL) return ncclSuccess;
    if (group.depth) group.failed = (ncclResult_t)due->value;
    return leave(comm, (ncclResult_t)due->value);
}

static ncclResult_t end(ncclComm_t comm, stub_due due)
{
    return leave(comm, group.depth ? ncclSuccess : start(comm, due));
}

/* -------------------------------------------------------------- collectives */

#define BEGIN(name)                                \
    stub_due due;                                  \
    ncclResult_t failed = begin(comm, name, &due); \
    (void)stream;                                  \
    if (failed) return failed

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, void *stream)
{
    BEGIN("ncclAllReduce");
    for (int r = 0; r < comm->ranks; r++)
        if (r != comm->rank) give(comm, r, in, count * stub_bytes(type), op);
    collect(comm, in, out, count, type, op);
    return end(comm, due);
}

ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, void *stream)
{
    BEGIN("ncclReduce");
    if (root == comm->rank) collect(comm, in, out, count, type, op);
    else give(comm, root, in, count * stub_bytes(type), op);
    return end(comm, due);
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t part, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, void *stream)
{
    BEGIN("ncclReduceScatter");
    size_t bytes = part * stub_bytes(type);
    for (int r = 0; r < comm->ranks; r++)
        if (r != comm->rank) give(comm, r, (const char *)in + (size_t)r * bytes, bytes, op);
    collect(comm, (const char *)in + (size_t)comm->rank * bytes, out, part, type, op);
    return end(comm, due);
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t part, ncclDataType_t type,
                           ncclComm_t comm, void *stream)
{
    BEGIN("ncclAllGather");
    size_t bytes = part * stub_bytes(type);
    copy((char *)out + (size_t)comm->rank * bytes, in, bytes);
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank) continue;
        add_flow(comm, true, r, in, bytes);
        add_flow(comm, false, r, (char *)out + (size_t)r * bytes, bytes);
    }
    return end(comm, due);
}

ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, void *stream)
{
    BEGIN("ncclBroadcast");
    size_t bytes = count * stub_bytes(type);
    if (root == comm->rank) copy(out, in, bytes);
    else add_flow(comm, false, root, out, bytes);
    for (int r = 0; r < comm->ranks; r++)
        if (root == comm->rank && r != root) add_flow(comm, true, r, in, bytes);
    return end(comm, due);
}

ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      void *stream)
{
    BEGIN("ncclSend");
    if (peer == comm->rank) comm->self = in;
    else add_flow(comm, true, peer, in, count * stub_bytes(type));
    return end(comm, due);
}

ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      void *stream)
{
    BEGIN("ncclRecv");
    if (peer != comm->rank) add_flow(comm, false, peer, out, count * stub_bytes(type));
    else if (comm->self) copy(out, comm->self, count * stub_bytes(type));
    else stub_broken("ncclRecv", "from this rank itself, without a send before it in the group");
    return end(comm, due);
}

ncclResult_t ncclGroupStart(void)
{
    stub_due due = stub_ask("ncclGroupStart", -1);
    if (due.how == STUB_FAIL) return (ncclResult_t)due.value;
    if (group.depth++ == 0) group.comm = NULL;
    group.failed = ncclSuccess;
    return ncclSuccess;
}

/* A group of which a call has failed is not started. */
ncclResult_t ncclGroupEnd(void)
{
    ncclComm_t comm = group.comm;
    ncclResult_t failed = group.failed;
    if (group.depth-- == 0) stub_broken("ncclGroupEnd", "no group is open");
    if (!comm) return failed;
    enter(comm, "ncclGroupEnd", false);
    stub_due due = stub_ask("ncclGroupEnd", comm->rank);
    if (due.how == STUB_FAIL) failed = (ncclResult_t)due.value;
    if (!failed) return leave(comm, start(comm, due));
    drop_work(comm);
    return leave(comm, failed);
}

/* -------------------------------------------------------------- operations */

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      int residence, ncclComm_t comm)
{
    stub_due due;
    int place = 0;
    ncclResult_t failed = begin(comm, "ncclRedOpCreatePreMulSum", &due);
    if (failed) return failed;
    if (residence != 1) stub_broken("ncclRedOpCreatePreMulSum", "the scalar is not on the host");
    while (place < OPS && comm->is_made[place]) place++;
    if (place == OPS) stub_broken("ncclRedOpCreatePreMulSum", "operations are never destroyed");
    comm->is_made[place] = true;
    comm->factors[place] = stub_float(scalar, 0, type);
    *op = (ncclRedOp_t)((int)ncclNumOps + place);
    return leave(comm, ncclSuccess);
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
    stub_due due;
    ncclResult_t failed = begin(comm, "ncclRedOpDestroy", &due);
    if (failed) return failed;
    int place = (int)op - (int)ncclNumOps;
    if (place < 0 || place >= OPS || !comm->is_made[place])
        stub_broken("ncclRedOpDestroy", "there is no such operation");
    comm->is_made[place] = false;
    return leave(comm, ncclSuccess);
}

/* ------------------------------------------------------------ communicators */

ncclResult_t ncclGetVersion(int *version)
{
    stub_due due = stub_ask("ncclGetVersion", -1);
    *version = due.how == STUB_VERSION ? due.value : 22809;
    return due.how == STUB_FAIL ? (ncclResult_t)due.value : ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    stub_due due = stub_ask("ncclGetUniqueId", -1);
    if (due.how == STUB_FAIL) return (ncclResult_t)due.value;
    return stub_wire_name(id) ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    stub_due due = stub_ask("ncclCommInitRankConfig", rank);
    if (config->magic != 0xcafebeef || config->size < sizeof *config || config->version < 22800)
        stub_broken("ncclCommInitRankConfig", "the configuration is not initialized");
    if (config->blocking != 0) stub_broken("ncclCommInitRankConfig", "it would block");
    if (due.how == STUB_FAIL) return (ncclResult_t)due.value;
    seen_min_ctas = config->minCTAs;
    seen_max_ctas = config->maxCTAs;
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (!comm) abort();
    *comm = (struct ncclComm){ .magic = ALIVE, .rank = rank, .ranks = ranks };
    comm->wire = stub_wire_open(&id, rank, ranks);
    if (!comm->wire) {
        free(comm);
        return ncclInvalidArgument;
    }
    *out = comm;
    return start(comm, due);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    enter(comm, "ncclCommGetAsyncError", true);
    stub_due due = stub_ask("ncclCommGetAsyncError", comm->rank);
    if (due.how == STUB_FAIL) return leave(comm, (ncclResult_t)due.value);
    advance(comm);
    *error = comm->in_progress ? ncclInProgress : comm->error;
    return leave(comm, ncclSuccess);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    stub_due due;
    ncclResult_t failed = begin(comm, "ncclCommFinalize", &due);
    if (failed) return failed;
    comm->stage = FINALIZING;
    stub_wire_leave(comm->wire);
    return leave(comm, start(comm, due));
}

static void free_comm(ncclComm_t comm)
{
    drop_work(comm);
    comm->magic = 0;
    stub_wire_close(comm->wire);
    free(comm->flows);
    free(comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    stub_due due;
    ncclResult_t failed = begin(comm, "ncclCommDestroy", &due);
    if (failed) return failed;
    for (int i = 0; i < OPS; i++)
        if (comm->is_made[i]) stub_broken("ncclCommDestroy", "an operation was not destroyed");
    free_comm(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    enter(comm, "ncclCommAbort", true);
    stub_due due = stub_ask("ncclCommAbort", comm->rank);
    free_comm(comm);
    return due.how == STUB_FAIL ? (ncclResult_t)due.value : ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t comm, void *memory, size_t bytes, void **handle)
{
    stub_due due;
    ncclResult_t failed = begin(comm, "ncclCommRegister", &due);
    if (failed) return failed;
    if (!memory || !bytes) stub_broken("ncclCommRegister", "there is no memory");
    seen_registered++;
    *handle = memory;
    return leave(comm, ncclSuccess);
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage",        "remote process exited",  "in progress"
    };
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return "";
}
