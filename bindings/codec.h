/* codec.h: codecs in Lua. */
#ifndef MOONSHARD_BINDINGS_CODEC_H
#define MOONSHARD_BINDINGS_CODEC_H

#include "bindings/state.h"
#include "moonshard/tensor.h"

/* The codec at this index; raises for anything else. It is of the caller's stack. */
const ms_codec *ms_lua_codec(lua_State *L, int index);

void ms_open_codec(lua_State *L, int runtime);

#endif
