/* cpu.h: the CPU executor: one thread per stream and a team of helpers for work inside a task. */
#ifndef MOONSHARD_EXEC_CPU_H
#define MOONSHARD_EXEC_CPU_H

#include "exec/engine.h"

#define MS_SCRATCH_SLOTS 4

struct ms_thread {
    ms_engine *engine;
    uint32_t index;
    struct {
        void *memory;
        size_t bytes;
    } scratch[MS_SCRATCH_SLOTS];
};

struct ms_run {
    ms_engine *engine;
    ms_stream *stream;
    ms_thread *thread;
    const ms_task *task;
    uint64_t seq;
    uint32_t script;
    bool told; /* ms_run_fail was called */
};

/* The helpers of one engine. A task opens a job; helpers join it while tiles are left. The ticket
 * decides who is in: generation, an open bit, and how many joined; who has not joined when the
 * tiles are gone is not waited for. */
typedef struct ms_team {
    ms_engine *engine;
    uint32_t helper_count;
    ms_thread *helpers;
    ms_os_thread **threads;
    ms_spin spin;
    ms_word busy; /* a stream uses the team */
    ms_tile_function tile;
    void *context;
    uint32_t tiles;
    alignas(128) ms_word next; /* tile to be taken */
    alignas(128) _Atomic uint64_t ticket;
    alignas(128) ms_word finished; /* helpers that are done with this job */
    ms_bell idle;                  /* rings for new jobs */
    ms_bell complete;              /* rings when a helper is done */
    ms_word quit;
} ms_team;

typedef struct ms_worker {
    ms_stream *stream;
    ms_os_thread *thread;
    ms_thread own;
} ms_worker;

typedef struct ms_cpu {
    ms_team *team;
    ms_spin spin;    /* of stream workers */
    ms_word threads; /* indices handed out */
} ms_cpu;

ms_status ms_team_open(ms_engine *engine, ms_team **out);
void ms_team_close(ms_team *team);
void ms_thread_close(ms_thread *thread);

#endif
