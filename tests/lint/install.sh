#!/bin/sh
# Installs a build under another prefix and uses it from there: pkg-config, CMake, a stock interpreter and the CLI.
#
#     tests/lint/install.sh BUILD LUA GENERATOR
set -eu
build=$1
lua=$2
CMAKE_GENERATOR=$3
export CMAKE_GENERATOR
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
prefix=$folder/root/opt/moonshard
unset LUA_PATH LUA_CPATH

# DESTDIR and the prefix of `cmake --install` both differ from what was configured.
DESTDIR=$folder/root cmake --install "$build" --prefix /opt/moonshard >"$folder/said"
libraries=$(dirname "$(find "$prefix" -name moonshard.pc)")
PKG_CONFIG_PATH=$libraries
export PKG_CONFIG_PATH

cat >"$folder/host.c" <<'END'
/* A host that links the engine and opens it in a Lua state of its own. */
#include <lauxlib.h>
#include <lualib.h>
#include <moonshard/moonshard.h>
#include <moonshard/moonshard_lua.h>
int main(void)
{
    lua_State *L = luaL_newstate();
    if (!L) return 1;
    lua_close(L);
    return ms_status_name(MS_OK) ? 0 : 1;
}
END
cat >"$folder/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(host C)
find_package(moonshard REQUIRED)
add_executable(host host.c)
target_link_libraries(host PRIVATE moonshard::moonshard moonshard::lua)
END

echo "with pkg-config"
cc "$folder/host.c" -o "$folder/host" $(pkg-config --cflags --libs moonshard-lua)
"$folder/host"
echo "with CMake"
cmake -S "$folder" -B "$folder/build" -DCMAKE_PREFIX_PATH="$prefix" >"$folder/log" 2>&1 &&
    cmake --build "$folder/build" >>"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
"$folder/build/host"
echo "recipes/embed with CMake"
source=$(cd "$(dirname "$0")/../.." && pwd)
cmake -S "$source/recipes/embed" -B "$folder/embed" -DCMAKE_PREFIX_PATH="$prefix" >"$folder/log" 2>&1 &&
    cmake --build "$folder/embed" >>"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
(cd "$source" && "$folder/embed/two_engines")
echo "with $lua, and the variables that the installation names"
sed -n "s|/opt/moonshard|$prefix|g; /^export LUA_/p" "$folder/said" >"$folder/variables"
[ "$(wc -l <"$folder/variables")" = 2 ]
(. "$folder/variables" && "$lua" -e 'assert(require "moonshard")')
echo "with the CLI"
"$prefix/bin/moonshard" --help >/dev/null
echo "with a recipe of the installation, and the text that it trains on"
(cd "$folder" && "$prefix/bin/moonshard" run gpt_bytes --help | grep -q "^options of this recipe")
[ ! -d /usr/share/games/fortunes ] || [ -f "$prefix/share/moonshard/text/computers" ] && [ -f "$prefix/share/moonshard/text/licence.txt" ]
echo "its man page and completions"
for file in man/man1/moonshard.1 bash-completion/completions/moonshard zsh/site-functions/_moonshard; do
    [ -s "$prefix/share/$file" ]
done
echo "one version everywhere"
version=$("$prefix/bin/moonshard" --version | cut -d' ' -f2)
[ "$(pkg-config --modversion moonshard)" = "$version" ]
[ "$(pkg-config --modversion moonshard-lua)" = "$version" ]
grep -q "PACKAGE_VERSION \"$version\"" "${libraries%/pkgconfig}/cmake/moonshard/moonshardConfigVersion.cmake"
grep -q "^version = \"$version-1\"" "$source/moonshard-$version-1.rockspec"
[ "$(sed -n 's/^## \[*\([0-9.]*\).*/\1/p' "$source/CHANGELOG.md" | head -n 1)" = "$version" ]
