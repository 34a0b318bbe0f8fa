#!/bin/sh
# Fails if clang-format (the program is the argument) would lay out a C file in another way than it stands.
#
#     clang-format-14 -i FILE    formats a file
set -eu
cd "$(dirname "$0")/../.."
find engine bindings recipes tests -name '*.[ch]' -print0 | xargs -0 "$1" --dry-run -Werror
