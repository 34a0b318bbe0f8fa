/* rendezvous.h: where the ranks of a job meet, and what its supervisor sees of them: one table for
 * each way of meeting. For comm/ only; launchers and ranks call moonshard/control.h.
 *
 * Invariants
 * - A rendezvous exists before any engine, and needs none: it is what a launcher makes, hands to
 *   the processes that it starts, and looks at while they run. A supervisor knows nothing else of
 *   a job.
 * - A kind of rendezvous is the supervisor's side of a control (control_table.h): the ranks that
 *   meet there have that control.
 * - Slots are called from any thread. `abort` and `request` are safe in a signal handler.
 * - What `cause`, `rank` and `flight` read outlives the ranks' processes. */
#ifndef MOONSHARD_COMM_RENDEZVOUS_H
#define MOONSHARD_COMM_RENDEZVOUS_H

#include "base/thread.h"
#include "comm/control_table.h"

/* Slots do what the function of the same name in moonshard/control.h says; none is NULL. */
typedef struct ms_rendezvous_kind {
    const char *prefix; /* with which every text of `share` begins, and no other kind's */
    const ms_control *control;
    ms_status (*create)(ms_context *context, const ms_rendezvous_options *options,
                        ms_rendezvous **out);
    ms_status (*meet)(ms_context *context, const ms_rendezvous_options *options, const char *path,
                      uint32_t rank, ms_rendezvous **out);
    ms_status (*share)(ms_rendezvous *rendezvous, ms_context *context, char *text, size_t bytes);
    /* MS_ERROR_CORRUPT, without a message, if text names no job. */
    ms_status (*adopt)(ms_context *context, const char *text, ms_rendezvous **out);
    void (*close)(ms_rendezvous *rendezvous); /* the last reference has gone */
    uint32_t (*threads)(const ms_rendezvous *rendezvous);
    bool (*crowded)(const ms_rendezvous *rendezvous);
    uint32_t (*place)(const ms_rendezvous *rendezvous, uint32_t rank, uint32_t *here);
    bool (*abort)(ms_rendezvous *rendezvous, ms_abort_reason reason, int32_t rank,
                  const char *message);
    bool (*cause)(const ms_rendezvous *rendezvous, ms_abort_record *out);
    void (*rank)(const ms_rendezvous *rendezvous, uint32_t rank, ms_rank_state *out);
    bool (*flight)(const ms_rendezvous *rendezvous, uint32_t rank, uint64_t index, ms_flight *out);
    void (*left)(ms_rendezvous *rendezvous, uint32_t rank);
    ms_activity *(*activity)(ms_rendezvous *rendezvous, uint32_t rank);
    void (*judge)(ms_rendezvous *rendezvous);
    bool (*hang_report)(ms_rendezvous *rendezvous, uint32_t rank, char text[MS_HANG_REPORT_BYTES]);
    void (*dismiss_hang_report)(ms_rendezvous *rendezvous, uint32_t rank);
    void (*request)(ms_rendezvous *rendezvous, ms_request kind, uint8_t value);
    const char *(*folder)(const ms_rendezvous *rendezvous, char *text, size_t bytes);
} ms_rendezvous_kind;

/* The head of every kind's own record. A kind fills os and ranks; rendezvous_kinds.c fills the
 * rest. */
struct ms_rendezvous {
    const ms_rendezvous_kind *kind;
    const ms_os *os;
    ms_word references;
    uint32_t ranks;
};

/* ms_rendezvous_shm: of the ranks of one node, over memory files. ms_rendezvous_cluster: of several
 * nodes. */
extern const ms_rendezvous_kind ms_rendezvous_shm, ms_rendezvous_cluster;
#define MS_SHM_PREFIX "local1:"

#endif
