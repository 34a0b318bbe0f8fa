/* replay.c: runs of tasks that a stream gets again and again, launched as one graph of the driver
 * (ms_engine_set_repeating).
 *
 * Invariants
 * - A graph is launched only in place of tasks that were enqueued one by one, and with their
 *   arguments. So what is carried out never depends on what was expected.
 * - A stream's log holds the tasks since the last cut. A cut is whatever is no task: a copy, a
 *   mark, a wait, a function of the host, or another stream or the host that needs a task of the
 *   log; and every MOST tasks, so that the GPU does not wait long for its first.
 * - While the log is the beginning of a chain that has a graph, its tasks are held: they have
 *   numbers, and the driver has not seen them. Otherwise each was carried out when it came.
 * - A chain that came TIMES times is captured, on a stream of the device's own, and from the
 *   arguments that it keeps: capturing carries out nothing, so nobody is kept from calling the
 *   driver meanwhile. The chain's arguments are those of the graph.
 * - A graph's kernels get new arguments by running the function of their task once more, which then
 *   changes nodes instead of launching (ms_cuda_chain_launch). What libraries put into a graph
 *   stays as it is: such a task (uses_library) is part of a chain with these arguments only.
 * - Each launch has notes of its own for what kernels note. */
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

struct ms_cuda_chain {
    ms_cuda_chain *next;
    ms_cuda_chain *then; /* the one that came after it, the last time */
    ms_cuda_log log;     /* seq and script of its tasks mean nothing */
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
    log->tasks[log->count++] = (ms_cuda_kept){
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
    const ms_cuda_kept *kept = &log->tasks[i];
    return (ms_launch){ .seq = kept->seq,
                        .name = kept->task->task.name,
                        .task = &kept->task->task,
                        .arguments = arguments_of(log, i),
                        .script = kept->script };
}

static bool same_arguments(const ms_cuda_log *a, const ms_cuda_log *b, size_t i)
{
    size_t bytes = a->tasks[i].task->task.args_bytes;
    return bytes == 0 || memcmp(arguments_of(a, i), arguments_of(b, i), bytes) == 0;
}

/* --------------------------------------------------------------------- chains */

/* Task i of the log may be task i of the chain. */
static bool fits(const ms_cuda_chain *chain, const ms_cuda_log *log, size_t i)
{
    const ms_cuda_kept *kept = &chain->log.tasks[i];
    return kept->task == log->tasks[i].task
           && (kept->varies || same_arguments(&chain->log, log, i));
}

static bool begins_with(const ms_cuda_chain *chain, const ms_cuda_log *log)
{
    if (!chain->program || chain->log.count < log->count) return false;
    /* The last task first: most chains differ in it. */
    for (size_t i = log->count; i-- > 0;)
        if (!fits(chain, log, i)) return false;
    return true;
}

/* A chain with a graph that begins with the log, or is the log. */
static ms_cuda_chain *find(const ms_cuda_queue *queue, bool whole)
{
    const ms_cuda_log *log = &queue->log;
    ms_cuda_chain *first = queue->last ? queue->last->then : NULL;
    if (first && (!whole || first->log.count == log->count) && begins_with(first, log))
        return first;
    for (ms_cuda_chain *one = queue->chains; one; one = one->next)
        if ((!whole || one->log.count == log->count) && begins_with(one, log)) return one;
    return NULL;
}

static bool has_tasks_of(const ms_cuda_chain *chain, const ms_cuda_log *log)
{
    if (chain->log.count != log->count) return false;
    for (size_t i = 0; i < log->count; i++)
        if (chain->log.tasks[i].task != log->tasks[i].task) return false;
    return true;
}

/* In how many places the log's arguments differ from a chain of the same tasks; SIZE_MAX: it cannot
 * become that chain. */
static size_t differences(const ms_cuda_chain *chain, const ms_cuda_log *log)
{
    size_t count = 0;
    if (!has_tasks_of(chain, log)) return SIZE_MAX;
    for (size_t i = 0; i < log->count; i++) {
        if (same_arguments(&chain->log, log, i)) continue;
        if (log->tasks[i].task->uses_library) return SIZE_MAX;
        count++;
    }
    return count;
}

/* The chain that this log is, with new arguments in half of its tasks at most: giving a task's to a
 * graph costs about what launching it costs. */
static ms_cuda_chain *find_like(const ms_cuda_queue *queue, const ms_cuda_log *log)
{
    ms_cuda_chain *best = NULL;
    size_t least = log->count / 2 + 1;
    for (ms_cuda_chain *one = queue->chains; one && least; one = one->next) {
        size_t count = differences(one, log);
        if (count < least) {
            best = one;
            least = count;
        }
    }
    return best;
}

/* The log becomes a chain of its own. Where the newest chain has the same tasks, the first one
 * whose arguments differ is why. */
static void note_difference(const ms_stream *stream)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    const ms_cuda_log *log = &ms_cuda_queue_of(stream)->log;
    const ms_cuda_chain *one = ms_cuda_queue_of(stream)->chains;
    while (one && !has_tasks_of(one, log)) one = one->next;
    for (size_t i = 0; one && i < log->count; i++) {
        if (same_arguments(&one->log, log, i)) continue;
        self->differs = log->tasks[i].task->task.name;
        self->differs_script = log->tasks[i].script;
        return;
    }
}

static void free_graph(ms_stream *stream, ms_cuda_chain *chain)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    if (chain->program || chain->piece) /* it may be under way */
        (void)self->cuda.stream_synchronize(ms_cuda_queue_of(stream)->stream);
    if (chain->program) (void)self->cuda.program_destroy(chain->program);
    if (chain->graph) (void)self->cuda.graph_destroy(chain->graph);
    ms_cuda_release_piece(stream->engine, chain->piece);
    chain->program = NULL;
    chain->graph = NULL;
    chain->piece = NULL;
    chain->node_count = 0;
}

static void forget(ms_stream *stream, ms_cuda_chain *chain)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_context *context = &stream->engine->context;
    ms_cuda_chain **at = &queue->chains;
    while (*at != chain) at = &(*at)->next;
    *at = chain->next;
    queue->chain_count--;
    for (ms_cuda_chain *one = queue->chains; one; one = one->next)
        if (one->then == chain) one->then = NULL;
    if (queue->last == chain) queue->last = NULL;
    free_graph(stream, chain);
    free_log(context, &chain->log);
    ms_release(context, chain->nodes);
    ms_release(context, chain);
}

void ms_cuda_chains_free(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    while (queue->chains) forget(stream, queue->chains);
    free_log(&stream->engine->context, &queue->log);
}

/* The one that has not come for longest, of those without a graph if there are any. */
static void forget_one(ms_stream *stream)
{
    const ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_chain *oldest = queue->chains;
    for (ms_cuda_chain *one = oldest; one; one = one->next) {
        bool is_better =
            (one->program != NULL)<(oldest->program != NULL), is_worse = (one->program != NULL)>(
                oldest->program != NULL);
        if (is_better || (!is_worse && one->used < oldest->used)) oldest = one;
    }
    forget(stream, oldest);
}

/* The log becomes a chain that came once. */
static void add(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    void *memory = NULL;
    if (queue->chain_count == CHAINS) forget_one(stream);
    if (ms_allocate(&stream->engine->context, sizeof(ms_cuda_chain), "a chain", &memory)) return;
    ms_cuda_chain *chain = memory;
    chain->log = queue->log;
    chain->times = 1;
    chain->used = chain->log.tasks[0].seq;
    chain->next = queue->chains;
    queue->chains = chain;
    queue->chain_count++;
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
    ms_cuda_chain *chain = work->chain;
    if (ms_grow(&work->stream->engine->context, (void **)&chain->nodes, &chain->node_capacity,
                chain->node_count + 1, sizeof *chain->nodes))
        return MS_CUDA_OUT_OF_MEMORY;
    chain->nodes[chain->node_count++] = made;
    return MS_CUDA_SUCCESS;
}

/* The node of a task that gets new arguments, or NULL: the task does not do what it did. */
static const node *next_node(ms_cuda_work *work, bool is_kernel)
{
    const ms_cuda_chain *chain = work->chain;
    const node *found = work->node < chain->node_count ? &chain->nodes[work->node++] : NULL;
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

ms_cuda_result ms_cuda_chain_launch(ms_cuda_work *work, const ms_cuda_kernel_call *call)
{
    ms_cuda_device *self = device_of(work);
    if (self->building) return capture_kernel(work, call);
    const node *changed = next_node(work, true);
    work->has_failed |= !changed;
    return changed ? self->cuda.program_change(work->chain->program, changed->node, call)
                   : MS_CUDA_SUCCESS;
}

bool ms_cuda_chain_clear(ms_cuda_work *work, ms_cuda_address address, size_t bytes)
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

ms_cuda_piece *ms_cuda_chain_piece(ms_cuda_work *work)
{
    ms_cuda_chain *chain = work->chain;
    ms_cuda_piece *piece = ms_cuda_queue_of(work->stream)->scratch;
    if (device_of(work)->building && !chain->piece && piece) {
        chain->piece = piece;
        piece->users++;
    }
    return chain->piece;
}

/* Runs the function of a task of the log, for the chain. */
static bool visit(ms_stream *stream, ms_cuda_chain *chain, const ms_cuda_log *log, size_t i,
                  ms_cuda_note **note)
{
    const ms_cuda_kept *kept = &chain->log.tasks[i];
    ms_launch launch = launch_of(log, i);
    ms_cuda_work work = { .stream = stream,
                          .launch = &launch,
                          .on = ms_cuda_of(stream->engine)->builder,
                          .chain = chain,
                          .node = kept->node };
    kept->task->function(&work, launch.arguments);
    *note = work.note;
    return !work.has_failed
           && (ms_cuda_of(stream->engine)->building || work.node == kept->node + kept->nodes);
}

/* How many tasks were captured: the next one cannot be, if there is one. */
static size_t capture_tasks(ms_stream *stream, ms_cuda_chain *chain)
{
    for (size_t i = 0; i < chain->log.count; i++) {
        ms_cuda_note *note = NULL; /* each launch brings its own */
        ms_cuda_kept *kept = &chain->log.tasks[i];
        kept->node = (uint32_t)chain->node_count;
        bool done = visit(stream, chain, &chain->log, i, &note);
        kept->nodes = (uint32_t)chain->node_count - kept->node;
        kept->notes = note != NULL;
        ms_cuda_give_note(ms_cuda_of(stream->engine), note);
        if (!done) return i;
    }
    return chain->log.count;
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
static void refuse(ms_stream *stream, ms_cuda_chain *chain, const char *why, size_t i)
{
    note_why(stream->engine, why, ms_cuda_queue_of(stream)->log.tasks[i].script);
    chain->is_refused = true;
    free_graph(stream, chain);
}

/* The log has the tasks of the chain. */
static void build(ms_stream *stream, ms_cuda_chain *chain)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    const ms_cuda *cuda = &self->cuda;
    size_t captured = chain->log.count;
    ms_cuda_result result = ms_cuda_capture_begin(self);
    char why[256];
    if (!result) {
        self->building = true;
        captured = capture_tasks(stream, chain);
        self->building = false;
        result = cuda->capture_end(self->builder, &chain->graph);
    }
    bool all = captured == chain->log.count;
    if (!result && all) result = cuda->program_make(&chain->program, chain->graph, 0);
    if (!result && all) {
        self->repeats.graphs++;
        return;
    }
    size_t used =
        (size_t)snprintf(why, sizeof why, "%s cannot be captured: ",
                         all ? "a run of tasks" : chain->log.tasks[captured].task->task.name);
    if (result) ms_cuda_explain(cuda, result, why + used, sizeof why - used);
    else snprintf(why + used, sizeof why - used, "it needs the host, or more memory");
    refuse(stream, chain, why, all ? 0 : captured);
}

/* A run of tasks is over, each of which was carried out when it came. */
static void learn(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    if (queue->log.count < LEAST || ms_stream_has_failed(stream)) return;
    ms_cuda_chain *chain = find_like(queue, &queue->log);
    if (!chain) {
        note_difference(stream);
        add(stream);
        return;
    }
    chain->used = queue->log.tasks[0].seq;
    for (size_t i = 0; i < queue->log.count; i++) {
        ms_cuda_kept *kept = &chain->log.tasks[i];
        if (same_arguments(&chain->log, &queue->log, i)) continue;
        kept->varies = true;
        /* Those of a graph are what the graph has. */
        if (!chain->program)
            memcpy(chain->log.bytes + kept->at, arguments_of(&queue->log, i),
                   kept->task->task.args_bytes);
    }
    if (!chain->program && !chain->is_refused && ++chain->times >= TIMES) build(stream, chain);
}

/* ------------------------------------------------------------------ launching */

/* Gives the graph the log's arguments, and notes for tasks whose kernels may note something. */
static bool give_arguments(ms_stream *stream, ms_cuda_chain *chain, ms_cuda_note **notes)
{
    const ms_cuda_log *log = &ms_cuda_queue_of(stream)->log;
    for (size_t i = 0; i < log->count; i++) {
        const ms_cuda_kept *kept = &chain->log.tasks[i];
        notes[i] = NULL;
        if (!kept->notes && (!kept->varies || same_arguments(&chain->log, log, i))) continue;
        if (!visit(stream, chain, log, i, &notes[i])) {
            for (size_t j = 0; j <= i; j++) ms_cuda_give_note(ms_cuda_of(stream->engine), notes[j]);
            return false;
        }
        memcpy(chain->log.bytes + kept->at, arguments_of(log, i), kept->task->task.args_bytes);
    }
    return true;
}

/* False: the graph cannot get the arguments. */
static bool launch_graph(ms_stream *stream, ms_cuda_chain *chain)
{
    ms_cuda_note *notes[MOST];
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    const ms_cuda_log *log = &queue->log;
    if (!give_arguments(stream, chain, notes)) {
        refuse(stream, chain, "a task that does not launch the kernels that it launched before", 0);
        return false;
    }
    ms_launch first = launch_of(log, 0);
    ms_cuda_check(stream, &first, self->cuda.program_launch(chain->program, queue->stream));
    for (size_t i = 0; i < log->count; i++) {
        ms_launch launch = launch_of(log, i);
        if (notes[i]) ms_cuda_keep_note(stream, &launch, notes[i]);
    }
    self->repeats.launches++;
    self->repeats.replayed += log->count;
    chain->used = log->tasks[0].seq;
    if (queue->last) queue->last->then = chain;
    queue->last = chain;
    return true;
}

/* What is held is carried out one by one. */
static void let_go(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    queue->chain = NULL;
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
    ms_cuda_chain *chain = queue->chain;
    if (chain && chain->log.count != queue->log.count) chain = find(queue, true);
    bool launched = chain && !ms_stream_has_failed(stream) && launch_graph(stream, chain);
    if (!launched && queue->chain) let_go(stream);
    if (!launched) learn(stream);
    queue->chain = NULL;
    queue->log.count = queue->log.used = 0;
}

void ms_cuda_cut(ms_stream *stream, const char *what)
{
    ms_cuda_put_kept(stream);
    if (!ms_cuda_queue_of(stream)->log.count) return;
    if (what) note_why(stream->engine, what, stream->engine->script);
    end_log(stream);
}

void ms_cuda_cut_at(ms_stream *stream, uint64_t seq, const char *what)
{
    const ms_cuda_log *log = &ms_cuda_queue_of(stream)->log;
    ms_cuda_put_kept(stream);
    if (log->count && seq >= log->tasks[0].seq) ms_cuda_cut(stream, what);
}

/* ------------------------------------------------------------- what the host does */

/* The log has a new task at its end. Whether all of it is held now. */
static bool hold_last(ms_stream *stream, const ms_launch *launch)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    size_t last = queue->log.count - 1;
    ms_cuda_chain *chain = queue->chain;
    if (!chain && last > 0) return false; /* those before were carried out */
    bool goes_on = chain && last < chain->log.count && fits(chain, &queue->log, last);
    ms_cuda_chain *now = goes_on ? chain : find(queue, false);
    if (now || !chain) {
        queue->chain = now;
        return now != NULL;
    }
    /* The others are a chain, or go alone. */
    drop_last(&queue->log);
    if (last == chain->log.count) end_log(stream);
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
