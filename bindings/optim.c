/* optim.c: steps of the native optimizers, clipping and unscaling in Lua. Groups and schedules are
 * in lua/moonshard/optim/optimizer.lua and step.lua. */
#include "bindings/optim.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "moonshard/optim.h"

/* In the order of ms_optimizer_kind: an index into this list is the kind. */
static const char *const kinds[] = { "sgd",     "adam",  "adamw",  "adagrad", "adadelta",
                                     "rmsprop", "rprop", "adamax", NULL };

/* The kind at that index; raises and names the nearest. The names are those of the functions in
 * lua/moonshard/optim/init.lua. */
static ms_optimizer_kind check_kind(lua_State *L, int index)
{
    return (ms_optimizer_kind)ms_lua_choice(L, index, kinds, "optimizer");
}

/* Field `name` = { a, b } of the table at `index`; through __index, so that a group falls back to
 * its defaults. A list of another length is an error, since a missing second beta would silently be
 * the default. */
static void pair(lua_State *L, int index, const char *name, double *a, double *b)
{
    int type = lua_getfield(L, index, name);
    /* The kind's default stays. */
    if (type == LUA_TNIL) {
        lua_pop(L, 1);
        return;
    }
    if (type != LUA_TTABLE || lua_rawlen(L, -1) != 2)
        ms_lua_error(L, "%s must be a list of two numbers", name);
    /* Written one by one: a second number that is wrong raises after the first was stored, but the
     * struct is the caller's and goes with the error. */
    double *values[] = { a, b };
    for (int i = 0; i < 2; i++) {
        if (lua_rawgeti(L, -1, i + 1) != LUA_TNUMBER)
            ms_lua_error(L, "%s[%d] must be a number, not %s", name, i + 1, luaL_typename(L, -1));
        *values[i] = lua_tonumber(L, -1);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

/* The hyper-parameters that are plain numbers; those that the group does not give stay as they are.
 * Which of them an optimizer has is checked in Lua, where groups are made. */
static void read_numbers(lua_State *L, int index, ms_hyperparameters *hyper)
{
    struct {
        const char *name;
        double *value;
    } numbers[] = {
        { "weight_decay", &hyper->weight_decay },
        { "eps", &hyper->eps },
        { "momentum", &hyper->momentum },
        { "dampening", &hyper->dampening },
        { "lr_decay", &hyper->lr_decay },
        { "initial_accumulator_value", &hyper->initial_accumulator_value },
        { "rho", &hyper->rho },
        { "alpha", &hyper->alpha },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        *numbers[i].value = ms_lua_field_number(L, index, numbers[i].name, *numbers[i].value);
}

/* Hyper-parameters from a group. lr may be a one-element tensor: then *lr is it. It is read in
 * every step, so a schedule that writes group.lr takes effect with the next one. An lr that is a
 * tensor is not read by the host. */
static void read_group(lua_State *L, int index, ms_optimizer_kind kind, ms_hyperparameters *hyper,
                       ms_tensor **lr)
{
    luaL_checktype(L, index, LUA_TTABLE);
    /* What the group does not say has the kind's default. */
    *hyper = ms_optimizer_defaults(kind);
    *lr = NULL;
    lua_getfield(L, index, "lr");
    if (ms_lua_is_tensor(L, -1)) *lr = ms_lua_tensor(L, -1);
    lua_pop(L, 1);
    /* A tensor is left to the task, which reads it on the device. */
    if (!*lr) hyper->lr = ms_lua_field_number(L, index, "lr", hyper->lr);
    read_numbers(L, index, hyper);
    pair(L, index, "betas", &hyper->beta1, &hyper->beta2);
    pair(L, index, "etas", &hyper->eta_minus, &hyper->eta_plus);
    pair(L, index, "step_sizes", &hyper->step_min, &hyper->step_max);
    hyper->nesterov = ms_lua_field_boolean(L, index, "nesterov", hyper->nesterov);
    hyper->maximize = ms_lua_field_boolean(L, index, "maximize", hyper->maximize);
    hyper->amsgrad = ms_lua_field_boolean(L, index, "amsgrad", hyper->amsgrad);
    hyper->centered = ms_lua_field_boolean(L, index, "centered", hyper->centered);
}
/* core.optim_check(kind, group): raises if a hyper-parameter is out of range. Called when an
 * optimizer is made, so that a bad value is an error there and not in the first step. */
static int optim_check(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_optimizer_kind kind = check_kind(L, 1);
    ms_hyperparameters hyper;
    ms_tensor *lr;
    read_group(L, 2, kind, &hyper, &lr);
    ms_lua_ok(L, ms_optimizer_check(engine, kind, &hyper));
    return 0;
}

/* Pushes a kept tensor filled with `start`, of the shape of `like` (NULL: one number). State lives
 * across steps, hence kept. */
static void push_filled(lua_State *L, ms_dtype dtype, const ms_tensor *like, double start)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *made = NULL, *result = NULL;
    uint32_t dims = like ? ms_tensor_dims(like) : 0;
    const int64_t *shape = like ? ms_tensor_shape(like) : NULL;
    ms_attributes attributes = { .scalar = { .value = start } };
    ms_status status = ms_tensor_new(engine, dtype, dims, shape, &made);
    if (!status) status = ms_op_apply(engine, &ms_op_fill, &attributes, true, &made, 1, &result, 1);
    ms_tensor_release(result);
    if (status) ms_tensor_release(made);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, made);
    ms_handle_keep(handle);
}

/* Calls argument 9, if it is a function: place(name) -> the memory that a new state gets, zeros. */
static bool push_placed(lua_State *L, const char *name, double start)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_tensor *result = NULL;
    if (!lua_isfunction(L, 9)) return false;
    lua_pushvalue(L, 9);
    lua_pushstring(L, name);
    lua_call(L, 1, 1);
    ms_tensor *made = ms_lua_tensor(L, -1);
    ms_attributes attributes = { .scalar = { .value = start } };
    if (start != 0)
        ms_lua_ok(L, ms_op_apply(engine, &ms_op_fill, &attributes, true, &made, 1, &result, 1));
    ms_tensor_release(result);
    return true;
}

/* State `name` of the table at `state`; where it is missing a new tensor is made, filled with
 * `start`, kept and stored. State is made in the first step of a parameter, when its dtype and
 * shape are final. It is f32 (the count i64), also for 16-bit parameters. */
static ms_tensor *state_tensor(lua_State *L, int state, const char *name, ms_dtype dtype,
                               const ms_tensor *like, double start)
{
    if (lua_getfield(L, state, name) == LUA_TNIL) {
        lua_pop(L, 1);
        if (!like || !push_placed(L, name, start)) push_filled(L, dtype, like, start);
        lua_pushvalue(L, -1);
        lua_setfield(L, state, name);
    }
    ms_tensor *t = ms_lua_tensor(L, -1);
    lua_pop(L, 1); /* the state table keeps it */
    return t;
}

/* The f32 copy of a 16-bit parameter, made from it at first. The copy is a task of the current
 * stream, before the step that uses it. */
static ms_tensor *master_of(lua_State *L, int state, ms_tensor *parameter)
{
    bool fresh = lua_getfield(L, state, "master") == LUA_TNIL;
    lua_pop(L, 1);
    ms_tensor *master = state_tensor(L, state, "master", MS_F32, parameter, 0);
    if (!fresh) return master;
    /* In place: the master copy gets the parameter's values, widened. */
    ms_tensor *inputs[] = { master, parameter }, *result = NULL;
    ms_lua_ok(
        L, ms_op_apply(ms_lua_runtime(L)->engine, &ms_op_copy, NULL, true, inputs, 2, &result, 1));
    ms_tensor_release(result);
    return master;
}

/* How a 16-bit parameter is updated: in f32, in its master copy; or, with master = "none", in its
 * own dtype with stochastic rounding. The numbers for the rounding come from argument 7, which
 * tells parameters apart, and argument 8, which tells steps apart: they do not depend on what else
 * was drawn before. Without these arguments they are the engine's next ones. */
static void choose_rounding(lua_State *L, ms_optimizer_step *step)
{
    static const char *const choices[] = { "f32", "none", NULL };
    ms_engine *engine = ms_lua_runtime(L)->engine;
    bool none =
        lua_getfield(L, 5, "master") != LUA_TNIL && ms_lua_choice(L, -1, choices, "master") == 1;
    lua_pop(L, 1);
    if (!none) step->master = master_of(L, 4, step->parameter);
    else if (lua_isinteger(L, 7))
        step->random =
            (ms_random){ .seed = ms_engine_random(engine).seed ^ (uint64_t)lua_tointeger(L, 7),
                         .step = (uint64_t)ms_lua_integer(L, 8, 0, UINT32_MAX, "count") };
    else step->random = ms_engine_draw(engine);
}

/* What the rate is if the step before did not count; the group has this only where the host does
 * not know it yet. */
static void read_lost(lua_State *L, ms_optimizer_step *step)
{
    lua_pushliteral(L, "counted");
    if (lua_rawget(L, 5) != LUA_TNIL) {
        step->counted = ms_lua_tensor(L, -1);
        step->lr_if_lost = ms_lua_field_number(L, 5, "lr_if_lost", 0);
    }
    lua_pop(L, 1);
}

/* core.optim_step(kind, parameter, gradient, state, group, only_if?, salt?, count?, place?):
 * enqueues one step of one parameter. Missing tensors of the state are made and stored in the Lua
 * table, which owns them; so everything that may raise comes before the step itself. See
 * choose_rounding for salt and count. only_if is a bool on the device: where it is false the task
 * changes nothing, and the host never waits for it. */
static int optim_step(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_optimizer_step step = { .kind = check_kind(L, 1),
                               .parameter = ms_lua_tensor(L, 2),
                               .gradient = ms_lua_tensor(L, 3),
                               .only_if = ms_lua_optional_tensor(L, 6) };
    /* The state table is the script's: checkpoints save it. */
    luaL_checktype(L, 4, LUA_TTABLE);
    read_group(L, 5, step.kind, &step.hyper, &step.lr);
    ms_lua_ok(L, ms_optimizer_check(engine, step.kind, &step.hyper));
    read_lost(L, &step);
    /* On the device, because a step that only_if forbids must not count. */
    step.count = state_tensor(L, 4, "step", MS_I64, NULL, 0);
    for (uint32_t i = 0; i < MS_OPTIMIZER_STATES; i++) {
        const char *name = ms_optimizer_state_name(step.kind, &step.hyper, i);
        if (name)
            step.states[i] = state_tensor(L, 4, name, MS_F32, step.parameter,
                                          ms_optimizer_state_start(step.kind, &step.hyper, i));
    }
    /* f32 parameters are updated as they are. */
    if (ms_tensor_dtype(step.parameter) != MS_F32) choose_rounding(L, &step);
    ms_lua_ok(L, ms_optimizer_step_param(engine, &step));
    return 0;
}

/* core.batch(begins): begins a batch of steps or ends it (ms_engine_batch). Each is ended. */
static int batch(lua_State *L)
{
    ms_engine_batch(ms_lua_enter(L), lua_toboolean(L, 1) ? 1 : -1);
    return 0;
}

/* core.clip_norm(gradients, max, p) -> norm before, position of the first gradient that is not
 * finite (from 0; -1: none). Both results are tensors on the device: the step that follows is
 * enqueued without waiting for the norm. */
static int clip_norm(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    uint32_t count = 0;
    double max = luaL_checknumber(L, 2), p = luaL_optnumber(L, 3, 2);
    ms_tensor **gradients = ms_lua_tensor_list(L, 1, &count), *norm = NULL, *bad = NULL;
    /* Of the norm and of the position. */
    ms_handle *handle = ms_lua_new_handle(L), *second = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_clip_norm(engine, gradients, count, max, p, &norm, &bad));
    ms_handle_fill(handle, norm);
    ms_handle_fill(second, bad);
    return 2;
}

/* core.unscale(gradients, factor) -> bool on the device: whether all are finite. factor is a
 * tensor, because a loss scale changes on the device. */
static int unscale(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    uint32_t count = 0;
    ms_tensor *factor = ms_lua_tensor(L, 2), *finite = NULL;
    ms_tensor **gradients = ms_lua_tensor_list(L, 1, &count);
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_unscale(engine, gradients, count, factor, &finite));
    ms_handle_fill(handle, finite);
    return 1;
}

/* Only what one task does is here; groups, schedules and checkpoints are Lua's. */
void ms_open_optim(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = {
        { "optim_check", optim_check }, { "optim_step", optim_step }, { "batch", batch },
        { "clip_norm", clip_norm },     { "unscale", unscale },       { NULL, NULL }
    };
    ms_lua_register(L, runtime, functions);
}
