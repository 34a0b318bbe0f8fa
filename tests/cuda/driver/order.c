/* order.c: see order.h. */
#include "order.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum { NAMES = 4096, PIECE = 4096, PIECES = 1 << 14 };

/* A piece of work: its stream, and its count there; 0: none. */
typedef uint32_t stamp;
enum { COUNT_BITS = 26 };
_Static_assert(ORDER_STREAMS < 1 << (32 - COUNT_BITS),
               "a stamp has room for all streams, and MANY");
#define MANY UINT32_MAX
static stamp stamp_of(unsigned stream, uint32_t count) { return stream << COUNT_BITS | count; }
static unsigned stream_of(stamp s) { return s >> COUNT_BITS; }
static uint32_t count_of(stamp s) { return s & ((1u << COUNT_BITS) - 1); }

static struct {
    bool used[ORDER_STREAMS];
    order_clock clock[ORDER_STREAMS];
    const char *name[ORDER_STREAMS][NAMES]; /* of the latest work, by its count */
    unsigned running;
    stamp now; /* what runs */
    unsigned faults;
    char text[512];
} order;

/* ------------------------------------------------------------------- faults */

enum { UNKNOWN, OFF, COUNTS, STOPS };
static _Atomic int mode;
void order_look(void)
{
    const char *text = getenv("MOONSHARD_STAND_IN_WATCH"), *full = getenv("MOONSHARD_TEST_FULL");
    if (text && strcmp(text, "full") == 0) text = full && strcmp(full, "1") == 0 ? "stop" : NULL;
    mode = !text ? OFF : strcmp(text, "stop") == 0 ? STOPS : COUNTS;
}
bool order_is_on(void)
{
    if (mode == UNKNOWN) order_look();
    return mode != OFF;
}

void order_fault(const char *format, ...)
{
    va_list arguments;
    if (!order_is_on()) return;
    va_start(arguments, format);
    vsnprintf(order.text, sizeof order.text, format, arguments);
    va_end(arguments);
    order.faults++;
    if (mode != STOPS) return;
    fprintf(stderr, "stand-in for the driver: %s\n", order.text);
    abort();
}

__attribute__((visibility("default"))) unsigned stand_in_faults(const char **text)
{
    unsigned faults = order.faults;
    *text = order.text;
    order.faults = 0;
    return faults;
}

/* ------------------------------------------------------------------- clocks */

unsigned order_open(void)
{
    for (unsigned i = 0; i < ORDER_STREAMS; i++)
        if (!order.used[i]) {
            order.used[i] = true;
            return i;
        }
    fprintf(stderr, "stand-in for the driver: more than %d streams\n", ORDER_STREAMS);
    abort();
}
void order_close(unsigned stream) { order.used[stream] = false; }

void order_join(order_clock *into, const order_clock *from)
{
    for (unsigned i = 0; i < ORDER_STREAMS; i++)
        if (into->at[i] < from->at[i]) into->at[i] = from->at[i];
}
const order_clock *order_now(unsigned stream) { return &order.clock[stream]; }
void order_wait(unsigned stream, const order_clock *for_clock)
{
    order_join(&order.clock[stream], for_clock);
}
void order_begin(unsigned stream, const order_clock *host, const char *name)
{
    order_clock *clock = &order.clock[stream];
    order_join(clock, host);
    clock->at[stream]++;
    order.name[stream][clock->at[stream] % NAMES] = name;
    order.running = stream;
    order.now = stamp_of(stream, clock->at[stream]);
}
static const char *name_of(unsigned stream, uint32_t count)
{
    const char *name = order.name[stream][count % NAMES];
    return name ? name : "something";
}

/* ------------------------------------------------------------------- memory */

/* Reads are those since the last write. A read that is ordered before a later one is not needed, as
 * what is ordered after the later one is ordered after both; so one read represents all, except
 * where two are not ordered: MANY. */
typedef struct cell {
    stamp written, read;
} cell;
/* The cells of one piece of memory, by its number; made when it is first touched. */
typedef struct piece {
    struct piece *next;
    uintptr_t number;
    cell cells[PIECE / 4];
    uint32_t **many; /* NULL, or for each cell NULL or the count of its last read by each stream */
} piece;
static piece *pieces[PIECES];

static void free_piece(piece *gone)
{
    for (size_t i = 0; gone->many && i < PIECE / 4; i++) free(gone->many[i]);
    free(gone->many);
    free(gone);
}

typedef struct range {
    uintptr_t begin, end;
} range;
static uint64_t generation = 1; /* changes with what is mapped or freed */
static range *mapped, *freed;
static size_t mapped_count, freed_count;

static bool is_mapped(uintptr_t address)
{
    for (size_t i = 0; i < mapped_count; i++)
        if (address >= mapped[i].begin && address < mapped[i].end) return true;
    return false;
}

void order_map(const void *address, size_t bytes)
{
    if (!order_is_on()) return;
    generation++;
    mapped = realloc(mapped, (mapped_count + 1) * sizeof *mapped);
    if (!mapped) abort();
    mapped[mapped_count++] = (range){ (uintptr_t)address, (uintptr_t)address + bytes };
}

/* What was written there is forgotten: the next user of the address begins again. */
void order_unmap(const void *address, size_t bytes)
{
    uintptr_t begin = (uintptr_t)address, end = begin + bytes;
    generation++;
    for (size_t i = 0; i < mapped_count;)
        if (mapped[i].begin >= begin && mapped[i].end <= end) mapped[i] = mapped[--mapped_count];
        else i++;
    for (size_t i = 0; i < PIECES && order_is_on(); i++)
        for (piece **at = &pieces[i]; *at;) {
            piece *one = *at;
            if (one->number * PIECE >= begin && one->number * PIECE < end) {
                *at = one->next;
                free_piece(one);
            } else at = &one->next;
        }
}

void order_free(const void *address, size_t bytes)
{
    generation++;
    freed = realloc(freed, (freed_count + 1) * sizeof *freed);
    if (!freed) abort();
    freed[freed_count++] = (range){ (uintptr_t)address, (uintptr_t)address + bytes };
}
static bool was_freed(uintptr_t address, bool writes)
{
    unsigned self = order.running;
    for (size_t i = 0; i < freed_count; i++)
        if (address >= freed[i].begin && address < freed[i].end) {
            order_fault("%s, on stream %u, %s %p, which was freed",
                        name_of(self, order.clock[self].at[self]), self,
                        writes ? "writes" : "reads", (void *)address);
            return true;
        }
    return false;
}

/* What was found last, by the piece's number; an entry of an earlier generation is void. */
static struct found {
    uintptr_t number;
    uint64_t generation;
    piece *piece; /* NULL: not the GPU's memory, and never was */
} cache[4096];

static piece *seek_piece(uintptr_t address)
{
    uintptr_t number = address / PIECE;
    piece **at = &pieces[number % PIECES];
    while (*at && (*at)->number != number) at = &(*at)->next;
    if (*at || !is_mapped(address)) return *at;
    *at = calloc(1, sizeof **at);
    if (!*at) abort();
    (*at)->number = number;
    return *at;
}

static struct found *found_at(uintptr_t address)
{
    return &cache[address / PIECE % (sizeof cache / sizeof *cache)];
}
static bool is_valid(const struct found *entry, uintptr_t address)
{
    return entry->number == address / PIECE && entry->generation == generation;
}

static piece *piece_of(uintptr_t address, bool writes)
{
    struct found *entry = found_at(address);
    if (is_valid(entry, address)) return entry->piece;
    piece *found = seek_piece(address);
    if (!found && was_freed(address, writes)) return NULL;
    *entry = (struct found){ address / PIECE, generation, found };
    return found;
}

/* Both touch the same memory, and nothing orders them. */
static void conflict(const void *address, bool writes, stamp other, bool wrote)
{
    unsigned self = order.running;
    order_fault("%s, on stream %u, %s %p, which %s, on stream %u, %s: nothing orders the two",
                name_of(self, order.clock[self].at[self]), self, writes ? "writes" : "reads",
                address, name_of(stream_of(other), count_of(other)), stream_of(other),
                wrote ? "writes" : "reads");
}

static inline bool is_over(stamp work)
{
    return count_of(work) <= order.clock[order.running].at[stream_of(work)];
}

static uint32_t *many_of(piece *in, size_t i)
{
    if (!in->many) in->many = calloc(PIECE / 4, sizeof *in->many);
    if (!in->many) abort();
    if (!in->many[i]) in->many[i] = calloc(ORDER_STREAMS, sizeof *in->many[i]);
    if (!in->many[i]) abort();
    return in->many[i];
}

/* The read of this work is one more of those that a later write must be ordered after. */
static void add_read(piece *in, size_t i)
{
    cell *one = &in->cells[i];
    if (one->read != MANY && is_over(one->read)) {
        one->read = order.now;
        return;
    }
    uint32_t *reads = many_of(in, i);
    if (one->read != MANY) reads[stream_of(one->read)] = count_of(one->read);
    reads[order.running] = count_of(order.now);
    one->read = MANY;
}

static void check_reads(piece *in, size_t i, const void *address)
{
    stamp read = in->cells[i].read;
    if (read != MANY && !is_over(read)) conflict(address, true, read, false);
    if (read != MANY) return;
    for (unsigned k = 0; k < ORDER_STREAMS; k++)
        if (in->many[i][k] > order.clock[order.running].at[k])
            conflict(address, true, stamp_of(k, in->many[i][k]), false);
    free(in->many[i]);
    in->many[i] = NULL;
}

/* What a work does once more to the same memory was checked: works run one after the other. */
static inline bool was_checked(const cell *one, bool writes)
{
    return writes ? one->written == order.now && !one->read : one->read == order.now;
}

static inline void touch(piece *in, uintptr_t address, bool writes)
{
    size_t i = address % PIECE / 4;
    cell *one = &in->cells[i];
    if (was_checked(one, writes)) return;
    if (!is_over(one->written)) conflict((const void *)address, writes, one->written, true);
    if (!writes) add_read(in, i);
    else {
        if (one->read) check_reads(in, i, (const void *)address);
        *one = (cell){ .written = order.now };
    }
}

static __attribute__((noinline)) void touch_all(uintptr_t begin, uintptr_t end, bool writes)
{
    for (uintptr_t at = begin / 4 * 4; at < end;) {
        piece *found = piece_of(at, writes);
        uintptr_t stop = (at / PIECE + 1) * PIECE;
        if (stop > end) stop = end;
        for (; found && at < stop; at += 4) touch(found, at, writes);
        at = stop;
    }
}

/* Most of what is touched is in the piece of memory that was touched before. */
void order_touch(const void *address, size_t bytes, bool writes)
{
    uintptr_t begin = (uintptr_t)address, end = begin + bytes;
    const struct found *entry = found_at(begin);
    if (!bytes) return;
    if (is_valid(entry, begin) && (begin ^ (end - 1)) < PIECE) {
        for (uintptr_t at = begin / 4 * 4; entry->piece && at < end; at += 4)
            touch(entry->piece, at, writes);
        return;
    }
    touch_all(begin, end, writes);
}
