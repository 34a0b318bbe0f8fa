/* team.c: helpers that share the tiles of one task at a time. */
#include "exec/cpu/team.h"

#include "exec/cpu/task.h"

#define MS_TICKET_OPEN ((uint64_t)1 << 31)
#define MS_TICKET_JOINED (MS_TICKET_OPEN - 1)

/* Tiles are taken one by one from a counter, so a slow thread takes fewer. The order is relaxed
 * because the ticket and `finished` order the data of a job. A tile must be large against this one
 * atomic addition, which ms_tiles and its like see to. */
static void take_tiles(ms_team *team, ms_thread *thread)
{
    for (;;) {
        uint32_t tile = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
        if (tile >= team->tiles) return;
        team->tile(team->context, tile, thread);
    }
}

/* A helper joins by a compare and exchange that raises the ticket. It fails if the job has closed
 * or another helper has joined meanwhile; once it succeeds, the task waits for this helper. A
 * helper joins each generation at most once. The bell is read before the ticket, so a job that
 * opens in between is not slept through. The number of the generation is in the upper half of the
 * ticket, so an old ticket never looks like a new one. */
static void helper_run(void *argument)
{
    ms_thread *thread = argument;
    ms_team *team = ms_cpu_of(thread->engine)->team;
    uint64_t generation = 0;
    for (;;) {
        uint32_t seen = ms_bell_read(&team->idle);
        if (atomic_load(&team->quit)) return;
        uint64_t ticket = atomic_load(&team->ticket);
        /* No job, or one that this helper has worked on already. */
        if (!(ticket & MS_TICKET_OPEN) || ticket >> 32 == generation) {
            ms_bell_wait(&team->idle, seen, team->spin);
            continue;
        }
        if (!atomic_compare_exchange_strong(&team->ticket, &ticket, ticket + 1)) continue;
        generation = ticket >> 32;
        take_tiles(team, thread);
        atomic_fetch_add(&team->finished, 1);
        ms_bell_ring(&team->complete);
    }
}

/* engine->options.threads counts the worker too, so there is one helper fewer. A team without
 * helpers is legal and runs all tiles on the worker. */
ms_status ms_team_open(ms_engine *engine, ms_cpu *cpu)
{
    const ms_os *os = engine->context.os;
    void *memory = NULL, *helpers = NULL, *threads = NULL;
    uint32_t wanted = engine->options.threads - 1;
    ms_status status = ms_allocate(&engine->context, sizeof(ms_team), "helpers", &memory);
    if (!status)
        status =
            ms_allocate(&engine->context, (wanted + 1) * sizeof(ms_thread), "helpers", &helpers);
    if (!status)
        status = ms_allocate(&engine->context, (wanted + 1) * sizeof(ms_os_thread *), "helpers",
                             &threads);
    if (status) {
        ms_release(&engine->context, memory);
        ms_release(&engine->context, helpers);
        return status;
    }
    ms_team *team = memory;
    team->engine = engine;
    team->helpers = helpers;
    team->threads = threads;
    team->spin = ms_spin_choose(engine->options.crowded, true);
    cpu->spin = ms_spin_choose(engine->options.crowded, false);
    cpu->team = team;
    /* helper_count grows with each thread that has started, so that ms_team_close joins just
     * those. */
    for (; team->helper_count < wanted; team->helper_count++) {
        ms_thread *helper = &team->helpers[team->helper_count];
        helper->engine = engine;
        helper->index = atomic_fetch_add(&cpu->threads, 1);
        int failed = os->thread_start(os->user, "ms-helper", helper_run, helper,
                                      &team->threads[team->helper_count]);
        if (failed) {
            ms_team_close(team);
            cpu->team = NULL;
            return ms_fail_os(&engine->context, failed, "cannot start a helper thread",
                              "ms-helper");
        }
        if (engine->options.pin)
            os->thread_pin(os->user, team->threads[team->helper_count], team->helper_count + 1);
    }
    return MS_OK;
}

/* No job is open any more; helpers see `quit` after the bell. It also frees a team of which only
 * some threads could be started. */
void ms_team_close(ms_team *team)
{
    ms_context *context = &team->engine->context;
    atomic_store(&team->quit, 1);
    ms_bell_ring(&team->idle);
    for (uint32_t i = 0; i < team->helper_count; i++) {
        context->os->thread_join(context->os->user, team->threads[i]);
        ms_thread_close(&team->helpers[i]);
    }
    ms_release(context, team->helpers);
    ms_release(context, team->threads);
    ms_release(context, team);
}

/* Opens a job, works on it, closes it, and waits for those who joined. The job's fields are written
 * before the ticket opens, which publishes them. Clearing the open bit returns how many had joined,
 * and no one can join afterwards. A helper that is done raises `finished` and rings the bell; this
 * thread goes on when all that joined have done so. */
static void run_together(ms_team *team, uint32_t tiles, ms_tile_function tile, void *context,
                         ms_thread *thread)
{
    team->tile = tile;
    team->context = context;
    team->tiles = tiles;
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    atomic_store_explicit(&team->finished, 0, memory_order_relaxed);
    uint64_t generation = (atomic_load_explicit(&team->ticket, memory_order_relaxed) >> 32) + 1;
    /* Generation 0 is what helpers start with; skip it when the count wraps. */
    if ((uint32_t)generation == 0) generation = 1;
    atomic_store(&team->ticket, generation << 32 | MS_TICKET_OPEN);
    ms_bell_ring(&team->idle);
    take_tiles(team, thread);
    uint32_t joined =
        (uint32_t)(atomic_fetch_and(&team->ticket, ~MS_TICKET_OPEN) & MS_TICKET_JOINED);
    for (;;) {
        uint32_t seen = ms_bell_read(&team->complete);
        if (atomic_load(&team->finished) == joined) break;
        ms_bell_wait(&team->complete, seen, team->spin);
    }
}

/* One stream at a time uses the team; another one that comes meanwhile computes its tiles alone,
 * which gives the same result and cannot deadlock. A helper never opens a job itself, so jobs do
 * not nest. */
void ms_team_run(ms_team *team, uint32_t tiles, ms_tile_function tile, void *context,
                 ms_thread *thread)
{
    if (tiles < 2 || team->helper_count == 0 || atomic_exchange(&team->busy, 1)) {
        for (uint32_t i = 0; i < tiles; i++) tile(context, i, thread);
        return;
    }
    run_together(team, tiles, tile, context, thread);
    atomic_store(&team->busy, 0);
}
