-- How luarocks builds and installs Moonshard: `luarocks --lua-version 5.4 make` in a clone of the repository.
-- The tree that it installs into has the shape of any installation, so the program finds its Lua files there.
rockspec_format = "3.0"
package = "moonshard"
version = "0.1.0-1"
source = { url = "git+file://." }
description = {
  summary = "Distributed training without Python: a C engine with Lua scripts for its communication",
  detailed = "Tensors with a gradient tape, streams, collectives, optimizers and data parallelism in C; recipes, communication hooks and overlap policies in Lua 5.4.",
}
supported_platforms = { "linux" }
dependencies = { "lua >= 5.4, < 5.5" }
external_dependencies = { DNNL = { header = "dnnl.h" }, JANSSON = { header = "jansson.h" }, NETTLE = { header = "nettle/hmac.h" }, PCRE2 = { header = "pcre2.h" }, UTF8PROC = { header = "utf8proc.h" }, XXHASH = { header = "xxhash.h" }, ZLIB = { header = "zlib.h" } }
build = {
  type = "command",
  -- Libraries lie beside the Lua module, where luarocks puts all that is compiled.
  build_command = "cmake -S . -B build/rock -DMOONSHARD_TESTS=OFF -DCMAKE_INSTALL_LIBDIR=lib/lua/5.4 && cmake --build build/rock --parallel 2",
  install_command = "rm -rf build/rock/stage && cmake --install build/rock --prefix build/rock/stage"
    .. " && mkdir -p '$(LUADIR)' '$(LIBDIR)/moonshard' '$(BINDIR)'"
    .. " && cp -R build/rock/stage/share/lua/5.4/. '$(LUADIR)'"
    -- Nothing is installed elsewhere, so recipes and texts go among the Lua files.
    .. " && cp -R build/rock/stage/share/moonshard '$(LUADIR)/moonshard/share'"
    -- luarocks moves files one by one, which breaks links: the libraries go by the names under which they are loaded.
    .. " && cp build/rock/stage/lib/lua/5.4/moonshard/core.so '$(LIBDIR)/moonshard' && cp -L build/rock/stage/lib/lua/5.4/lib*.so.? '$(LIBDIR)'"
    .. " && cp build/rock/stage/bin/moonshard '$(BINDIR)'",
}
