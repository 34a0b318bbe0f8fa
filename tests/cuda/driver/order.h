/* order.h: whether the work of streams is ordered where it touches the same memory. The stand-in
 * runs work in one order; this tells whether another one would have been legal.
 *
 * Each stream has a clock: how much work of every stream is known to be over when its next work
 * begins. Waits for events join clocks, and so does the host, when it waits. Of every 4 bytes of
 * the GPU's memory the last write is kept, and the last read by each stream. */
#ifndef MOONSHARD_TEST_CUDA_ORDER_H
#define MOONSHARD_TEST_CUDA_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ORDER_STREAMS 40 /* an engine has 32 at most, and its device some */

typedef struct order_clock {
    uint32_t at[ORDER_STREAMS];
} order_clock;

/* Watching begins with MOONSHARD_STAND_IN_WATCH: "stop" ends the process at the first fault,
 * "count" only counts, and "full" is "stop" in long ranges (MOONSHARD_TEST_FULL=1), else nothing.
 * The variable is read when the driver begins. */
void order_look(void);
bool order_is_on(void);
/* A number for a stream, and back. */
unsigned order_open(void);
void order_close(unsigned stream);
void order_join(order_clock *into, const order_clock *from);
/* The next work of the stream begins, with what the host knew when it enqueued it. */
void order_begin(unsigned stream, const order_clock *host, const char *name);
const order_clock *order_now(unsigned stream);
/* The stream has waited for work with this clock. */
void order_wait(unsigned stream, const order_clock *for_clock);
/* The work that has begun touches memory, of the GPU or not. */
void order_touch(const void *address, size_t bytes, bool writes);
/* Memory of the GPU that is there, or no longer. */
void order_map(const void *address, size_t bytes);
void order_unmap(const void *address, size_t bytes);
/* The same, and the memory stays, so that a late use is found. */
void order_free(const void *address, size_t bytes);
/* Something else is wrong. */
void order_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
