/* work.h: what the files of the stand-in share: work, streams, events. */
#ifndef MOONSHARD_TEST_CUDA_WORK_H
#define MOONSHARD_TEST_CUDA_WORK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "driver.h"
#include "order.h"

/* The prototypes are those of cuda.h, which it does without. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#define API __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    ALREADY_REGISTERED = 712,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    NOT_CAPTURED = -1 /* for capture_wait only */
};

typedef struct capture capture;
typedef struct program program;
typedef struct work work;

/* The last work of a capture that something represents. */
typedef struct front {
    uint64_t capture; /* its number; 0: none */
    work **last;
    unsigned count;
} front;

typedef struct event {
    struct event *next;
    uint64_t records, passed; /* how often it was recorded, and passed */
    uint64_t ns;
    order_clock clock; /* of what it represents */
    front front;       /* the same, where it was last recorded in a capture */
} event;

typedef enum work_kind { KERNEL, COPY, CALL, RECORD, WAIT, OTHER, PROGRAM } work_kind;
struct work {
    work *next;
    work_kind kind;
    stand_in_kernel *kernel;
    unsigned blocks[3], threads[3], shared_bytes;
    void *memory; /* arguments of a kernel, or bytes that a copy brings along; its own */
    void *to;
    const void *from;
    size_t bytes;
    bool (*ready)(void *); /* of a library's work */
    void (*call)(void *);
    void *argument;
    /* Of a library's work in a graph, whose argument these two get: the argument of a launch; the
     * graph is gone. */
    void *(*launched)(void *);
    void (*gone)(void *);
    event *event;
    uint64_t record;
    const char *name;
    order_clock host; /* what the host knew to be over */
    /* In a graph: what comes before it, and its place in the graph and among its streams. */
    work **after;
    unsigned after_count, index, lane;
    /* The launch of a program: which one, and what is not done yet. */
    program *program;
    uint64_t launch;
    work **kernels; /* by place in the graph: with the arguments of this launch */
    unsigned left;
    bool *done, begun;
    order_clock start, *ends;
};

typedef struct stream {
    struct stream *next;
    work *first, **last;
    unsigned number; /* of order.h */
    int priority;
    pthread_t owner;  /* the thread that has made it */
    capture *capture; /* NULL: none */
    front front;
    unsigned lane;
} stream;
/* All of it is guarded by the lock. */
extern pthread_mutex_t stand_in_lock;
extern stream *streams;

/* driver.c */
extern struct stand_in {
    const char *fails;
    int fails_with, version, gpus;
    bool initialized;
    _Atomic int stopped; /* read without the lock, too, as `left` */
    _Atomic unsigned left;
} driver;
extern __thread void *current; /* context */
void count_call(const char *call);
/* Every call begins with one of these. 0: it goes on. relaxed, never: calls that a capture does not
 * see are refused meanwhile: unless the thread's mode is relaxed, or in any mode. */
int begin(const char *call);
int begin_in_context(const char *call);
int begin_relaxed(const char *call, const char *words);
int begin_never(const char *call, const char *words);
void count_left(int change);

/* work.c */
extern order_clock host; /* what the host knows to be over */
extern uint64_t seed;
uint64_t draw(void);
work *add_work(void *to, work_kind kind);
void take_away(stream *on);
bool any_has_work(void);
/* One piece of work of a stream that is chosen at random; false: there is none that can run. */
bool step_any(void);
/* The same for a thread that waits; false: nothing will ever happen again. */
bool go_on(void);
/* MOONSHARD_STAND_IN_WAITS: until no stream has work. */
void await_all(void);
void free_work(work *gone);
void carry_out(const work *now);

/* memory.c */
bool is_pinned(const void *memory, size_t bytes);
/* What a capture copies from or to the host is pinned: what became of other memory is not known. */
int check_pinned(const stream *on, const void *memory);
/* No part of it is in another piece of registered memory than the rest, or in none. */
bool is_in_one_piece(const void *memory, size_t bytes);

/* command.c */
/* What a kernel is launched with; the arguments are copied. */
void set_kernel(work *made, const void *function, const unsigned blocks[3],
                const unsigned threads[3], unsigned shared_bytes, const void *arguments);

/* graph.c. The work goes to the capture that the stream is part of. */
void capture_work(stream *on, work *made);
/* A rule is broken: the capture is worth nothing any more. Answers CAPTURE_UNSUPPORTED. */
int capture_broken(capture *broken, const char *words);
/* Of a call that this thread may not make while it captures. */
int capture_forbids(const char *words, bool in_any_mode);
/* NOT_CAPTURED: neither is part of a capture. */
int capture_wait(stream *on, event *for_event);
/* False: the stream is part of none. */
bool capture_record(stream *on, event *recorded);
/* The host asks for an event, or waits for one. */
int capture_asks(const event *asked);
/* Carries out one piece of work of the program; false: there is none that can run. */
bool program_step(unsigned number, work *launch);
/* Whether a library's work is part of it. */
bool program_waits(const work *launch);
void program_over(work *launch);
/* Whether work of a graph copies from this memory of the host, or to it. */
bool program_uses(const void *memory, size_t bytes);

#endif
