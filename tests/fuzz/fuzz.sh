#!/bin/sh
# Fuzzes a target of this folder with libFuzzer, the address and the undefined-behaviour sanitizer.
# Inputs that cover more are kept in build/fuzz/TARGET, and one that fails is written to build/fuzz/.
# It ends with the first failure, or when libFuzzer's own arguments say so. What a target needs of the
# engine beside the files that it names comes from build/release (./moonshard build), unchanged.
#
#     tests/fuzz/fuzz.sh node_list [-max_total_time=600 ...]
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
engine=build/release/lib/libmoonshard
products=$(ldd $engine.so | awk '/dnnl|blas/ { print $3 }')
clang -std=c17 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
    -Iengine/include -Iengine -o "$build/$target.run" "tests/fuzz/$target.c" $sources \
    $engine.a $products -pthread -ldl -lm -lz -lxxhash -ljansson -lpcre2-8 -lutf8proc
cd "$build"
exec "$build/$target.run" "$@" "$build/$target" "$root/tests/fuzz/seeds/$target"
