/* call_record.c: what a rank writes down of its calls: its slots of the order ledger and its flight
 * record. */
#include "comm/control/shm/call_record.h"

#include <string.h>

#include "comm/flight.h"

/* Two slots are enough: no rank enters call n + 2 before all have left n + 1, so none reads the
 * slot of n any more. */
const ms_ledger_entry *ms_ledger_entry_of(const ms_shm_rank *self, const ms_comm_args *args,
                                          uint32_t member)
{
    return &ms_ledger_line(self, args, member)->slots[args->number & 1];
}

/* seq is left alone; the caller stores it when the slot may be read. heap_offset is plus 1, so that
 * 0 means "not in the heap"; peers add it to where they have mapped this rank's heap. */
void ms_ledger_write(ms_shm_rank *self, const ms_comm_args *args, ms_ledger_entry *slot)
{
    const ms_os *os = self->files->base.os;
    const char *heap = self->files->heaps[self->rank].memory;
    /* Only the beginning is compared: a tensor that begins in the heap ends there, as the arena
     * gave it. */
    bool in_heap = args->in && args->in >= heap && args->in < heap + self->files->heap_bytes;
    slot->heap_offset = in_heap ? (uint64_t)(args->in - heap) + 1 : 0;
    slot->counts_hash = args->counts_hash;
    slot->order = args->order;
    slot->value = args->value;
    slot->in = (uint64_t)(uintptr_t)args->in;
    slot->out = (uint64_t)(uintptr_t)args->out;
    slot->counts = (uint64_t)(uintptr_t)args->counts;
    slot->factor = args->factor;
    slot->graph = args->graph;
    slot->call = ms_flight_of(args);
    slot->call.entered_ns = os->monotonic_ns(os->user);
}

/* The counter is atomic, because several streams of a rank enter calls at the same time. The line
 * is the rank's own, but a supervisor reads it when the rank has died. */
uint64_t ms_ledger_flight(ms_shm_rank *self, const ms_flight *call)
{
    ms_rank_line *line = &self->control->lines[self->rank];
    uint64_t place = atomic_fetch_add(&line->flights, 1);
    line->flight[place % MS_FLIGHTS] = *call;
    ms_activity_done(&line->activity);
    return place;
}

/* left_ns marks the call as over, for reports and deadlock detection. Another call may have its
 * place by now. */
void ms_ledger_landed(ms_shm_rank *self, uint64_t flight)
{
    const ms_os *os = self->files->base.os;
    ms_rank_line *line = &self->control->lines[self->rank];
    if (atomic_load(&line->flights) - flight <= MS_FLIGHTS)
        line->flight[flight % MS_FLIGHTS].left_ns = os->monotonic_ns(os->user);
    ms_activity_done(&line->activity);
}

/* Labels, but those of pairs, script lines and factors may differ between ranks; everything that
 * decides which bytes move must not. The order of calls is compared as well, so two groups that
 * share members find different orders. */
bool ms_ledger_agree(const ms_ledger_entry *a, const ms_ledger_entry *b)
{
    const ms_flight *x = &a->call, *y = &b->call;
    if (x->kind != y->kind || x->op != y->op || x->dtype != y->dtype || x->channel != y->channel
        || x->root != y->root || x->bucket != y->bucket || x->group != y->group
        || x->number != y->number || a->counts_hash != b->counts_hash || a->order != b->order
        || a->graph != b->graph)
        return false;
    /* With counts, the ranks may send different amounts. */
    return x->count == y->count || (x->kind == MS_ALL_TO_ALL && a->counts_hash);
}

/* The number is not compared: both sides have counted it for this pair. */
bool ms_ledger_agree_pair(const ms_ledger_entry *a, const ms_ledger_entry *b)
{
    const ms_flight *x = &a->call, *y = &b->call;
    return x->dtype == y->dtype && x->count == y->count && x->group == y->group
           && a->counts_hash == b->counts_hash;
}

/* The same fields as in ms_ledger_agree and ms_ledger_agree_pair; a field that is added there must
 * be added here. */
uint64_t ms_ledger_hash(const ms_comm_args *args)
{
    if (ms_kind_is_pair(args->kind)) {
        uint64_t pair[] = { args->dtype, args->count, args->group->id, args->counts_hash };
        return ms_hash(pair, sizeof pair, 0);
    }
    bool free_count = args->kind == MS_ALL_TO_ALL && args->by_counts;
    uint64_t root = args->rooted ? args->root : UINT64_MAX;
    uint64_t count = free_count ? 0 : args->count;
    uint64_t fields[] = { args->kind,      args->op,     args->dtype,
                          args->channel,   root,         (uint64_t)(int64_t)args->bucket,
                          args->group->id, args->number, args->counts_hash,
                          args->order,     count,        args->graph };
    return ms_hash(fields, sizeof fields, 0);
}

/* Groups are small, and this is asked for reports and slow waits. */
uint32_t ms_ledger_member(const ms_group *group, uint32_t rank)
{
    uint32_t at = 0;
    while (at < group->size && group->members[at] != rank) at++;
    return at;
}

/* Reads the fields between two looks at seq: if it is the same at both, they were not written in
 * between. */
bool ms_ledger_read(const ms_published *from, uint64_t number, ms_ledger_entry *out)
{
    uint64_t words[MS_CALL_WORDS];
    if (atomic_load(&from->seq) != number) return false;
    for (size_t i = 0; i < MS_CALL_WORDS; i++)
        words[i] = atomic_load_explicit(&from->words[i], memory_order_acquire);
    memcpy(out, words, sizeof *out);
    return atomic_load(&from->seq) == number;
}

/* The published fields come first, since they are there before the task enters the call. */
bool ms_ledger_call(ms_member_line *line, uint64_t number, ms_ledger_entry *out)
{
    const ms_ledger_entry *entered = &line->slots[number & 1];
    if (ms_ledger_read(&line->published[number % MS_CALLS_SHOWN], number, out)) return true;
    if (atomic_load(&entered->seq) != number) return false;
    memcpy(out, entered, sizeof *out);
    return true;
}
