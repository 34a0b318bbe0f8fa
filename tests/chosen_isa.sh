#!/bin/sh
# Of the instruction sets below the best one that tests run under once more (ctest: each-isa), the one whose turn it is: the commit
# chooses. Prints it, or with --others a regular expression for tests under the others.
#
#     tests/chosen_isa.sh build/release [--others]
set -eu
isas=$(sed -n 's/^[^ ]*@\(portable\|avx[0-9a-z]*\) .*/\1/p' "$1/tests/needs" | sort -u)
count=$(printf '%s\n' "$isas" | wc -l)
commit=$(git -C "$(dirname "$0")" rev-parse --short=6 HEAD 2>/dev/null || echo 0)
turn=$((0x$(printf '%.6s' "$commit") % count + 1))
if [ "${2:-}" = --others ]; then
    printf '@(%s)$\n' "$(printf '%s\n' "$isas" | sed "${turn}d" | paste -s -d '|')"
else
    printf '%s\n' "$isas" | sed -n "${turn}p"
fi
