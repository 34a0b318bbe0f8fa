/* watch.c: the supervisor watches ranks that show no progress: it asks where they are, warns, and
 * ends the job where other ranks wait for one in vain, or (--stuck) where one takes too long. */
#include "bindings/program/watch.h"

#include <stdio.h>
#include <string.h>

/* Ranks that are in their own code when the job ends have this long to leave. */
#define MS_LEAVE_NS 3000000000u
#define MS_ANSWER_NS 500000000u   /* a script that runs answers a question much sooner */
#define MS_STARVED_NS 5000000000u /* the same of a rank that gets no core */
#define MS_TICK_MOST_NS 1000000000u
#define MS_TICK_LEAST_NS 10000000u

/* The first cause counts: ms_rendezvous_abort does nothing if there is one. Ranks get a time to
 * leave by themselves, so that they can print the error and close files. If they gave up waiting
 * for a rank, that rank is asked where it is, for the report. */
void ms_end_job(ms_job *job, ms_abort_reason reason, int32_t rank, const char *message)
{
    if (reason != MS_ABORT_NONE) ms_rendezvous_abort(job->rendezvous, reason, rank, message);
    if (job->ending) return;
    job->ending = true;
    job->deadline_ns = job->context.os->monotonic_ns(job->context.os->user) + MS_LEAVE_NS;
    ms_abort_record cause;
    if (!ms_rendezvous_cause(job->rendezvous, &cause) || cause.reason != MS_ABORT_TIMEOUT
        || cause.error.rank < 0)
        return;
    if (job->locate && !job->outcomes[cause.error.rank].ended)
        job->locate(job, (uint32_t)cause.error.rank);
}

/* How long a rank may show no progress before it is asked where it is. */
static uint64_t patience(const ms_job *job)
{
    return job->stuck_ns && job->stuck_ns < job->timeout_ns ? job->stuck_ns : job->timeout_ns;
}

/* An eighth of the shortest limit, so that a rank is noticed soon after it, but neither too often
 * nor too seldom. */
uint64_t ms_watch_tick(const ms_job *job)
{
    uint64_t tick = patience(job) / 8;
    if (tick < MS_TICK_LEAST_NS) return MS_TICK_LEAST_NS;
    return tick > MS_TICK_MOST_NS ? MS_TICK_MOST_NS : tick;
}

/* The beginning of a file of the system; "" if it cannot be read. Files of /proc have no size to
 * ask for, so one read takes what fits. */
static void read_text(const ms_job *job, const char *path, char *text, size_t bytes)
{
    const ms_os *os = job->context.os;
    ms_file *file = NULL;
    int64_t count = 0;
    if (os->open(os->user, path, MS_FILE_READ, &file) == 0) {
        count = os->read(os->user, file, text, bytes - 1, 0);
        os->close(os->user, file);
    }
    text[count > 0 ? count : 0] = '\0';
}

/* The state of the rank's host thread as ps shows it (R S D T ...); 0: not known. The name in the
 * file may contain blanks and brackets, so the search begins at its last bracket. */
static char state_of(const ms_job *job, uint32_t rank, int32_t thread)
{
    char path[96], text[512];
    long long process = (long long)job->outcomes[rank].process;
    if (thread) snprintf(path, sizeof path, "/proc/%lld/task/%d/stat", process, thread);
    else snprintf(path, sizeof path, "/proc/%lld/stat", process);
    read_text(job, path, text, sizeof text);
    /* The state follows the name after a blank. */
    const char *end_of_name = strrchr(text, ')');
    return end_of_name && end_of_name[1] == ' ' ? end_of_name[2] : '\0';
}

/* Whether the rank has had time to answer. One that could run and has not even heard the question,
 * whose handler runs before all else, has got no core since: the machine is busy. */
static bool is_overdue(const ms_job *job, uint32_t rank, const ms_activity_state *activity,
                       uint32_t question, uint64_t waited_ns)
{
    if (waited_ns < MS_ANSWER_NS) return false;
    bool starved = activity->heard != question && state_of(job, rank, activity->thread) == 'R';
    return !starved || waited_ns >= MS_STARVED_NS;
}

/* Whether the thread sleeps and has started a process that has not ended. Such a rank works through
 * its child (a compiler, a download), although its own counters stop. */
static bool waits_for_child(const ms_job *job, uint32_t rank, int32_t thread, char state)
{
    char path[96], text[32];
    if (state != 'S' || !thread) return false;
    snprintf(path, sizeof path, "/proc/%lld/task/%d/children",
             (long long)job->outcomes[rank].process, thread);
    read_text(job, path, text, sizeof text);
    return text[0] != '\0';
}

/* Why a rank without progress may nevertheless work; then others go on waiting for it. */
typedef enum work { WORKS_NOT, WORKS_IN_ENGINE, WORKS_BY_CHILD } work;

/* Describes what the rank does, as far as it is known. answered: its script has told the line.
 * heard: its signal handler has run. These two tell a script that loops from a thread that is stuck
 * in C or in the kernel. The state of the process is kept for the report. */
static work describe(ms_job *job, uint32_t rank, const ms_activity_state *activity, bool answered,
                     bool heard, char *text, size_t bytes)
{
    char state = job->outcomes[rank].state = state_of(job, rank, activity->thread);
    char last[MS_LINE_BYTES + 32] = "";
    if (*activity->line) snprintf(last, sizeof last, ", its last known line is %s", activity->line);
    if (state == 'T' || state == 't')
        snprintf(text, bytes, "its process is stopped (%c)%s", state, last);
    else if (answered)
        snprintf(text, bytes, "it runs its script at %s",
                 *activity->line ? activity->line : "a line that is not known");
    else if (heard && activity->place == MS_WHERE_FINALIZER)
        snprintf(text, bytes, "it runs a finalizer (__gc)%s", last);
    else if (activity->busy) {
        snprintf(text, bytes, "it is inside a call of the engine%s", last);
        return WORKS_IN_ENGINE;
    } else if (waits_for_child(job, rank, activity->thread, state)) {
        snprintf(text, bytes, "it waits for a process that it has started%s", last);
        return WORKS_BY_CHILD;
    } else
        snprintf(
            text, bytes,
            "it runs code that is neither its script nor the engine (a library function, say)%s",
            last);
    return WORKS_NOT;
}

/* Another rank that has finished, and so waits for this one; job->ranks if there is none. It has
 * finished if its process has ended, or if its host makes no more collectives. */
static uint32_t finished_other(const ms_job *job, uint32_t rank)
{
    for (uint32_t r = 0; r < job->ranks; r++) {
        ms_rank_state state;
        ms_rendezvous_rank(job->rendezvous, r, &state);
        bool ended = job->outcomes[r].ended && !job->outcomes[r].elsewhere;
        if (r != rank && (ended || state.finished)) return r;
    }
    return job->ranks;
}

/* Whether other ranks wait for this one without a call of theirs that says so: one that has
 * finished waits for those that have not. A rank that has finished is waited for when all have:
 * over several nodes it waits itself until then. */
static bool is_awaited(const ms_job *job, uint32_t rank, const ms_rank_state *state)
{
    for (uint32_t r = 0; r < job->ranks && state->finished; r++) {
        ms_rank_state other;
        ms_rendezvous_rank(job->rendezvous, r, &other);
        if (!other.finished) return false;
    }
    return finished_other(job, rank) < job->ranks;
}

/* Since when the rank has shown no progress while a finished one waits for it: the later of the two
 * moments. Before the other rank finished, it did not wait; before the last progress, this rank
 * worked.
 */
static uint64_t awaited_since(const ms_watched *w)
{
    return w->changed_ns > w->awaited_ns ? w->changed_ns : w->awaited_ns;
}

/* Whether the user's own limit (--stuck) has passed for this rank, which waits for no other. A rank
 * that has finished waits for those that have not. */
static bool is_stuck(const ms_job *job, uint32_t rank, const ms_rank_state *state, uint64_t now)
{
    if (!job->stuck_ns || now - job->watched[rank].changed_ns < job->stuck_ns || state->waits)
        return false;
    for (uint32_t r = 0; r < job->ranks && state->finished; r++) {
        ms_rank_state other;
        ms_rendezvous_rank(job->rendezvous, r, &other);
        if (!other.finished) return false;
    }
    return true;
}

/* Other ranks may run their scripts as long as this one: they are asked as well, so that they leave
 * at the next instruction. */
static void end_stuck_job(ms_job *job, uint32_t rank, const char *text)
{
    ms_end_job(job, MS_ABORT_TIMEOUT, (int32_t)rank, text);
    for (uint32_t r = 0; r < job->ranks && job->locate; r++) {
        ms_rank_state state;
        ms_rendezvous_rank(job->rendezvous, r, &state);
        if (r != rank && !job->outcomes[r].ended && !state.waits) job->locate(job, r);
    }
}

/* The rank has been asked, and has had time to answer. It is blamed only if a peer has reported it,
 * or a finished rank has waited for the whole timeout, and only if it does not seem to work; or if
 * it is stuck by the user's own limit, and not inside of the engine, where it may wait for others.
 * Otherwise the peers' report is dropped, and a warning says where the rank is. */
static void judge(ms_job *job, uint32_t rank, const ms_rank_state *state, uint64_t now)
{
    ms_watched *w = &job->watched[rank];
    char place[MS_LINE_BYTES + 128], text[MS_HANG_REPORT_BYTES + sizeof place + 64],
        hang_report[MS_HANG_REPORT_BYTES];
    work works = describe(job, rank, &state->activity, state->activity.answered == w->question,
                          state->activity.heard == w->question, place, sizeof place);
    bool reported_hang = ms_rendezvous_hang_report(job->rendezvous, rank, hang_report);
    uint32_t finished = finished_other(job, rank);
    double quiet = (double)(now - w->changed_ns) / 1e9;
    /* Answered or not, the question is over; the next one needs a new number. */
    w->question = 0;
    w->warned_ns = now;
    if (works == WORKS_NOT
        && (reported_hang
            || (is_awaited(job, rank, state) && now - awaited_since(w) >= job->timeout_ns))) {
        if (reported_hang) snprintf(text, sizeof text, "%s; %s", hang_report, place);
        else
            snprintf(text, sizeof text,
                     "rank %u has shown no progress for %.1f s, and rank %u has finished and waits "
                     "for it; %s",
                     rank, quiet, finished, place);
        ms_end_job(job, MS_ABORT_TIMEOUT, (int32_t)rank, text);
        return;
    }
    if (works != WORKS_IN_ENGINE && is_stuck(job, rank, state, now)) {
        snprintf(text, sizeof text, "rank %u has shown no progress for %.1f s (--stuck %.6g); %s",
                 rank, quiet, (double)job->stuck_ns / 1e9, place);
        end_stuck_job(job, rank, text);
        return;
    }
    /* The rank seems to work, or no other rank has waited for it long enough. */
    ms_rendezvous_dismiss_hang_report(job->rendezvous, rank);
    /* A rank that has finished may hang in MPI_Finalize. It warns of that itself, once a limit as
     * long as this one has passed; what else may take so long is told at the next look. */
    if (works && state->finished && now - w->changed_ns < 2 * job->timeout_ns) return;
    /* --stuck is shorter than --timeout. */
    if (now - w->changed_ns < job->timeout_ns) return;
    snprintf(text, sizeof text, "rank %u has shown no progress for %.1f s: %s%s", rank, quiet,
             place, job->stuck_ns ? "" : " (moonshard run --stuck SECONDS ends such a job)");
    job->warn(job, text);
}

/* Whether a moment has passed since the last look. */
static bool has_passed(uint64_t moment, const ms_watched *w, uint64_t now)
{
    return now >= moment && w->warned_ns < moment;
}

/* Whether it is time to ask a rank that shows no progress where it is. awaited: a rank that has
 * finished waits for it. */
static bool is_question_due(const ms_job *job, const ms_watched *w, bool awaited, uint64_t now)
{
    /* One look in each timeout, which warns, and one when a limit passes. */
    bool is_due = now - w->warned_ns >= patience(job);
    is_due |= awaited && has_passed(awaited_since(w) + job->timeout_ns, w, now);
    is_due |= job->stuck_ns && has_passed(w->changed_ns + job->stuck_ns, w, now);
    return is_due && now - w->changed_ns >= patience(job);
}

/* Called at each tick for each rank that runs. A rank whose progress has changed starts again.
 * Another one is asked once a peer suspects it or a question is due, and judged when it has
 * answered, or has not answered in time. */
static void look_at(ms_job *job, uint32_t rank, uint64_t now)
{
    ms_watched *w = &job->watched[rank];
    char hang_report[MS_HANG_REPORT_BYTES];
    ms_rank_state state;
    ms_rendezvous_rank(job->rendezvous, rank, &state);
    bool awaited = is_awaited(job, rank, &state);
    if (awaited && !w->awaited_ns) w->awaited_ns = now;
    if (state.progress != w->progress || w->changed_ns == 0) {
        *w = (ms_watched){ .progress = state.progress,
                           .changed_ns = now,
                           .warned_ns = now,
                           .awaited_ns = w->awaited_ns };
        /* Reports of peers about the time before are out of date. */
        ms_rendezvous_dismiss_hang_report(job->rendezvous, rank);
        return;
    }
    bool reported_hang = ms_rendezvous_hang_report(job->rendezvous, rank, hang_report);
    /* A rank that waits in a collective, or for others to finish, is explained by those ranks. */
    if ((state.waits || state.finished) && !reported_hang && !awaited
        && !is_stuck(job, rank, &state, now))
        return;
    if (!reported_hang && !is_question_due(job, w, awaited, now)) return;
    if (!w->question) {
        w->question = ms_activity_ask(ms_rendezvous_activity(job->rendezvous, rank));
        w->asked_ns = now;
        if (job->locate) job->locate(job, rank);
    } else if (state.activity.answered == w->question
               || is_overdue(job, rank, &state.activity, w->question, now - w->asked_ns))
        judge(job, rank, &state, now);
}

/* Stops looking once the job is ending. */
void ms_watch(ms_job *job, uint64_t now)
{
    /* If this process was stopped itself, its ranks were stopped, too: that time does not count
     * against them. */
    bool was_stopped =
        job->watched_ns && now - job->watched_ns > 2 * MS_TICK_MOST_NS + 2 * ms_watch_tick(job);
    job->watched_ns = now;
    for (uint32_t r = 0; r < job->ranks && !job->ending; r++) {
        /* look_at then starts again, as at its first tick. */
        if (was_stopped) job->watched[r].changed_ns = 0;
        if (!job->outcomes[r].ended) look_at(job, r, now);
    }
}
