/* moonshard/comm.h: a rank's membership in a job, process groups, collectives, and numbers
 * exchanged out of band. Where ranks meet, and what a launcher needs, is in moonshard/control.h.
 *
 * Invariants
 * - A rank is one engine with its host thread: a process, or a thread of one process.
 * - All ranks of a group make the same calls in the same order with equal arguments; the comment of
 *   ms_collective says what must be equal. Calls are compared when they are enqueued, and again
 *   when they run. A difference ends the job at once, with one error that shows both sides. So does
 *   a rank that makes no more calls while others wait for it. The order counts across groups too: a
 *   call comes after the same number of calls of its group, on all channels, and of all groups that
 *   contain it, on every member.
 * - A collective is a task on a stream: it waits there for the last writers and readers of its
 *   tensors, and never blocks the host. A peer's memory is touched only while both ranks are inside
 *   the collective, and a rank leaves when all are done with its memory.
 * - Reductions add in rank order, 16-bit floats in f32: the same bits on every rank, in every run,
 *   as processes and as threads, with any number of threads, in place and staged. Over several
 * nodes the ranks of each node are added first, and these sums, in the dtype of the tensor, in the
 * order of the nodes' first ranks; with sum_by_ranks of ms_rendezvous_options in rank order there,
 * too. NCCL has an order of its own, and its min and max of floats may drop a NaN.
 * - The first cause of a job's end counts: every wait ends with it, and later collectives of every
 *   group fail with it. A task that fails on one rank, and an error that a host reports with
 *   ms_comm_abort, end the job the same way.
 * - A straggler, for which others wait longer than ten usual steps and at least 5 s, is reported
 *   once, by one of them, as a warning in its engine's log.
 * - Payload bytes: what a rank hands to a collective. Wire bytes: what a bandwidth-optimal
 *   algorithm makes it send. Both are counted where the collective is enqueued, so they are the
 *   same on the sim device, in a fake world and in a run. */
#ifndef MOONSHARD_COMM_H
#define MOONSHARD_COMM_H

#include "moonshard/control.h"
#include "moonshard/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MS_FAKE_RANKS_MAX 65536 /* of a fake world */
#define MS_GROUPS_MAX 256       /* groups of one job that are alive, the world among them */
/* Channels of a group: its collectives of one channel run one after the other. Users have two;
 * parameters of sharded optimizers and numbers exchanged out of band have one each, so that neither
 * waits for what a user has enqueued. */
#define MS_USER_CHANNELS 2
#define MS_CHANNEL_PARAMETERS 3
#define MS_CHANNEL_NUMBERS 4 /* of ms_group_share only */
#define MS_CHANNELS 4

typedef struct ms_group ms_group;

/* ------------------------------------------------------ a rank's membership */

/* Joins as `rank` and gives the group of all ranks, which the engine owns. Once for each engine, on
 * the cpu executor. MS_ERROR_STATE if the rank is taken. Does not wait for the others. The engine
 * keeps a reference to the rendezvous. */
MS_API ms_status ms_comm_open(ms_engine *engine, ms_rendezvous *rendezvous, uint32_t rank,
                              ms_group **world);
/* How tensors travel. All ranks of a job give the same. */
typedef struct ms_comm_options {
    /* "local": through memory of this node. "nccl": by NCCL 2.28 or later, whose library is loaded
     * when it is asked for, from where NVIDIA's other libraries are; the variable MOONSHARD_NCCL
     * may name another. NULL: what fits the engine's device. The text is used by the call only. */
    const char *transport;
    /* NCCL: how many blocks of a GPU (CTAs) a collective takes at least and at most; 0: as NCCL
     * decides. */
    uint32_t min_ctas, max_ctas;
    /* local, on GPUs: all ranks are threads of one process and use the same GPU. Their tensors then
     * stay in its memory; otherwise they travel through memory of the host. All ranks say the same,
     * or those that say something else are refused (MS_ERROR_ARGUMENT). */
    bool one_gpu;
} ms_comm_options;
/* Which NCCL a job would use, "NCCL 2.28.3, PATH", loaded for this. False: it cannot be used, and
 * text says why. os NULL: ms_os_posix(). */
MS_API bool ms_gpu_nccl(const ms_os *os, char *text, size_t bytes);
/* The same, with options. MS_ERROR_NOT_FOUND: there is no such library. MS_ERROR_UNSUPPORTED: it is
 * too old, or moves no memory of this engine's device. */
MS_API ms_status ms_comm_open_with(ms_engine *engine, ms_rendezvous *rendezvous, uint32_t rank,
                                   const ms_comm_options *options, ms_group **world);
/* A world of `size` ranks of which only this one exists: no traffic, no waiting, on any device. Its
 * results are those of a job in which all other ranks bring the data that this one brings:
 * all_gather repeats the tensor, sum multiplies it by size; recv leaves its tensor alone. */
MS_API ms_status ms_comm_open_fake(ms_engine *engine, uint32_t rank, uint32_t size,
                                   ms_group **world);
/* The same on nodes, over which it counts what would go between them. */
typedef struct ms_fake_world {
    uint32_t rank, size;
    const uint16_t *node_of; /* of each rank; NULL: all are on one node */
    bool sum_by_ranks;       /* as in ms_rendezvous_options */
} ms_fake_world;
MS_API ms_status ms_comm_open_fake_on(ms_engine *engine, const ms_fake_world *fake,
                                      ms_group **world);
/* The engine's world; NULL before it is opened. An application without a job opens a fake world of
 * size 1. */
MS_API ms_group *ms_comm_world(const ms_engine *engine);
/* The group of this rank alone. Making it and its collectives involve no other rank. */
MS_API ms_status ms_comm_alone(ms_engine *engine, ms_group **out);
/* This rank will make no more calls. Peers that wait for a call of this rank fail at once, as they
 * do when the engine is freed; enqueued work still runs. message NULL: the rank has finished;
 * otherwise the job ends "because rank R: message". May be called twice. */
MS_API void ms_comm_leave(ms_engine *engine, const char *message);
/* Ends the job from this rank's host thread with its error. The first cause wins. */
MS_API void ms_comm_abort(ms_engine *engine, const ms_error *error);
/* The abort record as this engine's error, if the job has ended: MS_OK otherwise. Never blocks. */
MS_API ms_status ms_comm_check(ms_engine *engine);
/* Tells the supervisor that this rank's host is alive. */
MS_API void ms_comm_progress(ms_engine *engine);
/* This rank is about to begin the recipe's `step`, its serial-th one (from 1; the same numbers on
 * all ranks). values[kind]: the request that all ranks meet before this serial number, or 0.
 * Without other ranks, and in a fake world, there are none. */
MS_API void ms_comm_step(ms_engine *engine, uint64_t serial, int64_t step,
                         uint8_t values[MS_REQUESTS]);
/* Tells the supervisor where this job keeps its files. Longer texts than MS_FOLDER_BYTES - 1 are
 * left out. */
MS_API void ms_comm_set_folder(ms_engine *engine, const char *folder);

/* ------------------------------------------------------------------- groups */

MS_API uint32_t ms_group_rank(const ms_group *group);
MS_API uint32_t ms_group_size(const ms_group *group);
MS_API const char *ms_group_name(const ms_group *group); /* "world", "world/1.0" ... */
MS_API uint32_t ms_group_id(const ms_group *group); /* 0: the world; the same on all its ranks */
/* Whether other ranks take part: not in a group of one, and not in a fake world. */
MS_API bool ms_group_has_others(const ms_group *group);
/* Whether its all_reduce can round numbers during the reduction: see ms_collective.travels. */
MS_API bool ms_group_rounds(const ms_group *group);
MS_API ms_engine *ms_group_engine(const ms_group *group);
MS_API uint32_t ms_group_world_rank(const ms_group *group, uint32_t rank); /* of member `rank` */
/* The number of the node that member `rank` is on: 0 for all in a job of one node. */
MS_API uint32_t ms_group_node(const ms_group *group, uint32_t rank);
/* "1", "2", "parameters", "numbers". */
MS_API const char *ms_channel_name(uint32_t channel);
/* The stream of a channel, made at first use, with MS_PRIORITY_HIGH. */
MS_API ms_status ms_group_stream(ms_group *group, uint32_t channel, ms_stream **out);

/* Cuts the group into `parts` groups. Group p gets the next sizes[p] entries of `ranks`; these are
 * ranks of this group, and none may occur twice. All ranks of the group call it with equal lists.
 * *out is NULL on a rank that is in no part. Blocks. The engine owns the new groups, and *out has
 * one user more: the caller. MS_ERROR_STATE on all ranks alike: MS_GROUPS_MAX groups are alive. */
MS_API ms_status ms_group_split(ms_group *group, uint32_t parts, const uint32_t *sizes,
                                const uint32_t *ranks, ms_group **out);
/* Raises or lowers the number of users of the group on this rank. A user is a handle of the
 * application or a model. Both functions may be called at any moment, also by finalizers, since
 * they send nothing to other ranks. When the group has no users and its calls have ended, on all
 * its ranks, the next split of its parent, or of the parent's parents, frees it. Ranks may drop it
 * at different times.
 */
MS_API ms_group *ms_group_retain(ms_group *group);
MS_API void ms_group_release(ms_group *group); /* NULL: does nothing */
/* Whether the last split has failed as so many groups are alive. The next one first waits for the
 * calls of groups without users, so the application may drop its users and split again, on all
 * ranks. */
MS_API bool ms_group_lacks_numbers(const ms_group *group);
/* All ranks of the group that was split call it for what the split gave them, at the same place
 * between its calls: the next split of that group with the same lists, which name all its ranks,
 * gives the same groups again. Nothing waits, and what is under way goes on. MS_ERROR_STATE for a
 * group that no split has made. closings: how often it was closed. */
MS_API ms_status ms_group_close(ms_group *group);
MS_API uint64_t ms_group_closings(const ms_group *group);

/* Memory in this rank's heap, which all ranks of the node map: collectives read it there instead of
 * copying. Usable on `stream` at once; otherwise an ordinary storage. A fake world gives ordinary
 * memory. MS_ERROR_MEMORY when the heap or the machine is full. */
MS_API ms_status ms_group_storage(ms_group *group, ms_stream *stream, size_t bytes,
                                  ms_storage **out);

/* -------------------------------------------------------------- collectives */

typedef enum ms_collective_kind {
    MS_ALL_REDUCE,
    MS_REDUCE,
    MS_REDUCE_SCATTER,
    MS_ALL_GATHER,
    MS_ALL_TO_ALL,
    MS_BROADCAST,
    MS_GATHER,
    MS_SCATTER,
    MS_SEND,
    MS_RECV,
    MS_BARRIER,
    MS_SPLIT, /* issued by ms_group_split only */
    MS_COLLECTIVES
} ms_collective_kind;
MS_API const char *ms_collective_name(ms_collective_kind kind); /* "all_reduce" ... */

/* avg: the sum divided by the size; floats only. premul_sum: the sum of each rank's tensor times
 * that rank's factor; floats only. Integers wrap. For bool, sum and max are "or", prod and min are
 * "and". min and max of floats: a NaN of any rank is the result. */
typedef enum ms_reduce_op {
    MS_REDUCE_OP_SUM,
    MS_REDUCE_OP_AVG,
    MS_REDUCE_OP_MIN,
    MS_REDUCE_OP_MAX,
    MS_REDUCE_OP_PROD,
    MS_REDUCE_OP_PREMUL_SUM,
    MS_REDUCE_OPS
} ms_reduce_op;
MS_API const char *ms_reduce_op_name(ms_reduce_op op);
MS_API bool ms_reduce_op_find(const char *name, ms_reduce_op *out);

/* One call. N is the size of the group, r this rank in it. Tensors are contiguous, of one dtype, on
 * this engine. Lengths are in elements:
 *
 *   kind            in             out                          counts
 *   all_reduce      n              NULL: in place; or n         -
 *   reduce          n              on root NULL (in place) or n -
 *   reduce_scatter  n              n / N, or counts[r]          N parts of in
 *   all_gather      counts[r]      N times as many, or the sum  N parts of out
 *   all_to_all      n              n, or the sum of receive     N parts of in, one for each rank;
 *                                                               receive_counts: parts of out
 *   broadcast       n, in place    NULL                         -
 *   gather          counts[r]      on root as all_gather's      as all_gather's
 *   scatter         on root n      n / N, or counts[r]          N parts of in; elsewhere in is NULL
 *   send, recv      n; recv fills  NULL                         -
 *   barrier         NULL           NULL                         -
 *
 * out may be this rank's part of in (reduce_scatter, scatter), and in this rank's part of out
 * (all_gather, gather); otherwise they do not overlap.
 *
 * Ranks must agree in kind, op, dtype, count, counts, root, bucket, group, channel, the number of
 * calls before, and whether all_reduce has an out and rounds. They may differ in factor, label,
 * script line, restore, stream, and in the memory of their tensors. A send and its recv agree in
 * dtype, count, label and group. They are numbered for each pair of ranks and direction, and run on
 * streams of their own, so that a send waits for no collective and no recv.
 *
 * NCCL differs in four points. It does not reduce u16, and rounds nothing on its way (MS_F32 is the
 * only `travels`). It rounds `factor` to the dtype of the tensors. A group's first call is none of
 * send and recv (a barrier, say). Of a rank's sends and receives in a group, those of messages to
 * higher ranks run in the order of calls, and so do those of messages to lower ranks. */
typedef struct ms_collective {
    ms_collective_kind kind;
    ms_reduce_op op;
    uint32_t root; /* of the group; the other rank of send and recv */
    double factor; /* premul_sum: this rank's */
    ms_tensor *in, *out;
    /* all_reduce in place of f32: each rank's numbers and the result are rounded to this 16-bit
     * float, as if cast there and back, and bytes are counted in it; MS_F32 (0): no rounding. */
    ms_dtype travels;
    const int64_t *counts, *receive_counts;
    /* all_gather: what it writes is a restore from `in` (see ms_storage_restore). in must not share
     * memory with out. */
    bool restore;
    ms_tensor *source; /* of the restore: what `in` depends on; NULL: `in` itself */
    ms_stream *stream; /* NULL: the channel's */
    /* Index for messages and the ledger, or -1. Below -1: a number of the caller that ranks agree
     * in and that no message shows. */
    int32_t bucket;
    /* For messages ("blocks.4"), or NULL; copied. Both ranks of send and recv give the same. */
    const char *label;
    uint64_t timeout_ns; /* 0: the job's */
    /* 0, or the number of memory that stays where it is (ms_group_fixed_address). Whether two calls
     * have the same number, and whether their tensors then are in the same memory, is the same on
     * all members, though addresses and numbers differ. Such a call may become a graph:
     * ms_comm_use_graphs. */
    uint32_t fixed_address;
} ms_collective;

/* A number for memory that stays where it is from now on; unique in the engine. */
MS_API uint32_t ms_group_fixed_address(ms_group *group);
/* From now on calls of memory that stays are launched as graphs after their third time, if the
 * transport can do that on this device and the variable MOONSHARD_COMM_GRAPHS is "off" on no rank.
 * All ranks of the world call this at the same place among their calls. The first call waits for
 * their hosts, later ones do nothing. Without such a transport, or other ranks, nothing changes.
 * MS_ERROR_ARGUMENT: the variable is neither "on" nor "off". */
MS_API ms_status ms_comm_use_graphs(ms_engine *engine);
/* Whether they may, as the ranks have agreed. */
MS_API bool ms_group_uses_graphs(const ms_group *group);

/* Enqueues the collective after all earlier ones of this channel (1 or 2, or MS_CHANNEL_PARAMETERS)
 * and after the last uses of its tensors. *ready (may be NULL) is the point at which the result is
 * complete. An argument error names the operation and changes nothing. */
MS_API ms_status ms_group_enqueue(ms_group *group, uint32_t channel,
                                  const ms_collective *collective, ms_point *ready);
/* The same, and recorded if recording is on and `input` requires a gradient: the result
 * (collective->out, or collective->in, which then is a copy of the input that has no history)
 * depends on input. MS_ERROR_ARGUMENT, and nothing is enqueued, for calls that have no gradient:
 * min, max, prod, and all kinds but all_reduce, broadcast, all_gather, reduce_scatter and
 * all_to_all. All ranks run such calls in the same order, forward and backward. */
MS_API ms_status ms_group_apply(ms_group *group, uint32_t channel, const ms_collective *collective,
                                ms_tensor *input, ms_point *ready);
/* A barrier that the host waits for. */
MS_API ms_status ms_group_barrier(ms_group *group, uint64_t timeout_ns);

/* ------------------------------------------- numbers exchanged out of band */

/* A few numbers or bytes of text that each rank's host brings and that hosts wait for, such as
 * plans, or the id by which a network knows its members. They are in host memory whatever the
 * engine's device is. They go through control, never through the network that moves tensors, and on
 * a channel of their own, which waits for no computation. kind: all_gather (the result has every
 * rank's numbers, in rank order), broadcast, or all_reduce (op: sum or max). Ranks agree in all
 * fields. In a group without other ranks the result is that of ranks that all bring the same
 * numbers, on every device. */
typedef struct ms_sharing {
    ms_collective_kind kind;
    ms_reduce_op op;
    uint32_t root;
    ms_dtype dtype;    /* u8, i32, i64 or f32 */
    uint64_t count;    /* of this rank's numbers */
    const char *label; /* for messages; copied */
} ms_sharing;

/* Copies the numbers and enqueues the exchange; the host does not wait. ticket (NULL: the result is
 * not read) is for ms_group_share_end, which blocks until the result is there and is called
 * once. */
MS_API ms_status ms_group_share_begin(ms_group *group, const ms_sharing *sharing, const void *mine,
                                      uint64_t *ticket);
/* all: receives `count` numbers, or, of all_gather, `count` numbers of each rank. */
MS_API ms_status ms_group_share_end(ms_group *group, uint64_t ticket, void *all);
/* begin and end in one call. mine and all may be the same memory, except in all_gather. */
MS_API ms_status ms_group_share(ms_group *group, const ms_sharing *sharing, const void *mine,
                                void *all);

/* ----------------------------------------------------------------- accounts */

/* wire_bytes: what a bandwidth-optimal algorithm would send; between_nodes_bytes: what this rank
 * sends to ranks on other nodes, 0 in a job of one node. */
typedef struct ms_traffic {
    uint64_t calls, payload_bytes, wire_bytes, between_nodes_bytes;
} ms_traffic;
/* Sums since the start for collectives of one kind; MS_COLLECTIVES: for all kinds. */
MS_API ms_traffic ms_group_traffic(const ms_group *group, ms_collective_kind kind);
/* What of between_nodes_bytes the transport has handed to the network so far: all of it once the
 * calls have ended. */
MS_API uint64_t ms_group_bytes_between_nodes(const ms_group *group);
/* The same over all groups of this engine, also over those that are gone. */
MS_API ms_traffic ms_comm_traffic(const ms_engine *engine, ms_collective_kind kind);
/* All groups of this engine, from 0 (the world), in the order of their places; NULL past the last.
 * A group that was dropped leaves its place to a later one. */
MS_API ms_group *ms_comm_group(const ms_engine *engine, uint32_t index);

/* The collectives that were enqueued since ms_comm_record(engine, true), in order, for `check`. */
typedef struct ms_collective_record {
    ms_collective_kind kind;
    ms_reduce_op op;
    ms_dtype dtype;
    uint64_t count, payload_bytes, wire_bytes, between_nodes_bytes;
    ms_group *group;
    uint32_t channel, root;
    int32_t bucket;
    uint32_t label, script; /* ms_engine_strings */
} ms_collective_record;
/* on: drops what was recorded before and records from now on; off: keeps the records. */
MS_API void ms_comm_record(ms_engine *engine, bool on);
MS_API size_t ms_comm_record_count(const ms_engine *engine);
MS_API const ms_collective_record *ms_comm_record_get(const ms_engine *engine, size_t index);
/* A hash of the records' kind, op, dtype, count, group, channel, root and bucket, in order. It is
 * equal on ranks that made the same calls. */
MS_API uint64_t ms_comm_order_hash(const ms_engine *engine);

#ifdef __cplusplus
}
#endif
#endif
