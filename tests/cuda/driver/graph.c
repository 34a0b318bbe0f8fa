/* graph.c: captures of the stand-in, and the graphs that come from them.
 *
 * A stream of a capture has a front: the work that its next work comes after. Waiting for an event
 * joins the event's front. A graph is the work and what each comes after. Its launches run the work
 * in any order that this allows, which the seed chooses. For order.h each stream of a capture is
 * one lane of the graph, the origin's that of the stream on which the graph is launched: work of
 * different lanes is ordered by the graph alone. */
#include "work.h"

#include <stdlib.h>
#include <string.h>

typedef struct graph {
    struct graph *next;
    unsigned users; /* itself, and programs */
    work **all;     /* in the order of the host's calls */
    unsigned count, lanes;
    bool is_destroyed;
} graph;
static graph *graphs;

struct capture {
    capture *next;
    uint64_t number;
    const stream *origin;
    pthread_t thread;
    bool relaxed, broken;
    graph *graph;
};
static capture *captures;
static uint64_t capture_count;
static __thread int thread_mode;

struct program {
    graph *graph;
    unsigned users; /* itself, and launches */
    unsigned lanes[ORDER_STREAMS];
    uint64_t launches, finished;
    work **kernels; /* by place in the graph: with the arguments of the next launch */
    work *changed;  /* those of them that are not the graph's */
};

enum { THREAD = 1, RELAXED = 2 };

/* ------------------------------------------------------------------- fronts */

static bool has(const front *in, const work *one)
{
    for (unsigned i = 0; i < in->count; i++)
        if (in->last[i] == one) return true;
    return false;
}
static void put(front *into, work *one)
{
    if (has(into, one)) return;
    into->last = realloc(into->last, (into->count + 1) * sizeof *into->last);
    if (!into->last) abort();
    into->last[into->count++] = one;
}
static void clear(front *gone)
{
    free(gone->last);
    *gone = (front){ .capture = 0 };
}
static void join(front *into, const front *from)
{
    into->capture = from->capture;
    for (unsigned i = 0; i < from->count; i++) put(into, from->last[i]);
}

/* ----------------------------------------------------------------- captures */

int capture_broken(capture *broken, const char *words)
{
    order_fault("%s while work is captured", words);
    broken->broken = true;
    return CAPTURE_UNSUPPORTED;
}

static capture *capture_of(uint64_t number)
{
    capture *one = captures;
    while (one && one->number != number) one = one->next;
    return one;
}

int capture_forbids(const char *words, bool in_any_mode)
{
    for (capture *one = captures; one; one = one->next)
        if (pthread_equal(one->thread, pthread_self())
            && (in_any_mode || (!one->relaxed && thread_mode != RELAXED)))
            return capture_broken(one, words);
    return SUCCESS;
}

void capture_work(stream *on, work *made)
{
    graph *into = on->capture->graph;
    into->all = realloc(into->all, (into->count + 1) * sizeof *into->all);
    if (!into->all) abort();
    made->index = into->count;
    made->lane = on->lane;
    into->all[into->count++] = made;
    made->after = on->front.last;
    made->after_count = on->front.count;
    on->front = (front){ .capture = on->capture->number };
    put(&on->front, made);
}

bool capture_record(stream *on, event *recorded)
{
    clear(&recorded->front);
    if (!on->capture) return false;
    join(&recorded->front, &on->front);
    return true;
}

static void enter(stream *on, capture *into)
{
    if (into->graph->lanes == ORDER_STREAMS) abort();
    on->capture = into;
    on->front = (front){ .capture = into->number };
    on->lane = into->graph->lanes++;
}

int capture_wait(stream *on, event *for_event)
{
    capture *of = capture_of(for_event->front.capture);
    if (!for_event->front.capture && !on->capture) return NOT_CAPTURED;
    if (!for_event->front.capture) {
        (void)capture_broken(on->capture, "a stream waits for an event from outside");
        return CAPTURE_ISOLATION;
    }
    if (!of || (on->capture && on->capture != of)) {
        order_fault("a stream waits for an event of another capture");
        if (on->capture) on->capture->broken = true;
        return on->capture ? CAPTURE_MERGE : CAPTURED_EVENT;
    }
    if (!on->capture) enter(on, of);
    join(&on->front, &for_event->front);
    return SUCCESS;
}

int capture_asks(const event *asked)
{
    capture *of = capture_of(asked->front.capture);
    if (!asked->front.capture) return capture_forbids("the host asks for an event", false);
    order_fault("the host asks for an event of a capture");
    if (of) of->broken = true;
    return CAPTURED_EVENT;
}

static void drop_graph(graph *gone)
{
    graph **at = &graphs;
    if (--gone->users) return;
    while (*at != gone) at = &(*at)->next;
    *at = gone->next;
    for (unsigned i = 0; i < gone->count; i++) free_work(gone->all[i]);
    free(gone->all);
    free(gone);
}

/* Whether all work of the graph comes before the front. */
static bool is_joined(const graph *it, const front *at)
{
    bool *seen = calloc(it->count + 1, sizeof *seen), joined = true;
    if (!seen) abort();
    for (unsigned i = 0; i < at->count; i++) seen[at->last[i]->index] = true;
    for (unsigned i = it->count; i-- > 0;) {
        const work *one = it->all[i];
        joined &= seen[i];
        for (unsigned j = 0; j < one->after_count; j++) seen[one->after[j]->index] |= seen[i];
    }
    free(seen);
    return joined;
}

static void end(capture *gone)
{
    capture **at = &captures;
    for (stream *one = streams; one; one = one->next)
        if (one->capture == gone) {
            one->capture = NULL;
            clear(&one->front);
        }
    while (*at != gone) at = &(*at)->next;
    *at = gone->next;
    free(gone);
}

API int cuStreamBeginCapture_v2(void *origin, int mode)
{
    int result = begin_in_context("cuStreamBeginCapture_v2");
    stream *on = origin;
    if (result || (mode != THREAD && mode != RELAXED)) return result ? result : INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    if (on->capture) result = capture_broken(on->capture, "a capture begins");
    else {
        capture *made = calloc(1, sizeof *made);
        graph *into = calloc(1, sizeof *into);
        if (!made || !into) abort();
        *made = (capture){ captures,        ++capture_count, on,  pthread_self(),
                           mode == RELAXED, false,           into };
        captures = made;
        into->users = 1;
        into->next = graphs;
        graphs = into;
        enter(on, made);
    }
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}

/* What keeps the capture from becoming a graph. */
static int refusal(const capture *it, const stream *on)
{
    if (it->broken) return CAPTURE_INVALIDATED;
    if (is_joined(it->graph, &on->front)) return SUCCESS;
    order_fault("a capture ends before all its streams were joined");
    return CAPTURE_UNJOINED;
}

/* Also where a test lets the call fail, the capture is over. */
API int cuStreamEndCapture(void *origin, void **out)
{
    int result = begin_in_context("cuStreamEndCapture");
    stream *on = origin;
    *out = NULL;
    pthread_mutex_lock(&stand_in_lock);
    capture *it = on->capture;
    if (!it) {
        order_fault("a capture ends that did not begin");
        result = INVALID_VALUE;
    } else if (it->origin != on || !pthread_equal(it->thread, pthread_self())) {
        result = it->origin != on ? CAPTURE_UNMATCHED : CAPTURE_WRONG_THREAD;
        (void)capture_broken(it, "a capture ends on another stream or thread");
    } else {
        if (!result) result = refusal(it, on);
        if (result) drop_graph(it->graph);
        else {
            *out = it->graph;
            count_left(1);
        }
        end(it);
    }
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}

API int cuStreamIsCapturing(void *on, int *status)
{
    const capture *it = ((stream *)on)->capture;
    *status = !it ? 0 : it->broken ? 2 : 1;
    return SUCCESS;
}

/* The last work of the stream, where it is one. */
API int cuStreamGetCaptureInfo_v3(void *asked, int *status, unsigned long long *id, void **of,
                                  void *const **last, const void **edges, size_t *count)
{
    int result = begin_in_context("cuStreamGetCaptureInfo_v3");
    const stream *on = asked;
    if (result || id || of || edges) return result ? result : INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    *status = !on->capture ? 0 : on->capture->broken ? 2 : 1;
    *last = (void *const *)on->front.last;
    *count = on->front.count;
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}

API int cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = thread_mode;
    if (*mode < 0 || *mode > RELAXED) return INVALID_VALUE;
    thread_mode = *mode;
    *mode = before;
    return SUCCESS;
}

/* ----------------------------------------------------------------- programs */

/* Its nodes are gone. Programs made from it go on. */
API int cuGraphDestroy(void *gone)
{
    pthread_mutex_lock(&stand_in_lock);
    ((graph *)gone)->is_destroyed = true;
    drop_graph(gone);
    count_left(-1);
    pthread_mutex_unlock(&stand_in_lock);
    return begin_in_context("cuGraphDestroy");
}

API int cuGraphInstantiateWithFlags(void **out, void *from, unsigned long long flags)
{
    int result = begin_in_context("cuGraphInstantiateWithFlags");
    if (result || flags) return result ? result : INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    program *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->graph = from;
    made->graph->users++;
    made->users = 1;
    for (unsigned i = 1; i < made->graph->lanes; i++) made->lanes[i] = order_open();
    made->kernels = calloc(made->graph->count + 1, sizeof(work *));
    if (!made->kernels) abort();
    if (made->graph->count)
        memcpy(made->kernels, made->graph->all, made->graph->count * sizeof(work *));
    count_left(1);
    pthread_mutex_unlock(&stand_in_lock);
    *out = made;
    return SUCCESS;
}

static void drop_program(program *gone)
{
    if (--gone->users) return;
    for (unsigned i = 1; i < gone->graph->lanes; i++) order_close(gone->lanes[i]);
    while (gone->changed) {
        work *changed = gone->changed;
        gone->changed = changed->next;
        free_work(changed);
    }
    free(gone->kernels);
    drop_graph(gone->graph);
    free(gone);
}

/* A program that is under way ends first. */
API int cuGraphExecDestroy(void *gone)
{
    pthread_mutex_lock(&stand_in_lock);
    drop_program(gone);
    count_left(-1);
    pthread_mutex_unlock(&stand_in_lock);
    return begin_in_context("cuGraphExecDestroy");
}

/* CUDA_KERNEL_NODE_PARAMS_v2 */
typedef struct kernel_call {
    void *function;
    unsigned blocks[3], threads[3], shared_bytes;
    void **arguments, **extra;
    void *kernel, *context;
} kernel_call;

/* For the launches that come. Those under way keep what they have. */
API int cuGraphExecKernelNodeSetParams_v2(void *in, void *node, const void *with)
{
    int result = begin_in_context("cuGraphExecKernelNodeSetParams_v2");
    program *it = in;
    const work *of = node;
    const kernel_call *call = with;
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    if (it->graph->is_destroyed) order_fault("a node of a graph that was destroyed is changed");
    if (it->graph->is_destroyed || of->kind != KERNEL || of->index >= it->graph->count
        || it->graph->all[of->index] != of || call->extra || call->kernel)
        result = INVALID_VALUE;
    else {
        work *made = calloc(1, sizeof *made);
        if (!made) abort();
        made->kind = KERNEL;
        set_kernel(made, call->function, call->blocks, call->threads, call->shared_bytes,
                   call->arguments[0]);
        made->next = it->changed;
        it->changed = made;
        it->kernels[of->index] = made;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}

/* A library's work, once for each launch. */
static work *launch_of(const work *captured)
{
    work *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->kind = OTHER;
    made->name = captured->name;
    made->ready = captured->ready;
    made->call = captured->call;
    made->argument = captured->launched(captured->argument);
    return made;
}

API int cuGraphLaunch(void *which, void *on)
{
    int result = begin_in_context("cuGraphLaunch");
    program *it = which;
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    if (((stream *)on)->capture) {
        result = capture_broken(((stream *)on)->capture, "a graph is launched");
    } else {
        work *made = add_work(on, PROGRAM);
        made->name = "a graph";
        made->program = it;
        made->launch = ++it->launches;
        made->left = it->graph->count;
        made->done = calloc(made->left + 1, sizeof *made->done);
        made->ends = calloc(made->left + 1, sizeof *made->ends);
        made->kernels = calloc(made->left + 1, sizeof(work *));
        if (!made->done || !made->ends || !made->kernels) abort();
        if (made->left) memcpy(made->kernels, it->kernels, made->left * sizeof(work *));
        for (unsigned i = 0; i < made->left; i++)
            if (made->kernels[i]->kind == OTHER) made->kernels[i] = launch_of(made->kernels[i]);
        it->users++;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}

static bool can_run(const work *launch, const work *one)
{
    const work *now = launch->kernels[one->index];
    if (launch->done[one->index]) return false;
    if (now->kind == OTHER && !now->ready(now->argument)) return false;
    for (unsigned i = 0; i < one->after_count; i++)
        if (!launch->done[one->after[i]->index]) return false;
    return true;
}

/* A launch begins after the one before it, on any stream. */
bool program_step(unsigned number, work *launch)
{
    program *it = launch->program;
    const graph *of = it->graph;
    if (it->finished != launch->launch - 1) return false;
    if (!launch->begun) {
        order_begin(number, &launch->host, launch->name);
        launch->start = *order_now(number);
        launch->begun = true;
    }
    if (!of->count) return true;
    unsigned at = (unsigned)(draw() % of->count), tries = 0;
    while (tries++ < of->count && !can_run(launch, of->all[at])) at = (at + 1) % of->count;
    if (tries > of->count) return false; /* a library's work waits */
    const work *one = of->all[at];
    unsigned lane = one->lane ? it->lanes[one->lane] : number;
    order_wait(lane, &launch->start);
    for (unsigned i = 0; i < one->after_count; i++)
        order_wait(lane, &launch->ends[one->after[i]->index]);
    order_begin(lane, &launch->host, launch->kernels[at]->name);
    carry_out(launch->kernels[at]);
    launch->ends[at] = *order_now(lane);
    launch->done[at] = true;
    order_wait(number, &launch->ends[at]);
    launch->left--;
    return true;
}

bool program_waits(const work *launch)
{
    for (unsigned i = 0; i < launch->program->graph->count; i++)
        if (launch->program->graph->all[i]->kind == OTHER) return true;
    return false;
}

void program_over(work *launch)
{
    for (unsigned i = 0; i < launch->program->graph->count; i++)
        if (launch->kernels[i]->kind == OTHER) free_work(launch->kernels[i]);
    launch->program->finished = launch->launch;
    drop_program(launch->program);
    free(launch->done);
    free(launch->ends);
    free(launch->kernels);
}

bool program_uses(const void *memory, size_t bytes)
{
    uintptr_t begin = (uintptr_t)memory;
    for (const graph *one = graphs; one; one = one->next)
        for (unsigned i = 0; i < one->count; i++) {
            const work *now = one->all[i];
            if (now->kind != COPY) continue;
            if ((uintptr_t)now->to - begin < bytes) return true;
            if (!now->memory && (uintptr_t)now->from - begin < bytes) return true;
        }
    return false;
}
