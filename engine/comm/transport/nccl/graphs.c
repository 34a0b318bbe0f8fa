/* graphs.c: calls that are launched as graphs.
 *
 * NCCL demands that all members of a communicator capture a call, or none does, and that all launch
 * the graph of this one capture
 * (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html). Otherwise they
 * would wait for each other. A script may do on one rank what it does not do on others, such as
 * read a loss. So a call of NCCL is never a part of a larger graph: each call has a graph of its
 * own, with the two kernels that tell the watchdog where it is (cuda/call.c).
 *
 * Whether a call is launched as a graph depends on what all members know. Ranks agree once to use
 * graphs (ms_comm_use_graphs). From then on the choice follows from the order of the group's calls
 * alone, and not from what a rank does at the time: a rank that has ended its loop follows the
 * others, as in a join of ddp. Control compares the choice before the launch (ms_comm_args.graph).
 *
 * Callers say which calls have the same memory in each step (ms_collective.fixed_address): ddp for
 * its buckets, where means are over the whole group, and fsdp for its blocks
 * (fsdp/static_memory.c). Both do so for reductions only where native links reduce the bucket in
 * place, since a script may replace a buffer on one rank.
 *
 * The first TIMES of a call that comes again are launched by themselves, so that NCCL has connected
 * for it. The next one is captured. Graphs stay until the communicator is closed. A communicator
 * has graphs for at most MOST different calls; others are launched by themselves.
 *
 * Left out are groups of which a process has two members, where NCCL does not vouch for graphs. */
#include "comm/transport/nccl/graphs.h"

#include <string.h>

#include "comm/transport/nccl/call.h"

enum { TIMES = 3, MOST = 256 };

static bool is_same(const ms_comm_args *a, const ms_comm_args *b)
{
    return a->fixed_address == b->fixed_address && a->kind == b->kind && a->op == b->op
           && a->dtype == b->dtype && a->memory == b->memory && a->count == b->count
           && a->root == b->root && a->counts_hash == b->counts_hash && a->in == b->in
           && a->out == b->out && a->factor == b->factor;
}

static ms_nccl_graph *find(const ms_communicator *communicator, const ms_comm_args *args)
{
    ms_nccl_graph *graph = atomic_load(&communicator->graphs);
    while (graph && !is_same(&graph->call, args)) graph = graph->next;
    return graph;
}

static bool may_be_graph(const ms_comm_args *args)
{
    const ms_nccl_group *own = args->group->transport_state;
    return own->registers; /* each member is a process */
}

void ms_nccl_choose(ms_comm_args *args)
{
    if (!may_be_graph(args)) return;
    const ms_nccl_graph *graph = find(ms_nccl_communicator_of(args), args);
    args->graph = graph && graph->times >= TIMES ? graph->number : 0;
}

/* Without memory for it the call stays what it is on this rank, and control finds the difference.
 */
void ms_nccl_chosen(const ms_comm_args *args)
{
    if (!may_be_graph(args) || args->graph) return;
    void *memory = NULL;
    ms_communicator *to = ms_nccl_communicator_of(args);
    ms_nccl_graph *graph = find(to, args);
    if (graph) {
        graph->times++;
        return;
    }
    ms_nccl_graph *newest = atomic_load(&to->graphs);
    uint32_t number = newest ? newest->number + 1 : 1;
    if (number > MOST) return;
    if (ms_allocate(ms_engine_context(args->group->comm->engine), sizeof *graph, "call", &memory))
        return;
    graph = memory;
    *graph = (ms_nccl_graph){ .next = newest, .number = number, .times = 1, .call = *args };
    atomic_store(&to->graphs, graph);
}

ms_nccl_graph *ms_nccl_graph_of(const ms_comm_args *args)
{
    ms_nccl_graph *graph = atomic_load(&ms_nccl_communicator_of(args)->graphs);
    while (graph->number != args->graph) graph = graph->next;
    return graph;
}

/* On the watchdog's thread. After given_up the host may already have freed the engine, so the
 * graphs are left alone. */
void ms_nccl_graph_drop(ms_nccl *nccl, ms_communicator *communicator)
{
    for (ms_nccl_graph *k = atomic_load(&communicator->graphs); k; k = k->next)
        if (k->graph && !atomic_load(&nccl->given_up)) k->drop(k->graph);
}

void ms_nccl_graph_free(const ms_nccl *nccl, ms_communicator *communicator)
{
    for (ms_nccl_graph *k = atomic_exchange(&communicator->graphs, NULL), *next; k; k = next) {
        next = k->next;
        if (k->graph) k->free(nccl->comm->engine, k->graph);
        ms_release(ms_engine_context(nccl->comm->engine), k);
    }
}
