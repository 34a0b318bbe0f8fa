#!/bin/sh
# Fuzzes a target of this folder with libFuzzer, the address and the undefined-behaviour sanitizer.
# Inputs that cover more are kept in build/fuzz/TARGET, and one that fails is written to build/fuzz/.
# It ends with the first failure, or when libFuzzer's own arguments say so.
#
#     tests/fuzz/fuzz.sh host_list [-max_total_time=600 ...]
set -eu
target=$1
shift
root=$(CDPATH='' cd -- "$(dirname "$0")/../.." && pwd -P)
build=$root/build/fuzz
mkdir -p "$build/$target"
cd "$root"
# The target's comment names the files that it needs, and folders for all of their files.
sources=
for name in $(sed -n 's|.*fuzz: \(.*\) \*/|\1|p' "tests/fuzz/$target.c"); do
    if [ -d "$name" ]; then sources="$sources $name/*.c"; else sources="$sources $name"; fi
done
clang -std=c17 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
    -Iengine/include -Iengine -o "$build/$target.run" "tests/fuzz/$target.c" $sources \
    -pthread -ldl -lm -lxxhash
cd "$build"
exec "$build/$target.run" "$@" "$build/$target" "$root/tests/fuzz/seeds/$target"
