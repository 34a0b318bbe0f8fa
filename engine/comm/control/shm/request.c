/* request.c: requests of a supervisor to all ranks. All ranks meet a request between the same two
 * steps, without a collective and without waiting.
 *
 * Before each step a rank writes the step's serial number, then looks for a request. A rank that
 * sees an undecided request proposes the number after the highest that any rank has written; the
 * first proposal is the decision. A rank that saw no request had written its number before, so the
 * decision comes after that number. A rank that saw the request obeys the decision. All accesses
 * are sequentially consistent.
 *
 * Over several nodes the agents decide (comm/control/cluster/coordinator.c). Before that, each
 * closes a gate, at which ranks wait before their next step, and only then reads the numbers of its
 * ranks. */
#include "comm/control/shm/request.h"

#include <string.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/straggler.h"

#define MS_GATE_LOOK_NS 50000000 /* a rank at the gate looks at least this often */

/* A new request is raised only after all ranks have met the one before: `raised` holds only the
 * last value. A request that comes earlier is dropped. Called from signal handlers, so it takes no
 * lock and does not retry. Ranks that have finished meet nothing any more and are not waited for.
 */
void ms_shm_request(ms_rendezvous *rendezvous, ms_request kind, uint8_t value)
{
    const ms_shm_files *files = ms_shm_files_of(rendezvous);
    ms_control_file *control = files->control;
    uint32_t raised = atomic_load(&control->requests[kind].raised);
    if (control->nodes > 1) {
        atomic_store(&control->requests[kind].wanted, value);
        files->replication->stir(files->replication);
        return;
    }
    for (uint32_t r = 0; r < control->ranks; r++) {
        ms_rank_line *line = &control->lines[r];
        if (atomic_load(&line->met[kind]) != raised >> 8 && !atomic_load(&line->finished)) return;
    }
    atomic_compare_exchange_strong(&control->requests[kind].raised, &raised,
                                   ((raised >> 8) + 1) << 8 | value);
}

/* Read after the request was seen; see the top of the file. */
static uint64_t highest_serial(const ms_control_file *control)
{
    uint64_t highest = 0;
    for (uint32_t r = 0; r < control->ranks; r++) {
        uint64_t serial = atomic_load(&control->lines[r].serial);
        if (serial > highest) highest = serial;
    }
    return highest;
}

/* The request of this kind that all ranks meet before `serial`, or 0. The loop ends: either this
 * proposal wins, or another rank's is read. */
static uint8_t meet(ms_control_file *control, ms_rank_line *own, ms_request kind, uint64_t serial)
{
    ms_request_line *line = &control->requests[kind];
    uint32_t raised = atomic_load(&line->raised), count = raised >> 8;
    if (atomic_load(&own->met[kind]) == count) return 0;
    uint64_t decided = atomic_load(&line->decided);
    while (decided >> MS_SERIAL_BITS != count) {
        uint64_t proposed = (uint64_t)count << MS_SERIAL_BITS | (highest_serial(control) + 1);
        if (atomic_compare_exchange_strong(&line->decided, &decided, proposed)) decided = proposed;
    }
    if (serial < (decided & (((uint64_t)1 << MS_SERIAL_BITS) - 1))) return 0;
    atomic_store(&own->met[kind], count);
    return (uint8_t)raised;
}

/* Until the nodes have decided about a request; nothing to wait for in the usual case. */
static void pass_gate(ms_shm_rank *self, const ms_request_line *line)
{
    while (atomic_load(&line->gate) && !ms_shm_aborted(self)) ms_shm_nap(self, MS_GATE_LOOK_NS);
}

/* The serial number is stored before requests are read. The order is what the protocol rests on: a
 * rank that sees no request has shown its number to every rank that sees one later. */
void ms_shm_step(ms_comm *comm, uint64_t serial, int64_t step, uint8_t values[MS_REQUESTS])
{
    ms_shm_rank *self = comm->control_state;
    ms_rank_line *own = &self->control->lines[self->rank];
    const ms_os *os = self->files->base.os;
    ms_straggler_step(self, os->monotonic_ns(os->user));
    atomic_store(&own->step, step + 1);
    atomic_store(&own->serial, serial);
    ms_activity_done(&own->activity);
    for (int kind = 0; kind < MS_REQUESTS; kind++) {
        pass_gate(self, &self->control->requests[kind]);
        values[kind] = meet(self->control, own, (ms_request)kind, serial);
    }
}

/* The first folder counts: all ranks of a job use the same one. */
void ms_shm_set_folder(ms_comm *comm, const char *folder)
{
    ms_shm_rank *self = comm->control_state;
    uint32_t none = 0;
    size_t bytes = strlen(folder) + 1;
    if (bytes > sizeof self->control->folder
        || !atomic_compare_exchange_strong(&self->control->folder_set, &none, 1))
        return;
    memcpy(self->control->folder, folder, bytes);
    atomic_store(&self->control->folder_set, 2);
    ms_shm_tell(self, self->control->folder, bytes);
    ms_shm_tell(self, &self->control->folder_set, sizeof self->control->folder_set);
}

/* Empty while the folder is not known. */
const char *ms_shm_folder(const ms_rendezvous *rendezvous, char *text, size_t bytes)
{
    const ms_control_file *control = ms_shm_files_of(rendezvous)->control;
    size_t length = atomic_load(&control->folder_set) == 2
                        ? strnlen(control->folder, sizeof control->folder - 1)
                        : 0;
    if (length + 1 > bytes) length = 0;
    memcpy(text, control->folder, length);
    text[length] = '\0';
    return text;
}
