/* replay.c: runs of tasks that a stream gets again and again, launched as one graph of the driver
 * (ms_engine_set_repeating).
 *
 * Invariants
 * - A graph is launched only in place of tasks that were enqueued one by one, and with their
 *   arguments. So what is carried out never depends on what was expected.
 * - A stream's log holds the tasks since the last cut. A cut is whatever is no task: a copy, a
 *   mark, a wait, a function of the host, or another stream or the host that needs a task of the
 *   log; and every MOST tasks, so that the GPU does not wait long for its first.
 * - While the log is the beginning of a replay that has a graph, its tasks are held: they have
 *   numbers, and the driver has not seen them. Otherwise each was carried out when it came.
 * - A replay that came TIMES times is captured, on a stream of the device's own, and from the
 *   arguments that it keeps: capturing carries out nothing, so nobody is kept from calling the
 *   driver meanwhile. The replay's arguments are those of the graph.
 * - A graph's kernels get new arguments by running the function of their task once more, which then
 *   changes nodes instead of launching (ms_cuda_replay_launch). What libraries put into a graph
 *   stays as it is: such a task (uses_library) is part of a replay with these arguments only.
 * - Each launch has notes of its own for what kernels note.
 *
 * What a graph saves is the driver's time for each launch. The host still enqueues every task, and
 * Lua takes the same time as without graphs.
 *
 * What changes between steps (a learning rate, the number of a step, an offset of random numbers)
 * is an argument of a task like any other. Kernels of a graph get it as new parameters before the
 * launch. So kernels are the same with and without a graph, and need not read such numbers from
 * memory.
 *
 * Each rank learns its runs by itself, but all ranks of a communicator must capture a call of NCCL
 * together. So calls of NCCL are not part of these runs. They have graphs of their own
 * (ms_cuda_captured_work, comm/transport/nccl/graphs.c). */
#include "exec/cuda/replay.h"

#include <stdio.h>
#include <string.h>

#include "exec/cuda/batch.h"
#include "exec/cuda/capture.h"
#include "exec/cuda/completion.h"
#include "exec/cuda/errors.h"
#include "exec/cuda/fatal.h"
#include "exec/cuda/kernel.h"
#include "exec/cuda/launch.h"
#include "exec/stream.h"

enum {
    LEAST = 4,    /* tasks: fewer cost as little one by one */
    MOST = 128,   /* tasks */
    CHAINS = 512, /* of a stream */
    TIMES = 3
};

/* What a task has put into a graph, in order: a kernel, or memory that is cleared. */
typedef struct node {
    ms_cuda_node node; /* NULL: memory */
    ms_cuda_address address;
    size_t bytes;
} node;

struct ms_cuda_replay {
    ms_cuda_replay *next;
    ms_cuda_replay *then; /* the one that came after it, the last time */
    ms_cuda_log log;      /* seq and script of its tasks mean nothing */
    uint32_t times;
    bool is_refused; /* it cannot be captured, or its graph cannot get arguments */
    ms_cuda_program program;
    ms_cuda_graph graph;  /* what it was made from: its nodes name those of the program */
    ms_cuda_piece *piece; /* its scratch */
    node *nodes;
    size_t node_count, node_capacity;
    uint64_t used; /* when it last came: the number of its first task */
};

/* ----------------------------------------------------------------------- logs */

static const void *arguments_of(const ms_cuda_log *log, size_t i)
{
    return log->bytes + log->tasks[i].at;
}

static bool append(ms_engine *engine, ms_cuda_log *log, const ms_launch *launch)
{
    ms_context *context = &engine->context;
    size_t bytes = launch->task->args_bytes, at = (log->used + 15) / 16 * 16;
    if (ms_grow(context, (void **)&log->tasks, &log->capacity, log->count + 1, sizeof *log->tasks)
        || ms_grow(context, (void **)&log->bytes, &log->room, at + bytes, 1))
        return false;
    const ms_cuda_task *task = (const ms_cuda_task *)(const void *)launch->task;
    if (bytes) memcpy(log->bytes + at, launch->arguments, bytes);
    if (task->clear_padding) task->clear_padding(log->bytes + at);
    log->used = at + bytes;
    log->tasks[log->count++] = (ms_cuda_logged_task){
        .task = task, .seq = launch->seq, .script = launch->script, .at = (uint32_t)at
    };
    return true;
}

static void drop_last(ms_cuda_log *log) { log->used = log->tasks[--log->count].at; }

static void free_log(ms_context *context, ms_cuda_log *log)
{
    ms_release(context, log->tasks);
    ms_release(context, log->bytes);
}

/* A task as it came. */
static ms_launch launch_of(const ms_cuda_log *log, size_t i)
{
    const ms_cuda_logged_task *captured = &log->tasks[i];
    return (ms_launch){ .seq = captured->seq,
                        .name = captured->task->task.name,
                        .task = &captured->task->task,
                        .arguments = arguments_of(log, i),
                        .script = captured->script };
}

static bool same_arguments(const ms_cuda_log *a, const ms_cuda_log *b, size_t i)
{
    size_t bytes = a->tasks[i].task->task.args_bytes;
    return bytes == 0 || memcmp(arguments_of(a, i), arguments_of(b, i), bytes) == 0;
}

/* --------------------------------------------------------------------- replays */

/* Task i of the log may be task i of the replay. */
static bool fits(const ms_cuda_replay *replay, const ms_cuda_log *log, size_t i)
{
    const ms_cuda_logged_task *captured = &replay->log.tasks[i];
    return captured->task == log->tasks[i].task
           && (captured->varies || same_arguments(&replay->log, log, i));
}

static bool begins_with(const ms_cuda_replay *replay, const ms_cuda_log *log)
{
    if (!replay->program || replay->log.count < log->count) return false;
    /* The last task first: most replays differ in it. */
    for (size_t i = log->count; i-- > 0;)
        if (!fits(replay, log, i)) return false;
    return true;
}

/* A replay with a graph that begins with the log, or is the log. */
static ms_cuda_replay *find(const ms_cuda_queue *queue, bool whole)
{
    const ms_cuda_log *log = &queue->log;
    ms_cuda_replay *first = queue->last ? queue->last->then : NULL;
    if (first && (!whole || first->log.count == log->count) && begins_with(first, log))
        return first;
    for (ms_cuda_replay *one = queue->replays; one; one = one->next)
        if ((!whole || one->log.count == log->count) && begins_with(one, log)) return one;
    return NULL;
}

static bool has_tasks_of(const ms_cuda_replay *replay, const ms_cuda_log *log)
{
    if (replay->log.count != log->count) return false;
    for (size_t i = 0; i < log->count; i++)
        if (replay->log.tasks[i].task != log->tasks[i].task) return false;
    return true;
}

/* In how many places the log's arguments differ from a replay of the same tasks; SIZE_MAX: it
 * cannot become that replay. */
static size_t differences(const ms_cuda_replay *replay, const ms_cuda_log *log)
{
    size_t count = 0;
    if (!has_tasks_of(replay, log)) return SIZE_MAX;
    for (size_t i = 0; i < log->count; i++) {
        if (same_arguments(&replay->log, log, i)) continue;
        if (log->tasks[i].task->uses_library) return SIZE_MAX;
        count++;
    }
    return count;
}

/* The replay that this log is, with new arguments in half of its tasks at most: giving a task's to
 * a graph costs about what launching it costs. */
static ms_cuda_replay *find_like(const ms_cuda_queue *queue, const ms_cuda_log *log)
{
    ms_cuda_replay *best = NULL;
    size_t least = log->count / 2 + 1;
    for (ms_cuda_replay *one = queue->replays; one && least; one = one->next) {
        size_t count = differences(one, log);
        if (count < least) {
            best = one;
            least = count;
        }
    }
    return best;
}

/* The log becomes a replay of its own. Where the newest replay has the same tasks, the first one
 * whose arguments differ is why. */
static void note_difference(const ms_stream *stream)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    const ms_cuda_log *log = &ms_cuda_queue_of(stream)->log;
    const ms_cuda_replay *one = ms_cuda_queue_of(stream)->replays;
    while (one && !has_tasks_of(one, log)) one = one->next;
    for (size_t i = 0; one && i < log->count; i++) {
        if (same_arguments(&one->log, log, i)) continue;
        self->differs = log->tasks[i].task->task.name;
        self->differs_script = log->tasks[i].script;
        return;
    }
}

static void free_graph(ms_stream *stream, ms_cuda_replay *replay)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    if (replay->program || replay->piece) /* it may be under way */
        (void)self->cuda.stream_synchronize(ms_cuda_queue_of(stream)->stream);
    if (replay->program) (void)self->cuda.program_destroy(replay->program);
    if (replay->graph) (void)self->cuda.graph_destroy(replay->graph);
    ms_cuda_release_piece(stream->engine, replay->piece);
    replay->program = NULL;
    replay->graph = NULL;
    replay->piece = NULL;
    replay->node_count = 0;
}

static void forget(ms_stream *stream, ms_cuda_replay *replay)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_context *context = &stream->engine->context;
    ms_cuda_replay **at = &queue->replays;
    while (*at != replay) at = &(*at)->next;
    *at = replay->next;
    queue->replay_count--;
    for (ms_cuda_replay *one = queue->replays; one; one = one->next)
        if (one->then == replay) one->then = NULL;
    if (queue->last == replay) queue->last = NULL;
    free_graph(stream, replay);
    free_log(context, &replay->log);
    ms_release(context, replay->nodes);
    ms_release(context, replay);
}

void ms_cuda_replays_free(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    while (queue->replays) forget(stream, queue->replays);
    free_log(&stream->engine->context, &queue->log);
}

/* The one that has not come for longest, of those without a graph if there are any. */
static void forget_one(ms_stream *stream)
{
    const ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_replay *oldest = queue->replays;
    for (ms_cuda_replay *one = oldest; one; one = one->next) {
        bool is_better =
            (one->program != NULL)<(oldest->program != NULL), is_worse = (one->program != NULL)>(
                oldest->program != NULL);
        if (is_better || (!is_worse && one->used < oldest->used)) oldest = one;
    }
    forget(stream, oldest);
}

/* The log becomes a replay that came once. */
static void add(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    void *memory = NULL;
    if (queue->replay_count == CHAINS) forget_one(stream);
    if (ms_allocate(&stream->engine->context, sizeof(ms_cuda_replay), "a chain", &memory)) return;
    ms_cuda_replay *replay = memory;
    replay->log = queue->log;
    replay->times = 1;
    replay->used = replay->log.tasks[0].seq;
    replay->next = queue->replays;
    queue->replays = replay;
    queue->replay_count++;
    queue->log = (ms_cuda_log){ 0 };
}

/* ------------------------------------------------------------------ capturing */

static ms_cuda_device *device_of(const ms_cuda_work *work)
{
    return ms_cuda_of(work->stream->engine);
}

/* A node of the graph that is captured. */
static ms_cuda_result add_node(ms_cuda_work *work, node made)
{
    ms_cuda_replay *replay = work->replay;
    if (ms_grow(&work->stream->engine->context, (void **)&replay->nodes, &replay->node_capacity,
                replay->node_count + 1, sizeof *replay->nodes))
        return MS_CUDA_OUT_OF_MEMORY;
    replay->nodes[replay->node_count++] = made;
    return MS_CUDA_SUCCESS;
}

/* The node of a task that gets new arguments, or NULL: the task does not do what it did. */
static const node *next_node(ms_cuda_work *work, bool is_kernel)
{
    const ms_cuda_replay *replay = work->replay;
    const node *found = work->node < replay->node_count ? &replay->nodes[work->node++] : NULL;
    return found && is_kernel == (found->node != NULL) ? found : NULL;
}

static ms_cuda_result capture_kernel(ms_cuda_work *work, const ms_cuda_kernel_call *call)
{
    ms_cuda_node made = NULL;
    ms_cuda_result result = ms_cuda_capture_kernel(work, call, &made);
    if (made) return add_node(work, (node){ .node = made });
    work->has_failed = true;
    return result;
}

ms_cuda_result ms_cuda_replay_launch(ms_cuda_work *work, const ms_cuda_kernel_call *call)
{
    ms_cuda_device *self = device_of(work);
    if (self->building) return capture_kernel(work, call);
    const node *changed = next_node(work, true);
    work->has_failed |= !changed;
    return changed ? self->cuda.program_change(work->replay->program, changed->node, call)
                   : MS_CUDA_SUCCESS;
}

bool ms_cuda_replay_clear(ms_cuda_work *work, ms_cuda_address address, size_t bytes)
{
    if (device_of(work)->building) {
        work->has_failed |=
            add_node(work, (node){ .address = address, .bytes = bytes }) != MS_CUDA_SUCCESS;
        return work->has_failed;
    }
    const node *same = next_node(work, false);
    work->has_failed |= !same || same->address != address || same->bytes != bytes;
    return true;
}

ms_cuda_piece *ms_cuda_replay_piece(ms_cuda_work *work)
{
    ms_cuda_replay *replay = work->replay;
    ms_cuda_piece *piece = ms_cuda_queue_of(work->stream)->scratch;
    if (device_of(work)->building && !replay->piece && piece) {
        replay->piece = piece;
        piece->users++;
    }
    return replay->piece;
}

/* Runs the function of a task of the log, for the replay. */
static bool visit(ms_stream *stream, ms_cuda_replay *replay, const ms_cuda_log *log, size_t i,
                  ms_cuda_note **note)
{
    const ms_cuda_logged_task *captured = &replay->log.tasks[i];
    ms_launch launch = launch_of(log, i);
    ms_cuda_work work = { .stream = stream,
                          .launch = &launch,
                          .on = ms_cuda_of(stream->engine)->builder,
                          .replay = replay,
                          .node = captured->node };
    captured->task->function(&work, launch.arguments);
    *note = work.note;
    return !work.has_failed
           && (ms_cuda_of(stream->engine)->building
               || work.node == captured->node + captured->nodes);
}

/* How many tasks were captured: the next one cannot be, if there is one. */
static size_t capture_tasks(ms_stream *stream, ms_cuda_replay *replay)
{
    for (size_t i = 0; i < replay->log.count; i++) {
        ms_cuda_note *note = NULL; /* each launch brings its own */
        ms_cuda_logged_task *captured = &replay->log.tasks[i];
        captured->node = (uint32_t)replay->node_count;
        bool done = visit(stream, replay, &replay->log, i, &note);
        captured->nodes = (uint32_t)replay->node_count - captured->node;
        captured->notes = note != NULL;
        ms_cuda_give_note(ms_cuda_of(stream->engine), note);
        if (!done) return i;
    }
    return replay->log.count;
}

static void write_place(const ms_engine *engine, const char *what, uint32_t script,
                        char text[MS_CUDA_WHY])
{
    const char *where = ms_strings_get(engine->strings, script);
    snprintf(text, MS_CUDA_WHY, *where ? "%s (at %s)" : "%s", what, where);
}

/* The first thing that made tasks go alone. */
static void note_why(ms_engine *engine, const char *what, uint32_t script)
{
    ms_cuda_device *self = ms_cuda_of(engine);
    if (!*self->why_ended) write_place(engine, what, script, self->why_ended);
}

/* i: the task of the log that is the reason, or the first one. */
static void refuse(ms_stream *stream, ms_cuda_replay *replay, const char *why, size_t i)
{
    note_why(stream->engine, why, ms_cuda_queue_of(stream)->log.tasks[i].script);
    replay->is_refused = true;
    free_graph(stream, replay);
}

/* The log has the tasks of the replay. */
static void build(ms_stream *stream, ms_cuda_replay *replay)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    const ms_cuda *cuda = &self->cuda;
    size_t captured = replay->log.count;
    ms_cuda_result result = ms_cuda_capture_begin(self);
    char why[256];
    if (!result) {
        self->building = true;
        captured = capture_tasks(stream, replay);
        self->building = false;
        result = cuda->capture_end(self->builder, &replay->graph);
    }
    bool all = captured == replay->log.count;
    if (!result && all) result = cuda->program_make(&replay->program, replay->graph, 0);
    if (!result && all) {
        self->repeats.graphs++;
        return;
    }
    size_t used =
        (size_t)snprintf(why, sizeof why, "%s cannot be captured: ",
                         all ? "a run of tasks" : replay->log.tasks[captured].task->task.name);
    if (result) ms_cuda_explain(cuda, result, why + used, sizeof why - used);
    else snprintf(why + used, sizeof why - used, "it needs the host, or more memory");
    refuse(stream, replay, why, all ? 0 : captured);
}

/* A run of tasks is over, each of which was carried out when it came. */
static void learn(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    if (queue->log.count < LEAST || ms_stream_has_failed(stream)) return;
    ms_cuda_replay *replay = find_like(queue, &queue->log);
    if (!replay) {
        note_difference(stream);
        add(stream);
        return;
    }
    replay->used = queue->log.tasks[0].seq;
    for (size_t i = 0; i < queue->log.count; i++) {
        ms_cuda_logged_task *captured = &replay->log.tasks[i];
        if (same_arguments(&replay->log, &queue->log, i)) continue;
        captured->varies = true;
        /* Those of a graph are what the graph has. */
        if (!replay->program)
            memcpy(replay->log.bytes + captured->at, arguments_of(&queue->log, i),
                   captured->task->task.args_bytes);
    }
    if (!replay->program && !replay->is_refused && ++replay->times >= TIMES) build(stream, replay);
}

/* ------------------------------------------------------------------ launching */

/* Gives the graph the log's arguments, and notes for tasks whose kernels may note something. */
static bool give_arguments(ms_stream *stream, ms_cuda_replay *replay, ms_cuda_note **notes)
{
    const ms_cuda_log *log = &ms_cuda_queue_of(stream)->log;
    for (size_t i = 0; i < log->count; i++) {
        const ms_cuda_logged_task *captured = &replay->log.tasks[i];
        notes[i] = NULL;
        if (!captured->notes && (!captured->varies || same_arguments(&replay->log, log, i)))
            continue;
        if (!visit(stream, replay, log, i, &notes[i])) {
            for (size_t j = 0; j <= i; j++) ms_cuda_give_note(ms_cuda_of(stream->engine), notes[j]);
            return false;
        }
        memcpy(replay->log.bytes + captured->at, arguments_of(log, i),
               captured->task->task.args_bytes);
    }
    return true;
}

/* False: the graph cannot get the arguments. */
static bool launch_graph(ms_stream *stream, ms_cuda_replay *replay)
{
    ms_cuda_note *notes[MOST];
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    const ms_cuda_log *log = &queue->log;
    if (!give_arguments(stream, replay, notes)) {
        refuse(stream, replay, "a task that does not launch the kernels that it launched before",
               0);
        return false;
    }
    ms_launch first = launch_of(log, 0);
    ms_cuda_check(stream, &first, self->cuda.program_launch(replay->program, queue->stream));
    for (size_t i = 0; i < log->count; i++) {
        ms_launch launch = launch_of(log, i);
        if (notes[i]) ms_cuda_keep_note(stream, &launch, notes[i]);
    }
    self->repeats.launches++;
    self->repeats.replayed += log->count;
    replay->used = log->tasks[0].seq;
    if (queue->last) queue->last->then = replay;
    queue->last = replay;
    return true;
}

/* What is held is carried out one by one. */
static void let_go(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    queue->replay = NULL;
    for (size_t i = 0; i < queue->log.count && !ms_stream_has_failed(stream); i++) {
        ms_launch launch = launch_of(&queue->log, i);
        (void)ms_cuda_carry_out(stream, &launch);
        ms_cuda_of(stream->engine)->repeats.alone++;
    }
}

/* The log ends. */
static void end_log(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_replay *replay = queue->replay;
    if (replay && replay->log.count != queue->log.count) replay = find(queue, true);
    bool launched = replay && !ms_stream_has_failed(stream) && launch_graph(stream, replay);
    if (!launched && queue->replay) let_go(stream);
    if (!launched) learn(stream);
    queue->replay = NULL;
    queue->log.count = queue->log.used = 0;
}

void ms_cuda_cut(ms_stream *stream, const char *what)
{
    ms_cuda_batch_put(stream);
    if (!ms_cuda_queue_of(stream)->log.count) return;
    if (what) note_why(stream->engine, what, stream->engine->script);
    end_log(stream);
}

void ms_cuda_cut_at(ms_stream *stream, uint64_t seq, const char *what)
{
    const ms_cuda_log *log = &ms_cuda_queue_of(stream)->log;
    ms_cuda_batch_put(stream);
    if (log->count && seq >= log->tasks[0].seq) ms_cuda_cut(stream, what);
}

/* ------------------------------------------------------------- what the host does */

/* The log has a new task at its end. Whether all of it is held now. */
static bool hold_last(ms_stream *stream, const ms_launch *launch)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    size_t last = queue->log.count - 1;
    ms_cuda_replay *replay = queue->replay;
    if (!replay && last > 0) return false; /* those before were carried out */
    bool goes_on = replay && last < replay->log.count && fits(replay, &queue->log, last);
    ms_cuda_replay *now = goes_on ? replay : find(queue, false);
    if (now || !replay) {
        queue->replay = now;
        return now != NULL;
    }
    /* The others are a replay, or go alone. */
    drop_last(&queue->log);
    if (last == replay->log.count) end_log(stream);
    else let_go(stream);
    if (!append(stream->engine, &queue->log, launch)) end_log(stream);
    return queue->log.count == 1 && hold_last(stream, launch);
}

bool ms_cuda_hold(ms_stream *stream, const ms_launch *launch)
{
    ms_engine *engine = stream->engine;
    const ms_cuda_device *self = ms_cuda_of(engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    bool can =
        self->repeating && !queue->is_shared && !launch->record && !ms_stream_has_failed(stream);
    if (!can || queue->log.count == MOST) ms_cuda_cut(stream, NULL);
    if (!can) return false;
    if (append(engine, &queue->log, launch)) return hold_last(stream, launch);
    ms_cuda_cut(stream, NULL); /* no memory */
    return false;
}

void ms_cuda_learn(ms_stream *stream, ms_cuda_way way)
{
    ms_cuda_log *log = &ms_cuda_queue_of(stream)->log;
    if (!log->count) return;
    if (way != MS_CUDA_WAY_APART) ms_cuda_of(stream->engine)->repeats.alone++;
    if (way == MS_CUDA_WAY_PLAIN) return;
    drop_last(log);
    ms_cuda_cut(stream, NULL);
}

void ms_cuda_repeat(ms_engine *engine, bool on)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    for (uint16_t i = 0; i < engine->stream_count; i++) ms_cuda_cut(engine->streams[i], NULL);
    self->repeating = on && !self->blocks;
    if (on && self->blocks)
        snprintf(self->why_ended, sizeof self->why_ended, "%s", MS_CUDA_BLOCKING "=1");
}

void ms_cuda_repeats(const ms_engine *engine, ms_repeats *out)
{
    ms_cuda_device *self = ms_cuda_of(engine);
    *out = self->repeats;
    out->why = self->why_ended;
    if (self->differs) write_place(engine, self->differs, self->differs_script, self->why_differs);
    out->differs = self->why_differs;
}
