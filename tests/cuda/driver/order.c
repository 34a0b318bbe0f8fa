/* order.c: see order.h. */
#include "order.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum { NAMES = 4096, PIECE = 4096, PIECES = 1 << 14 };

static struct {
    bool used[ORDER_STREAMS];
    order_clock clock[ORDER_STREAMS];
    const char *name[ORDER_STREAMS][NAMES]; /* of the latest work, by its count */
    unsigned running;
    unsigned faults;
    char text[512];
} order;

/* ------------------------------------------------------------------- faults */

static const char *mode(void) { return getenv("MOONSHARD_STAND_IN_WATCH"); }
bool order_is_on(void) { return mode() != NULL; }

void order_fault(const char *format, ...)
{
    va_list arguments;
    if (!order_is_on()) return;
    va_start(arguments, format);
    vsnprintf(order.text, sizeof order.text, format, arguments);
    va_end(arguments);
    order.faults++;
    if (strcmp(mode(), "stop") != 0) return;
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
}
static const char *name_of(unsigned stream, uint32_t count)
{
    const char *name = order.name[stream][count % NAMES];
    return name ? name : "something";
}

/* ------------------------------------------------------------------- memory */

/* Counts are of the work of its stream; 0: none. Reads are those since the last write. A read that
 * is ordered before a later one is not needed, as what is ordered after the later one is ordered
 * after both; so one read stands for all, except where two are not ordered. */
typedef struct cell {
    uint32_t written, read;
    uint8_t writer, reader;
    uint32_t *reads; /* of each stream, where no single read stands for all; else NULL */
} cell;
/* The cells of one piece of memory, by its number; made when it is first touched. */
typedef struct piece {
    struct piece *next;
    uintptr_t number;
    cell cells[PIECE / 4];
} piece;
static piece *pieces[PIECES];

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

/* What was written there is forgotten: the next user of the address begins anew. */
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
                for (size_t k = 0; k < PIECE / 4; k++) free(one->cells[k].reads);
                free(one);
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
static void conflict(const void *address, bool writes, unsigned other, uint32_t count, bool wrote)
{
    unsigned self = order.running;
    order_fault("%s, on stream %u, %s %p, which %s, on stream %u, %s: nothing orders the two",
                name_of(self, order.clock[self].at[self]), self, writes ? "writes" : "reads",
                address, name_of(other, count), other, wrote ? "writes" : "reads");
}

/* The read of this work is one more of those that a later write must be ordered after. */
static void add_read(cell *one, unsigned self, const order_clock *clock)
{
    if (!one->reads && one->read > clock->at[one->reader]) {
        one->reads = calloc(ORDER_STREAMS, sizeof *one->reads);
        if (!one->reads) abort();
        one->reads[one->reader] = one->read;
    }
    if (one->reads) one->reads[self] = clock->at[self];
    one->read = clock->at[self];
    one->reader = (uint8_t)self;
}

static void check_reads(const cell *one, const void *address, const order_clock *clock)
{
    if (one->reads) {
        for (unsigned i = 0; i < ORDER_STREAMS; i++)
            if (one->reads[i] > clock->at[i]) conflict(address, true, i, one->reads[i], false);
    } else if (one->read > clock->at[one->reader])
        conflict(address, true, one->reader, one->read, false);
}

/* What a work does once more to the same memory was checked: works run one after the other. */
static inline bool was_checked(const cell *one, bool writes)
{
    unsigned self = order.running;
    uint32_t now = order.clock[self].at[self];
    if (!writes) return one->read == now && one->reader == self;
    return one->written == now && one->writer == self && !one->read;
}

static void touch(cell *one, const void *address, bool writes)
{
    unsigned self = order.running;
    const order_clock *clock = &order.clock[self];
    uint32_t now = clock->at[self];
    if (was_checked(one, writes)) return;
    if (one->written > clock->at[one->writer])
        conflict(address, writes, one->writer, one->written, true);
    if (!writes) {
        add_read(one, self, clock);
        return;
    }
    check_reads(one, address, clock);
    free(one->reads);
    *one = (cell){ .written = now, .writer = (uint8_t)self };
}

static __attribute__((noinline)) void touch_all(uintptr_t begin, uintptr_t end, bool writes)
{
    uintptr_t at = begin / 4 * 4;
    while (at < end) {
        piece *found = piece_of(at, writes);
        uintptr_t stop = (at / PIECE + 1) * PIECE;
        if (stop > end) stop = end;
        for (; found && at < stop; at += 4)
            touch(&found->cells[at % PIECE / 4], (const void *)at, writes);
        at = stop;
    }
}

/* Most of what a kernel touches is its own stack, or the same memory again. */
void order_touch(const void *address, size_t bytes, bool writes)
{
    uintptr_t begin = (uintptr_t)address, end = begin + bytes;
    const struct found *entry = found_at(begin);
    if (bytes && is_valid(entry, begin) && begin / PIECE == (end - 1) / PIECE) {
        if (!entry->piece) return;
        if (begin / 4 == (end - 1) / 4
            && was_checked(&entry->piece->cells[begin % PIECE / 4], writes))
            return;
    }
    touch_all(begin, end, writes);
}
