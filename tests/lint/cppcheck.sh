#!/bin/sh
# Runs cppcheck over the engine and the bindings (changed.sh: over which files). With a folder as argument it keeps results there, and
# looks only at files that have changed since.
set -eu
cd "$(dirname "$0")/../.."
places=$(tests/lint/changed.sh)
[ -n "$places" ] || exit 0
set -- ${1:+--cppcheck-build-dir="$1"}
exec cppcheck --quiet --std=c11 --language=c --platform=unix64 \
    --enable=warning,performance,portability --inline-suppr --error-exitcode=1 \
    --suppressions-list=tests/lint/cppcheck.suppress --template='{callstack}: {severity}: {message} [{id}]' \
    -D_GNU_SOURCE -DMS_ISA=portable -DMS_WITH_ONEDNN=1 -U__cplusplus \
    -I engine/include -I engine "$@" $places
