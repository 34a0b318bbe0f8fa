#!/bin/sh
# Makes the wheel, quick to build and not optimized, and uses it from another folder, without what this checkout has.
#
#     tests/lint/wheel.sh [FOLDER]    keeps it in the folder
set -eu
cd "$(dirname "$0")/../.."
source=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/python"
rm -rf build/wheel
"$folder/python/bin/pip" wheel . --no-deps -w "$folder" -C cmake.build-type=Debug -C cmake.define.MOONSHARD_ISA=portable \
    -C cmake.define.MOONSHARD_WITH_CUDA=OFF >"$folder/log" 2>&1 || { tail -n 40 "$folder/log"; exit 1; }
rm -rf build/wheel
wheel=$(find "$folder" -maxdepth 1 -name '*.whl')
echo "${wheel##*/}, $(stat -c %s "$wheel") bytes"
case $wheel in *-py3-none-manylinux_"$(getconf GNU_LIBC_VERSION | sed 's/.* //; s/[.]/_/')"_"$(uname -m)".whl) ;; *)
    echo "its name has another tag"; exit 1 ;;
esac
"$folder/python/bin/pip" install --quiet "$wheel"
cd "$folder"
place=$(find "$folder/python/lib" -type d -path '*/site-packages/moonshard')
# The program would find the system's as well.
[ -f "$place/share/lua/5.4/argparse.lua" ]
echo "each library is in the wheel, with its licence, or of every system"
! find "$place" -name '*mpi*.so*' | grep .
for library in "$place"/lib/*.so.* "$place/bin/moonshard" "$place/lib/lua/5.4/moonshard/core.so"; do
    # The program's own folder of libraries serves all that it loads.
    LD_LIBRARY_PATH=$place/lib ldd "$library" | sed -n 's/^[[:space:]]*\([^ ]*\) => \([^ ]*\).*/\1 \2/p' |
        grep -v "^\(libc\|libm\|libdl\|librt\|libpthread\|libgcc_s\|libstdc++\)\.so" | grep -v " $place/" >"$folder/others" || continue
    echo "$library loads what is not in the wheel:"
    cat "$folder/others"
    exit 1
done
for part in moonshard libdnnl libgomp libjansson liblua libnettle libpcre2 libutf8proc libxxhash lua-argparse zlib; do
    ls "$place/licences" | grep -q "^$part.*\.txt$" || { echo "there is no licence of $part"; exit 1; }
done
# A program in another environment finds the same libraries.
! LD_DEBUG=libs "$place/bin/moonshard" --version 2>&1 | grep "calling init: " | grep -E 'dnnl|gomp|jansson|OpenCL|nettle' | grep -v "$place/"
echo "the command, on two ranks, with a recipe and a hook of the wheel"
"$folder/python/bin/moonshard" --version
"$folder/python/bin/moonshard" run gpt_bytes -n 2 hook=recipes/hooks/dgc.lua data="$source/README.md" dtype=f32 steps=2 batch=2 length=16 \
    warmup=1 model.layers=1 model.width=16 model.heads=2 run=run >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
[ -f run/model/config.json ]
"$folder/python/bin/python" -m moonshard generate run/model --prompt A --count 4 >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
echo "the wheel works"
[ -z "${1:-}" ] || cp "$wheel" "$1"
