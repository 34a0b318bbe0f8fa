/* control_table.h: what ranks agree on and learn of each other, apart from the bytes that they
 * move. For comm/ only.
 *
 * Invariants
 * - A membership is one control and one transport (transport_table.h). Control knows no tensors,
 *   the transport no other rank's calls. So calls are compared in the same way with each transport.
 * - Before a call is launched its host claims the call's number and publishes its fields, then
 *   compares them with what peers have published for that number. It does not wait for them. Of two
 *   ranks that disagree, the one that claims later finds it before its launch. A transport may
 *   compare again before it moves bytes.
 * - A call is launched after its claim, and peers count on it only then. A claim whose launch fails
 *   is retracted.
 * - The first cause ends the job: after it, `check` fails on every rank with that cause.
 * - Control also carries the small numbers and texts that hosts wait for (oob.c), in host memory:
 *   plans, the ids of new groups, what a transport needs to begin. A transport never sees them.
 * - All slots are for the host thread, but for those that any thread of the rank may call: `abort`,
 *   `entered`, `landed` and `look`. */
#ifndef MOONSHARD_COMM_CONTROL_TABLE_H
#define MOONSHARD_COMM_CONTROL_TABLE_H

#include "comm/state.h"

/* Whom a call waits for, from one look to the next. The first look needs since_ns only. */
typedef struct ms_awaited {
    bool is_known;
    uint32_t missing; /* world rank */
    uint64_t progress, since_ns;
} ms_awaited;

struct ms_control {
    const char *name;
    /* Whether there are other ranks at all. */
    bool has_others;
    /* Takes this rank's place at the rendezvous, and makes control_state; the world's group is
     * there. MS_ERROR_STATE if the place is taken. NULL: there is nothing to take. */
    ms_status (*open)(ms_comm *comm, ms_rendezvous *rendezvous);
    /* The membership is complete: from now on the others may see this rank. NULL with open. */
    void (*joined)(ms_comm *comm);
    /* MS_OK, or the cause of the job's end as the engine's error. */
    ms_status (*check)(ms_comm *comm);
    /* Adds numbers of groups that no group of the job has, `parts` of them, or as many as there
     * are. The first member of the group that is split calls it for all. */
    void (*take_ids)(ms_comm *comm, uint32_t parts, ms_ids *ids);
    /* They are free again. */
    void (*give_ids)(ms_comm *comm, const ms_ids *ids);
    /* Before this rank's first call in a new group. */
    ms_status (*join)(ms_comm *comm, uint32_t id);
    /* Of the next send or recv with this peer, from 1. */
    uint64_t (*number)(ms_comm *comm, const ms_comm_args *args);
    /* Everything that can fail for want of memory, before a call is claimed. */
    ms_status (*prepare)(ms_comm *comm, const ms_comm_args *args);
    ms_status (*claim)(ms_comm *comm, const ms_comm_args *args);
    void (*retract)(ms_comm *comm, const ms_comm_args *args);
    void (*launched)(ms_comm *comm, const ms_comm_args *args);
    /* Of calls that do not wait in control's own tasks: one begins on this rank, and has ended;
     * both go to the flight record, where entered gives the place. look: now and then in between.
     * It ends the job if a member will never come to the call, or if the call has waited too long,
     * and answers when it wants to look again at the latest. All NULL without others. */
    uint64_t (*entered)(ms_comm *comm, const ms_comm_args *args);
    void (*landed)(ms_comm *comm, uint64_t place);
    uint64_t (*look)(ms_comm *comm, const ms_comm_args *args, ms_awaited *awaited);
    /* The calls that control carries itself (ms_comm_args.out_of_band), by kind: all_gather,
     * all_reduce, broadcast and split of bytes in host memory. A member's numbers are in its place
     * of `out` already. They run on a stream, in order with the other calls of their channel. */
    const ms_task *tasks;
    /* This rank makes no more calls. message: it has failed, and the job ends. */
    void (*leave)(ms_comm *comm, const char *message);
    void (*abort)(ms_comm *comm, const ms_error *error);
    /* This rank's host is alive. */
    void (*progress)(ms_comm *comm);
    /* The rank begins a step; values: requests that all ranks meet before it, or 0. */
    void (*step)(ms_comm *comm, uint64_t serial, int64_t step, uint8_t values[MS_REQUESTS]);
    void (*set_folder)(ms_comm *comm, const char *folder);
    /* After the streams and the transport have ended. Before `joined`: as if it had not opened. */
    void (*close)(ms_comm *comm);
};

/* ms_control_shm: among the ranks of one node, over memory files. ms_control_cluster: of several
 * nodes, over the memory files of each and connections between their agents. ms_control_none: a
 * rank alone, or in a fake world. */
extern const ms_control ms_control_shm, ms_control_cluster, ms_control_none;

#endif
