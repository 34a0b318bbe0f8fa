/* placement.c: which GPU a rank computes on, and which cores its host threads keep to.
 *
 * A rank computes on the GPU of its place on its node (ms_rendezvous_place). Where more ranks than
 * GPUs may compute, they are assigned to the GPUs in turn. A slice of a GPU (MIG) counts as a GPU.
 * exec/cuda/mig.c says how a process sees its slice.
 *
 * Ranks with slices that are all on one node use the transport local, unless MOONSHARD_TRANSPORT
 * names another one. Another launcher that shows each process one slice does not tell which slices
 * the other processes have. There NCCL stays the default, and its error says what to set.
 *
 * The cores are chosen before the engine opens, since its threads inherit them. exec/cuda/numa.c
 * says which cores they are, and what that means for memory. */
#include "bindings/placement.h"

#include <string.h>

#include "bindings/adopt.h"
#include "bindings/script.h"
#include "moonshard/cluster.h"

/* Ranks that share a GPU exchange tensors by the transport local. NCCL takes a second rank on a GPU
 * for a mistake, unless each process says that it is a node of its own. */
static void share_gpu(lua_State *L, ms_runtime *runtime, uint32_t here, uint32_t gpus)
{
    const ms_os *os = runtime->context.os;
    /* The first is for each process; the second is known to NCCL 2.30 and later. */
    const char *own = os->environment(os->user, "NCCL_HOSTID"),
               *several = os->environment(os->user, "NCCL_MULTI_RANK_GPU_ENABLE");
    bool is_ready = (own && *own) || (several && strcmp(several, "1") == 0);
    uint32_t gpu = runtime->placement.gpu;
    if (here < ms_rendezvous_ranks(runtime->job.rendezvous))
        ms_lua_error(L, "moonshard could not start: --share-gpu: ranks of several hosts exchange "
                        "tensors by NCCL, which needs a GPU for each rank: start as many ranks as "
                        "there are GPUs on each host");
    if (strcmp(runtime->transport_text, "nccl") == 0 && !is_ready)
        ms_lua_error(L, "moonshard could not start: --share-gpu: NCCL takes one rank a GPU: leave "
                        "MOONSHARD_TRANSPORT unset (ranks then exchange tensors through memory of "
                        "the host), start each process with another NCCL_HOSTID, or set "
                        "NCCL_MULTI_RANK_GPU_ENABLE=1 for NCCL 2.30 or later");
    if (!*runtime->transport_text) strcpy(runtime->transport_text, "local");
    runtime->settings.sharers = (here - gpu + gpus - 1) / gpus;
    runtime->placement.shared_gpus = gpus;
}

/* More ranks than GPUs. */
static void refuse_ranks(lua_State *L, uint32_t here, uint32_t gpus, const char *shown)
{
    ms_lua_error(L,
                 "moonshard could not start: %d ranks on this host and %d GPU%s (%s%s): each rank "
                 "needs a GPU of its own: start %d rank%s here, show more GPUs, or let ranks share "
                 "them (--share-gpu)",
                 (int)here, (int)gpus, gpus == 1 ? "" : "s",
                 shown ? "CUDA_VISIBLE_DEVICES=" : "CUDA_VISIBLE_DEVICES is not set",
                 shown ? shown : "", (int)gpus, gpus == 1 ? "" : "s");
}

/* Of several slices (MIG) that are named to a process, it sees the first. */
static void refuse_slices(lua_State *L, uint32_t here, const char *shown)
{
    ms_lua_error(
        L,
        "moonshard could not start: %d ranks on this host, each of which sees the first "
        "slice (MIG) of CUDA_VISIBLE_DEVICES=%s alone: let `moonshard run -n %d` start them "
        "as processes, which get a slice each, or set the variable to another slice for "
        "each rank",
        (int)here, shown, (int)here);
}

static bool are_slices(const ms_gpu *gpus, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (!gpus[i].is_slice) return false;
    return true;
}

#define GPUS_MOST 64

/* A rank computes on the GPU of its place on its node. More ranks than GPUs are an error that all
 * of them find, unless they may share them; a driver that cannot be asked is one when the engine
 * opens. A launcher that starts every process itself may show each of them another GPU, as its only
 * one; ours does so with slices (processes.c). Slices do not reach each other's memory, and NCCL
 * takes those of one GPU for that GPU, so ranks of one node use the transport local. */
void ms_lua_choose_gpu(lua_State *L, ms_runtime *runtime)
{
    ms_error error;
    ms_launched launched;
    ms_gpu found[GPUS_MOST];
    uint32_t gpus = 0, driver = 0, here = 0;
    const ms_os *os = runtime->context.os;
    const char *name = runtime->settings.device,
               *shown = os->environment(os->user, "CUDA_VISIBLE_DEVICES"),
               *all = os->environment(os->user, MS_SLICES_VARIABLE);
    if (!name || strcmp(name, "cuda") != 0 || !runtime->job.rendezvous) return;
    uint32_t place = ms_rendezvous_place(runtime->job.rendezvous, runtime->job.rank, &here);
    if (here == 1 || ms_gpus(os, found, GPUS_MOST, &gpus, &driver, &error) || gpus == 0) return;
    bool is_launched = !ms_cluster_launched(&runtime->context, &launched) && *launched.name;
    bool is_slice = are_slices(found, gpus < GPUS_MOST ? gpus : GPUS_MOST);
    runtime->placement.has_slice = gpus == 1 && is_slice && ms_mig_slices(all) > 1;
    if (gpus == 1 && ms_mig_slices(shown) > 1 && !runtime->placement.share_gpu)
        refuse_slices(L, here, shown);
    if (gpus == 1 && is_launched && !runtime->placement.has_slice && !runtime->placement.share_gpu)
        return;
    if (runtime->placement.has_slice) {
        gpus = ms_mig_slices(all);
        shown = all;
    } else runtime->settings.device_index = place % gpus;
    runtime->placement.gpu = place % gpus;
    if (here > gpus && runtime->placement.share_gpu) share_gpu(L, runtime, here, gpus);
    else if (here > gpus) refuse_ranks(L, here, gpus, shown);
    else if (is_slice && !*runtime->transport_text
             && here == ms_rendezvous_ranks(runtime->job.rendezvous)) {
        strcpy(runtime->transport_text, "local");
        runtime->placement.goes_by_host = true;
    }
}

/* Whether all ranks are threads on one GPU. */
bool ms_lua_shares_one_gpu(const ms_runtime *runtime)
{
    return runtime->job.is_thread && runtime->placement.shared_gpus == 1;
}

/* The first of the ranks that share a GPU says so. On one node their places are their numbers. */
static void tell_sharers(const ms_runtime *runtime, ms_engine *engine)
{
    char ranks[128] = "";
    uint32_t gpu = runtime->placement.gpu, gpus = runtime->placement.shared_gpus;
    size_t used = 0;
    if (runtime->settings.sharers < 2 || runtime->job.rank != gpu) return;
    for (uint32_t r = gpu; r < gpu + runtime->settings.sharers * gpus && used < sizeof ranks;
         r += gpus)
        used += (size_t)snprintf(ranks + used, sizeof ranks - used, "%s%u", used ? ", " : "", r);
    ms_log(ms_engine_context(engine), MS_LOG_INFO,
           "ranks %s share GPU %u: rank %u may use %.1f GiB of it; their tensors %s", ranks, gpu,
           runtime->job.rank, (double)ms_engine_memory(engine).limit / (1 << 30),
           ms_lua_shares_one_gpu(runtime) ? "stay in its memory"
                                          : "travel through memory of the host");
}

/* This thread and those that it starts run on the NUMA node of the GPU. Memory that they touch
 * first is then the node's, pinned memory of the driver too. The launcher has left ranks that are
 * processes all cores where there are several nodes (processes.c); where the node of a rank's GPU
 * is not known, it takes the share that it would have got. Answers the node; -1: nothing to tell.
 */
int32_t ms_lua_go_near_gpu(ms_runtime *runtime, uint32_t threads, ms_cores *cores)
{
    ms_gpu gpus[GPUS_MOST];
    ms_error error;
    ms_launched launched;
    ms_machine machine;
    uint32_t count = 0, driver = 0;
    const ms_os *os = runtime->context.os;
    const char *name = runtime->settings.device,
               *open = os->environment(os->user, MS_CORES_VARIABLE);
    bool is_open = open && *open && runtime->job.rendezvous;
    ms_gpu_rank rank = { .ranks = 1, .threads = threads };
    if (!runtime->placement.near_gpu || !name || strcmp(name, "cuda") != 0
        || !ms_has_numa_nodes(os))
        return -1;
    if (ms_gpus(os, gpus, GPUS_MOST, &count, &driver, &error)) count = 0;
    uint32_t place = 0, here = 1;
    if (runtime->job.rendezvous)
        place = ms_rendezvous_place(runtime->job.rendezvous, runtime->job.rank, &here);
    /* Where the slices of others are is not known: such a rank gets its node's cores undivided. */
    if (!runtime->placement.has_slice) {
        rank.place = place;
        rank.ranks = here;
    }
    rank.is_placed =
        !is_open && !ms_cluster_launched(&runtime->context, &launched) && *launched.name;
    int32_t node = -1;
    if (count > 0 && count <= GPUS_MOST) node = ms_gpu_cores(os, gpus, count, rank, cores);
    if (node >= 0 && !os->keep_to(os->user, cores)) {
        if (!threads && runtime->settings.threads > ms_cores_count(cores))
            runtime->settings.threads = ms_cores_count(cores);
        return node;
    }
    if (!is_open || os->cores(os->user, cores) || os->machine(os->user, &machine)) return -1;
    if (machine.cores < ms_cores_count(cores)) return -1;
    *cores = ms_cores_share(cores, place, here);
    if (ms_cores_count(cores)) (void)os->keep_to(os->user, cores);
    return -1;
}

static void tell_slices(const ms_runtime *runtime, ms_engine *engine)
{
    if (runtime->placement.goes_by_host && runtime->job.rank == 0)
        ms_log(ms_engine_context(engine), MS_LOG_INFO,
               "each rank has a slice of a GPU (MIG); tensors travel through memory of the host");
}

static void tell_node(const ms_runtime *runtime, ms_engine *engine, int32_t node,
                      const ms_cores *cores)
{
    char list[160];
    if (node < 0 || runtime->job.rank != 0) return;
    ms_cores_write(cores, list, sizeof list);
    ms_log(ms_engine_context(engine), MS_LOG_INFO,
           "host threads run on the NUMA node of their GPU: those of rank 0 on node %d, cores %s",
           (int)node, list);
}

void ms_lua_tell_placement(const ms_runtime *runtime, ms_engine *engine, int32_t node,
                           const ms_cores *cores)
{
    tell_sharers(runtime, engine);
    tell_slices(runtime, engine);
    tell_node(runtime, engine, node, cores);
}
