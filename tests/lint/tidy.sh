#!/bin/sh
# Fails if clang-tidy (the program is the first argument) finds something in a C file; .clang-tidy says what it looks for. The
# second argument is a build folder. Files that are built for each instruction set are left out: they would be read many times.
set -eu
cd "$(dirname "$0")/../.."
find engine bindings -name '*.c' ! -path '*/isa/*' -print0 |
    xargs -0 -n 8 "$1" -p "$2" --quiet
