/* nccl.c: the functions of NCCL as the stub has them. */
#include "nccl.h"

#include "cuda/driver/driver.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
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
    size_t rest, bytes;
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

/* A copy within this rank's memory, or a factor (memory) that a flow sends. */
typedef struct local {
    struct local *next;
    void *to;
    const void *from;
    size_t bytes;
    float factor;
} local;

/* What a call, or a group of calls, does. */
typedef struct batch {
    flow *flows;
    size_t count, capacity;
    ending *endings;
    local *locals;
} batch;

/* A batch on a stream of the stand-in driver. Those of a communicator run one after the other. */
typedef struct job {
    struct job *next;
    ncclComm_t comm; /* NULL: it was aborted */
    batch batch;
    bool never, has_copied;
    uint64_t not_before_ns;
    ncclResult_t after;
    /* The launch of a call that was captured: its batch is that of the capture. Launches of one
     * graph come one after the other, so each leaves it as it was. */
    struct job *captured;
} job;

typedef enum stage { BEGINNING, RUNNING, FINALIZING } stage;

struct ncclComm {
    unsigned magic;
    int rank, ranks;
    stub_wire *wire;
    stage stage;
    atomic_int inside;       /* a thread is in one of the functions */
    atomic_bool in_progress; /* of the rank's threads and of those that carry on with streams */
    bool never;
    /* is_under_way: a call moves host memory; is_aborted: ncclCommAbort was called. */
    atomic_bool is_under_way, is_aborted;
    struct ncclComm *next;         /* of the process; with all_lock */
    struct ncclComm *next_aborted; /* in the group that is open */
    uint64_t not_before_ns;
    /* after: what is wrong once the call has ended; late: the same of one that is on its way to a
     * stream. */
    _Atomic ncclResult_t late, after, error;
    batch batch;
    void *stream;      /* of the batch; NULL: it moves host memory, while the host asks */
    job *jobs;         /* on streams, the oldest first; with jobs_lock */
    atomic_int graphs; /* that have calls of it */
    const void *self;  /* of a send to this rank itself, until its receive */
    bool is_made[OPS];
    float factors[OPS];
};

/* The group that this thread has open. */
static _Thread_local struct {
    int depth;
    ncclComm_t comm, aborted;
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

static void drop_batch(batch *b)
{
    for (ending *next; b->endings; b->endings = next) {
        next = b->endings->next;
        free(b->endings->memory);
        free(b->endings);
    }
    for (local *next; b->locals; b->locals = next) {
        next = b->locals->next;
        free(b->locals);
    }
    free(b->flows);
    *b = (batch){ 0 };
}

static void drop_work(ncclComm_t comm)
{
    drop_batch(&comm->batch);
    comm->self = NULL;
    comm->stream = NULL;
}

static void copy_locals(const batch *b)
{
    for (const local *l = b->locals; l; l = l->next)
        if (l->bytes && l->to != l->from) memcpy(l->to, l->from, l->bytes);
}

/* Whether all bytes have moved. */
static bool move(ncclComm_t comm, batch *b)
{
    unsigned blocked[2] = { 0 };
    bool all = true;
    for (size_t i = 0; i < b->count; i++) {
        flow *f = &b->flows[i];
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

static void reduce_all(ncclComm_t comm, const batch *b)
{
    for (const ending *e = b->endings; e; e = e->next)
        stub_reduce(e->out, e->inputs, e->has_factors ? e->factors : NULL, comm->ranks, e->count,
                    e->type, e->op);
}

static bool has_ended(ncclComm_t comm)
{
    if (comm->stage == BEGINNING) return stub_wire_is_complete(comm->wire);
    if (comm->stage == FINALIZING) return stub_wire_is_left(comm->wire);
    if (!move(comm, &comm->batch)) return false;
    reduce_all(comm, &comm->batch);
    drop_work(comm);
    return true;
}

/* --------------------------------------------------------------- on a stream */

/* For `jobs` of all communicators, and their wires while a job moves bytes. It is taken with the
 * lock of the driver held, and never the other way round. */
static pthread_mutex_t jobs_lock = PTHREAD_MUTEX_INITIALIZER;

static void *in_driver(const char *name)
{
    const char *path = getenv("MOONSHARD_CUDA_DRIVER");
    void *driver = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    return driver ? dlsym(driver, name) : NULL;
}

static batch *batch_of(job *j) { return j->captured ? &j->captured->batch : &j->batch; }

static bool is_ready(void *argument)
{
    job *j = argument;
    pthread_mutex_lock(&jobs_lock);
    bool ready = !j->comm || (j->comm->jobs == j && !j->never && now_ns() >= j->not_before_ns);
    if (ready && j->comm) {
        if (!j->has_copied) copy_locals(batch_of(j));
        j->has_copied = true;
        ready = move(j->comm, batch_of(j));
    }
    pthread_mutex_unlock(&jobs_lock);
    return ready;
}

/* What it has read and written, for the stand-in's watch. */
static void touch_all(ncclComm_t comm, const batch *b)
{
    void (*touch)(const void *, size_t, bool);
    *(void **)&touch = in_driver("stand_in_touch");
    for (size_t i = 0; i < b->count; i++)
        touch(b->flows[i].at - b->flows[i].bytes, b->flows[i].bytes, !b->flows[i].sends);
    for (const local *l = b->locals; l; l = l->next)
        if (l->to && l->to != l->from) {
            touch(l->from, l->bytes, false);
            touch(l->to, l->bytes, true);
        }
    for (const ending *e = b->endings; e; e = e->next) {
        touch(e->inputs[comm->rank], e->count * stub_bytes(e->type), false);
        touch(e->out, e->count * stub_bytes(e->type), true);
    }
}

/* As it was before its bytes moved. */
static void rewind_batch(batch *b)
{
    for (size_t i = 0; i < b->count; i++) {
        b->flows[i].at -= b->flows[i].bytes - b->flows[i].rest;
        b->flows[i].rest = b->flows[i].bytes;
    }
}

static void finish_job(void *argument)
{
    job *j = argument;
    pthread_mutex_lock(&jobs_lock);
    if (j->comm) {
        touch_all(j->comm, batch_of(j));
        reduce_all(j->comm, batch_of(j));
        if (j->after) j->comm->after = j->after;
        j->comm->jobs = j->next;
    }
    if (j->captured) rewind_batch(&j->captured->batch);
    pthread_mutex_unlock(&jobs_lock);
    drop_batch(&j->batch);
    free(j);
}

static job *add_job(const job *what)
{
    job *made = malloc(sizeof *made);
    if (!made) stub_broken("a call on a stream", "there is no memory");
    *made = *what;
    pthread_mutex_lock(&jobs_lock);
    job **at = &made->comm->jobs;
    while (*at) at = &(*at)->next;
    *at = made;
    pthread_mutex_unlock(&jobs_lock);
    return made;
}

/* A graph with this call is launched, or is gone. */
static void *launch_again(void *captured)
{
    job *of = captured;
    return add_job(&(job){ .comm = of->comm,
                           .captured = of,
                           .never = of->never,
                           .not_before_ns = of->not_before_ns,
                           .after = of->after });
}
static void forget(void *captured)
{
    job *gone = captured;
    gone->comm->graphs--;
    drop_batch(&gone->batch);
    free(gone);
}

/* As NCCL launches on a thread of its own: nothing is on the stream before. On a stream that is
 * captured the call is launched with the graph. */
static void put_on_stream(ncclComm_t comm, const job *what)
{
    static const stand_in_library_work again = { is_ready, finish_job, launch_again, forget };
    stand_in_work_function *work;
    stand_in_captured_work_function *capture;
    *(void **)&work = in_driver("stand_in_work");
    *(void **)&capture = in_driver("stand_in_captured_work");
    job *kept = malloc(sizeof *kept);
    if (!work || !capture || !kept) stub_broken("a call on a stream", "the driver is no stand-in");
    *kept = *what;
    if (capture(comm->stream, &again, kept)) {
        comm->graphs++;
        return;
    }
    free(kept);
    work(comm->stream, is_ready, finish_job, add_job(what));
}

static void launch(ncclComm_t comm)
{
    put_on_stream(comm, &(job){ .comm = comm,
                                .batch = comm->batch,
                                .never = comm->never,
                                .not_before_ns = comm->not_before_ns,
                                .after = comm->late });
    comm->batch = (batch){ 0 };
    comm->self = NULL;
    comm->stream = NULL;
    comm->in_progress = false;
}

/* The streams go on without what has not ended. */
static void abort_jobs(ncclComm_t comm)
{
    pthread_mutex_lock(&jobs_lock);
    for (job *j = comm->jobs; j; j = j->next) j->comm = NULL;
    comm->jobs = NULL;
    pthread_mutex_unlock(&jobs_lock);
}

/* An error that comes after the end of a call is seen by the next look. */
static void advance(ncclComm_t comm)
{
    if (!comm->in_progress) {
        if (comm->after) comm->error = comm->after;
        return;
    }
    if (comm->stream) {
        launch(comm);
        return;
    }
    if (comm->never || now_ns() < comm->not_before_ns || !has_ended(comm)) return;
    comm->in_progress = false;
    comm->is_under_way = false;
    if (comm->stage == BEGINNING) comm->stage = RUNNING;
}

/* Always in progress at first, where there are peers: who does not ask again finds that nothing
 * has happened. */
static ncclResult_t start(ncclComm_t comm, stub_due due)
{
    comm->never = due.how == STUB_NEVER;
    comm->not_before_ns = due.how == STUB_LATE ? now_ns() + (uint64_t)due.value * 1000000u : 0;
    ncclResult_t after = due.how == STUB_ASYNC ? (ncclResult_t)due.value : ncclSuccess;
    if (comm->stream) comm->late = after;
    else comm->after = after;
    comm->in_progress = true;
    comm->is_under_way = comm->stage == RUNNING && !comm->stream;
    if (!comm->stream) copy_locals(&comm->batch);
    if (comm->ranks == 1) advance(comm);
    return comm->in_progress ? ncclInProgress : ncclSuccess;
}

/* ------------------------------------------------------------------ the end */

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static ncclComm_t all;

static void enlist(ncclComm_t comm)
{
    pthread_mutex_lock(&all_lock);
    comm->next = all;
    all = comm;
    pthread_mutex_unlock(&all_lock);
}

static void free_comm(ncclComm_t comm)
{
    pthread_mutex_lock(&all_lock);
    ncclComm_t *at = &all;
    while (*at != comm) at = &(*at)->next;
    *at = comm->next;
    pthread_mutex_unlock(&all_lock);
    abort_jobs(comm);
    drop_work(comm);
    comm->magic = 0;
    stub_wire_close(comm->wire);
    free(comm);
}

int stub_nccl_under_way(void)
{
    int count = 0;
    pthread_mutex_lock(&all_lock);
    pthread_mutex_lock(&jobs_lock);
    for (ncclComm_t c = all; c; c = c->next)
        if (!c->is_aborted && (c->is_under_way || c->jobs)) count++;
    pthread_mutex_unlock(&jobs_lock);
    pthread_mutex_unlock(&all_lock);
    return count;
}

/* NCCL frees memory of the GPU, which waits for all that runs there, and waits until all graphs
 * with calls of the communicator are gone. */
static void free_aborted(void)
{
    if (!group.aborted) return;
    while (stub_nccl_under_way()) sched_yield();
    for (ncclComm_t c = group.aborted; c; c = c->next_aborted)
        while (c->graphs) sched_yield();
    for (ncclComm_t next; group.aborted; group.aborted = next) {
        next = group.aborted->next_aborted;
        free_comm(group.aborted);
    }
}

/* ------------------------------------------------------------ building work */

static void add_flow(ncclComm_t comm, bool sends, int peer, const void *at, size_t bytes)
{
    batch *b = &comm->batch;
    if (b->count == b->capacity) {
        b->capacity = b->capacity ? 2 * b->capacity : 64;
        b->flows = realloc(b->flows, b->capacity * sizeof *b->flows);
        if (!b->flows) abort();
    }
    b->flows[b->count++] = (flow){
        .sends = sends, .peer = peer, .at = (char *)(uintptr_t)at, .rest = bytes, .bytes = bytes
    };
}

static local *add_local(ncclComm_t comm)
{
    local *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->next = comm->batch.locals;
    return comm->batch.locals = made;
}

/* What a call brings to a reduction of `root`: its factor first, if there are factors. */
static void give(ncclComm_t comm, int root, const void *in, size_t bytes, ncclRedOp_t op)
{
    if (op >= ncclNumOps) {
        local *held = add_local(comm);
        held->factor = comm->factors[op - ncclNumOps];
        add_flow(comm, true, root, &held->factor, sizeof(float));
    }
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
                   .next = comm->batch.endings };
    for (int r = 0; r < comm->ranks; r++) {
        e->inputs[r] = r == comm->rank ? own : memory + (size_t)r * bytes;
        if (e->has_factors) e->factors[r] = comm->factors[op - ncclNumOps];
        if (r == comm->rank) continue;
        if (e->has_factors) add_flow(comm, false, r, &e->factors[r], sizeof(float));
        add_flow(comm, false, r, e->inputs[r], bytes);
    }
    comm->batch.endings = e;
}

static void copy(ncclComm_t comm, void *to, const void *from, size_t bytes)
{
    local *made = add_local(comm);
    made->to = to;
    made->from = from;
    made->bytes = bytes;
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
    if (failed) return failed;                     \
    comm->stream = stream

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
    copy(comm, (char *)out + (size_t)comm->rank * bytes, in, bytes);
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
    if (root == comm->rank) copy(comm, out, in, bytes);
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
    else if (comm->self) copy(comm, out, comm->self, count * stub_bytes(type));
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
    free_aborted();
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
    /* Ranks that are threads of a process share the stand-in driver. */
    void (*share)(void);
    *(void **)&share = in_driver("stand_in_share");
    if (share) share();
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
    enlist(comm);
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

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    stub_due due;
    ncclResult_t failed = begin(comm, "ncclCommDestroy", &due);
    if (failed) return failed;
    for (int i = 0; i < OPS; i++)
        if (comm->is_made[i]) stub_broken("ncclCommDestroy", "an operation was not destroyed");
    if (comm->graphs) stub_broken("ncclCommDestroy", "graphs have calls of it, so it would hang");
    free_comm(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    enter(comm, "ncclCommAbort", true);
    stub_due due = stub_ask("ncclCommAbort", comm->rank);
    comm->is_aborted = true;
    abort_jobs(comm);
    comm->next_aborted = group.aborted;
    group.aborted = comm;
    if (!group.depth) free_aborted();
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

static const char *says = "";
void stub_nccl_says(const char *text) { says = text; }

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return says;
}
