#!/bin/bash
# Packs what run.sh needs on a machine with a GPU: the program, the tests that are marked "cuda", some of those that are marked
# "cuda-local" (in ranks/), and the libraries that they need but glibc's and NVIDIA's. Tests marked "host-tasks" stay behind: their
# tasks are functions of C, which run over the stand-in and on no GPU. The file "commit" says what it was made from. Called by `cmake --build --preset gpu`; the result is BUILD/bundle.
set -euo pipefail
build=$(cd "$1" && pwd)
bundle=$build/bundle
limit=$((48 * 1024 * 1024))

rm -rf "$bundle" "$build/unpacked"
mkdir -p "$bundle" "$build/unpacked/tests" "$build/unpacked/ranks" \
    "$build/unpacked/programs" "$build/unpacked/lib"
cmake --install "$build" --prefix "$build/unpacked" --strip >/dev/null
# A test of tests/unit is a link to the program of its layer, which is copied once.
take() { # folder, name of the test
    local program
    program=$(basename "$(readlink "$build/tests/unit/$2")")
    [ -e "$build/unpacked/programs/$program" ] ||
        strip -o "$build/unpacked/programs/$program" "$build/tests/programs/$program"
    ln -s "../programs/$program" "$build/unpacked/$1/$2"
}
for source in "$(dirname "$0")"/../unit/*/*.c; do
    marks=$(head -5 "$source" | grep 'ctest:') || continue
    if grep -qE ' cuda( |$)' <<<"$marks" && ! grep -q host-tasks <<<"$marks"; then
        take tests "$(basename "$source" .c)"
    fi
done
for test in comm_collectives comm_direct comm_drop comm_share ddp_hooks ddp_reducer hook_kinds; do
    take ranks "$test"
done

# glibc and NVIDIA's driver must be those of the other machine.
LD_LIBRARY_PATH=$build/unpacked/lib ldd "$build"/unpacked/bin/moonshard "$build"/unpacked/programs/* | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -vE '/(libc|libm|libdl|librt|libpthread|ld-linux[^/]*|libcuda|libnvidia[^/]*)\.so' |
    grep -v "^$build/" | sort -u | xargs -I{} cp -L {} "$build/unpacked/lib/"

# What it was made from, for the results: the commit, and whether there were changes beside it.
source=$(cd "$(dirname "$0")/../.." && pwd)
commit=$(git -C "$source" rev-parse HEAD 2>/dev/null) || commit=unknown
dirty=false
[ -z "$(git -C "$source" status --porcelain 2>/dev/null)" ] || dirty=true
printf '%s\n%s\n' "$commit" "$dirty" >"$build/unpacked/commit"

# One stream: the tests hold the same code.
tar -C "$build/unpacked" -cf - . | xz -T1 -6 --lzma2=dict=128MiB >"$bundle/bundle.tar.xz"
bytes=$(stat -c %s "$bundle/bundle.tar.xz")
printf 'bundle: %s, %d KiB, commit %s%s\n' "$bundle/bundle.tar.xz" $((bytes / 1024)) "$commit" \
    "$([ $dirty = false ] || echo " with changes beside it")"
if [ "$bytes" -gt "$limit" ]; then
    echo "bundle.sh: it is larger than 48 MiB" >&2
    exit 1
fi
