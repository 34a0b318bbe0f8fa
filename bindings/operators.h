/* operators.h: what the files that bind operators share: running one and pushing its results, and
 * how methods are registered.
 *
 * A method's function is a closure: upvalue 1 the runtime, 2 its operator (or table of forms), 3
 * whether it writes in place. */
#ifndef MOONSHARD_BINDINGS_OPERATORS_H
#define MOONSHARD_BINDINGS_OPERATORS_H

#include "bindings/state.h"

/* Methods that share a function: name, function, operator, whether there is a twin `name_`. */
typedef struct ms_method {
    const char *name;
    lua_CFunction function;
    const ms_op *op;
    bool twin;
} ms_method;

/* Adds methods, and their twins, to the table on top of the stack. */
void ms_lua_add_methods(lua_State *L, int runtime, const ms_method *methods, size_t count);
/* The same to the methods of tensors; the module is on top of the stack. */
void ms_lua_add_tensor_methods(lua_State *L, int runtime, const ms_method *methods, size_t count);
void ms_lua_add_method(lua_State *L, int runtime, const char *name, const char *suffix,
                       lua_CFunction function, const void *data, bool in_place);

const ms_op *ms_lua_own_op(lua_State *L);
bool ms_lua_own_in_place(lua_State *L);

/* Runs an operator of one result and pushes it (or, in place, its first argument). */
int ms_lua_apply(lua_State *L, const ms_op *op, const ms_attributes *attributes, bool in_place,
                 ms_tensor *const *inputs, uint32_t count);
/* The same on the tensor at 1. */
int ms_lua_apply_one(lua_State *L, const ms_op *op, const ms_attributes *attributes, bool in_place);
/* Runs an operator of up to three results and pushes them all. */
int ms_lua_apply_many(lua_State *L, const ms_op *op, const ms_attributes *attributes,
                      ms_tensor *const *inputs, uint32_t count, int results);
/* A method of two tensors without attributes. */
int ms_lua_two_tensors(lua_State *L);

/* A new tensor of that shape filled with value; for numbers where a tensor is needed. */
ms_status ms_lua_filled(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                        double value, ms_tensor **out);
/* A number or boolean; `what` names it in the error. */
double ms_lua_number(lua_State *L, int index, const char *what);

void ms_open_operators(lua_State *L, int runtime);

#endif
