/* stream.c: streams, futures, probes and traces in Lua. */
#include "bindings/stream.h"

#include <stdio.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/fields.h"
#include "bindings/enter.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define MS_STREAM_TYPE "ms.Stream"
#define MS_PROBE_TYPE "ms.Probe"

/* ------------------------------------------------------------------ streams */

/* The engine owns the stream and keeps it to its end: a handle needs no __gc and never goes stale.
 */
typedef struct stream_box {
    ms_stream *stream;
} stream_box;

/* Handles are made again each time; __eq compares what they represent. */
int ms_lua_push_stream(lua_State *L, ms_stream *stream)
{
    stream_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    box->stream = stream;
    luaL_setmetatable(L, MS_STREAM_TYPE);
    return 1;
}

/* The stream at that index; raises for anything else. */
static ms_stream *check_stream(lua_State *L, int index)
{
    return ((stream_box *)luaL_checkudata(L, index, MS_STREAM_TYPE))->stream;
}

/* core.stream(name?, priority?) -> the current stream, or the one of that name. A name that is new
 * makes a stream, of which an engine has MS_STREAMS_MAX at most. "compute" is there from the start.
 * With a priority (ms_stream_priority), a stream that has another one is refused. */
static int stream(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_stream *found = ms_engine_current(engine);
    bool is_given = !lua_isnoneornil(L, 2);
    int32_t priority =
        is_given ? (int32_t)ms_lua_integer(L, 2, MS_PRIORITY_LOW, MS_PRIORITY_HIGH, "priority")
                 : MS_PRIORITY_NORMAL;
    if (!lua_isnoneornil(L, 1))
        ms_lua_ok(L, ms_engine_stream_with(engine, luaL_checkstring(L, 1), priority, &found));
    if (is_given && ms_stream_priority(found) != priority)
        return ms_lua_error(L,
                            "stream '%s' was made with another priority, which it keeps: give the "
                            "priority where the stream is first used",
                            ms_stream_name(found));
    return ms_lua_push_stream(L, found);
}

/* core.stream_at(index) -> the stream of that number, which a future keeps instead of a handle:
 * plain numbers can be stored in any table. */
static int stream_at(lua_State *L)
{
    ms_stream *found = ms_engine_stream_at(
        ms_lua_enter(L), (uint16_t)ms_lua_integer(L, 1, 0, MS_STREAMS_MAX - 1, "stream"));
    /* Streams are numbered in the order of their making, without gaps. */
    if (!found) return ms_lua_error(L, "there is no stream %d", (int)lua_tointeger(L, 1));
    return ms_lua_push_stream(L, found);
}

/* stream:name() -> its name */
static int stream_name(lua_State *L)
{
    lua_pushstring(L, ms_stream_name(check_stream(L, 1)));
    return 1;
}

/* stream:run(f) -> what f returns. The stream is current inside f only, also where f raises.
 * Tensors that f makes belong to that stream's order; what uses them on another stream waits by
 * itself. */
static int stream_run(lua_State *L)
{
    ms_stream *target = check_stream(L, 1);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_settop(L, 2);
    ms_engine *engine = ms_lua_enter(L);
    ms_stream *before = ms_engine_set_current(engine, target);
    /* The function is below its arguments, of which there are none. */
    lua_pushvalue(L, 2);
    ms_status status = ms_lua_call(L, ms_lua_runtime(L), 0, LUA_MULTRET);
    ms_engine_set_current(engine, before);
    ms_lua_ok(L, status);
    return lua_gettop(L) - 2;
}

/* stream:sync(): blocks until all that is enqueued on it has run. It waits for this stream only,
 * and raises the first error of it. */
static int stream_sync(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "stream:sync", "hooks only enqueue");
    ms_lua_enter(L);
    ms_lua_ok(L, ms_stream_sync(check_stream(L, 1)));
    return 0;
}

/* __eq: two handles of one stream are equal. Each call makes a new handle, so that the identity of
 * the userdata says nothing. */
static int stream_equal(lua_State *L)
{
    lua_pushboolean(L, check_stream(L, 1) == check_stream(L, 2));
    return 1;
}

/* stream:_point() -> stream index, number: the moment after all that is enqueued on it.
 * stream:_wait(index, number) waits for one. A future keeps these two numbers. */
static int stream_point(lua_State *L)
{
    ms_point point = ms_stream_last(check_stream(L, 1));
    lua_pushinteger(L, point.stream);
    lua_pushinteger(L, (lua_Integer)point.seq);
    return 2;
}

/* The stream waits and the host does not. A point that is not enqueued yet is an error, so waits
 * cannot form a cycle. */
static int stream_wait(lua_State *L)
{
    ms_lua_enter(L);
    ms_point point = { .stream = (uint16_t)ms_lua_integer(L, 2, 0, MS_STREAMS_MAX - 1, "stream"),
                       .seq = (uint64_t)ms_lua_integer(L, 3, 0, INT64_MAX, "number") };
    ms_lua_ok(L, ms_stream_wait(check_stream(L, 1), point));
    return 0;
}

/* core.point_sync(index, number): blocks. Refused in hooks like all that waits. */
static int point_sync(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "sync", "use value(), which lets the stream wait, or and_then");
    ms_engine *engine = ms_lua_enter(L);
    ms_point point = { .stream = (uint16_t)ms_lua_integer(L, 1, 0, MS_STREAMS_MAX - 1, "stream"),
                       .seq = (uint64_t)ms_lua_integer(L, 2, 0, INT64_MAX, "number") };
    ms_lua_ok(L, ms_point_sync(engine, point));
    return 0;
}

/* core.hook_enter(), core.hook_leave(): callbacks of futures are hooks. The library calls them
 * around a future's callback that it runs itself, so that the same things are refused in it as in
 * hooks of the engine. hook_leave never goes below 0: an error may have skipped an enter. */
static int hook_enter(lua_State *L)
{
    ms_lua_runtime(L)->hook_depth++;
    return 0;
}

/* The counterpart of hook_enter, also after an error of the callback. */
static int hook_leave(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    if (runtime->hook_depth > 0) runtime->hook_depth--;
    return 0;
}

/* core.plan(planner, view) -> what planner(view) returns: a hook with numbers only. It is called
 * through call.c, so that it cannot yield out of the forward that asks it. Inside, ms_lua_enter
 * refuses every function that uses tensors, streams or groups. `planning` is cleared also where the
 * planner raises. */
static int plan(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 2);
    runtime->hook_depth++;
    runtime->planning = true;
    ms_status status = ms_lua_call(L, runtime, 1, 1);
    runtime->planning = false;
    runtime->hook_depth--;
    ms_lua_ok(L, status);
    return 1;
}

/* core.set_drain(f): what runs futures' callbacks; core.request_drain(): run it when the current
 * hook has returned. The drain runs when the outermost hook has returned (call.c), so that no
 * callback runs in the middle of another hook. */
static int set_drain(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    ms_lua_set_drain(L, 1);
    return 0;
}

/* A flag is enough: however many futures became ready, the drain goes through all of them. */
static int request_drain(lua_State *L)
{
    ms_lua_runtime(L)->drain = true;
    return 0;
}

/* ------------------------------------------------------------------- probes */

/* A value on its way to the host. It is copied after all work that is enqueued now, and read later
 * without waiting for work that was enqueued after it. The tensor itself may be released meanwhile:
 * the copy has been enqueued. */
typedef struct probe_box {
    ms_readback *readback; /* NULL once the value was read, or the probe closed */
    bool has_value;
    double value;
} probe_box;

/* __gc and __close. The field is cleared first, so that a second call does nothing. Freeing never
 * blocks: the engine keeps the memory until the copy is done. */
static int probe_gc(lua_State *L)
{
    probe_box *box = luaL_checkudata(L, 1, MS_PROBE_TYPE);
    ms_readback *readback = box->readback;
    box->readback = NULL;
    box->has_value = false;
    ms_readback_free(readback);
    return 0;
}

/* core.probe(t) -> probe; t has one element, a float or an integer. Metrics use it: a loss of each
 * step is probed, and read some steps later, when it has long arrived. */
static int probe(lua_State *L)
{
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_lua_enter(L);
    if (ms_tensor_count(t) != 1) {
        char text[200];
        return ms_lua_error(L, "a metric's value must have one element, not %s",
                            ms_tensor_describe(t, text, sizeof text));
    }
    probe_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    /* The box is complete before the engine makes the readback, so __gc is right at any moment. */
    *box = (probe_box){ .readback = NULL };
    luaL_setmetatable(L, MS_PROBE_TYPE);
    ms_lua_ok(L, ms_tensor_readback(t, &box->readback));
    return 1;
}

/* probe:value() -> number; waits only if the device is not there yet. It may be called again and
 * gives the same number. The copy's memory is freed here, not when Lua collects the probe, so that
 * the next steps use it again. */
static int probe_value(lua_State *L)
{
    probe_box *box = luaL_checkudata(L, 1, MS_PROBE_TYPE);
    ms_lua_enter(L);
    if (!box->readback && !box->has_value) return ms_lua_error(L, "the probe was closed");
    if (box->readback) {
        ms_lua_ok(L, ms_readback_number(box->readback, &box->value));
        box->has_value = true;
        ms_readback_free(box->readback);
        box->readback = NULL;
    }
    lua_pushnumber(L, box->value);
    return 1;
}

/* ------------------------------------------------------------------- traces */

/* core.trace_start(): records tasks and waits from now on. What was recorded before is dropped. */
static int trace_start(lua_State *L)
{
    ms_lua_ok(L, ms_trace_start(ms_lua_enter(L)));
    return 0;
}

/* core.trace_count() -> records so far. Tests look at it to see what a call has enqueued. */
static int trace_count(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)ms_trace_count(ms_lua_enter(L)));
    return 1;
}

/* core.trace_label(text?): what follows is for this; nil: for nothing in particular. Hooks label
 * what a link enqueues, so that a trace shows which link a task belongs to. */
static int trace_label(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    if (lua_isnoneornil(L, 1)) ms_trace_relabel(engine, 0);
    else ms_trace_label(engine, "%s", luaL_checkstring(L, 1));
    return 0;
}

/* One record as a table; fields without a meaning for it are absent. */
static void push_record(lua_State *L, ms_engine *engine, const ms_trace_record *record)
{
    /* In the order of ms_task_kind. */
    static const char *const kinds[] = { "compute", "comm", "optimizer", "copy", "wait" };
    const ms_strings *strings = ms_engine_strings(engine);
    lua_createtable(L, 0, 12);
    ms_lua_set_string(L, "name", record->name);
    ms_lua_set_string(L, "stream", ms_stream_name(ms_engine_stream_at(engine, record->stream)));
    ms_lua_set_string(L, "kind", kinds[record->kind]);
    ms_lua_set_integer(L, "enqueued_ns", (int64_t)record->enqueued_ns);
    ms_lua_set_integer(L, "start_ns", (int64_t)record->started_ns);
    ms_lua_set_integer(L, "end_ns", (int64_t)record->finished_ns);
    ms_lua_set_integer(L, "bytes", (int64_t)record->bytes);
    ms_lua_set_number(L, "flops", record->flops);
    ms_lua_set_string(L, "script", ms_strings_get(strings, record->script));
    if (record->label) ms_lua_set_string(L, "label", ms_strings_get(strings, record->label));
    if (record->step >= 0) ms_lua_set_integer(L, "step", record->step);
    if (record->kind == MS_KIND_WAIT)
        ms_lua_set_string(L, "of", ms_stream_name(ms_engine_stream_at(engine, record->of)));
}

/* core.trace_range(first, name): the records since number `first` are a range. */
static int trace_range(lua_State *L)
{
    ms_trace_add_range(ms_lua_enter(L), (size_t)luaL_checkinteger(L, 1), "%s",
                       luaL_checkstring(L, 2));
    return 0;
}

/* List of { name, first, last }: numbers of records, from 1. */
static void push_ranges(lua_State *L, ms_engine *engine)
{
    const ms_strings *strings = ms_engine_strings(engine);
    const ms_trace_range *range;
    lua_newtable(L);
    for (size_t i = 0; (range = ms_trace_range_get(engine, i)); i++) {
        lua_createtable(L, 0, 3);
        ms_lua_set_string(L, "name", ms_strings_get(strings, range->name));
        ms_lua_set_integer(L, "first", (int64_t)range->first + 1);
        ms_lua_set_integer(L, "last", (int64_t)range->end);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
}

/* core.trace_stop() -> list of { name, stream, kind, start_ns, end_ns, enqueued_ns, bytes, flops,
 * script, label, step, of }; label and step may be nil, of is a wait's; and the ranges, as
 * push_ranges. It blocks, since times are known only when the tasks have run. The records stay in
 * the engine until the next start. */
static int trace_stop(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_lua_ok(L, ms_trace_stop(engine));
    size_t count = ms_trace_count(engine);
    lua_createtable(L, (int)count, 0);
    for (size_t i = 0; i < count; i++) {
        push_record(L, engine, ms_trace_get(engine, i));
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    push_ranges(L, engine);
    return 2;
}

/* What is not about one stream or probe: points, hooks, plans and traces. */
static const luaL_Reg functions[] = { { "stream_at", stream_at },
                                      { "stream", stream },
                                      { "point_sync", point_sync },
                                      { "hook_enter", hook_enter },
                                      { "hook_leave", hook_leave },
                                      { "plan", plan },
                                      { "set_drain", set_drain },
                                      { "request_drain", request_drain },
                                      { "probe", probe },
                                      { "trace_start", trace_start },
                                      { "trace_stop", trace_stop },
                                      { "trace_count", trace_count },
                                      { "trace_label", trace_label },
                                      { "trace_range", trace_range },
                                      { NULL, NULL } };

/* A method that begins with _ is the library's own. */
static const luaL_Reg stream_methods[] = { { "name", stream_name },  { "run", stream_run },
                                           { "sync", stream_sync },  { "_point", stream_point },
                                           { "_wait", stream_wait }, { NULL, NULL } };

static const luaL_Reg stream_events[] = { { "__eq", stream_equal }, { NULL, NULL } };

static const luaL_Reg probe_methods[] = { { "value", probe_value }, { NULL, NULL } },
                      probe_events[] = { { "__gc", probe_gc },
                                         { "__close", probe_gc },
                                         { NULL, NULL } };

/* core.stream_methods is the table of a stream's methods: the library adds wait(future) to it. */
void ms_open_stream(lua_State *L, int runtime)
{
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, MS_STREAM_TYPE, stream_events, stream_methods);
    lua_setfield(L, -2, "stream_methods"); /* the library adds wait(future) */
    ms_lua_type(L, runtime, MS_PROBE_TYPE, probe_events, probe_methods);
    lua_pop(L, 1);
}
