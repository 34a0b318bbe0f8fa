/* stream.h: streams, futures, probes and traces in Lua. */
#ifndef MOONSHARD_BINDINGS_STREAM_H
#define MOONSHARD_BINDINGS_STREAM_H

#include "bindings/state.h"

/* Pushes a stream, which the engine owns. */
int ms_lua_push_stream(lua_State *L, ms_stream *stream);
void ms_open_stream(lua_State *L, int runtime);

#endif
