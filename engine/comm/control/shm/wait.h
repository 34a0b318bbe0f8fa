/* wait.h: how a task waits for other ranks. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_WAIT_H
#define MOONSHARD_COMM_CONTROL_SHM_WAIT_H

#include "comm/control/shm/bell.h"
#include "comm/control/shm/state.h"

/* What a task does for other ranks each time that it looks whether its own peers have come, and for
 * which members of its group it waits. */
typedef struct ms_helper ms_helper;
struct ms_helper {
    void (*turn)(ms_helper *helper);
    /* After a wait in vain: a call that does not return on this rank, or NULL; it takes 100 ms. */
    const char *(*hangs)(ms_helper *helper);
    uint64_t due_ns;   /* a sleeper takes its next turn by then */
    const bool *among; /* by member: who is waited for; NULL: all */
};

/* What a wait is for, as its caller defines it. reached: whether it is there; hopeless: looks
 * whether it can never come, and if so ends the job; missing: the world rank of one that has not
 * come. */
typedef struct ms_wait_kind {
    bool (*reached)(ms_wait *wait);
    void (*hopeless)(ms_wait *wait);
    uint32_t (*missing)(ms_wait *wait);
} ms_wait_kind;

struct ms_wait {
    const ms_wait_kind *kind;
    ms_shm_rank *self;
    const ms_comm_args *args;
    ms_helper *helper; /* or NULL */
    uint64_t target;
    uint32_t cursor;
    uint64_t looked; /* the last round of deadlock.c in which it has */
};
/* false: the job has ended. */
bool ms_shm_wait(ms_wait *wait);
static inline void ms_wait_turn(ms_wait *wait)
{
    if (wait->helper) wait->helper->turn(wait->helper);
}
static inline bool ms_wait_is_for(const ms_wait *wait, uint32_t member)
{
    return !wait->helper || !wait->helper->among || wait->helper->among[member];
}
/* The time limit has passed: ends the job, or reports to the supervisor that `missing` has not
 * come. */
void ms_shm_give_up(ms_shm_rank *self, const ms_comm_args *args, uint32_t missing,
                    uint64_t progress, uint64_t waited_ns);
/* Leaves the job's cause as this task's error. */
ms_task_result ms_shm_fail(ms_run *run, ms_shm_rank *self, const ms_comm_args *args);
/* Ends the job because this rank's task met an error of its own. */
ms_task_result ms_shm_raise(ms_run *run, ms_shm_rank *self, const ms_comm_args *args,
                            ms_status status, const char *what);

#endif
