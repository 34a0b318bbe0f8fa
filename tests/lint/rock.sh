#!/bin/sh
# Builds and installs the rock with luarocks, and uses it with a stock interpreter and with the program. The build folder is
# configured before, for a build that is quick and not optimized: the rockspec's own command keeps these settings.
set -eu
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset LUA_PATH LUA_CPATH
rm -rf build/rock
cmake -S . -B build/rock -DCMAKE_BUILD_TYPE=Debug -DMOONSHARD_WITH_CUDA=OFF -DMOONSHARD_ISA=portable >"$folder/log"
luarocks --lua-version 5.4 --tree "$folder/tree" make >"$folder/log" 2>&1 || { tail -n 40 "$folder/log"; exit 1; }
eval "$(luarocks --lua-version 5.4 --tree "$folder/tree" path)"
cd "$folder"
lua5.4 -e 'assert(require "moonshard".ones { 2 }:sum():item() == 2)'
echo 'local ms = require "moonshard" assert(ms.world():all_reduce(ms.ones { 1 }):sync():item() == 2)' >ranks.lua
"$folder/tree/bin/moonshard" run ranks.lua -n 2
"$folder/tree/bin/moonshard" run gpt_bytes --help | grep -q "^options of this recipe"
echo "the rock works"
