#!/bin/sh
# Prints where a slow lint of C looks: in CI in all of engine and bindings, elsewhere in the files that differ from the branch that this
# one follows, since CI has looked at the rest. All again where a header or a lint's own settings differ, and without such a branch.
#
#     tests/lint/changed.sh
cd "$(dirname "$0")/../.."
if [ "${CI:-}" != true ] && base=$(git merge-base HEAD '@{upstream}' 2>/dev/null); then
    files=$({ git diff --name-only --diff-filter=d "$base" && git ls-files --others --exclude-standard; } | sort -u)
    if ! printf '%s\n' "$files" | grep -qE '^(engine|bindings)/.*\.h$|^tests/lint/(cppcheck|tidy|changed)|^\.clang-tidy$'; then
        printf '%s\n' "$files" | grep -E '^(engine|bindings)/.*\.c$' || echo "$0: no C file differs from the branch that this one follows" >&2
        exit
    fi
fi
printf 'engine\nbindings\n'
