#!/bin/sh
# Makes the .deb of a build and looks at what it has and needs. With MOONSHARD_TEST_FULL=1 also makes the wheel, and installs and uses
# both in a bare system.
#
#     tests/lint/deb.sh BUILD
set -eu
build=$1
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

(cd "$build" && cpack -B "$folder") >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
package=$(find "$folder" -maxdepth 1 -name '*.deb')
field() { dpkg-deb -f "$package" "$1"; }

echo "what it is for: $(field Architecture), $(field Version)"
[ "$(field Architecture)" = "$(dpkg --print-architecture)" ]
echo "what it needs: $(field Depends)"
case $(field Depends) in *mpi*) exit 1 ;; *lua-argparse*) ;; *) exit 1 ;; esac
echo "what it suggests: $(field Suggests)"
case $(field Suggests) in *openmpi*mpich*) ;; *) exit 1 ;; esac
dpkg-deb -c "$package" >"$folder/list"
for file in bin/moonshard lib/libmoonshard.so.0 lib/libmoonshard_lua.so.0 lib/libmoonshard_mpi_openmpi.so lib/libmoonshard_mpi_mpich.so \
    lib/lua/5.4/moonshard/core.so share/lua/5.4/moonshard/init.lua share/moonshard/recipes/gpt_bytes.lua \
    share/moonshard/recipes/hooks/dgc.lua share/man/man1/moonshard.1 share/doc/moonshard/copyright include/moonshard/moonshard.h; do
    grep -q " ./usr/$file\( \|$\)" "$folder/list" || { echo "it has no $file"; exit 1; }
done

[ "${MOONSHARD_TEST_FULL:-}" = 1 ] || exit 0
"$here/wheel.sh" "$folder"
"$here/bare.sh" "$folder"
