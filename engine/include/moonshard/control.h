/* moonshard/control.h: what a launcher or supervisor needs of a job: where its ranks meet, how each
 * of them is, why the job has ended, and requests to all of them. Ranks of one node meet over its
 * memory files; moonshard/cluster.h joins several nodes.
 *
 * Invariants
 * - A rank is a process, or a thread of one process. Both run the same code over the same memory
 *   files. Ranks share these files and nothing else: no pointers, no locks. The one exception are
 *   threads on one GPU, which use each other's tensors (ms_comm_options.one_gpu in comm.h).
 * - The first cause of a job's end is written once, into its abort record. Every wait of every rank
 *   ends with it.
 * - A supervisor needs no engine and no tensors. Everything here may be called from any thread.
 * - What a rank has recorded (progress, step, flight record) outlives its process. */
#ifndef MOONSHARD_CONTROL_H
#define MOONSHARD_CONTROL_H

#include "moonshard/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MS_LOCAL_RANKS_MAX 128 /* ranks that meet on one node, and that move bytes there */

typedef struct ms_rendezvous ms_rendezvous;

/* ----------------------------------------------- where the ranks of a node meet */

typedef struct ms_rendezvous_options {
    uint32_t ranks;
    /* Threads of each rank; they decide whether waits spin or sleep. 0: cores / ranks. */
    uint32_t threads;
    /* Limit of each rank's heap in address space; 0: the machine's memory. At most 64 GiB. Pages
     * are allocated as the heap grows. */
    uint64_t heap_bytes;
    /* 0: as fast as memory. Otherwise all traffic of a rank shares a link of this rate; in a job
     * over several nodes, what it sends to other nodes. */
    uint64_t link_bytes_per_second;
    uint64_t link_latency_ns;
    /* Over several nodes: sums are in the order of ranks, as on one node, instead of first within
     * each node. */
    bool sum_by_ranks;
    /* A wait for a peer that shows no progress ends the job after this time; 0: 300 s. A deadlock
     * of all ranks is found earlier. */
    uint64_t timeout_ns;
} ms_rendezvous_options;

/* Creates the memory files of a job: one for control, and a heap for each rank. They have no names
 * and vanish with their last user. MS_ERROR_UNSUPPORTED where the system has no such files. The
 * context is used by this call only. */
MS_API ms_status ms_rendezvous_new(ms_context *context, const ms_rendezvous_options *options,
                                   ms_rendezvous **out);
/* The value of MS_RENDEZVOUS_VARIABLE for a child: the numbers of the files' descriptors. From now
 * on the programs that this process starts inherit these descriptors. MS_ERROR_ARGUMENT when text
 * is too small (32 + 12 bytes a rank are enough). */
#define MS_RENDEZVOUS_VARIABLE "MOONSHARD_RENDEZVOUS"
MS_API ms_status ms_rendezvous_share(ms_rendezvous *rendezvous, ms_context *context, char *text,
                                     size_t bytes);
/* In the child: takes over the files that text names. Their descriptors are not inherited further.
 * MS_ERROR_CORRUPT if they are not the files of a job. */
MS_API ms_status ms_rendezvous_adopt(ms_context *context, const char *text, ms_rendezvous **out);
/* For ranks that no launcher started. Rank 0 creates the files and hands them to the others at a
 * unix socket of this path. Each rank waits at most 120 s for the others; MS_ERROR_TIMEOUT names
 * those that did not come. A socket file that a crash has left is replaced; a socket on which a
 * process listens is not (MS_ERROR_EXISTS). These ranks have no supervisor: a rank that waits for
 * another checks whether that rank's process is alive. Only processes of the same user are
 * admitted. All ranks must give the same options->ranks. */
MS_API ms_status ms_rendezvous_meet(ms_context *context, const ms_rendezvous_options *options,
                                    const char *path, uint32_t rank, ms_rendezvous **out);
/* Another reference, from any thread: thread ranks share one rendezvous. */
MS_API ms_rendezvous *ms_rendezvous_retain(ms_rendezvous *rendezvous);
MS_API void ms_rendezvous_release(ms_rendezvous *rendezvous); /* NULL is allowed */
MS_API uint32_t ms_rendezvous_ranks(const ms_rendezvous *rendezvous);
MS_API uint32_t ms_rendezvous_threads(const ms_rendezvous *rendezvous); /* of each rank */
/* Whether more threads of this node's ranks want to run than it has cores: their engines' options
 * say so. */
MS_API bool ms_rendezvous_crowded(const ms_rendezvous *rendezvous);
/* The place of a rank among those of its node, from 0; *here: how many those are. */
MS_API uint32_t ms_rendezvous_place(const ms_rendezvous *rendezvous, uint32_t rank, uint32_t *here);

/* Why a job ended. */
typedef enum ms_abort_reason {
    MS_ABORT_NONE,
    MS_ABORT_MISMATCH,
    MS_ABORT_LEFT, /* a rank left while others waited for it */
    MS_ABORT_TIMEOUT,
    MS_ABORT_RAISED,
    MS_ABORT_DIED,
    MS_ABORT_STOPPED /* by request */
} ms_abort_reason;

/* error.rank: the rank that caused the end, or -1. */
typedef struct ms_abort_record {
    ms_abort_reason reason;
    ms_error error;
} ms_abort_record;

/* Ends the job: every rank leaves its collectives with this cause. The first call counts; false:
 * the job had a cause already. From any thread, and from a signal handler. rank: the rank that
 * caused the end, or -1. A supervisor calls this when a rank's process has ended. */
MS_API bool ms_rendezvous_abort(ms_rendezvous *rendezvous, ms_abort_reason reason, int32_t rank,
                                const char *message);
/* The cause; false (and *out unchanged) while the job is alive. */
MS_API bool ms_rendezvous_cause(const ms_rendezvous *rendezvous, ms_abort_record *out);

typedef enum ms_rank_phase { MS_RANK_ABSENT, MS_RANK_PRESENT, MS_RANK_LEFT } ms_rank_phase;
typedef struct ms_rank_state {
    ms_rank_phase phase;
    int64_t process;
    uint64_t progress;    /* grows with each task and call of the rank: see ms_activity_state */
    uint64_t collectives; /* entered since the start: the length of the flight record */
    int64_t step;         /* the last step that it began; -1: none */
    bool finished;        /* its host issues no more collectives */
    bool waits;           /* each of its tasks waits for a peer */
    ms_activity_state activity;
} ms_rank_state;
MS_API void ms_rendezvous_rank(const ms_rendezvous *rendezvous, uint32_t rank, ms_rank_state *out);
/* For a supervisor: this rank has ended without an engine, or without freeing it. Peers that wait
 * for it fail at once. */
MS_API void ms_rendezvous_left(ms_rendezvous *rendezvous, uint32_t rank);

/* The activity record of a rank, for the context of its node and for ms_activity_ask. It lives as
 * long as the rendezvous. */
MS_API ms_activity *ms_rendezvous_activity(ms_rendezvous *rendezvous, uint32_t rank);
/* From now on the caller, a supervisor, decides about ranks that show no progress. A rank that has
 * waited for another longer than the timeout reports that it hangs, and waits until the other comes
 * or the supervisor ends the job. A barrier's own timeout still ends the job at once. */
MS_API void ms_rendezvous_judge(ms_rendezvous *rendezvous);
/* Whether a peer has waited too long for this rank, and the rank has shown no progress since. text:
 * which peer waits, and in which call. */
#define MS_HANG_REPORT_BYTES 512
MS_API bool ms_rendezvous_hang_report(ms_rendezvous *rendezvous, uint32_t rank,
                                      char text[MS_HANG_REPORT_BYTES]);
/* The hang report is settled: peers may raise another. */
MS_API void ms_rendezvous_dismiss_hang_report(ms_rendezvous *rendezvous, uint32_t rank);

/* What a supervisor may request of all ranks. All ranks learn of a request between the same two
 * steps (ms_comm_step), without a collective. There is one request of each kind at a time: until
 * all ranks have seen it, another request of its kind is ignored. value: 1 to 255. From any thread,
 * and from a signal handler. */
typedef enum ms_request {
    MS_REQUEST_STOP,
    MS_REQUEST_SAVE,
    MS_REQUEST_RELOAD, /* of scripts */
    MS_REQUESTS
} ms_request;
MS_API void ms_rendezvous_request(ms_rendezvous *rendezvous, ms_request kind, uint8_t value);
/* The folder that a rank has named with ms_comm_set_folder, or "". Returns text. */
#define MS_FOLDER_BYTES 1024
MS_API const char *ms_rendezvous_folder(const ms_rendezvous *rendezvous, char *text, size_t bytes);

/* An entry of a rank's flight record: a collective that it has entered. The record can be read
 * after the rank has died. */
typedef struct ms_flight {
    uint64_t number;                     /* in its group and channel, from 1 */
    uint64_t count, entered_ns, left_ns; /* monotonic; left 0: inside */
    uint32_t group;                      /* 0: the world */
    uint32_t size;                       /* of the group */
    int32_t root, bucket;                /* -1: none */
    uint8_t kind, op, dtype, channel;
    char group_name[32], label[32]; /* group_name: its end, where it is longer */
    char script[64];                /* the end of "file.lua:12" */
} ms_flight;
#define MS_FLIGHTS 128 /* that a rank's record keeps */
/* Entry `index`, counted from 0 since the start; false if it is not there, or no longer there. Only
 * of ranks that have ended: a rank that runs may be writing the entry. */
MS_API bool ms_rendezvous_flight(const ms_rendezvous *rendezvous, uint32_t rank, uint64_t index,
                                 ms_flight *out);
/* "all_reduce #17 of world [f32 x 1024, sum, bucket 3 "blocks.4", at train.lua:12]" into text;
 * returns text. */
MS_API const char *ms_flight_describe(const ms_flight *flight, char *text, size_t bytes);
/* The names of its numbers: "all_reduce", "f32" ("" of a barrier), "sum". */
typedef struct ms_flight_names {
    const char *kind, *dtype, *op;
} ms_flight_names;
MS_API ms_flight_names ms_flight_name(const ms_flight *flight);

#ifdef __cplusplus
}
#endif
#endif
