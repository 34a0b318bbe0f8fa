#!/bin/sh
# Fails if clang-tidy (the program is the first argument) finds something in a C file (changed.sh: in which); .clang-tidy says what it
# looks for. The second argument is a build folder. Files that are built for each instruction set are left out: they would be read many times.
set -eu
cd "$(dirname "$0")/../.."
places=$(tests/lint/changed.sh)
[ -n "$places" ] || exit 0
find $places -name '*.c' ! -path '*/isa/*' -print0 |
    xargs -0 -r -n 8 "$1" -p "$2" --quiet
