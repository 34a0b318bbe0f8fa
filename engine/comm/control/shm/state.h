/* state.h: control among the ranks of one host, over memory files: the layout of the control file,
 * a rank's side of it, and the order ledger that transports on this host run their calls through.
 * For comm/control/, comm/job/ and comm/transport/ only.
 *
 * Invariants
 * - Every word that two ranks touch is atomic, or is written before a release store and read after
 *   the acquire load that sees it.
 * - A ledger slot of number n is written before its seq becomes n, and written again for n + 2,
 *   when all ranks have left n + 1: no rank reads it then.
 * - A phase counter only grows. All ranks of a channel advance it by the same amount in each
 *   collective; reaching a phase together is a barrier.
 * - A thread that waits sleeps on the bell of its own rank. A rank that makes progress rings the
 *   bells of the ranks that may wait for it, if they sleep; an abort rings all bells. A sleeper
 *   raises `asleep` before it looks for the last time, and the other makes its progress before it
 *   reads `asleep`, all sequentially consistent: no wake is lost. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_STATE_H
#define MOONSHARD_COMM_CONTROL_SHM_STATE_H

#include <stdalign.h>
#include <stdatomic.h>

#include "base/activity.h"
#include "base/thread.h"
#include "comm/control_table.h"
#include "comm/rendezvous.h"

#define MS_CONTROL_MAGIC 0x385654435244534dull /* "MSDRCTV8" */
/* Half of a staging area: one is filled while the other is read. */
#define MS_STAGE_BYTES ((size_t)256 << 10)
/* Staging areas at the beginning of each heap; the last one is for sends. */
#define MS_STAGE_AREAS (MS_GROUPS_MAX * MS_CHANNELS + 1)
#define MS_STAGES_BYTES (MS_STAGE_AREAS * 2 * MS_STAGE_BYTES)

#define MS_HOST_NAME_BYTES 64

/* Calls of a channel whose claims are kept. A host may be further ahead, with calls enqueued on
 * several streams. */
#define MS_CALLS_AHEAD 1024
/* Bytes of numbers that hosts share, in one step: a record of plans or the id of a network is
 * shorter. */
#define MS_SHARED_BYTES 2048
/* Calls of a channel whose fields are kept, for reports. */
#define MS_CALLS_SHOWN 16

/* A collective as its rank entered it: what must agree (call), and what the others use. */
typedef struct ms_ledger_slot {
    _Atomic uint64_t seq;
    uint64_t counts_hash, order;
    uint64_t heap_offset;     /* of `in` in its rank's heap, plus 1; 0: not in the heap */
    uint64_t value;           /* all_to_all by counts: its longest part */
    uint64_t in, out, counts; /* addresses in its process, for ranks that are threads of it */
    double factor;            /* of a premul_sum */
    uint64_t graph;           /* see ms_comm_args */
    ms_flight call;
} ms_ledger_slot;

/* The fields of a call as its host has published them. Words are atomic, since a peer may read them
 * while they are written for a later call; then it finds another seq afterwards. */
#define MS_CALL_WORDS ((sizeof(ms_ledger_slot) + 7) / 8)
typedef struct ms_published {
    _Atomic uint64_t seq;
    _Atomic uint64_t words[MS_CALL_WORDS];
} ms_published;

/* One for each rank in each number of a group and each channel. Only that rank writes it, also when
 * the number is given again to other members: then counts go on. */
typedef struct ms_member_line {
    alignas(128) ms_ledger_slot slots[2]; /* by seq & 1 */
    alignas(128) _Atomic uint64_t phase;
    /* By the host: what must agree of call n, at n % MS_CALLS_AHEAD: a hash, and which lap of this
     * ring n is in; 0: none. */
    alignas(128) _Atomic uint64_t claims[MS_CALLS_AHEAD];
    _Atomic uint64_t issued; /* by the host: the calls enqueued */
    ms_published published[MS_CALLS_SHOWN];
    /* What this member's host shares: one half is filled while the other is read. */
    alignas(128) char shared[2][MS_SHARED_BYTES];
} ms_member_line;

/* What a host has published of its sends to, or receives from, one peer. */
#define MS_PAIR_CALLS_AHEAD 64
#define MS_PAIR_CALLS_SHOWN 4
typedef struct ms_pair_calls {
    alignas(128) _Atomic uint64_t claims[MS_PAIR_CALLS_AHEAD];
    ms_published published[MS_PAIR_CALLS_SHOWN];
} ms_pair_calls;

/* One for each ordered pair of ranks. */
typedef struct ms_pair_line {
    ms_pair_calls calls[2]; /* by the sender, by the receiver */
    alignas(128) ms_ledger_slot sent[2];
    alignas(128) ms_ledger_slot received[2];
    alignas(128) _Atomic uint64_t written; /* chunks, by the sender */
    alignas(128) _Atomic uint64_t read;    /* chunks, by the receiver */
    alignas(128) _Atomic uint64_t sends;   /* issued, by the hosts */
    _Atomic uint64_t receives;
} ms_pair_line;

/* What a peer that has waited too long for a rank reports to the supervisor: see
 * ms_rendezvous_suspect. */
typedef struct ms_suspicion {
    ms_word state;     /* 0: none; 1: being written; 2: complete */
    uint64_t progress; /* of the rank, while its peer waited */
    char text[MS_SUSPICION_BYTES];
} ms_suspicion;

/* How far a rank has finished, in order. One that rests waits for MPI_Finalize, and calls nothing
 * else of MPI. */
typedef enum ms_finished { MS_UNFINISHED, MS_FINISHED, MS_RESTS } ms_finished;

/* As ms_ids, of several writers. */
typedef _Atomic uint64_t ms_id_words[MS_GROUPS_MAX / 64];

/* What one rank shows to the others and to the supervisor. Words that other ranks poll have cache
 * lines of their own. */
typedef struct ms_rank_line {
    alignas(128) ms_word bell;
    ms_word asleep; /* threads of this rank */
    /* Progress of this rank plus 1 when a peer last warned of it as a straggler. */
    _Atomic uint64_t warned;
    /* Of a job over several hosts: how many numbers of groups it asks for, those that it has been
     * given, and whether it has; those that are free again. */
    ms_word ids_wanted, ids_answered;
    ms_ids ids_given;
    ms_id_words ids_back;
    /* Its calls that use the tensors of other threads and are not over (local/direct.c). */
    ms_word direct_calls;
    /* From here to `suspicion`: what ranks on other hosts have a copy of. */
    alignas(128) ms_word phase; /* ms_rank_phase */
    ms_word finished;           /* ms_finished: its host will issue nothing more */
    /* Set once the rank's process has claimed its number in the control file, until it ends. */
    ms_word claimed;
    _Atomic int64_t process;
    _Atomic uint64_t flights;
    _Atomic uint64_t serial; /* of the last step that its host was about to begin */
    _Atomic int64_t step;    /* its number, plus 1 */
    /* deadlock.c: number of the standstill << 32 | rounds of looking in it; 0: not still. */
    _Atomic uint64_t still;
    ms_word met[MS_REQUESTS]; /* how many requests of each kind it has met */
    ms_word gone;             /* its process has ended: the tasks that it had enqueued never run */
    ms_word code;             /* with which its process is about to end, plus 1; 0: not known */
    ms_word hangs;            /* MPI_Finalize has not come back, and the user knows */
    ms_activity activity;
    ms_suspicion suspicion;
    ms_flight flight[MS_FLIGHTS];
} ms_rank_line;

/* A decision about a request holds the count of requests above these bits, and the serial number in
 * them. */
#define MS_SERIAL_BITS 40

/* A request to all ranks; see request.c. */
typedef struct ms_request_line {
    ms_word raised; /* how many there were, << 8 | value of the last */
    /* The last request decided: its count << 40 | the serial number before which all ranks meet
     * it. */
    _Atomic uint64_t decided;
    /* Of a job over several hosts: the value of one that this host's keeper has not taken yet, and
     * whether ranks wait before their next step until the hosts have decided. */
    ms_word wanted, gate;
} ms_request_line;

/* The control file, which all ranks and the launcher map. MS_CONTROL_MAGIC names its layout: a rank
 * that was built with another one refuses the file. Fields up to `unsupervised` do not change once
 * ranks have joined. */
typedef struct ms_control_file {
    uint64_t magic, control_bytes, heap_bytes, link_bytes_per_second, link_latency_ns, timeout_ns;
    uint32_t ranks, threads;
    /* Of the job; 1 and 0 where all ranks are on one host. host_of: of each rank. */
    uint32_t hosts, here;
    uint16_t host_of[MS_LOCAL_RANKS_MAX];
    char host_names[MS_LOCAL_RANKS_MAX][MS_HOST_NAME_BYTES];
    bool crowded;      /* more threads of this host's ranks want to run than it has cores */
    ms_word kept;      /* the place of the keeper in this file is claimed while it lives */
    bool sum_by_ranks; /* as in the options */
    bool unsupervised; /* no launcher started the ranks: they detect each other's death */
    ms_word judged;    /* a supervisor decides about ranks that show no progress */
    ms_request_line requests[MS_REQUESTS];
    ms_word reported; /* over several hosts: the report of the job's end is written */
    ms_word folder_set;
    char folder[MS_FOLDER_BYTES];
    ms_word groups;       /* the numbers of all groups of this host's ranks so far are below */
    ms_id_words ids_used; /* now; of a job over several hosts, the first host's counts */
    /* How GPUs' tensors travel, as the first rank with one has said: see local/direct.c. */
    _Atomic uint64_t way;
    alignas(128) ms_word aborted; /* 0, 1: being written, 2: the record is complete */
    ms_abort_record record;
    /* Over several hosts, several may end the job at the same time: what they agree on, and whether
     * it is there. */
    ms_word agreed;
    ms_word unheard; /* somebody has waited for that in vain */
    ms_abort_record verdict;
    ms_rank_line lines[]; /* one a rank, then pairs, then members */
} ms_control_file;

/* Which host each rank of a job is on. Without host_of and names: all on the first. */
typedef struct ms_layout {
    uint32_t hosts, here;
    const uint16_t *host_of;
    const char (*names)[MS_HOST_NAME_BYTES]; /* of hosts */
} ms_layout;

/* How a process tells other hosts what it writes. Every host of a job has a control file with the
 * lines of all ranks; those of ranks on other hosts are copies. Each word of a line is written by
 * one rank only, so copies need no more than that the writes of a rank arrive in its order. */
typedef struct ms_mirror ms_mirror;
struct ms_mirror {
    /* Sends what these bytes of the control file are now to the copies on all other hosts, which
     * wake their ranks. Four and eight aligned bytes arrive as one atomic store. From any
     * thread. */
    void (*tell)(ms_mirror *mirror, const void *address, size_t bytes);
    /* This host's keeper looks at the control file: the job has ended, or something is asked of it.
     * Safe in signal handlers. */
    void (*stir)(ms_mirror *mirror);
    /* Frees it; the files' close calls it. */
    void (*close)(ms_mirror *mirror);
};

/* A job on this host, as a process sees it: its memory files. What every rendezvous has comes
 * first, so that a pointer to one is a pointer to the other. */
typedef struct ms_host_files {
    ms_rendezvous base;
    ms_control_file *control;
    ms_mirror *mirror; /* NULL in a job of one host */
    /* The thread that calls MPI for this process' rank, whose news wake that rank; NULL in a job of
     * one host. The mirror's close ends it. */
    struct ms_mpi *mpi;
    uint64_t control_bytes;
    uint64_t heap_bytes; /* of a rank on this host; others have staging areas only */
    ms_file *control_file;
    struct {
        ms_file *file;
        char *memory;
    } heaps[MS_LOCAL_RANKS_MAX];
} ms_host_files;

static inline ms_host_files *ms_host_files_of(const ms_rendezvous *rendezvous)
{
    return (ms_host_files *)(uintptr_t)rendezvous;
}

/* Whether the threads of the ranks outnumber the cores. A thread that spins on a shared core yields
 * it, since the thread that it waits for may need it. */
typedef enum ms_pressure { MS_OWN_CORE, MS_SHARED_CORE } ms_pressure;

#define MS_STEPS_TIMED 15

/* A rank's part of deadlock detection: deadlock.c. */
typedef struct ms_standstill {
    ms_word lock;
    uint32_t waiting;      /* tasks that wait for a peer */
    uint32_t looked;       /* of them, those that have looked in this round */
    uint64_t round, begun; /* rounds that have ended; waits so far */
    uint64_t moves;        /* at the end of the last round */
    uint64_t times;        /* how often the rank came to a standstill */
    uint64_t since_ns;     /* when it last did */
    uint32_t prompts;      /* since then, how often it woke the others so that they look */
    bool watching;         /* seen is filled */
    uint64_t seen[MS_LOCAL_RANKS_MAX]; /* `still` of each rank when all were found still */
} ms_standstill;

/* A rank's side: ms_comm.control_state. */
typedef struct ms_host {
    ms_comm *comm;
    ms_host_files *files; /* a reference */
    ms_control_file *control;
    bool joined;   /* the others may see it */
    uint32_t rank; /* in the world, as everything here */
    ms_pressure pressure;
    /* host thread: calls so far with each rank */
    uint64_t sends[MS_LOCAL_RANKS_MAX], receives[MS_LOCAL_RANKS_MAX];
    /* host thread: how long the last steps took */
    uint64_t step_ns[MS_STEPS_TIMED], steps_timed, step_began_ns;
    _Atomic uint64_t patience_ns; /* a longer wait is reported as a straggler's */
    ms_standstill standstill;
} ms_host;

static inline uint64_t ms_host_now(const ms_host *host)
{
    return host->files->base.os->monotonic_ns(host->files->base.os->user);
}

static inline bool ms_host_is_here(const ms_control_file *control, uint32_t rank)
{
    return control->host_of[rank] == control->here;
}

/* In a job of one host there is no mirror, and this does nothing. */
static inline void ms_host_tell(const ms_host *host, const void *address, size_t bytes)
{
    ms_mirror *mirror = host->files->mirror;
    if (mirror) mirror->tell(mirror, address, bytes);
}

static inline ms_pair_line *ms_pair(const ms_host_files *files, uint32_t from, uint32_t to)
{
    ms_control_file *control = files->control;
    return (ms_pair_line *)(void *)&control->lines[control->ranks] + (size_t)from * control->ranks
           + to;
}

static inline ms_member_line *ms_member(const ms_host_files *files, uint32_t group,
                                        uint32_t channel, uint32_t rank)
{
    const ms_control_file *control = files->control;
    return (ms_member_line *)(void *)(ms_pair(files, control->ranks - 1, control->ranks - 1) + 1)
           + ((size_t)group * MS_CHANNELS + channel) * control->ranks + rank;
}

static inline char *ms_stage(const ms_host_files *files, uint32_t rank, uint32_t area,
                             uint64_t half)
{
    return files->heaps[rank].memory + (area * 2 + (half & 1)) * MS_STAGE_BYTES;
}

/* ------------------------------------------------------------------ files.c */

ms_status ms_host_files_new(ms_context *context, const ms_rendezvous_options *options,
                            ms_rendezvous **out);
/* The files of one host of a job over several. The layout is copied. */
ms_status ms_host_files_new_among(ms_context *context, const ms_rendezvous_options *options,
                                  const ms_layout *layout, ms_rendezvous **out);
/* The rendezvous of these files, control first, then a heap for each rank; owns them, also on
 * failure. MS_ERROR_CORRUPT if they are something else. */
ms_status ms_host_files_take(ms_context *context, uint32_t ranks, ms_file *const *files,
                             ms_rendezvous **out);
ms_status ms_host_files_share(ms_rendezvous *rendezvous, ms_context *context, char *text,
                              size_t bytes);
ms_status ms_host_files_adopt(ms_context *context, const char *text, ms_rendezvous **out);
void ms_host_files_close(ms_rendezvous *rendezvous);
/* Pages for a part of the control file or of a heap, before it is touched; 0 or -errno. */
int ms_host_files_populate_control(ms_host_files *files, void *address, size_t bytes);
int ms_host_files_populate_heap(ms_host_files *files, uint32_t rank, void *address, size_t bytes);

/* rendezvous_socket.c */
ms_status ms_host_meet(ms_context *context, const ms_rendezvous_options *options, const char *path,
                       uint32_t rank, ms_rendezvous **out);

/* ---------------------------------------------------------------- job_end.c */

/* As ms_rendezvous_abort, ms_rendezvous_cause and ms_rendezvous_flight. */
bool ms_host_end_job(ms_host_files *files, ms_abort_reason reason, int32_t rank,
                     const char *message);
bool ms_host_cause(const ms_host_files *files, ms_abort_record *out);
/* What this host has recorded, which may differ from what the hosts agree on. */
bool ms_host_own_cause(const ms_host_files *files, ms_abort_record *out);
bool ms_host_flight(const ms_host_files *files, uint32_t rank, uint64_t index, ms_flight *out);
/* Wakes every rank, in case it sleeps. Safe in signal handlers. */
void ms_host_ring_all(ms_control_file *control);

/* ------------------------------------------------------------------- bell.c */

/* Whether the job has ended, for those who have no rank. */
static inline bool ms_host_ended(const ms_control_file *control)
{
    return atomic_load_explicit(&control->aborted, memory_order_acquire) != 0;
}
static inline bool ms_host_aborted(const ms_host *host) { return ms_host_ended(host->control); }
/* Rings the rank's bell if a thread of it sleeps. */
void ms_host_wake_line(ms_rank_line *line);
static inline void ms_host_wake(ms_host *host, uint32_t rank)
{
    ms_host_wake_line(&host->control->lines[rank]);
}
/* Sleeps until a peer has made progress, at most this long. With a wait (may be NULL), it does not
 * sleep if what is waited for came after the bell was read. */
typedef struct ms_wait ms_wait;
void ms_host_sleep(ms_host *host, ms_wait *wait, uint64_t most_ns);
void ms_host_nap(ms_host *host, uint64_t most_ns);
/* Sleeps until then; false: the job has ended. */
bool ms_host_sleep_until(ms_host *host, uint64_t until_ns);

/* ------------------------------------------------------------------- wait.c */

/* What a task does for other ranks each time that it looks whether its own peers have come, and for
 * which members of its group it waits. */
typedef struct ms_helper ms_helper;
struct ms_helper {
    void (*turn)(ms_helper *helper);
    /* After a wait in vain: a call that does not return on this rank, or NULL; it takes 100 ms. */
    const char *(*hangs)(ms_helper *helper);
    uint64_t due_ns;   /* a sleeper takes its next turn by then */
    const bool *among; /* by member: who is waited for; NULL: all */
};

/* What a wait is for, as its caller defines it. reached: whether it is there; hopeless: looks
 * whether it can never come, and if so ends the job; missing: the world rank of one that has not
 * come. */
typedef struct ms_wait_kind {
    bool (*reached)(ms_wait *wait);
    void (*hopeless)(ms_wait *wait);
    uint32_t (*missing)(ms_wait *wait);
} ms_wait_kind;

struct ms_wait {
    const ms_wait_kind *kind;
    ms_host *host;
    const ms_comm_args *args;
    ms_helper *helper; /* or NULL */
    uint64_t target;
    uint32_t cursor;
    uint64_t looked; /* the last round of deadlock.c in which it has */
};
/* false: the job has ended. */
bool ms_host_wait(ms_wait *wait);
static inline void ms_wait_turn(ms_wait *wait)
{
    if (wait->helper) wait->helper->turn(wait->helper);
}
static inline bool ms_wait_is_for(const ms_wait *wait, uint32_t member)
{
    return !wait->helper || !wait->helper->among || wait->helper->among[member];
}
/* The time limit has passed: ends the job, or reports to the supervisor that `missing` has not
 * come. */
void ms_host_give_up(ms_host *host, const ms_comm_args *args, uint32_t missing, uint64_t progress,
                     uint64_t waited_ns);
/* Leaves the job's cause as this task's error. */
ms_task_result ms_host_fail(ms_run *run, ms_host *host, const ms_comm_args *args);
/* Ends the job because this rank's task met an error of its own. */
ms_task_result ms_host_raise(ms_run *run, ms_host *host, const ms_comm_args *args, ms_status status,
                             const char *what);

/* ----------------------------------------------------------------- record.c */

/* The place of a world rank among the members; the group's size if it is none. */
uint32_t ms_ledger_member(const ms_group *group, uint32_t rank);
static inline ms_member_line *ms_ledger_line(const ms_host *host, const ms_comm_args *args,
                                             uint32_t member)
{
    return ms_member(host->files, args->group->id, args->channel, args->group->members[member]);
}
/* How many calls the rank has issued in this group and channel. What it has issued in a former
 * group with this number does not count. */
static inline uint64_t ms_ledger_issued(const ms_host *host, const ms_group *group,
                                        uint32_t channel, uint32_t rank)
{
    uint64_t issued = atomic_load(&ms_member(host->files, group->id, channel, rank)->issued);
    return issued > group->numbers ? issued : group->numbers;
}
const ms_ledger_slot *ms_ledger_slot_of(const ms_host *host, const ms_comm_args *args,
                                        uint32_t member);
/* Fills a slot but its seq. */
void ms_ledger_write(ms_host *host, const ms_comm_args *args, ms_ledger_slot *slot);
/* Appends the call to this rank's flight record; the place for ms_ledger_landed. */
uint64_t ms_ledger_flight(ms_host *host, const ms_flight *call);
void ms_ledger_landed(ms_host *host, uint64_t flight);
/* Whether two ranks' calls agree; and the same as a number, known before the call is entered. */
bool ms_ledger_agree(const ms_ledger_slot *a, const ms_ledger_slot *b);
/* The same for the two sides of a send. */
bool ms_ledger_agree_pair(const ms_ledger_slot *a, const ms_ledger_slot *b);
uint64_t ms_ledger_hash(const ms_comm_args *args);
/* The fields of a member's call of this number (but for seq), as its host has published them or its
 * task has entered it; false: they are not there, or no longer. */
bool ms_ledger_call(ms_member_line *line, uint64_t number, ms_ledger_slot *out);
/* The fields of a call as published there; false: they are of another call. */
bool ms_ledger_read(const ms_published *from, uint64_t number, ms_ledger_slot *out);

/* ids.c: numbers of groups. A set is added to, or taken out of, words that others change, too. */
void ms_ids_put(ms_id_words words, const ms_ids *ids);
void ms_ids_remove(ms_id_words words, const ms_ids *ids);
/* Adds so many numbers that are free, or as many as there are. */
void ms_host_take_ids(ms_control_file *control, uint32_t parts, ms_ids *ids);
/* A rank of this host becomes a member of the group with this number. */
void ms_host_note_id(ms_control_file *control, uint32_t id);
/* Slots of ms_control_host and ms_control_hosts: see ms_control. */
void ms_host_take(ms_comm *comm, uint32_t parts, ms_ids *ids);
void ms_host_give(ms_comm *comm, const ms_ids *ids);
void ms_hosts_take(ms_comm *comm, uint32_t parts, ms_ids *ids);
void ms_hosts_give(ms_comm *comm, const ms_ids *ids);

/* ------------------------------------------------------------------ claim.c */

/* Slots of ms_control_host: see ms_control. */
ms_status ms_host_claim(ms_comm *comm, const ms_comm_args *args);
void ms_host_retract(ms_comm *comm, const ms_comm_args *args);

/* ------------------------------------------------------------ async_calls.c */

/* Slots of ms_control_host: see ms_control. */
uint64_t ms_host_entered(ms_comm *comm, const ms_comm_args *args);
void ms_host_landed(ms_comm *comm, uint64_t place);
uint64_t ms_host_look(ms_comm *comm, const ms_comm_args *args, ms_awaited *awaited);

/* ----------------------------------------------------------------- ledger.c */

/* helper: where the members that are waited for are not all of the group; NULL otherwise. */
/* Enters, and waits until all members have entered the same; false: the job has ended. */
bool ms_ledger_enter(ms_host *host, const ms_comm_args *args);
/* The two parts of ms_ledger_enter. */
const ms_ledger_slot *ms_ledger_post(ms_host *host, const ms_comm_args *args);
bool ms_ledger_await(ms_host *host, const ms_comm_args *args, ms_helper *helper);
/* Waits until all members are `phases` phases on from where the collective began. */
bool ms_ledger_phase(ms_host *host, const ms_comm_args *args, uint64_t phases, ms_helper *helper);
/* As ms_ledger_phase, then the collective is over for this channel. */
bool ms_ledger_leave(ms_host *host, const ms_comm_args *args, uint64_t phases, ms_helper *helper);
/* Wakes those that sleep; the others see a change while they spin. */
void ms_ledger_wake(ms_host *host, const ms_group *group);

/* oob.c: slot of ms_control_host. */
extern const ms_task ms_host_tasks[MS_COLLECTIVES];

/* --------------------------------------------------------------- mismatch.c */

/* "2", or "2 on host NAME" in a job over several hosts; returns text. */
#define MS_RANK_NAME_BYTES (MS_HOST_NAME_BYTES + 24)
const char *ms_rank_name(const ms_host *host, uint32_t rank, char text[MS_RANK_NAME_BYTES]);

/* Ends the job because the call of that member differs from this rank's of the same number. One
 * error shows both sides: all who made this rank's call, and all who made the member's. */
void ms_ledger_disagree(ms_host *host, const ms_comm_args *args, uint32_t member,
                        ms_helper *helper);
/* The same for a send or recv; theirs: what the peer calls, or NULL where it cannot be shown. */
void ms_ledger_disagree_pair(ms_host *host, const ms_comm_args *args, const ms_ledger_slot *theirs);
/* Ends the job, since the process of `other` has ended before its part of this collective began, or
 * in the middle of it. */
void ms_ledger_ended(ms_host *host, const ms_comm_args *args, uint32_t other, bool begun);
/* Ends the job, since `other`, a world rank, will never come to what args waits for: it has
 * finished, `calls` calls into this group or pair. */
void ms_ledger_gone(ms_host *host, const ms_comm_args *args, uint32_t other, uint64_t calls,
                    const ms_ledger_slot *last);
/* Whether `other` (the group's `member`) has called something that this rank has not, before what
 * this rank waits for; then the job ends. */
bool ms_ledger_check_order(ms_host *host, const ms_comm_args *args, uint32_t other,
                           uint32_t member);

/* request.c: slots of ms_control_host, and of the rendezvous. */
void ms_host_request(ms_rendezvous *rendezvous, ms_request kind, uint8_t value);
const char *ms_host_folder(const ms_rendezvous *rendezvous, char *text, size_t bytes);
void ms_host_step(ms_comm *comm, uint64_t serial, int64_t step, uint8_t values[MS_REQUESTS]);
void ms_host_set_folder(ms_comm *comm, const char *folder);

/* hang_report.c: slots of the rendezvous. */
void ms_host_judge(ms_rendezvous *rendezvous);
bool ms_host_suspect(ms_rendezvous *rendezvous, uint32_t rank, char text[MS_SUSPICION_BYTES]);
void ms_host_acquit(ms_rendezvous *rendezvous, uint32_t rank);
/* A rank's progress: what it has got done so far. */
uint64_t ms_rank_progress(const ms_rank_line *line);
/* Reports to the supervisor that `missing` has not come; the caller then goes on waiting. False: no
 * supervisor decides in this job. */
bool ms_suspect(ms_host *host, uint32_t missing, uint64_t progress, const char *text);

/* liveness.c: in a job without a supervisor, a rank shows that its process lives, and a rank that
 * waits for another looks whether the other's process does. */
void ms_death_watch(ms_host *host);
void ms_death_look(ms_host *host, uint32_t rank);
/* In a job over several hosts, whether this host's keeper lives. Without it the job ends. For the
 * keeper's own process it is dead. */
bool ms_death_of_keeper(const ms_host_files *files);
void ms_death_look_keeper(ms_host *host);

/* straggler.c: a step begins now. */
void ms_straggler_step(ms_host *host, uint64_t now);
/* Warns of the missing rank, unless a peer has warned of it since its last progress. */
void ms_straggler_warn(ms_host *host, const ms_comm_args *args, uint32_t missing, uint64_t progress,
                       uint64_t waited_ns, uint64_t limit_ns);

/* deadlock.c: deadlock detection. Begin and end enclose a wait that sleeps. Look is called each
 * time that the wait has looked in vain, and ends the job where all ranks wait for each other. */
void ms_standstill_begin(ms_host *host, ms_wait *wait);
void ms_standstill_look(ms_host *host, ms_wait *wait);
void ms_standstill_end(ms_host *host, ms_wait *wait);

#endif
