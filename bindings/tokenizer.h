/* tokenizer.h: tokenizers in Lua. */
#ifndef MOONSHARD_BINDINGS_TOKENIZER_H
#define MOONSHARD_BINDINGS_TOKENIZER_H

#include "bindings/state.h"

void ms_open_tokenizer(lua_State *L, int runtime);

#endif
