#!/bin/sh
# The folders of C files that a slow lint looks at, or single files: in CI all of engine and bindings, elsewhere what differs from the
# branch that this one follows, since CI has looked at the rest. All again where a header differs, and without such a branch.
#
#     tests/lint/changed.sh
cd "$(dirname "$0")/../.."
if [ "${CI:-}" != true ] && base=$(git merge-base HEAD '@{upstream}' 2>/dev/null); then
    files=$({ git diff --name-only --diff-filter=d "$base" && git ls-files --others --exclude-standard; } | grep -E '^(engine|bindings)/.*\.[ch]$')
    printf '%s\n' "$files" | grep -q '\.h$' || { printf '%s' "$files"; exit; }
fi
printf 'engine\nbindings\n'
