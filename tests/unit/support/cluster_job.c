/* cluster_job.c: several hosts in one process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <pthread.h>

#include "../cluster_job.h"
#include "comm/control/shm/bell.h"
#include "comm/control/shm/files.h"
#include "comm/control/shm/ids.h"
#include "comm/control/shm/job_end.h"
#include "comm/group.h"
#include "comm/mpi/progress_thread.h"
#include "comm/transport_table.h"
#include "thread_mpi.h"

#define NODES 10
#define RANKS 16

/* What one host tells the others. */
typedef struct replication {
    ms_replication base; /* first */
    cluster_job *job;
    uint32_t node;
} replication;

/* One rank's own record over the files of its host. */
typedef struct member {
    ms_shm_files files; /* first */
    cluster_job *job;
} member;

struct cluster_job {
    ms_context context;
    uint32_t ranks, nodes;
    uint16_t node_of[RANKS];
    ms_rendezvous *files[NODES];
    replication mirrors[NODES];
    member members[RANKS];
    ms_control control;
    ms_rendezvous_kind kind;
    _Atomic bool ended;
    pthread_mutex_t opening;
};

static struct {
    size_t eager_bytes;
    unsigned failing;
} network = { .eager_bytes = 4096 };

void cluster_job_network(size_t eager_bytes, unsigned failing)
{
    network.eager_bytes = eager_bytes;
    network.failing = failing;
}

/* ------------------------------------------------------------------- mirror */

static ms_control_file *control_of(const cluster_job *job, uint32_t node)
{
    return ms_shm_files_of(job->files[node])->control;
}

static void tell(ms_replication *base, const void *address, size_t bytes)
{
    replication *from = (replication *)base;
    cluster_job *job = from->job;
    size_t offset = (size_t)((const char *)address - (const char *)control_of(job, from->node));
    for (uint32_t h = 0; h < job->nodes; h++) {
        if (h == from->node) continue;
        char *to = (char *)control_of(job, h) + offset;
        if (bytes == 8)
            atomic_store((_Atomic uint64_t *)(void *)to,
                         atomic_load((_Atomic uint64_t *)(uintptr_t)address));
        else if (bytes == 4)
            atomic_store((ms_word *)(void *)to, atomic_load((ms_word *)(uintptr_t)address));
        else memcpy(to, address, bytes);
        for (uint32_t r = 0; r < job->ranks; r++)
            if (job->node_of[r] == h) ms_shm_wake_line(&control_of(job, h)->lines[r]);
    }
}

/* The end of the job on one host is that of all, which agree on the first cause. */
static void stir(ms_replication *base)
{
    replication *from = (replication *)base;
    cluster_job *job = from->job;
    const ms_control_file *control = control_of(job, from->node);
    if (atomic_load(&control->aborted) != 2 || atomic_exchange(&job->ended, true)) return;
    for (uint32_t h = 0; h < job->nodes; h++) {
        ms_control_file *other = control_of(job, h);
        const ms_error *error = &control->record.error;
        other->agreed_record = control->record;
        atomic_store(&other->agreed, 1);
        if (h != from->node)
            ms_shm_end_job(ms_shm_files_of(job->files[h]), control->record.reason, error->rank,
                           error->message);
    }
}

static void close_replication(ms_replication *base) { (void)base; }

/* ----------------------------------------------------------------- the ranks */

/* The first host has the account. */
static ms_control_file *account_of(const ms_comm *comm)
{
    const ms_shm_rank *self = comm->control_state;
    return control_of(((member *)(void *)self->files)->job, 0);
}
static void take_ids(ms_comm *comm, uint32_t parts, ms_ids *ids)
{
    ms_ids_take(account_of(comm), parts, ids);
}
static void give_ids(ms_comm *comm, const ms_ids *ids)
{
    ms_ids_remove(account_of(comm)->ids_used, ids);
}

static void close_nothing(ms_rendezvous *rendezvous) { (void)rendezvous; }

static void wake(void *line) { ms_shm_wake_line(line); }

static void end_job(ms_engine *engine, const ms_error *error)
{
    ms_comm *comm = ms_comm_of(engine);
    comm->control->abort(comm, error);
}

ms_status cluster_job_open(cluster_job *job, ms_engine *engine, uint32_t rank, ms_group **world)
{
    ms_shm_files *files = &job->members[rank].files;
    ms_mpi_options options = { .timeout_ns = 1800000000000u,
                               .crowded = true,
                               .news = wake,
                               .user = &files->control->lines[rank] };
    pthread_mutex_lock(&job->opening);
    thread_mpi_next(rank);
    ms_status status = ms_mpi_open(ms_engine_context(engine), &thread_mpi, &options, &files->mpi);
    pthread_mutex_unlock(&job->opening);
    if (!status)
        status = ms_comm_new(engine,
                             &(ms_membership){ .control = &job->control,
                                               .transport = &ms_transport_mpi,
                                               .rendezvous = &files->base,
                                               .rank = rank,
                                               .size = job->ranks },
                             world);
    if (!status) ms_engine_on_failure(engine, end_job);
    return status;
}

ms_rendezvous *cluster_job_rendezvous(cluster_job *job, uint32_t rank)
{
    return &job->members[rank].files.base;
}

/* ---------------------------------------------------------------- the job */

static void make_host(cluster_job *job, const ms_rendezvous_options *options, uint32_t node)
{
    static const char names[NODES][MS_NODE_NAME_BYTES] = { "h0", "h1", "h2", "h3", "h4",
                                                           "h5", "h6", "h7", "h8", "h9" };
    ms_layout layout = {
        .nodes = job->nodes, .here = node, .node_of = job->node_of, .names = names
    };
    if (ms_shm_files_new_among(&job->context, options, &layout, &job->files[node]))
        fail_msg("%s", job->context.error.message);
    job->files[node]->kind = &job->kind;
    job->mirrors[node] = (replication){
        .base = { .tell = tell, .stir = stir, .close = close_replication }, .job = job, .node = node
    };
    ms_shm_files_of(job->files[node])->replication = &job->mirrors[node].base;
}

cluster_job *cluster_job_new(const ms_rendezvous_options *options, const char *layout)
{
    cluster_job *job = calloc(1, sizeof *job);
    ms_context_init(&job->context, NULL);
    pthread_mutex_init(&job->opening, NULL);
    job->ranks = options->ranks;
    assert_true(job->ranks <= RANKS && strlen(layout) == job->ranks);
    for (uint32_t r = 0; r < job->ranks; r++) {
        job->node_of[r] = (uint16_t)(layout[r] - '0');
        if (job->node_of[r] >= job->nodes) job->nodes = job->node_of[r] + 1u;
    }
    job->control = ms_control_shm;
    job->control.take_ids = take_ids;
    job->control.give_ids = give_ids;
    job->kind = ms_rendezvous_shm;
    job->kind.control = &job->control;
    job->kind.close = close_nothing;
    for (uint32_t h = 0; h < job->nodes; h++) make_host(job, options, h);
    for (uint32_t r = 0; r < job->ranks; r++) {
        job->members[r].files = *ms_shm_files_of(job->files[job->node_of[r]]);
        job->members[r].files.base.references = 1;
        job->members[r].job = job;
    }
    thread_mpi_begin(job->ranks, network.eager_bytes, network.failing);
    return job;
}

void cluster_job_free(cluster_job *job)
{
    for (uint32_t r = 0; r < job->ranks; r++)
        if (job->members[r].files.mpi) ms_mpi_close(&job->context, job->members[r].files.mpi, NULL);
    thread_mpi_end();
    for (uint32_t h = 0; h < job->nodes; h++) ms_shm_files_close(job->files[h]);
    pthread_mutex_destroy(&job->opening);
    free(job);
}
