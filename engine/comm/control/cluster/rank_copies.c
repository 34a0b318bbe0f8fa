/* rank_copies.c: copies of what the ranks of one node show, in the control files of the others. */
#include "comm/control/cluster/rank_copies.h"

#include <errno.h>
#include <string.h>

#include "comm/control/cluster/coordinator.h"
#include "comm/control/cluster/peers.h"
#include "comm/control/shm/bell.h"
#include "comm/control/shm/files.h"
#include "comm/control/shm/job_end.h"

/* The part of a rank's line that other nodes have a copy of, and its flight record, which they get
 * at the end. */
#define SHOWN_FROM offsetof(ms_rank_line, phase)
#define SHOWN_TO offsetof(ms_rank_line, hang_report)
#define FLIGHTS_FROM offsetof(ms_rank_line, flight)
#define FLIGHTS_TO sizeof(ms_rank_line)

_Static_assert(SHOWN_FROM % 8 == 0 && SHOWN_TO % 8 == 0, "the part that is shown is whole words");
_Static_assert(FLIGHTS_TO - FLIGHTS_FROM + sizeof(ms_write_body) <= MS_FRAME_BODY_MOST,
               "a flight record fits a frame");

/* Whether bytes from `offset` on are between two offsets. */
static bool inside(uint64_t offset, size_t bytes, uint64_t from, uint64_t to)
{
    return offset >= from && offset < to && bytes <= to - offset;
}

/* ------------------------------------------------------------------- telling */

/* The first agent tells all others; another one tells the first, which passes it on. */
void ms_agent_tell(ms_agent *agent, uint64_t offset, const void *data, size_t bytes)
{
    ms_write_body write = { .offset = offset };
    for (uint32_t h = agent->node ? 0 : 1; h < (agent->node ? 1 : agent->nodes); h++)
        ms_agent_send_parts(agent, h, agent->node, MS_FRAME_WRITE, &write, sizeof write, data,
                            bytes);
}

/* A part of this process' control file, as it is now. */
static void tell_part(ms_agent *agent, const void *from, const void *data, size_t bytes)
{
    ms_agent_tell(agent, (uint64_t)((const char *)from - (const char *)agent->control), data,
                  bytes);
}

/* Whether something has changed that other nodes wait for: that the rank has come, finished, or
 * gone. The rest may be a second old. */
static bool is_urgent(const ms_shown *was, const ms_shown *is)
{
    static const size_t words[] = { offsetof(ms_rank_line, phase), offsetof(ms_rank_line, finished),
                                    offsetof(ms_rank_line, gone) };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (memcmp((const char *)was->words + words[i], (const char *)is->words + words[i],
                   sizeof(ms_word))
            != 0)
            return true;
    return false;
}

/* What is sent is compared and kept as the other nodes have it. They do not see the end of a rank
 * before they have heard what it has told. `unheard` is read before the line: it goes down only. */
static void show(ms_agent *agent, uint32_t rank, bool all)
{
    ms_rank_line *line = &agent->control->lines[rank];
    ms_shown now, *shown = &agent->shown[rank];
    char *copy = (char *)now.words + SHOWN_FROM, *before = (char *)shown->words + SHOWN_FROM;
    ms_unheard unheard = (ms_unheard)atomic_load(&agent->connections[rank].unheard);
    ms_copy_words(copy, (char *)line + SHOWN_FROM, SHOWN_TO - SHOWN_FROM);
    if (unheard == MS_CALLS_UNHEARD)
        memset((char *)now.words + offsetof(ms_rank_line, finished), 0, sizeof(ms_word));
    if (unheard != MS_ALL_HEARD)
        memset((char *)now.words + offsetof(ms_rank_line, gone), 0, sizeof(ms_word));
    if (memcmp(copy, before, SHOWN_TO - SHOWN_FROM) == 0) return;
    if (!all && !is_urgent(shown, &now)) return;
    memcpy(before, copy, SHOWN_TO - SHOWN_FROM);
    ms_agent_propose(agent);
    tell_part(agent, (char *)line + SHOWN_FROM, copy, SHOWN_TO - SHOWN_FROM);
}

/* One thread at a time, so that no copy goes back to what was before. */
void ms_agent_show(ms_agent *agent, bool all)
{
    ms_lock_take(&agent->showing);
    for (uint32_t r = 0; r < agent->ranks; r++)
        if (ms_shm_is_here(agent->control, r)) show(agent, r, all);
    ms_lock_give(&agent->showing);
}

bool ms_agent_shows(const ms_agent *agent, uint64_t offset, size_t bytes)
{
    uint64_t lines = offsetof(ms_control_file, lines);
    return inside(offset, bytes, lines, lines + agent->ranks * sizeof(ms_rank_line))
           && inside((offset - lines) % sizeof(ms_rank_line), bytes, SHOWN_FROM, SHOWN_TO);
}

/* The record is read while its rank may still write: a report allows for that. */
void ms_agent_show_flights(ms_agent *agent)
{
    ms_agent_show(agent, true);
    for (uint32_t r = 0; r < agent->ranks; r++) {
        char *record = (char *)&agent->control->lines[r] + FLIGHTS_FROM;
        if (ms_shm_is_here(agent->control, r))
            tell_part(agent, record, record, FLIGHTS_TO - FLIGHTS_FROM);
    }
}

/* ------------------------------------------------------------------- hearing */

/* Where a node may write: the lines of its ranks, as far as others see them; the lines of groups
 * and pairs; the folder, and that there is a report. Group numbers do not say whose a member's line
 * is, so those are not told apart. */
static bool is_allowed(const ms_agent *agent, uint32_t origin, uint64_t offset, size_t bytes)
{
    const ms_control_file *control = agent->control;
    uint64_t lines = offsetof(ms_control_file, lines),
             after = lines + agent->ranks * sizeof(ms_rank_line);
    if (inside(offset, bytes, after, control->control_bytes)) return true;
    if (inside(offset, bytes, offsetof(ms_control_file, reported),
               offsetof(ms_control_file, folder) + MS_FOLDER_BYTES))
        return true;
    if (offset < lines || offset >= after) return false;
    uint64_t rank = (offset - lines) / sizeof(ms_rank_line),
             within = (offset - lines) % sizeof(ms_rank_line);
    return control->node_of[rank] == origin
           && (inside(within, bytes, SHOWN_FROM, SHOWN_TO)
               || inside(within, bytes, FLIGHTS_FROM, FLIGHTS_TO));
}

/* Lines of groups and pairs may have no pages here yet: without memory for them a write would end
 * this process. Threads of ranks that sleep may wait for what has come. */
bool ms_agent_apply(ms_agent *agent, uint32_t origin, uint64_t offset, const void *data,
                    size_t bytes)
{
    ms_control_file *control = agent->control;
    if (!is_allowed(agent, origin, offset, bytes)) return false;
    char *to = (char *)control + offset;
    if (offset >= offsetof(ms_control_file, lines) + agent->ranks * sizeof(ms_rank_line)
        && ms_shm_files_populate_control(agent->files, to, bytes)) {
        ms_shm_end_job(agent->files, MS_ABORT_RAISED, -1,
                       "no memory for what other hosts have told");
        return true;
    }
    ms_copy_words(to, data, bytes);
    for (uint32_t r = 0; r < agent->ranks; r++)
        if (ms_shm_is_here(control, r)) ms_shm_wake_line(&control->lines[r]);
    return true;
}
