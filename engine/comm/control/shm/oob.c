/* oob.c: numbers out of band go from rank to rank through the control file: each member copies
 * a piece of its numbers to its line, all wait for each other, and each takes what it needs from
 * all lines. While some still read one half of the lines, the others fill the other half.
 *
 * Numbers are added in the order of ranks, floats in f32: the same bits on every rank, and those of
 * a transport. */
#include "comm/control/shm/oob.h"

#include <math.h>
#include <string.h>

#include "comm/control/shm/ledger.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"

/* One piece: `bytes` of each member's numbers, from byte `done` on. */
typedef struct piece {
    uint64_t done;
    size_t bytes;
    uint32_t half;
} piece;

/* Whether this member's numbers are part of the result. */
static bool brings(const ms_comm_args *args, uint32_t member)
{
    return args->kind != MS_BROADCAST || member == args->root;
}

/* The half of a member's line that has this piece. */
static const char *line_of(const ms_shm_rank *self, const ms_comm_args *args, uint32_t member,
                           const piece *p)
{
    return ms_ledger_line(self, args, member)->shared[p->half];
}

#define COMBINE(type, sum, max)                                     \
    do {                                                            \
        type a, b;                                                  \
        for (size_t i = 0; i < p->bytes; i += sizeof a) {           \
            memcpy(&a, to + i, sizeof a);                           \
            memcpy(&b, from + i, sizeof b);                         \
            a = args->op == MS_REDUCE_OP_SUM ? (type)(sum) : (max); \
            memcpy(to + i, &a, sizeof a);                           \
        }                                                           \
    } while (0)

/* to = to op from. Integers wrap; a NaN of any rank is the greatest. */
static void combine(const ms_comm_args *args, const piece *p, char *to, const char *from)
{
    switch (args->dtype) {
    case MS_F32: COMBINE(float, a + b, isnan(a) || a > b ? a : b); break;
    case MS_I64: COMBINE(int64_t, (uint64_t)a + (uint64_t)b, a > b ? a : b); break;
    case MS_I32: COMBINE(int32_t, (uint32_t)a + (uint32_t)b, a > b ? a : b); break;
    default: COMBINE(uint8_t, a + b, a > b ? a : b); break;
    }
}

_Static_assert(sizeof(ms_split_words) <= MS_SHARED_BYTES, "a split is one piece");

/* The greatest of the first words, the union of the bits of the others. */
static void combine_splits(char *to, const char *from)
{
    uint64_t mine[sizeof(ms_split_words) / 8], theirs[sizeof(ms_split_words) / 8];
    memcpy(mine, to, sizeof mine);
    memcpy(theirs, from, sizeof theirs);
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++) {
        if (i >= MS_SPLIT_GREATEST) mine[i] |= theirs[i];
        else if (theirs[i] > mine[i]) mine[i] = theirs[i];
    }
    memcpy(to, mine, sizeof mine);
}

/* Members are taken in the order of ranks, which fixes the rounding of sums. The first member's
 * numbers are copied, the others combined. Every member computes the whole result for itself: the
 * numbers are few, and all get the same bits. */
static void take(const ms_shm_rank *self, const ms_comm_args *args, const piece *p)
{
    const ms_group *group = args->group;
    for (uint32_t m = 0; m < group->size; m++) {
        const char *from = line_of(self, args, m, p);
        if (args->kind == MS_ALL_GATHER)
            memcpy(args->out + m * args->payload_bytes + p->done, from, p->bytes);
        else if (!brings(args, m)) continue;
        else if (args->kind == MS_SPLIT && m > 0) combine_splits(args->out, from);
        else if (args->kind == MS_ALL_REDUCE && m > 0) combine(args, p, args->out + p->done, from);
        else memcpy(args->out + p->done, from, p->bytes);
    }
}

/* One phase for each piece. A half is written again two pieces later: all members have passed the
 * phase in between by then, so none still reads it. Numbers of a piece are a multiple of all
 * element sizes, because MS_SHARED_BYTES is. */
static ms_task_result exchange(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_shm_rank *self = args->group->comm->control_state;
    ms_member_line *own = ms_ledger_line(self, args, args->group->rank);
    uint64_t phases = 0;
    if (!ms_ledger_enter(self, args)) return ms_shm_fail(run, self, args);
    for (piece p = { 0 }; p.done < args->payload_bytes; p.done += p.bytes) {
        uint64_t rest = args->payload_bytes - p.done;
        p.bytes = rest < MS_SHARED_BYTES ? (size_t)rest : MS_SHARED_BYTES;
        p.half = phases & 1;
        if (brings(args, args->group->rank)) {
            memcpy(own->shared[p.half], args->in + p.done, p.bytes);
            ms_shm_tell(self, own->shared[p.half], p.bytes);
        }
        if (!ms_ledger_phase(self, args, ++phases, NULL)) return ms_shm_fail(run, self, args);
        take(self, args, &p);
    }
    return ms_ledger_leave(self, args, phases + 1, NULL) ? MS_TASK_DONE
                                                         : ms_shm_fail(run, self, args);
}

const ms_task ms_shm_tasks[MS_COLLECTIVES] = MS_SHM_TASKS(exchange);
