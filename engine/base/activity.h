/* activity.h: the record of what one rank gets done; see base.h for who writes and who reads it. */
#ifndef MOONSHARD_BASE_ACTIVITY_H
#define MOONSHARD_BASE_ACTIVITY_H

#include <stdalign.h>
#include <stdatomic.h>

#include "moonshard/base.h"

/* It may be in memory that ranks share. What the host writes at every call and what other threads
 * write are on different cache lines, 128 bytes apart because processors may fetch lines in pairs;
 * otherwise each task that ends would take the host's line away. */
struct ms_activity {
    alignas(128) _Atomic uint64_t calls; /* host: entered */
    _Atomic uint32_t version;            /* host: of line; odd while it is being written */
    /* Number of the last question received and of the last one answered. Written by the host
     * thread, also in a signal handler. */
    _Atomic uint32_t heard, answered;
    _Atomic uint32_t place;             /* ms_whereabouts at the last question heard */
    _Atomic int32_t thread;             /* host: the system's number of its thread */
    char line[MS_LINE_BYTES];           /* host: where its script was last seen */
    alignas(128) _Atomic uint64_t done; /* any thread: tasks run, bytes moved, long calls left */
    _Atomic uint32_t busy;              /* host: long calls that it is inside of */
    _Atomic uint32_t asked;             /* others: the last question */
};

#endif
