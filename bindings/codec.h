/* codec.h: codecs in Lua. */
#ifndef MOONSHARD_BINDINGS_CODEC_H
#define MOONSHARD_BINDINGS_CODEC_H

#include "bindings/state.h"

void ms_open_codec(lua_State *L, int runtime);

#endif
