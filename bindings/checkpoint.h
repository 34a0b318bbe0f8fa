/* checkpoint.h: copies of tensors, and folders of checkpoints that are written while Lua goes on.
 */
#ifndef MOONSHARD_BINDINGS_CHECKPOINT_H
#define MOONSHARD_BINDINGS_CHECKPOINT_H

#include "bindings/state.h"

void ms_open_checkpoint(lua_State *L, int runtime);

#endif
